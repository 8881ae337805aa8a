"""`headscope plot`: what is written where, what is printed, and what is refused."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headscope.cli.plot import app
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, OutputError
from headscope.formats.native import NATIVE
from headscope.report.figures.layers import alpha_matrices
from headscope.report.fork import checkpoint_alphas
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from tests.makers.runs import make_run
from tests.makers.shared import SHIPPED
from tests.oracles import mhr, native

pytestmark = pytest.mark.slow

LAYOUT = {"encoder-self": [3, 2], "cross": [2, 2]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "bert", LAYOUT, extra=("lrp",))


def plot(*words: object) -> str:
    """Standard output; an error of ours is raised as the main command would see it."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_options_of_heads_and_similarity(run_dir: Path) -> None:
    out = run_dir.parent / "x.svg"
    plot("heads", run_dir, "--measure", "lrp", "--measure", "distance", "--sort", "--out", out)
    content = out.read_text(encoding="utf-8")
    assert "LRP relevance" in content and "within its layer" in content
    assert "mean distance of the argmax" in content
    assert ">rank, highest first<" in content
    plot("similarity", run_dir, "--measure", "cka", "--out", out, "--force")
    assert "linear CKA of contexts" in out.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'lpr'.*'lrp'"):
        plot("heads", run_dir, "--measure", "lpr", "--out", out, "--force")
    with pytest.raises(ConfigError, match="'js'"):
        plot("similarity", run_dir, "--measure", "js", "--out", out, "--force")


def test_pickles_of_the_mhr_fork(run_dir: Path) -> None:
    arrays = {"c": np.array([[0.5, 0.75, 2]]), "s": np.array([[0.0, 3, 3, 0, 1]]), "a": np.eye(2)}
    for command, (name, array) in zip(("heads", "similarity", "alphas"), arrays.items(), strict=True):
        path, out = run_dir.parent / f"{name}.pkl", run_dir.parent / f"{name}.svg"
        path.write_bytes(pickle.dumps({"encoder": [{"self_attn": array}], "decoder": []}, protocol=3))
        plot(command, path, "--out", out)
        assert f"{name}.pkl" in out.read_text(encoding="utf-8")
    with pytest.raises(HeadscopeError, match=r"a\.pkl"):
        plot("heads", run_dir.parent / "a.pkl", "--out", run_dir.parent / "x.svg")
    with pytest.raises(HeadscopeError, match=r"alphas\.csv.*--also alphas"):
        plot("alphas", run_dir, "--out", run_dir.parent / "x.svg")


def test_alphas_of_a_checkpoint(tmp_path: Path) -> None:
    theirs, ours = SHIPPED / "mhr/alpha/checkpoint_best.pt", tmp_path / "train" / "best"
    NATIVE.save(mhr.small(), ours)
    for path in (theirs, ours):
        plot("alphas", path, "--out", tmp_path / "x.svg", "--force")
        content = (tmp_path / "x.svg").read_text(encoding="utf-8")
        assert path.name in content and "ckpt:" in content and "cross · layer 1" in content
    written = mhr.generated(SHIPPED, "alphas_eval")
    matrices = alpha_matrices(checkpoint_alphas(theirs))
    assert len(matrices) == 9
    stacks = {"encoder-self": ("encoder", "self_attn"), "decoder-self": ("decoder", "self_attn")}
    stacks |= {"cross": ("decoder", "enc_attn")}
    for (site, layer), matrix in matrices.items():
        stack, name = stacks[site]
        np.testing.assert_array_equal(matrix, written[stack][layer][name])
    plain = tmp_path / "plain"
    with pytest.raises(RunError, match=r"plain.*native"):
        its = mhr.small()
        its.model = native.model()
        NATIVE.save(its, plain)
        plot("alphas", plain, "--out", tmp_path / "y.svg")
    with pytest.raises(RunError, match=r"run.json.*train/best"):
        plot("alphas", tmp_path / "train", "--out", tmp_path / "y.svg")


