"""Models spread over devices and the disk, or stored in 4 and 8 bits: what is computed, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import nn

import headscope as hs
from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import open_checkpoint
from headscope.formats.native import NATIVE
from headscope.model.discovery import find_attention
from headscope.model.projections import projections
from headscope.model.stored_weights import matrix_of, quantised_by
from tests.oracles import checkpoints, tiny

pytest.importorskip("accelerate")
Ran = tuple[int, str, str]
WEIGHTS_ONLY = ("copying", "composition", "magnitude", "distinctness")
MEASURED = (*WEIGHTS_ONLY, "confidence", "contribution", "direct_logit", "ablation", "gradient")
TEXT = ["ah bi ck", "aj", "bl ci ak bh cj", "ah"]


def llama() -> Any:
    """Three layers with groups of two heads; sizes are multiples of 64, in which 4-bit weights are cut."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=97,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.START,
        eos_token_id=tiny.END,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in shards, its tokenizer, and a device map with layers on disk."""
    made = tmp_path_factory.mktemp("large") / "model"
    llama().save_pretrained(made, max_shard_size="100KB")
    tiny.tokenizer([tiny.START], []).save_pretrained(made)
    devices = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    devices |= dict.fromkeys(["model.layers.1", "model.layers.2", "model.norm", "lm_head"], "disk")
    (made.parent / "map.json").write_text(json.dumps(devices), encoding="utf-8")
    return made


def heads_of(model: hs.Model, names: tuple[str, ...] = MEASURED) -> pd.DataFrame:
    """The table of heads."""
    return model.analyze(TEXT, only=names, bootstrap=10, seed=1).heads


@pytest.fixture(scope="module")
def whole(folder: Path) -> pd.DataFrame:
    """What the analyses measure of the model as it is."""
    return heads_of(hs.load(folder, device="cpu"))


@pytest.mark.slow
def test_layers_on_disk_give_what_the_whole_model_gives(folder: Path, whole: pd.DataFrame) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    mapped = hs.load(folder, device_map=str(folder.parent / "map.json"))
    layer = mapped.checkpoint.model.get_submodule("model.layers.1.self_attn.o_proj")
    assert layer.get_parameter("weight").is_meta and mapped.checkpoint.device == torch.device("cpu")
    pd.testing.assert_frame_equal(heads_of(mapped), whole, rtol=1e-6, atol=1e-7)
    assert layer.get_parameter("weight").is_meta  # nothing stays in memory
    flags = {parameter.requires_grad for parameter in mapped.checkpoint.model.parameters()}
    assert flags == {True}
    with pytest.raises(ConfigError, match="offloaded"):
        mapped.remove(["decoder-self.0.0", "decoder-self.0.1"])


def test_automatic_placement_and_commands(
    folder: Path, tmp_path: Path, command: Callable[..., Ran], whole: pd.DataFrame
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{line}\n" for line in TEXT), encoding="utf-8")
    options = ["--source", text, "--device-map", folder.parent / "map.json"]
    status, out, err = command("evaluate", folder, *options, "--json")
    assert status == 0, err
    mapped = json.loads(out)["record"]
    _, out, _ = command("evaluate", folder, "--source", text, "--device", "cpu", "--json")
    assert mapped["nll"] == pytest.approx(json.loads(out)["record"]["nll"], rel=1e-6)
    learning = [
        "prune",
        "subset",
        folder,
        "--keep",
        "6",
        *options,
        "--updates",
        "2",
        "--json",
        "--out",
        tmp_path / "run",
    ]
    status, out, err = command(*learning, "--set", "freeze=model")
    assert status == 0 and len(json.loads(out)["record"]["removed"]) == 6, err
    status, _, err = command(*learning, "--force")
    assert status == 2 and "--freeze model" in err
    assert hs.load(folder, device_map="auto").checkpoint.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.json", "--device-map nowhere.json.*auto"),
        ("[1]", "devices"),
        ('{"model": "gpu"}', "devices"),
        ('{"model.layers.0": "cpu"}', "--device-map.*model.embed_tokens.weight"),
        ('{"": "cpu", "model.layer": "cpu"}', "--device-map.*'model.layer'.*'model.layers'"),
    ],
)
def test_device_maps_that_are_wrong(given: str, message: str, folder: Path, tmp_path: Path) -> None:
    file = given
    if not given.endswith(".json"):
        file = str(tmp_path / "map.json")
        Path(file).write_text(given, encoding="utf-8")
    with pytest.raises((ConfigError, CheckpointError), match=message) as raised:
        open_checkpoint(str(folder), device_map=file)
    assert "\n" not in str(raised.value)


def test_what_device_maps_need(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--device cpu.*--device-map"):
        open_checkpoint(str(folder), device="cpu", device_map="auto")
    NATIVE.save(checkpoints.small(), tmp_path / "native")
    with pytest.raises(ConfigError, match=r"--device-map.*native"):
        open_checkpoint(str(tmp_path / "native"), device_map="auto")
    monkeypatch.setattr("headscope.formats.huggingface.placement.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--device-map.*accelerate.*'headscope\[large\]'"):
        open_checkpoint(str(folder), device_map="auto")


# Quantised weights.


@pytest.fixture(scope="module", params=["nf4", "int8"])
def quantised(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Path]]:
    """The model in 4 or 8 bits of bitsandbytes, as `save_pretrained` writes it."""
    pytest.importorskip("bitsandbytes")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    config = transformers.BitsAndBytesConfig(**(four if request.param == "nf4" else {"load_in_8bit": True}))
    path = folder.parent / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map="cpu", dtype=torch.float32
        )
        loaded.save_pretrained(path)
    tiny.tokenizer([tiny.START], []).save_pretrained(path)
    yield request.param, path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantised_weights_are_read_as_they_are_used(quantised: tuple[str, Path]) -> None:
    """Against a plain model with the dequantised weights; 8-bit layers round activations too, when they run."""
    kind, path = quantised
    model = hs.load(path, device="cpu")
    assert {quantised_by(part) for part in model.checkpoint.model.modules()} == {None, "bitsandbytes"}
    plain = llama().eval()
    for name, part in plain.named_modules():
        if isinstance(part, nn.Linear):
            stored = model.checkpoint.model.get_submodule(name)
            part.weight = nn.Parameter(matrix_of(stored))
    names = MEASURED if kind == "nf4" else WEIGHTS_ONLY
    expected = heads_of(hs.load(plain, tokenizer=tiny.tokenizer([tiny.START], [])), names)
    pd.testing.assert_frame_equal(heads_of(model, names), expected, rtol=1e-4, atol=1e-5)
    assert find_attention(plain).layout == model.checkpoint.layout
    for place, parts in projections(plain).items():
        found = model.checkpoint.projections[place]
        for name in ("query", "key", "value", "output"):
            torch.testing.assert_close(getattr(found, name).matrices(), getattr(parts, name).matrices())
    with pytest.raises(ConfigError, match="bitsandbytes"):
        model.remove(["decoder-self.0.0", "decoder-self.0.1"])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gptq", "pip install (optimum|gptqmodel)"),
        ("awq", "pip install gptqmodel"),
        ("compressed-tensors", "compressed-tensors"),
        ("torchao", "torchao"),
        ("unheard-of", "unheard-of"),
    ],
)
def test_methods_whose_packages_are_missing(method: str, message: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(str(tmp_path), device="cpu")
    assert "\n" not in str(raised.value)


class Packed(nn.Linear):
    """A linear layer that keeps its matrix in a form of its own, as compressed-tensors and others do."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.register_buffer("weight_packed", plain.weight.detach().T.contiguous())
        del self.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = self.get_buffer("weight_packed")
        return input @ packed


