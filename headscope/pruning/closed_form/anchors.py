"""Texts beside the calibration text of a refit, so that the refit holds on other text too.

On one kind of text a head may be predictable from other heads that cannot replace it on another kind. Anchors are
random subwords, and the words of the text in random order, on which a model computes things that it does not on the
text. Their moments are added to those of the text, with equal weight, so the refit stays close to the intact model
there too. If a model reads recordings, these stay, and only transcripts change.

Words that all lines begin with are instructions to the model (`>>deu<<`, "translate English to German:", "query:"), so
all lines of generated texts, and of the sample that ships, begin with them too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress, cycle, islice, takewhile
from typing import Any

from headscope.assets import sample, varied_sample
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import SideName
from headscope.errors import ConfigError, flag
from headscope.files.reading import read_lines, text_units
from headscope.formats.base import Checkpoint
from headscope.pruning.options.shared import OtherText, anchor_name

LENGTHS = (6, 30)
"""The shortest and the longest random line, in subwords."""
LANGUAGES = ("en", "de")
"""Languages that a sample ships in."""
COMMON = 40
"""The number of most frequent words by which a language is recognised."""
KNOWN_SHARE = 0.15
"""The least share of these words in a text of the language."""
UNREADABLE = 0.1
"""The share of unknown subwords above which a model cannot read a sample."""


def anchor_sources(
    checkpoint: Checkpoint, corpus: Corpus, anchor: OtherText, *, seed: int = 1
) -> dict[str, Callable[[], Corpus]]:
    """Functions that make the anchor texts, by name."""
    name = anchor_name(anchor)
    if name != "mixed":
        return {"text": lambda: open_text(anchor, like=corpus, name=flag.anchor)} if name else {}
    return {
        "random": lambda: cap_corpus(
            checkpoint, random_text(checkpoint, corpus, seed=seed), positions=subwords(checkpoint, corpus)
        ),
        "shuffled": lambda: shuffled_text(checkpoint, corpus, seed=seed),
    }


def open_text(text: OtherText, *, like: Corpus, name: str) -> Corpus:
    """A text that the user gives; ConfigError where `like` has a target and the text does not."""
    source, *target = text
    if like.has_target and not target:
        raise ConfigError(f"{name}: the calibration text has a target, so this one needs one too: FILE,TARGET")
    return open_corpus(source, target=target[0] if target and like.has_target else None)


def random_text(checkpoint: Checkpoint, corpus: Corpus, *, seed: int = 1, count: int | None = None) -> Corpus:
    """As many lines as a corpus has (or `count`), each of 6 to 30 subwords drawn from the vocabulary, on every side."""
    draws, count = random.Random(seed), corpus.count if count is None else count

    def draw_lines(_: list[str], side: SideName) -> list[str]:
        ids, texts = checkpoint.plain_ids(side=side), list[str]()
        while len(texts) < count:
            text = checkpoint.decode(draws.choices(ids, k=draws.randint(*LENGTHS)), side=side)
            text = " ".join(text.encode(errors="ignore").decode().split())
            texts += [text] if text else []
        return texts

    return _rewrite(checkpoint, corpus, draw_lines, count=count, name="random subwords")


def _rewrite(
    checkpoint: Checkpoint,
    corpus: Corpus,
    rewrite: Callable[[list[str], SideName], list[str]],
    *,
    count: int,
    name: str,
) -> Corpus:
    """A corpus with `count` new lines on every side, which begin as all lines did; recordings stay."""
    texts: dict[str, Any] = {}
    for part, (side, lines) in _parts(corpus).items():
        if part == "source" and checkpoint.reads_sound:
            texts[part] = list(islice(cycle(lines), count))
        else:
            start, endings = _split_opening(lines)
            texts[part] = [start + line for line in rewrite(endings, side)]
    return replace(open_corpus(**texts), name=name)


def _parts(corpus: Corpus) -> dict[str, tuple[SideName, list[str]]]:
    """The lines of each text of a corpus, with the side that reads them."""
    sides: list[tuple[str, SideName, bool]] = [
        ("target", "target", corpus.has_target),
        ("source", "source", True),
        ("second", "source", corpus.has_second),
    ]
    return {part: (side, [getattr(line, part) or "" for line in corpus]) for part, side, is_there in sides if is_there}


def _split_opening(lines: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all lines begin with, and the rest of each line; "" where lines share none or are all equal."""
    words = [line.split() for line in lines]
    if len(set(map(tuple, words))) < 2:
        return "", list(lines)
    count = len(list(takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))))
    if not count:
        return "", list(lines)
    return " ".join(words[0][:count]) + " ", [" ".join(line[count:]) for line in words]


