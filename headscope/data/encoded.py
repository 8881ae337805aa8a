"""Encoded sentences, padded batches of them, the protocol of an encoder of text, and counts of unknown subwords."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headscope.data.corpus import Corpus, Sentence
from headscope.data.parses import Aligned
from headscope.distributed import pin, upload
from headscope.errors import DataError, shortlist
from headscope.heads import Site

SideName = Literal["source", "target"]
SIDE_NAMES: tuple[SideName, SideName] = ("source", "target")
Queries = Literal["all", "first", "last"]
IGNORED = -100  # a label where nothing is to be predicted
UNCUT = 10**9  # a limit for texts that must not be cut


class Encoded(NamedTuple):
    """An encoded sentence: ids, which of them are special, and how many subwords were cut off.

    `unknown` counts the subwords that are not in the vocabulary. `segments` are the token types of a pair of texts, for
    models that read them; empty for others.
    """

    ids: list[int]
    special: list[bool]
    cut: int = 0
    unknown: int = 0
    segments: Sequence[int] = ()

    @classmethod
    def plain(cls, ids: Sequence[int], *, start: Sequence[int] = ()) -> Encoded:
        """Ids that are not special, after the special ones of a `start`."""
        return cls([*start, *ids], [True] * len(start) + [False] * len(ids))

    def first(self, count: int) -> Encoded:
        """The first `count` ids."""
        return self._replace(ids=self.ids[:count], special=self.special[:count], segments=self.segments[:count])

    def without_end(self) -> Encoded:
        """The ids up to the last that is not special, after which a text can be continued."""
        return self.first(max((n for n, special in enumerate(self.special, start=1) if not special), default=0))


T = TypeVar("T")


def map_tensors(part: T, change: Callable[[Tensor], Tensor]) -> T:
    """A part of a batch with `change` applied to every tensor in it; other values stay."""
    if isinstance(part, Tensor):
        return change(part)  # type: ignore[return-value]
    if not is_dataclass(part):
        return part
    values = {name: map_tensors(value, change) for name, value in vars(part).items()}
    return replace(part, **values)  # type: ignore[type-var]


@dataclass(frozen=True)
class Side:
    """Source or target of a batch: token ids [b n], masks [b n] of real tokens (not padding) and of special ones.

    `segments` [b n] are the token types of pairs of texts, None where the model reads none. `aligned` has the word
    units and relations of every parsed sentence, None for a sentence that cannot be aligned with its parse.
    """

    ids: Tensor
    real: Tensor
    special: Tensor
    segments: Tensor | None = None
    aligned: tuple[Aligned | None, ...] = ()

    def to(self, device: torch.device) -> Side:
        """A copy on another device."""
        return map_tensors(self, lambda tensor: upload(tensor, device))

    def rows(self, numbers: Tensor) -> Side:
        """The rows at `numbers` [n], in that order, without padding columns at the end."""
        used_columns = self.real[numbers].any(dim=0).nonzero()  # [n 1]
        length = int(used_columns[-1]) + 1 if len(used_columns) else 0
        aligned = tuple(self.aligned[number] for number in numbers.tolist()) if self.aligned else ()
        return replace(map_tensors(self, lambda tensor: tensor[numbers, :length]), aligned=aligned)


@dataclass(frozen=True)
class CountedTokens:
    """Selects the tokens that count as queries and keys: special ones if kept, the first one unless sinks are excluded.

    With `queries` "first" or "last" only that position of each text is a query, special or not.
    """

    keep_special: bool = False
    exclude_sinks: bool = False
    queries: Queries = "all"

    def keys_of(self, side: Side) -> Tensor:
        """The keys that count [b n]."""
        counts = side.real if self.keep_special else side.real & ~side.special
        return counts & (side.real.cumsum(dim=-1) > 1) if self.exclude_sinks else counts

    def queries_of(self, side: Side) -> Tensor:
        """The queries that count [b n]."""
        if self.queries == "all":
            return self.keys_of(side)
        rank = side.real.cumsum(dim=-1)
        return side.real & (rank == (1 if self.queries == "first" else rank.amax(dim=-1, keepdim=True)))


@dataclass(frozen=True)
class Contrasts:
    """Corrupt versions and answers of the prompts of a batch (`headscope.data.corpus.Contrast`).

    `corrupt` has the corrupt prompts, each as long as its clean one. At `positions` [b] the logits of the ids `answers`
    [b] and `wrong` [b] are read (`IGNORED` where there is no wrong answer). `longer` [b]: the answer has more subwords.
    """

    corrupt: Side
    positions: Tensor
    answers: Tensor
    wrong: Tensor
    longer: Tensor

    def rows(self, numbers: Tensor) -> Contrasts:
        """The rows at `numbers` [n], in that order."""
        return replace(map_tensors(self, lambda tensor: tensor[numbers]), corrupt=self.corrupt.rows(numbers))


@dataclass(frozen=True)
class Batch:
    """Sentences of one forward pass; `indices` [b] are their numbers in the corpus.

    `target` holds the decoder's inputs (the reference shifted right). `labels` [b n], where requested, are the ids that
    a decoder should predict at each of its inputs, the tags of words at their first subwords, or [b 1] the classes of
    sentences; `IGNORED` elsewhere. `contrasts` belong to prompts. `sentences` are the lines of the text. `host` is the
    batch on the CPU that a copy on a device was made of: its shapes and masks are read without waiting for the device.
    """

    indices: Tensor
    fold: int
    source: Side
    target: Side | None = None
    kind: Literal["text", "random", "scrambled"] = "text"
    labels: Tensor | None = None
    contrasts: Contrasts | None = None
    sentences: tuple[Sentence, ...] = ()
    host: Batch | None = None

    @property
    def on_host(self) -> Batch:
        """The batch on the CPU that this one is a copy of; itself if it is not a copy."""
        return self if self.host is None else self.host

    def sides(self, site: Site) -> tuple[Side, Side]:
        """The sides of a site's queries and keys."""
        text = self.source if self.target is None else self.target
        return self.source if site is Site.ENCODER_SELF else text, text if site is Site.DECODER_SELF else self.source

    @property
    def corrupted_batch(self) -> Batch:
        """The batch with clean and corrupt prompts exchanged."""
        assert self.contrasts is not None, "only prompts have a corrupt version"
        return replace(
            self,
            source=self.contrasts.corrupt,
            contrasts=replace(self.contrasts, corrupt=self.source),
            host=None if self.host is None else self.host.corrupted_batch,
        )

    @property
    def predictions(self) -> int:
        """Number of labels."""
        labels = self.on_host.labels
        return 0 if labels is None else int((labels != IGNORED).sum())

    @property
    def longest(self) -> int:
        """Positions of the longest sentence."""
        return max(side.ids.shape[1] for side in (self.source, self.target) if side is not None)

    @property
    def positions(self) -> int:
        """Number of positions of the larger side, padding included."""
        return self.longest * len(self.source.ids)

    def at_tokens(self, values: Tensor) -> Tensor:
        """The values [n …] at real tokens, from values [b t …]; unchanged if their shape is not that of a side."""
        sides = [side for side in (self.target, self.source) if side is not None]
        fitting = [side.real for side in sides if values.shape[:2] == side.ids.shape]
        return values[torch.stack(fitting).any(dim=0).to(values.device)] if fitting else values

    def pin(self, device: torch.device) -> Batch:
        """The batch in pinned memory, from which a GPU copies without the host; itself for other devices."""
        return self._map_tensors(lambda tensor: pin(tensor, device))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        parts = ("source", "target", "labels", "contrasts")
        return replace(self, **{name: map_tensors(getattr(self, name), change) for name in parts})

    def rows(self, numbers: Tensor) -> Batch:
        """The sentences at `numbers` [n], in that order, without padding columns at the end."""
        source = self.source.rows(numbers)
        target = None if self.target is None else self.target.rows(numbers)
        length = (source if target is None else target).ids.shape[1]  # labels that are classes have one column anyway
        return replace(
            self,
            indices=self.indices[numbers.cpu()],
            source=source,
            target=target,
            labels=None if self.labels is None else self.labels[numbers, :length],
            contrasts=None if self.contrasts is None else self.contrasts.rows(numbers),
            sentences=tuple(self.sentences[number] for number in numbers.tolist()) if self.sentences else (),
            host=None,
        )

    def to(self, device: torch.device) -> Batch:
        """A copy with source, target and labels on another device (`indices` stay on the CPU)."""
        if device == self.source.ids.device:
            return self
        return replace(self._map_tensors(lambda tensor: upload(tensor, device)), host=self.on_host)


