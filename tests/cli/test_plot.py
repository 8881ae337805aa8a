"""`headscope plot`: what is written where, what is printed, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headscope.cli.main import app
from headscope.errors import CheckpointError, HeadscopeError
from headscope.formats.native import NATIVE
from headscope.report.figures.layers import alpha_matrices
from headscope.report.fork import checkpoint_alphas
from headscope.results.study_tables import RunError
from tests.makers.runs import make_run
from tests.makers.shared import SHIPPED_FOLDER
from tests.oracles import mhr, native

pytestmark = pytest.mark.slow

LAYOUT = {"encoder-self": [3, 2], "cross": [2, 2]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "bert", LAYOUT, extra=("lrp",))


def plot(*words: object) -> str:
    """Standard output; an error of ours is raised as the main command would see it."""
    result = CliRunner().invoke(app, ["plot", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


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
    theirs, ours = SHIPPED_FOLDER / "mhr/alpha/checkpoint_best.pt", tmp_path / "train" / "best"
    NATIVE.save(mhr.small(), ours)
    for path in (theirs, ours):
        plot("alphas", path, "--out", tmp_path / "x.svg", "--force")
        content = (tmp_path / "x.svg").read_text(encoding="utf-8")
        assert path.name in content and "ckpt:" in content and "cross · layer 1" in content
    with pytest.raises(HeadscopeError, match=r"x\.svg exists;.*--force to replace it"):
        plot("alphas", ours, "--out", tmp_path / "x.svg")
    alphas = mhr.load_pickle(SHIPPED_FOLDER, "alphas_eval")
    matrices = alpha_matrices(checkpoint_alphas(theirs))
    assert len(matrices) == 9
    stacks = {"encoder-self": ("encoder", "self_attn"), "decoder-self": ("decoder", "self_attn")}
    stacks |= {"cross": ("decoder", "enc_attn")}
    for (site, layer), matrix in matrices.items():
        stack, name = stacks[site]
        np.testing.assert_array_equal(matrix, alphas[stack][layer][name])
    plain = tmp_path / "plain"
    with pytest.raises(RunError, match=r"plain.*native"):
        checkpoint = mhr.small()
        checkpoint.model = native.model()
        NATIVE.save(checkpoint, plain)
        plot("alphas", plain, "--out", tmp_path / "y.svg")
    with pytest.raises(RunError, match=r"run.json.*train/best"):
        plot("alphas", tmp_path / "train", "--out", tmp_path / "y.svg")


@pytest.mark.parametrize("command", ["heads", "similarity", "functions", "compare", "attention"])
def test_a_checkpoint_in_the_place_of_a_run(command: str, tmp_path: Path) -> None:
    path = SHIPPED_FOLDER / "mhr/alpha/checkpoint_best.pt"
    words = {"compare": (path,), "attention": ("--heads", "cross.0.0", "--index", 0)}.get(command, ())
    with pytest.raises(RunError, match=r"fairseq.*headscope analyze"):
        plot(command, path, *words, "--out", tmp_path / "x.svg")
    path = tmp_path / "broken.pt"
    path.write_bytes((SHIPPED_FOLDER / "mhr/alpha/checkpoint_best.pt").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"broken\.pt"):
        plot("alphas", path, "--out", tmp_path / "x.svg")
