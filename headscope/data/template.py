"""Texts made from a corpus: line and translation in a template, which a decoder language model reads as one text.

And haystacks: sentences with a needle or passkeys hidden between them (DuoAttention, Xiao et al. 2024).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path

from headscope.data.corpus import Corpus, Pair, Sentence
from headscope.data.encoded import IGNORED, UNCUT, Encoder
from headscope.data.offsets import Span
from headscope.data.word_alignment import Ints, words_of, words_of_subwords
from headscope.errors import ConfigError, DataError, flag, flags
from headscope.files.reading import file_lines

SOURCE, TARGET = "{source}", "{target}"
ADVICE = r'give one such as "English: {source}\nGerman: {target}"'


def read_template(template: str) -> tuple[str, str, str]:
    r"""Split a template into the parts before, between and after source and target.

    `template` is the text itself (`\n` is a new line) or the name of a file.
    """
    text = template.replace("\\n", "\n")
    if SOURCE not in text and TARGET not in text:
        path = Path(template)
        if not path.is_file():
            raise ConfigError(f"{flag.template} {template[:60]!r} is no file and lacks {SOURCE} and {TARGET}; {ADVICE}")
        text = "\n".join(file_lines(path))
    if re.findall(r"\{source\}|\{target\}", text) != [SOURCE, TARGET]:
        raise ConfigError(f"{flag.template} {template[:60]!r} must have {SOURCE}, then {TARGET}, once each; {ADVICE}")
    before, middle, after = re.split(r"\{source\}|\{target\}", text)
    return before, middle, after


def with_template(corpus: Corpus, template: str, *, examples: int) -> Corpus:
    """Each pair of a corpus as one text, after `examples` other pairs: the ones before it, or the first of the corpus.

    ConfigError unless the corpus has pairs of plain lines.
    """
    before, middle, after = read_template(template)
    if not corpus.has_target:
        raise ConfigError(f"{flag.template} needs the translation of every line; give {flag.target} FILE")
    if corpus.has_parses or corpus.has_contrast:
        raise ConfigError(f"{flag.template} has neither parses nor answers; leave out {flags('parse', 'clean')}")
    if corpus.count <= examples:
        raise DataError(f"{corpus.name}: {corpus.count} lines are too few for {flag.examples} {examples}; give more")

    def fill(sentence: Sentence) -> str:
        return f"{before}{sentence.source}{middle}{sentence.target}{after}"

    def read() -> Iterator[Sentence]:
        sentences = iter(corpus)
        first = list(islice(sentences, examples + 1))
        recent: deque[Sentence] = deque(maxlen=examples)
        for index, sentence in enumerate(chain(first, sentences)):
            context = recent if index > examples else [other for other in first if other is not sentence]
            prefix = "".join(f"{fill(other)}\n\n" for other in context)
            start = len(prefix) + len(before)
            pair = Pair(sentence.source, sentence.target or "", (start, start + len(sentence.source) + len(middle)), ())
            yield sentence._replace(source=prefix + fill(sentence), target=None, pair=pair)
            recent.append(sentence)

    digest = hashlib.sha1(f"{corpus.digest} {before, middle, after} {examples}".encode()).hexdigest()
    return replace(corpus, read=read, has_target=False, has_template=True, digest=digest)


def with_scrambled_sources(corpus: Corpus, *, seed: int) -> Corpus:
    """The same texts with the words of every source in random order."""
    return replace(corpus, read=lambda: (scramble(sentence, seed) for sentence in corpus.read()))


def scramble(sentence: Sentence, seed: int) -> Sentence:
    """A text of a template with the words of its source in random order."""
    assert sentence.pair is not None
    line, target, (start, target_start), _ = sentence.pair
    words = words_of(line)
    order = random.Random(f"{seed} {sentence.number}").sample(range(len(words)), len(words))
    shuffled_line = " ".join(words[index] for index in order)
    text = sentence.source[:start] + shuffled_line + sentence.source[start + len(line) :]
    starts = (start, target_start + len(shuffled_line) - len(line))
    return sentence._replace(source=text, pair=Pair(shuffled_line, target, starts, tuple(order)))


def unscramble(sentence: Sentence) -> Sentence:
    """A sentence with its source words in the original order, for which alignment links are defined."""
    if sentence.pair is None or not sentence.pair.order:
        return sentence
    words = sorted(zip(sentence.pair.order, words_of(sentence.pair.source), strict=True))
    return sentence._replace(pair=sentence.pair._replace(source=" ".join(word for _, word in words), order=()))


def words_in_texts(pairs: Sequence[Pair], spans: Sequence[Sequence[Span | None]]) -> tuple[Ints, Ints]:
    """The source word [n] and the target word [n] in which each subword of all texts begins, −1 for none.

    Of a subword across the border of a line only the part inside counts.
    """
    words = []
    for side in (0, 1):
        lines = [(pair.source, pair.target)[side] for pair in pairs]
        starts = [pair.starts[side] for pair in pairs]
        rows = zip(starts, map(len, lines), spans, strict=True)
        inside = [[_inside(span, start, length) for span in own] for start, length, own in rows]
        words.append(words_of_subwords(lines, inside)[0])
    return words[0], words[1]


def _inside(span: Span | None, start: int, length: int) -> Span | None:
    if span is None or span[1] <= start or span[0] >= start + length:
        return None
    return max(span[0] - start, 0), min(span[1] - start, length)


def target_labels(pair: Pair, spans: Sequence[Span | None] | None, row: Sequence[int]) -> list[int]:
    """The labels of a text with only those kept that predict the target; DataError without spans."""
    if spans is None:
        raise DataError(f"subwords of {pair.target[:60]!r} cannot be located; leave out {flag.template}")
    inside = [_inside(span, pair.starts[1], len(pair.target)) is not None for span in spans]
    return [label if follows else IGNORED for label, follows in zip(row, [*inside[1:], False], strict=True)]


BATCH = 256  # sentences that are encoded at a time


@dataclass(frozen=True)
class Haystack:
    """The sentences of a corpus in order, with their numbers of subwords; repeated if the corpus is too short."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def read(cls, corpus: Corpus, encoder: Encoder, *, length: int) -> Haystack:
        """The first sentences of a corpus that have `length` subwords together."""
        sentences: list[str] = []
        lengths: list[int] = []
        lines = iter(corpus)
        while sum(lengths) < length and (texts := [sentence.source for sentence in islice(lines, BATCH)]):
            sentences += texts
            encodings = encoder.encode(texts, side="source", limit=UNCUT)
            lengths += [sum(not special for special in encoding.special) for encoding in encodings]
        if not sum(lengths):
            raise DataError(f"{corpus.name} has no text to hide a needle in")
        copies = -(-length // sum(lengths))
        return cls(tuple(sentences) * copies, tuple(lengths) * copies)

    def around(self, needles: Sequence[tuple[float, str]], *, length: int) -> str:
        """Sentences of at most `length` subwords in all, a line each, with needles at the given depths (0 … 1)."""
        ends = list(accumulate(self.lengths))
        count = sum(end <= length for end in ends)
        lines: list[str] = []
        position = 0
        for depth, needle in sorted(needles, key=lambda pair: pair[0]):
            before = sum(end <= depth * (ends[count - 1] if count else 0) for end in ends[:count])
            lines += [*self.sentences[position:before], needle]
            position = max(position, before)
        return "\n".join([*lines, *self.sentences[position:count]])


def prompt_ids(encoder: Encoder, text: str, *, special: bool = True) -> list[int]:
    """Ids of a text to be continued, without special ones at its end; with `special` False without any."""
    prompt = encoder.encode([text], side="source", limit=UNCUT)[0].without_end()
    return [id_ for id_, is_special in zip(prompt.ids, prompt.special, strict=True) if special or not is_special]


ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth"),
)
SHALLOWEST, DEEPEST = 0.05, 0.95  # shares of the text between which passkeys are hidden


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """Settings of passkeys: their number, the words they are made of, and the sentences that state and ask for them.

    `{ordinal}` in these sentences becomes first, second, … twentieth, so there are at most 20 passkeys.
    """

    count: int
    length: int
    words: tuple[str, ...]
    needle: str
    question: str

    def hidden(self, haystack: Haystack, *, length: int, generator: random.Random) -> tuple[str, str]:
        """A text of about `length` subwords with fresh passkeys in it, and the questions with their answers."""
        keys = [" ".join(generator.choices(self.words, k=self.length)) for _ in range(self.count)]
        depths = sorted(generator.uniform(SHALLOWEST, DEEPEST) for _ in keys)
        key_pairs = list(zip(ORDINALS, keys, strict=False))
        statements = [f"{self.needle.replace('{ordinal}', name)} {key}" for name, key in key_pairs]
        questions = [f"{self.question.replace('{ordinal}', name)} {key}" for name, key in key_pairs]
        return haystack.around(list(zip(depths, statements, strict=True)), length=length), "\n".join(questions)
