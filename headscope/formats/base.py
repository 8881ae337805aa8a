"""The contract of checkpoints: a model whose heads go through `attend`, and how to feed it text."""

from __future__ import annotations

import copy
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from headscope.config import CheckpointOptions, Companions
from headscope.config.commands import TranslateOptions, Translation
from headscope.data.encoded import Batch, Encoded, Side, SideName
from headscope.distributed import pick_device
from headscope.errors import CheckpointError, CheckpointWarning, ConfigError, flag, flags, raise_first
from headscope.files.folders import replacing
from headscope.files.output_checks import OutputKind, check_folder
from headscope.formats.diagnosis import diagnose, no_checkpoint
from headscope.formats.exports import MASKED as MASKED
from headscope.formats.exports import MODEL_FILES, SAME, Probe
from headscope.formats.exports import Export as Export
from headscope.formats.exports import SavedFiles as SavedFiles
from headscope.heads import Layout, Site, SiteLayer
from headscope.model.discovery import AttentionSites, find_attention
from headscope.model.forward import mean_pooled
from headscope.model.nonfinite import refuse_damaged_model
from headscope.model.projections import Projections, projections
from headscope.model.removal_plan import RemovalPlan
from headscope.model.stored_weights import computing_dtype, execution_device, weights_digest
from headscope.registry import Registry

