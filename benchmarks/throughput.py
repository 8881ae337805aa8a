"""Training speed as a multiple of Hugging Face Trainer's on the equivalent Marian model: same batches, one process.

Run: python benchmarks/throughput.py --source FILE --target FILE [--preset small] [--updates N] [--rounds N]
     [--threads N] [--variant NAME] [--option NAME=VALUE …]

Both sides take the same batches in the same order, in alternation, with label smoothing 0.1, dropout 0.1, fused
Adam and the same precision; counted are CPU seconds of all threads (seconds on a GPU) from the first update of a
round to the end of its last, the best round of each side. Limit: 1.0. With `--variant` a third side is the
variant, given as a multiple of the baseline's time. On a GPU the share of its bf16 peak is printed too, where
`--peak` says what that is in TFLOP/s.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import SequentialSampler

from headscope.cli.options import set_values
from headscope.config.option import declared_options, make_config
from headscope.data.encoded import Batch
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.prepare import collate, epoch_plan
from headscope.training.run_state import TrainingRun
from headscope.training.trainer import make_run
from headscope.training.variant import VARIANTS

os.environ.setdefault("WANDB_DISABLED", "true")
LIMIT = 1.0


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(settings(args, Path(folder) / "mine"), VARIANTS.get("baseline")(None))
        groups = epoch_plan(run.data.train, tokens=run.config.max_tokens, seed=1, epoch=1)[: args.updates + 1]
        batches = [collate(run.data.train, group).to(run.device) for group in groups]
        model = marian(run)
        sides: dict[str, Callable[[], float]] = {
            "headscope": lambda: update_all(run, batches),
            "Trainer": lambda: time_trainer(model, run, batches, Path(folder)),
        }
        if args.variant:
            special = variant_run(args, Path(folder) / "variant")
            sides[args.variant] = lambda: update_all(special, batches)
        best = {name: min(times) for name, times in measure_sides(sides, args.rounds).items()}
    report(args, run, model, batches, best)


def parse_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS))
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--max-sentences", type=int)
    parser.add_argument("--variant")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--peak", type=float, help="bf16 TFLOP/s of the GPU")
    return parser.parse_args()


def settings(args: argparse.Namespace, out: Path) -> TrainConfig:
    """The same model and data for all sides."""
    recipe = {"max_tokens": args.max_tokens, "updates": 1000, "dropout": 0.1, "warmup": 100, "lr": 1e-4}
    values = {**PRESETS[args.preset], **recipe, "precision": args.precision, "max_sentences": args.max_sentences}
    return TrainConfig(out=out, source=args.source, target=args.target, **values)


def variant_run(args: argparse.Namespace, out: Path) -> TrainingRun:
    """The run of `--variant`."""
    kind = VARIANTS.get(args.variant)
    options = set_values(args.option, list(declared_options(kind.Options)), {})
    return make_run(settings(args, out), kind(make_config(kind.Options, options)))


def update_all(run: TrainingRun, batches: Sequence[Batch]) -> float:
    """Seconds of an update for each batch, the first one left out."""
    variant: Any = run.variant
    start = 0.0
    for number, batch in enumerate(batches):
        start = clock(run.device) if number == 1 else start
        variant.before_update(run, run.position)
        run.update([batch])
        run.position = replace(run.position, update=run.position.update + 1)
        variant.after_update(run, run.position)
    return clock(run.device) - start


def marian(run: TrainingRun) -> Any:
    """A Marian model of the same sizes; its sinusoids interleave otherwise, which costs nothing."""
    config = run.config
    vocabulary = run.data.target
    marian_config = transformers.MarianConfig(
        vocab_size=len(vocabulary),
        d_model=config.d_model,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.d_ffn,
        decoder_ffn_dim=config.d_ffn,
        activation_function=config.activation,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        activation_dropout=config.activation_dropout,
        max_position_embeddings=1024,
        scale_embedding=True,
        pad_token_id=vocabulary.pad,
        eos_token_id=vocabulary.end,
        decoder_start_token_id=vocabulary.start,
        bos_token_id=vocabulary.start,
        forced_eos_token_id=None,
    )
    model: Any = transformers.MarianMTModel(marian_config)
    return model.to(run.device)


class Ready(transformers.Trainer):
    """Takes batches as they are, in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        dataset: Any = self.train_dataset
        return SequentialSampler(dataset)


