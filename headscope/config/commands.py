"""The options of `headscope evaluate`, `show`, `translate`, `convert` and `demo`, and how checkpoints translate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from headscope.config.inputs import (
    BatchTokens,
    BleuOption,
    CheckpointOptions,
    MaskedHeads,
    SearchOptions,
    TextFiles,
    TextOptions,
    data_option,
    model_option,
    output_option,
    search_option,
)
from headscope.config.option import BEAM, SEED, WHOLE, option
from headscope.errors import ConfigError, flag

scores_option, each_option = (partial(option, panel=panel) for panel in ("Metrics", "Each head off"))
"""`option` under the heading of that name."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(BleuOption, SearchOptions, TextOptions, TextFiles, CheckpointOptions):
    """The options of `headscope evaluate`.

    Without `metrics` all that fit the model are computed. `each_head` leaves out those that translate. A model that
    predicts words or classes leaves out those that compare states with the intact model's.
    """

    metrics: tuple[str, ...] = scores_option(
        (),
        "See `headscope list metrics`; default: all that fit, those of states for encoders and with --against.",
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
        False, "Switch off each head in turn; default metrics: those of one pass (bleu and chrf are slow).", common=True
    )
    heads: str | None = each_option(
        None, "Only these heads: cross.0.*,decoder-self.1.3.", metavar="LIST", needs="each_head"
    )
    against: str | None = scores_option(
        None,
        "Intact model to compare with; default: CKPT's origin or CKPT without --mask.",
        metavar="CKPT",
        common=True,
    )
    out: Path | None = each_option(
        None, "Write the table of all heads.", metavar="FILE.csv", is_output=True, common=True, needs="each_head"
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


@dataclass(frozen=True, kw_only=True)
class ShowConfig(MaskedHeads, CheckpointOptions):
    """The options of `headscope show`."""

    device: str = model_option("cpu", "auto, cpu, cuda or mps.")
    device_map: str | None = None


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """The options of `headscope list`."""

    kind: str = option(
        "",
        "analyses, pair-functions, criteria, objectives, metrics, rules, formats, engines, figures, learners, "
        "mixings, variants.",
        metavar="KIND",
        argument=True,
    )
    checkpoint: str | None = option(
        None, "One by its name: its options; or a checkpoint: what fits it.", metavar="NAME|CKPT", argument=True
    )


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(SearchOptions):
    """Options of beam search; None means the checkpoint's own value.

    Hypotheses are ranked by Σ log p over a length penalty to the power of `lenpen`; `scores` requests these numbers.
    `exact` is for timing: every translation gets exactly this number of tokens before the end symbol.
    """

    nbest: int = output_option(
        1, "Translations of each line, each behind the line's number and a tab.", minimum=1, maximum=BEAM, common=True
    )
    scores: bool = output_option(False, "Write the score and a tab before each text.", common=True)
    keep_bpe: bool = output_option(False, "Leave the subwords of words apart.", common=True)
    max_length: int | None = data_option(
        None, "Subwords of a line, longer ones are cut; default: the model's limit, else 1024.", minimum=2
    )
    exact: int | None = None

    def __post_init__(self) -> None:
        if self.beam is not None and not 1 <= self.nbest <= self.beam:
            raise ConfigError(
                f"{flag('nbest', self.nbest)}: {flag('beam', self.beam)} gives 1 to {self.beam} translations"
            )


@dataclass(frozen=True, kw_only=True)
class TranslateConfig(TranslateOptions, MaskedHeads, BatchTokens, CheckpointOptions):
    """The options of `headscope translate`."""

    greedy: bool = search_option(False, "The likeliest token at every step: a beam of 1.", common=True, excludes="beam")
    seed: int = model_option(1, "Seed of what --expert draws.", minimum=0, maximum=SEED, needs="expert=random")
    window: int = model_option(512, "Lines that are read before they are translated.", minimum=1, maximum=WHOLE)

    @property
    def search(self) -> TranslateOptions:
        """The options of beam search; `greedy` is a beam of 1."""
        return replace(self, beam=1) if self.greedy else self


@dataclass(frozen=True, kw_only=True)
class WrittenModel:
    """Options of writing a model: quantization for engines, and the model hub."""

    quantize: str = output_option(
        "none", "How a file for an engine stores matrices, such as q8_0 of gguf; default: as the checkpoint does."
    )
    hub_name: str | None = output_option(
        None, "Push the folder to the model hub; a new repository is private.", metavar="USER/NAME", identity=False
    )
    hub_public: bool = output_option(False, "Make a new hub repository public.", identity=False, needs="hub_name")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(WrittenModel, CheckpointOptions):
    """The options of `headscope convert`."""

    out: Path = option(help="Directory to write.", metavar="OUT", argument=True, is_output=True)
    to: str = output_option(
        help="native, huggingface or fairseq; or for an engine, which runs it first (`headscope list engines`)."
    )
    device: str = "cpu"
    device_map: str | None = None
    force: bool = output_option(False, "Replace an earlier conversion in the output.", identity=False)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The options of `headscope demo`."""

    out: Path = option(Path("demo"), "Directory for the results.", metavar="DIR", is_output=True)
    force: bool = option(False, "Replace an earlier demonstration.", identity=False)


class Translation(NamedTuple):
    """One translation and its score in the search (0 for a Hugging Face model unless `scores` requests it)."""

    text: str
    score: float
