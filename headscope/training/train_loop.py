"""The training loop: epochs, updates, validations, checkpoints, and the state that makes them resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from headscope.config.commands import TranslateOptions
from headscope.data.encoded import Batch
from headscope.errors import CheckpointError, ConfigError, flag, restate
from headscope.evaluation.metrics.predictions import perplexity
from headscope.evaluation.quality import text_score
from headscope.evaluation.translation import DEFAULT, TOKENISED, TextMode, translate_lines
from headscope.files.reading import read_text
from headscope.files.writing import write_atomically, write_errors
from headscope.formats.native import native_state
from headscope.progress import Progress as ProgressDisplay
from headscope.progress import Step
from headscope.training import checkpoints
from headscope.training.checkpoints import METRICS, WEIGHTS, Progress, checkpoint, save_state
from headscope.training.config import TrainConfig, rate, updates_until_end
from headscope.training.losses import Sums
from headscope.training.prepare import Numbers, collate, epoch_plan, without_labels
from headscope.training.run_state import TrainingRun

LENGTHS = TranslateOptions(max_len_a=1.2, max_len_b=10)  # an untrained model would not stop by itself


def validate(run: TrainingRun, *, number: int) -> tuple[float | None, float | None]:
    """Mean -log p per target token in nats, and BLEU; None where there is no text, or BLEU is not due at this `number`.

    The main process validates, all return the result.
    """
    scores: tuple[float | None, float | None] = None, None
    if run.processes.main:
        total = Sums()
        for batch in run.validation():
            total = total.plus(run.measure(batch))
        interval = run.config.bleu_every
        is_bleu_due = bool(interval) and number % interval == 0 and run.data.valid_texts is not None
        nll = total.nll / total.tokens if total.tokens else None
        scores = nll, _validation_bleu(run) if is_bleu_due else None
    return run.processes.broadcast(scores)


def _validation_bleu(run: TrainingRun) -> float:
    assert run.data.valid_texts is not None
    sources, references = (texts[: run.config.bleu_sentences] for texts in run.data.valid_texts)
    run.model.eval()
    with run.autocast():
        tokens = min(run.config.max_tokens, 4096)
        translations = translate_lines(checkpoint(run), sources, options=LENGTHS, tokens=tokens)
        hypotheses = [translation[0].text for translation in translations]
    if run.config.normalise in ("lowercase", "moses-lowercase"):
        hypotheses, references = [text.lower() for text in hypotheses], [text.lower() for text in references]
    return text_score("bleu", hypotheses, references, text=bleu_mode(run.config)).value


def bleu_mode(config: TrainConfig) -> TextMode:
    """How BLEU reads texts in validation: as raw, or as tokenised already by `--normalise moses`."""
    return TOKENISED if config.normalise.startswith("moses") else TextMode(tokenize=config.bleu_tokenize or DEFAULT)


COLUMNS = (
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "nll", "gradient_norm"),
    *("valid_nll", "valid_perplexity", "bleu", "best"),
)


class History:
    """The lines of metrics.csv, each written immediately; the first one decides the columns."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        """Open the file; lines after `update`, of a process that was killed, are removed."""
        self.path = folder / METRICS
        self.columns: list[str] = []
        if self.path.exists():
            self._cut(update)
        self.board: Any = None
        if tensorboard:
            message = f"{flag.tensorboard} needs its package: pip install 'headscope[train]'"
            with restate(ConfigError, message, ModuleNotFoundError):
                from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)

    def add(self, row: Mapping[str, float | int | None]) -> None:
        """Write a line; cells of numbers that are not finite are empty (gradients overflow in fp16)."""
        if not self.columns:
            self.columns = [*COLUMNS, *(name for name in row if name not in COLUMNS)]
            write_atomically(self.path, _line(self.columns))
        with write_errors(self.path):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line([_cell(row.get(name)) for name in self.columns]))
            if self.board is not None:
                for name, value in row.items():
                    if value is not None and value == value and name not in ("update", "epoch"):
                        self.board.add_scalar(name, value, int(row["update"] or 0))
                self.board.flush()

    def close(self) -> None:
        """Close the event files."""
        if self.board is not None:
            self.board.close()

    def _cut(self, update: int) -> None:
        lines = read_text(self.path, error=CheckpointError).splitlines()
        self.columns, *rows = [line.split(",") for line in lines] or [[]]
        complete = [row for row in rows if len(row) == len(self.columns)]
        rows = [row for row in complete if row[0].isdecimal() and int(row[0]) <= update]
        text = "".join(map(_line, [self.columns, *rows]))
        write_atomically(self.path, text)


def _cell(value: float | int | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _line(cells: list[str]) -> str:
    return ",".join(cells) + "\n"


Reason = Literal["updates", "epochs", "patience", "interrupted"]


@dataclass
class Loop:
    """Trains a run to its end, until `is_interrupted()`; `settings` go into the state.

    The main process shows progress on `display`. `mark` is the time of the last line of metrics.csv.
    """

    run: TrainingRun
    progress: Progress
    settings: Mapping[str, Any]
    history: History | None
    display: ProgressDisplay
    is_interrupted: Callable[[], bool]
    mark: float = field(default_factory=time.monotonic)
    bars: ExitStack = field(default_factory=ExitStack)
    step: Step | None = None

    def train(self) -> Reason:
        """Train epoch after epoch; returns why training ended. The state is saved then, whatever the reason."""
        reason = self.end_reason()
        with self.bars:
            while reason is None:
                reason = self._run_epoch()
        if reason == "interrupted":
            self._save()
        elif self.run.processes.main and self.progress.kept:
            checkpoints.save_average(self.run, self.progress.kept)
        self.run.processes.wait()
        return reason

    def _run_epoch(self) -> Reason | None:
        """Train until the end of the epoch, or until a reason to end training."""
        run = self.run
        config, epoch = run.config, run.position.epoch
        groups = epoch_plan(run.data.train, tokens=config.max_tokens, seed=config.seed, epoch=epoch)
        size = config.accumulate * run.processes.world
        count = math.ceil(len(groups) / size)
        run.position = replace(run.position, updates_per_epoch=count)
        if run.position.update_in_epoch == 0:
            run.variant.before_epoch(run, run.position)
        while run.position.update_in_epoch < count:
            begin = run.position.update_in_epoch * size
            self._update(groups[begin : begin + size])
            validates = self._validation_is_due()
            if validates:
                self._validate()
            if run.position.update_in_epoch == count:
                break
            if validates or (config.save_every and run.position.update % config.save_every == 0):
                self._save()
            if reason := self.end_reason():
                return reason
        run.variant.after_epoch(run, run.position)
        run.position = replace(run.position, epoch=epoch + 1, update_in_epoch=0)
        self._save()
        return self.end_reason()

    def _update(self, groups: list[Numbers]) -> None:
        run, began = self.run, time.monotonic()
        run.variant.before_update(run, run.position)
        sums, norm = run.update(self._own_share(groups))
        position = run.position
        self.progress.latest = {"lr": rate(run.config, position), "gradient_norm": norm}
        run.position = replace(
            position,
            update=position.update + 1,
            update_in_epoch=position.update_in_epoch + 1,
            sentences=position.sentences + sums.sentences,
            tokens=position.tokens + sums.tokens,
        )
        run.variant.after_update(run, run.position)
        self.progress.window = self.progress.window.plus(sums)
        self.progress.window_seconds += time.monotonic() - began
        if run.processes.main:
            self._show()
        if run.position.update % run.config.log_every == 0 and not self._validation_is_due():
            self._log({})

    def _show(self) -> None:
        """Show on the progress bar that an update is done."""
        position, config, window, count = self.run.position, self.run.config, self.progress.window, 1
        if self.step is None:
            total, count = updates_until_end(config.updates, config.epochs, position.updates_per_epoch), position.update
            self.step = self.bars.enter_context(self.display("training", total, unit="updates"))
        scores = {"loss": window.loss / max(window.tokens, 1), "valid": self.progress.nll, "BLEU": self.progress.bleu}
        self.step(count, ", ".join(f"{name} {value:.3g}" for name, value in scores.items() if value is not None))

    def _own_share(self, groups: list[Numbers]) -> list[Batch]:
        """This process's micro-batches; every process has the same number, if need be by one without labels."""
        rank, world = self.run.processes.rank, self.run.processes.world
        batches = [collate(self.run.data.train, group) for group in groups[rank::world]]
        if len(batches) < math.ceil(len(groups) / world):
            batches.append(without_labels(collate(self.run.data.train, groups[0])))
        return [batch.to(self.run.device) for batch in batches]

    def _validation_is_due(self) -> bool:
        """Whether a validation follows the last update; the final one always has one."""
        position, config = self.run.position, self.run.config
        ends_epoch = position.update_in_epoch == position.updates_per_epoch
        if position.update == config.updates or (ends_epoch and position.epoch == config.epochs):
            return True
        return ends_epoch if config.validate_every is None else position.update % config.validate_every == 0

    def end_reason(self) -> Reason | None:
        """Why training ends here; None if it goes on."""
        position, config = self.run.position, self.run.config
        if config.updates is not None and position.update >= config.updates:
            return "updates"
        if config.epochs is not None and position.epoch > config.epochs:
            return "epochs"
        if config.patience is not None and self.progress.since_best >= config.patience:
            return "patience"
        return "interrupted" if self.run.processes.sum([float(self.is_interrupted())])[0] else None

    def _validate(self) -> None:
        run, progress = self.run, self.progress
        progress.nll, progress.bleu = nll, bleu = validate(run, number=progress.validations + 1)
        value = -float(run.position.update) if nll is None else nll  # lower is better
        if run.config.best_by == "bleu" and bleu is not None:
            value = -bleu
        is_best = progress.after_validation(value, run.position.update)
        is_kept = False
        if run.config.average:
            by_value = run.config.average_of == "best"
            is_kept = progress.keep(value, run.position.update, count=run.config.average, best=by_value)
        if run.processes.main:
            checkpoints.save(run, "last")
            if is_best:
                checkpoints.save(run, "best")
            if is_kept:
                weights = native_state(run.model, {})
                file = run.config.out / WEIGHTS / f"{run.position.update}.safetensors"
                write_atomically(file, lambda path: save_file(weights, path))
        valid_perplexity = None if nll is None else float(perplexity(nll))
        self._log({"valid_nll": nll, "valid_perplexity": valid_perplexity, "bleu": bleu, "best": int(is_best)})

    def _log(self, values: Mapping[str, float | int | None]) -> None:
        """Write a line of metrics.csv: means since the previous line, and the given values."""
        run, window, now = self.run, self.progress.window, time.monotonic()
        self.progress.seconds += now - self.mark
        self.mark = now
        row: dict[str, float | int | None] = {name: getattr(run.position, name) for name in COLUMNS[:4]}
        row["seconds"] = self.progress.seconds
        if window.tokens:
            row |= {
                **self.progress.latest,
                "tokens_per_second": window.tokens / max(self.progress.window_seconds, 1e-9),
                "loss": window.loss / window.tokens,
                "nll": window.nll / window.tokens,
            }
        self.progress.window = Sums()
        self.progress.window_seconds = 0.0
        row |= {**values, **run.variant.history(run)}
        if self.history is not None:
            self.history.add(row)

    def _save(self) -> None:
        """Write the state, and remove weights that no average needs any more."""
        save_state(self.run, self.progress, self.settings)
        for path in (self.run.config.out / WEIGHTS).glob("*.safetensors") if self.run.processes.main else ():
            if path.stem.isdecimal() and int(path.stem) not in self.progress.kept:
                path.unlink(missing_ok=True)
