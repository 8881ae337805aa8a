"""A full disk, a signal, another process: every command that writes ends in one line, leaves nothing half, goes on."""

import io
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headscope.cli import main
from headscope.data.encoded import Batch
from headscope.files import writing
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.pruning.ranking import rank_run
from tests.faults import cases
from tests.faults.cases import CASES, Case
from tests.faults.conftest import Command, one_line
from tests.faults.faults import Moments, full_disk, signal_at, small_files

# A signal may come between the opening of a file and the `with` that closes it, which then is the garbage collector's.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def finish(headscope: Command, case: Case, inputs: Path, folder: Path) -> None:
    """The command after a fault: it does its work, or --resume does; --force only for what was interrupted."""
    out = case.output_path(folder)
    for more in ([], ["--resume"] if case.resumes else [], ["--force"]):
        status, err = headscope(case.command(inputs, out, *more))
        if status == 0:
            return
        assert one_line(err) and "already holds" in err, err
    raise AssertionError(err)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_faults_are_one_line_leave_nothing_half_and_the_command_goes_on(
    case: Case, headscope: Command, inputs: Path, tmp_path: Path
) -> None:
    chance, out = random.Random(case.name), case.output_path(tmp_path)
    with Moments(tmp_path).count() as moments:  # nothing is imported later, during a fault
        status, err = headscope(case.command(inputs, out))
    assert status == 0, err
    before, sizes = cases.digests(out), cases.sizes(out)

    # What is complete is replaced by all or by nothing.
    with full_disk(tmp_path, moments.writes):
        status, err = headscope(case.command(inputs, out, "--force"))
    assert (status, one_line(err)) == (2, True), err
    assert cases.digests(out) == before and cases.leftovers(tmp_path) == []
    with signal_at(signal.SIGTERM, chance.randint(1, moments.calls)):
        status, err = headscope(case.command(inputs, out, "--force"))
    assert status in (0, 143) and cases.leftovers(tmp_path) == []
    assert cases.digests(out) == before or set(cases.digests(out)) == set(before)

    # What is new is all, nothing, or what goes on.
    number = chance.choice([signal.SIGTERM, signal.SIGINT])
    for fault, ends in (
        (full_disk(tmp_path, chance.randint(1, moments.writes)), {2}),
        (small_files(chance.choice(sizes) // 2), {2}),  # also of what does not write through Python
        (signal_at(number, chance.randint(1, moments.calls)), {0, STATUS[number]}),
    ):
        cases.clear_folder(tmp_path)
        with fault:
            status, err = headscope(case.command(inputs, out))
        assert status in ends and "Traceback" not in err and (status != 2 or one_line(err)), err
        assert cases.leftovers(tmp_path) == []
        assert cases.find_partial(case, tmp_path, set(before)) is None
        if status and (case.keeps_progress or ends != {2}):
            finish(headscope, case, inputs, tmp_path)
            assert set(cases.digests(out)) == set(before)
    if case.resumes:
        weights = {file: digest for file, digest in cases.digests(out).items() if "safetensors" in file}
        status, err = headscope(case.command(inputs, out, "--resume"))
        assert status == 0 and "complete" in err and weights.items() <= cases.digests(out).items()


@contextmanager
def listening_to_a_signal(listening: Any = writing.listening) -> Iterator[None]:
    """Signals are listened to, and one comes."""
    with listening():
        signal.raise_signal(signal.SIGTERM)
        yield


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (main, "listening", listening_to_a_signal),
        (main, "set_environment", lambda: signal.raise_signal(signal.SIGTERM)),
    ],
)
def test_a_signal_before_the_command_has_begun_is_one_line(
    owner: Any, name: str, instead: Any, headscope: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, instead)
    assert headscope(["demo"]) == (143, "interrupted; what was not complete is not kept\n")


