"""The pages and scripts that show the API run as they stand, in this process and in an empty folder."""

import re
import runpy
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import headscope as hs
from headscope.config.option import checked_value
from headscope.pruning.options.choice import LearnConfig, RankConfig, SweepConfig
from headscope.pruning.options.removal import ShrinkConfig
from tests.docs.newcomer import narrow_bert
from tests.makers.figures import draw_nothing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN = [path for path in EXAMPLES if path.name not in ("make_files.py", "make_llama.py", "make_whisper.py")]
"""Run here; what tests/docs/test_commands.py types is run there."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_captions(kind: str, folder: Path, count: int) -> Path:
    """The first captions in a language, as a file."""
    folder.mkdir(exist_ok=True)
    lines = hs.assets.captions(kind).read_text(encoding="utf-8").splitlines()[:count]
    (folder / f"text.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / f"text.{kind}"


@pytest.mark.filterwarnings("default:without validation text:UserWarning")
def test_every_block_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a BERT that is narrow and few captions; the examples have the real one."""
    bert = narrow_bert(tmp_path / "bert", hs.assets.demo_checkpoint(), layers=4)
    captions = {kind: write_captions(kind, tmp_path / "captions", 12) for kind in ("en", "de")}
    monkeypatch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
    monkeypatch.setattr(hs.assets, "captions", captions.__getitem__)
    draw_nothing(monkeypatch)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) > 8
    assert len(names["best"]) == 3 and names["best"].syntactic_margin.notna().all()
    assert len(names["small"].heads) == 48 and names["small"].verified["difference"] < 1e-5
    assert names["heads"]["cross.1.5"]["weights"].ndim == 3
    assert len(names["pruned"].heads) == 60 and len(names["each"]) == 9
    output = capsys.readouterr().out
    assert "unknown analysis 'confidance'; did you mean 'confidence'" in output
    assert {path.name for path in tmp_path.iterdir()} == {"bert", "captions", "api"}
    files = {"heads.pdf", "run", "similarity.svg", "small", "converted", "gates", "trained", "page.html"}
    assert {path.name for path in (tmp_path / "api").iterdir()} == files


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_an_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, list[str]] = {}
    for kind in ("en", "de"):
        write_captions(kind, tmp_path, 4)
    arguments["remove_heads.py"] = [hs.assets.trained_model(), "text.en", "text.de"]
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    expected = {
        "analyse_bert.py": ["nsubj", "m:confidence"],
        "remove_heads.py": ["all 72 heads: perplexity", "24 heads fewer by random"],
        "make_classifier.py": ["accuracy 0.90", "on 160 lines"],
        "gate_heads.py": ["looks at", "without encoder-self.", "tensor(["],
    }[path.name]
    assert all(part in output for part in expected), output


# Everything that the command line does.


def test_options_of_methods_are_those_of_commands() -> None:
    """A misspelt one is refused with the nearest, by the class that the command is made of."""
    model = hs.load(hs.assets.trained_model(), device="cpu")
    for call in (
        lambda: model.analyze(["a"], bootstap=3),
        lambda: model.rank(by="magnitude", stepz=3),
        lambda: model.remove("cross.0.0", pda=True),
        lambda: model.shrink(["a"], keeep=3),
        lambda: model.evaluate(["a"], bootstap=3),
        lambda: model.translate(["a"], baem=3),
    ):
        with pytest.raises(hs.HeadscopeError, match=r"unknown option of \w+ '\w+'; did you mean"):
            call()


@pytest.mark.parametrize("config", [LearnConfig, SweepConfig, RankConfig, ShrinkConfig])
def test_what_takes_options_as_the_commands_do_takes_all(config: type[Any]) -> None:
    """`hs.prune` takes the options of a config by their names: every one has a type that Python can give."""
    hints = get_type_hints(config)
    for entry in fields(config):
        if entry.default is not MISSING and entry.name != "method":
            value = checked_value(entry, hints[entry.name], entry.default)
            assert value == entry.default and type(value) is type(entry.default), entry.name
