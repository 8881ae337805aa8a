"""The options of `headscope show`, `translate`, `convert` and `demo`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.config.inputs import (
    DATA,
    MODEL,
    OUTPUT,
    SEARCH,
    BatchTokens,
    CheckpointOptions,
    ExpertOption,
    MaskedHeads,
    SearchOptions,
)
from headscope.config.option import BEAM, SEED, WHOLE, option
from headscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShowConfig(MaskedHeads, CheckpointOptions):
    """The options of `headscope show`."""

    device: str = option("cpu", "auto, cpu, cuda or mps.", panel=MODEL)
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
        None,
        "One by its name: its options; or a checkpoint: which analyses, objectives or metrics fit it.",
        metavar="NAME|CKPT",
        argument=True,
    )


@dataclass(frozen=True, kw_only=True)
class TranslateConfig(ExpertOption, SearchOptions, MaskedHeads, BatchTokens, CheckpointOptions):
    """The options of `headscope translate`."""

    greedy: bool = option(False, "The likeliest token at every step: a beam of 1.", panel=SEARCH, common=True)
    nbest: int = option(
        1,
        "Translations of each line; each is then written behind the line's number and a tab, from 0.",
        panel=OUTPUT,
        minimum=1,
        maximum=BEAM,
        common=True,
    )
    scores: bool = option(False, "Write the score and a tab before each text.", panel=OUTPUT, common=True)
    keep_bpe: bool = option(False, "Leave the subwords of words apart.", panel=OUTPUT, common=True)
    max_length: int | None = option(
        None,
        "Subwords a line may have, longer ones are cut; default: the model's limit, or 1024 where it has none.",
        panel=DATA,
        minimum=2,
    )
    seed: int = option(1, "Seed of what --expert draws.", panel=MODEL, minimum=0, maximum=SEED, of="expert=random")
    window: int = option(512, "Lines that are read before they are translated.", panel=MODEL, minimum=1, maximum=WHOLE)

    def __post_init__(self) -> None:
        if self.greedy and (self.beam or 1) > 1:
            raise ConfigError(f"--greedy is a beam of 1; leave out --beam {self.beam}")


@dataclass(frozen=True, kw_only=True)
class EngineFileOptions:
    """How files for engines are written."""

    quantize: str = option(
        "none",
        "How a file for an engine stores matrices, such as q8_0 of gguf; default: as the checkpoint does.",
        metavar="NAME",
        panel=OUTPUT,
    )


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Where on the model hub a folder goes."""

    hub_name: str | None = option(
        None,
        "Push the complete folder to the model hub, with its card; a new repository is private.",
        metavar="USER/NAME",
        panel=OUTPUT,
        identity=False,
    )
    hub_public: bool = option(
        False, "Make a new repository on the hub public.", panel=OUTPUT, identity=False, of="hub_name"
    )


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(HubOptions, EngineFileOptions, CheckpointOptions):
    """The options of `headscope convert`."""

    out: Path = option(help="Directory to write.", metavar="OUT", argument=True, written=True)
    to: str = option(
        help="native, huggingface or fairseq; or for an engine, which runs it first (`headscope list engines`).",
        metavar="NAME",
        panel=OUTPUT,
    )
    device: str = "cpu"
    device_map: str | None = None
    force: bool = option(False, "Replace an earlier conversion in the output.", panel=OUTPUT, identity=False)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The options of `headscope demo`."""

    out: Path = option(Path("demo"), "Directory for the results.", metavar="DIR", written=True)
    force: bool = option(False, "Replace an earlier demonstration.", identity=False)
