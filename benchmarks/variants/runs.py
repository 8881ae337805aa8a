"""One run of the study: trained, its best model translated and analysed, all of it noted in result.json."""

from __future__ import annotations

import csv
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from variants.design import RECIPE, TEST, Arm

from headscope.config.analyze import AnalyzeConfig
from headscope.config.commands import TranslateOptions
from headscope.engine.study import run_analysis
from headscope.evaluation.quality import text_score
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import read_lines
from headscope.files.writing import write_json
from headscope.formats.base import open_checkpoint
from headscope.progress import Step
from headscope.results.training import Training
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS

LENGTHS = TranslateOptions(beam=5, max_len_a=1.2, max_len_b=10)  # as in validation: no endless translations
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """The folder of a study and the settings of all its runs beside the recipe."""

    data: Path
    out: Path
    recipe: Mapping[str, Any]
    threads: int | None
    device: str
    commit: str

    def folder(self, arm: Arm, seed: int) -> Path:
        """The folder of a run."""
        return self.out / "runs" / f"{arm.name}-{seed}"


def commit_of_checkout() -> str:
    """The commit that is checked out; ends the program where tracked files differ from it."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if changes:
        sys.exit(f"the checkout has changes that no commit holds; commit them first:\n{changes}")
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def complete(setting: Setting, arm: Arm, seed: int, *, with_tests: bool = True) -> bool:
    """Train and, where `with_tests`, test and analyse the missing parts of a run; whether any was missing."""
    folder = setting.folder(arm, seed)
    note = folder / "result.json"
    if note.exists():
        return False
    result = train_run(setting, arm, seed)
    if with_tests:
        result |= translate_test(setting, folder / "best")
        analyse_run(setting, arm, seed)
    write_json(note, result)
    return True


def list_runs(study: Path) -> list[Path]:
    """The folders of the runs that have their result.json, by name."""
    return [note.parent for note in sorted(study.glob("runs/*/result.json"))]


def result_of(folder: Path) -> dict[str, Any]:
    """The note of a finished run."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def train_run(setting: Setting, arm: Arm, seed: int) -> dict[str, Any]:
    """Train a run to its end, from where it was stopped; ends the program where it is stopped again."""
    folder = setting.folder(arm, seed)
    cls = VARIANTS.get(arm.variant)
    clock = Clock(folder.parent / f"{folder.name}.cpu.json")
    print(f"{datetime.datetime.now():%F %T} training {folder.name}", flush=True)
    config = train_config(setting, arm, seed)
    result = train(config, cls(cls.Options(**arm.options)), resume=True, progress=clock, command=[arm.command])
    clock.note(result.update)
    if result.reason == "interrupted":
        sys.exit(f"stopped {folder.name} after update {result.update}; the same command goes on from there")
    return note_of(setting, arm, seed, result) | {"cpu_seconds": clock.seconds}


def note_of(setting: Setting, arm: Arm, seed: int, result: Training) -> dict[str, Any]:
    """The row of a training in runs.csv."""
    losses = valid_losses(result.folder)
    best = min(losses, key=losses.__getitem__)
    return {
        "arm": arm.name,
        "seed": seed,
        "lr": arm.lr,
        "valid_nll": losses[best],
        "best_epoch": best,
        "last_nll": losses[max(losses)],
        "parameters": result.parameters,
        "updates": result.update,
        "seconds": result.seconds,
        "threads": setting.threads,
        "machine": machine(),
        "ended": f"{datetime.date.today():%F}",
        "signature": f"{result.signature}|commit:{setting.commit}",
    }


def valid_losses(folder: Path) -> dict[int, float]:
    """The validation loss after every epoch."""
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return {int(line["epoch"]): float(line["valid_nll"]) for line in csv.DictReader(file) if line["valid_nll"]}


