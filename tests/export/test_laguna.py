"""Exports that stock transformers read: laguna with its gates, deci-hf with its own number of heads a layer."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import headscope as hs
from headscope.data.corpus import open_corpus
from headscope.engine.base import ANALYSES
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.heads import select_heads
from headscope.model.taps import masked
from headscope.pruning.closed_form.compensate import RefittedCopy, compensate
from headscope.pruning.closed_form.moments import collect_moments
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.removal.merge_plan import plan_merge
from tests.makers import decoders
from tests.makers.decoders import PER_GROUP, RAGGED, YARN
from tests.makers.removals import remove_heads
from tests.oracles.merged import greedy_counts

pytestmark = pytest.mark.slow

WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
TEXT = ["a man walks his dog", "two dogs run in the snow", "a red house"]
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PROMPTS: dict[str, Any] = {
    "clean": ["a man walks his", "two dogs run in"],
    "corrupt": ["a man talks his", "two hogs run in"],
}
PROMPTS |= {"answer": ["a", "b"]}
ANALYSIS_NAMES = [name for name, _ in ANALYSES if name not in ("alphas", "experts", "gates", "head_gates")]
"""All analyses except those of parts that no decoder of transformers has."""
SMALL: dict[str, Any] = {"chg_fits": 1, "chg_steps": 3, "shapley_samples": 1, "ig_steps": 2, "eap_steps": 2}
SMALL |= {"needle": "the red house", "needle_answer": "red", "needle_question": "the", "haystack_lengths": (40,)}
SMALL |= {"needle_depths": 1, "needle_steps": 2, "passkeys": 1, "passkey_length": 1, "passkey_words": ("a", "b")}
SMALL |= {"passkey_needle": "a", "passkey_question": "b", "streaming_lengths": (40, 60), "streaming_steps": 2}
SMALL |= {"explained_steps": 5, "streaming_sink": 2, "streaming_recent": 4}
IDS = torch.randint(3, decoders.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
GENERATION: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@torch.no_grad()
def assert_likelihoods(model: Any, logits: torch.Tensor) -> None:
    """The log-probabilities of a model for IDS equal those of these logits [b t w], up to rounding."""
    actual, expected = (values.log_softmax(-1) for values in (model(input_ids=IDS).logits, logits))
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("heads", "options", "counts", "n_zeros"),
    [
        (RAGGED, {}, [8, 4, 4], 8),
        (PER_GROUP, WINDOWS | {"rope_parameters": YARN, "tie_word_embeddings": False}, [4, 8, 4], 0),
    ],
)
def test_stock_transformers_computes_what_the_masked_model_does(
    tmp_path: Path, heads: str, options: dict[str, Any], counts: list[int], n_zeros: int
) -> None:
    path = decoders.save_decoder(tmp_path / "whole", "qwen3", **options)
    removal = remove_heads(path, tmp_path / "small", heads, export=("laguna",))
    (file,) = removal.engines
    assert file.difference is not None and file.limit is not None and file.difference <= file.limit
    assert any(f"filled up with {n_zeros} heads of zeros" in note for note in file.notes) == bool(n_zeros)

    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small" / "laguna", trust_remote_code=False)
    assert stock.config.num_attention_heads_per_layer == counts and stock.config.num_key_value_heads == 4
    checkpoint = open_checkpoint(str(path))
    model: Any = checkpoint.model
    with torch.no_grad(), masked(checkpoint.model, select_heads(heads, checkpoint.layout)):
        expected = model(input_ids=IDS).logits
        text = model.generate(IDS[:, :8], **GENERATION)
    assert_likelihoods(stock, expected)
    assert torch.equal(stock.generate(IDS[:, :8], **GENERATION), text)
    assert torch.equal(stock.generate(IDS[:, :8], use_cache=False, **GENERATION), text)


def test_the_folder_for_servers_has_no_gate_and_says_what_was_run(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole", "qwen3", tokenizer=decoders.byte_level())
    remove_heads(path, tmp_path / "small", PER_GROUP, export=("laguna",))
    small, servers = open_checkpoint(str(tmp_path / "small")), tmp_path / "small" / "laguna-server"
    config = transformers.AutoConfig.from_pretrained(servers)
    assert config.model_type == "laguna" and config.architectures == ["LagunaForCausalLM"]
    assert config.gating is False and config.tie_word_embeddings is False
    assert (config.qkv_bias, config.attention_bias, config.decoder_sparse_step) == (False, False, 1)
    assert config.mlp_only_layers == [0, 1, 2] and config.num_attention_heads_per_layer == [4, 8, 4]
    weights, expected = load_file(servers / "model.safetensors"), small.model.state_dict()
    assert sorted(weights) == sorted(expected) and "lm_head.weight" in weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    card = (servers / "README.md").read_text(encoding="utf-8")
    assert (
        "run here: `laguna`, outputs differ, as a share of the largest, by" in card and "only read: that vLLM" in card
    )
    assert (servers / "tokenizer.json").is_file()
    assert "`laguna-server`: vLLM" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_headscope_knows_the_gate_of_what_it_wrote(tmp_path: Path) -> None:
    """Analyses, criteria and refits equal those of the same heads without a gate.

    In float64, as fits magnify rounding; W_O of the folder is divided in float32 by its gate of zeros (softplus is
    ln 2), so here it is divided anew.
    """
    path = decoders.save_decoder(tmp_path / "whole", "qwen3", tokenizer=decoders.byte_level(), **FEW_HEADS)
    remove_heads(path, tmp_path / "small", "decoder-self.0.0,decoder-self.0.2", export=("laguna",))
    plain, gated = (hs.load(str(tmp_path / "small" / name), dtype="float64") for name in ("", "laguna"))
    assert plain.checkpoint.layout == gated.checkpoint.layout
    models: list[Any] = [study.checkpoint.model for study in (plain, gated)]
    gate = float(torch.tensor(2.0).log())
    with torch.no_grad():
        for layer, gated_layer in zip(*(model.model.layers for model in models), strict=True):
            gated_layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight / gate)
    tables = [model.analyze(**PROMPTS, only=ANALYSIS_NAMES, **SMALL).heads for model in (plain, gated)]
    assert {"magnitude", "explained", "facilitation", "shapley", "eap_ig", "lrp"} <= set(tables[0])
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=False, rtol=0, atol=1e-9)
    corpus = open_corpus(TEXT)
    scores = [criterion_named("obs").scores(ScoringContext(model.checkpoint, corpus)) for model in (plain, gated)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-3)

    def refit(base: Any) -> Any:
        heads, moments = select_heads("decoder-self.1.0,decoder-self.1.1", base.layout), collect_moments(base, corpus)
        return RefittedCopy.of(base, compensate(base, moments, heads, Refit(method="least-squares"))).model

    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, actual = (refit(model.checkpoint)(input_ids=ids).logits for model in (plain, gated))
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_gate_of_half_precision_is_divided_out_as_it_is_rounded(tmp_path: Path) -> None:
    decoders.decoder("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    removal = hs.load(str(tmp_path / "whole")).remove(PER_GROUP).save(tmp_path / "small", export="laguna")
    assert any("0.69140625 in bfloat16" in line for line in removal.engines[0].limits)
    plain, gated = (
        load_file(tmp_path / "small" / name / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"].double()
        for name in ("laguna-server", "laguna")
    )
    ratio = (plain * gated).sum() / (gated * gated).sum()
    assert abs(ratio / 0.69140625 - 1) < 5e-4 < abs(ratio / math.log(2) - 1), "softplus(0) in float32"


# deci-hf.

EMPTY = "decoder-self.0.*,decoder-self.1.*,decoder-self.2.0,decoder-self.2.3,decoder-self.2.4,decoder-self.2.7"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_a_number_of_key_value_heads_for_each_layer_and_layers_that_no_llama_has(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole", "llama")
    (engine,) = remove_heads(path, tmp_path / "small", merge_kv=(4, 1, 2), export=("deci-hf",)).engines
    assert engine.sizes == "8 query heads over 4, 1, 2 key/value heads"
    checkpoint = open_checkpoint(str(path))
    merged: Any = checkpoint.alter_heads(plan_merge(checkpoint.attention_sites, (4, 1, 2)), "pool").model
    stock = load(tmp_path / "small" / "deci-hf")
    with torch.no_grad():
        assert_likelihoods(stock, merged(input_ids=IDS).logits)
    assert torch.equal(stock.generate(IDS[:, :8], **GENERATION), merged.generate(IDS[:, :8], **GENERATION))
    blocks = json.loads((tmp_path / "small" / "deci-hf" / "config.json").read_text(encoding="utf-8"))["block_configs"]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 8, 4]
    assert stock.model.layers[1].self_attn.k_proj.weight.shape == (16, 64)
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["heads"]["list"] == "4,1,2"
    file = tmp_path / "small" / "deci-hf" / "config.json"
    config = json.loads(file.read_text())
    for entries, reason in (
        ({"attention": {"no_op": False, "n_heads_in_group": 3}}, "layer 1.*n_heads_in_group 3"),
        ({"ffn": {"no_op": True, "ffn_mult": None}}, r"layer 1.*ffn\.no_op"),
        ({"attention": {"no_op": True, "replace_with_linear": True}}, r"layer 1 has attention\.replace_with_linear"),
        ({"ffn": 5}, "deci-hf"),
    ):
        file.write_text(json.dumps(config | {"block_configs": [blocks[0], blocks[1] | entries, blocks[2]]}))
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(str(file.parent))
    file.write_text(json.dumps(config | {"block_configs": blocks[:2]}))
    with pytest.raises(CheckpointError, match="block_configs has 2 layers, and num_hidden_layers is 3"):
        open_checkpoint(str(file.parent))


def test_headscope_opens_the_folder_and_runs_nothing_that_lies_there(tmp_path: Path) -> None:
    """Its values equal, up to rounding, those of the folder beside it, with empty layers too."""
    path = decoders.save_decoder(tmp_path / "whole", "llama", tokenizer=decoders.byte_level())
    remove_heads(path, tmp_path / "fewer", heads="decoder-self.1.*", export=())
    remove_heads(tmp_path / "fewer", tmp_path / "small", merge_kv=(4, 1, 2), export=("deci-hf",))
    (tmp_path / "small" / "deci-hf" / "modeling_decilm.py").write_text("raise AssertionError")
    plain, deci = (hs.load(str(tmp_path / "small" / name), device="cpu") for name in ("", "deci-hf"))
    assert plain.checkpoint.layout == deci.checkpoint.layout
    assert [site.groups for site in deci.checkpoint.attention_sites.order if site.heads] == [4, 2]
    tables = [model.analyze(text=TEXT, only=["entropy", "contribution", "lrp"]).heads for model in (plain, deci)]
    pd.testing.assert_frame_equal(tables[0], tables[1], rtol=1e-6)
    smaller = deci.remove("decoder-self.0.*").save(tmp_path / "smaller", export="deci-hf")
    assert smaller.engines[0].sizes == "8 query heads over 1, 0, 2 key/value heads"


def test_measured_numbers_are_those_of_a_slow_search(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole", tokenizer=decoders.byte_level())
    text = tmp_path / "text.en"
    text.write_text("".join(f"{word} man is in the {word} street with {word * 3} dogs\n" for word in "abcdefghij"))
    options: dict[str, Any] = {"merge_kv": (2,), "allocate": "measured", "source": text, "objective": "loss"}
    (file,) = remove_heads(path, tmp_path / "small", **options, export=("deci-hf",)).engines
    model: Any = decoders.decoder("llama").double()
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = text.read_text(encoding="utf-8").splitlines()[:8]  # a fifth is held out
    ids = [tokenizer(line, return_tensors="pt").input_ids for line in lines]
    expected = greedy_counts(model, ids, groups=4, width=16, total=6)
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["heads"]["list"] == ",".join(map(str, expected)) and sum(expected) == 6 and len(set(expected)) > 1
    assert file.sizes == f"8 query heads over {', '.join(map(str, expected))} key/value heads"
    assert record["quality"] is not None
    small = hs.load(path, device="cpu").remove(
        merge_kv=2, allocate="measured", text=text, refit=hs.Refit(method="none", objective="loss"), max_sentences=4
    )
    counts = [site.groups for site in small.checkpoint.attention_sites.order]
    assert counts == expected


def test_layers_without_attention_and_fewer_query_heads(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole", "mistral", sliding_window=None, tie_word_embeddings=False)
    (file,) = remove_heads(path, tmp_path / "small", heads=EMPTY, export=("deci-hf",)).engines
    assert file.sizes == "4 query heads over 1, 0, 4 key/value heads" and file.difference is not None
    assert "filled up with 4 heads of zeros" in file.notes
    stock, checkpoint = load(tmp_path / "small" / "deci-hf"), open_checkpoint(str(path))
    assert not hasattr(stock.model.layers[1].self_attn, "q_proj") and stock.config.block_configs[1].attention.no_op
    model: Any = checkpoint.model
    with torch.no_grad(), masked(checkpoint.model, select_heads(EMPTY, checkpoint.layout)):
        expected = model(input_ids=IDS).logits
    assert_likelihoods(stock, expected)
