"""Which words cross attention's positions and keys belong to, and which of them are linked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Side
from headscope.data.offsets import Span
from headscope.data.word_alignment import (
    Ints,
    Links,
    Pair,
    Systran,
    check_links,
    has_systran,
    read_links,
    train,
    word_of_subwords,
)
from headscope.distributed import upload
from headscope.errors import ConfigError, DataError
from headscope.files.reading import in_step, read_lines
from headscope.formats.base import Checkpoint

AHEAD = {"predicted": 1, "fed": 0, "next": 2}
"""How far from a decoder's position the token is that a relation is about."""
REACH = 64  # offsets of the baseline go this far
LEAST_PAIRS = 1000
"""Parallel lines that an aligner is trained on at least."""
DONORS, WINDOW = 256, 4096
SAID = 20  # lines with links that show from where words are counted


class Aligns(Protocol):
    """What gives parallel lines their links."""

    def align(self, pairs: Sequence[Pair]) -> list[Links]:
        """The links of each pair of lines."""
        ...


@dataclass
class SentenceLinks:
    """The links of a corpus: of a file, as `given` (pairs [n 2], which are sure [n], ends of lines), or by `aligner`.

    Sentences are read again where they are asked for, a window of them at a time.
    """

    corpus: Corpus
    name: str = "none"
    given: tuple[Ints, Ints, Ints] | None = None
    aligner: Aligns | None = None
    remarks: list[str] = field(default_factory=list)
    window: dict[int, Sentence] = field(default_factory=dict)
    donors: list[tuple[Sentence, Links]] = field(default_factory=list)
    reading: Iterator[Sentence] | None = None

    def __post_init__(self) -> None:
        if self.known:
            first = list(islice(iter(self.corpus), DONORS))
            self.donors = list(zip(first, self.of(first), strict=True))
            self.sizes = np.array([_sizes(sentence) for sentence in first])

    @property
    def known(self) -> bool:
        """Whether there are links."""
        return self.given is not None or self.aligner is not None

    def sentences(self, numbers: Sequence[int]) -> list[Sentence]:
        """The sentences of these numbers."""
        restarted = False
        while any(number not in self.window for number in numbers):
            if self.reading is None:
                self.reading, restarted = iter(self.corpus), True
            self.window = {sentence.number: sentence for sentence in islice(self.reading, WINDOW)}
            if not self.window:
                if restarted:  # they lie in different windows
                    wanted = set(numbers)
                    self.window = {each.number: each for each in self.corpus if each.number in wanted}
                self.reading = None
        return [self.window[number] for number in numbers]

    def of(self, sentences: Sequence[Sentence]) -> list[Links]:
        """The links of sentences."""
        if self.given is not None:
            pairs, sure, ends = self.given
            spans = [slice(int(ends[s.number]), int(ends[s.number + 1])) for s in sentences]
            return [Links(pairs[span], sure[span].astype(bool)) for span in spans]
        assert self.aligner is not None
        return self.aligner.align([(sentence.source, sentence.target or "") for sentence in sentences])

    def of_others(self, sentences: Sequence[Sentence]) -> list[Ints]:
        """For every sentence the links [n 2] of the other one nearest in length, of the first 256, made as long."""
        found = []
        for sentence in sentences:
            own = np.array(_sizes(sentence))
            apart = np.abs(self.sizes - own).sum(axis=1)
            if sentence.number < len(apart):
                apart[sentence.number] = np.iinfo(np.int64).max
            donor, size = self.donors[int(apart.argmin())][1].pairs, self.sizes[apart.argmin()]
            if len(apart) == 1 and sentence.number == 0:
                found.append(np.empty((0, 2), dtype=np.int64))
                continue
            table = np.zeros(size, dtype=bool)
            table[donor[:, 0], donor[:, 1]] = True
            at = [((np.arange(n) + 0.5) * other / n).astype(np.int64) for n, other in zip(own, size, strict=True)]
            found.append(np.argwhere(table[at[0][:, None], at[1]]))
        return found


