"""One number followed from the command to where it is made: through few folders, and hardly ever back up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from headscope.analyses.confidence import Confidence
from headscope.assets import captions, trained
from headscope.config import AnalyzeConfig
from headscope.engine.study import run_analysis
from tests.makers.modules import MODULES, RANK, layer

NAMES = {path.resolve(): name for name, path in MODULES.items()}
MOST = 2


def stack() -> list[str]:
    """Modules of headscope on the way here, the outermost first, without repetitions."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = NAMES.get(Path(frame.f_code.co_filename).resolve())
        if name is not None and (not names or names[-1] != name):
            names.append(name)
        frame = frame.f_back
    return names[::-1]


def climbs(names: list[str]) -> int:
    """How often a module calls one of a higher layer."""
    ranks = [RANK[layer(name)] for name in names if name not in ("headscope", "headscope.__main__")]
    return sum(after > before for before, after in pairwise(ranks))


@pytest.mark.parametrize("method", ["observe", "report"])
def test_a_confidence_is_reached_without_climbing(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[list[str]] = []
    made: Callable[..., Any] = getattr(Confidence, method)

    def noting(self: Confidence, *arguments: Any) -> Any:
        paths.append(stack())
        return made(self, *arguments)

    monkeypatch.setattr(Confidence, method, noting)
    config = AnalyzeConfig(
        checkpoint=str(trained()), source=captions("en"), out=tmp_path / "run", max_sentences=2, figures=False
    )
    run_analysis(config)
    assert paths and all("headscope.engine.runner" in path for path in paths)
    assert max(map(climbs, paths)) <= MOST
