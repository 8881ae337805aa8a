"""The tokens of one side of a sentence, with the properties that descriptions and pair functions compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.data.encoded import Side, SideName, side_names
from headscope.data.offsets import BEFORE, Marks, bare, display_subword, marks_of, text_of
from headscope.data.parses import Aligned
from headscope.formats.base import Checkpoint
from headscope.heads import Site

Strings = npt.NDArray[np.object_]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]

SPECIAL, PIECE = "special", "piece"


@dataclass(frozen=True)
class Tokens:
    """Real tokens [n] of one side of a sentence.

    `text` is without the tokenizer's marks (`text_of`). `word` is the number of the word, −1 for special tokens, and
    with a parse for blanks; `starts` marks the first token of a word. `tag` is the universal tag of a parse, else a
    class by form (`shape`); `lemma` the lemma of a parse, else the word in lower case. `parent` is the number of the
    word's head (−1: none), `relation` the name of the relation. `segment` numbers the texts of a pair. `has_parse` and
    `has_tags`: there is a parse, and it has tags.
    """

    ids: Numbers
    special: Flags
    text: Strings
    starts: Flags
    word: Numbers
    tag: Strings
    lemma: Strings
    parent: Numbers
    relation: Strings
    segment: Numbers
    has_parse: bool
    has_tags: bool = True

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Pairs:
    """Queries at positions `at` [n] of one side, and all keys [s] of a side (the same one in self attention)."""

    query: Tokens
    key: Tokens
    at: Numbers

    @property
    def same_side(self) -> bool:
        """Whether this is self attention."""
        return self.query is self.key

    def q(self, name: str) -> Values:
        """A property of queries [n 1], by its name in `Tokens`."""
        return getattr(self.query, name)[self.at][:, None]

    def k(self, name: str) -> Values:
        """A property of keys [1 s]."""
        return getattr(self.key, name)[None]

    def equal(self, of_query: str, of_key: str = "") -> Flags:
        """Whether a property of each query equals that of each key, or another property of the key [n s]."""
        return self.q(of_query) == self.k(of_key or of_query)

    @property
    def position(self) -> Numbers:
        """Positions of queries [n 1]."""
        return self.at[:, None]

    @property
    def key_position(self) -> Numbers:
        """Positions of keys [1 s]."""
        return np.arange(len(self.key))[None]

    def keys_that(self, holds: Flags) -> Flags:
        """Flags of keys [s] broadcast to pairs [n s]."""
        return np.broadcast_to(holds, (len(self.at), len(self.key)))


@dataclass
class TokenReader:
    """Makes `Tokens` from the ids of a side, with the marks of words of the checkpoint's tokenizer."""

    checkpoint: Checkpoint
    side: SideName
    texts: dict[int, str]
    marks: Marks

    @classmethod
    def of(cls, checkpoint: Checkpoint, side: SideName) -> TokenReader:
        """The reader of a side, whose marks are those of most subwords in the vocabulary."""
        plain = checkpoint.plain_ids(side=side)
        texts = {n: text or "" for n, text in zip(plain, checkpoint.subwords(plain, side=side), strict=True)}
        return cls(checkpoint, side, texts, marks_of(list(texts.values())))

    def subword(self, number: int) -> str:
        """A subword as the tokenizer has it."""
        if number not in self.texts:
            self.texts[number] = self.checkpoint.subwords([number], side=self.side)[0] or ""
        return self.texts[number]

    def display(self, ids: Iterable[int]) -> list[str]:
        """Subwords as people read them."""
        return [display_subword(self.subword(number), self.marks) for number in ids]

    def label(self, number: int) -> str:
        """A subword without marks, as tables write it."""
        return bare(self.subword(number), self.marks) or self.subword(number)

    def tokens(self, side: Side, row: int) -> Tokens:
        """The real tokens of a row of a side that is on the CPU."""
        real, aligned = side.real[row], side.aligned[row] if side.aligned else None
        ids, special = side.ids[row][real].numpy(), side.special[row][real].numpy()
        segment = np.zeros(len(ids), dtype=np.int64) if side.segments is None else side.segments[row][real].numpy()
        subwords = [self.subword(number) for number in ids.tolist()]
        text = np.array([text_of(subword, self.marks) for subword in subwords], dtype=object)
        starts = word_starts(subwords, special, self.marks)
        word = np.where(special, -1, np.cumsum(starts) - 1)
        shapes = [shape(piece, bool(start)) for piece, start in zip(text, starts, strict=True)]
        tag = np.where(special, SPECIAL, np.array(shapes, dtype=object))
        parent, relation = np.full(len(ids), -1), np.full(len(ids), "", dtype=object)
        if aligned is not None:
            word = np.full(len(ids), -1)
            for unit, positions in enumerate(aligned.units):
                word[positions], starts[positions] = unit, [position == positions[0] for position in positions]
                if unit < len(aligned.tags) and aligned.tags[unit]:
                    tag[positions] = aligned.tags[unit]
            for name, head, dependent in reversed(aligned.relations):
                parent[word == dependent], relation[word == dependent] = head, name
        lemma = _lemmas(text, word, aligned)
        has_parse, has_tags = aligned is not None, aligned is not None and any(aligned.tags)
        return Tokens(ids, special, text, starts, word, tag, lemma, parent, relation, segment, has_parse, has_tags)


