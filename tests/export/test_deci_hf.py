"""`--export deci-hf`: key/value heads that differ by layer, and layers without attention, opened by its own code."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import headscope as hs
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.heads import select_heads
from headscope.model.taps import masked
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.merge_plan import plan_merge
from headscope.pruning.removal.remove import run_removal
from headscope.results.removal import Removal
from tests.makers import decoders
from tests.oracles.merged import greedy_counts

EMPTY = "decoder-self.0.*,decoder-self.1.*,decoder-self.2.0,decoder-self.2.3,decoder-self.2.4,decoder-self.2.7"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def removed(path: Path, out: Path, **options: Any) -> Removal:
    quick: dict[str, Any] = {"rounds": 0, "max_sentences": 4, "export": ("deci-hf",)}
    return run_removal(RemoveConfig(checkpoint=str(path), out=out, **quick | options))


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.slow
def test_a_number_of_key_value_heads_for_each_layer_and_layers_that_no_llama_has(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", "llama")
    (made,) = removed(path, tmp_path / "small", merge_kv=(4, 1, 2)).engines
    assert made.sizes == "8 query heads over 4, 1, 2 key/value heads"
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


@pytest.mark.slow
def test_headscope_opens_the_folder_and_runs_nothing_that_lies_there(tmp_path: Path) -> None:
    """As a Llama with the same numbers, empty layers and all: values of the folder beside it, up to rounding."""
    path = decoders.saved(tmp_path / "whole", "llama", tokenizer=decoders.byte_level())
    removed(path, tmp_path / "fewer", heads="decoder-self.1.*", export=())
    removed(tmp_path / "fewer", tmp_path / "small", merge_kv=(4, 1, 2))
    (tmp_path / "small" / "deci-hf" / "modeling_decilm.py").write_text("raise AssertionError")
    plain, deci = (hs.load(str(tmp_path / "small" / name), device="cpu") for name in ("", "deci-hf"))
    assert plain.checkpoint.layout == deci.checkpoint.layout
    assert [site.groups for site in deci.checkpoint.attention_sites.order if site.heads] == [4, 2]
    text = ["a man walks his dog", "two dogs run in the snow", "a red house"]
    tables = [model.analyze(text=text, only=["entropy", "contribution", "lrp"]).heads for model in (plain, deci)]
    pd.testing.assert_frame_equal(tables[0], tables[1], rtol=1e-6)
    again = deci.remove("decoder-self.0.*").save(tmp_path / "smaller", export="deci-hf")
    assert again.engines[0].sizes == "8 query heads over 1, 0, 2 key/value heads"


@pytest.mark.slow
def test_measured_numbers_are_those_of_a_slow_search(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", tokenizer=decoders.byte_level())
    text = tmp_path / "text.en"
    text.write_text("".join(f"{word} man is in the {word} street with {word * 3} dogs\n" for word in "abcdefghij"))
    given: dict[str, Any] = {"merge_kv": (2,), "allocate": "measured", "source": text, "objective": "loss"}
    (file,) = removed(path, tmp_path / "small", **given).engines
    model: Any = decoders.decoder("llama").double()
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = text.read_text(encoding="utf-8").splitlines()[:8]  # a fifth is held out
    encoded = [tokenizer(line, return_tensors="pt").input_ids for line in lines]
    wanted = greedy_counts(model, encoded, groups=4, width=16, total=6)
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["heads"]["list"] == ",".join(map(str, wanted)) and sum(wanted) == 6 and len(set(wanted)) > 1
    assert file.sizes == f"8 query heads over {', '.join(map(str, wanted))} key/value heads"
    assert record["quality"] is not None
    small = hs.load(path, device="cpu").remove(
        merge_kv=2, allocate="measured", text=text, refit=hs.Refit(method="none", objective="loss"), max_sentences=4
    )
    counts = [site.groups for site in small.checkpoint.attention_sites.order]
    assert counts == wanted


@pytest.mark.slow
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
