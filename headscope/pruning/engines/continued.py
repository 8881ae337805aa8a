"""A folder that transformers opened again, held against the model that it was made of, along greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from headscope.model.forward import with_cache
from headscope.model.interface import suppress_warnings
from headscope.pruning.engines.base import FULL, LIMIT, QUANTITY, EngineFile, refuse_difference
from headscope.pruning.model_inputs import InputTexts, prompts

STEPS, PROMPT = 32, 8


@dataclass(frozen=True)
class Continued:
    """The largest difference of log-probabilities, what is let pass, and how many texts go on the same."""

    difference: float
    limit: float
    same: int
    prompts: int

    @property
    def greedy(self) -> str:
        """A line on greedy text."""
        return f"transformers, with its cache, continues {self.same} of {self.prompts} texts greedily as the model does"

    def file(self, export: str, folder: str, *, filled: int, **more: Any) -> EngineFile:
        """What is said of a folder of that export, `filled` up with so many heads of zeros."""
        return EngineFile(
            export=export,
            file=folder,
            runtime=f"transformers {transformers.__version__}",
            quantity=QUANTITY,
            difference=self.difference,
            limit=self.limit,
            notes=(self.greedy, *([f"filled up with {filled} heads of zeros"] if filled else [])),
            **more,
        )


def proved(model: Any, again: Any, data: InputTexts) -> Continued:
    """What `again` computes of 32 greedy tokens of `model`, at once and token by token through its cache.

    CheckpointError where that is something else.
    """
    difference, largest, same, starts = 0.0, 1.0, 0, prompts(data, PROMPT)
    for prompt in starts:
        start = torch.tensor([prompt], device=model.device)
        ids = _greedy(model, start)
        wanted = _log_probabilities(model, ids)  # [n V]
        largest = max(largest, float(wanted.abs().max()))
        for found in (_log_probabilities(again, ids), _through_cache(again, ids)):
            difference = max(difference, float((found - wanted).abs().max()))
        same += torch.equal(_greedy(again, start), ids)
    limit = LIMIT.get(model.dtype, FULL) * largest
    refuse_difference(difference, limit, "transformers", QUANTITY)
    return Continued(difference, limit, same, len(starts))


def _greedy(model: Any, start: Tensor) -> Tensor:
    """Ids [1 n] with up to 32 greedy tokens behind a start, as far as the model has positions."""
    steps = min(STEPS, model.config.max_position_embeddings - start.shape[1])
    with torch.no_grad(), suppress_warnings():
        ids: Tensor = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=steps, min_new_tokens=steps
        )
    return ids


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def _through_cache(model: Any, ids: Tensor) -> Tensor:
    cache, rows = None, []
    with torch.no_grad():
        for step in ids.split(1, dim=1):
            out, cache = with_cache(model, cache, input_ids=step)
            rows.append(out.logits[0])
    return torch.cat(rows).double().log_softmax(-1)
