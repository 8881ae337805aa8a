"""Alignment links of a corpus: from a file, from an aligner, or from the times at which recorded words are spoken."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from pathlib import Path

import numpy as np

from headscope.data.batching import DEFAULT_LIMIT
from headscope.data.corpus import Corpus, Sentence
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
)
from headscope.errors import ConfigError, DataError, flag, flags, raise_first
from headscope.files.reading import file_digest, in_step, read_lines
from headscope.files.tables import read_csv
from headscope.formats.base import POSITION, Checkpoint

MIN_PAIRS = 1000  # fewest parallel lines to train an aligner on
DONORS = 256  # sentences whose links other sentences borrow, as the shuffled baseline
COUNTING_LINES = 20  # so many lines with links, and none with a word 0, count words from 1


@dataclass
class SentenceLinks:
    """The alignment links of a corpus: `links` of every line, from a file, or those that `aligner` makes.

    `positions`: the encoder positions of each line's recording, which then stand for its source words.
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
            self.sizes = np.array([self._counts(sentence) for sentence in self.donors])  # [d 2]
            self.tables = [np.zeros(size, dtype=bool) for size in self.sizes]  # for each donor [source target]
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
        """For each sentence the links [n 2] of the donor nearest in length, stretched to the sentence's length."""
        sizes = np.array([self._counts(sentence) for sentence in sentences])  # [b 2]
        distances = np.abs(self.sizes - sizes[:, None]).sum(axis=-1)  # [b d]
        is_itself = np.array([sentence.number for sentence in sentences])[:, None] == np.arange(len(self.donors))
        distances[is_itself] = np.iinfo(np.int64).max
        link_arrays = []
        for row, donor in enumerate(distances.argmin(axis=1).tolist()):
            table = self.tables[donor]
            lengths = zip(sizes[row].tolist(), table.shape, strict=True)
            source, target = (((np.arange(n) + 0.5) * donor_n / n).astype(np.int64) for n, donor_n in lengths)
            pairs = np.argwhere(table[source[:, None], target])
            link_arrays.append(pairs[:0] if is_itself[row, donor] else pairs)  # the only donor is the sentence itself
        return link_arrays

    def _counts(self, sentence: Sentence) -> tuple[int, int]:
        source, target = _sizes(sentence)
        return source if self.positions is None else self.positions[sentence.number], target


def links_of(
    corpus: Corpus, path: Path | None, *, first: int, training: tuple[Path | None, Path | None]
) -> SentenceLinks:
    """Links of a corpus with a target: from the file `path`, else by an aligner if there is enough text to train it.

    `first` is the number of the first word in the file, `training` a parallel corpus for the aligner (default: the
    text itself). ConfigError for options that exclude each other, DataError for files that do not fit the text.
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
    """Possible links from each word to the encoder positions (20 ms) at which it is spoken; none without `path`.

    Encoder positions stand for source words. DataError for times that do not fit the transcripts.
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
    """Begin and end [n 2] in seconds of each line's words; a word without an end lasts until the next one begins."""
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