def _lemmas(text: Strings, word: Numbers, aligned: Aligned | None) -> Strings:
    lemma_of: dict[int, str] = {}
    for piece, number in zip(text, word.tolist(), strict=True):
        lemma_of[number] = lemma_of.get(number, "") + piece.lower()
    if aligned is not None:
        lemma_of |= {number: lemma.lower() for number, lemma in enumerate(aligned.lemmas) if lemma}
    lemma_of[-1] = ""
    return np.array([lemma_of[number] for number in word.tolist()], dtype=object)


def word_starts(subwords: Sequence[str], special: Flags, marks: Marks) -> Flags:
    """Whether each subword [n] begins a word; punctuation is a word of its own."""
    starts, open_word = np.zeros(len(subwords), dtype=bool), False
    for number, subword in enumerate(subwords):
        if special[number]:
            open_word = False
            continue
        is_text = any(map(str.isalnum, text_of(subword, marks)))
        begins = marks == "" or (marks in BEFORE and subword.startswith(marks) is (marks != "##"))
        starts[number] = begins or not (open_word and is_text)
        open_word = is_text
        if marks == "@@":
            open_word = subword.endswith("@@")
        if marks == "</w>":
            open_word = not subword.endswith("</w>")
    return starts


def shape(text: str, starts: bool) -> str:
    """The class of a token by its form, where there is no parse."""
    if not any(map(str.isalnum, text)):
        return "PUNCT"
    if any(map(str.isdigit, text)):
        return "NUM"
    if not starts:
        return PIECE
    return "Capital" if text[0].isupper() else "short" if len(text) <= 3 else "long"


WIDEST = 512  # dimensions to which wider embeddings are reduced
Embeddings = Callable[[Numbers], Tensor]
"""Ids [v] → static embeddings [v p] of unit length; p is 0 if the model has no readable table."""


def static_embeddings(checkpoint: Checkpoint, site: Site) -> tuple[Embeddings, Embeddings]:
    """Embeddings of the queries' side and of the keys' side of a site, of at most `WIDEST` dimensions."""
    query, key = (partial(_embed, _table(checkpoint, side)) for side in side_names(site))
    return query, key


def _embed(table: Tensor | None, ids: Numbers) -> Tensor:
    """Rows of a table for ids [v], scaled to unit length and reduced to at most `WIDEST` dimensions: [v p]."""
    if table is None:
        return torch.zeros(len(ids), 0)
    rows: Tensor = table[torch.from_numpy(ids).to(table.device)].float().cpu()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-6)
    if rows.shape[1] > WIDEST:
        rows = rows @ torch.linalg.svd(rows, full_matrices=False)[2][:WIDEST].T
    return rows


def _table(checkpoint: Checkpoint, side: SideName) -> Tensor | None:
    """The table of input embeddings [V d] of a side; None if the model has no readable one."""
    model: Any = checkpoint.model
    stack = "encoder" if side == "source" else "decoder"
    if checkpoint.is_native:
        part = getattr(model, stack, None)
        return None if part is None else part.embeddings.tokens.weight.detach()
    if checkpoint.two_sided:
        part = getattr(model, f"get_{stack}", lambda: None)()
        model = model if part is None else part
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    if weight.ndim != 2 or len(weight) < checkpoint.vocabularies[side == "target"] or not weight.is_floating_point():
        return None
    return weight.detach()
