"""Word alignments: links from a file (Pharaoh format), or from an aligner trained on parallel text.

Words are separated by spaces and tabs, as in fast_align; other white space is part of a word. The aligner is
fast_align's model (Dyer, Chahuneau & Smith 2013: IBM model 2 with a prior that prefers the diagonal, λ fitted, lexical
probabilities by variational Bayes), in both directions, joined by grow-diag-final-and (Koehn et al. 2003). A cell is a
pair of a source and a target word of the same sentence; all cells of a text are laid out flat.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import digamma

from headscope.data.encoded import groups, pad_rows
from headscope.data.offsets import Span
from headscope.errors import DataError, flag
from headscope.files.reading import file_lines

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Pair = tuple[str, str]

ITERATIONS, NULL, TENSION, ALPHA = 4, 0.08, 4.0, 0.01  # as fast_align has them
UNSEEN = 1e-9  # probability of pairs that training did not have
STEPS, RATE, BOUNDS = 8, 20.0, (0.1, 14.0)  # gradient steps of λ at the end of every iteration but the first
CELLS = 8_000_000  # the most cells to train on
LONGEST = 120  # the most words of a sentence to train on
CHUNK = 1_000_000  # padded cells that are aligned at a time
LINK = re.compile(r"(\d{1,9})([-?])(\d{1,9})")


class Links(NamedTuple):
    """The links of a sentence: numbers [n 2] of the source and the target word, from 0, and whether each is `sure`."""

    pairs: Ints
    sure: Bools


def words_of(line: str) -> list[str]:
    """The words of a line as aligners count them: between spaces and tabs, as fast_align splits."""
    return [word for word in re.split("[ \t]", line) if word]


def has_other_spaces(line: str) -> bool:
    """Whether a line has white space, such as U+00A0, at which aligners do not split."""
    return line.split() != words_of(line)


def read_links(path: Path, *, first: int = 0) -> Iterator[Links]:
    """Links of every line: `0-0 1-2`, `1?2` for a possible one, words from `first` on; DataError names a bad line."""
    for number, line in enumerate(file_lines(path), start=1):
        fields = line.split()
        matches = [LINK.fullmatch(field) for field in fields]
        for field, match in zip(fields, matches, strict=True):
            if match is None or min(int(match[1]), int(match[3])) < first:
                syntax = f"i-j or i?j, words counted from {first}"
                raise DataError(f"{path}:{number}: {field!r} is no link; links are {syntax} ({flag.alignments_first})")
        pairs = [(int(match[1]) - first, int(match[3]) - first) for match in matches if match]
        sure = [match[2] == "-" for match in matches if match]
        yield Links(np.array(pairs, dtype=np.int64).reshape(-1, 2), np.array(sure, dtype=bool))


def check_links(links: Links, sizes: tuple[int, int], *, where: str, first: int) -> None:
    """DataError if a link names a word beyond the sentence's source and target words."""
    beyond = links.pairs >= np.array(sizes)
    if beyond.any():
        source, target = links.pairs[beyond.any(axis=1)][0] + first
        other = f"; are words counted from {1 - first} ({flag('alignments_first', 1 - first)})?" if first == 0 else ""
        raise DataError(f"{where}: link {source}-{target} of lines with {sizes[0]} and {sizes[1]} words{other}")


def words_of_subwords(texts: Sequence[str], spans: Sequence[Sequence[Span | None]]) -> tuple[Ints, Bools]:
    """The word [n] in which each of the n subwords of all texts begins, and two flags [n 2].

    The word is −1 without a span or visible characters. The flags: it is final punctuation; it follows the text.
    """
    words, ends = list[int](), list[tuple[bool, bool]]()
    for text, row in zip(texts, spans, strict=True):
        starts = [word.start() for word in re.finditer("[^ \t\n]+", text)]
        body = next((n for n in range(len(text), 0, -1) if text[n - 1].isalnum()), 0)  # the end of the last letter
        last = max((n for n, span in enumerate(row) if span), default=len(row))
        for n, span in enumerate(row):
            start, end = span or (0, 0)
            visible = text[start:end].lstrip(" \t\n")
            words.append(bisect_right(starts, min(end, len(text)) - len(visible)) - 1 if visible else -1)
            ends.append((bool(visible) and start >= body, n > last))
    return np.array(words, dtype=np.int64), np.array(ends, dtype=bool).reshape(-1, 2)


