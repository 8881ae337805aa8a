"""Text that costs nothing, beside the text that a refit is calibrated on, so that the refit holds on other text too.

On one kind of text a head can be predicted from others that know nothing of what it does on another kind. Random
subwords, and the words of the text in random order, make the model compute things that the text never does; with their
moments added to those of the text (each part with an equal weight) a refit is held to the intact model there as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from headscope.assets import sample
from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, SideName
from headscope.pruning.options.refit import OtherText, anchor_files, anchor_name, sides

LENGTHS = (6, 30)
"""Subwords of a random text, from and to."""
PARTS = {"": (), "random": ("random",), "shuffled": ("shuffled",), "mixed": ("random", "shuffled"), "text": ("text",)}
"""What stands beside the calibration text, by the name of an anchor."""
LANGUAGES = ("en", "de")
"""Languages that a general sample ships in."""
COMMON = 40
"""Words of a language that are looked for, the most frequent of its sample."""
KNOWN = 0.15
"""Share of a text's words that must be among them."""
UNREADABLE = 0.1
"""Share of unknown subwords above which a sample is none for a model."""


class WeightedText(NamedTuple):
    """A text, and the weight of its moments."""

    corpus: Corpus
    weight: float


def parts_of(anchor: OtherText) -> tuple[str, ...]:
    """What stands beside the calibration text; ConfigError for an unknown anchor."""
    anchor_files(anchor)
    return PARTS[anchor_name(anchor)]


def beside(checkpoint: Checkpoint, corpus: Corpus, anchor: OtherText, *, seed: int = 1) -> list[WeightedText]:
    """The texts beside the calibration text, all with equal weights, that text's too; together they weigh one."""
    names = parts_of(anchor)
    texts = [anchor_text(checkpoint, corpus, name, anchor, seed=seed) for name in names]
    return [WeightedText(text, 1 / (1 + len(names))) for text in texts]


def anchor_text(checkpoint: Checkpoint, corpus: Corpus, name: str, anchor: OtherText = "", *, seed: int = 1) -> Corpus:
    """The part `name` of an anchor: "random", "shuffled", or "text", which is `anchor` itself.

    ConfigError for a text of the user's that lacks a target where the calibration text has one.
    """
    if name == "text":
        return opened(anchor, like=corpus, name="--anchor")
    return random_text(checkpoint, corpus, seed=seed) if name == "random" else shuffled_text(corpus, seed=seed)


def opened(text: OtherText, *, like: Corpus, name: str) -> Corpus:
    """A text of the user's; ConfigError where `like` has a target and it has none."""
    source, *target = anchor_files(text, name=name) if name == "--anchor" else sides(text, name=name)
    if like.has_target and not target:
        raise ConfigError(f"{name}: the calibration text has a target, so this one needs one too: FILE,TARGET")
    return open_corpus(source, target=target[0] if target and like.has_target else None)


def random_text(checkpoint: Checkpoint, corpus: Corpus, *, seed: int = 1, count: int | None = None) -> Corpus:
    """As many lines as a corpus has (or `count`), each of 6 to 30 subwords drawn from the vocabulary, on every side."""
    luck = random.Random(seed)

    def lines(side: SideName) -> list[str]:
        ids = checkpoint.plain_ids(side)
        return [_drawn(checkpoint, ids, luck, side) for _ in range(corpus.count if count is None else count)]

    target = lines("target") if corpus.has_target else None
    return open_corpus(lines("source"), target=target, second=lines("source") if corpus.has_second else None)


def _drawn(checkpoint: Checkpoint, ids: Sequence[int], luck: random.Random, side: SideName) -> str:
    """A line of random subwords that is not empty."""
    while True:
        drawn = luck.choices(ids, k=luck.randint(*LENGTHS))
        text = " ".join(checkpoint.decode(drawn, side=side).encode(errors="ignore").decode().split())
        if text:
            return text


def shuffled_text(corpus: Corpus, *, seed: int = 1) -> Corpus:
    """The words of a corpus in random order, as many to a line as before; characters where it has no spaces."""
    luck, sentences = random.Random(seed), list(corpus)

    def shuffled(lines: list[str]) -> list[str]:
        mark = " " if any(" " in line for line in lines) else ""
        split = [line.split() if mark else list(line.strip()) for line in lines]
        words = [word for line in split for word in line]
        luck.shuffle(words)
        rest = iter(words)
        return [mark.join(next(rest) for _ in line) for line in split]

    target = shuffled([sentence.target or "" for sentence in sentences]) if corpus.has_target else None
    second = shuffled([sentence.second or "" for sentence in sentences]) if corpus.has_second else None
    return open_corpus(shuffled([sentence.source for sentence in sentences]), target=target, second=second)


def second_text(checkpoint: Checkpoint, corpus: Corpus, check: OtherText = (), *, seed: int = 1) -> tuple[Corpus, bool]:
    """What a compensation is checked on besides, and whether a model can be asked what it says there.

    `check`, else the sample that ships in the language of `corpus`, else random subwords, of which nothing can be
    foretold. A sample is none for a model that reads pairs of texts, or whose vocabulary lacks its subwords.
    """
    if sides(check, name="--check"):
        return opened(check, like=corpus, name="--check"), True
    texts = [[sentence.source for sentence in corpus]]
    texts += [[sentence.target or "" for sentence in corpus]] if corpus.has_target else []
    languages = [language_of(lines) for lines in texts]
    if corpus.has_second or None in languages:
        return random_text(checkpoint, corpus, seed=seed, count=CHECKED), False
    source, *target = (sample(str(language)) for language in languages)
    general = open_corpus(source, target=target[0] if target else None)
    if not _readable(checkpoint, general):
        return random_text(checkpoint, corpus, seed=seed, count=CHECKED), False
    return general, True


CHECKED = 120
"""Lines of random text that a compensation is checked on, as many as the sample has."""


def language_of(lines: Sequence[str]) -> str | None:
    """The language of a text, of those that a sample ships in, by its most frequent words; None where it is neither."""
    words = [word for line in lines for word in line.lower().split()]
    shares = {language: sum(word in common for word in words) / max(len(words), 1) for language, common in _common()}
    best = max(shares, key=lambda language: shares[language])
    others = [share for language, share in shares.items() if language != best]
    return best if shares[best] >= KNOWN and shares[best] > 2 * max(others) else None


def _common() -> list[tuple[str, frozenset[str]]]:
    """The most frequent words of the samples."""
    found = []
    for language in LANGUAGES:
        words = sample(language).read_text(encoding="utf-8").lower().split()
        ranked = sorted(set(words), key=lambda word: (-words.count(word), word))
        found.append((language, frozenset(ranked[:COMMON])))
    return found


def _readable(checkpoint: Checkpoint, corpus: Corpus) -> bool:
    """Whether the subwords of a sample are in the vocabulary."""
    lines: dict[SideName, list[str]] = {"source": [sentence.source for sentence in corpus]}
    if corpus.has_target:
        lines["target"] = [sentence.target or "" for sentence in corpus]
    encoded = [each for side, texts in lines.items() for each in checkpoint.encode(texts, side=side, limit=512)]
    return sum(each.unknown for each in encoded) <= UNREADABLE * sum(len(each.ids) for each in encoded)
