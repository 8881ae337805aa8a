"""The notebook runs from its first cell to its last, as IPython runs cells, and shows what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from tests.docs.newcomer import narrow_bert
from tests.makers.modules import ROOT

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first lines of the captions, with a BERT that is narrow."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.pylabtools import select_figure_formats
    from traitlets.config import Config

    few = tmp_path_factory.mktemp("text") / "captions.en"
    few.write_text("\n".join(hs.assets.captions("en").read_text(encoding="utf-8").splitlines()[:24]), encoding="utf-8")
    bert = narrow_bert(few.parent / "bert", hs.assets.demo_checkpoint())
    monkeypatch.setattr(hs.assets, "captions", lambda language: few)
    monkeypatch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # it is committed without what it shows
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    shell: Any = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))  # type: ignore[no-untyped-call]
    select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
    results: list[dict[str, Any]] = []
    for cell in cells:
        if cell["cell_type"] == "code":
            done = shell.run_cell("".join(cell["source"]))
            done.raise_error()
            results += [] if done.result is None else [shell.display_formatter.format(done.result)[0]]
    texts = [data["text/plain"] for data in results]
    assert "encoder-self 6 × 12" in texts[0] and "text/html" in results[1]
    assert any("image/png" in data for data in results)
    assert float(texts[-1]) > 0.95
    assert [path.name for path in tmp_path.iterdir()] in ([], [".ipython"])


def test_the_notebook_uses_the_public_api_alone() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.findall(r"(?:from|import) headscope[^\\]*", text) == ["import headscope as hs"]