C = TypeVar("C", bound="Checkpoint")
Predicts = Literal["words", "classes", "tags", "nothing"]
Alteration = Literal["shrink", "zero", "pool"]
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
POSITION = 0.02  # seconds of a recording that a position of its encoder stands for
LONGEST = 1024  # subwords of a text to translate where the model sets no limit; also fairseq's max_source_positions


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

    two_sided: bool  # whether there is an encoder and a decoder
    limit: int | None  # the most subwords of a sentence; None where the model sets no limit
    alterations: ClassVar[Mapping[Alteration, Callable[[Any, RemovalPlan], nn.Module]]] = {}  # of `alter_heads`
    is_native: ClassVar[bool] = False  # whether it is a `TransformerCheckpoint`: its model can be trained and converted
    read_files: tuple[Path, ...] = ()  # its files outside `path`, such as dictionaries that were found beside it
    reads_sound: bool = False  # whether its encoder reads recordings, a position for every `POSITION`
    rereads_source: bool = False  # whether its decoder reads the source too, as in a classifier with an encoder
    exclusive_labels: bool = True  # whether exactly one label is right, not several at once
    writes: str | None = None  # the language that it writes, as its files name it; None if they do not say
    prefix: str = ""  # common prefix of the names of weights in its files, absent in its model
    quantization: str = ""  # the type of its file's weights, such as Q4_K, if they were dequantised on loading

    def forget_heads(self) -> None:
        """Drop the cached places of heads: the model may have been rebuilt."""
        self.__dict__.pop("attention_sites", None), self.__dict__.pop("projections", None)

    def with_model(self: C, model: nn.Module) -> C:
        """A copy of the checkpoint around another model of its kind, which is in memory only."""
        twin = copy.copy(self)
        twin._digest = None
        twin.forget_heads()
        twin.model = model
        return twin

    def alter_heads(self: C, plan: RemovalPlan, how: Alteration) -> C:
        """A copy without the heads that a plan removes: "shrink" cuts them out, "zero" sets their output weights to 0.

        "pool" keeps the size: merged key/value groups share their mean. ConfigError if the format cannot do that.
        """
        if how not in self.alterations:
            kind = f"a {self.format} checkpoint"
            reasons = {
                "shrink": f"heads of {kind} cannot be cut out; take {flag.export} masked",
                "zero": f"heads of {kind} cannot be removed",
                "pool": f"{flag.merge_kv}: every head of {kind} has keys and values of its own",
            }
            raise ConfigError(reasons[how])
        return self.with_model(self.alterations[how](self.model, plan))

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The type in which files store the weight `name`; None if it is written in the model's type."""
        return None

    @cached_property
    def attention_sites(self) -> AttentionSites:
        """All attention of the model; CheckpointError where its heads cannot be seen."""
        return find_attention(self.model)

    @property
    def layout(self) -> Layout:
        """Number of heads of every (site, layer)."""
        return self.attention_sites.layout

    @cached_property
    def projections(self) -> dict[SiteLayer, Projections]:
        """The rows and columns of every head's matrices, by (site, layer)."""
        return projections(self.model)

    @property
    def decodes(self) -> bool:
        """Whether there is a decoder, which predicts at each position what comes next."""
        return self.two_sided or any(entry.site is Site.DECODER_SELF for entry in self.attention_sites.order)

    @property
    @abstractmethod
    def predicts(self) -> Predicts:
        """The model's predictions: "words", "classes" of sentences, "tags" of words, or "nothing"."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes or tags that the model predicts, by number; empty for models that predict others."""
        return ()

    @property
    def needs_target(self) -> bool:
        """Whether its predictions are about a target text."""
        return self.two_sided and self.predicts == "words"

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs: that of its weights, or of the first of them if they are on several."""
        return execution_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are not quantised."""
        return computing_dtype(self.model)

    @property
    def default_length(self) -> int | None:
        """The length that texts are cut to by default: that of the training texts, at most `limit`."""
        return self.limit

    def source_length(self, longest: int | None) -> int:
        """The length that a text to translate is cut to: `longest`, else `source_limit`, else 1,024.

        ConfigError if `longest` is more than the model's positions.
        """
        if longest and (limit := self.source_limit) and longest > limit:
            raise ConfigError(f"{flag.max_length} {longest} is more than the {limit} positions of the model")
        return longest or self.source_limit or LONGEST

    @property
    def source_limit(self) -> int | None:
        """The most subwords that a text to translate may have, or None where the model sets no limit."""
        return self.limit

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of ids."""

    @property
    @abstractmethod
    def vocabularies(self) -> tuple[int, int]:
        """Number of embeddings of the source and of the target side."""

    @abstractmethod
    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        """Ids of texts, special ones included, at most `limit` each; targets are the decoder's inputs."""

    def encode_pairs(self, texts: Sequence[tuple[str, str]], *, limit: int) -> list[Encoded]:
        """Ids of pairs of texts that an encoder reads together; ConfigError for models that read one text."""
        raise ConfigError(f"a model of type {self.model_type!r} reads one text; leave out {flags('source2', 'pairs')}")

    def decoder_inputs(self, sources: Sequence[Encoded]) -> list[Encoded]:
        """The decoder's inputs, made of the sources; empty unless the model `rereads_source`."""
        return []

    def why_unknown(self, side: SideName) -> str:
        """The likely cause of unknown subwords on a side, and the remedy, for messages."""
        return "is the text in the language, script and case that the vocabulary was made for, and in its form (NFC)?"

    @abstractmethod
    def spans(self, text: str, ids: Sequence[int], *, side: SideName) -> list[tuple[int, int] | None] | None:
        """Character spans in `text` of ids, with None for special ones. Returns None if ids cannot be located."""

    @abstractmethod
    def subwords(self, ids: Sequence[int], *, side: SideName) -> list[str]:
        """Ids of a side as the tokenizer writes them."""

    @abstractmethod
    def id_of(self, subword: str, *, side: SideName) -> int | None:
        """The id of a subword on a side. Returns None if its vocabulary lacks it."""

    @abstractmethod
    def plain_ids(self, *, side: SideName) -> list[int]:
        """Ids that text of a side can have: without padding, start, end, and other special ones."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, side: SideName) -> str:
        """The text that ids of a side stand for, as `encode` takes text."""

    def common_ids(self) -> list[int]:
        """Ids that text can have on both sides, so that an encoder and its decoder can both read them."""
        return sorted({*self.plain_ids(side="source")} & {*self.plain_ids(side="target")})

    @abstractmethod
    def start_ids(self) -> list[int]:
        """Special ids that every decoder-only text begins with (empty for most GPT-2-like models)."""

    @abstractmethod
    def arguments(self, source: Side, target: Side | None) -> dict[str, Tensor]:
        """The model's keyword arguments for padded ids of a source, and of a target if it has two sides."""

    @abstractmethod
    def forward(self, batch: Batch) -> None:
        """Run the model on a batch, without the output layer if possible."""

    @abstractmethod
    def states(self, batch: Batch) -> Tensor:
        """Final states [b n d] of the decoder, or of the encoder where there is no target."""

    pool = staticmethod(mean_pooled)

    @abstractmethod
    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """The id that a decoder should predict after each input of `encode`; `IGNORED` where there is none."""

    @abstractmethod
    def memory(self, batch: Batch) -> Any:
        """The encoder's states of a batch, for `logits`; None for models of one side."""

    @abstractmethod
    def logits(self, batch: Batch, memory: Any = None) -> Tensor:
        """Logits [b t V] of the vocabulary after each decoder input, or of words or tags at each encoder input.

        Classes: [b 1 V].
        """

    def logits_at(self, batch: Batch, positions: Tensor) -> Tensor:
        """Logits [b V] of each text at its own position [b]."""
        logits = self.logits(batch)
        return logits[torch.arange(len(logits), device=logits.device), positions]

    @abstractmethod
    def unembedding(self) -> tuple[nn.Module, Tensor]:
        """The module that makes logits of final states, and its whole matrix [V d]; CheckpointError without one."""

    def mask_id(self) -> int:
        """The id that stands for a hidden token; CheckpointError for models that have none."""
        raise CheckpointError(f"{self.path} is no masked language model")

    def join_subwords(self, text: str) -> str:
        """A reference in the form of translations: joined, if texts are given already split into subwords."""
        return text

    @abstractmethod
    def translations(self, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
        """Translations of texts, all in one batch, best first; CheckpointError where the model cannot."""

    @abstractmethod
    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        """Settings of the search, for signatures: beam, length penalty, bounds of the length."""

    @abstractmethod
    def tokenizer_facts(self) -> dict[str, Any] | None:
        """Class, size, special subwords and languages of the tokenizer or vocabularies, if there are any."""

    def facts(self) -> dict[str, Any]:
        """Facts that `headscope show` prints beside the heads: architecture, tokenizer."""
        return {
            "architecture": type(self.model).__name__,
            "model_type": self.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "limit": self.limit,
            "tokenizer": self.tokenizer_facts(),
        }


class CheckpointFormat(ABC, Generic[C]):
    """A format of checkpoints on disk: recognised by content, opened into a `Checkpoint`, and written again.

    `takes`: the fields of `Companions` that `load` uses. `exports`: ways to write a checkpoint without some heads, the
    default first. `kind`: the files that `save` leaves in a directory. `converts`: whether `convert` writes native
    Transformers of other formats. `spreads`: whether `load` takes a `device_map`. `names`: a pattern of names that are
    not paths but may be checkpoints elsewhere (hub ids).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[frozenset[str]] = frozenset()
    exports: ClassVar[tuple[Export, ...]] = (SAME, MASKED)
    kind: ClassVar[OutputKind] = OutputKind("checkpoint", "checkpoint", "", MODEL_FILES)
    converts: ClassVar[bool] = False
    names: ClassVar[str] = ""
    spreads: ClassVar[bool] = False

    @abstractmethod
    def recognise(self, path: Path) -> bool:
        """Whether the file or directory is of this format; reads headers only, never fails."""

    @abstractmethod
    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> C:
        """Open the checkpoint with the `companions` that `takes` names; CheckpointError if it is unsupported."""

    @abstractmethod
    def write(self, checkpoint: C, folder: Path) -> SavedFiles:
        """Write a checkpoint into an empty directory, in another format if this one cannot hold it (see `notes`)."""

    def save(self, checkpoint: C, folder: Path, *, force: bool = False) -> SavedFiles:
        """Write a checkpoint into a directory of its own; OutputError if the directory holds anything else."""
        check_folder(folder, self.kind, force=force)
        with replacing(folder, self.kind, force=force) as temporary:
            files = self.write(checkpoint, temporary)
        return replace(files, path=folder / files.path.relative_to(temporary))

    def convert(self, checkpoint: Any, folder: Path, probe: Probe) -> SavedFiles:
        """Write a `TransformerCheckpoint` into an empty directory and read it back; CheckpointError if that fails."""
        raise ConfigError(f"a checkpoint cannot be converted to {self.name}")


FORMATS: Registry[CheckpointFormat[Any]] = Registry(
    "checkpoint format", package="headscope.formats", group="headscope.formats", main="format"
)


def open_checkpoint(
    path: str,
    *,
    format: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    companions: Companions | None = None,
) -> Checkpoint:
    """Open a checkpoint: a file, a directory or a hub id; the format is found from content.

    `format` overrides that; `device_map` is "auto" or a JSON file of modules and their devices. CheckpointError if no
    format fits, or for weights that are NaN or infinite; ConfigError for options that the format does not use.
    """
    companions = companions or Companions()
    opener = FORMATS.get(format) if format else detect_format(path)
    useless = [flag(name) for name in companions.companion_values() if name not in opener.takes]
    takes = ", ".join(flag(name) for name in sorted(opener.takes)) or "none of these"
    spread = {} if device_map is None else {"device_map": device_map}
    problems = {
        f"unknown dtype {dtype!r}; available: {', '.join(DTYPES)}": dtype not in DTYPES,
        f"{', '.join(useless)} means nothing for a {opener.name} checkpoint, which takes {takes}": useless,
        f"{flag.device_map} says where the model runs, and {flag.device} too; give one": spread and device != "auto",
        f"{flag.device_map} is for Hugging Face checkpoints, not {opener.name}": spread and not opener.spreads,
    }
    raise_first(ConfigError, problems)
    try:
        result: Checkpoint = opener.load(path, device=pick_device(device), dtype=dtype, companions=companions, **spread)
    except CheckpointError as error:
        raise CheckpointError(diagnose(Path(path), FORMATS) or str(error)) from error
    refuse_damaged_model(result.path, result.model)
    if result.prefix:
        warnings.warn(f"{path}: {result.prefix} begins all names of weights, and is taken off", CheckpointWarning, 2)
    return result


def open_configured(options: CheckpointOptions, *, dtype: str | None = None) -> Checkpoint:
    """`open_checkpoint` as the options of a command say; `dtype` overrides theirs."""
    placement = {name: getattr(options, name) for name in ("format", "device", "device_map")}
    return open_checkpoint(options.checkpoint, dtype=dtype or options.dtype, companions=options, **placement)


def detect_format(path: str) -> CheckpointFormat[Any]:
    """The format of a file, a directory or a hub id, by its content; CheckpointError where none fits."""
    for _, candidate in FORMATS:
        if candidate.recognise(Path(path)) if os.path.exists(path) else re.fullmatch(candidate.names, path):
            return candidate
    raise no_checkpoint(Path(path), FORMATS)


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> SavedFiles:
    """Write a checkpoint as its own format does, into an empty directory."""
    return FORMATS.get(checkpoint.format).write(checkpoint, folder)
