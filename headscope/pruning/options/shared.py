"""Options that several commands of `headscope prune` share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from headscope.config.inputs import DATA, OUTPUT, BatchTokens, CheckpointOptions, ValidatedTextFiles
from headscope.config.option import SEED, WHOLE, option, plain_options

HEADS, LEARNING, COMPENSATION = "Which heads", "Learning", "Compensation"
STAY = "Heads that stay, of those where heads may go (--sites)."
EXPORT = (
    "self-contained (default), native or masked of Hugging Face models; same (default) or masked of others. Files for "
    "engines besides, as in native,onnx (`headscope list engines`)."
)
GATE_LR = "Adam's rate for the gates; default: the learner's own (l0 0.1, subset 0.2)."
ANCHOR = (
    "least-squares and auto: calibrate on other text too, so that the refit holds there: mixed (random subwords, and "
    "the words of the text in random order), or a text of your own; default: none, which auto compares with mixed."
)
CHECK = (
    "A second text, that a compensation is measured on; default: text of many kinds that ships in the language of the "
    "text (en, de), random subwords where that is not known."
)
TEXT = "source|labels"
MEASURED_TEXT = f"{TEXT}|valid_source|valid_labels"
Freeze = Literal["none", "encoder", "decoder", "model"]


@dataclass(frozen=True, kw_only=True)
class HeadChoice(BatchTokens, ValidatedTextFiles, CheckpointOptions):
    """The options that every command shares that says which heads go: which may, and the text that decides."""

    out: Path = option(help="Directory to write.", metavar="DIR", panel=OUTPUT, written=True)
    objective: str = option(
        "",
        "What heads are judged by: `headscope list objectives`; default: what fits the model.",
        metavar="NAME",
        panel=DATA,
        of=TEXT,
    )
    max_sentences: int | None = option(
        None, "Use only the first N lines.", panel=DATA, minimum=1, maximum=WHOLE, of=TEXT
    )
    valid_sentences: int = option(1000, "Lines to measure on.", panel=DATA, minimum=1, of=MEASURED_TEXT)
    max_length: int | None = option(
        None, "Subwords a side may have; longer sentences are cut.", panel=DATA, minimum=2, of=MEASURED_TEXT
    )
    sites: tuple[str, ...] = option(
        (), "Where heads may go: encoder-self,decoder-self,cross; default: everywhere.", metavar="LIST", panel=HEADS
    )
    protect: str | None = option(
        None,
        "Heads that stay: encoder-self.0.*,cross.2.1, or a file; alignment: those of generation_config.json.",
        metavar="LIST",
        panel=HEADS,
    )
    force: bool = option(
        False, "Replace the run of the same command in the output.", panel=OUTPUT, identity=False, common=True
    )


@dataclass(frozen=True, kw_only=True)
class PruningOptions(HeadChoice):
    """The options that every command shares that learns gates, ranks heads or sweeps over both."""

    tune_updates: int = option(
        0, "Updates that follow, with the heads that go closed for good.", panel=LEARNING, minimum=0
    )
    freeze: Freeze | None = option(
        None,
        "What does not learn; default: the decoder where only encoder-self is gated (Voita et al. 2019), else nothing. "
        "model: the gates alone learn.",
        panel=LEARNING,
        flagless=True,
    )
    lr: float | None = option(
        None, "Adam's rate for the model; default: 3e-4, for Hugging Face models 3e-5.", panel=LEARNING, minimum=0
    )
    schedule: Literal["constant", "linear"] = option(
        "constant", "linear: to 0 at the end.", panel=LEARNING, flagless=True
    )
    warmup: int = option(0, "Updates in which the rates rise.", panel=LEARNING, minimum=0, flagless=True)
    label_smoothing: float | None = option(
        None,
        "Label smoothing; default: 0.1 for translation, else 0.",
        panel=LEARNING,
        minimum=0,
        below=1,
        flagless=True,
    )
    clip: float = option(
        1.0, "Longest norm of the model's gradient; 0: no limit.", panel=LEARNING, minimum=0, flagless=True
    )
    seed: int = option(1, "Seed of gates, noise, dropout and data order.", panel=LEARNING, minimum=0, maximum=SEED)

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return plain_options(self)


LEARNT_WITH = tuple(
    entry.name
    for entry in fields(PruningOptions)
    if entry.metadata.get("panel") == LEARNING and entry.name not in ("tune_updates", "seed")
)
"""The options that are about whatever learns: gates, and a model that is tuned."""


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(PruningOptions):
    """The options of every command that chooses heads once."""

    remove: bool = option(
        False, "Go on and cut the heads out, into DIR/pruned (prune remove).", panel=OUTPUT, identity=False, common=True
    )
    export: tuple[str, ...] = option(
        (), f"What --remove writes: {EXPORT}", metavar="KIND", panel=OUTPUT, identity=False, of="remove"
    )
