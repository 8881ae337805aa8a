"""Prompts with corrupt versions and answers, and what they are in ids: independent of the package's batches."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from headscope.data.corpus import Corpus, Sentence
from headscope.evaluation.prompts import with_answers
from tests.oracles import speakers, tiny
from tests.oracles.tiny import MASK, PAD, PIECES, START

COUNT = 5


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, of its corrupt version and of what the decoder has said; where the answer is, and which."""

    clean: list[int]
    corrupt: list[int]
    target: list[int] | None
    position: int
    answer: int
    wrong: int | None


@cache
def lines(kind: str, *, seed: int = 5) -> tuple[list[str], list[str], list[str], list[str] | None]:
    """Clean and corrupt prompts of unequal lengths, answers (the third alone), beginnings of translations."""
    rng = np.random.default_rng(seed)
    clean, corrupt, answers, prefix = [], [], [], []
    for number, length in enumerate((4, 2, 7, 3, 5)):
        words = rng.choice(tiny.WORDS, size=length, replace=False).tolist()
        distractors = rng.choice([word for word in tiny.WORDS if word not in words], size=4, replace=False).tolist()
        corrupt_words = [distractors[0] if index == number % length else word for index, word in enumerate(words)]
        if speakers.SPEAKERS[kind].masked:
            words.append("[MASK]")
            corrupt_words.append("[MASK]")
        clean.append(" ".join(words))
        corrupt.append(" ".join(corrupt_words))
        answers.append(distractors[1] if number == 2 else f"{distractors[1]}\t{distractors[2]}")
        prefix.append(" ".join([distractors[3], *words][: 1 + number % 2]))
    return clean, corrupt, answers, prefix if speakers.SPEAKERS[kind].two_sided else None


def corpus(kind: str, *, prefix: bool = True) -> Corpus:
    """The prompts as the package reads them."""
    clean, corrupt, answers, targets = lines(kind)
    sentences = [
        Sentence(number, text, targets[number] if targets and prefix else None) for number, text in enumerate(clean)
    ]
    text = Corpus("clean", len(clean), "0" * 40, lambda: iter(sentences), has_target=bool(targets and prefix))
    return with_answers(speakers.checkpoint(kind), text, corrupt, answers)


def prompts(kind: str, *, prefix: bool = True) -> list[Prompt]:
    """The prompts in ids, word by word."""
    speaker = speakers.SPEAKERS[kind]
    entries = []
    clean, corrupt, answers, targets = lines(kind)
    for number, (text, other, answer) in enumerate(zip(clean, corrupt, answers, strict=True)):
        sides = [[*speaker.before, *_ids(text), *speaker.after] for text in (text, other)]
        ids = [PIECES.index(word) for word in answer.split("\t")]
        target = None
        position = len(sides[0]) - 1
        if speaker.two_sided:
            prefix_ids = _ids(targets[number]) if targets and prefix else []
            target = [START if speaker.make is None else PAD, *prefix_ids]
            position = len(prefix_ids)
        elif speaker.masked:
            position = sides[0].index(MASK)
        entries.append(Prompt(sides[0], sides[1], target, position, ids[0], ids[1] if len(ids) > 1 else None))
    return entries


def _ids(text: str) -> list[int]:
    return [PIECES.index(word) for word in text.split()]
