"""Vocabularies of fairseq, story-of-heads and native checkpoints: subwords, special ids, BPE merges.

Four kinds: whitespace only, subword-nmt's `wei@@ ße`, story-of-heads' "wei `ße", and SentencePiece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, Literal, NamedTuple, get_args

from headscope.errors import ConfigError, DataError, restate

Kind = Literal["words", "bpe", "backtick", "sentencepiece"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RECENT = 4096  # split texts that are cached


class Subword(NamedTuple):
    """A subword as the vocabulary writes it, and its character span in the text."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Splitter:
    """Splits text into subwords with spans, and joins them; `codes`: BPE merges or a SentencePiece model."""

    kind: Kind = "words"
    codes: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown way of splitting {self.kind!r}; available: {', '.join(KINDS)}")
        if self.kind == ("sentencepiece" if self.codes is None else "words"):
            raise ConfigError("sentencepiece needs its model, and text that is split at whitespace only has no codes")
        if self.codes is not None:
            _ = self._model if self.kind == "sentencepiece" else self._merges

    def split(self, text: str) -> list[Subword]:
        """Subwords of a text with their spans."""
        return [*self._recent(text)]

    @cached_property
    def _recent(self) -> Callable[[str], list[Subword]]:
        return lru_cache(RECENT)(self._split)  # encoding splits a text, and its spans are read later

    def _split(self, text: str) -> list[Subword]:
        if self.kind == "sentencepiece":
            return self._sentencepiece(text)
        subwords: list[Subword] = []
        # story-of-heads and subword-nmt split only at U+0020; fairseq then splits the result at any white space
        merges = self.kind == "bpe" and self.codes is not None
        for word in re.finditer(r"[^ \n\r]+" if merges else r"[^ \n]+" if self.kind == "backtick" else r"\S+", text):
            subwords += self._word(word[0], word.start())
        if not merges:
            return subwords
        return [  # as fairseq splits subwords with white space, which its dictionary files cannot hold
            Subword(part[0], min(start + part.start(), end), min(start + part.end(), end))
            for text, start, end in subwords
            for part in re.finditer(r"\S+", text)
        ]

    def join(self, subwords: Sequence[str]) -> str:
        """The text of subwords."""
        if self.kind == "sentencepiece":
            return "".join(subwords).replace("▁", " ").strip()
        text = " ".join(subwords)
        if self.kind == "bpe":
            return (text + " ").replace("@@ ", "").rstrip(" ")  # as fairseq's --remove-bpe does it
        return text.replace(" `", "") if self.kind == "backtick" else text

    def _word(self, word: str, start: int) -> list[Subword]:
        if self.codes is None:
            end, is_mark = start + len(word), word in ("@@", "`")
            end -= 2 * (self.kind == "bpe" and word.endswith("@@") and not is_mark)
            start += self.kind == "backtick" and word.startswith("`") and not is_mark
            return [Subword(word, start, end)]
        subwords: list[Subword] = []
        for number, part in enumerate(parts := self._merges.split(word)):
            text = part + "@@" if self.kind == "bpe" and number < len(parts) - 1 else part
            text = "`" + part if self.kind == "backtick" and number else text
            subwords.append(Subword(text, start, start + len(part)))
            start += len(part)
        return subwords

    def _sentencepiece(self, text: str) -> list[Subword]:
        """Spans from the surface of each subword; SentencePiece's own offsets count bytes in some releases."""
        # before 0.2.2 "proto" was the bytes of encodings with surfaces
        kind = "immutable_proto" if isinstance(self._model.encode("", out_type="proto"), bytes) else "proto"
        subwords, position = list[Subword](), 0
        for subword in self._model.encode(text, out_type=kind).pieces:
            start = max(text.find(subword.surface, position), position)
            position = start + len(subword.surface)
            subwords.append(Subword(subword.piece, position - len(subword.surface.lstrip()), position))
        return subwords

    @cached_property
    def _merges(self) -> Merges:
        assert self.codes is not None
        return Merges.read(self.codes)

    @cached_property
    def _model(self) -> Any:
        import sentencepiece

        assert self.codes is not None
        problem = "the SentencePiece model cannot be read; is the file complete?"
        with restate(DataError, problem, RuntimeError, ValueError, TypeError):
            return sentencepiece.SentencePieceProcessor(model_proto=self.codes)