def links_of(
    corpus: Corpus,
    path: Path | None,
    *,
    first: int,
    training: tuple[Path | None, Path | None],
    aligner: str,
) -> SentenceLinks:
    """Links of a corpus with target: read from a file, or made by an aligner, where there is text enough to train it.

    ConfigError for options that do not go together, DataError for files that do not fit.
    """
    source, target = training
    if (source is None) != (target is None):
        raise ConfigError("--align-corpus and --align-target are the two sides of a text; give both")
    if path is not None and source is not None:
        raise ConfigError("--alignments has the links, --align-corpus is to train an aligner that makes some; give one")
    if path is not None:
        return _given(corpus, path, first)
    pairs = _text(corpus) if source is None or target is None else _parallel(source, target)
    lines = list(islice(pairs, LEAST_PAIRS))
    if len(lines) < LEAST_PAIRS:
        advice = "give --alignments FILE, or --align-corpus and --align-target, the text that the model was trained on"
        remark = (
            f"alignment: {len(lines)} parallel lines are too few to align words, {LEAST_PAIRS:,} are needed; {advice}"
        )
        return SentenceLinks(corpus, remarks=[remark])
    where = "the text" if source is None else source.name
    chosen = aligner if aligner != "auto" else "systran" if has_systran() else "own"
    made, count = (Systran.train if chosen == "systran" else train)(_chain(lines, pairs))
    return SentenceLinks(corpus, name=f"{chosen}({where}:{count})", aligner=made)


def _chain(lines: list[Pair], rest: Iterator[Pair]) -> Iterator[Pair]:
    yield from lines
    yield from rest


def _text(corpus: Corpus) -> Iterator[Pair]:
    return ((sentence.source, sentence.target or "") for sentence in corpus)


def _parallel(source: Path, target: Path) -> Iterator[Pair]:
    return in_step(read_lines(source), read_lines(target), (str(source), str(target)))


def _sizes(sentence: Sentence) -> tuple[int, int]:
    return len(sentence.source.split()), len((sentence.target or "").split())


def _given(corpus: Corpus, path: Path, first: int) -> SentenceLinks:
    """The links of a file, checked against the words of the text."""
    pairs, sure, ends = [np.empty((0, 2), dtype=np.int64)], [np.empty(0, dtype=bool)], [0]
    lines, digest = read_links(path, first=first), hashlib.sha1()
    for sentence in corpus:
        links = next(lines, None)
        if links is None:
            raise DataError(f"{path} has {len(ends) - 1:,} lines, the text {corpus.count:,}; line i must be of line i")
        check_links(links, _sizes(sentence), where=f"{path}:{sentence.number + 1}", first=first)
        digest.update(links.pairs.tobytes() + links.sure.tobytes() + b"|")
        pairs.append(links.pairs)
        sure.append(links.sure)
        ends.append(ends[-1] + len(links.pairs))
    linked = sum(len(part) > 0 for part in pairs)
    if first == 0 and linked >= SAID and min(part.min() for part in pairs if len(part)) > 0:
        raise DataError(f"{path}: no link is of word 0; are words counted from 1 (--alignments-first 1)?")
    more = sum(1 for _ in lines)
    remarks = [f"alignment: {path} has {more:,} lines more than the text, which are not used"] if more else []
    given = (np.concatenate(pairs), np.concatenate(sure).astype(np.int64), np.array(ends))
    return SentenceLinks(corpus, name=f"{path.name}:{digest.hexdigest()[:8]}", given=given, remarks=remarks)


def _ends(text: str, spans: Sequence[Span | None]) -> list[tuple[bool, bool]]:
    """Of every subword of a text: whether it is final punctuation, and whether it comes after the text."""
    body = len(text.rstrip())
    while body and not text[body - 1].isalnum():
        body -= 1
    last = max((place for place, span in enumerate(spans) if span is not None), default=len(spans))
    return [
        (span is not None and span[1] > span[0] >= body and bool(text[slice(*span)].strip()), place > last)
        for place, span in enumerate(spans)
    ]


