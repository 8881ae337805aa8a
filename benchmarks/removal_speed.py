"""How much of the speed that its saved operations promise a model without some heads has.

Run: python benchmarks/removal_speed.py [--checkpoint DIR] [--shares 0.25,0.5,0.75] [--batch 64] [--rounds 9]

The random share of heads goes, layer by layer a different number. Whole and shrunk model take turns (and turns in
being the first) at forward passes over the same batch of `--batch` sentences, so of equal lengths, with the model's own
attention; the median of each side's CPU seconds counts. Promised is the ratio of floating point operations, measured
the ratio of times. Limit: 0.85.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path

import torch

from headscope.assets import demo_checkpoint
from headscope.config import Companions
from headscope.evaluation.model_inputs import read_input_texts
from headscope.export.base import choose_export
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.size import count_flops
from headscope.heads import HeadId, all_heads
from headscope.model.forward import ModelInputs, outputs
from headscope.model.removal_plan import plan_removal
from headscope.pruning.removal.verify import repeat_rows, time_interleaved

LIMIT = 0.85


def sample_heads(checkpoint: Checkpoint, share: float) -> list[HeadId]:
    """A random share of all heads."""
    heads = list(all_heads(checkpoint.layout))
    return random.Random(0).sample(heads, round(share * len(heads)))


def seconds(model: torch.nn.Module, inputs: ModelInputs) -> float:
    """CPU seconds of one pass."""
    start = time.process_time()
    outputs(model, inputs)
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--shares", default="0.25,0.5,0.75")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--source", type=Path, default=None)
    parser.add_argument("--dicts", type=Path, default=None)
    parser.add_argument("--longest", action="store_true", help="the longest sentences instead of middling ones")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    companions = Companions(dicts=args.dicts)
    checkpoint = open_checkpoint(args.checkpoint or demo_checkpoint(), device="cpu", companions=companions)
    feeds = read_input_texts(checkpoint, args.source, None, sentences=args.sentences).feeds
    inputs = repeat_rows(feeds[-1:] if args.longest else feeds, args.batch)
    tokens = next(iter(inputs.arguments.values())).shape[1]
    print(f"{checkpoint.model_type}, {args.batch} sentences of {tokens} pieces, {args.threads} thread(s)")
    for share in map(float, args.shares.split(",")):
        removal = plan_removal(checkpoint.attention_sites, sample_heads(checkpoint, share))
        shrunk = choose_export(None, checkpoint).build(checkpoint, removal)
        old, new = (partial(seconds, model, inputs) for model in (checkpoint.model, shrunk.model))
        timing = time_interleaved("forward", args.batch, old, new, args.rounds)
        flops_ratio = count_flops(checkpoint, inputs)["all"] / count_flops(shrunk, inputs)["all"]
        print(
            f"{share:.0%} of heads removed: promised {flops_ratio:.3f}, measured {timing.speedup:.3f} "
            f"({timing.least:.3f} to {timing.most:.3f}), "
            f"share {timing.speedup / flops_ratio:.3f} (limit {LIMIT}); {timing.before:.3f} s to {timing.after:.3f} s"
        )


if __name__ == "__main__":
    main()
