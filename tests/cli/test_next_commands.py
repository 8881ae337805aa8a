"""Every line `next: …` that a command prints runs as it stands, and so does what that one prints."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headscope import assets
from headscope.cli.next_commands import after_analysis
from headscope.pruning.removal import remove
from headscope.pruning.removal.verify import timings
from headscope.report import registry
from headscope.results.study import Study
from tests.makers.figures import draw_nothing
from tests.makers.shared import Command
from tests.oracles import classifiers
from tests.oracles.commands import Stage, commands

COMMAND = re.compile(r"[\w ]+: +headscope ")
LAST = ("evaluate", "show")  # where a chain ends: what they lead to is followed from other commands


@pytest.fixture
def follow(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command and each next command that is printed; return the printed commands.

    The sample is short, and models are timed once. Of lines with the same command and options one is run for all calls
    with the same list `history`.
    """
    for kind in ("en", "de"):
        sample = assets.sample(kind).read_text(encoding="utf-8").splitlines(keepends=True)[:6]
        (tmp_path / f"sample.{kind}").write_text("".join(sample), encoding="utf-8")
    monkeypatch.setattr(assets, "sample", lambda kind: tmp_path / f"sample.{kind}")
    draw_nothing(monkeypatch)
    monkeypatch.setattr(registry, "draw_standard", lambda folder: [])
    monkeypatch.setattr(remove, "timings", lambda *models, batch, rounds: timings(*models, batch=batch, rounds=1))

    def run_chain(*words: object, history: list[list[str]] | None = None) -> list[str]:
        monkeypatch.chdir(tmp_path)
        lines, texts = list[str](), dict[str, object]()
        while True:
            words = tuple(texts.get(str(words[n - 1]), w) if "YOUR-TEST" in str(w) else w for n, w in enumerate(words))
            texts |= {str(words[n - 1]).replace("--valid-", "--"): word for n, word in enumerate(words) if n}
            status, output, error = command(*words)
            assert status == 0, (words, error)
            line = next((line for line in output.splitlines() if COMMAND.match(line)), None)
            if line is None or (lines and lines[-1].startswith(LAST)):
                return lines
            assert "FILE" not in line
            lines.append(COMMAND.sub("", line))
            parts = shlex.split(lines[-1])
            kind = [*parts[: 1 + (parts[0] in ("prune", "plot"))], *(word for word in parts if word.startswith("-"))]
            words = tuple(parts)
            if history is not None:
                if kind in history:
                    return lines
                history.append(kind)

    return run_chain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with texts and their labels, for models too."""
    texts = [text for text in dict.fromkeys(classifiers.texts(23)) if text.strip()]
    (tmp_path / "text").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "labels").write_text("good\nbad\n" * (len(texts) // 2) + "good\n" * (len(texts) % 2))
    return tmp_path


@pytest.mark.slow
def test_of_every_command(tmp_path: Path, follow: Callable[..., list[str]]) -> None:
    (tmp_path / "stage").mkdir()
    stage, steps, history = Stage(tmp_path / "stage"), dict[str, list[str]](), list[list[str]]()
    for entry in commands():
        name = " ".join(entry.words)
        of_one_variant = entry.words[0] != "train" or name == "train baseline"
        if of_one_variant and entry.words[0] not in ("plot", "translate", "evaluate", "analyze"):
            steps[name] = follow(*stage.arguments(entry.words, tmp_path / name.replace(" ", "-")), history=history)
    assert {name for name, lines in steps.items() if not lines} <= {"prune subset", "list"}
    assert steps["prune rank"][0].startswith("prune remove") and steps["train baseline"][0].startswith("plot training")


@pytest.mark.slow
def test_of_a_classifier(folder: Path, follow: Callable[..., list[str]]) -> None:
    model = classifiers.folder(folder / "model", "bert")
    text = ("--source", "text", "--labels", "labels")
    lines = follow("prune", "rank", model, "--by", "obs", "--keep", 4, "--out", "ranked", *text)
    assert "--compensate auto" in lines[0] and "--labels labels" in lines[0] and "--source text" in lines[0]
    assert lines[1].startswith("evaluate") and "--labels YOUR-TEST" in lines[1]
    lines = follow("prune", "rank", model, "--by", "magnitude", "--keep", 4, "--out", "by-magnitude")
    assert "--compensate" not in lines[0] and "--metrics cosine" in lines[1]
    analyze = ("analyze", model, "--only", "sink", "--no-figures", "--bootstrap", 11)
    lines = follow(*analyze, "--out", "run", *text)
    assert [line.split()[0] for line in lines] == ["analyze", "plot"]
    assert "--labels labels" in lines[0] and "--importance --out" in lines[0]


def test_what_analyses_and_stanza_were_told_goes_on() -> None:
    options: dict[str, Any] = {"checkpoint": "m", "source": "t", "parse": "stanza", "lang": "de", "stanza_dir": "st"}
    options |= {"alignments": "links", "alignments_first": 1, "aligner": "auto", "ig_steps": 7}
    options |= {"max_length": 9, "long": "truncate", "keep_special": True, "exclude_sinks": False}
    options |= {"template": "{source} = {target}", "examples": 2, "batch_tokens": 2048}
    study = Study({}, {"options": options, "layout": {}}, folder=Path("run"))
    ((_, line),) = after_analysis(study)
    assert "--template '{source} = {target}' --examples 2" in line
    for part in ("--parse stanza", "--set lang=de", "--set stanza-dir=st", "--max-length 9", "--set keep-special=true"):
        assert part in line
    assert "long" not in line and "batch-tokens" not in line
    assert "--set alignment.alignments=links --set alignment.alignments-first=1" in line and "aligner" not in line
