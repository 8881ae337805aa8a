"""Outputs: overwriting, removable files, interrupted swaps of directories, and locks."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.errors import OutputError
from headscope.files import folders
from headscope.files.folders import Build, lock_folder, replacing_folder, to_resume, workplace
from headscope.files.output_checks import Input, OutputKind, check_file, check_folder
from headscope.files.tables import read_csv, write_csv
from headscope.files.writing import exit_status, hold_signals, listening, write_atomically
from headscope.pruning.removal.remove import REMOVAL
from headscope.pruning.selection import choice_by
from headscope.pruning.shrink import SHRINK

KIND = OutputKind("test", "test", "run.json", ("*.csv", "figures/*.png", "state.pt"), partial=("state.pt",))
OTHER = OutputKind("other", "other test", "run.json", ("*.csv",))


def build(out: Path, text: str = "1", kind: OutputKind = KIND, *, force: bool = False, **more: object) -> None:
    with Build(out, kind, force=force) as output:
        with output.writing() as folder:
            write_atomically(folder / "heads.csv", lambda path: path.write_text(text))
            write_atomically(folder / "figures" / "heads.png", lambda path: path.write_text(text))
        output.finish({"said": text, **more})


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


FORMULAS = ["=1+2", "+a", "-x", "@SUM", "'=", "''-", "'", "'a", "\t="]
TEXTS = [*FORMULAS, "-1.5", "+3", "-", "a,b", 'a"b', "a\nb", "nan", "NA", ""]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]])
def test_no_text_of_a_table_is_a_formula_and_all_are_read_as_they_were(tmp_path: Path, texts: list[str]) -> None:
    table = pd.DataFrame({"token": texts, "value": np.linspace(-1, 1, len(texts))})
    write_csv(tmp_path / "a.csv", table)
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        cells = [row["token"] for row in csv.DictReader(file)]
    is_formula = [cell[:1] in tuple("=+-@\t") and cell not in ("-1.5", "+3") for cell in cells]
    assert not any(is_formula) and cells[0] == "'=1+2"
    pd.testing.assert_frame_equal(read_csv(tmp_path / "a.csv", columns=["value"], texts=["token"]), table)


def test_a_directory_is_built_beside_and_names_its_files(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    with Build(out, KIND) as output:
        with output.writing() as folder:
            assert folder.parent == out.parent and not out.exists()
            (folder / "x.csv").write_text("x")
        output.finish({"out": str(folder / "x.csv")})
        assert out.is_dir()
    record = json.loads((out / "run.json").read_text())
    assert record == {"kind": "test", "out": str(out / "x.csv"), "files": ["run.json", "x.csv"]}
    assert out.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ZeroDivisionError), Build(tmp_path / "b" / "run", KIND) as output, output.writing():
        _ = 1 / 0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_force_replaces_a_run_of_the_same_kind_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    build(out)
    with pytest.raises(OutputError, match=r"figures.*heads\.csv.*run\.json.*--force"):
        build(out, "2")
    build(out, "2", force=True)
    assert files(out)["heads.csv"] == "2" and [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(OutputError, match=r"test.*--force"):
        build(out, "3", OTHER, force=True)
    for name in ("figures/mine.png", "notes.txt", "mine.csv"):
        (out / name).write_text("mine")
        with pytest.raises(OutputError, match=f"{name}"):
            build(out, "3", force=True)
        (out / name).unlink()
    (out / "link.csv").symlink_to(tmp_path)
    with pytest.raises(OutputError, match=r"link\.csv"):
        build(out, "3", force=True)


@pytest.mark.parametrize(
    "entry", [".", "..", "../other/mine.txt", "*", "figures", "figures/*.png", "notes.txt", "/etc/hostname", 3, None]
)
def test_what_a_record_says_removes_nothing_of_the_users(entry: object, tmp_path: Path) -> None:
    """Neither the directory itself, nor files outside of it, nor files of other programs."""
    out, other = tmp_path / "run", tmp_path / "other"
    build(out)
    other.mkdir()
    for path in (out / "notes.txt", out / "figures" / "mine.png", other / "mine.txt"):
        path.write_text("mine")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "files": [*record["files"], entry]}))
    before = files(tmp_path)
    with pytest.raises(OutputError):
        build(out, "2", force=True)
    folders.discard(out, KIND)
    foreign = {"run/notes.txt", "run/figures/mine.png", "other/mine.txt"}
    assert {name: text for name, text in before.items() if name in foreign} == files(tmp_path)


@pytest.mark.parametrize(
    "record",
    ["{", "[]", "null", '{"kind": "test", "files": "x"}', '{"kind": 3}', '{"kind": "test", "files": 3}', "[" * 99999],
)
def test_a_broken_record_makes_everything_foreign(record: str, tmp_path: Path) -> None:
    build(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(record)
    with pytest.raises(OutputError):
        build(tmp_path / "run", "2", force=True)


def test_an_output_is_no_input_and_holds_none(tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text" / "a.en"
    for path in (model / "weights", text):
        path.parent.mkdir()
        path.write_text("x")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "tokens").write_text("x")
    (model / "tokens").symlink_to(tmp_path / "blobs" / "tokens")
    inputs = [Input(model, checkpoint=True), Input(text)]
    for out in (model, tmp_path, tmp_path / "link", tmp_path / "text" / ".." / "model", tmp_path / "blobs"):
        with pytest.raises(OutputError, match="checkpoint"):
            check_folder(out, KIND, inputs=inputs, force=True)
    for out in (model / "run", tmp_path / "link" / "a" / "run"):
        with pytest.raises(OutputError, match="checkpoint"):
            check_folder(out, KIND, inputs=inputs, force=True)
    with pytest.raises(OutputError, match=r"a\.en"):
        check_folder(text.parent, KIND, inputs=inputs, force=True)
    check_folder(text.parent / "run", KIND, inputs=inputs, force=False)
    for path in (text, model / "weights"):
        with pytest.raises(OutputError, match=r"read|checkpoint"):
            check_file(path, inputs=inputs, force=True)
    (earlier := tmp_path / "heads.csv").write_text("x")
    with pytest.raises(OutputError, match="--force"):
        check_file(earlier, inputs=inputs, force=False)
    check_file(earlier, inputs=inputs, force=True)


def test_a_file_of_a_run_is_not_overwritten_but_its_figures(tmp_path: Path) -> None:
    build(tmp_path / "run")
    for name in ("heads.csv", "run.json"):
        with pytest.raises(OutputError, match="run"):
            check_file(tmp_path / "run" / name, force=True)
    check_file(tmp_path / "run" / "figures" / "heads.png", force=True)
    with pytest.raises(OutputError, match="--force"):
        check_file(tmp_path / "run" / "figures" / "heads.png", force=False)


def test_a_rename_that_fails_puts_the_old_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    build(out)
    before, real, left = files(tmp_path), os.rename, [1]

    def fails(source: object, target: object, **more: object) -> None:
        if str(target) == str(out) and left.pop():
            left.append(0)
            raise OSError(5, "Input/output error")
        real(source, target, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OutputError, match="Input/output error"):
        build(out, "2", force=True)
    assert files(tmp_path) == before


def test_a_directory_that_cannot_be_renamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point, as containers have them, or the current directory."""
    monkeypatch.chdir(tmp_path)
    for out in (Path("."), tmp_path, Path("/proc")):
        with pytest.raises(OutputError, match="name a folder in it"):
            check_folder(out, KIND, force=True)