def distinct(numbers: Tensor) -> Tensor:
    """Which entries [... t], in ascending order, are the first of their number; none below 0."""
    ordered = numbers.sort(dim=-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return first & (ordered >= 0)


class LinkedWords:
    """Words and links of one batch, built once for all layers.

    `source_word` [b s] are the words of keys, `about` [b t] by relation those that positions are about, −1 where there
    is none; `host` are the two sides on the CPU. Links are sorted keys, of row, target word and source word.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        keys: Tensor,
        numbers: Sequence[int],
        checkpoint: Checkpoint,
        links: SentenceLinks,
        *,
        host: tuple[Side, Side] | None = None,
    ) -> None:
        self.counted, self.unlocated = False, 0
        self.made: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        source, target = sides
        self.counted_keys, self.tokens, device = keys, target.real & ~target.special, keys.device
        words = [np.full(side.ids.shape, -1, dtype=np.int64) for side in (source, target)]
        ends = np.zeros((*source.ids.shape, 2), dtype=np.float32)
        sentences = links.sentences(numbers)
        for row, sentence in enumerate(sentences):
            texts = (sentence.source, sentence.target or "")
            for number, (side, name) in enumerate(zip(host or sides, ("source", "target"), strict=True)):
                ids = side.ids[row][side.real[row]].tolist()
                spans = checkpoint.spans(texts[number], ids, side=name)  # type: ignore[arg-type]
                of_subwords = [] if spans is None else word_of_subwords(texts[number], spans)
                self.unlocated += spans is None
                places = side.real[row].nonzero()[:, 0].numpy()
                words[number][row, places[: len(of_subwords)]] = of_subwords
                if number == 0 and spans is not None:
                    ends[row, places] = _ends(texts[0], spans)
        self.ends = torch.from_numpy(ends)  # [b s 2]
        self.rows, self.stride = len(sentences), int(words[0].max()) + 2
        self.targets = int(words[1].max()) + 2
        self.source_word = upload(torch.from_numpy(words[0]), device)
        of_target = upload(torch.from_numpy(words[1]), device)
        self.source_words = distinct(self.source_word).sum(-1).float()  # [b]
        looking = target.real & keys.any(-1, keepdim=True)
        self.about = {}
        for name, ahead in AHEAD.items():
            moved = torch.nn.functional.pad(of_target, (0, ahead), value=-1)[:, ahead : ahead + of_target.shape[1]]
            self.about[name] = torch.where(looking, moved, -1)
        if links.known:
            self._link(links, sentences, words)

    def _link(self, links: SentenceLinks, sentences: Sequence[Sentence], words: Sequence[Ints]) -> None:
        """Keys of links whose two words are there."""
        found: tuple[list[Ints], list[Ints]] = ([], [])
        sure = []
        for row, (own, other) in enumerate(zip(links.of(sentences), links.of_others(sentences), strict=True)):
            for kept, pairs in zip(found, (own.pairs, other), strict=True):
                inside = np.isin(pairs[:, 0], words[0][row]) & np.isin(pairs[:, 1], words[1][row])
                kept.append((row * self.targets + pairs[inside, 1]) * self.stride + pairs[inside, 0])
                if pairs is own.pairs:
                    sure.append(own.sure[inside])
        keys, order = np.unique(np.concatenate(found[0]), return_index=True)
        device = self.source_word.device
        self.possible = upload(torch.from_numpy(keys), device)
        self.sure = upload(torch.from_numpy(np.concatenate(sure)[order]), device)
        self.shuffled = upload(torch.from_numpy(np.unique(np.concatenate(found[1]))), device)
        self.linked = torch.zeros(self.rows * self.targets, dtype=torch.bool, device=device)
        self.linked[self.possible // self.stride] = True

    def keys(self, about: Tensor, words: Tensor) -> Tensor:
        """Keys of target words [b t] with source words [b … t], −1 where one is missing."""
        row = torch.arange(self.rows, device=about.device)[:, None]
        first = (row * self.targets + about) * self.stride
        between = (slice(None), *[None] * (words.ndim - 2))
        return torch.where((about[between] >= 0) & (words >= 0), first[between] + words, -1)

    def counts(self, about: Tensor) -> Tensor:
        """Positions [b t] whose word has a link."""
        row = torch.arange(self.rows, device=about.device)[:, None]
        return (about >= 0) & self.linked[(row * self.targets + about).clamp(min=0)]

    def relation(self, name: str, words: Tensor, offset: int) -> dict[str, Ratio]:
        """Hits of one relation, words [b h t] being those of the argmax; sizes of A, A∩S, A∩P against that of S."""
        about = self.about[name]
        counted, hard = self.counts(about), self.places(name, offset)[2]
        keys = self.keys(about, words)
        hits = [_within(keys, linked) & counted[:, None] for linked in (self.possible, self.shuffled)]
        ordered, first = keys.sort(dim=-1).values, distinct(keys)
        on_link = _within(ordered, self.possible) & first
        place = torch.searchsorted(self.possible, ordered).clamp(max=max(len(self.possible) - 1, 0))
        on_sure = on_link & (self.sure[place] if len(self.sure) else on_link)
        sizes = torch.stack([part.sum(-1) for part in (first, on_sure, on_link)], dim=-1).float()  # [b h 3]
        ratios = {f"links_{name}": Ratio(sizes, self._due(about)[:, None, None])}
        for part, positions in (("", counted), ("hard_", hard)):
            count = positions.sum(-1).float()[:, None]
            for kind, hit in zip(("aligned", "shuffled"), hits, strict=True):
                ratios[f"{part}{kind}_{name}"] = Ratio((hit & positions[:, None]).sum(-1).float(), count)
        return ratios

    def _due(self, about: Tensor) -> Tensor:
        """Sure links [b] of words that some position is about."""
        row = torch.arange(self.rows, device=about.device)[:, None]
        present = torch.zeros_like(self.linked)
        present[(row * self.targets + about)[about >= 0]] = True
        due = self.sure & present[self.possible // self.stride]
        return torch.bincount(self.possible[due] // (self.targets * self.stride), minlength=self.rows).float()

    def places(self, name: str, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a fixed offset is right, where the diagonal is, and where there is a link but neither: each [b t]."""
        if name not in self.made:
            on_offset, on_diagonal = (self._right(name, at) for at in (self._offset(offset), self._diagonal(name)))
            self.made[name] = (on_offset, on_diagonal, self.counts(self.about[name]) & ~on_offset & ~on_diagonal)
        return self.made[name]

    def _right(self, name: str, at: Tensor) -> Tensor:
        """Positions [b t] with a link where the key at [b t] is linked; none has the number −1."""
        words = torch.where(self.counted_keys, self.source_word, -1).gather(1, at.clamp(min=0)).masked_fill(at < 0, -1)
        return _within(self.keys(self.about[name], words), self.possible)

    def _offset(self, offset: int) -> Tensor:
        """The keys [b t] so far from each position."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device) + offset
        at = torch.where((at >= 0) & (at < self.source_word.shape[1]), at, -1)
        return at.expand(self.rows, -1)

    def _diagonal(self, name: str) -> Tensor:
        """The counted key [b t] that lies at the place in the source where the position's token lies in the target."""
        t, ahead = self.tokens.shape[1], AHEAD[name]
        rank = torch.nn.functional.pad(self.tokens.cumsum(-1) - 1, (0, ahead))[:, ahead : ahead + t]
        share = (rank + 0.5) / self.tokens.sum(-1, keepdim=True).clamp(min=1)
        number = self.counted_keys.sum(-1, keepdim=True)
        at = (share * number).floor().clamp(min=0).long()  # a rank among the counted keys
        ends = self.counted_keys.cumsum(-1)  # [b s]
        return torch.searchsorted(ends, at + 1).clamp(max=ends.shape[1] - 1)

    def best_offset(self, name: str) -> int:
        """The offset, of ±`REACH`, that is right at the most positions; the nearest one where several tie."""
        offsets = sorted(range(-REACH, REACH + 1), key=abs)
        return max(offsets, key=lambda offset: int(self._right(name, self._offset(offset)).sum()))

    def baselines(self, name: str, offset: int) -> dict[str, Ratio]:
        """What a fixed offset, the diagonal and even weight get [b 3], the last also at hard positions [b 1]."""
        on_offset, on_diagonal, hard = self.places(name, offset)
        counted = self.counts(self.about[name])
        even = [self._even(self.about[name], where) for where in (counted, hard)]
        each = torch.stack([on_offset.sum(-1).float(), on_diagonal.sum(-1).float(), even[0]], dim=-1)
        return {
            f"others_{name}": Ratio(each, counted.sum(-1).float()[:, None]),
            f"hard_even_{name}": Ratio(even[1][:, None], hard.sum(-1).float()[:, None]),
        }

    def _even(self, about: Tensor, counted: Tensor) -> Tensor:
        """Σ over these positions of the share of counted keys that are linked [b]."""
        keys = self.counted_keys
        row = torch.arange(self.rows, device=about.device)[:, None]
        pieces = torch.zeros(self.rows * self.stride, device=about.device)
        of_word = (row * self.stride + self.source_word)[(self.source_word >= 0) & keys]
        pieces.index_add_(0, of_word, torch.ones_like(of_word, dtype=pieces.dtype))
        target = self.possible // self.stride  # row and target word of each link
        size = torch.zeros(len(self.linked), device=about.device)
        size.index_add_(0, target, pieces[target // self.targets * self.stride + self.possible % self.stride])
        of_position = size[(row * self.targets + about).clamp(min=0)] * counted
        return of_position.sum(-1) / keys.sum(-1).clamp(min=1)


def _within(keys: Tensor, known: Tensor) -> Tensor:
    """Which keys are among the sorted known ones."""
    if not len(known):
        return torch.zeros_like(keys, dtype=torch.bool)
    keys = keys.contiguous()
    place = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
    return known[place] == keys
