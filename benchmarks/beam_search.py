"""CPU time of headscope's beam search, as a multiple of Hugging Face's `generate` on the same converted model.

Run: python benchmarks/beam_search.py CKPT SOURCE [--beam N] [--sentences N] [--batch N] [--rounds N] [--threads N]

CKPT is any checkpoint that `headscope convert --to huggingface` takes. Both sides search the same batches of
the same process, in alternation, by the same rule (fairseq's: done when `beam` hypotheses have ended); the best
round of each side counts, in CPU seconds of all threads. The translations must be the same. Limit: 1.0.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from headscope.config import Companions
from headscope.data.encoded import Side, pad_side
from headscope.export.convert import convert
from headscope.files.reading import read_lines
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.beams import search

LIMIT = 1.0


def clock(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """CPU seconds, of all threads, of `work`, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def batches(checkpoint: TransformerCheckpoint, path: Path, *, sentences: int, size: int) -> list[Side]:
    """Sentences sorted by length, `size` a batch."""
    lines = list(islice(read_lines(path), sentences))
    sequences = sorted(checkpoint.encode(lines, side="source", limit=512), key=lambda sequence: len(sequence.ids))
    return [pad_side(sequences[first : first + size]) for first in range(0, len(sequences), size)]


def ours(checkpoint: TransformerCheckpoint, batch: Side, *, beam: int, longest: int) -> list[list[int]]:
    """Headscope's best hypotheses: ids, with the end token."""
    target = checkpoint.target
    assert target is not None
    config = replace(checkpoint.search, rule="fairseq", beam=beam, power=1.0, spread=None)
    config = replace(config, max_ratio=0.0, max_extra=longest, min_ratio=0.0, min_extra=1)
    mask = None if bool(batch.real.all()) else batch.real
    special: dict[str, Any] = {"start": target.start, "end": target.end, "pad": target.pad}
    beams = search(checkpoint.model, batch.ids, mask, config=config, **special)
    return [list(best[0].ids) for best in beams]


def theirs(model: Any, batch: Side, *, beam: int, longest: int, end: int, pad: int | None) -> list[list[int]]:
    """The best hypotheses of `generate`: ids, with the end token."""
    output = model.generate(
        batch.ids.masked_fill(~batch.real, pad or 0),
        attention_mask=batch.real.long(),
        num_beams=beam,
        do_sample=False,
        length_penalty=1.0,
        early_stopping=True,
        max_new_tokens=longest + 1,
        min_new_tokens=2,
    )
    rows = [row[1:] for row in output.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("source", type=Path)
    parser.add_argument("--dicts", type=Path, default=None)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--longest", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.checkpoint, device="cpu", companions=Companions(dicts=args.dicts))
    if not isinstance(checkpoint, TransformerCheckpoint) or checkpoint.target is None:
        raise SystemExit(f"{args.checkpoint} has no vocabularies; name their folder with --dicts")
    with tempfile.TemporaryDirectory() as folder:
        convert(checkpoint, Path(folder) / "model", to="huggingface")
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "model").eval()
    work = batches(checkpoint, args.source, sentences=args.sentences, size=args.batch)
    options = {"beam": args.beam, "longest": args.longest}
    ends: dict[str, Any] = {"end": checkpoint.target.end, "pad": checkpoint.target.pad}

    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(args.rounds + 1):
        our_time, our_ids = clock(lambda: [ids for batch in work for ids in ours(checkpoint, batch, **options)])
        their_time, hf_ids = clock(lambda: [ids for batch in work for ids in theirs(model, batch, **options, **ends)])
        if number:  # the first round warms up
            seconds["ours"].append(our_time)
            seconds["theirs"].append(their_time)
    matches = sum(a == b for a, b in zip(our_ids, hf_ids, strict=True))
    ratio = min(seconds["ours"]) / min(seconds["theirs"])
    rule = f"beam {args.beam}, batches of {args.batch}, {args.threads} thread(s)"
    print(f"{checkpoint.model_type}, {len(our_ids)} sentences, {rule}, torch {torch.__version__}, {platform.machine()}")
    print(f"transformers {transformers.__version__} generate {min(seconds['theirs']):.2f} s CPU, ", end="")
    print(f"headscope {min(seconds['ours']):.2f} s; same translations: {matches} of {len(our_ids)}")
    ratios = [our_time / their_time for our_time, their_time in zip(seconds["ours"], seconds["theirs"], strict=True)]
    print(f"ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, limit {LIMIT})")


if __name__ == "__main__":
    main()
