"""Options that several commands of `headscope prune` share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config.inputs import (
    BatchTokens,
    BleuOption,
    CheckpointOptions,
    ValidatedTextFiles,
    data_option,
    model_option,
    output_option,
)
from headscope.config.option import SEED, WHOLE, TextLines, option, plain_options
from headscope.config.small import EngineFileOptions, HubOptions

HEADS, LEARNING, COMPENSATION = "Which heads", "Learning", "Compensation"
heads_option, learning_option, compensation_option = (
    partial(option, panel=panel) for panel in (HEADS, LEARNING, COMPENSATION)
)
"""`option` under the heading of that name."""
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
TEXT = "source|labels"
MEASURED_TEXT = f"{TEXT}|valid_source|valid_labels"
Freeze = Literal["none", "encoder", "decoder", "model"]


@dataclass(frozen=True, kw_only=True)
class PruningFolder(ValidatedTextFiles, CheckpointOptions):
    """What goes into which folder: the options of every command of `headscope prune`."""

    out: Path = output_option(help="Directory to write.", metavar="DIR", written=True)
    force: bool = output_option(
        False, "Replace the run of the same command in the output.", identity=False, common=True
    )


@dataclass(frozen=True, kw_only=True)
class SmallerModelOptions(HubOptions, EngineFileOptions, BleuOption, PruningFolder):
    """How a smaller model is written, refitted and measured, whoever says which heads go."""

    device_map: str | None = None
    export: tuple[str, ...] = output_option(
        (),
        f"{EXPORT} What most programs can serve is native, of layers with as many heads (--allocate uniform).",
        metavar="KIND",
        common=True,
    )
    feed_forward: bool = compensation_option(
        False,
        "Then refit outputs of feed-forward blocks too, one after the other: they make up for heads as well; auto does "
        "so by itself where vectors are compared.",
    )
    calibration_sentences: int = compensation_option(1000, "Sentences of --source to refit on.", minimum=1)
    check: tuple[str, ...] = data_option(
        (),
        "A second text, of another kind, that refits are chosen by or measured on; default: text of many kinds that "
        "ships in the language of the text (en, de), random subwords where that is not known.",
        metavar="FILE[,TARGET]",
    )
    valid_source: TextLines | None = data_option(
        None,
        "Text to measure the result on, which nothing is fitted to; default: the last fifth of --source.",
        common=True,
    )
    metric: str = data_option(
        "",
        "Measured before and after (`headscope list metrics`); default: accuracy with --labels, perplexity of what "
        "predicts words, else cosine.",
        common=True,
    )
    rounds: int = model_option(
        5, "Timed runs of each model, fewer if slow; 0: none.", minimum=0, maximum=10_000, identity=False
    )


@dataclass(frozen=True, kw_only=True)
class HeadChoice(BatchTokens, PruningFolder):
    """The options that every command shares that says which heads go: which may, and the text that decides."""

    objective: str = data_option(
        "", "What heads are judged by: `headscope list objectives`; default: what fits the model.", of=TEXT
    )
    max_sentences: int | None = data_option(None, "Use only the first N lines.", minimum=1, maximum=WHOLE, of=TEXT)
    valid_sentences: int = data_option(1000, "Lines to measure on.", minimum=1, of=MEASURED_TEXT)
    max_length: int | None = data_option(
        None, "Subwords a side may have; longer sentences are cut.", minimum=2, of=MEASURED_TEXT
    )
    sites: tuple[str, ...] = heads_option(
        (), "Where heads may go: encoder-self,decoder-self,cross; default: everywhere."
    )
    protect: str | None = heads_option(
        None,
        "Heads that stay: encoder-self.0.*,cross.2.1, or a file; alignment: those of generation_config.json.",
        metavar="LIST",
    )


@dataclass(frozen=True, kw_only=True)
class PruningOptions(HeadChoice):
    """The options that every command shares that learns gates, ranks heads or sweeps over both."""

    tune_updates: int = learning_option(0, "Updates that follow, with the heads that go closed for good.", minimum=0)
    freeze: Freeze | None = learning_option(
        None,
        "What does not learn; default: the decoder where only encoder-self is gated (Voita et al. 2019), else nothing. "
        "model: the gates alone learn.",
        flagless=True,
    )
    lr: float | None = learning_option(
        None, "Adam's rate for the model; default: 3e-4, for Hugging Face models 3e-5.", minimum=0
    )
    schedule: Literal["constant", "linear"] = learning_option("constant", "linear: to 0 at the end.", flagless=True)
    warmup: int = learning_option(0, "Updates in which the rates rise.", minimum=0, flagless=True)
    label_smoothing: float | None = learning_option(
        None, "Label smoothing; default: 0.1 for translation, else 0.", minimum=0, below=1, flagless=True
    )
    clip: float = learning_option(1.0, "Longest norm of the model's gradient; 0: no limit.", minimum=0, flagless=True)
    seed: int = learning_option(1, "Seed of gates, noise, dropout and data order.", minimum=0, maximum=SEED)

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

    remove: bool = output_option(
        False, "Go on and cut the heads out, into DIR/pruned (prune remove).", identity=False, common=True
    )
    export: tuple[str, ...] = output_option(
        (), f"What --remove writes: {EXPORT}", metavar="KIND", identity=False, of="remove"
    )
