"""Variants go on after a restart as if nothing had happened; what swaps, scores of heads and their files hold."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import Site
from headscope.model.taps import capture
from headscope.training.checkpoints import checkpoint
from headscope.training.config import TrainingPosition
from headscope.training.head_scores import head_scores
from headscope.training.prepare import collate, epoch_plan
from tests.makers.studies import study_of
from tests.oracles import lessons
from tests.oracles.confidence import sentence_score
from tests.oracles.swaps import differing, schedule

pytestmark = pytest.mark.slow

SINGLE: dict[str, Any] = {"precision": "float32", "log_every": 1}
SWAPS = [f"cross.0.{head} cross.1.{head}" for head in range(3)]


def metrics(out: Path, *args: Any, **shared: Any) -> list[dict[str, str]]:
    """The lines of metrics.csv of a run in single precision."""
    folder = lessons.run_variant(out, *args, **SINGLE | shared).folder
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_schedule_may_move_and_grow_but_options_may_not_change(tmp_path: Path) -> None:
    def train_swaps(file: str, swaps: dict[int, list[str]], epochs: int, **more: Any) -> int:
        options = {"swap_schedule": schedule(tmp_path / file, swaps)} | more
        return lessons.run_variant(tmp_path, "swap", options, max_epochs=epochs, resume=True).epoch

    train_swaps("first.json", {2: SWAPS}, 2)
    assert train_swaps("moved.json", {2: SWAPS, 3: SWAPS}, 3) == 3
    with pytest.raises(ConfigError, match=r"other options: --swap-moments \(was False, is True\);"):
        train_swaps("moved.json", {2: SWAPS, 3: SWAPS}, 4, swap_moments=True)


def test_what_gates_did_before_an_interruption_counts_in_the_next_line_of_metrics(tmp_path: Path) -> None:
    """Their entropy is noted in every tenth update, and a line comes at the end: of updates 10 and 20."""
    variant: Any = ("mae", {"gate_every": 1})
    shared: dict[str, Any] = {"max_epochs": 4, "validate_every": 1000, "log_every": 1000, "precision": "float32"}
    partial = lessons.run_variant(tmp_path / "parts", *variant, progress=lessons.StopsAfter(13), **shared)
    lines = []
    for name in ("whole", "parts"):
        (line,) = metrics(tmp_path / name, *variant, resume=name == "parts", **shared)
        lines.append({key: value for key, value in line.items() if "gate" in key or "expert" in key})
    assert (partial.reason, line["update"]) == ("interrupted", "24")
    assert lines[0]["gate_entropy"] and lines[0] == lines[1]


def test_dynamic_swaps_are_undone(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "swap", dynamic=("hard", "soft", "none"), score="uniqueness", dynamic_end=(3,))
    before = lessons.weights(run)
    for epoch, changes in ((1, True), (2, False), (3, False), (4, False)):
        lessons.variant(run).after_epoch(run, TrainingPosition(epoch=epoch))
        names = differing(before, lessons.weights(run))
        assert bool(names) is changes and not any("cross" in name for name in names)
    history = lessons.variant(run).history(run)
    assert history["swaps.encoder-self"] == 2 and history["swapped.encoder-self"] == 0
    assert "swaps.cross" not in history


def test_scores_are_those_of_the_analyses(tmp_path: Path) -> None:
    """confidence, base, advanced and pairwise of the run's validation text, measured by `analyze`."""
    run = lessons.begin(tmp_path, "baseline")
    run.model.eval()
    files = lessons.texts(tmp_path)
    corpus = open_corpus(files["valid_source"], target=files["valid_target"])
    names = {"confidence": "confidence"} | {name: f"confidence.{name}" for name in ("base", "advanced", "pairwise")}
    study = study_of(checkpoint(run), corpus, *names.values(), replicates=2).heads
    for score, name in names.items():
        by_site = head_scores(run.model, run.validation(), score=score)
        assert set(by_site) == set(Site)
        for site, layers in by_site.items():
            for layer, scores in layers.items():
                expected = study[(study.site == site.value) & (study.layer == layer)][name.replace(".", "_")]
                torch.testing.assert_close(
                    scores, torch.tensor(expected.tolist(), dtype=torch.float64), rtol=1e-6, atol=1e-6
                )


