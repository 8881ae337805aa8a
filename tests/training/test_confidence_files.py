"""Confidence of heads on the batches of an epoch, in the MHR fork's files: numbers, resuming, and their figure."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import Site
from headscope.model.taps import capture
from headscope.progress import no_progress
from headscope.training.config import TrainingPosition
from headscope.training.prepare import collate, epoch_plan
from headscope.training.trainer import train
from headscope.training.variant import find_variant
from tests.oracles import lessons
from tests.oracles.confidence import sentence_score
from tests.oracles.swaps import schedule

pytestmark = pytest.mark.slow

METHODS = ("base", "advanced", "pairwise")
MODULES = {Site.ENCODER_SELF: ("encoder", "self_attn"), Site.DECODER_SELF: ("decoder", "self_attn")}
STILL: dict[str, Any] = {"dropout": 0.0, "lr": 1e-30, "warmup_lr": 0.0}  # weights that stay as they are


def entry(content: Any, site: Site, layer: int) -> NDArray[np.float64]:
    stack, name = MODULES.get(site, ("decoder", "enc_attn"))
    found: NDArray[np.float64] = content[stack][layer][name]
    return found


def read(folder: Path, epoch: int) -> Any:
    return pickle.loads((folder / "run" / "confs" / f"epoch-{epoch}.pkl").read_bytes())


def go(folder: Path, name: str = "baseline", *, resume: bool = False, progress: Any = no_progress, **given: Any) -> Any:
    cls = find_variant(name)
    options = given.pop("options", {})
    shared = {"max_epochs": 2, "log_every": 3, **given}
    return train(lessons.config(folder, **shared), cls(cls.Options(**options)), resume=resume, progress=progress)


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_means_over_the_sentences_of_a_batch(method: str, tmp_path: Path) -> None:
    """Against each sentence run by itself, without padding, with slow loops; batches of several lengths."""
    run = lessons.begin(tmp_path, "baseline", shared={"save_confidence": method, **STILL})
    groups = epoch_plan(run.data.train, tokens=run.config.max_tokens, seed=run.config.seed, epoch=1)[:3]
    for group in groups:
        run.update([collate(run.data.train, group)])
    lessons.variant(run).after_epoch(run, TrainingPosition(epoch=1))
    found = read(tmp_path, 1)
    assert any(len({len(run.data.train.target[int(n)]) for n in group}) > 1 for group in groups)
    run.model.eval()
    for row, group in enumerate(groups):
        sums = {place: np.zeros(3) for place in run.model.declared_attention().layout}
        for number in group:
            batch = collate(run.data.train, np.array([number]))
            with torch.no_grad(), capture(run.model, ("weights",)) as heads:
                final_states(run.model, batch)
            for place, total in sums.items():
                total += sentence_score(method, heads[place]["weights"][0].numpy())
        for (site, layer), total in sums.items():
            its = entry(found, site, layer)
            assert its.dtype == np.float64 and its.shape == (3, 4) and its[row, -1] == len(group)
            np.testing.assert_allclose(its[row, :-1], total / len(group), rtol=1e-9)


def test_a_file_for_every_whole_epoch_and_a_row_for_every_batch(tmp_path: Path) -> None:
    outcome = go(tmp_path, save_confidence="base", accumulate=2, log_every=1)
    folder = outcome.folder / "confs"
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-1.pkl", "epoch-2.pkl"]
    for epoch in (1, 2):
        content = read(tmp_path, epoch)
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
    given: dict[str, Any] = {"name": "mixing+swap", "options": options, "save_confidence": "pairwise"}
    whole = go(tmp_path / "whole", **given).folder
    assert go(tmp_path / "parts", **given, progress=lessons.StopsAfter(11)).reason == "interrupted"
    assert not (tmp_path / "parts" / "run" / "confs" / "epoch-2.pkl").exists()
    parts = go(tmp_path / "parts", **given, resume=True).folder
    for epoch in (1, 2):
        name = f"confs/epoch-{epoch}.pkl"
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    one, other = ((out / "metrics.csv").read_text(encoding="utf-8").splitlines() for out in (whole, parts))
    place = one[0].split(",").index("confidence_pairwise.cross")
    assert [line.split(",")[place] for line in one] == [line.split(",")[place] for line in other]