def kill_after(after: int, work: Callable[[], object]) -> bool:
    """Do work in a process that dies after so many changes of the file system; return whether it died."""
    child = os.fork()
    if child == 0:
        folders._held_locks.clear()  # locks are the other process's

        def dying(real: Callable[..., None]) -> Callable[..., None]:
            def count_change(*arguments: Any, **options: Any) -> None:
                nonlocal after
                real(*arguments, **options)
                after -= 1
                if after == 0:
                    os._exit(9)

            return count_change

        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "link"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_a_process_that_is_killed_anywhere_leaves_the_old_run_or_the_new_one(tmp_path: Path) -> None:
    """The next command puts it right, whatever it is."""

    def rebuild(text: str, more: str) -> None:
        with Build(out, KIND, force=True) as output:
            with output.writing() as folder:
                write_atomically(folder / "heads.csv", lambda path: path.write_text(text))
                write_atomically(folder / f"{more}.csv", lambda path: path.write_text(text))
            output.finish({"said": text})

    out = tmp_path / "parent" / "run"
    out.mkdir(parents=True)
    rebuild("1", "old")
    before, change, states = files(out), 0, set()
    while kill_after(change := change + 1, lambda: rebuild("2", "new")):
        repair = 0
        while kill_after(repair := repair + 1, lambda: folders.recover(out, KIND)):
            pass
        with pytest.raises(OutputError, match="already holds"), Build(out, KIND):
            raise AssertionError
        after = files(out)
        states.add(after["heads.csv"])
        assert after == before if after["heads.csv"] == "1" else set(after) == {"heads.csv", "new.csv", "run.json"}
        assert [path.name for path in out.parent.iterdir()] == ["run"]
        rebuild("1", "old")
        assert files(out) == before
    assert states == {"1", "2"} and change > 6


