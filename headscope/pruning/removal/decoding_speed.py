"""How fast a decoder writes: single steps from a cache that is filled already."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.model.interface import suppress_warnings
from headscope.model.threads import threads_for_pass
from headscope.pruning.model_inputs import vocabularies
from headscope.pruning.removal.timing import Timing, in_turns, wait_for_device

FILLED, TEXTS, STEPS = 256, 8, 16
"""Tokens in the cache (fewer where the model has fewer positions), texts at once, and tokens written to each."""


def decoding_speed(before: Checkpoint, after: Checkpoint, *, rounds: int) -> Timing | None:
    """Seconds of `STEPS` steps of greedy decoding of `TEXTS` texts; of models of one side with a cache.

    The models take turns. Filling the cache is not timed. None for architectures that hand no cache on, or one that
    cannot be copied for several texts.
    """
    filled = max(1, min(FILLED, (before.limit or FILLED) - STEPS - 1))
    both = (before, after)
    try:
        caches = [_filled(checkpoint, filled) for checkpoint in both]
        for checkpoint, start in zip(both, caches, strict=True):
            _steps(checkpoint, start)  # the first does not count
    except Exception:  # whatever an architecture's own code raises (RecurrentGemma)
        return None
    old, new = (partial(_steps, checkpoint, start) for checkpoint, start in zip(both, caches, strict=True))
    return in_turns(f"decoding after {filled} tokens", TEXTS, old, new, rounds, tokens=TEXTS * STEPS)


def _filled(checkpoint: Checkpoint, length: int) -> Any:
    """The cache of `TEXTS` texts of random tokens, all the same."""
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabularies(checkpoint)[0], (1, length), generator=noise).to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.inference_mode(), suppress_warnings():
        cache = checkpoint.model(input_ids=ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(TEXTS)
    return cache


def _steps(checkpoint: Checkpoint, start: Any) -> float:
    """Seconds of all steps from a copy of a cache."""
    model: Any = checkpoint.model
    tokens = torch.zeros(TEXTS, 1, dtype=torch.long, device=checkpoint.device)
    with eval_mode(model), torch.inference_mode(), suppress_warnings(), threads_for_pass(model, TEXTS):
        cache = copy.deepcopy(start)
        wait_for_device()
        began = time.perf_counter()
        for _ in range(STEPS):
            logits: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(dim=-1)
        wait_for_device()
        return time.perf_counter() - began
