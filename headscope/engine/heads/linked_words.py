"""The words of cross attention's positions and keys, and the links between them.

Links come from a file, an aligner, or of recordings from a file that says when words are said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.batching import DEFAULT_LIMIT
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Side, SideName
from headscope.data.word_alignment import (
    LONGEST,
    Aligner,
    Floats,
    Ints,
    Links,
    Pair,
    check_links,
    has_other_spaces,
    read_links,
    train,
    trainable,
    words_of,
    words_of_subwords,
)
from headscope.distributed import upload
from headscope.errors import ConfigError, DataError, flag, flags, raise_first
from headscope.files.reading import file_digest, in_step, read_lines
from headscope.files.tables import read_csv
from headscope.formats.base import POSITION, Checkpoint

AHEAD = {"predicted": 1, "fed": 0, "next": 2}
"""How far from a decoder's position the token is that a relation is about."""
REACH = 64  # offsets of the baseline go this far
MIN_PAIRS = 1000
"""Parallel lines that an aligner is trained on at least."""
DONORS = 256
POSSIBLE, SURE, SHUFFLED = 1, 2, 4
"""What a pair of words may be, as bits: a link, a sure one, a link of another sentence."""
COUNTING_LINES = 20  # lines with links that show from where words are counted


@dataclass
class SentenceLinks:
    """The links of a corpus: a file's `links`, line by line, else made by `aligner`.

    With `positions`, how many the recording of each line has, these are its source words.
    """

    corpus: Corpus
    name: str = "none"
    links: Sequence[Links] | None = None
    aligner: Aligner | None = None
    positions: Sequence[int] | None = None
    remarks: list[str] = field(default_factory=list)
    donors: list[Sentence] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.has_links:
            if odd_lines := sum(has_other_spaces(text) for line in self.corpus for text in line.lines):
                text = f"alignment: {odd_lines:,} lines have white space other than spaces and tabs, such as U+00A0"
                self.remarks.append(f"{text}; links count words as fast_align does, which does not split there")
            self.donors = list(islice(iter(self.corpus), DONORS))
            self.sizes = np.array([self._counts(sentence) for sentence in self.donors])
            self.tables = [np.zeros(size, dtype=bool) for size in self.sizes]  # [n m] of every donor
            for table, links in zip(self.tables, self.of(self.donors), strict=True):
                table[links.pairs[:, 0], links.pairs[:, 1]] = True

    @property
    def has_links(self) -> bool:
        """Whether there are links."""
        return self.links is not None or self.aligner is not None

    def of(self, sentences: Sequence[Sentence]) -> list[Links]:
        """The links of sentences."""
        if self.links is not None:
            return [self.links[sentence.number] for sentence in sentences]
        assert self.aligner is not None
        return self.aligner.align([sentence.lines for sentence in sentences])

    def of_others(self, sentences: Sequence[Sentence]) -> list[Ints]:
        """For every sentence the links [n 2] of the other one nearest in length, of the first 256, made as long."""
        sizes = np.array([self._counts(sentence) for sentence in sentences])
        apart = np.abs(self.sizes - sizes[:, None]).sum(axis=-1)  # [b d]
        itself = np.array([sentence.number for sentence in sentences])[:, None] == np.arange(len(self.donors))
        apart[itself] = np.iinfo(np.int64).max
        link_arrays = []
        for row, number in enumerate(apart.argmin(axis=1).tolist()):
            own = zip(sizes[row].tolist(), self.tables[number].shape, strict=True)
            at = [((np.arange(n) + 0.5) * other / n).astype(np.int64) for n, other in own]
            pairs = np.argwhere(self.tables[number][at[0][:, None], at[1]])
            link_arrays.append(pairs[:0] if itself[row, number] else pairs)  # where there is no other
        return link_arrays

    def _counts(self, sentence: Sentence) -> tuple[int, int]:
        source, target = _sizes(sentence)
        return source if self.positions is None else self.positions[sentence.number], target


