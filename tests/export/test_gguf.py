"""`--export gguf`: every architecture of llama.cpp that is written, run there, against the masked model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

import headscope as hs
from headscope.errors import CheckpointError, ConfigError
from headscope.export import gguf_layers as layers
from headscope.export import llama_cpp
from headscope.export.gguf_export import SPLITS, write_gguf
from headscope.export.gguf_layers import LlamaDecoder
from headscope.formats.base import open_checkpoint
from headscope.results.removal import Removal
from tests.makers import decoders
from tests.makers.decoders import RAGGED, UNIFORM, YARN
from tests.makers.removals import remove_heads
from tests.makers.shared import Command, succeed

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}


def remove(path: Path, out: Path, heads: str, *kinds: str, **options: Any) -> Removal:
    return remove_heads(path, out, heads, export=(*kinds, "gguf"), **options)


def fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize(
    ("kind", "heads", "options", "architecture", "counts"),
    [
        ("llama", RAGGED, {"attention_bias": True}, "deci", ([4, 1, 4], [2, 1, 4])),
        ("llama", RAGGED, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}, "deci", ([4, 0, 4], [2, 0, 4])),
        ("mistral", UNIFORM, {"sliding_window": None}, "llama", (6, 3)),
        ("qwen2", RAGGED, {}, "deci", ([4, 0, 4], [2, 0, 4])),
        ("llama", "decoder-self.0.*,decoder-self.1.*", {}, "deci", ([1, 0, 8], [1, 0, 4])),
        ("qwen3", RAGGED, {}, "openelm", ([4, 1, 4], [2, 1, 4])),
        ("qwen3", RAGGED, {"tie_word_embeddings": False}, "laguna", ([4, 1, 4], [2, 1, 4])),
        ("qwen3", UNIFORM, {"tie_word_embeddings": False}, "qwen3", (6, 3)),
    ],
)
def test_llama_cpp_computes_what_the_masked_model_does(
    tmp_path: Path, kind: str, heads: str, options: dict[str, Any], architecture: str, counts: Any
) -> None:
    path = decoders.save_decoder(tmp_path / "whole", kind, **options)
    removal = remove(path, tmp_path / "small", heads)
    (file,) = removal.engines
    assert file.difference is not None and file.limit is not None and file.difference <= file.limit
    assert "24 of 24 steps" in " ".join(file.notes)
    metadata = fields(tmp_path / "small" / "model.gguf")
    assert metadata["general.architecture"] == architecture
    names = ("head_count", "head_count_kv")
    assert tuple(metadata[f"{architecture}.attention.{name}"] for name in names) == counts
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "run by llama.cpp" in card and "`model.gguf`: llama.cpp" in card and "trust_remote_code" in card


GREEDY = """
import json, sys
sys.modules["headscope"] = None
import xllamacpp as llama
params = llama.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 64, 1, False
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
question = {"prompt": json.loads(sys.argv[2]), "max_tokens": 12, "temperature": -1, "ignore_eos": True}
answer = llama.Server(params).handle_completions(question | {"verbose": True, "return_tokens": True})
print("IDS", json.dumps((json.loads(answer) if isinstance(answer, str) else answer)["__verbose"]["tokens"]))
"""


def test_greedy_text_is_that_of_the_refitted_masked_model(tmp_path: Path) -> None:
    """A refit gives a layer without heads a bias: llama.cpp, alone, continues as the folder does in transformers."""
    path = decoders.save_decoder(tmp_path / "whole", tokenizer=decoders.byte_level(decoders.LLAMA3))
    source = tmp_path / "text"
    source.write_text("".join(f"A man in a red shirt number {n} walks a dog.\n" for n in range(40)), encoding="utf-8")
    removal = remove(path, tmp_path / "small", RAGGED, compensate="least-squares", source=source)
    assert removal.engines[0].difference is not None and removal.engines[0].difference <= 1e-4
    assert "splits 8 of 8 sentences" in " ".join(removal.record["notes"])
    model: Any = open_checkpoint(str(tmp_path / "small")).model
    prompt = [1, 40, 50, 60, 70]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, suppress_tokens=[2]
    )
    arguments = [sys.executable, "-c", GREEDY, str(tmp_path / "small" / "model.gguf"), json.dumps(prompt)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("IDS")]
    assert json.loads(line.removeprefix("IDS")) == expected[0, len(prompt) :].tolist()


def _split_digits() -> Any:
    """SmolLM's splits: every digit alone, then as GPT-2."""
    tokenizer = decoders.byte_level()
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


ODD = [
    *("I'd don't WE'LL it's 'tis N'T", "12345 1 22 333 ½ ² Ⅷ ①", "  two  spaces\n\n new line \r\n x", "ends with   "),
    *("snake_case CamelCase HTTPServer fooBar", "München ÉTÉ été", "世界 你好。", "👩‍👩‍👧 😀", "हिन्दी العربية"),
    *("a/b//c\n//d ... !!! ???", "x=1;y+=2", "\tTab tab\t\t", "a\u00a0b", "'"),
]
SPLITTERS = {name: lambda split=split: decoders.byte_level(split) for split, name in SPLITS.items()}


