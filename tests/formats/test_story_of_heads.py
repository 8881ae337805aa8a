"""Checkpoints of story-of-heads: what the original gives, other sizes, gates, hostile and broken files, saving."""

import io
import json
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from headscope.analyses.gates import gate_numbers
from headscope.config import Companions
from headscope.config.option import take_config
from headscope.data.corpus import open_corpus
from headscope.errors import CheckpointError, DataError, HeadscopeError, OutputError
from headscope.formats.base import open_checkpoint
from headscope.formats.native import NATIVE
from headscope.formats.story_of_heads.format import STORY, StoryCheckpoint
from headscope.heads import Site
from headscope.model.mixing.base import HardConcrete
from headscope.model.taps import capture
from tests.makers.shared import SHIPPED_FOLDER, Call
from tests.makers.studies import study_of
from tests.oracles import story
from tests.oracles.capturing import weights_of
from tests.oracles.story import BASE_HP, HP, write

SITES = {Site.ENCODER_SELF: "enc_self", Site.DECODER_SELF: "dec_self", Site.CROSS: "dec_enc"}
SOURCE, TARGET = [5, 3, 4, 1], [4, 6, 3, 2, 1]


def load(path: Path, **companions: Path) -> StoryCheckpoint:
    checkpoint = open_checkpoint(str(path), device="cpu", companions=take_config(Companions, companions))
    assert isinstance(checkpoint, StoryCheckpoint)
    return checkpoint


def logits(checkpoint: StoryCheckpoint, source: list[int] = SOURCE, target: list[int] = TARGET) -> np.ndarray:
    with torch.no_grad():
        values: np.ndarray = checkpoint.model(torch.tensor([source]), torch.tensor([[0, *target[:-1]]]))[0].numpy()
    return values


# What the original program computed


def test_the_original_gives_the_same_logits_and_weights(oracles: Path) -> None:
    folder = oracles / "story-of-heads"
    checkpoint = load(folder / "model.npz")
    reference, texts = np.load(folder / "forward.npz"), json.loads((folder / "sentences.json").read_text())["sentences"]
    for number, text in enumerate(texts):
        key = f"s{number:02}"
        source = checkpoint.encode([text["src"]], side="source", limit=99)[0].ids
        target = checkpoint.encode([text["dst"]], side="target", limit=99)[0].ids
        assert source == text["src_ids"] == reference[f"{key}/inp"].tolist()
        assert target == [0, *text["dst_ids"][:-1]]
        with capture(checkpoint.model) as attention, torch.no_grad():
            actual = checkpoint.model(torch.tensor([source]), torch.tensor([target]))[0]
        np.testing.assert_allclose(actual, reference[f"{key}/logits"], atol=1e-5)
        assert actual.argmax(dim=-1).tolist() == text["top1_ids"]
        for site, name in SITES.items():
            for layer, weights in enumerate(weights_of(attention, site)):
                np.testing.assert_allclose(weights[0], reference[f"{key}/attn_{name}"][layer], atol=1e-5)


def test_backtick_pieces_and_translation(shared: Path) -> None:
    folder = shared / "oracles" / "story-of-heads"
    model = load(folder / "model.npz", bpe=folder / "bpe.en")
    split = json.loads((folder / "sentences.json").read_text())["sentences"][0]
    encoding = model.encode([split["src"].replace(" `", "")], side="source", limit=99)[0]
    assert encoding.ids == split["src_ids"]
    best = model.translate([split["src"]])[0][0]
    assert model.target is not None and model.target.decode(best.ids) == "zwei mädchen gehen die straße entlang ."


def test_gates_are_those_of_the_original() -> None:
    reference = np.load(SHIPPED_FOLDER / "story-of-heads" / "gates.npz")
    gates = HardConcrete(heads=35, d_value=1, d_model=35)
    with torch.no_grad():
        gates.log_a.copy_(torch.from_numpy(reference["log_a"].reshape(-1)))
    numbers = gate_numbers(gates.gates(), gates.log_a)
    np.testing.assert_allclose(numbers["gate"], reference["t033/eval_gate"].reshape(-1), atol=1e-6)
    p_open = reference["t033/closed_p_nonzero"].reshape(-1)
    np.testing.assert_allclose(numbers["gate_open"].clamp(1e-6, 1 - 1e-6), p_open, atol=1e-6)
    np.testing.assert_allclose(numbers["gate_one"], reference["t033/closed_p_one"].reshape(-1), atol=1e-6)


