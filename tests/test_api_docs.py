"""The pages and scripts that show the API run as they stand, in this process and in an empty folder."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from tests.docs.newcomer import narrow_bert

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(kind: str, folder: Path, count: int) -> Path:
    """The first captions in a language, as a file."""
    folder.mkdir(exist_ok=True)
    lines = hs.assets.captions(kind).read_text(encoding="utf-8").splitlines()[:count]
    (folder / f"text.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / f"text.{kind}"


def test_every_block_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a BERT that is narrow and few captions; the examples have the real one."""
    bert = narrow_bert(tmp_path / "bert", hs.assets.demo_checkpoint())
    few = {kind: written(kind, tmp_path / "captions", 24) for kind in ("en", "de")}
    monkeypatch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
    monkeypatch.setattr(hs.assets, "captions", few.__getitem__)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) > 8
    assert len(names["best"]) == 3 and names["best"].syntactic_margin.notna().all()
    assert len(names["small"].heads) == 48 and names["small"].verified.difference < 1e-5
    assert names["heads"]["cross.1.5"]["weights"].ndim == 3
    assert len(names["pruned"].heads) == 60 and len(names["each"]) == 9
    printed = capsys.readouterr().out
    assert "unknown analysis 'confidance'; did you mean 'confidence'?" in printed
    files = {"bert", "captions", "heads.pdf", "run", "similarity.svg", "small", "converted", "gates", "trained"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_the_page_names_everything_that_there_is() -> None:
    for name in set(hs.__all__) - {"__version__"}:
        assert f"hs.{name}" in PAGE or f"`{name}`" in PAGE, name
    for cls in (hs.Model, hs.Study, hs.Ranking, hs.SmallModel):
        for name in vars(cls):
            assert name.startswith("_") or name in PAGE, f"{cls.__name__}.{name}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, list[str]] = {}
    for kind in ("en", "de"):
        written(kind, tmp_path, 8)
    given["remove_heads.py"] = [hs.assets.trained(), "text.en", "text.de"]
    monkeypatch.setattr(sys, "argv", [str(path), *given.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    expected = {
        "analyse_bert.py": ["nsubj", "m:confidence"],
        "remove_heads.py": ["all 72 heads: perplexity", "24 heads fewer by random"],
        "make_classifier.py": ["accuracy 1.000, macro-F1 1.000 on 240 captions"],
        "gate_heads.py": ["looks at", "without encoder-self.", "tensor(["],
    }[path.name]
    assert all(part in printed for part in expected), printed


def test_examples_and_page_use_the_public_api_alone() -> None:
    for text in (PAGE, *(path.read_text(encoding="utf-8") for path in EXAMPLES)):
        assert "import headscope as hs" in text and not re.search(r"^(from|import) headscope(?! as hs$)", text, re.M)
