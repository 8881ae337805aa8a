"""The notebook runs from its first cell to its last, in a kernel of its own, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.makers.modules import ROOT

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the libraries of notebooks are not ours
def test_the_notebook_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is committed without what it shows
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    texts = [data["text/plain"] for data in results]
    assert "encoder-self 6 × 12" in texts[0] and "text/html" in results[1]
    assert any("image/png" in data for data in results)
    assert float(texts[-1]) > 0.95
    assert not any(tmp_path.iterdir())


def test_the_notebook_uses_the_public_api_alone() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.findall(r"(?:from|import) headscope[^\\]*", text) == ["import headscope as hs"]