@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_of_two_processes_that_write_the_same_one_is_refused(tmp_path: Path) -> None:
    """Even if the other process finishes while this one writes."""
    out = tmp_path / "run"
    real = folders.seal

    def quicker(*arguments: Any) -> None:
        real(*arguments)
        patch.undo()
        assert not kill_after(0, lambda: build(out, "first"))

    with pytest.MonkeyPatch.context() as patch, Build(out, KIND) as output:
        with output.writing() as folder:
            (folder / "heads.csv").write_text("second")
        patch.setattr("headscope.files.folders.seal", quicker)
        with pytest.raises(OutputError, match="not empty"):
            output.finish({})
    assert files(out)["heads.csv"] == "first" and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_replaces_another_is_made_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    build(out)
    before = files(out)
    with workplace(out, KIND, force=True, resume=None) as work:
        assert work.path == tmp_path / "run.new" == replacing_folder(out)
        (work.path / "state.pt").write_text("half")
    assert files(out) == before and to_resume(out, KIND) == work.path
    with (
        pytest.raises(OutputError, match=r"run\.new holds an interrupted run that would replace .*--force"),
        workplace(out, KIND, force=False, resume=to_resume(out, KIND)),
    ):
        pass
    assert files(out) == before and (work.path / "state.pt").is_file()
    with workplace(out, KIND, force=True, resume=to_resume(out, KIND)) as work:
        assert (work.path / "state.pt").read_text() == "half"
        folders.seal(work.path, KIND, {})
        work.finish()
    assert sorted(files(out)) == ["run.json", "state.pt"] and not work.path.exists()
    with pytest.raises(OutputError, match=r"--resume.*--force"), workplace(out, KIND, force=False, resume=None):
        pass


def test_another_process_that_writes_is_named(tmp_path: Path) -> None:
    lock = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    code = f"import fcntl, os, sys; {lock}; print(flush=True); input()"
    build(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for force in (False, True):
            with pytest.raises(OutputError):
                build(tmp_path / "run", "2", force=force)
        with (
            pytest.raises(OutputError, match="process"),
            workplace(tmp_path / "run", KIND, force=False, resume=tmp_path / "run"),
        ):
            pass
        other.communicate(b"\n")
    with lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run"):
        build(tmp_path / "run", "2", force=True)


def test_signals_wait_for_the_end_of_a_block() -> None:
    with listening():
        steps = []
        with pytest.raises(KeyboardInterrupt), hold_signals():
            signal.raise_signal(signal.SIGTERM)
            steps.append(1)
        assert steps and exit_status() == 143
        with pytest.raises(KeyboardInterrupt), hold_signals(), hold_signals():
            signal.raise_signal(signal.SIGINT)


KINDS = [SHRINK, REMOVAL, *map(choice_by, ("rank", "l0", "subset"))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_force_replaces_results_of_the_same_command_alone(tmp_path: Path, kind: OutputKind) -> None:
    """Although their records have one name: all of these write pruning.json."""
    for other in KINDS:
        out = tmp_path / other.name
        with Build(out, other) as output:
            output.finish({})
        if other.name == kind.name:
            check_folder(out, kind, force=True)
        else:
            with pytest.raises(OutputError, match=f"another kind \\({other.name}\\): --force does not replace"):
                check_folder(out, kind, force=True)