def test_a_signal_within_a_command_that_keeps_nothing_is_one_line(
    headscope: Command, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_run, "rank_heads", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    rank = ["prune", "rank", inputs / "model", "--by", "magnitude", "--keep", 9, "--out", tmp_path / "ranked"]
    status, err = headscope([*map(str, rank)])
    assert status == 143 and err.endswith("interrupted; what was not complete is not kept\n"), err


# Outputs that are refused, whatever --force says.


def refusals(inputs: Path, training: Path, run: Path) -> dict[str, list[object]]:
    """Commands whose output is an input, holds one, or is a run of another kind."""
    text = ["--source", inputs / "source", "--target", inputs / "target"]
    best, steps = training / "best", [*cases.STEPS, *cases.SIZES]
    return {
        "analyze into the training": ["analyze", best, *text, "--out", training],
        "analyze into the checkpoint": ["analyze", best, *text, "--out", best / "run"],
        "analyze over the text": ["analyze", best, *text, "--out", inputs],
        "analyze over another kind of run": ["analyze", inputs / "model", *text, "--out", training],
        "convert onto itself": ["convert", best, best, "--to", "native"],
        "convert into its directory": ["convert", inputs / "c.pt", inputs, "--to", "native"],
        "convert over another kind of run": ["convert", inputs / "c.pt", training, "--to", "native"],
        "train from what it replaces": ["train", "baseline", *text, *steps, "--init", best, "--out", best],
        "train over its start": ["train", "baseline", *text, *steps, "--init", best, "--out", training],
        "remove from itself": ["prune", "remove", best, "--heads", "cross.0.1", "--out", best],
        "rank over the run it reads": [
            *("prune", "rank", inputs / "model", "--by", "confidence", "--from", run, "--keep", 9),
            *("--out", run),
        ],
        "l0 over a training": ["prune", "l0", inputs / "model", *text, "--lambda", 1, "--out", training],
        "sweep over a training": ["prune", "sweep", best, *text, "--keep", 9, "--out", training],
        "evaluate over its source": ["evaluate", best, *text, "--per-sentence", inputs / "source"],
        "evaluate over its target": ["evaluate", best, *text, "--each-head", "--out", inputs / "target"],
        "evaluate over its weights": ["evaluate", best, *text, "--per-sentence", best / "model.safetensors"],
        "evaluate over a run's table": ["evaluate", best, *text, "--per-sentence", run / "heads.csv"],
        "demo over a training": ["demo", "--out", training],
    }


def test_no_command_replaces_what_it_reads_or_what_another_wrote(
    headscope: Command, inputs: Path, tmp_path: Path
) -> None:
    training, run = tmp_path / "trained", tmp_path / "run"
    assert headscope(CASES["train"].command(inputs, training))[0] == 0
    assert headscope(CASES["analyze"].command(inputs, run, "--no-figures"))[0] == 0
    (tmp_path / "link").symlink_to(training)
    before = cases.digests(inputs), cases.digests(training), cases.digests(run)
    for out in (training, tmp_path / "link"):
        for label, command in refusals(inputs, out, run).items():
            status, err = headscope([*map(str, command), "--force"])
            assert (status, one_line(err)) == (2, True), (label, err)
            assert "choose an" in err, (label, err)
    assert (cases.digests(inputs), cases.digests(training), cases.digests(run)) == before
    assert cases.leftovers(tmp_path) == []


def test_an_interrupted_analysis_does_not_replace_a_complete_one(
    headscope: Command, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out = CASES["analyze"], tmp_path / "result"
    assert headscope(case.command(inputs, out))[0] == 0
    before, real, remaining = cases.digests(out), TransformerCheckpoint.forward, [2]

    def interrupt(self: TransformerCheckpoint, batch: Batch) -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            signal.raise_signal(signal.SIGTERM)
        real(self, batch)

    monkeypatch.setattr(TransformerCheckpoint, "forward", interrupt)
    status, err = headscope(case.command(inputs, out, "--force"))
    assert status == 143 and f"{out}.new holds" in err
    assert cases.digests(out) == before
    assert json.loads((tmp_path / "result.new" / "run.json").read_text(encoding="utf-8"))["complete"] is False


def test_what_cannot_be_printed_is_one_line(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headscope", "show", str(inputs / "model")])
    full = os.open("/dev/full", os.O_WRONLY)
    with io.TextIOWrapper(io.FileIO(full, "w"), write_through=True) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as exit_info:
            main.run()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: cannot read or write: No space left on device\n"
