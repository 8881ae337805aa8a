"""What relevances cost by backward rule sets, as multiples of the model's own eager forward pass.

Run: python benchmarks/relevance.py SOURCE [--checkpoint DIR] [--sentences N] [--rounds N]

All sides read the same batches in the same process, in alternation; the best round of each counts, in CPU seconds. The
forward pass is without gradients; explanations include it, the recording, the backward passes, and reading off raw and
absolute relevances and the shares of values and of queries and keys. Limits: 2.3 for one rule set, 4.5 for three from
one forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from headscope.assets import demo_checkpoint
from headscope.data.batching import batches
from headscope.data.corpus import open_corpus
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.model.interface import through_attend
from headscope.relevance.backward import Backward, explain_backward
from headscope.relevance.rulesets import RULE_SETS

LIMITS = {1: 2.3, 3: 4.5}
SIDES = (("gradient",), ("cp",), ("attnlrp",), ("epsilon",), ("gradient", "cp", "attnlrp"))


def forward(checkpoint: Checkpoint, corpus: Sequence[Batch]) -> None:
    """The model's own eager forward over the corpus, up to the explained outputs."""
    with torch.inference_mode(), through_attend(checkpoint.model, implementation="eager"):
        for batch in corpus:
            (checkpoint.states if checkpoint.predicts == "nothing" else checkpoint.logits)(batch)


def explain(checkpoint: Checkpoint, corpus: Sequence[Batch], names: Sequence[str]) -> None:
    """Relevances of every head by these rule sets."""
    rule_sets = [rule_set for rule_set in map(RULE_SETS.get, names) if isinstance(rule_set, Backward)]
    for batch in corpus:
        explain_backward(checkpoint, batch, rule_sets, target="top1", steps="sum")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=592)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(args.checkpoint or demo_checkpoint(), device="cpu")
    text = open_corpus(args.source, target=args.target, max_sentences=args.sentences)
    corpus = list(batches(text, checkpoint, tokens=args.tokens, limit=512))
    works: dict[tuple[str, ...], Callable[[], None]] = {(): lambda: forward(checkpoint, corpus)}
    for names in SIDES:
        works[names] = partial(explain, checkpoint, corpus, names)
    best = dict.fromkeys(works, float("inf"))
    for number in range(args.rounds + 1):
        for side, work in works.items():
            start = time.process_time()
            work()
            if number:  # the first round warms up
                best[side] = min(best[side], time.process_time() - start)
    print(f"{checkpoint.model_type}, {text.count} sentences, torch {torch.__version__}, CPU seconds")
    print(f"eager forward: {best[()]:.2f} s")
    for names in SIDES:
        limit = "" if "epsilon" in names else f" (limit {LIMITS[len(names)]})"
        print(f"{' + '.join(names)}: {best[names]:.2f} s, ratio {best[names] / best[()]:.2f}{limit}")


if __name__ == "__main__":
    main()
