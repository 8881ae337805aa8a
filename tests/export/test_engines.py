"""Declarations of engines, and of one of another package (tests/plugin): in help, errors and both commands."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from headscope.config import declarations
from headscope.config.declarations import declared_engines
from headscope.errors import ConfigError
from headscope.export.base import ENGINES, choose_export
from headscope.export.deci_hf import sizes as deci_sizes
from headscope.export.gguf_layers import LlamaDecoder
from headscope.formats.base import open_checkpoint
from headscope.formats.exports import MODEL_FILES
from headscope.heads import select_heads
from headscope.model.discovery import find_attention
from headscope.model.removal_plan import RemovalPlan, padded_plan, plan_removal
from headscope.model.taps import masked
from headscope.pruning.removal.merge_plan import plan_merge
from headscope.registry import Registry
from scripts.documented import DOCS
from tests.contracts.architectures import BY_NAME, build, inputs_of, logits
from tests.makers import decoders, wrappers
from tests.makers.decoders import UNIFORM
from tests.makers.removals import remove_heads

pytestmark = pytest.mark.slow


def test_declarations_are_read_from_the_source_as_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[Any] = Registry(ENGINES.kind, package=ENGINES.package, group=ENGINES.group)
    monkeypatch.setattr(declarations, "ENGINES", registry)
    entries = {entry.name: entry for entry in declared_engines()}
    assert not registry.loaded_variants() and sorted(entries) == ENGINES.names()
    for name, engine in ENGINES:
        attributes = ("name", "summary", "endings", "allocation")
        assert [getattr(entries[name], key) for key in attributes] == [getattr(engine, key) for key in attributes]
        assert {f"*.{ending}" for ending in engine.endings} <= set(MODEL_FILES)
        assert engine.install.startswith("headscope[") and engine.__doc__


# The table of docs/serving.md, family × export × kind of removal, against what exports and engines say themselves.


SHAPES = ("uniform", "per-group", "ragged", "per-layer kv", "empty layer")
REMOVED = {
    "uniform": decoders.UNIFORM,
    "per-group": "decoder-self.0.0,decoder-self.0.3,decoder-self.0.5,decoder-self.0.6",
    "ragged": "decoder-self.0.0,decoder-self.0.1,decoder-self.2.2,decoder-self.2.3,decoder-self.2.4,decoder-self.2.5",
    "empty layer": "decoder-self.1.*",
}
SIZES: dict[str, Callable[[Any], Any]] = {
    "gguf": lambda checkpoint: LlamaDecoder(checkpoint).container,
    "deci-hf": lambda checkpoint: deci_sizes(checkpoint.model),
}
"""The checks of numbers of heads, before anything is written."""
KINDS = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}


def rows() -> list[list[str]]:
    """The cells of the table, row by row."""
    lines = (DOCS / "serving.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| family | export | uniform"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


@cache
def intact_model(kind: str) -> Any:
    more = {"sliding_window": None} if kind == "mistral" else {}
    return wrappers.hugging_face(decoders.decoder(kind, **more))


@cache
def smaller(kind: str, shape: str) -> tuple[Any, RemovalPlan]:
    """A model, with merged key/value heads if so planned, and the plan of its removal."""
    sites = intact_model(kind).attention_sites
    if shape == "per-layer kv":
        plan = plan_merge(sites, (4, 2, 1))
        return intact_model(kind).alter_heads(plan, "pool"), plan
    return intact_model(kind), plan_removal(sites, select_heads(REMOVED[shape], intact_model(kind).layout))


@cache
def small_model(kind: str, shape: str) -> Any:
    model, plan = smaller(kind, shape)
    return model.alter_heads(plan, "shrink")


def refusal(kind: str, export: str, shape: str) -> str:
    """Why an export does not take these heads; empty where it does."""
    try:
        if export in ENGINES.names():
            ENGINES.get(export).check(small_model(kind, shape))
            if export in SIZES:
                SIZES[export](small_model(kind, shape))
        else:
            model, plan = smaller(kind, shape)
            choose_export(export, intact_model(kind)).build(model, plan)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}-{row[1].strip('`')}")
def test_the_table_says_what_exports_say(row: list[str]) -> None:
    families, export, *cells = row
    assert len(cells) == len(SHAPES)
    for family in families.split(", "):
        for shape, cell in zip(SHAPES, cells, strict=True):
            if family in KINDS:
                reason = refusal(KINDS[family], export.strip("`"), shape)
                assert cell.startswith("with `--pad`" if reason else "run"), (family, export, shape, reason)


@pytest.mark.slow
def test_pairs_that_the_table_leaves_out_are_refused() -> None:
    table_pairs = {(family, row[1].strip("`")) for row in rows() for family in row[0].split(", ")}
    all_pairs = {(family, export) for family in KINDS for export in ("self-contained", "native", *ENGINES.names())}
    for family, export in all_pairs - table_pairs:
        assert all(refusal(KINDS[family], export, shape) for shape in SHAPES), (family, export)


# prune remove --export native: fewer heads in the classes of transformers as they stand, and layers filled up.


SPLIT = "decoder-self.0.2,decoder-self.0.3,decoder-self.1.*,decoder-self.2.0,decoder-self.2.1,decoder-self.2.5"
"""Groups that are split, and a layer that is emptied."""


def alone(folder: Path) -> Any:
    """The model opened by transformers without headscope; every weight is used."""
    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("llama", {"tie_word_embeddings": False}, "MistralForCausalLM"),
        ("llama", {"hidden_size": 96}, "LlamaForCausalLM"),
        ("qwen2", {}, "Qwen2ForCausalLM"),
        ("qwen3", {}, "Qwen3ForCausalLM"),
    ],
)
def test_equal_counts_are_plain_classes_that_generate_the_same(
    tmp_path: Path, kind: str, options: dict[str, Any], name: str
) -> None:
    """Six heads of width 16: they divide 96, but not 64 or 128."""
    path = decoders.save_decoder(tmp_path / "whole", kind, **options)
    removal = remove_heads(path, tmp_path / "small", UNIFORM, export=("native",))
    assert not (tmp_path / "small" / "modeling_headscope.py").exists()
    small: Any = alone(tmp_path / "small")
    assert type(small).__name__ == name
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (6, 3)
    intact_model: Any = open_checkpoint(str(path)).model
    ids = torch.arange(5, 41)[None]
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        with masked(intact_model, removal.removed):
            expected, text = intact_model(ids).logits, intact_model.generate(ids, **greedy)
        torch.testing.assert_close(small(ids).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        assert small.generate(ids, **greedy).tolist() == text.tolist()
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert f"class {name}" in card and "18 of 24 heads" in card


def test_layers_are_filled_up_with_heads_of_zeros(tmp_path: Path) -> None:
    path = decoders.save_decoder(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"prune rank --allocate uniform.*--pad"):
        remove_heads(path, tmp_path / "small", "decoder-self.1.*", export=("native",))
    removal = remove_heads(path, tmp_path / "small", SPLIT, pad=True, export=("native",))
    small = alone(tmp_path / "small")
    assert small.config.num_attention_heads == 6 and small.config.num_key_value_heads == 3
    assert "filled up with 7 heads of zeros, to 6 heads a layer" in removal.record["notes"]
    intact_model, ids = open_checkpoint(str(path)).model, torch.arange(5, 41)[None]
    with torch.no_grad():
        with masked(intact_model, removal.removed):
            expected = intact_model(ids).logits
        torch.testing.assert_close(small(ids).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    kept = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))["kept"]["decoder-self"]
    assert [len(heads) for heads in kept.values()] == [6, 0, 5]


def test_a_shared_position_bias_keeps_the_same_heads_everywhere(tmp_path: Path) -> None:
    build(BY_NAME["t5"]).save_pretrained(tmp_path / "whole")
    heads = "encoder-self.0.0,encoder-self.1.0,encoder-self.1.1,encoder-self.2.0,decoder-self.*.0,cross.*.0"
    removal = remove_heads(tmp_path / "whole", tmp_path / "small", heads, pad=True, export=("native",))
    small = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "small").eval()
    assert small.config.num_heads == 2
    intact_model, inputs = open_checkpoint(str(tmp_path / "whole")).model, inputs_of(BY_NAME["t5"])
    with masked(intact_model, removal.removed):
        expected = logits(intact_model, inputs)
    torch.testing.assert_close(logits(small, inputs), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_padded_layers_have_the_smallest_equal_number_of_groups_and_heads() -> None:
    sites = find_attention(decoders.decoder("llama"))
    plan = plan_removal(sites, select_heads(SPLIT, sites.layout), whole_groups=False)
    padded = padded_plan(sites, plan)
    assert set(padded.layout.values()) == {6} and {len(groups) for groups in padded.groups.values()} == {3}
    assert all(set(plan.kept[site_layer]) <= set(padded.kept[site_layer]) for site_layer in plan.kept)
    assert set(padded.removed) == set(plan.removed) - {
        head for head in plan.removed if head.head in padded.kept[head.site, head.layer]
    }
