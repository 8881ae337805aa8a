"""What every engine declares, and one of another package (tests/plugin): in help, errors and both commands."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from headscope.config import declarations
from headscope.config.declarations import declared_engines
from headscope.errors import ConfigError
from headscope.export.base import ENGINES, choose_export
from headscope.export.deci_hf import sizes as deci_sizes
from headscope.export.gguf_layers import LlamaDecoder
from headscope.formats.exports import MODEL_FILES
from headscope.heads import select_heads
from headscope.model.removal_plan import RemovalPlan, plan_removal
from headscope.pruning.removal.merge_plan import plan_merge
from headscope.registry import Registry
from scripts.documented import DOCS
from tests.makers import decoders, wrappers


def test_declarations_are_read_from_the_source_as_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    unread: Registry[Any] = Registry(ENGINES.kind, package=ENGINES.package, group=ENGINES.group)
    monkeypatch.setattr(declarations, "ENGINES", unread)
    read = {each.name: each for each in declared_engines()}
    assert not unread.loaded_variants() and sorted(read) == ENGINES.names()
    for name, engine in ENGINES:
        attributes = ("name", "summary", "endings", "allocation")
        assert [getattr(read[name], own) for own in attributes] == [getattr(engine, own) for own in attributes]
        assert {f"*.{ending}" for ending in engine.endings} <= set(MODEL_FILES)
        assert engine.install.startswith("headscope[") and engine.__doc__


# The table of docs/serving.md, family × export × kind of removal, against what exports and engines say themselves.


SHAPES = ("uniform", "per-group", "ragged", "per-layer kv", "empty layer")
REMOVED = {
    "uniform": "decoder-self.0.0,decoder-self.0.1,decoder-self.1.4,decoder-self.1.5,decoder-self.2.2,decoder-self.2.3",
    "per-group": "decoder-self.0.0,decoder-self.0.3,decoder-self.0.5,decoder-self.0.6",
    "ragged": "decoder-self.0.0,decoder-self.0.1,decoder-self.2.2,decoder-self.2.3,decoder-self.2.4,decoder-self.2.5",
    "empty layer": "decoder-self.1.*",
}
SIZES: dict[str, Callable[[Any], Any]] = {
    "gguf": lambda checkpoint: LlamaDecoder(checkpoint).container,
    "deci-hf": lambda checkpoint: deci_sizes(checkpoint.model),
}
"""What refuses numbers of heads, before anything is written."""
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
def whole(kind: str) -> Any:
    more = {"sliding_window": None} if kind == "mistral" else {}
    return wrappers.hugging_face(decoders.decoder(kind, **more))


@cache
def smaller(kind: str, shape: str) -> tuple[Any, RemovalPlan]:
    """A model to take heads out of (with averaged ones in place), and which."""
    sites = whole(kind).attention_sites
    if shape == "per-layer kv":
        plan = plan_merge(sites, (4, 2, 1))
        return whole(kind).alter_heads(plan, "pool"), plan
    return whole(kind), plan_removal(sites, select_heads(REMOVED[shape], whole(kind).layout))


@cache
def narrowed(kind: str, shape: str) -> Any:
    model, plan = smaller(kind, shape)
    return model.alter_heads(plan, "shrink")


def refusal(kind: str, export: str, shape: str) -> str:
    """Why an export does not take these heads; empty where it does."""
    try:
        if export in ENGINES.names():
            ENGINES.get(export).check(narrowed(kind, shape))
            if export in SIZES:
                SIZES[export](narrowed(kind, shape))
        else:
            model, plan = smaller(kind, shape)
            choose_export(export, whole(kind)).build(model, plan)
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
                why = refusal(KINDS[family], export.strip("`"), shape)
                assert cell.startswith("with `--pad`" if why else "run"), (family, export, shape, why)


@pytest.mark.slow
def test_pairs_that_the_table_leaves_out_are_refused() -> None:
    listed = {(family, row[1].strip("`")) for row in rows() for family in row[0].split(", ")}
    every = {(family, export) for family in KINDS for export in ("self-contained", "native", *ENGINES.names())}
    for family, export in every - listed:
        assert all(refusal(KINDS[family], export, shape) for shape in SHAPES), (family, export)
