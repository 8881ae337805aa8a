"""Continuations of a prompt and the attention of heads, by full passes without a cache (decoders.md §1)."""

from typing import Any

import torch

from headscope.formats.base import Checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import Site
from headscope.model.taps import capture

Positions = dict[tuple[int, int], int]


def continuation(checkpoint: Checkpoint, prompt: list[int], steps: int) -> list[tuple[int, Positions]]:
    """(token, most attended position by layer and head) of every step."""
    model: Any = checkpoint.model
    ids, tokens = list(prompt), []
    for _ in range(steps):
        row = torch.tensor([ids])
        with torch.no_grad(), capture(model, ("weights",)) as record:
            logits = model(None, row) if isinstance(checkpoint, TransformerCheckpoint) else model(input_ids=row).logits
        peaks = {}
        for (site, layer), heads in checkpoint.layout.items():
            assert site is Site.DECODER_SELF
            for head in range(heads):
                weights = record[site, layer]["weights"][0, head, -1].tolist()
                peaks[layer, head] = weights.index(max(weights))
        token = int(logits[0, -1].argmax())
        tokens.append((token, peaks))
        ids.append(token)
    return tokens


def scores(prompt: list[int], start: int, end: int, steps: list[tuple[int, Positions]]) -> dict[str, dict[Any, float]]:
    """Of every head: the share of the needle that it copies, and what the published program adds up."""
    paper: dict[Any, set[int]] = {}
    program: dict[Any, int] = {}
    for token, peaks in steps:
        for head, position in peaks.items():
            paper.setdefault(head, set())
            program.setdefault(head, 0)
            if start <= position < end and prompt[position] == token:
                paper[head].add(position)
                program[head] += 1
    size = end - start
    return {
        "paper": {head: len(positions) / size for head, positions in paper.items()},
        "program": {head: count / size for head, count in program.items()},
    }
