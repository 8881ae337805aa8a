"""An analysis of another package, one file: headscope knows its option, column, functions and figure."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from headscope import assets, registry
from headscope.config import declarations
from headscope.config.declarations import Declaration, analysis_options
from headscope.engine.base import ANALYSES
from headscope.engine.overview import KINDS, catalogue
from tests.makers.decoders import byte_level, save_decoder
from tests.makers.shared import Command

PLUGIN = Path(__file__).resolve().parents[1] / "plugin"


def test_declarations_are_read_from_the_source_as_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point = EntryPoint(name="last_key", value="headscope_plugin.last_key", group="headscope.analyses")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry_point])
    monkeypatch.syspath_prepend(str(PLUGIN))
    fresh_registry: registry.Registry[type] = registry.Registry(
        "analysis", package="headscope.analyses", group="headscope.analyses"
    )
    monkeypatch.setattr(declarations, "REGISTRY", fresh_registry)
    attributes = ("Options", "measures", "pairs", "functions", "figures")
    from_source = {declaration.name: declaration for declaration in declarations.declarations(*attributes)}
    options = analysis_options()
    assert not fresh_registry.loaded_variants() and "headscope_plugin.last_key" not in sys.modules
    monkeypatch.undo()
    draw = from_source.pop("last_key").figures[0].draw
    assert not isinstance(draw, str)
    assert (draw.__module__, draw.__qualname__) == (f"headscope_plugin.last_key{declarations.WITH_STAND_INS}", "bars")
    assert options.pop("last_keys").field.metadata["maximum"] == 9
    for name, cls in ANALYSES:
        declaration = from_source.pop(name, Declaration)
        for attribute in ("measures", "pairs", "functions"):
            assert getattr(declaration, attribute) == getattr(cls, attribute), name
        assert [figure.name for figure in declaration.figures] == [figure.name for figure in cls.figures], name
    assert not from_source
    expected = analysis_options()
    assert {name: (option.type, option.field.default, option.analyses) for name, option in options.items()} == {
        name: (option.type, option.field.default, option.analyses) for name, option in expected.items()
    }


# What `headscope list` shows: all that is registered, in words, and what fits a checkpoint.


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_says_what_it_is(kind: str) -> None:
    items = catalogue(kind)
    assert items and len({item.name for item in items}) == len(items)
    assert all(len(item.summary) > 3 and not item.refusal for item in items)
    assert all(item.cost for item in items) or kind not in ("analyses", "criteria")


def test_analyses_say_what_they_need_and_cost() -> None:
    items = {item.name: item for item in catalogue("analyses")}
    assert set(items) == set(ANALYSES.names())
    assert (items["syntactic"].needs, items["confidence"].needs) == ("--parse", "")
    assert items["shapley"].cost == items["streaming"].cost == "many passes of its own"
    shared = (items["gradient"].cost, items["entropy"].cost)
    assert shared == ("one backward pass, shared", "the forward pass, shared")
    assert items["copying"].cost == "weights alone"


def test_of_a_checkpoint_it_says_what_fits(command: Command) -> None:
    status, out, _ = command("list", "analyses", assets.trained_model(), "--json")
    refusals = {item["name"]: item["refusal"] for item in json.loads(out)}
    assert status == 0 and refusals["alignment"] == "" and refusals["head_gates"]
    assert "many passes of" in command("list", "analyses")[1]


def test_alignment_of_a_decoder_says_that_it_needs_a_template(tmp_path: Path, command: Command) -> None:
    decoder = str(save_decoder(tmp_path / "decoder", tokenizer=byte_level()))
    for line in (("show", decoder), ("list", "analyses", decoder), ("list", "analyses", "alignment")):
        assert "--template" in command(*line)[1]
    assert "--template" not in command("show", assets.trained_model())[1]
