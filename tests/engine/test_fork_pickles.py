"""Files of the MHR fork: written as the fork writes them, read without running anything, drawn."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.config.analyze import AnalyzeConfig
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.mhr_fork import BatchSize, groups, mhr_pickles
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError, HeadscopeError
from headscope.files.tables import write_pickle
from headscope.formats.native import NATIVE
from headscope.report.figures.layers import alpha_matrices
from headscope.report.fork import alphas_run, confidence_run, similarity_run
from headscope.results.study import Study
from tests.oracles import mhr

pytestmark = pytest.mark.slow

FILES = {
    "confs_eval/checkpoint_best-base": "checkpoint_best-base",
    "confs_eval/checkpoint_best-advanced": "checkpoint_best-advanced",
    "cosine_similarities_eval/checkpoint_best": "cosine_similarities_eval",
    "l2_pairwise_distances_eval/checkpoint_best": "l2_pairwise_distances_eval",
    "alphas_eval/checkpoint_best": "alphas_eval",
}


def corpus(count: int = 41) -> Corpus:
    rng = np.random.default_rng(3)

    def text(words: int) -> str:
        return " ".join(f"w{n}" for n in rng.integers(4, 19, size=words))

    source, target = zip(*[(text(1 + n % 7), text(1 + n % 5)) for n in range(count)], strict=True)
    return open_corpus(source, target=target)


def modules(content: Any) -> dict[str, Any]:
    return {
        f"{stack}.{number}.{name}": value
        for stack in ("encoder", "decoder")
        for number, layer in enumerate(content[stack])
        for name, value in layer.items()
    }


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Compare type, shape and every number; sentences of a batch in any order, which torch's sort decides."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    for mine, other in zip(ours, theirs, strict=True):
        if ours.dtype == object:
            assert mine.dtype == other.dtype == np.float64 and mine[-1] == other[-1]
            mine, other = (vector[:-1].reshape(int(vector[-1]), 8, 8) for vector in (mine, other))
            mine = mine[[int(np.abs(mine - sentence).max(axis=(1, 2)).argmin()) for sentence in other]]
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_the_fork_writes_the_same(shared: Path) -> None:
    pickles = mhr_pickles(*mhr.load_reference(shared / "oracles"), rows="generate", limit=1024)
    assert set(pickles) == {f"mhr/{name}.pkl" for name in (*FILES, "confs_eval/checkpoint_best-pairwise")}
    for name, theirs in FILES.items():
        ours, reference = pickles[f"mhr/{name}.pkl"], mhr.load_pickle(shared / "oracles", theirs)
        assert list(ours) == list(reference) and modules(ours).keys() == modules(reference).keys()
        for module, value in modules(reference).items():
            assert_same(modules(ours)[module], value)


def test_padding_counts_as_the_fork_counts_it(shared: Path) -> None:
    """One padded batch of 16 sentences, teacher-forced: Σ over b, i, j of 1 + cosine as the fork's criterion has it."""
    reference = json.loads((shared / "oracles/mhr/alpha/oracle/loss_reference.json").read_text())["cosine_only"]
    checkpoint, texts = mhr.load_reference(shared / "oracles")
    first = Corpus("first", 16, "0" * 40, lambda: islice(iter(texts), 16), True, False)
    pickles = mhr_pickles(checkpoint, first, rows="batch", limit=1024)
    for module, (vector,) in modules(pickles["mhr/cosine_similarities_eval/checkpoint_best.pkl"]).items():
        assert vector[-1] == 16 and len(vector) == 16 * 64 + 1
        total = reference["cosine_similarity_total"][module] * (8 ^ 2)
        assert vector[:-1].sum() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_padding_is_embedded_as_fairseq_does(positions: str) -> None:
    """Row 1 of the table, trained where tables are shared, and row 1 of learned positions; sinusoids are 0 there."""
    sizes: dict[str, Any] = {"positions": positions, "max_positions": 97, "position_offset": 2, "embedding_norm": True}
    checkpoint = mhr.small(vocabulary=19, model={"share_embeddings": True, "tie_output": True}, **sizes)
    outputs: dict[str, list[torch.Tensor]] = {"encoder": [], "decoder": []}
    for name, stack in (("encoder", checkpoint.model.encoder), ("decoder", checkpoint.model.decoder)):
        assert stack is not None
        stack.embeddings.register_forward_hook(lambda _, __, x, store=outputs[name]: store.append(x))
    mhr_pickles(checkpoint, corpus(), rows="batch", limit=512, size=BatchSize(41))
    for name, stack in (("encoder", checkpoint.model.encoder), ("decoder", checkpoint.model.decoder)):
        assert stack is not None
        parts: Any = stack.embeddings
        expected = parts.tokens.weight[1] * 13**0.5
        if positions == "learned":
            expected = expected + parts.positions.weight[1]
        expected = torch.nn.functional.layer_norm(expected, (13,), parts.norm.weight, parts.norm.bias)
        (states,) = outputs[name]  # [b n d], sources padded on the left
        is_padding = (states - expected).abs().amax(dim=-1) < 1e-12
        lengths = sorted(1 + n % 7 + 1 if name == "encoder" else 1 + n % 5 + 1 for n in range(41))
        assert sorted((~is_padding).sum(dim=1).tolist()) == lengths
        first = is_padding.long().diff(dim=1)  # one change from padding to text in sources, the reverse in targets
        assert set(first.unique().tolist()) == ({-1, 0} if name == "encoder" else {0, 1})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (BatchSize(), [32, 9]),
        (BatchSize(16), [16, 16, 9]),
        (BatchSize(30), [24, 17]),  # closed at a multiple of 8
        (BatchSize(tokens=60), [8, 8, 8, 8, 7, 2]),
        (BatchSize(5, 40), [5] * 8 + [1]),
    ],
    ids=str,
)
def test_rows_are_the_forks_batches(size: BatchSize, expected: list[int]) -> None:
    pickles = mhr_pickles(mhr.small(), corpus(), rows="batch", limit=512, size=size)
    table = modules(pickles["mhr/confs_eval/small-base.pkl"])["encoder.0.self_attn"]
    assert table[:, -1].tolist() == expected


