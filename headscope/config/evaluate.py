"""The options of `headscope evaluate`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from headscope.config.inputs import (
    BleuOption,
    CheckpointOptions,
    ExpertOption,
    SearchOptions,
    TextFiles,
    TextOptions,
    output_option,
)
from headscope.config.option import option
from headscope.errors import ConfigError, flag

SCORES, EACH = "Metrics", "Each head off"
scores_option, each_option = (partial(option, panel=panel) for panel in (SCORES, EACH))
"""`option` under the heading of that name."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ExpertOption, BleuOption, SearchOptions, TextOptions):
    """How a model is scored, whatever the checkpoint and the text.

    `metrics` empty: all that fit the model (with `each_head` those that need no translation); of models that predict
    something without those that compare states with the intact model's.
    """

    metrics: tuple[str, ...] = scores_option(
        (),
        "`headscope list metrics` has them. Default: all that fit; those that compare states with the intact model's "
        "for encoders without a head and with --against.",
        metavar="NAMES",
        common=True,
    )
    text: Literal["raw", "tokenised-lowercase"] = scores_option(
        "raw", "BLEU and chrF of detokenised text as it is, or of tokenised text whatever its case."
    )
    hiding: Literal["each", "random"] = scores_option(
        "each", "Encoders alone: hide each token in turn (pseudo-log-likelihood), or 15 % of them at once."
    )
    each_head: bool = each_option(
        False,
        "Switch off each head in turn. Default metrics: all that need no translation, all heads in one pass; bleu and "
        "chrf translate the whole text for every head, which is slow.",
        common=True,
    )
    heads: str | None = each_option(
        None, "Only these heads: cross.0.*,decoder-self.1.3.", metavar="LIST", of="each_head"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EvaluateOptions, TextFiles, CheckpointOptions):
    """The options of `headscope evaluate`."""

    against: str | None = scores_option(
        None,
        "Intact checkpoint that final states are compared with; default: the one that pruning.json beside CKPT names, "
        "else CKPT itself without --mask.",
        metavar="CKPT",
        common=True,
    )
    out: Path | None = each_option(
        None, "Write the table of all heads.", metavar="FILE.csv", is_output=True, common=True, of="each_head"
    )
    per_sentence: Path | None = output_option(
        None,
        "Write sentence, tokens, nll (nats), hypothesis.",
        metavar="FILE.csv",
        is_output=True,
        common=True,
        excludes="each_head",
    )
    force: bool = output_option(False, "Replace an earlier result.", identity=False, common=True)

    def __post_init__(self) -> None:
        if self.source is None and self.labels is None:
            raise ConfigError(f"no text: give {flag.source} FILE (one sentence a line)")