def shuffled_text(checkpoint: Checkpoint, corpus: Corpus, *, seed: int = 1) -> Corpus:
    """The words of a corpus in random order, with the same number on each line.

    Where most lines have no spaces, its characters. Recordings stay, and so does a common beginning of all lines.
    """
    draws = random.Random(seed)

    def shuffle(lines: list[str], _: SideName) -> list[str]:
        units, joint = text_units(lines)
        shuffled_units = [unit for line in units for unit in line]
        draws.shuffle(shuffled_units)
        remaining = iter(shuffled_units)
        return [joint.join(next(remaining) for _ in line) for line in units]

    name = f"{corpus.name}, its words in random order"
    return _rewrite(checkpoint, corpus, shuffle, count=corpus.count, name=name)


def second_text(checkpoint: Checkpoint, corpus: Corpus, check: OtherText = (), *, seed: int = 1) -> tuple[Corpus, bool]:
    """The second text on which refits are compared, and whether a model can predict it.

    It is `check`, else the text of many kinds that ships, else random subwords, which are not predictable.
    """
    if check:
        return open_text(check, like=corpus, name=flag.check), True
    sample_text = varied_text(checkpoint, corpus)
    if sample_text is None:
        return random_text(checkpoint, corpus, seed=seed + 1, count=RANDOM_LINES), False
    return sample_text, True


def varied_text(checkpoint: Checkpoint, corpus: Corpus) -> Corpus | None:
    """The text of many kinds that ships, in the languages of a corpus.

    None for other languages, for pairs of texts and recordings, and where the vocabulary lacks its subwords.
    """
    if checkpoint.reads_sound or corpus.has_second:
        return None
    samples: dict[str, Any] = {}
    for part, (side, lines) in _parts(corpus).items():
        start, endings = _split_opening(lines)
        if (language := language_of(endings)) is None:
            return None
        samples[part] = [start + line for line in read_lines(varied_sample(language))]
        encodings = checkpoint.encode(samples[part], side=side, limit=512)
        if sum(line.unknown for line in encodings) > UNREADABLE * sum(len(line.ids) for line in encodings):
            return None
    return replace(open_corpus(**samples), name="headscope's varied text")


RANDOM_LINES = 120
"""Lines of random text as a second text."""


def language_of(lines: Sequence[str]) -> str | None:
    """The language of a text, one of `LANGUAGES`, by its most frequent words; None for other languages."""
    words = [word for line in lines for word in line.lower().split()]
    shares = {name: sum(word in _common_words(name) for word in words) / max(len(words), 1) for name in LANGUAGES}
    second, best = sorted(shares, key=shares.__getitem__)
    return best if shares[best] >= KNOWN_SHARE and shares[best] > 2 * shares[second] else None


@cache
def _common_words(language: str) -> frozenset[str]:
    """The most frequent words of a language's sample."""
    counts = Counter(sample(language).read_text(encoding="utf-8").lower().split())
    return frozenset(sorted(counts, key=lambda word: (-counts[word], word))[:COMMON])


def cap_corpus(checkpoint: Checkpoint, corpus: Corpus, *, positions: int, fewest: int = 1) -> Corpus:
    """Lines spread evenly over a text, with about `positions` subwords on all sides, at least `fewest` lines."""
    n_subwords = subwords(checkpoint, corpus)
    count = max(fewest, corpus.count * positions // max(n_subwords, 1))
    if count >= corpus.count:
        return corpus
    is_chosen = [(line + 1) * count // corpus.count > line * count // corpus.count for line in range(corpus.count)]
    return replace(corpus, count=count, read=lambda: compress(corpus, is_chosen))


def subwords(checkpoint: Checkpoint, corpus: Corpus) -> int:
    """The number of subwords of a text, on all sides together."""
    encodings = (checkpoint.encode(lines, side=side, limit=512) for side, lines in _parts(corpus).values())
    return sum(len(line.ids) for texts in encodings for line in texts)
