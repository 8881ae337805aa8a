"""`--export onnx`: decoders with their cache, in onnxruntime, against the masked model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration

import headscope as hs
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.model.taps import masked
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal import remove
from headscope.pruning.removal.remove import run_removal
from headscope.results.removal import Removal
from tests.makers import decoders
from tests.makers.removals import remove_heads
from tests.makers.shared import Command
from tests.oracles import checkpoints, tiny
from tests.oracles.simulation import FIRST, simulate_devices

pytestmark = pytest.mark.slow
HEADS = "decoder-self.0.*,decoder-self.1.2,decoder-self.1.3,decoder-self.1.6,decoder-self.1.7"
"""A first layer without heads, and two groups of four of the second."""
SCRIPT = """
import json, sys
sys.modules["headscope"] = None
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
ids = np.array(json.loads(sys.argv[2]))
inputs = {entry.name: entry.shape for entry in session.get_inputs()}
caches = {name: shape for name, shape in inputs.items() if "past_key_values" in name}
past = {name: np.zeros((len(ids), shape[1], 0, shape[3]), np.float32) for name, shape in caches.items()}
names, new = [entry.name for entry in session.get_outputs()], ids
for _ in range(8):
    start = ids.shape[1] - new.shape[1]
    positions = np.arange(start, ids.shape[1])[None].repeat(len(ids), 0)
    feed = {"input_ids": new, "attention_mask": np.ones_like(ids), "position_ids": positions, **past}
    outputs = dict(zip(names, session.run(None, feed)))
    past = {name.replace("present", "past_key_values"): outputs[name] for name in names[1:]}
    new = outputs["logits"][:, -1:].argmax(-1)
    ids = np.concatenate([ids, new], 1)
print(json.dumps({"ids": ids.tolist(), "inputs": inputs}))
"""


@pytest.fixture(scope="module", autouse=True)
def require_onnx() -> None:
    """Imported when a test runs: every process that collects the tests would wait for it otherwise."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")


def test_a_decoder_generates_through_its_cache_without_headscope(tmp_path: Path) -> None:
    """Layer 0 has no heads and so no cache; layer 1 keeps two groups: batch and lengths are free.

    transformers multiplies experts in groups, by an operation that ONNX has not.
    """
    sizes = decoders.decoder("mistral", num_hidden_layers=2).config.to_dict() | {"num_local_experts": 3}
    config = transformers.MixtralConfig(**sizes | {"sliding_window": None, "num_experts_per_tok": 2})
    torch.manual_seed(7)
    transformers.MixtralForCausalLM(config).save_pretrained(path := tmp_path / "whole")
    removal = remove_heads(path, tmp_path / "small", HEADS, export=("onnx",))
    (file,) = removal.engines
    assert file.difference is not None and file.difference <= 1e-5
    assert "16 of 16" in file.notes[0] and "one shape for all layers" in file.limits[0]
    prompts = torch.arange(5, 5 + 3 * 7).view(3, 7)
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "small" / "model.onnx"), json.dumps(prompts.tolist())]
    result = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert list(result["inputs"]) == [
        *("input_ids", "attention_mask", "position_ids", "past_key_values.1.key", "past_key_values.1.value")
    ]
    assert result["inputs"]["past_key_values.1.key"] == ["batch_size", 2, "past_sequence_length", 16]
    assert result["inputs"]["attention_mask"] == ["batch_size", "past_sequence_length + sequence_length"]
    model = open_checkpoint(str(path)).model
    ids = prompts
    with torch.no_grad(), masked(model, removal.removed):
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert result["ids"] == ids.tolist()


def test_an_encoder_is_one_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Typed as docs/serving.md says; the model is on an accelerator, and graphs are traced on the CPU."""
    removals: list[Removal] = []

    def record(config: RemoveConfig, **more: Any) -> Removal:
        removals.append(run_removal(config, **more))
        return removals[0]

    monkeypatch.setattr(remove, "run_removal", record)
    checkpoint = checkpoints.huggingface("bert")
    model: Any = checkpoint.model.float()
    model.bert.encoder.layer, model.config.num_hidden_layers = model.bert.encoder.layer[:1], 1
    model.save_pretrained(tmp_path / "whole")
    checkpoint.tokenizer.save_pretrained(tmp_path / "whole")
    (tmp_path / "text").write_text("\n".join(" ".join(tiny.WORDS[: 3 + number]) for number in range(16)) + "\n")
    options = ("--heads", "encoder-self.0.1", "--export", "self-contained,onnx", "--rounds", 0)
    text = ("--source", tmp_path / "text", "--max-sentences", 8)
    with simulate_devices():
        line = ("prune", "remove", tmp_path / "whole", *options, *text, "--out", tmp_path / "small", "--verbose")
        status, output, err = command(*line, "--device", FIRST)
    assert status == 0, err
    (removal,) = removals
    assert "outputs differ, as a share of the largest, by" in output and "onnxruntime" in output
    assert removal.engines[0].difference is not None and removal.engines[0].difference <= 1e-5
    assert (tmp_path / "small" / "model.onnx").is_file() and (tmp_path / "small" / "config.json").is_file()


def test_an_encoder_decoder_is_three_graphs_that_decode(tmp_path: Path) -> None:
    """One layer of cross attention has no heads, so its cache is not in the graphs.

    The decoder is deeper than the encoder, which transformers' generate cannot do (its cache has as many layers as the
    encoder); removal and the graphs can.
    """
    path = tmp_path / "whole"
    sizes: dict[str, Any] = {"d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 14, "vocab_size": 97}
    sizes |= {"num_layers": 1, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    config = T5Config(**sizes)
    T5ForConditionalGeneration(config).save_pretrained(path)
    heads = "encoder-self.0.0,decoder-self.0.1,cross.0.*"
    removal = remove_heads(path, tmp_path / "small", heads, export=("self-contained", "onnx"))
    assert removal.record["verified"]["difference"] <= 1e-5 and removal.record["verified"]["searches"] == 0
    (file,) = removal.engines
    assert file.difference is not None and file.difference <= 1e-5
    assert "32 of 32" in file.notes[0] and "decodes through a cache" in file.sizes
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "small" / "decoder_with_past_model.onnx")
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    assert shapes["past_key_values.0.decoder.key"][1] == 2 and shapes["past_key_values.1.encoder.value"][1] == 3
    assert "past_key_values.0.encoder.key" not in shapes
    assert shapes["input_ids"] == ["batch_size", "decoder_sequence_length"]


@pytest.mark.parametrize("kind", ["Wav2Vec2", "CLIP"])
def test_a_model_that_needs_more_than_text_is_refused_by_what_it_reads(tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 7,
    }
    picture, text = sizes | {"image_size": 8, "patch_size": 4}, sizes | {"vocab_size": 31}
    sound = sizes | {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "num_conv_pos_embedding_groups": 4}
    options: dict[str, Any] = {"Wav2Vec2": sound, "CLIP": {"text_config": text, "vision_config": picture}}[kind]
    config = getattr(transformers, f"{kind}Config")(**options)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "model")
    reads = {"Wav2Vec2": "takes input_values, not text", "CLIP": "reads pictures beside the text"}[kind]
    with pytest.raises(CheckpointError, match=reads):
        hs.load(str(tmp_path / "model")).convert(tmp_path / "engine", to="onnx")
    assert not (tmp_path / "engine").exists()
