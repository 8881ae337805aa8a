"""The native format: what is saved is what is loaded, byte for byte; what does not fit is named in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.formats.native import CONFIG, NATIVE, WEIGHTS
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.beams import SearchConfig
from tests.makers import wrappers
from tests.oracles import native

CODES = b"#version: 0.2\na b\nab c</w>\nd e\nde f\n"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SOURCE = (*SPECIAL, "abc", "a@@", "b@@", "ab@@", "c", "de@@", "f", "def@@", "g", *map(str, range(10)))
TARGET = (*SPECIAL, "x", "`y", "z", *"klmnopqrstuv")


def checkpoint(**options: Any) -> TransformerCheckpoint:
    """A small checkpoint with a vocabulary on each side, never written."""
    return wrappers.native(
        native.model(**options).float(),
        Vocabulary(SOURCE, Splitter("bpe", CODES), start=2, end=2, unknown=3, pad=1, special=frozenset({0})),
        Vocabulary(TARGET, Splitter("backtick"), start=0, end=2, unknown=3, pad=1, prefix=(0,)),
        format="test",
        search=SearchConfig(beam=3, max_extra=5),
    )


def save_model(folder: Path, **options: Any) -> Path:
    NATIVE.save(checkpoint(**options), folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "pre", "final_norm": True, "embedding_bias": True, "model": {"start": "zero"}},
        {"model": {"tie_output": True, "output_bias": True}, "positions": "learned", "max_positions": 9},
        {"vocabulary": 19, "model": {"share_embeddings": True, "tie_output": True}},
        {"self_mixing": "alpha.v1", "head_input": "slice", "d_model": 15},
        {"d_embedding": 3, "embedding_norm": True, "model": {"d_output": 2}},
    ],
)
def test_save_and_load_is_the_identity(tmp_path: Path, options: dict[str, Any]) -> None:
    model = checkpoint(**options) if "vocabulary" not in options else wrappers.native(native.model(**options).float())
    NATIVE.save(model, tmp_path / "one")
    copy = open_checkpoint(str(tmp_path / "one"), device="cpu")
    assert isinstance(copy, TransformerCheckpoint)
    assert copy.format == "native"
    assert copy.model.config == model.model.config
    assert (copy.source, copy.target, copy.search) == (model.source, model.target, model.search)
    before, after = model.model.state_dict(), copy.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    NATIVE.save(copy, tmp_path / "two")
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_loaded_checkpoint_reads_writes_and_translates(tmp_path: Path) -> None:
    model = open_checkpoint(str(save_model(tmp_path / "c")), device="cpu")
    assert isinstance(model, TransformerCheckpoint)
    texts = ["abc  defg ü 7", "f"]
    sources = model.encode(texts, side="source", limit=20)
    assert model.subwords(sources[0].ids, side="source") == ["abc", "def@@", "g", "<unk>", "7", "</s>"]
    assert sources[0].special == [False] * 5 + [True]
    assert model.spans(texts[0], sources[0].ids, side="source") == [(0, 3), (5, 8), (8, 9), (10, 11), (12, 13), None]
    assert model.encode(texts[:1], side="source", limit=4)[0].cut == 2
    target = model.encode(["x `y x"], side="target", limit=20)[0]
    assert (target.ids, target.special) == ([0, 4, 5, 4], [True, False, False, False])
    assert model.labels(["x `y x"], limit=20) == [[4, 5, 4, 2]]
    assert model.target is not None and model.target.decode([4, 5, 4, 2]) == "xy x"
    batch = model.translate(texts)
    singles = [model.translate([text])[0] for text in texts]
    assert [h.ids for beam in batch for h in beam] == [h.ids for beam in singles for h in beam]
    special = ["</s>", "<pad>", "<s>"]
    assert model.facts()["tokenizer"] == {"class": "bpe + backtick", "vocabulary": 23, "special": special}
    assert (model.two_sided, model.vocabulary, model.limit, model.start_ids()) == (True, 23, None, [])


# What is refused.


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version = 2", "version 2 .*version 1 is read"),
        ("d_ffn = 17", "d_fn = 17", "'d_fn'.*'d_ffn'"),
        ("d_ffn = 17", "d_ffn = 'wide'", "d_ffn is 'wide'"),
        ("d_ffn = 17", "d_ffn = 18", "ffn.inner.weight.*17×13.*18×13"),
        ("d_ffn = 17", "d_ffn = 1000000000000", "d_ffn is 1000000000000"),
        ("cross_heads = [3, 2, 1]", "cross_heads = [3, 2, 2]", r"cross_attention.*\(7?5?×?13 "),
        ("self_heads = [2, 0, 3]", "self_heads = [2, 0]", "cross_heads.*3.*self_heads.*2"),
        ('kind = "bpe"', 'kind = "magic"', "'magic'"),
        ("end = 2", "end = 99", "99.*23"),
        ("beam = 3", "beam = 0", "beam.*0"),
        ("[model]", "[model", "TOML"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = save_model(tmp_path / "c")
    text = (folder / CONFIG).read_text(encoding="utf-8")
    assert old in text
    (folder / CONFIG).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(str(folder), format="native", device="cpu")
    assert "\n" not in str(error.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "decoder.layers.0.ffn.inner.weight"
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        f"missing: {name}": lambda state: state.pop(name),
        "left over: extra.weight": lambda state: state.update({"extra.weight": torch.zeros(1)}),
        rf"{name} \(2 instead of 17×13\)": lambda state: state.update({name: torch.zeros(2)}),
        f"of another type: {name}": lambda state: state.update({name: torch.zeros(17, 13, dtype=torch.int64)}),
    }
    for number, (message, change) in enumerate(changes.items()):
        folder = save_model(tmp_path / str(number))
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(folder), device="cpu")


# Vocabularies and plain values.


def test_bpe_splits_as_subword_nmt_does() -> None:
    splitter = Splitter("bpe", CODES)
    assert [p.text for p in splitter.split("abc abcd defc")] == ["abc", "ab@@", "c@@", "d", "def@@", "c"]
    assert splitter.join(["ab@@", "c", "d@@", "e"]) == "abc de"


def test_ranked_rules_of_story_of_heads() -> None:
    splitter = Splitter("backtick", b"a\tb\t0\nab\tc\t1\n^\tabc\t2\n")
    assert [p.text for p in splitter.split("abcd ^a")] == ["abc", "`d", "^", "`a"]
    assert splitter.join(["abc", "`d", "x"]) == "abcd x"


def test_text_that_is_already_split() -> None:
    vocabulary = Vocabulary(TARGET, Splitter("backtick"), start=0, end=2, unknown=3)
    assert vocabulary.encode("x `y q?") == [4, 5, 3]
    assert vocabulary.spans("x `y q?", [4, 5, 3, 2]) == [(0, 1), (3, 4), (5, 7), None]
    assert vocabulary.spans("x `y", [5]) is None
    assert vocabulary.decode([4, 5, 2], keep_pieces=True) == "x `y"
    assert vocabulary.plain_ids() == [1, *range(4, 19)]


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "c")
    (folder / "source.codes").unlink()
    with pytest.raises(CheckpointError, match=r"source\.codes"):
        open_checkpoint(str(folder), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_survive_and_half_is_widened_on_a_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    original = checkpoint()
    original.model.to(dtype)
    NATIVE.save(original, tmp_path / "one")
    assert {tensor.dtype for tensor in load_file(tmp_path / "one" / WEIGHTS).values()} == {dtype}
    copy = open_checkpoint(str(tmp_path / "one"), device="cpu")
    assert copy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert isinstance(copy, TransformerCheckpoint)
    NATIVE.save(copy, tmp_path / "two")
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert open_checkpoint(str(tmp_path / "one"), device="cpu", dtype="float64").dtype == torch.float64