class Encoder(Protocol):
    """The part of `headscope.formats.base.Checkpoint` that encodes text; its methods are described there."""

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]: ...
    def encode_pairs(self, texts: Sequence[tuple[str, str]], *, limit: int) -> list[Encoded]: ...
    def spans(self, text: str, ids: Sequence[int], *, side: SideName) -> list[tuple[int, int] | None] | None: ...
    def decoder_inputs(self, sources: Sequence[Encoded]) -> list[Encoded]: ...
    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]: ...
    def why_unknown(self, side: SideName) -> str: ...


class NothingReadError(DataError):
    """A text, at `index` of a list, for which the tokenizer gives nothing but special ids."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__(f"the tokenizer makes nothing of the line {text[:60]!r}")
        self.index = index


def encode_side(window: Sequence[Sentence], encoder: Encoder, side: SideName, *, limit: int) -> list[Encoded]:
    """One side of every sentence, encoded; source texts in pairs are encoded together.

    DataError names a line for which the tokenizer gives no ids.
    """
    pairs = [(sentence.source, sentence.second) for sentence in window if sentence.second is not None]
    try:
        if pairs and side == "source":
            return encoder.encode_pairs(pairs, limit=limit)
        return encoder.encode([getattr(sentence, side) or "" for sentence in window], side=side, limit=limit)
    except NothingReadError as error:
        line = window[error.index].number + 1
        raise DataError(f"line {line} of the {side}: {error}; take it out of the text") from None


def side_names(site: Site) -> tuple[SideName, SideName]:
    """The sides of a site's queries and keys; the text of a decoder alone is its target."""
    query: SideName = "source" if site is Site.ENCODER_SELF else "target"
    return query, "target" if site is Site.DECODER_SELF else "source"


