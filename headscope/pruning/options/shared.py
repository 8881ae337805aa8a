"""Options that several commands of `headscope prune` share, and the options of refits in closed form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config.commands import WrittenModel
from headscope.config.inputs import (
    BatchTokens,
    BleuOption,
    CheckpointOptions,
    ValidatedTextFiles,
    data_option,
    model_option,
    output_option,
)
from headscope.config.option import SEED, WHOLE, TextLines, check_fields, option, option_name, plain_options
from headscope.errors import ConfigError, flag

HEADS, LEARNING, COMPENSATION = "Which heads", "Learning", "Compensation"
heads_option, learning_option, compensation_option = (
    partial(option, panel=panel) for panel in (HEADS, LEARNING, COMPENSATION)
)
"""`option` under the heading of that name."""
STAY = "Heads to keep, of those that may be removed (--sites)."
EXPORT = (
    "self-contained (default), native or masked of Hugging Face models; same (default) or masked of others. Files for "
    "engines besides, as in native,onnx (`headscope list engines`)."
)
ANCHOR = (
    "least-squares and auto: calibrate on other text too, so that the refit holds there: mixed (random subwords, and "
    "the words of the text in random order), or a text of your own; default: none, which auto compares with mixed."
)
TEXT = "source|labels"
MEASURED_TEXT = f"{TEXT}|valid_source|valid_labels"
LEARNS = "tune_updates|updates"
Freeze = Literal["none", "encoder", "decoder", "model"]


@dataclass(frozen=True, kw_only=True)
class PruningFolder(ValidatedTextFiles, CheckpointOptions):
    """Inputs and output folder: the options of every command of `headscope prune`."""

    out: Path = output_option(help="Directory to write.", metavar="DIR", is_output=True)
    force: bool = output_option(
        False, "Replace the run of the same command in the output.", identity=False, common=True
    )


@dataclass(frozen=True, kw_only=True)
class SmallerModelOptions(WrittenModel, BleuOption, PruningFolder):
    """Options of writing, refitting and measuring a smaller model, however its heads are chosen."""

    device_map: str | None = None
    export: tuple[str, ...] = output_option(
        (), f"{EXPORT} Serving programs mostly need native, with --allocate uniform.", metavar="KIND", common=True
    )
    feed_forward: bool = compensation_option(
        False, "Then refit outputs of feed-forward blocks too; auto always tries it where vectors are compared."
    )
    calibration_sentences: int = compensation_option(1000, "Sentences of --source to refit on.", minimum=1)
    check: tuple[str, ...] = data_option(
        (), "A second text, of another kind, for refits; default: one that ships (en, de).", metavar="FILE[,TARGET]"
    )
    valid_source: TextLines | None = data_option(
        None, "Text that nothing is fitted to, to measure on; default: the last fifth of --source.", common=True
    )
    metric: str = data_option(
        "", "Measured before and after (`headscope list metrics`); default: what fits the model.", common=True
    )
    rounds: int = model_option(
        5, "Timed runs of each model, fewer if slow; 0: none.", minimum=0, maximum=10_000, identity=False
    )


@dataclass(frozen=True, kw_only=True)
class HeadChoice(BatchTokens, PruningFolder):
    """Options of every command that chooses heads: where heads may go, and the text that decides."""

    objective: str = data_option(
        "", "Objective to choose heads by (`headscope list objectives`); default: what fits the model.", needs=TEXT
    )
    max_sentences: int | None = data_option(None, "Use only the first N lines.", minimum=1, maximum=WHOLE, needs=TEXT)
    valid_sentences: int = data_option(1000, "Lines to measure on.", minimum=1, needs=MEASURED_TEXT)
    max_length: int | None = data_option(
        None, "Subwords a side may have; longer sentences are cut.", minimum=2, needs=MEASURED_TEXT
    )
    sites: tuple[str, ...] = heads_option(
        (), "Where heads may be removed: encoder-self,decoder-self,cross; default: everywhere."
    )
    protect: str | None = heads_option(
        None, "Heads that stay: cross.2.1, a file, or alignment: those of generation_config.json.", metavar="LIST"
    )


@dataclass(frozen=True, kw_only=True)
class PruningOptions(HeadChoice):
    """Options of every command that learns gates, ranks heads or sweeps over both."""

    tune_updates: int = learning_option(
        0, "Updates after heads are chosen, without the removed ones.", minimum=0, needs=TEXT
    )
    freeze: Freeze | None = learning_option(
        None,
        "What is frozen; default: the decoder if encoder-self alone is gated. model: only gates learn.",
        flagless=True,
        needs=LEARNS,
    )
    lr: float | None = learning_option(
        None, "Adam's rate for the model; default: 3e-4, for Hugging Face models 3e-5.", minimum=0, needs=LEARNS
    )
    schedule: Literal["constant", "linear"] = learning_option(
        "constant", "linear: down to 0.", flagless=True, needs=LEARNS
    )
    warmup: int = learning_option(0, "Updates in which the rates rise.", minimum=0, flagless=True, needs=LEARNS)
    label_smoothing: float | None = learning_option(
        None, "Label smoothing; default: 0.1 for translation, else 0.", minimum=0, below=1, flagless=True, needs=LEARNS
    )
    clip: float = learning_option(
        1.0, "Longest norm of the gradient; 0: no limit.", minimum=0, flagless=True, needs=LEARNS
    )
    seed: int = learning_option(1, "Seed of gates, noise, dropout and data order.", minimum=0, maximum=SEED)

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return plain_options(self)


LEARNT_WITH = tuple(entry.name for entry in fields(PruningOptions) if entry.metadata["needs"] == LEARNS)
"""Options of learning gates and of tuning a model."""


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(PruningOptions):
    """The options of every command that chooses heads once."""

    remove: bool = output_option(
        False, "Go on and cut the heads out, into DIR/pruned (prune remove).", identity=False, common=True
    )
    export: tuple[str, ...] = output_option(
        (), f"What --remove writes: {EXPORT}", metavar="KIND", identity=False, needs="remove"
    )


Compensation = Literal["none", "mean", "least-squares"]
AUTO = "auto"
"""The method that compares several refits and chooses the one that harms least."""
ANCHORS = ("none", "mixed")
WITH_REFIT = "method=least-squares|auto"
DAMPING, AUTO_DAMPING = 1e-4, 0.1
"""λ as a share of the mean diagonal of second moments: the default, and what `auto` compares."""

OtherText = tuple[Any, ...]
"""A text besides the calibration text: its source and its target, files or lists; one of `ANCHORS`; () for none."""


@dataclass(frozen=True, kw_only=True)
class Refit:
    """A refit of the remaining heads after a removal: `method` is "least-squares", "mean", "none" or "auto".

    `damping` is λ as a share of the mean second moment of the contexts; None is 0.1 for "auto" and on fewer than 10,000
    subwords, else 1e-4.
    `sentences` is the number of sentences of the text to calibrate on.
    `sequential`: module after module, for the contexts and the residual stream of the model that is pruned so far.
    `feed_forward`: after that the outputs of feed-forward blocks are refitted too, block after block.
    `objective` measures damage on held-out text (empty: what fits the model).
    `anchor` adds the moments of other text to those of the calibration text, so that a refit holds there too: "mixed"
    (random subwords, and the words of the calibration text in random order), "none", or a text of your own.
    `strength` is the step from the old projection towards its refit: 1 is the whole refit, 0.5 half of it.
    `add_bias`, which the export sets: a projection without a bias gets one; otherwise its refit is linear.
    "auto" compares none, mean and least squares (`damping` 0.1; with and without "mixed"; `strength` 1, 0.5 and 0.25)
    on held-out text and on a second text, and chooses what harms least on the worse of the two. `check` is that second
    text (default: text of many kinds that ships, random subwords where the language is not known).
    Texts are a file's path, a list of sentences, a pair (source, target) of these, or `hs.Texts`.
    ConfigError for values of a wrong type, an unknown method, a negative damping, and options that a method lacks.
    """

    method: Literal[Compensation, "auto"] = option("least-squares", name="compensate")
    damping: float | None = option(None, minimum=0, needs=WITH_REFIT)
    sentences: int = option(1000, name="calibration_sentences", minimum=1)
    sequential: bool = option(False, needs=WITH_REFIT)
    feed_forward: bool = option(False, needs=WITH_REFIT)
    objective: str = ""
    anchor: Any = option((), needs=WITH_REFIT)
    check: Any = option((), needs=f"{WITH_REFIT}|mean")
    strength: float = option(1.0, above=0, maximum=1, needs=f"{WITH_REFIT}|mean", excludes="sequential")
    add_bias: bool = False

    @classmethod
    def of(cls, config: Any, **others: Any) -> Refit:
        """The refit that the options of a command describe, with `others` in place of theirs."""
        option_names = {entry.name: option_name(entry) for entry in fields(cls)}
        values = {name: getattr(config, option) for name, option in option_names.items() if hasattr(config, option)}
        return cls(**{**values, **others})

    def __post_init__(self) -> None:
        for name in ("anchor", "check"):
            object.__setattr__(self, name, other_text(name, getattr(self, name)))
        check_fields(self)

    @property
    def share(self) -> float:
        """λ as a share of the mean second moment."""
        default = AUTO_DAMPING if self.method == AUTO else DAMPING
        return default if self.damping is None else self.damping

    @property
    def name(self) -> str:
        """The refit's name in signatures."""
        return "-".join(self.parts(anchor_name(self.anchor)))

    def parts(self, *details: str, mark: str = "=") -> list[str]:
        """The parts of a name: the method, its stages, `details`, and the strength where it is less than 1."""
        stages = ["sequential"] * self.sequential + ["feed-forward"] * self.feed_forward
        strength = [f"strength{mark}{self.strength:g}"] * (self.strength < 1)
        return [self.method, *stages, *filter(None, details), *strength]


def missing_text(what: str) -> str:
    """The message of a missing text: the problem `what`, and the options to give."""
    return f"{what}: give {flag.source} FILE, and {flag.target} FILE for translation"


def anchor_name(anchor: OtherText) -> str:
    """The kind of an anchor: "" for none, "mixed", or "text" for a text."""
    if not anchor or anchor == ("none",):
        return ""
    return "mixed" if anchor == ("mixed",) else "text"


def other_text(name: str, text: Any) -> OtherText:
    """The text that an option names; ConfigError for more than two files, and for an unknown anchor."""
    parts = text if isinstance(text, tuple) else (text,)
    if parts in ((None,), ("",)):
        return ()
    if len(parts) > 2:
        raise ConfigError(f"{flag(name)}: {len(parts)} files; give one, or source and target: FILE,TARGET")
    is_word = name == "anchor" and len(parts) == 1 and isinstance(parts[0], str)
    if is_word and parts[0] not in ANCHORS and not Path(parts[0]).exists():
        raise ConfigError(f"{flag.anchor}: there is no file {parts[0]!r}; choose {', '.join(ANCHORS)} or a file")
    return parts
