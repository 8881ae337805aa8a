"""Where the words of a recording are said: a CSV file of times links words of the transcript with encoder positions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headscope.data.batching import DEFAULT_LIMIT
from headscope.data.corpus import Corpus, Sentence
from headscope.data.word_alignment import Floats, Links, words_of
from headscope.engine.heads.linked_words import SentenceLinks
from headscope.errors import DataError, flag
from headscope.files.reading import file_digest
from headscope.files.tables import read_csv
from headscope.formats.base import POSITION, Checkpoint


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
    words = words_of(sentence.target or "")
    spellings = [
        ["".join(filter(str.isalnum, word.casefold())) for word in word_list] for word_list in (spoken_words, words)
    ]
    if spellings[0] != spellings[1]:
        at = next(
            (n for n, (one, other) in enumerate(zip(*spellings, strict=False)) if one != other),
            min(map(len, spellings)),
        )
        pair = (" ".join(word_list[at : at + 3])[:60] or "nothing" for word_list in (spoken_words, words))
        raise DataError(f"{where}: word {at + 1} is {next(pair)!r}, its transcript goes on with {next(pair)!r}")
