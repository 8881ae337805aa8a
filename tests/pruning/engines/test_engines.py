"""What every engine declares, and one of another package (tests/plugin): in help, errors and both commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.config import engines
from headscope.config.engines import declared_engines
from headscope.formats.exports import MODEL_FILES
from headscope.formats.native import NATIVE
from headscope.pruning.engines.base import ENGINES, split_export
from headscope.registry import Registry
from tests.oracles import checkpoints
from tests.oracles.plugin import registered


@pytest.fixture
def numbers() -> Iterator[None]:
    with registered(ENGINES, "numbers"):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Any:
    NATIVE.save(checkpoints.small(), tmp_path / "whole")
    return hs.load(str(tmp_path / "whole"), device="cpu")


def test_declarations_are_read_from_the_source_as_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    unread: Registry[Any] = Registry("export", package=ENGINES.package, group=ENGINES.group)
    monkeypatch.setattr(engines, "ENGINES", unread)
    read = {each.name: each for each in declared_engines()}
    assert not unread.registered() and sorted(read) == ENGINES.names()
    for name, engine in ENGINES:
        assert vars(read[name]) == {attribute: getattr(engine, attribute) for attribute in vars(read[name])}
        assert {f"*.{ending}" for ending in engine.endings} <= set(MODEL_FILES)
        assert engine.install.startswith("headscope[") and engine.__doc__


def test_an_engine_that_is_named_twice_writes_once() -> None:
    """The second folder of CTranslate2 met the first: "cannot write OUT: File exists"."""
    assert split_export(["native", "ctranslate2", "native", "ctranslate2"]) == ("native", ("ctranslate2",))


@pytest.mark.slow
@pytest.mark.usefixtures("numbers")
def test_an_engine_of_another_package_writes_and_proves(model: Any, tmp_path: Path) -> None:
    done = model.convert(tmp_path / "engine", to="numbers", quantize="float16")
    assert 0 < done.difference < 5e-2 and (tmp_path / "engine" / "model.numbers").stat().st_size > 0
    removed = model.remove("cross.0.1").save(tmp_path / "small", export="numbers")
    assert removed.engines[0].difference < 1e-6
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["engines"][0]["export"] == "numbers" and "model.numbers" in record["files"]
    assert "numpy.fromfile" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