def train_config(setting: Setting, arm: Arm, seed: int, **changes: Any) -> TrainConfig:
    """The shared recipe, Multi30k's text, and what `changes`."""
    texts = {
        f"{prefix}{side}": setting.data / f"{split}.{language}.gz"
        for prefix, split in (("", "train"), ("valid_", "val"))
        for side, language in (("source", "de"), ("target", "en"))
    }
    options: dict[str, Any] = {
        **PRESETS[RECIPE["preset"]],
        **setting.recipe,
        **arm.recipe,
        **texts,
        "out": setting.folder(arm, seed),
        "lr": arm.lr,
        "seed": seed,
        "threads": setting.threads,
        "device": setting.device,
    }
    return TrainConfig(**options | changes)


def translate_test(setting: Setting, checkpoint: Path) -> dict[str, Any]:
    """BLEU of the test text, both sides lower-cased."""
    model = open_checkpoint(str(checkpoint), device=setting.device)
    lines = {side: list(read_lines(setting.data / f"{TEST}.{side}.gz")) for side in ("de", "en")}
    translations = translate_lines(model, lines["de"], options=LENGTHS, tokens=4096)
    hypotheses = [candidates[0].text.lower() for candidates in translations]
    references = [line.lower() for line in lines["en"]]
    score = text_score("bleu", hypotheses, references)
    return {"bleu": score.value, "bleu_signature": score.signature}


def analyse_run(setting: Setting, arm: Arm, seed: int) -> None:
    """The analysis of a run's best model on the test text, made where it is missing.

    Where gates mix experts, also `words`: that of the experts alone on the training text, which has more words.
    """
    name, device = f"{arm.name}-{seed}", setting.device
    out = setting.out / "analysis" / name
    analyse(setting.out, name, out, **texts(setting.data, TEST), also=("lrp",), device=device)
    if (out / "experts.csv").exists():
        options = {**texts(setting.data, "train"), "max_sentences": RECIPE["max_sentences"], "device": device}
        analyse(setting.out, name, out / "words", only=("experts",), **options)


def parse_run(study: Path, run: str, parse: Path) -> None:
    """Analyse a finished run's best model on a treebank, into `syntax` beside its analysis, unless it has been done."""
    analyse(study, run, study / "analysis" / run / "syntax", parse=str(parse), only=("syntactic",))


def relevance_of(study: Path, run: str, data: Path) -> None:
    """LRP of a finished run's best model on the test text, into `relevance` beside its analysis, unless it is there."""
    analyse(study, run, study / "analysis" / run / "relevance", only=("lrp",), **texts(data, TEST))


def texts(data: Path, name: str) -> dict[str, Any]:
    """Both sides of a text, as options of an analysis."""
    return {side: data / f"{name}.{language}.gz" for side, language in (("source", "de"), ("target", "en"))}


def analyse(study: Path, run: str, out: Path, **options: Any) -> None:
    """Analyse a run's best model, unless it has been done."""
    note = out / "run.json"
    if note.exists() and json.loads(note.read_text(encoding="utf-8")).get("complete"):
        return
    best = str(study / "runs" / run / "best")
    run_analysis(AnalyzeConfig(checkpoint=best, out=out, figures=False, force=True, **options))


class Clock:
    """CPU seconds of a training by update, kept in a file, so that those of a run that was stopped add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.by_update = {int(update): float(seconds) for update, seconds in earlier.items()}
        self.began, self.before, self.update = 0.0, 0.0, 0

    @property
    def seconds(self) -> float:
        """Of all updates, validation included."""
        return max(self.by_update.values(), default=0.0)

    def __call__(self, title: str, total: int | None, *, unit: str) -> AbstractContextManager[Step]:
        """It is a display of progress."""
        return nullcontext(self.step)

    def step(self, count: int, note: str) -> None:
        """Starts at the first update of a process; notes the time where the state is saved."""
        self.update += count
        if not self.began:
            self.began = time.process_time()
            self.by_update = {number: seconds for number, seconds in self.by_update.items() if number < self.update}
            self.before = self.seconds
        if self.update % RECIPE["save_every"] == 0:
            self.note(self.update)

    def note(self, update: int) -> None:
        """Note the time of an update."""
        self.by_update[update] = self.before + time.process_time() - self.began
        write_json(self.path, self.by_update)