@pytest.mark.parametrize("command", ["heads", "similarity", "functions", "compare", "attention"])
def test_a_checkpoint_in_the_place_of_a_run(command: str, tmp_path: Path) -> None:
    path = SHIPPED / "mhr/alpha/checkpoint_best.pt"
    words = {"compare": (path,), "attention": ("--heads", "cross.0.0", "--index", 0)}.get(command, ())
    with pytest.raises(RunError, match=r"fairseq.*headscope analyze"):
        plot(command, path, *words, "--out", tmp_path / "x.svg")
    path = tmp_path / "broken.pt"
    path.write_bytes((SHIPPED / "mhr/alpha/checkpoint_best.pt").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"broken\.pt"):
        plot("alphas", path, "--out", tmp_path / "x.svg")


def test_several_runs_write_a_figure_each(run_dir: Path) -> None:
    other = make_run(run_dir.parent / "gpt", LAYOUT, seed=3)
    out = run_dir.parent / "figures"
    written = json.loads(plot("functions", run_dir, other, "--out", out, "--dpi", 40, "--json"))["written"]
    assert written == [
        {"figure": "functions", "runs": ["bert"], "path": str(out / "bert-functions.png")},
        {"figure": "functions", "runs": ["gpt"], "path": str(out / "gpt-functions.png")},
    ]
    assert all(Path(entry["path"]).is_file() for entry in written)
    assert plot("functions", run_dir, other, "--out", out / "{run}.svg").count("\n") == 1
    assert (out / "gpt.svg").is_file()
    with pytest.raises(OutputError, match=r"bert-functions\.png"):
        plot("functions", run_dir, other, "--out", out)


@pytest.mark.slow
def test_compare(run_dir: Path) -> None:
    other = make_run(run_dir.parent / "gpt", LAYOUT, seed=3)
    out = run_dir.parent / "x.svg"
    lines = plot("compare", run_dir, other, "--measure", "distance", "--out", out).splitlines()
    said = Study.open(run_dir).compare(Study.open(other), measure="distance").answers()
    assert lines[0] == said[0].sentence and lines[1].startswith(said[1].question) and len(lines) <= 25
    assert (
        said[1].sentence.startswith("9 of 9 heads, by mean distance")
        and "distance" in said[2].question
        and lines[-1] == f"wrote {out}"
    )
    answers = json.loads(plot("compare", run_dir, other, "--out", out, "--force", "--json"))["answers"]
    assert answers[0]["sentence"] == said[0].sentence
    assert "B − A · cross" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "cross.0.0"], "--sentence.*--index"),
        (["--heads", "cross.0.0", "--sentence", "a", "--index", "1"], "--sentence.*--index"),
        (
            ["--heads", "cross.0.0,encoder-self.0.0", "--index", "1"],
            "cross.*encoder-self",
        ),
        (["--heads", "cross.9.0", "--index", "1"], "'cross.9.0'"),
        (["--heads", ",", "--index", "1"], "heads"),
    ],
)
def test_attention_refuses(run_dir: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plot("attention", run_dir, "--out", run_dir.parent / "x.png", *words)


def test_size_and_looks(run_dir: Path) -> None:
    """Inches as asked for, in either style; no title and no signature where they are not wanted."""
    out = run_dir.parent / "x.svg"
    looks = ("--width", 4, "--no-title", "--range", "0,0.5", "--force")
    for style, letters in (("paper", 6.2), ("screen", 8.4)):
        plot("heads", run_dir, "--measure", "confidence", "--style", style, *looks, "--out", out)
        content = out.read_text(encoding="utf-8")
        assert 'width="288pt"' in content and f"{letters}px" in content
        assert "ckpt:" not in content.partition("</metadata>")[2]
        assert "Attention heads" not in content and "confidence · cross" in content
    plot("functions", run_dir, "--signature", "--out", out, "--force")
    assert "ckpt:" in out.read_text(encoding="utf-8").partition("</metadata>")[2]
    with pytest.raises(ConfigError, match=r"--style is 'poster'.*'screen' or 'paper'"):
        plot("heads", run_dir, "--style", "poster", "--out", out, "--force")
    with pytest.raises(ConfigError, match=r"--width 2.*--style paper"):
        words = ("--ranking", "lrp", "--ranking", "confidence")
        plot("rankings", run_dir, *words, "--width", 2, "--out", out, "--force")