def pad_rows(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of integers as one tensor [b n], padded on the right with `filler`."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=filler)


def pad_side(sides: Sequence[Encoded], aligned: tuple[Aligned | None, ...] = (), *, pad: int = 0) -> Side:
    """Encoded sentences as a `Side`, padded on the right with id `pad` (not real, not special)."""
    ids, special = pad_rows([side.ids for side in sides], pad), pad_rows([side.special for side in sides], 0).bool()
    real = torch.arange(ids.shape[1]) < torch.tensor([len(side.ids) for side in sides])[:, None]
    segments = None
    if any(side.segments for side in sides):
        segments = pad_rows([side.segments or [0] * len(side.ids) for side in sides], 0)
    return Side(ids, real, special, segments, aligned)


def groups(
    items: Iterable[T], size: Callable[[T], int | tuple[int, ...]], limit: int, *, max_items: int | None = None
) -> Iterator[list[T]]:
    """Consecutive groups of items with at most `limit` padded positions and `max_items` items, but at least one.

    Every item of a group is padded to the largest `size` in it; a size of several numbers counts as their product.
    """
    group: list[T] = []
    largest: tuple[int, ...] = ()
    for item in items:
        item_sizes = sizes if isinstance(sizes := size(item), tuple) else (sizes,)
        wider = tuple(map(max, largest, item_sizes)) if group else item_sizes
        if group and (math.prod(wider) * (len(group) + 1) > limit or len(group) == max_items):
            yield group
            group, wider = [], item_sizes
        group.append(item)
        largest = wider
    if group:
        yield group


UNKNOWN_LIMIT = 0.02  # larger shares give a warning


@dataclass
class UnknownSubwords:
    """Counts of subwords and unknown ones by side; numbers (from 1) of lines without subwords and of cut lines."""

    read: Counter[SideName] = field(default_factory=Counter)
    unknown: Counter[SideName] = field(default_factory=Counter)
    nothing: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def add(self, side: SideName, sentences: Iterable[Encoded]) -> None:
        """Count sentences of a side."""
        for sentence in sentences:
            self.read[side] += len(sentence.ids) - sum(sentence.special)
            self.unknown[side] += sentence.unknown

    def __bool__(self) -> bool:
        return bool(self.read)

    def share(self, side: SideName) -> float:
        """The share of a side's subwords that are unknown."""
        return self.unknown[side] / self.read[side] if self.read[side] else 0.0

    def to_json(self) -> dict[str, dict[str, float]]:
        """`{"source": {"pieces": …, "unknown": …, "share": …}}`, with `target` where it was read."""
        return {
            side: {"pieces": self.read[side], "unknown": self.unknown[side], "share": round(self.share(side), 6)}
            for side in self.read
        }

    def remarks(self, reader: Encoder) -> list[str]:
        """The unknown shares of both sides, if there are any, and the `warnings`."""
        shares = ", ".join(f"{side} {self.share(side):.2%} of {self.read[side]:,}" for side in self.read)
        return [f"unknown subwords: {shares}"] * any(map(self.share, self.read)) + self.warnings(reader)

    def warnings(self, reader: Encoder) -> list[str]:
        """A warning with the likely cause for each side with more than 2 % of unknown subwords."""
        numbers = shortlist([*map(str, self.nothing)])
        empty = [f"warning: the tokenizer makes nothing of source lines {numbers}; they are treated as empty"]
        return empty * bool(self.nothing) + [
            f"warning: {self.share(side):.1%} of the {side}'s subwords are unknown to the vocabulary; "
            f"{reader.why_unknown(side)}"
            for side in self.read
            if self.share(side) > UNKNOWN_LIMIT
        ]


def count_unknown(reader: Encoder, corpus: Corpus, *, limit: int, sentences: int) -> UnknownSubwords:
    """Unknown subwords in the first sentences of a corpus."""
    counts, sample = UnknownSubwords(), list(islice(corpus, sentences))
    for side in SIDE_NAMES[: 1 + corpus.has_target]:
        counts.add(side, encode_side(sample, reader, side, limit=limit))
    return counts
