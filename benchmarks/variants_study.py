"""Every training variant on Multi30k, German to English, on one budget: BLEU, loss, parameters, time, and the heads.

    python benchmarks/variants_study.py --data DIR --out DIR [--seeds 3] [--threads N] [--report-only]

A 3+3-layer model (d_model 128, 8 heads, feed-forward 256) is trained for 5 epochs on lower-cased text with a joint
vocabulary of 4,000 pieces, the same for every variant: data order, updates, learning rate and warm-up. The last model
translates test_2016_flickr with beam 5 (BLEU: sacreBLEU 13a, both sides lower-cased), and its heads are analysed there.
All variants of seed 1 come first, then those of seed 2, … Whatever is finished is skipped and what was stopped goes on,
however it was stopped, so the same command continues; table.csv, table.md, runs.csv and figures/ are rewritten after
every run from what there is, and by --report-only alone. A runs.csv and figures/ that lie in --out stand for runs whose
folders are elsewhere: with those of benchmarks/variants, further seeds are added on another machine (--first-seed).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from variants_report import TEST, Arm, analysed, report

from headscope.api.analysis import run_analysis
from headscope.config import AnalyzeConfig
from headscope.evaluation.quality import text_scores
from headscope.evaluation.translation import translate_lines
from headscope.files.lines import read_lines
from headscope.files.writing import write_json
from headscope.formats.base import open_checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS

if TYPE_CHECKING:
    from headscope.training.losses.cross_entropy import Sums
    from headscope.training.run_state import TrainingRun
    from headscope.training.validate import Validation

RECIPE: Mapping[str, Any] = {
    "preset": "small",
    "normalise": "lowercase",
    "vocab_size": 4000,
    "max_tokens": 1024,
    "lr": 0.003,
    "schedule": "cosine",
    "warmup": 500,
    "precision": "bf16",
    "bleu_every": 0,
    "save_every": 100,
}
LENGTHS = TranslateOptions(beam=5, max_ratio=1.2, max_extra=10)  # as in validation: no endless translations
SWAPS = "swaps.json"
ARMS = (
    Arm("baseline", "baseline", "baseline"),
    Arm("mixing", "MHR mixing, growth loss 0.01 after 31 %", "mixing"),
    Arm("swap-manual", "MHR swaps by schedule", "swap", {"swap_schedule": Path(SWAPS)}),
    Arm(
        "swap-soft",
        "MHR soft swaps by confidence",
        "swap",
        {"dynamic": ("soft",), "dynamic_max_switches": (4,), "dynamic_end": (5,)},
    ),
    Arm("mae", "MAE-7, gates trained every 2nd epoch", "mae", {"gate_every": 2}),
    Arm("mae-nobcd", "NoBCD", "mae", {"bcd": False}),
    Arm("mae-uniform", "Uni-MAE-7", "mae", {"uniform": True}),
    Arm("mixing-free", "mixing without growth loss", "mixing", {"gamma": 0.0}),
    Arm("wide", "wide attention (heads of width 128)", "wide"),
)


def main() -> None:
    """Train and measure what is missing, and report after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.de.gz, train.en.gz, val.de.gz, …")
    parser.add_argument("--out", type=Path, required=True, help="directory of the study")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to N")
    parser.add_argument("--first-seed", type=int, default=1, help="leave out the seeds before")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--arms", help=f"some of {', '.join(arm.name for arm in ARMS)}, with commas")
    parser.add_argument("--max-sentences", type=int, help="a slice of the training text, to try the script")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--report-only", action="store_true", help="no training: tables and figures of what there is")
    asked = parser.parse_args()
    wanted = asked.arms.split(",") if asked.arms else [arm.name for arm in ARMS]
    if unknown := sorted(set(wanted) - {arm.name for arm in ARMS}):
        parser.error(f"--arms {unknown[0]!r} is not known; choose from {', '.join(arm.name for arm in ARMS)}")
    begin(asked)
    for seed in range(asked.first_seed, 1 if asked.report_only else asked.seeds + 1):
        for arm in (each for each in ARMS if each.name in wanted):
            if complete(asked, arm, seed):
                report(asked.out, ARMS)
    report(asked.out, ARMS)
    print((asked.out / "table.md").read_text(encoding="utf-8"))


def begin(asked: argparse.Namespace) -> None:
    """Make the directory, its note of what the study is, and the swap schedule; another study is refused.

    The schedule is named as it lies there, so the directory becomes the current one.
    """
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.data, asked.out = asked.data.resolve(), asked.out.resolve()
    os.chdir(asked.out)
    about = {"epochs": asked.epochs, "max_sentences": asked.max_sentences, "recipe": dict(RECIPE)}
    note = asked.out / "study.json"
    if asked.report_only and note.exists():
        return
    if note.exists() and (there := json.loads(note.read_text(encoding="utf-8"))) != about:
        sys.exit(f"{asked.out} holds a study with {there}, not {about}; choose another --out")
    write_json(note, about)
    write_json(asked.out / SWAPS, swap_schedule(asked.epochs))