@pytest.mark.parametrize("split", [*SPLITS.values(), "smollm"])
def test_every_name_of_a_split_means_in_llama_cpp_what_it_does_here(tmp_path: Path, split: str) -> None:
    """The pre-tokenizers of Llama 3, Qwen 2, Tekken and SmolLM, on text that they cut in different ways."""
    tokenizer = SPLITTERS.get(split, _split_digits)()
    path = tmp_path / "model.gguf"
    file = write_gguf(LlamaDecoder(open_checkpoint(str(decoders.save_decoder(tmp_path / "whole")))), tokenizer, path)
    assert file.split == split and file.splits_text
    _, ids = llama_cpp.ask(path, [[1, 5]], ODD, top=5, forced_token=file.letter)
    assert ids == [tokenizer(text)["input_ids"] for text in ODD]


def test_quantised_files_say_how_far_they_moved(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole", initializer_range=0.02)
    removal = remove(path, tmp_path / "small", RAGGED, quantize="q8_0")
    (file,) = removal.engines
    assert file.limit is not None and file.difference is not None and 1e-4 < file.difference < file.limit < 1
    assert "before quantization" in file.notes[0]
    reader = gguf.GGUFReader(tmp_path / "small" / "model.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_output.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_weights_keep_the_half_precision_that_they_have(tmp_path: Path) -> None:
    model = decoders.decoder("llama", initializer_range=0.05).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    removal = remove(tmp_path / "whole", tmp_path / "small", RAGGED)
    assert removal.engines[0].difference is not None and removal.engines[0].difference <= 5e-2
    reader = gguf.GGUFReader(tmp_path / "small" / "model.gguf")
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}["output_norm.weight"] == "F32"
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}["blk.0.attn_q.weight"] == "BF16"


@pytest.mark.parametrize(("window", "quantize"), [(7, "none"), (2, "q8_0")])
def test_a_sliding_window_bounds_the_context(tmp_path: Path, window: int, quantize: str) -> None:
    """It bounds the prompts of the check too: the server refuses a prompt as long as its context."""
    sharp = {"initializer_range": 0.02} if quantize == "q8_0" else {}
    tokenizer = decoders.byte_level()
    path = decoders.save_decoder(tmp_path / "whole", "mistral", tokenizer=tokenizer, sliding_window=window, **sharp)
    removal = remove(path, tmp_path / "small", UNIFORM, quantize=quantize)
    assert fields(tmp_path / "small" / "model.gguf")["llama.context_length"] == window
    assert any(f"context of {window} tokens" in line for line in removal.engines[0].limits)
    steps = 3 * min(8, window - 1)
    assert f"at {steps} of {steps} steps" in " ".join(removal.engines[0].notes)
    assert "llama.cpp splits 8 of 8 sentences into the same tokens" in removal.engines[0].notes
    assert fields(tmp_path / "small" / "model.gguf")["tokenizer.ggml.pre"] == "gpt-2"


@pytest.mark.parametrize(
    ("kind", "more", "scaling", "has_divisors"),
    [
        ("llama", {"mscale": 1.5, "mscale_all_dim": 0.5}, "yarn", False),
        ("mistral", {"truncate": False}, None, True),
        ("qwen2", {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3}, None, True),
        ("qwen3", {"attention_factor": 0.7, "beta_fast": 32.0}, "yarn", False),
    ],
)
def test_all_that_yarn_says_is_in_the_file(
    tmp_path: Path, kind: str, more: dict[str, Any], scaling: str | None, has_divisors: bool
) -> None:
    """llama.cpp computes the same; bounds that its architectures do not read are divisors of frequencies."""
    path = decoders.save_decoder(tmp_path / "whole", kind, rope_parameters=YARN | more)
    conversion = hs.load(str(path)).convert(tmp_path / "engine", to="gguf")
    assert conversion.difference is not None and "24 of 24 steps" in " ".join(conversion.notes)
    metadata = fields(tmp_path / "engine" / "model.gguf")
    assert metadata.get(f"{metadata['general.architecture']}.rope.scaling.type") == scaling
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "engine" / "model.gguf").tensors}
    assert ("rope_freqs.weight" in names) == has_divisors


@pytest.mark.parametrize(
    ("kind", "options", "heads", "reason"),
    [
        ("qwen3", {"attention_bias": True}, RAGGED, "attn_k, attn_output"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, RAGGED, "dynamic"),
        ("llama", {"hidden_act": "gelu"}, RAGGED, "hidden_act gelu"),
        ("qwen3", {"rope_parameters": YARN | {"beta_slow": 0.1}}, UNIFORM, r"beta_slow.*0\.1"),
        ("mistral", {"sliding_window": 1}, UNIFORM, "sliding_window.*2"),
    ],
)
def test_what_llama_cpp_cannot_say_is_refused_with_the_nearest(
    tmp_path: Path, kind: str, options: dict[str, Any], heads: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        remove(decoders.save_decoder(tmp_path / "whole", kind, **options), tmp_path / "small", heads)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_file_that_llama_cpp_computes_differently_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "interleave", lambda rows, heads: rows)
    with pytest.raises(CheckpointError, match=r"llama\.cpp"):
        remove(decoders.save_decoder(tmp_path / "whole"), tmp_path / "small", RAGGED)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_folder_without_some_heads_is_converted(tmp_path: Path, command: Command) -> None:
    path = decoders.save_decoder(tmp_path / "whole", tokenizer=decoders.byte_level())
    remove_heads(path, tmp_path / "small", RAGGED)
    output = succeed(command, "convert", tmp_path / "small", tmp_path / "engine", "--to", "gguf")
    assert "log-probabilities differ by" in output
    names = sorted(file.name for file in (tmp_path / "engine").iterdir())
    assert names == ["README.md", "conversion.json", "model.gguf"]
    succeed(command, "convert", path, tmp_path / "engine", "--to", "gguf", "--force", "--quantize", "q8_0")