def links_of(
    corpus: Corpus,
    path: Path | None,
    *,
    first: int,
    training: tuple[Path | None, Path | None],
) -> SentenceLinks:
    """Links of a corpus with target: read from a file, or made by an aligner, where there is text enough to train it.

    ConfigError for options that do not go together, DataError for files that do not fit.
    """
    source, target = training
    sides = f"{flag.align_corpus} and {flag.align_target}"
    problems = {
        f"{sides} are the two sides of a text; give both": (source is None) != (target is None),
        f"{flag.alignments} has links, {flag.align_corpus} trains an aligner; give one": path and source,
    }
    raise_first(ConfigError, problems)
    if path is not None:
        return _links_of_file(corpus, path, first)
    pairs: Iterator[Pair] = (sentence.lines for sentence in corpus)
    if source is not None and target is not None:
        pairs = in_step(read_lines(source), read_lines(target), (str(source), str(target)))
    pairs = trainable(pairs)
    lines = list(islice(pairs, MIN_PAIRS))
    if len(lines) < MIN_PAIRS:
        advice = f"give {flag('alignments', 'FILE')}, or training text ({flags('align_corpus', 'align_target')})"
        need = f"{MIN_PAIRS:,} of at most {LONGEST} words are needed; {advice}"
        remark = f"alignment: {len(lines)} parallel lines are too few to align words, {need}"
        return SentenceLinks(corpus, remarks=[remark])
    where = "the text" if source is None else source.name
    aligner, count = train(chain(lines, pairs))
    return SentenceLinks(corpus, name=f"own({where}:{count})", aligner=aligner)


def _sizes(sentence: Sentence) -> tuple[int, int]:
    source, target = map(words_of, sentence.lines)
    return len(source), len(target)


def _links_of_file(corpus: Corpus, path: Path, first: int) -> SentenceLinks:
    links_by_line, lines, digest = list[Links](), read_links(path, first=first), hashlib.sha1()
    for sentence in corpus:
        links = next(lines, None)
        if links is None:
            counts = f"{len(links_by_line):,} lines, the text {corpus.count:,}"
            raise DataError(f"{path} has {counts}; line i must be of line i")
        check_links(links, _sizes(sentence), where=f"{path}:{sentence.number + 1}", first=first)
        digest.update(links.pairs.tobytes() + links.sure.tobytes() + b"|")
        links_by_line.append(links)
    first_words = [links.pairs.min() for links in links_by_line if len(links.pairs)]
    if first == 0 and len(first_words) >= COUNTING_LINES and min(first_words) > 0:
        raise DataError(f"{path}: no link is of word 0; are words counted from 1 ({flag('alignments_first', 1)})?")
    more = sum(1 for _ in lines)
    remarks = [f"alignment: {path} has {more:,} lines more than the text, which are not used"] if more else []
    return SentenceLinks(corpus, name=f"{path.name}:{digest.hexdigest()[:8]}", links=links_by_line, remarks=remarks)


def links_of_recordings(corpus: Corpus, checkpoint: Checkpoint, path: Path | None) -> SentenceLinks:
    """Possible links of each word with the positions at which it is said, 20 ms each; none without a file of times.

    Source "words" are positions. DataError for times that do not fit the transcripts.
    """
    if path is None:
        remark = f"alignment: without {flag('word_times', 'FILE.csv')} only alignment_score is measured"
        return SentenceLinks(corpus, remarks=[remark])
    links_by_line, counts = list[Links](), list[int]()
    for sentence, times in zip(corpus, _word_times(corpus, path), strict=True):
        (recording,) = checkpoint.encode([sentence.source], side="source", limit=DEFAULT_LIMIT)
        counts.append(recording.special.count(False))
        middle = (np.arange(counts[-1]) + 0.5) * POSITION
        word = np.searchsorted(times[:, 0], middle, side="right") - 1
        is_spoken = (word >= 0) & (middle < times[word, 1])
        pairs = np.stack([is_spoken.nonzero()[0], word[is_spoken]], axis=1)
        links_by_line.append(Links(pairs, np.zeros(len(pairs), dtype=bool)))
    return SentenceLinks(corpus, name=f"{path.name}:{file_digest([path])[:8]}", links=links_by_line, positions=counts)


