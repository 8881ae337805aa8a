"""Memory and time of `analyze` on an accelerator against the length of a text, beside the model's own forward pass.

Run: python benchmarks/gpu.py [--lengths N …] [--modes NAME …] [--only NAMES] [--repeats N] [--out FILE.csv]
         [--no-tasks]
     python benchmarks/gpu.py --device cpu --tiny    (a small model on any machine: that it runs)

The model has the sizes of Llama 3.1 8B (32 layers of 32 heads in 8 groups) and random weights in bfloat16, without its
output layer, whose logits of 131,072 tokens would take more memory than all else. "forward" is the model with SDPA,
"streamed" are the default analyses (or those that --only names) with --attention streamed, "eager" is the model with
output_attentions=True, which ends where the memory does. Peak memory is what torch had allocated at most, weights
included (on a CPU the largest resident set so far, so lengths should grow). Times are those of the fastest repetition,
after one short run that is not counted. Then come the tasks of `gpu_tasks.py`: analyses as multiples of the forward
pass by model and batch, ranking, removal, a refit and a training step; with --out FILE.csv in FILE-tasks.csv.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import gpu_tasks
import torch
from long_context import SEED, one_line, whole_words, words, write_table

LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
MODES = ("forward", "streamed", "eager")
WARM = 256
COLUMNS = ("device", "tokens", "mode", "peak_mib", "seconds")
LARGE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY: dict[str, Any] = {
    "vocab_size": 4001,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def build_checkpoint(sizes: dict[str, Any], device: torch.device, *, longest: int) -> Any:
    """A Llama of random bfloat16 weights, drawn on its device."""
    import transformers

    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=2 * longest)
    with device:
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    tokenizer = whole_words()
    return HuggingFaceCheckpoint(path="random Llama", model=model.eval(), tokenizer=tokenizer, digest="0" * 64)


def work(checkpoint: Any, mode: str, length: int, only: tuple[str, ...]) -> Callable[[], Any]:
    """One run of a mode over a text of so many tokens."""
    from headscope.config.analyze import AnalyzeOptions
    from headscope.engine.study import measure_heads

    ids = words(length)
    if mode == "streamed":
        options = AnalyzeOptions(max_length=length, batch_tokens=length, attention="streamed", only=only)
        corpus = one_line(ids)
        return lambda: measure_heads(checkpoint, corpus, options)
    inputs = torch.tensor([ids], device=checkpoint.device)
    checkpoint.model.set_attn_implementation("eager" if mode == "eager" else "sdpa")

    def forward() -> None:
        with torch.inference_mode():
            checkpoint.model(inputs, use_cache=False, output_attentions=mode == "eager")

    return forward


def measure(run: Callable[[], Any], device: torch.device, *, repeats: int) -> tuple[float | None, float | None]:
    """Peak MiB and the seconds of the fastest repetition; None where memory does not suffice."""
    on_cuda, seconds = device.type == "cuda", []
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None, None
    if on_cuda:
        return torch.cuda.max_memory_allocated(device) / 2**20, min(seconds)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Memory and time of the analyses and the matrices, as multiples of the forward pass."""
    row_of = {(row["mode"], row["tokens"]): row for row in rows}
    lines = []
    for (mode, length), row in row_of.items():
        forward = row_of.get(("forward", length))
        if mode == "forward" or forward is None or forward["seconds"] is None:
            continue
        if row["seconds"] is None:
            lines.append(f"{mode} at {length}: out of memory")
            continue
        memory, longer = (row[name] / forward[name] for name in ("peak_mib", "seconds"))
        lines.append(f"{mode} at {length}: memory {memory:.2f} × forward, time {longer:.2f} × forward")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", default="", help="analyses, with commas between them; default: the default ones")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-tasks", dest="tasks", action="store_false", help="lengths only")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --device cpu --tiny shows that the benchmark runs")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    checkpoint = build_checkpoint(TINY if args.tiny else LARGE, device, longest=max(args.lengths))
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    print(f"{date.today()}, seed {SEED}, torch {torch.__version__}, {name}, {parameters / 1e9:.2f} billion parameters")
    only, rows = tuple(filter(None, args.only.split(","))), []
    for length in args.lengths:
        for mode in args.modes:
            measure(work(checkpoint, mode, min(length, WARM), only), device, repeats=1)
            peak, seconds = measure(work(checkpoint, mode, length, only), device, repeats=args.repeats)
            values = (None if value is None else round(value, 4) for value in (peak, seconds))
            rows.append(dict(zip(COLUMNS, (name, length, mode, *values), strict=True)))
            print("  ".join(f"{column} {value}" for column, value in rows[-1].items()), flush=True)
    print("\n".join(report(rows)))
    if args.out:
        write_table(args.out, COLUMNS, rows)
    if not args.tasks:
        return
    del checkpoint
    tasks = []
    for row in gpu_tasks.rows(device, name, tiny=args.tiny):
        tasks.append(row)
        print("  ".join(f"{column} {value}" for column, value in row.items() if value is not None), flush=True)
    if args.out:
        write_table(args.out.with_stem(f"{args.out.stem}-tasks"), gpu_tasks.COLUMNS, tasks)


if __name__ == "__main__":
    main()