class Clock(transformers.TrainerCallback):
    """When the second update began, and when the last one ended."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start, self.end = device, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.start = clock(self.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end = clock(self.device)


def time_trainer(model: Any, run: TrainingRun, batches: Sequence[Batch], folder: Path) -> float:
    """Seconds of Trainer for the same batches, the first one left out."""
    table = [for_trainer(batch) for batch in batches]
    watch = Clock(run.device)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=len(batches),
        per_device_train_batch_size=1,
        learning_rate=run.config.lr,
        adam_beta2=0.98,
        warmup_steps=100,
        label_smoothing_factor=run.config.label_smoothing,
        max_grad_norm=0.0,
        optim="adamw_torch_fused",
        bf16=run.config.precision == "bf16",
        use_cpu=run.device.type == "cpu",
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Ready(
        model=model, args=arguments, train_dataset=table, data_collator=lambda features: features[0], callbacks=[watch]
    ).train()
    return watch.end - watch.start


def for_trainer(batch: Batch) -> dict[str, Any]:
    """A batch by the names of transformers; padding has label -100 there too."""
    assert batch.target is not None
    return {
        "input_ids": batch.source.ids,
        "attention_mask": batch.source.real.long(),
        "decoder_input_ids": batch.target.ids,
        "labels": batch.labels,
    }


def clock(device: torch.device) -> float:
    """CPU seconds of this process, or on a GPU seconds after everything on it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def measure_sides(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Times of every side, in alternation."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side())
    return times


def report(
    args: argparse.Namespace, run: TrainingRun, other: Any, batches: Sequence[Batch], best: dict[str, float]
) -> None:
    """Print the ratio, tokens/s, and on a GPU the share of its peak."""
    tokens = sum(batch.predictions for batch in batches[1:])
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (run.model, other)]
    print(
        f"{args.preset}, {counts[0]:,} parameters (Marian {counts[1]:,}), {len(batches) - 1} updates of "
        f"{args.max_tokens} positions, {args.threads} threads, {run.device}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    for name, seconds in best.items():
        print(f"{name:12s} {seconds:8.2f} s  {tokens / seconds:10,.0f} target tokens/s")
    ratio = best["Trainer"] / best["headscope"]
    print(f"headscope trains at {ratio:.2f} x the speed of Trainer (limit {LIMIT})")
    if args.variant:
        print(f"a step of {args.variant} takes {best[args.variant] / best['headscope']:.3f} x a step of the baseline")
    if args.peak:
        print(f"about {work(run, batches[1:]) / best['headscope'] / args.peak / 1e12:.1%} of the bf16 peak")


def work(run: TrainingRun, batches: Sequence[Batch]) -> float:
    """Floating-point operations of forward and backward: 6 for every weight of a matrix and position it is used at."""
    encoder = 0 if run.model.encoder is None else matrices(run.model.encoder)
    decoder = matrices(run.model.decoder) + run.model.output.weight.numel()
    source_tokens = sum(batch.source.ids.numel() for batch in batches)
    target_tokens = sum((batch.target or batch.source).ids.numel() for batch in batches)
    return 6.0 * (encoder * source_tokens + decoder * target_tokens)


def matrices(stack: torch.nn.Module) -> int:
    """Weights of the linear layers of a stack."""
    return sum(part.weight.numel() for part in stack.modules() if isinstance(part, torch.nn.Linear))


if __name__ == "__main__":
    main()
