"""What llama.cpp computes of a file, along greedy continuations of texts, against what the model does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.formats.finite import refuse_overflow
from headscope.model.nonfinite import is_finite
from headscope.pruning.engines.base import refuse_difference
from headscope.pruning.engines.gguf import llama_cpp
from headscope.pruning.engines.gguf.vocabulary import Vocabulary
from headscope.pruning.model_inputs import InputTexts

QUANTITY = "log-probabilities differ by"
PROMPTS, STEPS, TOP, TEXTS, LONGEST = 3, 8, 1000, 8, 48
LIMIT = {torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Largest difference of log-probabilities as a share of the largest (or of 1), by the type of the matrices."""
QUANTIZED = 0.1
"""How far quantization may move them, as a share of their range: 0.01 to 0.07 was measured on random models."""
FULL = 1e-5
"""The same in float32: llama.cpp sums in another order, 2e-7 to 2e-6 was measured on random models."""


@dataclass(frozen=True)
class Continued:
    """A prompt with the first 0, 1, … greedy tokens of a model, and log-probabilities [steps V] of what follows."""

    prompts: list[list[int]]
    rows: Tensor


@dataclass(frozen=True)
class Asked:
    """A file, its vocabulary, and the continuations that llama.cpp is asked about."""

    path: Path
    vocabulary: Vocabulary
    continued: list[Continued]

    def answer(self, texts: list[str] | None = None) -> llama_cpp.Answer:
        """What llama.cpp says of them, and how it splits texts."""
        prompts = [prompt for continuation in self.continued for prompt in continuation.prompts]
        top = min(TOP, len(self.vocabulary.tokens))
        return llama_cpp.ask(
            llama_cpp.Request(
                file=str(self.path), prompts=prompts, texts=texts or [], top=top, said=self.vocabulary.letter
            )
        )


@dataclass(frozen=True)
class Proof:
    """The largest difference of log-probabilities (None: nothing was compared), what is let pass, and remarks."""

    difference: float | None = None
    limit: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The largest difference of log-probabilities, the largest of them, and on how many steps both say the same.

    `range` is how far apart the log-probabilities of one step are.
    """

    difference: float
    largest: float
    range: float
    same: int
    steps: int

    @property
    def greedy(self) -> str:
        """A line on the greedy choices."""
        return f"the likeliest token is the same in llama.cpp at {self.same} of {self.steps} steps"


def proved(checkpoint: Checkpoint, asked: Asked, data: InputTexts, *, dtype: torch.dtype) -> Proof:
    """What llama.cpp computes with matrices of `dtype`; CheckpointError where that is something else."""
    texts = list(data.sources[:TEXTS]) if asked.vocabulary.splits_text else []
    answer = asked.answer(texts)
    measured = compared(asked.continued, answer)
    if not measured.steps:
        return Proof(notes=("llama.cpp runs it, but gave no log-probabilities",))
    limit = LIMIT.get(dtype, FULL) * max(1.0, measured.largest)
    refuse_difference(measured.difference, limit, "llama.cpp", QUANTITY)
    notes = [measured.greedy]
    if texts:
        ids = [checkpoint.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[attr-defined]
        same = sum(a == b for a, b in zip(answer.ids, ids, strict=True))
        notes.append(f"llama.cpp splits {same} of {len(texts)} sentences into the same tokens")
    return Proof(measured.difference, limit, tuple(notes))


def moved(asked: Asked, proof: Proof) -> Proof:
    """How far quantization moves log-probabilities; what the file holds was proved before it was quantised."""
    measured = compared(asked.continued, asked.answer())
    if not measured.steps:
        return proof
    limit = QUANTIZED * measured.range
    if not measured.difference <= limit:
        raise CheckpointError(
            f"quantization moves log-probabilities by {measured.difference:.1e}, and at most {limit:.1e} is let pass "
            "(a tenth of their range); nothing was saved. Leave out --quantize"
        )
    before = f"before quantization log-probabilities differed by {proof.difference or 0.0:.1e}"
    return Proof(measured.difference, limit, (before, f"quantised, {measured.greedy}", *proof.notes[1:]))


def compared(continued: list[Continued], answer: llama_cpp.Answer) -> Comparison:
    """What llama.cpp says along a model's greedy continuations, and what the model says.

    CheckpointError where llama.cpp computes NaN or infinite numbers.
    """
    difference, largest, same, steps = 0.0, 0.0, 0, 0
    rows = torch.cat([continuation.rows for continuation in continued])
    for found, row in zip(answer.log_probabilities, rows, strict=True):
        if not found:
            continue
        if not all(map(math.isfinite, found.values())):
            raise CheckpointError(
                "llama.cpp computes NaN or infinite numbers with this file, and the model does not: it rounds to the "
                "type of the matrices before it multiplies, in which they are too large; nothing was saved. Save the "
                "model in bfloat16 or float32 first"
            )
        ids, values = torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)
        difference = max(difference, float((values - row[ids]).abs().max()))
        largest = max(largest, float(row[ids].abs().max()))
        same += int(ids[values.argmax()]) == int(row.argmax())
        steps += 1
    return Comparison(difference, largest, float((rows.amax(1) - rows.amin(1)).max()), same, steps)


def continuations(checkpoint: Checkpoint, data: InputTexts, context: int) -> list[Continued]:
    """Greedy continuations of the first tokens of a few texts that llama.cpp has room for in a `context`.

    NumericalError where the model computes NaN or infinite numbers.
    """
    most = min(LONGEST, context) - 1  # llama.cpp keeps one token of the context for what follows
    steps = min(STEPS, most)
    continued = []
    for prompt in _prompts(data, most - steps + 1):
        ids, rows = torch.tensor([prompt], device=checkpoint.device), []
        for _ in range(steps):
            rows.append(_last_logits(checkpoint, ids).double().log_softmax(-1).cpu())
            ids = torch.cat([ids, rows[-1].argmax().to(ids).view(1, 1)], dim=1)
        whole = ids[0].tolist()
        continued.append(Continued([whole[: len(prompt) + step] for step in range(steps)], torch.stack(rows)))
    return continued


def _last_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Logits [V] of what follows ids [1 t]."""

    def run() -> Any:
        with torch.no_grad():
            return checkpoint.model(input_ids=ids, use_cache=False).logits[0, -1]

    logits: Tensor = run()
    if not is_finite(logits, masked=True):
        refuse_overflow(checkpoint, run)
    return logits


def _prompts(data: InputTexts, length: int) -> list[list[int]]:
    """The first `length` tokens of a few texts, without padding."""
    rows = [
        ids[mask.bool()].tolist()
        for batch in (data.feeds[0], data.feeds[-1])
        for ids, mask in zip(batch.given["input_ids"], batch.given["attention_mask"], strict=True)
    ]
    return [row[:length] for row in rows[-PROMPTS:]]
