"""The share of pieces that a vocabulary does not have: counted for every format and side, warned of above 2 %."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headscope.config import Companions
from headscope.config.commands import TranslateOptions
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import UnknownSubwords, count_unknown
from headscope.data.offsets import subword_spans, text_of, visible
from headscope.data.vocabulary import Splitter
from headscope.data.word_alignment import has_other_spaces, words_of, words_of_subwords
from headscope.description.tokens import TokenReader
from headscope.errors import DataError
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import is_empty
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from tests.makers.decoders import byte_level, decoder
from tests.makers.wrappers import hugging_face
from tests.oracles import checkpoints, fairseq, story
from tests.oracles.story import HP, write

TEXT = ["a b unseen c", "c c d", "unseen", "e unseen unseen b"]  # 4 of 12 pieces
OTHER = ["a b c", "d e", "unseen", "b"]  # 1 of 7


def corpus(source: list[str], target: list[str] | None = None) -> Corpus:
    return open_corpus(source, target=target)


def test_both_sides_are_counted_without_special_pieces() -> None:
    counts = count_unknown(checkpoints.small(), corpus(TEXT, OTHER), limit=50, sentences=99)
    assert counts.to_json() == {
        "source": {"pieces": 12, "unknown": 4, "share": 0.333333},
        "target": {"pieces": 7, "unknown": 1, "share": 0.142857},
    }
    short = count_unknown(checkpoints.small(), corpus(TEXT, OTHER), limit=3, sentences=2)  # two pieces and the end
    assert short.to_json()["source"] == {"pieces": 4, "unknown": 0, "share": 0.0}


@pytest.mark.parametrize("kind", ["bert", "bart", "gpt2"])
def test_hugging_face_tokenizers_are_counted(kind: str) -> None:
    checkpoint = checkpoints.huggingface(kind)
    text, sides = ["ah ŵŵ bi", "aj ŵŵ", "bl"], ("source", "target") if kind == "bart" else ("source",)
    counts = count_unknown(checkpoint, corpus(text, text if kind == "bart" else None), limit=50, sentences=99)
    assert {side: (count["pieces"], count["unknown"]) for side, count in counts.to_json().items()} == dict.fromkeys(
        sides, (6, 2)
    )
    assert "language, script and case" in counts.remarks(checkpoint)[1]


def load(folder: Path, kind: str) -> Checkpoint:
    if kind == "fairseq":
        options = fairseq.BASE
        path = fairseq.write(folder / "c.pt", options, fairseq.state(options))
        fairseq.dictionaries(folder)
        return open_checkpoint(str(path), device="cpu", companions=Companions(dicts=folder))
    if kind == "native":
        NATIVE.save(checkpoints.small(), folder / "native")
        return open_checkpoint(str(folder / "native"), device="cpu")
    hp = HP | {"rescale_emb": True}
    return open_checkpoint(str(write(folder / "story", hp, story.make(hp, (7, 11), 13, seed=3))), device="cpu")


@pytest.mark.parametrize(
    ("kind", "line", "cause"),
    [
        ("fairseq", "a@@ c", "already split into subwords: give --bpe CODES,"),
        ("native", "a c", "already split into subwords: split it with the model's codes,"),
        ("story", "src3 src4", "already split into subwords: give --bpe CODES,"),
    ],
)
def test_every_format_counts_and_names_the_likely_cause(tmp_path: Path, kind: str, line: str, cause: str) -> None:
    model = load(tmp_path, kind)
    counts = UnknownSubwords()
    counts.add("source", model.encode([line, f"ŵŵŵ {line}"], side="source", limit=50))
    assert counts.to_json() == {"source": {"pieces": 5, "unknown": 1, "share": 0.2}}
    assert counts.remarks(model)[0] == "unknown subwords: source 20.00% of 5"
    assert cause in counts.remarks(model)[1] and counts.remarks(model)[1].startswith("warning: 20.0% of the source's")
    assert len(counts.remarks(model)) == 2


# Pieces of tokenizers without offsets, searched in the text; `data/test_alignment.py` takes real tokenizers.


def fake_tokenizer(pieces: list[str], *, unknown: str = "<unk>") -> tuple[SimpleNamespace, list[int]]:
    """A tokenizer without offsets that has just these pieces."""
    names = [unknown, "</s>", *dict.fromkeys(p for p in pieces if p not in (unknown, "</s>"))]
    ids: dict[str, Any] = {"unk_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "all_special_ids": [0, 1]}
    tokenizer = SimpleNamespace(is_fast=False, **ids, convert_ids_to_tokens=lambda ids: [names[n] for n in ids])
    return tokenizer, [names.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
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
def test_pieces_searched(text: str, pieces: list[str], expected: list[str]) -> None:
    tokenizer, ids = fake_tokenizer([*pieces, "</s>"])
    spans = subword_spans(tokenizer, text, ids)
    assert spans is not None and spans[-1] is None
    assert [span and text[slice(*span)] for span in spans[:-1]] == expected


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
    tokenizer, ids = fake_tokenizer(pieces)
    assert subword_spans(tokenizer, text, ids) is None


# White space and characters without width: which lines are empty, and where aligners and BPE split words.


SPACES = ["\u00a0", "\u202f", "\u3000", "\u2009", "\x0b", "\x85", "\u2028"]
ZERO_WIDTH = ["\u200b", "\ufeff", "\u2060", "\u00ad", "\u200d", "\u034f", "\ufe0f", "\u3164", "\x07"]


def fast_align(line: str) -> list[str]:
    """`Dict::ConvertWhitespaceDelimitedLine` of fast_align, byte by byte."""
    words, word = list[bytes](), b""
    for byte in line.encode():
        if byte in b" \t":
            words, word = words + [word] * bool(word), b""
        else:
            word += bytes([byte])
    return [part.decode() for part in words + [word] * bool(word)]


@pytest.mark.parametrize("space", [*SPACES, *ZERO_WIDTH, " ", "\t", "  \t"])
def test_words_of_aligners_are_those_of_fast_align(space: str) -> None:
    line = f" ab{space}cd e{space} f"
    assert words_of(line) == fast_align(line)
    assert has_other_spaces(line) is (space in SPACES)
    spans = [(n, n + 1) for n, letter in enumerate(line) if letter in "abcdef"]
    indices, _ = words_of_subwords([line], [spans])
    assert indices.tolist() == [n for n, word in enumerate(words_of(line)) for letter in word if letter in "abcdef"]


def fairseq_pieces(line: str) -> list[str]:
    """subword-nmt without merges (`segment`: strip, split at U+0020), then `tokenize_line` of fairseq."""
    words = [word for word in line.strip("\r\n ").split(" ") if word]
    segments = [
        " ".join(f"{letter}@@" if n < len(word) - 1 else letter for n, letter in enumerate(word)) for word in words
    ]
    return " ".join(segments).split()


@pytest.mark.parametrize("space", [*SPACES, "\t", "  ", "\u200b"])
def test_bpe_splits_as_subword_nmt_and_then_fairseq(space: str) -> None:
    line = f" ab{space}c {space} d{space}"
    pieces = Splitter("bpe", codes=b"#version: 0.2\nq q\n").split(line)
    assert [piece.text for piece in pieces] == fairseq_pieces(line)
    for piece in pieces:
        assert line[piece.start : piece.end] == piece.text.removesuffix("@@")


@pytest.mark.parametrize("line", ["", " ", *SPACES, *ZERO_WIDTH, " \u200b\u00a0\ufeff"])
def test_lines_that_show_nothing_are_empty_everywhere(tmp_path: Path, line: str) -> None:
    assert is_empty(line) and not is_empty(f"{line}a") and not is_empty("\u0301a")
    (tmp_path / "text").write_text(f"a b\n{line}\n", encoding="utf-8", newline="")
    if "\n" not in line:
        with pytest.raises(DataError, match=r"text:2: the line is empty"):
            open_corpus(tmp_path / "text")
    with pytest.raises(DataError, match="sentence 2 of the list: the line is empty"):
        open_corpus(["a b", line])
    checkpoint = checkpoints.small()
    (first,), (nothing,), (last,) = translate_lines(
        checkpoint, ["a b", line, "c"], options=TranslateOptions(max_length=9), tokens=50
    )
    assert nothing.text == "" and first.text and last.text


# Tokens as people read them: one way for all tokenizers.


def test_a_byte_level_model_has_its_text_back() -> None:
    tokenizer = byte_level()
    checkpoint = hugging_face(decoder("llama"), tokenizer)
    reader = TokenReader.of(checkpoint, "source")
    for text in ("A man in a hat,\n and more\tof it", " 'tis so"):
        tokens = reader.display(tokenizer(text)["input_ids"])
        assert tokens[0] == "<s>" and "".join(tokens[1:]) == visible(text)


def test_a_byte_level_token_stands_for_its_text() -> None:
    """In the byte alphabet, ó and в contain a digit, and a dash contains letters."""
    texts = [text_of(token, "Ġ") for token in ("ĠciÃ³n", "Ð²", "ĠâĢĶ", "Ġ", "Ċ", "猫")]
    assert texts == ["ción", "в", "—", "", "\n", "猫"]
    assert [text_of(token, "▁") for token in ("▁ab", "▁", "▁▁", "<0x41>", "Ã³")] == ["ab", "", " ", "A", "Ã³"]
    assert [text_of(token, "##") for token in ("##ly", "Ã³")] == ["ly", "Ã³"]
    partial = [text_of("<0xE2>", "▁"), text_of("<0xB3>", "▁"), text_of("³", "Ġ"), text_of("Ð", "Ġ")]
    assert partial[1] == partial[2] and len({*partial}) == 3  # the same byte
    assert all(letter.isalpha() and not letter.isdigit() and not letter.isupper() for letter in partial)