class Merges:
    """BPE merges: the adjacent pair with the lowest rank is merged until none has a rank.

    Files of subword-nmt ("#version:", words end with </w>), fastBPE ("left right count") and story-of-heads ("left
    right rank" with tabs, words between ^ and $).
    """

    def __init__(self, ranks: dict[tuple[str, str], int], *, begin: str, end: str, glue: bool) -> None:
        self.ranks, self.begin, self.end, self.is_glued = ranks, begin, end, glue
        self.split = lru_cache(1 << 16)(self._parts)  # the subwords of a word, without marks

    @classmethod
    def read(cls, codes: bytes) -> Merges:
        """Merges from the bytes of a file; DataError names the first invalid line."""
        with restate(DataError, "the BPE codes are not UTF-8 text", UnicodeDecodeError):
            lines = codes.decode("utf-8").strip("\r\n ").split("\n")
        has_header = lines[0].startswith("#version:")
        has_ranks = not has_header and lines[0].count("\t") == 2
        has_counts = not has_header and re.fullmatch(r"[^ ]+ [^ ]+ \d+\r?", lines[0]) is not None
        ranks: dict[tuple[str, str], int] = {}
        for number, line in enumerate(lines[has_header:]):
            pair = line.split() if has_ranks else line.strip("\r\n ").split(" ")
            has_number = (has_ranks or has_counts) and len(pair) == 3 and re.fullmatch(r"\d{1,9}", pair[2])
            rank = pair.pop() if has_number else None
            if len(pair) != 2 or (has_ranks and rank is None):
                expected_form = "two subwords and a rank" if has_ranks else "two subwords"
                raise DataError(
                    f"line {number + 1 + has_header} of the BPE codes is {line[:40]!r}; give {expected_form}"
                )
            if has_ranks:
                ranks[pair[0], pair[1]] = int(rank or 0)
            else:
                ranks.setdefault((pair[0], pair[1]), number)
        if has_ranks:
            return cls(ranks, begin="^", end="$", glue=False)
        version = lines[0].split()[-1] if has_header else "0.1"
        return cls(ranks, begin="", end="</w>", glue=has_counts or version != "0.1")

    def _parts(self, word: str) -> list[str]:
        """The subwords of a word; characters that look like marks of word boundaries are private ones meanwhile."""
        private = {self.begin: "\U0010fffe", self.end: "\U0010ffff"}
        symbols = [private.get(character, character) for character in word]
        if self.is_glued:
            symbols[-1] += self.end
        else:
            symbols = [*filter(None, [self.begin]), *symbols, self.end]
        symbols = merge_symbols(symbols, self.ranks)
        hidden = {mark: character for character, mark in private.items()}
        parts = [part.removesuffix(self.end) if n == len(symbols) - 1 else part for n, part in enumerate(symbols)]
        parts[0] = parts[0].removeprefix(self.begin)
        return ["".join(hidden.get(c, c) for c in part) for part in parts if part]


