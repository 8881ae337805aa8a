"""`--export deci-hf`: key/value heads that differ by layer, and layers without attention, opened by its own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.heads import select_heads
from headscope.model.gating import masked
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.removal.merge_plan import plan_merge
from headscope.pruning.removal.record import Removed
from headscope.pruning.removal.remove import run_removal
from tests.makers import decoders

EMPTY = "decoder-self.0.*,decoder-self.1.*,decoder-self.2.0,decoder-self.2.3,decoder-self.2.4,decoder-self.2.7"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def removed(path: Path, out: Path, **options: Any) -> Removed:
    quick: dict[str, Any] = {"rounds": 0, "max_sentences": 4, "export": ("deci-hf",)}
    return run_removal(RemoveConfig(checkpoint=str(path), out=out, **quick | options))


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_a_number_of_key_value_heads_for_each_layer(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", "llama")
    (file,) = removed(path, tmp_path / "small", merge_kv=(4, 1, 2)).engines
    assert file.sizes == "8 query heads over 4, 1, 2 key/value heads"
    whole = open_checkpoint(str(path))
    averaged: Any = whole.with_pooled_groups(plan_merge(whole.attention_sites, (4, 1, 2))).model
    again = opened(tmp_path / "small" / "deci-hf")
    ids = torch.randint(3, decoders.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = (model(input_ids=ids).logits.log_softmax(-1) for model in (averaged, again))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    generated: dict[str, Any] = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert torch.equal(again.generate(ids[:, :8], **generated), averaged.generate(ids[:, :8], **generated))
    blocks = json.loads((tmp_path / "small" / "deci-hf" / "config.json").read_text(encoding="utf-8"))["block_configs"]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 8, 4]
    assert again.model.layers[1].self_attn.k_proj.weight.shape == (16, 64)
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["heads"]["list"] == "4,1,2"


def test_layers_without_attention_and_fewer_query_heads(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", "mistral", sliding_window=None, tie_word_embeddings=False)
    (file,) = removed(path, tmp_path / "small", heads=EMPTY).engines
    assert file.sizes == "4 query heads over 1, 0, 4 key/value heads" and file.difference is not None
    assert "filled up with 4 heads of zeros" in file.notes
    again, whole = opened(tmp_path / "small" / "deci-hf"), open_checkpoint(str(path))
    assert not hasattr(again.model.layers[1].self_attn, "q_proj") and again.config.block_configs[1].attention.no_op
    ids = torch.randint(3, decoders.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    model: Any = whole.model
    with torch.no_grad(), masked(whole.model, select_heads(EMPTY, whole.layout)):
        wanted = model(input_ids=ids).logits.log_softmax(-1)
    with torch.no_grad():
        assert (again(input_ids=ids).logits.log_softmax(-1) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("qwen3", {}, r"is of type 'qwen3'"),
        ("llama", {"attention_bias": True}, r"q_proj\.bias"),
        ("mistral", {"sliding_window": 8}, "has a sliding_window of 8"),
    ],
)
def test_what_decilm_cannot_hold_is_refused_by_name(
    tmp_path: Path, kind: str, options: dict[str, Any], reason: str
) -> None:
    path = decoders.saved(tmp_path / "whole", kind, **options)
    with pytest.raises(ConfigError, match=f"--export deci-hf writes .*{reason}"):
        removed(path, tmp_path / "small", heads=EMPTY)
    assert not (tmp_path / "small").exists()


def test_numbers_that_are_not_one_for_each_layer_are_refused(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", "llama")
    with pytest.raises(ConfigError, match="--merge-kv 4,2: 2 numbers of key/value heads for 3 layers"):
        removed(path, tmp_path / "small", merge_kv=(4, 2))