def analyze_small(folder: Path, *only: str, **options: Any) -> Study:
    """Analyze three pairs of sentences with a small model, into `folder / "run"`."""
    NATIVE.save(mhr.small(), folder / "model")
    texts: dict[str, Any] = {"source": folder / "source", "target": folder / "target"}
    texts["source"].write_text("w5 w6\nw7\nw8 w9\n")
    texts["target"].write_text("w4 w5\nw6 w7\nw4\n")
    return run_analysis(
        AnalyzeConfig(checkpoint=str(folder / "model"), out=folder / "run", only=only, device="cpu", **texts, **options)
    )


def test_a_run_writes_them_and_its_figure_of_alphas(tmp_path: Path) -> None:
    analyze_small(tmp_path, "alphas", "confidence", mhr_pickles=True)
    files = json.loads((tmp_path / "run" / "run.json").read_text())["files"]
    assert "pickles/mhr/alphas_eval/model.pkl" in files and "alphas_modules.csv" in files
    assert "figures/alphas.png" in files
    alphas = alphas_run(tmp_path / "run" / "pickles" / "mhr" / "alphas_eval" / "model.pkl")
    theirs, ours = alpha_matrices(alphas), alpha_matrices(Study.open(tmp_path / "run"))
    assert theirs.keys() == ours.keys()
    for site_layer, matrix in ours.items():
        np.testing.assert_allclose(theirs[site_layer], matrix, atol=1e-6)
    assert confidence_run(tmp_path / "run" / "pickles" / "mhr" / "confs_eval" / "model-base.pkl").layout["cross"]


@pytest.mark.parametrize(("only", "count"), [(("alphas",), 3), (("causal_head_gating",), 3), (("magnitude",), 0)])
def test_sentences_are_those_that_were_read(tmp_path: Path, only: tuple[str, ...], count: int) -> None:
    """Also without a shared pass over the text: pickles have one, and some analyses have their own."""
    options: dict[str, Any] = {"mhr_pickles": True, "mhr_rows": "generate"} if only == ("alphas",) else {}
    if only == ("causal_head_gating",):
        options["analysis_options"] = {"chg_steps": 2}
    assert analyze_small(tmp_path, *only, figures=False, **options).sentences == count
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["data"]["sentences"], record["data"]["in_corpus"]) == (count, 3)
    assert f"n={count}" in record["signature"]


