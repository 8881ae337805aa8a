"""Files of the MHR fork: written as the fork writes them, read without running anything, drawn."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import mhr

from headscope.config import AnalyzeConfig
from headscope.data import Corpus, Sentence
from headscope.errors import ConfigError, HeadscopeError
from headscope.formats.native import NATIVE
from headscope.mhr_pickles import BATCH, mhr_pickles
from headscope.plain_pickle import array_of, read_pickle, rows_of
from headscope.report.alphas import alpha_matrices
from headscope.report.fork import alphas_run, confidence_run, similarity_run
from headscope.report.run import load_run
from headscope.results import write_pickle
from headscope.runs import run_analysis

FILES = {
    "confs_eval/checkpoint_best-base": "checkpoint_best-base",
    "confs_eval/checkpoint_best-advanced": "checkpoint_best-advanced",
    "cosine_similarities_eval/checkpoint_best": "cosine_similarities_eval",
    "l2_pairwise_distances_eval/checkpoint_best": "l2_pairwise_distances_eval",
    "alphas_eval/checkpoint_best": "alphas_eval",
}


def corpus(count: int = 41) -> Corpus:
    luck = np.random.default_rng(3)

    def text(words: int) -> str:
        return " ".join(f"w{n}" for n in luck.integers(4, 19, size=words))

    lines = [Sentence(n, text(1 + n % 7), text(1 + n % 5), None) for n in range(count)]
    return Corpus("made", count, "0" * 40, lambda: iter(lines), True, False)


def modules(nested: Any) -> dict[str, Any]:
    return {
        f"{stack}.{number}.{name}": value
        for stack in ("encoder", "decoder")
        for number, layer in enumerate(nested[stack])
        for name, value in layer.items()
    }


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Type, shape and every number; sentences of a batch in any order, which torch's sort decides."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    for mine, other in zip(ours, theirs, strict=True):
        if ours.dtype == object:
            assert mine.dtype == other.dtype == np.float64 and mine[-1] == other[-1]
            mine, other = (vector[:-1].reshape(int(vector[-1]), 8, 8) for vector in (mine, other))
            mine = mine[[int(np.abs(mine - each).max(axis=(1, 2)).argmin()) for each in other]]
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_the_fork_writes_the_same(shared: Path) -> None:
    found = mhr_pickles(*mhr.theirs(shared), rows="generate", limit=1024)
    assert set(found) == {f"mhr/{name}.pkl" for name in FILES}
    for name, theirs in FILES.items():
        ours, reference = found[f"mhr/{name}.pkl"], mhr.generated(shared, theirs)
        assert list(ours) == list(reference) and modules(ours).keys() == modules(reference).keys()
        for module, value in modules(reference).items():
            same(modules(ours)[module], value)


def test_one_row_is_the_mean_of_sentences_alone(shared: Path) -> None:
    found = mhr_pickles(*mhr.theirs(shared), limit=1024)
    reference = np.load(shared / "oracles" / "mhr" / "alpha" / "oracle" / "tf_stats.npz")
    kinds = {"base": "conf_base", "advanced": "conf_advanced", "cosine": "cos", "l2": "l2"}
    for (name, nested), kind in zip(found.items(), kinds.values(), strict=False):
        for module, rows in modules(nested).items():
            assert rows.dtype == np.float64 and len(rows) == 1 and rows[0, -1] == (200 if "conf" in name else 1)
            expected = reference[f"{kind}/{module}"].mean(axis=0)
            np.testing.assert_allclose(rows[0, :-1], expected.ravel(), atol=1e-5)


@pytest.mark.parametrize("rows", ["corpus", "batch", "generate"])
def test_shapes_and_types_with_layers_of_any_size(rows: Any) -> None:
    its, texts = mhr.small(), corpus()
    found = mhr_pickles(its, texts, rows=rows, limit=512, tokens=37)
    layout = {"encoder.0.self_attn": 3, "encoder.1.self_attn": 2, "decoder.0.self_attn": 2, "decoder.2.self_attn": 3}
    layout |= {"decoder.0.enc_attn": 3, "decoder.1.enc_attn": 2, "decoder.2.enc_attn": 1}
    batches = 1 if rows == "corpus" else -(-41 // BATCH)
    for name in ("base", "advanced"):
        its_modules = modules(found[f"mhr/confs_eval/small-{name}.pkl"])
        assert {module: array.shape for module, array in its_modules.items()} == {
            module: (batches, heads + 1) for module, heads in layout.items()
        }
        sizes = {tuple(array[:, -1]) for module, array in its_modules.items() if "encoder" in module}
        assert sizes == {(41.0,) if rows == "corpus" else (32.0, 9.0)}
    for module, array in modules(found["mhr/l2_pairwise_distances_eval/small.pkl"]).items():
        for vector in array:
            assert len(vector) == int(vector[-1]) * layout[module] ** 2 + 1
    assert all(a.dtype == np.float32 for a in modules(found["mhr/alphas_eval/small.pkl"]).values())
    assert not its.model.encoder.embeddings._forward_hooks


def test_batches_do_not_matter_to_the_one_row() -> None:
    wide, narrow = (mhr_pickles(mhr.small(), corpus(), limit=512, tokens=tokens) for tokens in (1, 10**6))
    for name, nested in wide.items():
        for module, array in modules(nested).items():
            np.testing.assert_allclose(array, modules(narrow[name])[module], atol=1e-5)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--mhr-rows 'all' is not known; choose corpus, batch or generate"):
        AnalyzeConfig("x", Path("y"), source=Path("z"), mhr_pickles=True, mhr_rows="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--mhr-rows batch is about --mhr-pickles; give that too"):
        AnalyzeConfig("x", Path("y"), source=Path("z"), mhr_rows="batch")


def test_a_run_writes_them_and_its_figure_of_alphas(tmp_path: Path) -> None:
    NATIVE.save(mhr.small(), tmp_path / "model")
    for name, text in (("source", "w5 w6\nw7\n"), ("target", "w4 w5\nw6 w7\n")):
        (tmp_path / name).write_text(text)
    config = AnalyzeConfig(
        str(tmp_path / "model"),
        tmp_path / "run",
        source=tmp_path / "source",
        target=tmp_path / "target",
        only=("alphas", "confidence"),
        mhr_pickles=True,
        device="cpu",
    )
    finished = run_analysis(config)
    files = json.loads((tmp_path / "run" / "run.json").read_text())["files"]
    assert "pickles/mhr/alphas_eval/model.pkl" in files and "alphas_modules.csv" in files
    assert "alphas.png" in {path.name for path in finished.figures}
    run = alphas_run(tmp_path / "run" / "pickles" / "mhr" / "alphas_eval" / "model.pkl")
    theirs, ours = alpha_matrices(run), alpha_matrices(load_run(tmp_path / "run"))
    assert theirs.keys() == ours.keys()
    for place, matrix in ours.items():
        np.testing.assert_allclose(theirs[place], matrix, atol=1e-6)
    assert confidence_run(tmp_path / "run" / "pickles" / "mhr" / "confs_eval" / "model-base.pkl").layout["cross"]


# Reading


def test_what_is_written_is_read_and_old_numpy_could(tmp_path: Path) -> None:
    ragged = np.empty(2, dtype=object)
    ragged[:] = [np.arange(3.0), np.arange(5.0)]
    value = {"encoder": [{"a": np.eye(3, dtype=np.float32), "b": ragged, "c": np.asfortranarray(np.ones((2, 3)))}]}
    path = write_pickle(tmp_path / "x.pkl", value)
    assert b"numpy._core" not in path.read_bytes() and b"numpy.core" in path.read_bytes()
    found = read_pickle(path)["encoder"][0]
    np.testing.assert_array_equal(array_of(found["a"]), np.eye(3))
    np.testing.assert_array_equal(array_of(found["c"]), np.ones((2, 3)))
    rows = rows_of(found["b"])
    assert rows is not None and [row.tolist() for row in rows] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert array_of(found["b"]) is None and array_of(3) is None and rows_of({}) is None
    theirs = pickle.loads(path.read_bytes())["encoder"][0]
    assert all(np.array_equal(theirs["b"][n], ragged[n]) for n in range(2))


def test_confidence_is_weighted_by_batch_size(tmp_path: Path) -> None:
    rows = np.array([[0.5, 1.0, 1], [0.0, 0.25, 3]])
    path = write_pickle(tmp_path / "c.pkl", {"encoder": [{"self_attn": rows}], "decoder": []})
    run = confidence_run(path)
    assert run.heads["confidence"].tolist() == [0.125, 0.4375] and run.layout == {"encoder-self": [2]}
    assert run.data == "mean of 4 sentences or hypotheses, as the file has them"


def test_matrices_are_means_over_sentences(tmp_path: Path) -> None:
    first = np.array([2.0, 1.5, 1.5, 2.0, 1])
    second = np.array([2.0, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0, 2.0, 2])
    ragged = np.empty(2, dtype=object)
    ragged[:] = [first, second]
    path = write_pickle(tmp_path / "c.pkl", {"encoder": [], "decoder": [{"self_attn": ragged, "enc_attn": [[]]}]})
    with pytest.raises(HeadscopeError, match=r"holds no cosines or distances .* in decoder layer 0 enc_attn"):
        similarity_run(path)
    write_pickle(path, {"encoder": [], "decoder": [{"self_attn": ragged, "enc_attn": []}]})
    assert similarity_run(path).similarity["decoder-self/0/cosine"].tolist() == [[1, 0], [0, 1]]
    one = {"encoder": [{"self_attn": np.array([[0.0, 3, 3, 0, 1]])}]}
    assert similarity_run(write_pickle(path, one)).similarity["encoder-self/0/l2"].tolist() == [[0, 3], [3, 0]]
    with pytest.raises(HeadscopeError, match="holds no alpha matrices in encoder layer 0 self_attn"):
        alphas_run(path)
    with pytest.raises(HeadscopeError, match="is no pickle of the MHR fork"):
        alphas_run(write_pickle(path, [1, 2]))


@pytest.mark.parametrize("number", range(3))
def test_broken_and_hostile_files_are_one_line(tmp_path: Path, number: int) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"encoder": [{"self_attn": Touch()}]}))
    with pytest.raises(HeadscopeError, match=r"it names '.*' 'Path.*', which is not allowed"):
        confidence_run(path)
    assert not (tmp_path / "executed").exists()
    good = write_pickle(path, {"encoder": [{"self_attn": np.arange(12.0).reshape(3, 4) + 1}]}).read_bytes()
    draw = np.random.default_rng(number)
    for n in range(200):
        bad = bytearray(good if n % 4 else good[: draw.integers(len(good))])
        if n % 4:
            bad[draw.integers(len(bad))] ^= 1 << draw.integers(8)
        path.write_bytes(bad)
        try:
            confidence_run(path)
        except HeadscopeError as error:
            assert "\n" not in str(error)


def test_a_search_leaves_the_model_as_it_was() -> None:
    its, source = mhr.small(), torch.tensor([[5, 6, 2]])
    before = its.model(source, source)
    mhr_pickles(its, corpus(5), rows="generate", limit=512)
    assert torch.equal(its.model(source, source), before)