@pytest.mark.slow
def test_saved_as_it_was(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared / "oracles" / "story-of-heads"
    STORY.save(load(folder / "model.npz"), tmp_path / "saved")
    before, after = np.load(folder / "model.npz"), np.load(tmp_path / "saved" / "model.npz")
    assert set(before.files) == set(after.files)
    for name in before.files:
        assert before[name].dtype == after[name].dtype and np.array_equal(before[name], after[name])
    assert json.loads((tmp_path / "saved" / "hp.json").read_text()) == json.loads((folder / "hp.json").read_text())
    with pytest.raises(OutputError, match="saved"):
        STORY.save(load(folder / "model.npz"), tmp_path / "saved")
    for name in ("lib", "lib.task", "lib.task.seq2seq", "lib.task.seq2seq.voc"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    voc = type("Voc", (), {"__setstate__": lambda self, state: setattr(self, "state", state)})
    sys.modules["lib.task.seq2seq.voc"].Voc = voc  # type: ignore[attr-defined]
    theirs, ours = (pickle.loads((path / "src.voc").read_bytes()).state for path in (folder, tmp_path / "saved"))
    assert theirs == ours


# Other models


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"res_steps": "ldan", "normalize_out": False, "rescale_emb": True},
        {"num_layers_enc": 1, "num_layers_dec": 3, "inp_emb_bias": True, "loss_bias": True},
        {"key_size": 6, "value_size": 14, "num_heads": 2},
        {"multihead_attn_format": "v2", "dwwt": True},
        {"share_emb": True},
        {"share_emb": True, "dwwt": True, "hid_size": 15, "num_heads": 5},
        {"concrete_heads": ["enc-self", "dec-enc"], "num_heads": 5},
    ],
    ids=lambda more: "+".join(more) or "plain",
)
def test_other_models(tmp_path: Path, more: dict[str, Any]) -> None:
    """Against the formulas in float64, with all hyper-parameters and with those that arrays do not imply."""
    hp = HP | more
    words = (7, 11)
    arrays = story.make(hp, words, 13, seed=3)
    path = write(tmp_path, hp, arrays, words)
    expected = story.logits(arrays, hp, SOURCE, TARGET)
    checkpoint = load(path)
    np.testing.assert_allclose(logits(checkpoint), expected, atol=2e-5)
    settings = {key: value for key, value in hp.items() if key in ("res_steps", "num_heads", "rescale_emb", "key_size")}
    (tmp_path / "hp.json").write_text(json.dumps(settings))
    np.testing.assert_array_equal(logits(load(path)), logits(checkpoint))
    STORY.save(checkpoint, tmp_path / "saved")
    copy = np.load(tmp_path / "saved" / "model.npz")
    assert {name: copy[name].tobytes() for name in copy.files} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    NATIVE.save(checkpoint, tmp_path / "native")
    native = open_checkpoint(str(tmp_path / "native"), device="cpu")
    assert torch.equal(native.model(torch.tensor([SOURCE]), torch.tensor([TARGET])), checkpoint.model(
        torch.tensor([SOURCE]), torch.tensor([TARGET])))  # fmt: skip


def test_gates_are_measured_and_folded(tmp_path: Path) -> None:
    hp = HP | {"concrete_heads": ["enc-self"], "num_heads": 5}
    arrays = story.make(hp, (7, 11), 13, seed=4)
    arrays["mod/enc_attn-1/gate/log_a:0"][0, :2, 0, 0] = -3, 3
    model = load(write(tmp_path / "gated", hp, arrays))
    corpus = open_corpus(["src3 src4"], target=["dst3"])
    study = study_of(model, corpus, "gates")
    rows = study.heads[(study.heads.site == "encoder-self") & (study.heads.layer == 1)]
    log_a = arrays["mod/enc_attn-1/gate/log_a:0"].reshape(-1)
    assert rows["gate_log_a"].to_numpy() == pytest.approx(log_a)
    assert rows["gate"].to_numpy()[:2].tolist() == [0, 1]
    assert study.heads[study.heads.site == "cross"]["gate"].isna().all()
    gate = np.clip(1.2 / (1 + np.exp(-log_a)) - 0.1, 0, 1).astype(np.float32)
    merged = dict(arrays)
    merged["mod/enc_attn-1/out_conv/W:0"] = arrays["mod/enc_attn-1/out_conv/W:0"] * gate.repeat(2)[:, None]
    merged["mod/enc_attn-1/gate/log_a:0"] = np.full((1, 5, 1, 1), 9, np.float32)
    np.testing.assert_allclose(logits(load(write(tmp_path / "folded", hp, merged))), logits(model), atol=1e-5)
    del merged["mod/enc_attn-0/gate/log_a:0"], merged["mod/enc_attn-1/gate/log_a:0"]
    with pytest.raises(CheckpointError, match="mod/enc_attn-0/gate/log_a:0"):
        load(write(tmp_path / "folded", hp, merged))