class Cells(NamedTuple):
    """Every pair of a source word i of n and a target word j of m in the same sentence, target by target.

    `words` are the numbers [c] of both in the whole text. `feature` [c] is −|i/n − j/m| with both counted from 1,
    `earlier` the same with source words, or target words, counted from 0.
    """

    words: tuple[Ints, Ints]
    feature: Floats
    earlier: tuple[Floats, Floats]

    @classmethod
    def of(cls, lengths: Ints) -> Cells:
        """From the numbers of source and target words of every sentence [n 2]."""
        sizes = lengths.prod(axis=1)
        n, m, first_source, first_target, first = (
            np.repeat(widths, sizes)
            for widths in (*lengths.T, *(lengths.cumsum(axis=0) - lengths).T, sizes.cumsum() - sizes)
        )
        j, i = np.divmod(np.arange(len(first)) - first, n)
        difference = (i + 1) / n - (j + 1) / m
        earlier = -np.abs(difference - 1 / n), -np.abs(difference + 1 / m)
        return cls((first_source + i, first_target + j), -np.abs(difference), earlier)


@dataclass(frozen=True)
class AlignmentModel:
    """The parameters of one direction: t(word | other word) [p] of pairs of types, t(word | null) [v], `tension` λ."""

    pairs: Floats
    null: Floats
    tension: float


@dataclass(frozen=True)
class Aligner:
    """A trained aligner: numbers of word types by side, sorted keys of known pairs of types, and both directions."""

    types: tuple[dict[str, int], dict[str, int]]
    keys: Ints
    forward: AlignmentModel
    backward: AlignmentModel

    def align(self, pairs: Sequence[Pair]) -> list[Links]:
        """The links of parallel lines, all of them sure."""
        sides = [
            [[number_of.get(word, len(number_of)) for word in words_of(pair[side])] for pair in pairs]
            for side, number_of in enumerate(self.types)
        ]
        sizes = np.array([[len(words) for words in side] for side in sides]).reshape(2, -1)
        order = np.lexsort((sizes[0], sizes[1]))
        links: list[Links] = [Links(np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=bool))] * len(pairs)
        for chunk in groups(order.tolist(), lambda number: (*sizes[:, number].tolist(),), CHUNK):
            padded_source, padded_target = (pad_rows([side[number] for number in chunk], 0).numpy() for side in sides)
            link_cells = self._link_words(padded_source, padded_target, sizes[:, chunk])  # [b m n]
            row, target, source = np.nonzero(link_cells)
            ends = np.searchsorted(row, np.arange(len(chunk) + 1))
            word_pairs = np.stack([source, target], axis=1)
            for line, number in enumerate(chunk):
                line_pairs = word_pairs[ends[line] : ends[line + 1]]
                links[number] = Links(line_pairs, np.ones(len(line_pairs), dtype=bool))
        return links

    def _link_words(self, source: Ints, target: Ints, sizes: Ints) -> Bools:
        """The joined links [b m n] of padded words [b n] and [b m], with lengths [2 b]."""
        n, m = sizes[0][:, None, None], sizes[1][:, None, None]
        i, j = np.arange(source.shape[1])[None, None], np.arange(target.shape[1])[None, :, None]
        real = (i < n) & (j < m)  # [b m n]
        feature = np.where(real, -np.abs((i + 1) / n - (j + 1) / m), -np.inf)
        key = source[:, None, :] * (len(self.types[1]) + 1) + target[:, :, None]
        index = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        is_known = self.keys[index] == key
        best = []
        for direction, words, axis in ((self.forward, target, 2), (self.backward, source, 1)):
            prior = np.exp(feature * direction.tension)
            prior *= (1 - NULL) / np.maximum(prior.sum(axis=axis, keepdims=True), 1e-300)
            score = np.where(is_known, direction.pairs[index], UNSEEN) * prior
            null = np.append(direction.null, UNSEEN)[words] * NULL
            choice = np.zeros(real.shape, dtype=bool)
            np.put_along_axis(choice, score.argmax(axis=axis, keepdims=True), True, axis=axis)
            best.append(choice & real & (score > np.expand_dims(null, axis)))
        return grow_diag_final_and(*best)


