"""What `headscope list` shows: all that is registered, in words, and what fits a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headscope import assets
from headscope.engine.base import ANALYSES
from headscope.engine.overview import KINDS, catalogue
from tests.makers.decoders import byte_level, saved


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
    costs = {name: items[name].cost for name in ("shapley", "gradient", "streaming", "copying", "entropy")}
    assert costs == {
        "shapley": "many passes of its own",
        "gradient": "one backward pass, shared",
        "streaming": "many passes of its own",
        "copying": "weights alone",
        "entropy": "the forward pass, shared",
    }


def test_of_a_checkpoint_it_says_what_fits(command: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = command("list", "analyses", assets.trained(), "--json")
    refusals = {item["name"]: item["refusal"] for item in json.loads(out)}
    assert status == 0 and refusals["alignment"] == "" and refusals["head_gates"]
    assert "many passes of" in command("list", "analyses")[1]


def test_alignment_of_a_decoder_says_that_it_needs_a_template(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    decoder = str(saved(tmp_path / "decoder", tokenizer=byte_level()))
    for line in (("show", decoder), ("list", "analyses", decoder), ("list", "analyses", "alignment")):
        assert "--template" in command(*line)[1]
    assert "--template" not in command("show", assets.trained())[1]