def test_arrays_that_nothing_reads(tmp_path: Path) -> None:
    """State of the optimizer is ignored; a weight that the model does not read is refused."""
    arrays, scalar = story.make(HP, (7, 11), 13, seed=4), np.ones((), np.float32)
    expected = story.logits(arrays, HP, SOURCE, TARGET)
    state = {f"adam/{name[:-2]}/{slot}:0": array for name, array in arrays.items() for slot in ("Adam", "Adam_1")}
    counters = ("global_step", "batch_no", "learning_rate_multiplier", "adam/beta1_power", "adam/beta2_power")
    checkpoint = load(write(tmp_path, HP, arrays | state | {f"{name}:0": scalar for name in counters}))
    np.testing.assert_allclose(logits(checkpoint), expected, atol=2e-5)
    for name in ("mod/left_over:0", "left_over", "mod/enc_attn-2/out_conv/W/Adam:0", "mod/emb_inp/mat/other:0"):
        with pytest.raises(CheckpointError, match=f"{name}"):
            load(write(tmp_path, HP, arrays | {name: scalar}))


def test_heads_that_are_not_alive(tmp_path: Path) -> None:
    hp = HP | {"num_heads": 5, "alive_heads": {"dec-enc": [[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]}}
    arrays = story.make(hp, (7, 11), 13, seed=5)
    checkpoint = load(write(tmp_path, hp, arrays))
    gates = [np.where(mask, 9, -9).astype(np.float32) for mask in hp["alive_heads"]["dec-enc"]]
    as_gates = arrays | {f"mod/dec_enc_attn-{i}/gate/log_a:0": gate for i, gate in enumerate(gates)}
    np.testing.assert_allclose(logits(checkpoint), story.logits(as_gates, hp, SOURCE, TARGET), atol=2e-5)
    hp["alive_heads"]["dec-enc"].pop()
    with pytest.raises(CheckpointError, match=r"alive_heads.*dec-enc.*2"):
        load(write(tmp_path, hp, arrays))


# What is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hp", "message"),
    [
        ({"num_heads": 2, "rescale_emb": True}, "res_steps.*say 'nlda'.*'ldan'"),
        ({"res_steps": "lda", "num_heads": 2, "rescale_emb": True}, "res_steps.*'lda'.*'nlda'"),
        ({"res_steps": "nlda", "num_heads": 2}, "rescale_emb"),
        ({"res_steps": "nlda", "num_heads": 2, "rescale_emb": None}, "rescale_emb"),
        (BASE_HP | {"num_heads": 2, "num_layers": 1}, "mod/dec_attn-1/layer_norm/bias:0"),
        (BASE_HP | {"num_heads": 2, "num_layers_enc": 1}, "mod/enc_attn-1/layer_norm/bias:0.*num_layers"),
        (BASE_HP | {"num_heads": 2, "normalize_out": False}, "mod/dec_out_norm/bias:0"),
        (BASE_HP | {"num_heads": 2, "share_emb": True}, "mod/emb_out/mat:0"),
        (BASE_HP | {"num_heads": 2, "dwwt": True}, "loss_xent_lm/logits/W:0"),
        (BASE_HP | {"num_heads": 2, "loss_name": "mine"}, "loss_xent_lm/logits/W:0"),
        (BASE_HP, "num_heads"),
        (BASE_HP | {"num_heads": 3}, "num_heads 3.*key_size 10"),
        (BASE_HP | {"num_heads": "two"}, "num_heads is 'two'"),
        (BASE_HP | {"num_heads": 2, "beam_size": 10**6}, "beam_size is 1000000"),
        (BASE_HP | {"num_heads": 2, "num_layers": 9**9}, r"'mod/enc_attn-2/mem_conv/W:0'.* say \d+ layers"),
        (BASE_HP | {"num_heads": 2, "hid_size": 8}, r"\[7, 10\].*\[7, 8\]"),
        (BASE_HP | {"num_heads": 2, "emb_size": 5}, "emb_size 5.*hid_size"),
        (BASE_HP | {"num_heads": 2, "loss_bias": True}, "loss_xent_lm/logits/b:0"),
        (BASE_HP | {"num_heads": 2, "dst_reverse": True}, "dst_reverse.*True"),
        (BASE_HP | {"num_heads": 2, "concrete_heads": ["enc"]}, "'enc'"),
        (BASE_HP | {"num_heads": 2, "alive_heads": {"enc-self": 3}}, "alive_heads"),
    ],
)
def test_hyper_parameters_that_do_not_fit(tmp_path: Path, hp: dict[str, Any], message: str) -> None:
    path = write(tmp_path, hp, story.make(HP, (7, 11), 13, seed=3))
    with pytest.raises(HeadscopeError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


def _hashes(depth: int) -> bytes:
    """A dictionary whose key is a tuple of tuples, each held twice: its hash takes 2^depth steps."""
    return b"\x80\x02}" + b")q\x00" + b"h\x00\x86q\x00".replace(b"h\x00", b"h\x00h\x00", 1) * depth + b"K\x01s."


@pytest.mark.parametrize(
    "content",
    [
        lambda mark: pickle.dumps(Call(Path.touch, mark)),
        lambda mark: pickle.dumps(({"_BOS_": 0, "a": Call(Path.touch, mark)},)),
        lambda mark: b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        lambda mark: b"\x80\x02clib.task.seq2seq.voc\nVoc\n)\x81cbuiltins\nexec\nb.",
        lambda mark: _hashes(60),
        lambda mark: b"\x80\x02]r\xff\xff\xff\x7f.",
        lambda mark: b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
        lambda mark: b"\x80\x02clib.task.seq2seq.voc\nVoc\n)\x81}(X\x01\x00\x00\x00aJ\xff\xff\xff\x7fu\x85b.",
        lambda mark: b"",
        lambda mark: b"\x80\x02(((((((.",
        lambda mark: pickle.dumps({"a": 2**70}),
    ],
)
def test_hostile_vocabularies(tmp_path: Path, content: Any) -> None:
    path = write(tmp_path, HP, story.make(HP, (7, 11), 13, seed=3))
    mark = tmp_path / "executed"
    (tmp_path / "src.voc").write_bytes(content(mark))
    with pytest.raises((DataError, CheckpointError)) as error:
        load(path)
    assert not mark.exists() and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (">f4", np.asfortranarray),
        (">f8", np.ascontiguousarray),
        ("f2", np.asfortranarray),
        (ml_dtypes.bfloat16, np.array),
    ],
)
def test_types_of_numbers(tmp_path: Path, dtype: Any, layout: Any) -> None:
    """Arrays of any float type, byte order and layout; rounded here where the type is narrower."""
    arrays = {name: array.astype(dtype) for name, array in story.make(HP, (7, 11), 13, seed=3).items()}
    expected = logits(load(write(tmp_path / "a", HP, {name: a.astype(np.float32) for name, a in arrays.items()})))
    path = write(tmp_path / "b", HP, {name: layout(array) for name, array in arrays.items()})
    np.testing.assert_array_equal(logits(load(path)), expected)


