"""No command replaces a file that it reads, whatever `--force` says: every path option of every command."""

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from headscope.assets import trained_model
from headscope.cli import main
from headscope.config import ValidatedTextFiles
from headscope.config.analyze import AnalyzeConfig
from headscope.evaluation import quality, run
from tests.makers.shared import SHIPPED_FOLDER, Command

pytestmark = pytest.mark.slow

PATHS = ("FILE", "DIR", "RUN", "CODES", "PICKLE", "CKPT")
FLAG = "yes"
LISTS_IN_FILES = {"mask", "heads", "keep_only", "protect"}  # metavar LIST: names, or a file of names
TEXTS = {
    entry.name for entry in (*fields(ValidatedTextFiles), *fields(AnalyzeConfig)) if "TextLines" in str(entry.type)
}
FOLDERS = {"dicts", "stanza_dir", "run", "functions", "recipe"}
TEXT = {"source": "text.en", "target": "text.de"}
REQUIRED_OPTIONS: dict[str, dict[str, str]] = {
    "evaluate": TEXT,
    "analyze": {"source": "text.en"},
    "prune l0": {**TEXT, "keep": "3"},
    "prune subset": {**TEXT, "keep": "3"},
    "prune rank": {"by": "magnitude", "keep": "3"},
    "prune sweep": {**TEXT, "methods": "magnitude", "keep": "3"},
    "prune remove": {"heads": "cross.0.1"},
    "prune shrink": {**TEXT, "keep": "3"},
    "train": {**TEXT, "valid_source": "valid.en", "valid_target": "valid.de"},
}
"""Options that a command requires beside its checkpoint and output."""
DEPENDENT_OPTIONS: dict[str, dict[str, str]] = {
    "clean": {"source": "", "clean": "a", "corrupt": "b", "answer": "c"},
    "corrupt": {"source": "", "clean": "a", "corrupt": "b", "answer": "c"},
    "answer": {"source": "", "clean": "a", "corrupt": "b", "answer": "c"},
    "valid_source2": {"source2": "a", "valid_source": "b", "compensate": "mean", "source": "c"},
    "valid_source": {"source": "c"},
    "valid_target": {"valid_source": "b", "source": "c"},
    "valid_labels": {"labels": "a", "compensate": "mean", "source": "c"},
    "source2": {"compensate": "mean", "source": "c"},
    "labels": {"compensate": "mean", "source": "c"},
    "target": {"source": "c"},
    "target_parse": {"source": "c", "target": "d"},
    "stanza_dir": {"parse": "stanza"},
    "anchor": {"compensate": "least-squares", "by": "obs", "source": "c", "target": "d"},
    "check": {"compensate": "auto", "source": "c"},
    "keep_only": {"heads": ""},
    "merge_by": {"heads": "", "merge_kv": "2"},
    "run": {"by": "lrp"},
    "sequences": {"also": "successor"},
    "recipe": {"from_scratch": FLAG, "methods": "l0"},
}
"""Other options that one of these requires or, where empty, excludes, if the command has them."""


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from _commands(command.get_command(None, name), (*path, name))


COMMANDS = dict(_commands(typer.main.get_command(main.app)))


def _takes_path(parameter: Any) -> bool:
    metavar = str(parameter.metavar or "").split(":")[0]
    return any(word in metavar for word in PATHS) or (metavar == "LIST" and parameter.name in LISTS_IN_FILES)


def _cases() -> Iterator[Any]:
    for path, command in COMMANDS.items():
        if path[0] in ("plot", "show", "list", "translate", "demo", "convert"):  # below; some write no files
            continue
        for parameter in command.params:
            if parameter.name not in ("out", "per_sentence") and _takes_path(parameter):
                outputs = ["out", "per_sentence"] if path[0] == "evaluate" and parameter.name != "heads" else ["out"]
                for output in outputs:
                    yield pytest.param(path, parameter.name, output, id=f"{' '.join(path)} {parameter.name} {output}")


