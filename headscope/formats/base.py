"""What every checkpoint format gives: a model whose heads go through `attend`, and how to feed it text."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from headscope.bounds import check_numbers
from headscope.config import CheckpointOptions, Companions
from headscope.data.encoded import IGNORED as IGNORED
from headscope.data.encoded import Batch, Encoded
from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import exists
from headscope.formats.finite import refuse_damaged_model
from headscope.heads import Layout, Site
from headscope.model.discovery import AttentionSites, find_attention
from headscope.model.projections import Projections, projections
from headscope.registry import Registry

SideName = Literal["source", "target"]
Predicts = Literal["words", "classes", "nothing"]
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")


LONGEST = 1024  # pieces of a text to translate where the model sets no limit; also fairseq's max_source_positions
_FLAGS = {
    "power": "--lenpen",
    "max_ratio": "--max-len-a",
    "max_extra": "--max-len-b",
    "best": "--nbest",
    "longest": "--max-length",
}


class Translation(NamedTuple):
    """One translation, and what the search ranks it by (0 for a Hugging Face model that was not asked for scores)."""

    text: str
    score: float


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """How to translate; None means: as the checkpoint itself says.

    `beam` hypotheses are followed, the score is Σ log p over a penalty of the length to the `power`, n source
    tokens give at most `max_ratio` · n + `max_extra` tokens, `best` translations are returned. Of a text `longest`
    pieces are read (None: see `Checkpoint.reads`). `keep_pieces` leaves pieces apart; `scores` says that scores will
    be looked at.
    """

    beam: int | None = None
    power: float | None = None
    max_ratio: float | None = None
    max_extra: int | None = None
    best: int = 1
    longest: int | None = None
    keep_pieces: bool = False
    scores: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, flags=_FLAGS)
        if self.beam is not None and not 1 <= self.best <= self.beam:
            raise ConfigError(
                f"--nbest {self.best} with --beam {self.beam}: a beam gives 1 to {self.beam} translations"
            )


class Checkpoint(ABC):
    """An opened checkpoint: a model that came from files, or one that is in memory only (`digest` None)."""

    def __init__(self, *, path: str, format: str, model: nn.Module, model_type: str, digest: str | None) -> None:
        self.path = path
        self.format = format
        self.model = model
        self.model_type = model_type
        self._digest = digest

    @property
    def digest(self) -> str:
        """sha256 of the config and weights files; of the weights as they are now where there are no files."""
        return weights_digest(self.model) if self._digest is None else self._digest

    @property
    def in_memory(self) -> bool:
        """Whether the model came from no files, so that its owner may change it at any time."""
        return self._digest is None

    def look_again(self) -> None:
        """Forget where the heads are: the model may have been rebuilt."""
        for name in ("attention_sites", "projections"):
            self.__dict__.pop(name, None)

    @cached_property
    def attention_sites(self) -> AttentionSites:
        """All attention of the model; CheckpointError where its heads cannot be seen."""
        return find_attention(self.model)

    @property
    def layout(self) -> Layout:
        """Number of heads of every (site, layer)."""
        return self.attention_sites.layout

    @cached_property
    def projections(self) -> dict[tuple[Site, int], Projections]:
        """Which rows and columns of which matrix are whose, at every (site, layer)."""
        return projections(self.model)

    @property
    def decodes(self) -> bool:
        """Whether there is a decoder, which predicts at each position what comes next."""
        return (
            any(attention_site.site is Site.DECODER_SELF for attention_site in self.attention_sites.order)
            or self.two_sided
        )

    @property
    @abstractmethod
    def predicts(self) -> Predicts:
        """What the model as it is predicts: "words", "classes" (see `class_scores`), or "nothing"."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.model.parameters()).dtype

    @property
    @abstractmethod
    def two_sided(self) -> bool:
        """Whether there is an encoder and a decoder."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The most pieces that one sentence may have, or None where the model sets no limit."""

    def reads(self, longest: int | None) -> int:
        """The most pieces of a text that is translated: `longest`, else the model's limit, else 1,024.

        ConfigError where more is asked than the model has positions for.
        """
        limit = self.source_limit
        if longest is not None and limit is not None and longest > limit:
            raise ConfigError(f"--max-length {longest} is more than the {limit} positions of the model")
        return longest or limit or LONGEST

    @property
    def source_limit(self) -> int | None:
        """The most pieces that a text to translate may have, or None where the model sets no limit."""
        return self.limit

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        """Ids of texts, special ones included, at most `limit` each; targets are the decoder's inputs."""

    def why_unknown(self, side: SideName) -> str:
        """What unknown pieces of a side probably come from, and what to do, for messages."""
        return "is the text in the language, script and case that the vocabulary was made for?"

    @abstractmethod
    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:
        """Character span in `text` of every id; None for special ids, None overall if they do not fit."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Ids as the tokenizer writes them."""

    @abstractmethod
    def id_of(self, piece: str) -> int | None:
        """The id of a piece, None where the vocabulary lacks it."""

    @abstractmethod
    def plain_ids(self) -> list[int]:
        """Ids that text can have: without padding, start, end, and other special ones."""

    def common_ids(self) -> list[int]:
        """Ids that text can have on every side: what may be put before an encoder and its decoder alike."""
        return self.plain_ids()

    @abstractmethod
    def start_ids(self) -> list[int]:
        """Special ids that every decoder-only text begins with (empty for most GPT-2-like models)."""

    @abstractmethod
    def forward(self, batch: Batch) -> None:
        """One pass over a batch, without the output layer where the model can be run without it."""

    @abstractmethod
    def states(self, batch: Batch) -> Tensor:
        """Final states [b n d] of the last stack that runs: the decoder, or the encoder where there is no target."""

    def class_scores(self, batch: Batch) -> Tensor:
        """Logits [b classes] of a classifier; CheckpointError for models that are none."""
        raise CheckpointError(f"{self.path} is no classifier")

    @abstractmethod
    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """What a decoder must say after each of its inputs, which are `encode`'s; `IGNORED` where nothing."""

    @abstractmethod
    def memory(self, batch: Batch) -> Any:
        """What the encoder makes of a batch, to give to `logits`; None for models of one side."""

    @abstractmethod
    def logits(self, batch: Batch, memory: Any = None) -> Tensor:
        """Scores of the vocabulary [b t V] after each decoder input, or in place of each encoder input."""

    @abstractmethod
    def unembedding(self) -> tuple[nn.Module, Tensor]:
        """The module that makes logits of final states, and its whole matrix [V d]; CheckpointError without one."""

    @abstractmethod
    def mask_id(self) -> int:
        """The id that stands for a hidden token; CheckpointError for models that have none."""

    @abstractmethod
    def joined(self, text: str) -> str:
        """A reference as translations are written: where texts are given split into pieces, put together."""

    @abstractmethod
    def translations(self, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
        """Translations of texts, all in one batch, best first; CheckpointError where the model cannot."""

    @abstractmethod
    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        """What shapes a translation, for signatures: beam, length penalty, bounds of the length."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What `headscope show` prints beside the heads: architecture, tokenizer."""

    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters of each child of the model, shared ones counted once, at their first place."""
        return parameters_by_part(self.model)


class CheckpointFormat(ABC):
    """A kind of checkpoint on disk: recognised by content, opened into a `Checkpoint`.

    `takes` names the companions (fields of `Companions`) that mean something for the format.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def recognise(self, path: Path) -> bool:
        """Whether the file or directory is of this format; reads headers only, never fails."""

    def recognise_name(self, name: str) -> bool:
        """Whether a name that is no path may be a checkpoint of this format elsewhere (a hub id)."""
        return False

    @abstractmethod
    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> Checkpoint:
        """Open the checkpoint; CheckpointError for what is broken or unsupported.

        Of `companions` only those that the format's `takes` names are ever given.
        """


FORMATS: Registry[CheckpointFormat] = Registry(
    "checkpoint format", package="headscope.formats", group="headscope.formats"
)


def open_checkpoint(
    path: str,
    *,
    format: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    companions: Companions | None = None,
) -> Checkpoint:
    """Open a checkpoint: a file, a directory or a hub id; the format is found from content.

    `format` overrides that. CheckpointError where no format fits, and naming the weights that are NaN or
    infinite; ConfigError for an unknown format,
    device or dtype, or for a companion file that the format has no use for.
    """
    companions = companions or Companions()
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; available: {', '.join(DTYPES)}")
    chosen = FORMATS.get(format) if format else _detect(path)
    if useless := [f"--{name}" for name in companions.given() if name not in chosen.takes]:
        takes = ", ".join(f"--{name}" for name in sorted(chosen.takes)) or "none of these"
        raise ConfigError(f"{', '.join(useless)} means nothing for a {chosen.name} checkpoint, which takes {takes}")
    opened = chosen.load(path, device=pick_device(device), dtype=dtype, companions=companions)
    refuse_damaged_model(path, opened.model)
    return opened


def open_configured(options: CheckpointOptions, *, dtype: str | None = None) -> Checkpoint:
    """`open_checkpoint` as the options of a command say; `dtype` overrides theirs."""
    return open_checkpoint(
        options.checkpoint,
        format=options.format,
        device=options.device,
        dtype=dtype or options.dtype,
        companions=options.companions,
    )


def _detect(path: str) -> CheckpointFormat:
    attention_site, there = Path(path), exists(path)
    for _, candidate in FORMATS:
        if candidate.recognise(attention_site) if there else candidate.recognise_name(path):
            return candidate
    if not there:
        raise CheckpointError(f"there is no file or directory {path}, and it does not look like a hub id (owner/name)")
    known = "; ".join(f"{name}: {candidate.summary}" for name, candidate in FORMATS)
    raise CheckpointError(f"{path} is no checkpoint that headscope knows ({known})")


def pick_device(name: str) -> str:
    """`auto` is a GPU if there is one; ConfigError for a device that this machine lacks."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available.get(name.partition(":")[0], False):
        there = ", ".join(["auto", *(device for device, found in available.items() if found)])
        raise ConfigError(f"device {name!r} is not available on this machine; available: {there}")
    return name


def file_digest(files: Sequence[Path]) -> str:
    """sha256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            while block := handle.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """sha256 over the class of a model and the names, types, shapes and bytes of its parameters and buffers."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters by kind of part: embeddings, attention, normalisation, feed-forward and other; then all."""
    parts: Counter[str] = Counter()
    attention = {id(module) for module in model.modules() if _is_attention(module)}
    seen: set[int] = set()
    inside: set[str] = set()
    for name, module in model.named_modules():
        if id(module) in attention:
            inside.add(name)
        within = any(name == outer or name.startswith(f"{outer}.") for outer in inside)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parts[_part(module, within)] += parameter.numel()
    return {**dict(sorted(parts.items())), "total": sum(parts.values())}


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()


def _part(module: nn.Module, within_attention: bool) -> str:
    if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower():
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "normalisation"
    return "attention" if within_attention else "feed-forward and other"