@pytest.mark.parametrize("dtype", [complex, "i8", np.longdouble, ml_dtypes.float8_e4m3fn, [("a", "f4")]])
def test_types_that_are_no_weights(tmp_path: Path, dtype: Any) -> None:
    arrays = story.make(HP, (7, 11), 13, seed=3) | {"mod/emb_inp/mat:0": np.ones((7, 10), dtype)}
    with pytest.raises(CheckpointError, match=r"array mod/emb_inp/mat:0 is of the type \S+; save it as float32"):
        load(write(tmp_path, HP, arrays))


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    arrays = story.make(HP, (7, 11), 13, seed=3) | {"mod/emb_inp/mat:0": np.ones((7, 10), object)}
    with pytest.raises(CheckpointError, match=r"broken: mod/emb_inp/mat:0 \(Object arrays cannot be loaded"):
        load(write(tmp_path, HP, arrays))


@pytest.mark.slow
def test_arrays_that_say_they_are_huge(tmp_path: Path) -> None:
    arrays = story.make(HP, (7, 11), 13, seed=3)
    path = write(tmp_path, HP, arrays)
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (2**30, 10)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mod/emb_inp/mat:0.npy", content.getvalue() + bytes(4000))
    with pytest.raises(CheckpointError):
        load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array if name != "mod/emb_inp/mat:0" else np.zeros((2**21, 10), np.float32))
            archive.writestr(f"{name}.npy", data.getvalue())
    with pytest.raises(CheckpointError):
        load(path)
