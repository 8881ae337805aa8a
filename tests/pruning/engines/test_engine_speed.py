"""`--time-engines`: engines run files of the intact and of the pruned model, both as long."""

from __future__ import annotations

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

    path = decoders.saved(tmp_path / "whole", "qwen3", tie_word_embeddings=False)
    quick: dict[str, Any] = {"export": ("gguf", "laguna"), "rounds": 1, "max_sentences": 2, "batch": 1}
    found = run_removal(
        RemoveConfig(checkpoint=str(path), out=tmp_path / "small", heads=HALF, time_engines=True, **quick)
    )
    (timing,) = found.record["times"]
    assert timing["what"].startswith("llama.cpp") and (timing["tokens"], timing["sentences"]) == (32, 1)
    assert timing["before"] > 0 < timing["after"] and timing["least"] <= timing["speedup"] <= timing["most"]
    assert timing["at_most"] > 1
    (note,) = [note for note in found.record["notes"] if "not timed" in note]
    assert note == "warning: laguna was not timed: --export laguna has no program of its own to time"
    said = [answer for answer in found.answers() if not answer.detail]
    assert any(note == answer.sentence for answer in said)
    assert any(answer.table and answer.table.rows[-1][0].endswith("32 written") for answer in said)


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
