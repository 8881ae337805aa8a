"""Models spread over devices and the disk, or stored in 4 and 8 bits: what is computed, and what is refused."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import nn

import headscope as hs
from headscope.errors import ConfigError
from headscope.model.discovery import find_attention
from headscope.model.projections import projections
from headscope.model.stored_weights import matrix_of, quantised_by
from tests.makers.shared import Command, succeed, write_lines
from tests.oracles import tiny

pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow
WEIGHTS_ONLY = ("copying", "composition", "magnitude", "distinctness")
ANALYSES = (*WEIGHTS_ONLY, "confidence", "contribution", "direct_logit", "ablation", "gradient")
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
    path = tmp_path_factory.mktemp("large") / "model"
    llama().save_pretrained(path, max_shard_size="100KB")
    tiny.tokenizer([tiny.START], []).save_pretrained(path)
    devices = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    devices |= dict.fromkeys(["model.layers.1", "model.layers.2", "model.norm", "lm_head"], "disk")
    (path.parent / "map.json").write_text(json.dumps(devices), encoding="utf-8")
    return path


def heads_of(model: hs.Model, names: tuple[str, ...] = ANALYSES) -> pd.DataFrame:
    """The table of heads."""
    return model.analyze(TEXT, only=names, bootstrap=10, seed=1).heads


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    """The table of heads of the model in memory."""
    return heads_of(hs.load(folder, device="cpu"))


def test_layers_on_disk_give_what_the_whole_model_gives(folder: Path, table: pd.DataFrame) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = hs.load(folder, device_map=str(folder.parent / "map.json"))
    layer = model.checkpoint.model.get_submodule("model.layers.1.self_attn.o_proj")
    assert layer.get_parameter("weight").is_meta and model.checkpoint.device == torch.device("cpu")
    pd.testing.assert_frame_equal(heads_of(model), table, rtol=1e-6, atol=1e-7)
    assert layer.get_parameter("weight").is_meta  # nothing stays in memory
    flags = {parameter.requires_grad for parameter in model.checkpoint.model.parameters()}
    assert flags == {True}
    with pytest.raises(ConfigError, match="offloaded"):
        model.remove(["decoder-self.0.0", "decoder-self.0.1"])


def test_automatic_placement_and_commands(folder: Path, tmp_path: Path, command: Command, table: pd.DataFrame) -> None:
    text = write_lines(tmp_path / "text", TEXT)
    options = ["--source", text, "--device-map", folder.parent / "map.json"]
    cpu_options = ["--source", text, "--device", "cpu"]
    answers = [succeed(command, "evaluate", folder, *more, "--json") for more in (options, cpu_options)]
    offloaded_nll, nll = (json.loads(answer)["record"]["nll"] for answer in answers)
    assert offloaded_nll == pytest.approx(nll, rel=1e-6)
    learning = ["prune", "subset", folder, "--keep", 6, *options, "--updates", 2, "--json", "--out", tmp_path / "run"]
    assert len(json.loads(succeed(command, *learning, "--set", "freeze=model"))["record"]["removed"]) == 6
    status, _, err = command(*learning, "--force")
    assert status == 2 and "--set freeze=model" in err
    assert hs.load(folder, device_map="auto").checkpoint.dtype == torch.float32


@pytest.fixture(scope="module", params=["nf4", "int8"])
def quantised_model(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Path]]:
    """The model in 4 or 8 bits of bitsandbytes, as `save_pretrained` writes it."""
    pytest.importorskip("bitsandbytes")
    four_bit = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    config = transformers.BitsAndBytesConfig(**(four_bit if request.param == "nf4" else {"load_in_8bit": True}))
    path = folder.parent / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map="cpu", dtype=torch.float32
        )
        model.save_pretrained(path)
    tiny.tokenizer([tiny.START], []).save_pretrained(path)
    yield request.param, path


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantised_weights_are_read_as_they_are_used(quantised_model: tuple[str, Path]) -> None:
    """Against a plain model with the dequantised weights; 8-bit layers also round activations."""
    kind, path = quantised_model
    model = hs.load(path, device="cpu")
    assert {quantised_by(part) for part in model.checkpoint.model.modules()} == {None, "bitsandbytes"}
    plain = llama().eval()
    for name, part in plain.named_modules():
        if isinstance(part, nn.Linear):
            layer = model.checkpoint.model.get_submodule(name)
            part.weight = nn.Parameter(matrix_of(layer))
    names = ANALYSES if kind == "nf4" else WEIGHTS_ONLY
    expected = heads_of(hs.load(plain, tokenizer=tiny.tokenizer([tiny.START], [])), names)
    pd.testing.assert_frame_equal(heads_of(model, names), expected, rtol=1e-4, atol=1e-5)
    assert find_attention(plain).layout == model.checkpoint.layout
    for site_layer, parts in projections(plain).items():
        actual = model.checkpoint.projections[site_layer]
        for name in ("query", "key", "value", "output"):
            torch.testing.assert_close(getattr(actual, name).matrices(), getattr(parts, name).matrices())
    with pytest.raises(ConfigError, match="bitsandbytes"):
        model.remove(["decoder-self.0.0", "decoder-self.0.1"])