@pytest.mark.parametrize(("path", "name", "output"), [*_cases()])
def test_an_input_is_never_replaced(
    path: tuple[str, ...], name: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The output is the input itself, or a folder that holds it; the command ends before anything is opened."""
    monkeypatch.chdir(tmp_path)
    box = tmp_path / "box"
    box.mkdir()
    input_path = box / name
    if name in FOLDERS:
        input_path.mkdir()
    file = input_path / "dict.en.txt" if name in FOLDERS else input_path
    file.write_text("" if name == "config" else "0 cat\n", encoding="utf-8")
    options = COMMANDS[path].params
    values = dict(REQUIRED_OPTIONS.get(" ".join(path), REQUIRED_OPTIONS.get(path[0], {})))
    names = {parameter.name for parameter in options}
    values |= {other: value for other, value in DEPENDENT_OPTIONS.get(name, {}).items() if other in names}
    if "init" in names and name in ("dicts", "bpe"):
        values["init"] = "model"
    if output == "out" and path[0] == "evaluate":
        values["each_head"] = FLAG
    texts = [value for other, value in values.items() if value and other in TEXTS]
    for text in texts:
        Path(text).write_text("a cat\n", encoding="utf-8")
    out = file if path[0] == "evaluate" else box
    values |= {name: str(input_path), output: str(out), "force": FLAG}
    status, _, err = command(*path, *_command_line(options, values))
    assert status == 2 and str(out) in err, err
    assert file.read_text(encoding="utf-8") in ("", "0 cat\n") and {entry.name for entry in tmp_path.iterdir()} == {
        "box",
        *texts,
    }


def _command_line(parameters: list[Any], values: dict[str, str]) -> Iterator[str]:
    by_name = {parameter.name: parameter for parameter in parameters}
    if "checkpoint" in by_name:
        yield values.pop("checkpoint", "model")
    for name, value in values.items():
        if value:
            yield next(flag for flag in by_name[name].opts if flag.startswith("--"))
            yield from [] if value == FLAG else [value]


@pytest.mark.parametrize("with_dicts", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("each_head", [True, False], ids=["each head", "per sentence"])
def test_files_beside_a_checkpoint_are_not_replaced(
    with_dicts: bool, each_head: bool, tmp_path: Path, command: Command
) -> None:
    """Dictionaries, vocabularies and hyper-parameters, found beside the checkpoint or in --dicts."""
    folder = tmp_path / "model"
    checkpoint, companions = "model.npz", ["hp.json", "src.voc.txt", "dst.voc.txt"]
    sources = [SHIPPED_FOLDER / "story-of-heads" / name for name in (checkpoint, *companions)]
    folder.mkdir()
    for source in sources:
        shutil.copyfile(source, folder / source.name)
    text = tmp_path / "text"
    text.write_text("a b\n", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in companions:
        dicts = ["--dicts", folder] if with_dicts else []
        output = ["--each-head", "--out"] if each_head else ["--per-sentence"]
        status, _, err = command(
            *("evaluate", folder / checkpoint, "--source", text, "--target", text, "--metrics", "perplexity"),
            *(*dicts, *output, folder / name, "--force"),
        )
        assert status == 2 and str(folder / name) in err, err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_runs_that_write_one_file_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, caption_files: tuple[Path, Path]
) -> None:
    """Another process writes the file while this one measures: it stays, and the result goes beside it."""
    out = tmp_path / "table.csv"
    original = quality.score_corpus

    def write_and_score(*arguments: Any, **options: Any) -> Any:
        out.write_text("theirs", encoding="utf-8")
        return original(*arguments, **options)

    monkeypatch.setattr(run, "score_corpus", write_and_score)
    source, target = caption_files
    line = ["evaluate", trained_model(), "--source", source, "--target", target, "--metrics", "perplexity"]
    status, output, _ = command(*line, "--per-sentence", out)
    assert status == 0 and out.read_text(encoding="utf-8") == "theirs"
    assert "table.csv.new" in output and "sentence,tokens,nll" in (tmp_path / "table.csv.new").read_text(
        encoding="utf-8"
    )
    status, _, _ = command(*line, "--per-sentence", out, "--force")
    assert status == 0 and "sentence,tokens,nll" in out.read_text(encoding="utf-8")