def merge_symbols(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Apply merges, lowest rank first, each to all its occurrences from the left, in O(n log n)."""
    parts: list[str] = list(symbols)  # "" where a part was merged into the one before it
    after = list(range(1, len(parts) + 1))
    before = list(range(-1, len(parts) - 1))

    def pair(position: int) -> tuple[str, str]:
        return parts[position], parts[after[position]] if after[position] < len(parts) else ""

    waiting = [(rank, n) for n in range(len(parts)) if (rank := ranks.get(pair(n))) is not None]
    heapify(waiting)
    while waiting:
        rank, first = heappop(waiting)
        merge, positions, other_positions = pair(first), [first], list[int]()
        if ranks.get(merge) != rank:
            continue  # has become part of another since
        while waiting and waiting[0][0] == rank:
            position = heappop(waiting)[1]
            (positions if pair(position) == merge else other_positions).append(position)
        for position in other_positions:
            heappush(waiting, (rank, position))
        for position in positions:
            if pair(position) != merge:
                continue  # overlaps with the one before it
            second = after[position]
            parts[position], parts[second] = "".join(merge), ""
            after[position] = after[second]
            if after[position] < len(parts):
                before[after[position]] = position
            for start in (before[position], position):
                if start >= 0 and (new := ranks.get(pair(start))) is not None:
                    heappush(waiting, (new, start))
    return [part for part in parts if part]


@dataclass(frozen=True)
class Vocabulary:
    """The `subwords` of one side by id. `start` is the decoder's first input, `end` the end of a text.

    `special` are further ids that do not stand for text. A source text is put between `prefix` and `suffix` (None:
    `end`); a target text begins with `begin`, which the decoder is forced to write.
    """

    subwords: tuple[str, ...] = field(repr=False)
    splitter: Splitter
    start: int
    end: int
    unknown: int | None = None
    pad: int | None = None
    special: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] | None = None
    begin: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        around = (*self.special, *self.prefix, *(self.suffix or ()), *self.begin)
        for number in (self.start, self.end, self.unknown, self.pad, *around):
            if number is not None and not 0 <= number < len(self.subwords):
                raise ConfigError(f"there is no special id {number}; the vocabulary has {len(self.subwords)} subwords")

    def __len__(self) -> int:
        return len(self.subwords)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that do not stand for text; the unknown id does."""
        ids = {self.start, self.end, self.pad, *self.special} - {None, self.unknown}
        return frozenset(number for number in ids if number is not None)

    @property
    def closing(self) -> tuple[int, ...]:
        """The ids after a source text: `suffix`, or the end."""
        return (self.end,) if self.suffix is None else self.suffix

    @property
    def only_ends(self) -> bool:
        """Whether only an end is added to a text."""
        return not (self.prefix or self.begin) and self.closing == (self.end,)

    @property
    def padding(self) -> int:
        """The id for padding: `pad`, or `end` where there is none."""
        return self.end if self.pad is None else self.pad

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ones; DataError for an unlisted subword if there is no unknown id."""
        return [self._id(subword.text) for subword in self.splitter.split(text)]

    def decode(self, ids: Iterable[int], *, keep_pieces: bool = False) -> str:
        """The text of ids, without special ones; with `keep_pieces` the subwords separated by spaces."""
        subwords = [self.subwords[number] for number in ids if number not in self.special_ids]
        return " ".join(subwords) if keep_pieces else self.splitter.join(subwords)

    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:
        """Spans in `text` of ids, None for special ones. Returns None if the text does not begin with `ids`."""
        subwords = self.splitter.split(text)
        spans: list[tuple[int, int] | None] = []
        position = 0
        for number in ids:
            if position < len(subwords) and self._id(subwords[position].text) == number:
                spans.append((subwords[position].start, subwords[position].end))
                position += 1
            elif number in self.special_ids:
                spans.append(None)
            else:
                return None
        return spans

    def id_of(self, subword: str) -> int | None:
        """The id of a subword. Returns None if it is not listed."""
        return self._ids.get(subword)

    def plain_ids(self) -> list[int]:
        """Ids of text, without the unknown one."""
        return [n for n in range(len(self.subwords)) if n not in self.special_ids and n != self.unknown]

    def _id(self, subword: str) -> int:
        number = self._ids.get(subword, self.unknown)
        if number is None:
            raise DataError(f"the vocabulary has no subword {subword!r} and no id for unknown subwords")
        return number

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {subword: number for number, subword in reversed(list(enumerate(self.subwords)))}