# Reading


def test_matrices_are_means_over_sentences(tmp_path: Path) -> None:
    first = np.array([2.0, 1.5, 1.5, 2.0, 1])
    second = np.array([2.0, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0, 2.0, 2])
    vectors = np.empty(2, dtype=object)
    vectors[:] = [first, second]
    path = write_pickle(tmp_path / "c.pkl", {"encoder": [], "decoder": [{"self_attn": vectors, "enc_attn": [[]]}]})
    with pytest.raises(HeadscopeError, match=r"decoder.*0.*enc_attn"):
        similarity_run(path)
    write_pickle(path, {"encoder": [], "decoder": [{"self_attn": vectors, "enc_attn": []}]})
    assert similarity_run(path).similarity["decoder-self/0/cosine"].tolist() == [[1, 0], [0, 1]]
    content = {"encoder": [{"self_attn": np.array([[0.0, 3, 3, 0, 1]])}]}
    assert similarity_run(write_pickle(path, content)).similarity["encoder-self/0/l2"].tolist() == [[0, 3], [3, 0]]
    with pytest.raises(HeadscopeError, match=r"encoder.*0.*self_attn"):
        alphas_run(path)
    with pytest.raises(HeadscopeError, match="MHR"):
        alphas_run(write_pickle(path, [1, 2]))


def test_batches_are_cut_as_fairseq_cuts_them() -> None:
    rng = np.random.default_rng(5)
    lengths = [(int(a), int(b)) for a, b in rng.integers(1, 30, size=(211, 2))]
    order = sorted(range(211), key=lengths.__getitem__)
    for size in (BatchSize(), BatchSize(3), BatchSize(13), BatchSize(tokens=117), BatchSize(21, 200)):
        batches = groups(order, lengths, size)
        assert batches == cut_like_fairseq(order, lengths, size)
        assert all(
            size.tokens is None or len(batch) * max(max(lengths[n]) for n in batch) <= size.tokens for batch in batches
        )
    with pytest.raises(ConfigError, match="--mhr-max-tokens 7"):
        groups(order, lengths, BatchSize(tokens=7))


def test_one_row_is_the_mean_of_sentences_alone(oracles: Path) -> None:
    checkpoint, texts = mhr.load_reference(oracles)
    pickles = mhr_pickles(checkpoint, texts, limit=1024)
    reference = np.load(oracles / "mhr" / "alpha" / "oracle" / "tf_stats.npz")
    kinds = ["conf_base", "conf_advanced", "conf_pairwise", "cos", "l2"]
    for (name, content), kind in zip(pickles.items(), [*kinds, "alphas"], strict=True):
        if kind == "alphas":
            continue
        for module, rows in modules(content).items():
            assert rows.dtype == np.float64 and len(rows) == 1 and rows[0, -1] == (texts.count if "conf" in name else 1)
            expected = reference[f"{kind}/{module}"].mean(axis=0)
            np.testing.assert_allclose(rows[0, :-1], expected.ravel(), atol=1e-5)


def cut_like_fairseq(order: list[int], lengths: list[tuple[int, int]], size: BatchSize) -> list[list[int]]:
    """batch_by_size of July 2020, from its documentation and code, recounted for every sentence."""
    batches: list[list[int]] = []
    waiting: list[int] = []
    limit = 32 if size == (None, None) else size.sentences
    for number in order:
        tokens = (len(waiting) + 1) * max(max(lengths[n]) for n in [*waiting, number])
        is_full = len(waiting) == (limit or -1) or (size.tokens is not None and tokens > size.tokens)
        if waiting and is_full:
            multiple = len(waiting) - len(waiting) % 8
            count = multiple if multiple >= len(waiting) % 8 else len(waiting) % 8
            batches, waiting = [*batches, waiting[:count]], waiting[count:]
        waiting.append(number)
    return [*batches, waiting]