def test_uniqueness_sentence_by_sentence(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "baseline")
    run.model.eval()
    scores = head_scores(run.model, run.validation(), score="uniqueness")
    sums = {site_layer: torch.zeros(3, dtype=torch.float64) for site_layer in run.model.declared_attention().layout}
    count = 0
    pairs = run.data.valid
    assert pairs is not None
    for number in range(len(pairs)):
        batch = collate(pairs, torch.tensor([number]).numpy())
        count += 1
        with torch.no_grad(), capture(run.model, ("context",)) as heads:
            final_states(run.model, batch)
        for site_layer, total in sums.items():
            context = heads[site_layer]["context"][0]
            for i in range(3):
                total[i] += sum(float((context[i] - context[j]).norm()) for j in range(3)) / 2
    for (site, layer), total in sums.items():
        torch.testing.assert_close(scores[site][layer], total / count, rtol=1e-9, atol=1e-9)


# Runs that are resumed with another end: what depends on the length goes by the length they were begun with.


def weights(out: Path) -> dict[str, Any]:
    model: Any = open_checkpoint(str(out / "run" / "last"), device="cpu").model
    return dict(model.state_dict())


def test_a_window_that_has_opened_stays_open(tmp_path: Path) -> None:
    """Two epochs and two more are four in which the window opens as early."""
    late, early = ({"start_after": start, "gamma": 0.1} for start in (0.5, 0.25))
    metrics(tmp_path / "a", "mixing", late, max_tokens=120, max_epochs=2)
    longer = metrics(tmp_path / "a", "mixing", late, max_tokens=120, max_epochs=4, resume=True)
    single = metrics(tmp_path / "b", "mixing", early, max_tokens=120, max_epochs=4)
    open_in = [{row["epoch"] for row in rows if row["window"] == "1"} for rows in (longer, single)]
    assert open_in == [{"2", "3", "4"}] * 2
    assert not differing(weights(tmp_path / "a"), weights(tmp_path / "b"))
    about = json.loads((tmp_path / "a" / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["planned"] == {"updates": None, "epochs": 2} and about["config"]["max_epochs"] == 4


def test_a_cosine_rate_stays_where_it_ended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "cosine", "lr": 0.01, "min_lr": 0.001}
    first = metrics(tmp_path, updates=8, max_epochs=None, **options)
    for end in (11, 14):  # the plan outlives the second restart too
        rows = metrics(tmp_path, updates=end, max_epochs=None, resume=True, **options)
        assert [row["lr"] for row in rows[:8]] == [row["lr"] for row in first]
        assert [float(row["lr"]) for row in rows[8:]] == [0.001] * (end - 8)


def test_an_earlier_end_cuts_the_run_short_and_changes_nothing_before_it(tmp_path: Path) -> None:
    """Interrupted in a run of three epochs, resumed to end after two."""
    options: dict[str, Any] = {"schedule": "cosine", "min_lr": 0.0}
    full = metrics(tmp_path / "whole", max_epochs=3, **options)
    partial = lessons.run_variant(tmp_path / "cut", max_epochs=3, progress=lessons.StopsAfter(2), **SINGLE, **options)
    assert partial.reason == "interrupted"
    rows = metrics(tmp_path / "cut", max_epochs=2, resume=True, **options)
    assert rows[-1]["epoch"] == "2" and len(rows) > 4
    assert [row["loss"] for row in rows] == [row["loss"] for row in full[: len(rows)]]


# Confidence of heads on the batches of an epoch, in the MHR fork's files: numbers and resuming.


METHODS = ("base", "advanced", "pairwise")
MODULES = {Site.ENCODER_SELF: ("encoder", "self_attn"), Site.DECODER_SELF: ("decoder", "self_attn")}
NO_UPDATE: dict[str, Any] = {"dropout": 0.0, "lr": 1e-30, "warmup_lr": 0.0}  # weights that stay as they are


def entry(content: Any, site: Site, layer: int) -> NDArray[np.float64]:
    stack, name = MODULES.get(site, ("decoder", "enc_attn"))
    rows: NDArray[np.float64] = content[stack][layer][name]
    return rows


def read_rows(folder: Path, epoch: int) -> Any:
    return pickle.loads((folder / "run" / "confs" / f"epoch-{epoch}.pkl").read_bytes())


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_means_over_the_sentences_of_a_batch(method: str, tmp_path: Path) -> None:
    """Against each sentence run by itself, without padding, with slow loops; batches of several lengths."""
    run = lessons.begin(tmp_path, "baseline", shared={"save_confidence": method, **NO_UPDATE})
    groups = epoch_plan(run.data.train, tokens=run.config.max_tokens, seed=run.config.seed, epoch=1)[:3]
    for group in groups:
        run.update([collate(run.data.train, group)])
    lessons.variant(run).after_epoch(run, TrainingPosition(epoch=1))
    content = read_rows(tmp_path, 1)
    assert any(len({len(run.data.train.target[int(n)]) for n in group}) > 1 for group in groups)
    run.model.eval()
    for row, group in enumerate(groups):
        sums = {site_layer: np.zeros(3) for site_layer in run.model.declared_attention().layout}
        for number in group:
            batch = collate(run.data.train, np.array([number]))
            with torch.no_grad(), capture(run.model, ("weights",)) as heads:
                final_states(run.model, batch)
            for site_layer, total in sums.items():
                total += sentence_score(method, heads[site_layer]["weights"][0].numpy())
        for (site, layer), total in sums.items():
            rows = entry(content, site, layer)
            assert rows.dtype == np.float64 and rows.shape == (3, 4) and rows[row, -1] == len(group)
            np.testing.assert_allclose(rows[row, :-1], total / len(group), rtol=1e-9)


def test_a_file_for_every_whole_epoch_and_a_row_for_every_batch(tmp_path: Path) -> None:
    outcome = lessons.run_variant(tmp_path, save_confidence="base", accumulate=2, log_every=1, max_epochs=2)
    folder = outcome.folder / "confs"
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-1.pkl", "epoch-2.pkl"]
    for epoch in (1, 2):
        content = read_rows(tmp_path, epoch)
        assert [len(content[stack]) for stack in ("encoder", "decoder")] == [1, 2]
        sizes = content["decoder"][1]["enc_attn"][:, -1]
        assert sizes.sum() == 40 and len(sizes) > 5
    lines = (outcome.folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    columns = lines[0].split(",")
    values = [line.split(",")[columns.index("confidence_base.decoder-self")] for line in lines[1:]]
    assert len(values) > 2 and all(value == "1" for value in values)


def test_an_interrupted_run_writes_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    swaps = schedule(tmp_path / "swaps.json", {2: ["cross.0.0 cross.1.2"]})
    options = {"swap_schedule": swaps, "start_after": 0.3}
    settings: dict[str, Any] = {"name": "mixing+swap", "options": options, "save_confidence": "pairwise"}
    settings |= {"max_epochs": 2, "log_every": 3}
    reference = lessons.run_variant(tmp_path / "whole", **settings).folder
    assert lessons.run_variant(tmp_path / "parts", **settings, progress=lessons.StopsAfter(11)).reason == "interrupted"
    assert not (tmp_path / "parts" / "run" / "confs" / "epoch-2.pkl").exists()
    parts = lessons.run_variant(tmp_path / "parts", **settings, resume=True).folder
    for epoch in (1, 2):
        name = f"confs/epoch-{epoch}.pkl"
        assert (reference / name).read_bytes() == (parts / name).read_bytes()
    expected, lines = ((out / "metrics.csv").read_text(encoding="utf-8").splitlines() for out in (reference, parts))
    index = expected[0].split(",").index("confidence_pairwise.cross")
    assert [line.split(",")[index] for line in expected] == [line.split(",")[index] for line in lines]
