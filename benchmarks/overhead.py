"""What all default analyses together cost, as a multiple of the model's own eager forward pass.

Run: python benchmarks/overhead.py SOURCE [--target FILE] [--alignments FILE] [--checkpoint DIR] [--sentences N]
     [--rounds N] [--threads N] [--only NAMES] [--library]

Both sides read the same batches in the same process, in alternation; the best round of each side counts, in
CPU seconds and in wall seconds. The analysed side includes reading off, sums, bootstrap and reports, and
the one-off look at the parameters. Both sides have the settings of the process that headscope's commands have
(`headscope.cli.main.set_environment`); with `--library` neither has, as in a program that imports headscope.
Limits: 1.3 with one thread, 1.5 with more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.cli.main import set_environment

if TYPE_CHECKING:
    from headscope.data.corpus import Corpus
    from headscope.formats.base import Checkpoint

LIMITS = {1: 1.3}
LIMIT = 1.5


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds (of all threads) and wall seconds that `work` takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def forward(checkpoint: Checkpoint, corpus: Corpus, tokens: int) -> None:
    """The model's own eager forward over the corpus."""
    import torch

    from headscope.data.batching import batches
    from headscope.model.interface import through_attend

    with torch.inference_mode(), through_attend(checkpoint.model, implementation="eager"):
        for batch in batches(corpus, checkpoint, tokens=tokens, limit=512):
            checkpoint.forward(batch)


def compare_times(args: argparse.Namespace) -> None:
    """Measure and print."""
    import torch

    from headscope.assets import demo_checkpoint
    from headscope.data.batching import BatchingOptions
    from headscope.data.corpus import open_corpus
    from headscope.engine.base import RunOptions
    from headscope.engine.frequencies import token_frequencies
    from headscope.engine.plan import analyze, choose_analyses
    from headscope.formats.base import open_checkpoint

    torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.checkpoint or demo_checkpoint(), device="cpu")
    corpus = open_corpus(args.source, target=args.target, max_sentences=args.sentences)
    extra = {"alignments": args.alignments} if args.alignments else {}
    options = RunOptions(**token_frequencies(checkpoint, corpus, limit=512), analysis_options=extra)
    analyses = choose_analyses(only=tuple(filter(None, args.only.split(","))))
    tokens = args.tokens or BatchingOptions().tokens

    def study() -> None:
        analyze(checkpoint, corpus, analyses=analyses, options=options, batching=BatchingOptions(tokens=tokens))

    plain, with_study = [], []
    forward(checkpoint, corpus, tokens)
    study()
    for _ in range(args.rounds):
        plain.append(seconds(lambda: forward(checkpoint, corpus, tokens)))
        with_study.append(seconds(study))
    settings = "a library" if args.library else "a command"
    print(
        f"{checkpoint.model_type}, {corpus.count} sentences, {args.threads} thread(s), "
        f"torch {torch.__version__}, as {settings}"
    )
    for clock, forwards, studies in zip(
        ("CPU", "wall"), zip(*plain, strict=True), zip(*with_study, strict=True), strict=True
    ):
        ratio = min(studies) / min(forwards)
        print(f"{clock}: eager forward {min(forwards):.2f} s, with analyses {min(studies):.2f} s", end="; ")
        ratios = [second / first for first, second in zip(forwards, studies, strict=True)]
        limit = LIMITS.get(args.threads, LIMIT)
        print(f"ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, limit {limit})")


def main() -> None:
    """Read the options; measure within the settings asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--alignments", type=Path, default=None)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=None, help="of a batch; default: headscope's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--library", action="store_true", help="leave the settings of the process alone")
    args = parser.parse_args()
    if not args.library:
        set_environment()  # torch is imported after it: OpenMP reads it then
    compare_times(args)


if __name__ == "__main__":
    main()