def _word_times(corpus: Corpus, path: Path) -> Iterator[Floats]:
    """Begin and end [n 2] of the words of every line, in seconds; words without an end last until the next begins."""
    table = read_csv(path, columns=("recording", "word", "begin"), texts=("recording", "word"))
    of_recording = dict(iter(table.groupby("recording")))
    for sentence in corpus:
        where, rows = f"{path}: {sentence.source[:200]}", of_recording.get(sentence.source)
        if rows is None:
            raise DataError(f"{where} has no words; give a row for each word of every recording")
        _check_words(sentence, rows["word"].tolist(), where)
        begin = rows["begin"].to_numpy(dtype=np.float64)
        following = np.append(begin[1:], np.inf)
        end = rows["end"].fillna(np.inf).to_numpy(dtype=np.float64) if "end" in rows else following
        times = np.stack([begin, np.minimum(end, following)], axis=1)
        if not (begin >= 0).all() or not (np.diff(times.ravel()) >= 0).all():
            raise DataError(f"{where}: begin and end must be seconds that do not go back; sort its words by time")
        yield times


def _check_words(sentence: Sentence, spoken_words: list[str], where: str) -> None:
    """DataError unless these are the words of the transcript, but for case and punctuation."""
    texts = spoken_words, words_of(sentence.target or "")
    spellings = [["".join(filter(str.isalnum, word.casefold())) for word in words] for words in texts]
    if spellings[0] != spellings[1]:
        at = len([*takewhile(lambda words: words[0] == words[1], zip(*spellings, strict=False))])
        pair = (" ".join(words[at : at + 3])[:60] or "nothing" for words in texts)
        raise DataError(f"{where}: word {at + 1} is {next(pair)!r}, its transcript goes on with {next(pair)!r}")


def distinct(numbers: Tensor) -> Tensor:
    """A mask of ascending entries [... t] that are the first of their number; none below 0."""
    sorted_numbers = numbers.sort(dim=-1).values
    first = torch.ones_like(sorted_numbers, dtype=torch.bool)
    first[..., 1:] = sorted_numbers[..., 1:] != sorted_numbers[..., :-1]
    return first & (sorted_numbers >= 0)


class Places(NamedTuple):
    """Positions of one relation: where a fixed offset and the diagonal are right [b t]; those with links, and the hard
    ones among them, at which neither is, as numbers [b t 2]; sure links [b] of words that some position is about.
    """

    on_offset: Tensor
    on_diagonal: Tensor
    with_links: Tensor
    due: Tensor