def test_matrices_that_cannot_be_read_are_left_out_by_name() -> None:
    plain = llama().eval()
    expected = heads_of(hs.load(plain, tokenizer=tiny.tokenizer([tiny.START], [])), ("confidence", "ablation"))
    for layer in plain.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Packed(getattr(layer.self_attn, name)))
    model = hs.load(plain, tokenizer=tiny.tokenizer([tiny.START], []))
    study = model.analyze(TEXT, only=(*MEASURED, "ablation"), bootstrap=10, seed=1)
    reasons = {left_out.analysis: left_out.why for left_out in study.left_out}
    assert set(reasons) == {"copying", "composition", "contribution", "direct_logit"}
    assert all("cannot be told" in reason for reason in reasons.values())
    assert study.heads["magnitude"].isna().all()
    names = [name for name in map(str, expected) if name.startswith(("confidence", "ablation"))]
    pd.testing.assert_frame_equal(study.heads[names], expected[names], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="Packed"):
        model.remove(["decoder-self.0.0", "decoder-self.0.1"])


def test_a_model_in_memory_whose_gradients_would_be_lost_is_refused() -> None:
    """On some CPUs bitsandbytes packs 4-bit weights at the first pass, and no gradient goes through them then."""
    model = llama()
    model.lm_head.support_avx512bf16_for_cpu = True
    with pytest.raises(ConfigError, match=r"bitsandbytes.*4-bit.*path"):
        hs.load(model)
