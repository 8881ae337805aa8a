"""Peak memory and time of `analyze` against the length of a text, beside those of the model's own forward pass.

Run: python benchmarks/long_context.py [--lengths N …] [--modes NAME …] [--threads N] [--out FILE.csv]

The model is a Llama of random weights, 4 layers of 8 heads in 2 groups, width 64 a head; the text is one line of words
whose frequencies follow Zipf's law, so that tokens recur as they do in natural text. Every measurement is a process of
its own: "forward" is the model with SDPA, "streamed" and "dense" are all default analyses with that --attention,
"eager" is the model with output_attentions=True. Peak memory is the largest resident set; what importing and
loading take is measured too ("idle"). Times are those of the passes and the analyses, without importing.

Limits at 16,384 tokens: memory 1.3 times and time 3 times those of the forward pass. Memory grows with an exponent of
at most 1.1 from 4,096 to 32,768 tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
MODES = ("idle", "forward", "streamed", "dense", "eager")
SQUARE = ("dense", "eager")  # which hold matrices of weights
LONGEST_SQUARE = 4096
VOCABULARY, SEED = 4001, 3
COLUMNS = ("tokens", "mode", "peak_mib", "seconds", "cpu_seconds")


def build_checkpoint(length: int, implementation: str) -> Any:
    """The model with a tokenizer of whole words."""
    import transformers

    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2 * length,
    )
    config._attn_implementation = implementation
    model = transformers.LlamaModel(config).eval()
    return HuggingFaceCheckpoint(path="random Llama", model=model, tokenizer=whole_words(), digest=None)


def whole_words() -> Any:
    """A tokenizer of the words w1, w2 and so on."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<s>")


def words(length: int) -> list[int]:
    """Ids of a text of so many words, drawn by Zipf's law."""
    noise = torch.Generator().manual_seed(SEED)
    weights = 1 / torch.arange(1, VOCABULARY, dtype=torch.float64)
    return (torch.multinomial(weights, length, replacement=True, generator=noise) + 1).tolist()


def one_line(ids: list[int]) -> Any:
    """A corpus of one text."""
    from headscope.data.corpus import Corpus, Sentence

    line = Sentence(0, " ".join(f"w{number}" for number in ids), None, None)
    return Corpus("zipf", 1, "0" * 40, lambda: iter([line]), has_target=False, has_parses=False)


def measure(mode: str, length: int) -> tuple[float, float]:
    """Wall and CPU seconds of one mode, in this process."""
    from headscope.config.analyze import AnalyzeOptions
    from headscope.engine.study import measure_heads
    from headscope.model.discovery import find_attention

    checkpoint = build_checkpoint(length, "eager" if mode == "eager" else "sdpa")
    ids = words(length)
    corpus = one_line(ids)
    find_attention(checkpoint.model)  # the probe belongs to loading
    wall, cpu = time.perf_counter(), time.process_time()
    if mode in ("forward", "eager"):
        with torch.inference_mode():
            checkpoint.model(torch.tensor([ids]), use_cache=False, output_attentions=mode == "eager")
    elif mode != "idle":
        options = AnalyzeOptions(max_length=length, batch_tokens=length, attention=mode)  # type: ignore[arg-type]
        measure_heads(checkpoint, corpus, options)
    return time.perf_counter() - wall, time.process_time() - cpu


def run_in_process(mode: str, length: int, threads: int) -> dict[str, Any]:
    """One row of the table, from a process of its own."""
    command = [sys.executable, __file__, "--measure", mode, "--lengths", str(length), "--threads", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{mode} at {length} tokens ended with status {status}")
    seconds, cpu_seconds = json.loads(output)
    peak = usage.ru_maxrss / 1024
    return dict(zip(COLUMNS, (length, mode, round(peak), round(seconds, 2), round(cpu_seconds, 2)), strict=True))


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Ratios to the forward pass, and the exponents of growth."""
    row_of = {(row["mode"], row["tokens"]): row for row in rows}
    lines = []
    for (mode, length), row in row_of.items():
        forward = row_of.get(("forward", length))
        if mode not in ("idle", "forward") and forward:
            memory, cpu = row["peak_mib"] / forward["peak_mib"], row["cpu_seconds"] / forward["cpu_seconds"]
            lines.append(f"{mode} at {length}: memory {memory:.2f} × forward, CPU time {cpu:.2f} × forward")
    ends = [row_of.get(("streamed", length)) for length in (4096, 32768)]
    if all(ends):
        low, high = (row["peak_mib"] for row in ends if row)
        lines.append(f"memory grows from 4,096 to 32,768 tokens with the exponent {math.log(high / low, 8):.2f}")
        idle = [row_of[mode]["peak_mib"] for mode in (("idle", 4096), ("idle", 32768)) if mode in row_of]
        if len(idle) == 2:
            above = math.log((high - idle[1]) / (low - idle[0]), 8)
            lines.append(f"without what is there when idle: {above:.2f}")
    return lines


def write_table(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=MODES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        print(json.dumps(measure(args.measure, args.lengths[0])))
        return
    print(f"{date.today()}, seed {SEED}, torch {torch.__version__}, {platform.machine()}, {args.threads} threads")
    rows = []
    for length in args.lengths:
        for mode in args.modes:
            if mode not in SQUARE or length <= LONGEST_SQUARE:
                rows.append(run_in_process(mode, length, args.threads))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print("\n".join(report(rows)))
    if args.out:
        write_table(args.out, COLUMNS, rows)


if __name__ == "__main__":
    main()
