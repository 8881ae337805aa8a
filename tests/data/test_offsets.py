"""Pieces of tokenizers without offsets, searched in the text; `data/test_alignment.py` takes real tokenizers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headscope.data.offsets import subword_spans


def scripted(pieces: list[str], *, unknown: str = "<unk>") -> tuple[SimpleNamespace, list[int]]:
    """A tokenizer without offsets that has just these pieces."""
    names = [unknown, "</s>", *dict.fromkeys(p for p in pieces if p not in (unknown, "</s>"))]
    found = SimpleNamespace(
        is_fast=False,
        unk_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        all_special_ids=[0, 1],
        convert_ids_to_tokens=lambda ids: [names[n] for n in ids],
    )
    return found, [names.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("text", "pieces", "covered"),
    [
        ("Hello world", ["hel@@", "lo", "world"], ["Hel", "lo", "world"]),
        ("Hello world", ["hel", "lo</w>", "world</w>"], ["Hel", "lo", "world"]),
        ("Hello world", ["hel", "##lo", "world"], ["Hel", "lo", "world"]),
        ("Café é", ["cafe</w>", "e</w>"], ["Café", "é"]),
        ("Cafe\u0301", ["▁Caf", "é"], ["Caf", "e\u0301"]),
        ("é", ["<0xC3>", "<0xA9>"], ["é", "é"]),
        ("xé", ["xÃ", "©"], ["xé", "é"]),
        ("a “b” c", ["▁a", "▁''", "b", "''", "▁c"], ["a", "“", "b", "”", "c"]),
        ("I saw 猫 there", ["▁I", "▁saw", "▁", "<unk>", "▁there"], ["I", "saw", "", "猫", "there"]),
        ("猫 犬", ["▁", "<unk>", "▁", "<unk>"], ["", "猫", "", "犬"]),
        ("猫犬 鳥", ["<unk>", "<unk>", "<unk>"], ["猫犬 鳥"] * 3),
        ("x猫y", ["▁x", "<unk>", "y"], ["x", "猫", "y"]),
    ],
)
def test_pieces_searched(text: str, pieces: list[str], covered: list[str]) -> None:
    tokenizer, ids = scripted([*pieces, "</s>"])
    spans = subword_spans(tokenizer, text, ids)
    assert spans is not None and spans[-1] is None
    assert [span and text[slice(*span)] for span in spans[:-1]] == covered


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("banana", ["<unk>", "a", "<unk>"]),  # which of the letters was known cannot be told
        ("Hello world", ["▁Hello", "▁word"]),
        ("Hello", ["▁Hello", "<unk>"]),  # nothing is left for the unknown piece
        ("Hello", ["▁Hello", "▁world"]),
        ("é", ["<0xC3>"]),
    ],
)
def test_pieces_that_cannot_be_located(text: str, pieces: list[str]) -> None:
    tokenizer, ids = scripted(pieces)
    assert subword_spans(tokenizer, text, ids) is None