def swap_schedule(epochs: int) -> dict[str, list[dict[str, Any]]]:
    """The fork's example on a decoder of 3 layers and a short run.

    Theirs exchanges all heads of cross attention of layers 1 and 5 of 6 before epochs 3, 7, 9 and 11, four times, so
    that all heads end where they began. Here they are those of the first and the last layer, before every epoch from
    the second on, an even number of times.
    """
    heads, last = PRESETS["small"]["heads"], PRESETS["small"]["decoder_layers"] - 1
    place = {"layer_module": "encoder_attn", "transformer_module": "decoder"}
    pairs = []
    for head in range(heads):
        ends = {"s": {"layer": "0", "head": head, **place}, "d": {"layer": str(last), "head": head, **place}}
        pairs.append({f"{end}_{name}": value for end, its in ends.items() for name, value in its.items()})
    times = max(epochs - 1, 1) // 2 * 2 or 1
    return {str(epoch): pairs for epoch in range(2, 2 + times)}


def complete(asked: argparse.Namespace, arm: Arm, seed: int) -> bool:
    """Train, test and analyse whatever of a run is missing; whether anything was."""
    folder, analysis = asked.out / "runs" / f"{arm.name}-{seed}", asked.out / "analysis" / f"{arm.name}-{seed}"
    missing = not (folder / "result.json").exists()
    if missing:
        note = trained(asked, arm, seed, folder)
        write_json(folder / "result.json", note | translated(asked, folder / "last"))
    if analysed(analysis):
        return missing
    first = seed == 1
    run_analysis(
        AnalyzeConfig(
            checkpoint=str(folder / "last"),
            out=analysis,
            source=asked.data / f"{TEST}.de.gz",
            target=asked.data / f"{TEST}.en.gz",
            only=() if first else ("confidence", "alphas", "experts"),
            figures=first,
            device=asked.device,
            force=True,
        )
    )
    return True


def trained(asked: argparse.Namespace, arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
    """Train a run to its end, from where it was stopped; ends the program where it is stopped again."""
    options = {**arm.options}
    if "dynamic_end" in options:
        options["dynamic_end"] = (asked.epochs,)
    cls = VARIANTS.get(arm.variant)
    clock = Clock(folder.parent / f"{folder.name}.cpu.json")
    print(f"{datetime.datetime.now():%F %T} training {folder.name}", flush=True)
    config = settings(asked, seed, folder)
    found = train(config, cls(cls.Options(**options)), resume=True, listener=clock, command=[arm.command])
    if found.reason == "interrupted":
        sys.exit(f"stopped {folder.name} after update {found.update}; the same command goes on from there")
    return {
        "arm": arm.name,
        "seed": seed,
        "valid_nll": last_loss(folder),
        "parameters": found.parameters,
        "updates": found.update,
        "seconds": found.seconds,
        "cpu_seconds": clock.seconds,
        "threads": asked.threads,
        "ended": f"{datetime.date.today():%F}",
        "signature": found.signature,
    }


def last_loss(folder: Path) -> float:
    """The last validation's; a run that had ended and is only looked at again says no other."""
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(line["valid_nll"]) for line in csv.DictReader(file) if line["valid_nll"]][-1]


def settings(asked: argparse.Namespace, seed: int, folder: Path) -> TrainConfig:
    """The shared recipe and Multi30k's text."""
    text = {
        f"{prefix}{side}": asked.data / f"{split}.{language}.gz"
        for prefix, split in (("", "train"), ("valid_", "val"))
        for side, language in (("source", "de"), ("target", "en"))
    }
    return TrainConfig(
        out=folder,
        source_lang="de",
        target_lang="en",
        max_epochs=asked.epochs,
        max_sentences=asked.max_sentences,
        seed=seed,
        threads=asked.threads,
        device=asked.device,
        **text,
        **{**PRESETS[RECIPE["preset"]], **RECIPE},
    )


class Clock:
    """CPU seconds of a training by update, kept in a file, so that those of a run that was stopped add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.found = {int(update): float(seconds) for update, seconds in there.items()}
        self.began, self.before = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Of all updates, validation included."""
        return max(self.found.values(), default=0.0)

    def updated(self, run: TrainingRun, sums: Sums) -> None:
        """Starts at the first update of a process; notes the time where the state is saved."""
        update = run.position.update
        if not self.began:
            self.began = time.process_time()
            self.found = {n: seconds for n, seconds in self.found.items() if n < update}
            self.before = self.seconds
        if update % RECIPE["save_every"] == 0:
            self._note(update)

    def validated(self, run: TrainingRun, found: Validation, *, best: bool) -> None:
        """Notes the time at the end of an epoch."""
        self._note(run.position.update)

    def remarked(self, text: str) -> None:
        """Nothing: what a variant did not do stands in its run.json."""

    def _note(self, update: int) -> None:
        self.found[update] = self.before + time.process_time() - self.began
        write_json(self.path, self.found)


def translated(asked: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """BLEU of the test text."""
    model = open_checkpoint(str(checkpoint), device=asked.device)
    lines = {side: list(read_lines(asked.data / f"{TEST}.{side}.gz")) for side in ("de", "en")}
    found = translate_lines(model, lines["de"], options=LENGTHS, tokens=4096)
    hypotheses, references = [each[0].text.lower() for each in found], [line.lower() for line in lines["en"]]
    (score,) = text_scores(hypotheses, references, ["bleu"], mode="raw", replicates=1)
    return {"bleu": score.value, "bleu_signature": score.signature}


if __name__ == "__main__":
    main()
