"""`--time-engines`: engines run files of the intact and of the pruned model, both as long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.api import removal
from headscope.errors import ConfigError
from headscope.formats.base import FORMATS
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.removal import remove
from headscope.pruning.removal.remove import run_removal
from tests.makers import decoders
from tests.makers.translators import trained_here

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the models themselves are tested elsewhere."""
    for module in (remove, removal):
        monkeypatch.setattr(module, "timings", lambda *models, batch, rounds: [])


HALF = "decoder-self.*.0,decoder-self.*.1,decoder-self.*.2,decoder-self.*.3"


def test_llama_cpp_writes_as_many_tokens_with_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine without a program of its own is left out, and it is said."""
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    from headscope.cli.prune_remove import show_removed

    path = decoders.saved(tmp_path / "whole", "qwen3", tie_word_embeddings=False)
    quick: dict[str, Any] = {"export": ("gguf", "laguna"), "rounds": 1, "max_sentences": 2, "batch": 1}
    found = run_removal(
        RemoveConfig(checkpoint=str(path), out=tmp_path / "small", heads=HALF, time_engines=True, **quick)
    )
    (timing,) = found.timings
    assert (
        timing.what.startswith("llama.cpp")
        and timing.tokens == 32
        and timing.sentences == 1
        and timing.before > 0 < timing.after
    )
    assert timing.least <= timing.speedup <= timing.most
    (note,) = [note for note in found.notes if "not timed" in note]
    assert note == "laguna was not timed: --export laguna has no program of its own to time"
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    (kept,) = record["times"]
    assert kept["tokens"] == 32 and kept["at_most"] > 1
    show_removed(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert "32 written" in shown and note in shown


def test_ctranslate2_is_timed_from_python(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    FORMATS.get("native").save(trained_here(), tmp_path / "whole")
    whole = hs.load(str(tmp_path / "whole"), device="cpu")
    small = whole.remove("encoder-self.*.0,decoder-self.*.0,cross.*.0", max_sentences=2)
    (timing,) = small.times(rounds=1, batch=1, engines="ctranslate2")
    assert timing.what.startswith("CTranslate2") and timing.before > 0 < timing.after
    assert timing.tokens == timing.sentences * 32
    with pytest.raises(ConfigError, match="'latin'"):
        small.times(rounds=1, batch=1, engines="latin")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--time-engines.*--export.*gguf"),
        ({"export": ("native",)}, "--export"),
        ({"export": ("onnx",), "rounds": 0}, "--rounds.*1.*0"),
    ],
)
def test_what_cannot_be_timed_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoveConfig(checkpoint="any", out=tmp_path / "out", heads="cross.0.0", time_engines=True, **options)