class LinkedWords:
    """Words and links of one batch, built once for all layers.

    `source_word` [b s] are the words of keys, `about` [b t] by relation those that positions are about, −1 where there
    is none; `host` are the two sides on the CPU. `kinds` [b m n] says what every pair of a target and a source word is;
    the last ones of both stand for no word, where nothing is linked. A pair is called by its number in its row.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        keys: Tensor,
        sentences: Sequence[Sentence],
        checkpoint: Checkpoint,
        links: SentenceLinks,
        *,
        host: tuple[Side, Side] | None = None,
    ) -> None:
        self.is_counted, self.n_unlocated = False, 0
        self.places_of: dict[str, Places] = {}
        target = sides[1]
        self.counted_keys, self.tokens, device = keys, target.real & ~target.special, keys.device
        on_host = host or sides
        texts = ([sentence.source for sentence in sentences], [sentence.target or "" for sentence in sentences])
        of_source, ends = self._words(on_host[0], texts[0], checkpoint, "source")  # [b s], [b s 2]
        if links.positions is not None:
            recording = on_host[0].real & ~on_host[0].special
            of_source = torch.arange(recording.shape[1]).where(recording, -1).numpy()
        of_target, _ = self._words(on_host[1], texts[1], checkpoint, "target")  # [b t]
        self.stride, self.targets = int(of_source.max()) + 2, int(of_target.max()) + 2
        self.row = torch.arange(len(sentences), device=device)
        self.source_word, target_word = (upload(torch.from_numpy(words), device) for words in (of_source, of_target))
        self.ends = upload(ends, device)
        self.source_words = distinct(self.source_word).sum(-1).float()  # [b]
        looking = target.real & keys.any(-1, keepdim=True)
        self.about = {}
        for name, ahead in AHEAD.items():
            shifted_words = torch.nn.functional.pad(target_word, (0, ahead), value=-1)[:, ahead:]
            self.about[name] = torch.where(looking, shifted_words, -1)
        if links.has_links:
            self._link(links, sentences, (of_source, of_target))

    def _words(self, side: Side, texts: Sequence[str], checkpoint: Checkpoint, name: SideName) -> tuple[Ints, Tensor]:
        """The word [b n] of every subword; whether it is final punctuation, and whether after the text [b n 2]."""
        ids, real = side.ids.numpy(), side.real.numpy()
        spans = [checkpoint.spans(text, ids[row][real[row]].tolist(), side=name) for row, text in enumerate(texts)]
        self.n_unlocated += sum(span is None for span in spans)
        is_located = real & np.array([span is not None for span in spans])[:, None]
        words, ends = np.full(ids.shape, -1, dtype=np.int64), np.zeros((*ids.shape, 2), dtype=np.float32)
        words[is_located], ends[is_located] = words_of_subwords(texts, [span or [] for span in spans])
        return words, torch.from_numpy(ends)

    def _link(self, links: SentenceLinks, sentences: Sequence[Sentence], words: tuple[Ints, Ints]) -> None:
        own, b = links.of(sentences), len(sentences)
        kinds = np.zeros((b, self.targets, self.stride), dtype=np.uint8)
        present = [np.zeros((b, size), dtype=bool) for size in (self.stride, self.targets)]
        for is_present, of_side in zip(present, words, strict=True):
            is_present[np.arange(b)[:, None], of_side] = True
            is_present[:, -1] = False  # where −1 stands
        for kind, pairs in (
            (POSSIBLE, [of_line.pairs for of_line in own]),
            (SURE, [of_line.pairs[of_line.sure] for of_line in own]),
            (SHUFFLED, links.of_others(sentences)),
        ):
            row, (source, target) = np.repeat(np.arange(b), [*map(len, pairs)]), np.concatenate(pairs).T
            inside = present[0][row, np.minimum(source, self.stride - 1)]
            inside &= present[1][row, np.minimum(target, self.targets - 1)]
            kinds[row[inside], target[inside], source[inside]] |= kind
        self.kinds = upload(torch.from_numpy(kinds), self.source_word.device)
        self.possible = self.kinds & POSSIBLE > 0
        self.has_link = self.possible.any(dim=-1)  # [b m]: target words that have a link

    def pairs(self, about: Tensor, words: Tensor) -> Tensor:
        """Numbers of the pairs of target words [b t] and source words [b … t], −1 where one is missing."""
        about = about.view(len(about), *[1] * (words.ndim - 2), -1)
        return torch.where((about >= 0) & (words >= 0), about * self.stride + words, -1)

    def kinds_of(self, pairs: Tensor) -> Tensor:
        """The kinds of pairs [b …]."""
        return self.kinds.flatten(1)[self.row.view(-1, *[1] * (pairs.ndim - 1)), pairs]

    def lag(self, argmax: Tensor) -> Ratio:
        """Seconds from the first position of the word that is predicted to the argmax [b h t]."""
        about = self.about["predicted"]
        words = self.row[:, None], about
        begin, is_counted = self.possible.byte().argmax(dim=-1)[words], self.has_link[words]
        behind = argmax - begin[:, None]
        return Ratio((behind * is_counted[:, None]).sum(-1) * POSITION, is_counted.sum(-1, keepdim=True).float())

    def relation(self, name: str, words: Tensor, offset: int) -> dict[str, Ratio]:
        """Hits of one relation, given the words [b h t] of the argmax; sizes of A, A∩S, A∩P against the size of S."""
        places, pairs = self.places(name, offset), self.pairs(self.about[name], words)
        sorted_pairs = pairs.sort(dim=-1).values
        first, kinds = distinct(sorted_pairs), self.kinds_of(sorted_pairs)
        sizes = torch.stack([first, first & (kinds & SURE > 0), first & (kinds & POSSIBLE > 0)], dim=-1).sum(2)
        ratios = {f"links_{name}": Ratio(sizes.float(), places.due[:, None, None])}  # [b h 3]
        kinds = self.kinds_of(pairs)
        hits = torch.stack([kinds & POSSIBLE, kinds & SHUFFLED]) > 0  # [2 b h t]
        hits_by_kind = hits.float() @ places.with_links  # [2 b h 2]
        for number, part in enumerate(("", "hard_")):
            count = places.with_links[..., number].sum(-1)[:, None]
            for kind, hit in zip(("aligned", "shuffled"), hits_by_kind[..., number], strict=True):
                ratios[f"{part}{kind}_{name}"] = Ratio(hit, count)
        return ratios

    def places(self, name: str, offset: int) -> Places:
        """Masks of the positions of a relation, and of those where a fixed offset or the diagonal suffices."""
        if name not in self.places_of:
            at = torch.arange(self.tokens.shape[1], device=self.tokens.device) + offset
            at = torch.where((at >= 0) & (at < self.source_word.shape[1]), at, -1).expand(len(self.row), -1)
            on_offset, on_diagonal = self._right(name, at), self._right(name, self._diagonal(name))
            about, sure = self.about[name], (self.kinds & SURE > 0).sum(dim=-1)  # [b m]
            is_counted = self.has_link[self.row[:, None], about]
            by_difficulty = torch.stack([is_counted, is_counted & ~on_offset & ~on_diagonal], dim=-1).float()
            due = (sure * torch.zeros_like(sure).scatter(1, about % self.targets, 1)).sum(dim=-1).float()
            self.places_of[name] = Places(on_offset, on_diagonal, by_difficulty, due)
        return self.places_of[name]

    def _right(self, name: str, at: Tensor) -> Tensor:
        """Positions [b t] with a link where the key at [b t] is linked; none has the number −1."""
        words = torch.where(self.counted_keys, self.source_word, -1).gather(1, at.clamp(min=0)).masked_fill(at < 0, -1)
        return self.kinds_of(self.pairs(self.about[name], words)) & POSSIBLE > 0

    def _diagonal(self, name: str) -> Tensor:
        """The counted key [b t] that lies at the place in the source where the position's token lies in the target."""
        t, ahead = self.tokens.shape[1], AHEAD[name]
        rank = torch.nn.functional.pad(self.tokens.cumsum(-1) - 1, (0, ahead))[:, ahead : ahead + t]
        share = (rank + 0.5) / self.tokens.sum(-1, keepdim=True).clamp(min=1)
        number = self.counted_keys.sum(-1, keepdim=True)
        at = (share * number).floor().clamp(min=0).long()  # a rank among the counted keys
        ends = self.counted_keys.cumsum(-1)  # [b s]
        return torch.searchsorted(ends, at + 1).clamp(max=ends.shape[1] - 1)

    def best_offsets(self) -> dict[str, int]:
        """By relation the offset, of ±`REACH`, that is right at the most positions; the nearest one of several."""
        t, s = self.tokens.shape[1], self.source_word.shape[1]
        words = torch.where(self.counted_keys, self.source_word, -1)
        words = torch.nn.functional.pad(words, (REACH, REACH + t), value=-1)
        about = torch.cat(tuple(self.about.values()), dim=1)  # [b r·t]
        offsets = [offset for offset in sorted(range(-REACH, REACH + 1), key=abs) if -t < offset < s]
        shifted_words = (words[:, REACH + offset :][:, :t].repeat(1, len(self.about)) for offset in offsets)
        hits = (self.kinds_of(self.pairs(about, source)) & POSSIBLE > 0 for source in shifted_words)
        right = torch.stack([hit.view(len(hit), -1, t).sum(dim=(0, 2)) for hit in hits])  # [n r]
        best = right.cpu().numpy().argmax(axis=0).tolist()  # the first of several
        return {name: offsets[number] for name, number in zip(self.about, best, strict=True)}

    def baselines(self, name: str, offset: int) -> dict[str, Ratio]:
        """Baselines of a fixed offset, the diagonal and uniform weight [b 3], the last also at hard positions [b 1]."""
        places = self.places(name, offset)
        count = places.with_links.sum(1)  # [b 2]
        even = self._even(self.about[name], places.with_links)  # [b 2]
        baseline_hits = torch.stack([places.on_offset.sum(-1), places.on_diagonal.sum(-1), even[:, 0]], dim=-1)
        return {
            f"others_{name}": Ratio(baseline_hits, count[:, :1]),
            f"hard_even_{name}": Ratio(even[:, 1:], count[:, 1:]),
        }

    def _even(self, about: Tensor, positions: Tensor) -> Tensor:
        """Σ over each kind of positions [b t 2] of the share of counted keys that are linked [b 2]."""
        subwords = torch.zeros(len(about), self.stride, device=about.device)
        subwords.scatter_add_(1, self.source_word % self.stride, self.counted_keys.float())
        size = (self.possible.float() @ subwords[..., None])[..., 0]  # [b m]
        of_position = size.gather(1, about % self.targets)[:, None]  # [b 1 t]
        return (of_position @ positions)[:, 0] / self.counted_keys.sum(-1, keepdim=True).clamp(min=1)
