"""What `gradient` costs beside a minimal loop of hooks that computes the same numbers.

Run: python benchmarks/gradient.py SOURCE [--checkpoint DIR] [--sentences N] [--rounds N] [--attention eager|sdpa]

The loop is what a user would write for one BERT: parameters frozen, the inputs of the output projections kept by
hooks, the norm of the mean-pooled state differentiated once per batch, context · gradient summed per head and
sentence. Both sides read the same batches in the same process, in alternation; the best round of each side counts,
in CPU seconds. The analysed side includes reading off, sums, bootstrap and report. The raw means must agree. Also
timed: forward passes alone, and all importances of one pass together. Limit: 1.05.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.assets import demo_checkpoint
from headscope.data.batching import BatchingOptions, batches
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.base import RunOptions
from headscope.engine.plan import analyze, choose_analyses
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.model.interface import through_attend
from headscope.results.study import Study

LIMIT = 1.05
TOGETHER = ("gradient", "taylor", "magnitude", "contribution")


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds (of all threads)."""
    start = time.process_time()
    work()
    return time.process_time() - start


def forward(checkpoint: Checkpoint, corpus: Corpus, tokens: int) -> None:
    """Forward passes without gradients."""
    with torch.inference_mode():
        for batch in batches(corpus, checkpoint, tokens=tokens, limit=512):
            checkpoint.forward(batch)


def hooks(checkpoint: Checkpoint, corpus: Corpus, tokens: int) -> Tensor:
    """Mean over sentences of |∂‖mean state‖/∂ξ| for every head [layer head]."""
    model: Any = checkpoint.model
    heads = model.config.num_attention_heads
    contexts: list[Tensor] = []

    def keep(module: object, inputs: tuple[Tensor, ...]) -> None:
        if not inputs[0].requires_grad:
            inputs[0].requires_grad_()
        contexts.append(inputs[0])

    layers = model.encoder.layer
    handles = [layer.attention.output.dense.register_forward_pre_hook(keep) for layer in layers]
    model.requires_grad_(False)
    total, count = torch.zeros(len(layers), heads), 0
    for batch in batches(corpus, checkpoint, tokens=tokens, limit=512):
        contexts.clear()
        real = batch.source.real
        states = model(input_ids=batch.source.ids, attention_mask=real.long()).last_hidden_state
        mean = (states * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)
        gradients = torch.autograd.grad(mean.norm(dim=-1).sum(), contexts)
        for layer, (context, gradient) in enumerate(zip(contexts, gradients, strict=True)):
            total[layer] += (context * gradient).unflatten(-1, (heads, -1)).sum(dim=(1, 3)).abs().sum(dim=0).detach()
        count += len(real)
    model.requires_grad_(True)
    for handle in handles:
        handle.remove()
    return total / count


def study(checkpoint: Checkpoint, corpus: Corpus, tokens: int, names: tuple[str, ...]) -> Study:
    """The package's analyses."""
    return analyze(
        checkpoint,
        corpus,
        analyses=choose_analyses(only=names),
        options=RunOptions(),
        batching=BatchingOptions(tokens=tokens),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=BatchingOptions().tokens)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.checkpoint or demo_checkpoint(), device="cpu")
    corpus = open_corpus(args.source, max_sentences=args.sentences)
    sides: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(checkpoint, corpus, args.tokens),
        "hooks": lambda: hooks(checkpoint, corpus, args.tokens),
    }
    times: dict[str, list[float]] = {}
    with through_attend(checkpoint.model, implementation=args.attention):
        expected = hooks(checkpoint, corpus, args.tokens)
        scores = study(checkpoint, corpus, args.tokens, ("gradient",)).tables["gradient"].sort_values(["layer", "head"])
        difference = (torch.tensor(scores.raw.to_numpy()).view_as(expected) / expected - 1).abs().max().item()
        sides["gradient"] = lambda: study(checkpoint, corpus, args.tokens, ("gradient",))
        sides["together"] = lambda: study(checkpoint, corpus, args.tokens, TOGETHER)
        for _ in range(args.rounds):
            for name, work in sides.items():
                times.setdefault(name, []).append(seconds(work))
    best = {name: min(runs) for name, runs in times.items()}
    print(f"{corpus.count} sentences, {args.threads} thread(s), {args.attention}, torch {torch.__version__}")
    print(", ".join(f"{name} {value:.2f} s" for name, value in best.items()) + f"; largest difference {difference:.1e}")
    print(f"gradient / hooks: {best['gradient'] / best['hooks']:.3f} (limit {LIMIT})", end="; ")
    print(f"hooks / forward: {best['hooks'] / best['forward']:.2f}", end="; ")
    print(f"{' + '.join(TOGETHER)} / hooks: {best['together'] / best['hooks']:.3f}")


if __name__ == "__main__":
    main()