def trainable(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The pairs of lines that an aligner can be trained on, with at most `LONGEST` words on both sides."""
    return (pair for pair in pairs if max(len(words_of(line)) for line in pair) <= LONGEST)


def train(pairs: Iterable[Pair]) -> tuple[Aligner, int]:
    """Train an aligner on the first `trainable` lines that have `CELLS` cells; return it and their number."""
    types: tuple[dict[str, int], dict[str, int]] = ({}, {})
    words: tuple[list[int], list[int]] = ([], [])
    sizes: list[tuple[int, int]] = []
    cells = 0
    for pair in pairs:
        split = [words_of(line) for line in pair]
        n, m = map(len, split)
        cells += n * m
        if cells > CELLS:
            break
        sizes.append((n, m))
        for of_side, numbers, side in zip(types, words, split, strict=True):
            numbers += [of_side.setdefault(word, len(of_side)) for word in side]
    lengths = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    source, target = (np.array(side, dtype=np.int64) for side in words)
    layout = Cells.of(lengths)
    keys = source[layout.words[0]] * (len(types[1]) + 1) + target[layout.words[1]]
    keys, pair_of = np.unique(keys, return_inverse=True)
    shapes, count = np.unique(lengths, axis=0, return_counts=True)
    of_shapes = Cells.of(shapes)
    pair_types = np.divmod(keys, len(types[1]) + 1)
    directions = []
    for number, tokens in ((1, target), (0, source)):
        share = np.repeat(count, shapes[:, number]) / len(tokens)
        prior_mean = partial(_mean_feature, of_shapes.feature, of_shapes.words[number], share)
        directions.append(_fit(layout, number, pair_of, tokens, pair_types[1 - number], prior_mean))
    return Aligner(types, keys, *directions), len(sizes)


def _mean_feature(feature: Floats, word: Ints, share: Floats, tension: float) -> float:
    """The mean feature of cells under the prior with a `tension` λ.

    Cells are those of one sentence of each size; `share` [w] is the share that words like w are of all words.
    """
    prior = np.exp(feature * tension)
    total, weighted_sum = (np.bincount(word, part, len(share)) for part in (prior, prior * feature))
    return float(share @ (weighted_sum / total))


def _fit(
    cells: Cells, own: int, pair: Ints, types: Ints, other_of: Ints, prior_mean: Callable[[float], float]
) -> AlignmentModel:
    """Fit t(word | other) by EM, from the type pair of each cell, the type of each word, and each pair's other type.

    `own` is the side of the words. λ follows the gradient of the likelihood: the mean feature under the posterior minus
    that under the prior. As in fast_align the former counts a word's position from 0 (`earlier`), which keeps λ small.
    """
    feature, word = cells.feature, cells.words[own]
    model = AlignmentModel(np.full(len(other_of), UNSEEN), np.full(int(types.max()) + 1, UNSEEN), TENSION)
    kinds = np.bincount(other_of)  # pairs of each other type
    for iteration in range(ITERATIONS):
        score = np.exp(feature * model.tension)
        score *= ((1 - NULL) / np.bincount(word, score, len(types)))[word]
        score *= model.pairs[pair]
        null = model.null[types] * NULL
        total = np.bincount(word, score, len(types)) + null
        score /= total[word]
        counts, of_null = np.bincount(pair, score, len(other_of)), np.bincount(types, null / total)
        tension = model.tension
        posterior_mean = float(score @ cells.earlier[own]) / len(types)
        for _ in range(STEPS if iteration else 0):
            tension = float(np.clip(tension + (posterior_mean - prior_mean(tension)) * RATE, *BOUNDS))
        totals = np.bincount(other_of, counts, len(kinds))
        by_pair = _variational(counts, totals[other_of], kinds[other_of])
        model = AlignmentModel(by_pair, _variational(of_null, of_null.sum(), np.array(len(of_null))), tension)
    return model


def _variational(counts: Any, totals: Any, kinds: Any) -> Floats:
    """exp ψ(count + α) / exp ψ(total + α · kinds): probabilities that discount rare pairs."""
    return np.exp(digamma(counts + ALPHA) - digamma(totals + ALPHA * kinds))


def grow_diag_final_and(forward: Bools, backward: Bools) -> Bools:
    """Join links [b m n] of two directions: common ones, then neighbours of these, then links of two unlinked words.

    One of the eight neighbours of a link is added if either direction has it and one of its words has no link yet. All
    sentences grow at once, one direction of neighbours at a time; of several candidates for a word the first is added.
    """
    links, union = forward & backward, forward | backward
    ways = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
    growing = np.arange(len(links))
    while len(growing):
        current, candidates, before = links[growing], union[growing], links[growing].sum(axis=(1, 2))
        for way in ways:
            new = _shift_links(current, way) & candidates & ~current
            free = [new & ~current.any(axis=axis, keepdims=True) for axis in (2, 1)]
            current |= _first(free[0], 2) | _first(free[1], 1)
        links[growing] = current
        growing = growing[current.sum(axis=(1, 2)) > before]
    for direction in (forward, backward):
        alone = direction & ~links.any(axis=2, keepdims=True) & ~links.any(axis=1, keepdims=True)
        links = links | _first(_first(alone, 2), 1)
    return links


def _first(candidates: Bools, axis: int) -> Bools:
    """Only the first True along an axis."""
    first = np.zeros_like(candidates)
    np.put_along_axis(first, candidates.argmax(axis=axis, keepdims=True), True, axis=axis)
    return first & candidates


def _shift_links(links: Bools, way: tuple[int, int]) -> Bools:
    m, n = links.shape[1:]
    padded = np.pad(links, ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 - way[0] : 1 - way[0] + m, 1 - way[1] : 1 - way[1] + n]
