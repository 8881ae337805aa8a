"""The pages and scripts that show the API run as they stand, in this process and in an empty folder."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pandas as pd
import pytest
import torch
from typing_extensions import Unpack

import headscope as hs
from headscope.api.options import PathName, checked_value
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.config.declarations import analysis_options
from headscope.config.small import ConvertConfig, TranslateConfig
from headscope.pruning.options.learn import LearnConfig
from headscope.pruning.options.rank import RankConfig
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.options.shrink import ShrinkConfig
from headscope.pruning.options.sweep import SweepConfig
from tests.docs.newcomer import narrow_bert

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN = [path for path in EXAMPLES if path.name not in ("make_files.py", "make_llama.py", "make_whisper.py")]
"""Run here; what tests/docs/test_commands.py types is run there."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(kind: str, folder: Path, count: int) -> Path:
    """The first captions in a language, as a file."""
    folder.mkdir(exist_ok=True)
    lines = hs.assets.captions(kind).read_text(encoding="utf-8").splitlines()[:count]
    (folder / f"text.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / f"text.{kind}"


def test_every_block_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a BERT that is narrow and few captions; the examples have the real one."""
    bert = narrow_bert(tmp_path / "bert", hs.assets.demo_checkpoint())
    few = {kind: written(kind, tmp_path / "captions", 24) for kind in ("en", "de")}
    monkeypatch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
    monkeypatch.setattr(hs.assets, "captions", few.__getitem__)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) > 8
    assert len(names["best"]) == 3 and names["best"].syntactic_margin.notna().all()
    assert len(names["small"].heads) == 48 and names["small"].verified.difference < 1e-5
    assert names["heads"]["cross.1.5"]["weights"].ndim == 3
    assert len(names["pruned"].heads) == 60 and len(names["each"]) == 9
    printed = capsys.readouterr().out
    assert "unknown analysis 'confidance'; did you mean 'confidence'" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"bert", "captions", "api"}
    files = {"heads.pdf", "run", "similarity.svg", "small", "converted", "gates", "trained", "page.html"}
    assert {path.name for path in (tmp_path / "api").iterdir()} == files


def test_the_page_names_everything_that_there_is() -> None:
    for name in set(hs.__all__) - {"__version__"}:
        assert f"hs.{name}" in PAGE or f"`{name}`" in PAGE, name
    for cls in (hs.Model, hs.Study, hs.Ranking, hs.SmallModel):
        for name in vars(cls):
            assert name.startswith("_") or name in PAGE, f"{cls.__name__}.{name}"


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_an_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, list[str]] = {}
    for kind in ("en", "de"):
        written(kind, tmp_path, 8)
    given["remove_heads.py"] = [hs.assets.trained(), "text.en", "text.de"]
    monkeypatch.setattr(sys, "argv", [str(path), *given.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    expected = {
        "analyse_bert.py": ["nsubj", "m:confidence"],
        "remove_heads.py": ["all 72 heads: perplexity", "24 heads fewer by random"],
        "make_classifier.py": ["accuracy 0.90", "on 160 lines"],
        "gate_heads.py": ["looks at", "without encoder-self.", "tensor(["],
    }[path.name]
    assert all(part in printed for part in expected), printed


def test_examples_and_page_use_the_public_api_alone() -> None:
    for text in (PAGE, *(path.read_text(encoding="utf-8") for path in EXAMPLES)):
        assert "import headscope as hs" in text and not re.search(r"^(from|import) headscope(?! as hs$)", text, re.M)


# Everything that the command line does.

PLACES: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(hs.Model, name)
        for name in ["analyze", "rank", "remove", "shrink", "evaluate", "evaluate_heads", "convert"]
    },
    **{name: getattr(hs.Model, name) for name in ("translate", "translations")},
    **{name: getattr(hs.SmallModel, name) for name in ("save", "times")},
    **{name: getattr(hs.Ranking, name) for name in ("lowest", "highest")},
    **{"Study.write_alignment": hs.Study.write_alignment, "load": hs.load, "Texts": hs.Texts, "Refit": hs.Refit},
}
TEXT = {"source": "text", "source2": "second", "pairs": "Texts.pairs", "checkpoint": "load.source"}
VALID = dict.fromkeys(("valid_source", "valid_target", "valid_source2", "valid_labels"), "remove.valid")
HUB = {"hub_name": "push_to", "hub_public": "public"}
REFIT = {
    "compensate": "Refit.method",
    **{name: f"Refit.{name}" for name in ("damping", "sequential", "feed_forward", "objective")},
    **{name: f"Refit.{name}" for name in ("anchor", "check", "strength")},
}
AFTER = ("tune_updates", "freeze", "lr", "schedule", "warmup", "label_smoothing", "clip", "valid_sentences")
ELSEWHERE: dict[type[Any], tuple[str, dict[str, str]]] = {
    AnalyzeConfig: (
        "analyze",
        {**TEXT, "write_alignment": "Study.write_alignment.model", "alignment_heads": "Study.write_alignment.heads"},
    ),
    EvaluateConfig: (
        "evaluate",
        {
            **{**TEXT, "text": "tokenised", "heads": "evaluate_heads.heads"},
            "each_head": "another method: evaluate_heads",
            "out": "what evaluate_heads returns has to_csv",
            "per_sentence": "the sentences of an Evaluation have to_csv",
            "force": "nothing is written",
        },
    ),
    TranslateConfig: (
        "translate",
        {
            **{**TEXT, "greedy": "beam", "nbest": "translations.nbest", "keep_bpe": "keep_pieces"},
            "scores": "another method: translations",
            "window": "all sentences are returned",
        },
    ),
    ConvertConfig: ("convert", {**TEXT, **HUB, "out": "folder"}),
    RemoveConfig: (
        "remove",
        {
            **{**TEXT, **VALID, **REFIT, "calibration_sentences": "Refit.sentences", "out": "save.folder"},
            **{name: f"save.{word}" for name, word in HUB.items()},
            **{name: f"save.{name}" for name in ("force", "quantize")},
            **{name: f"times.{name}" for name in ("rounds", "batch")},
            "column": "merge_by takes numbers by head, of any column",
        },
    ),
    ShrinkConfig: (
        "shrink",
        {
            **{**TEXT, **dict.fromkeys(VALID, "shrink.valid"), "out": "save.folder"},
            **{name: f"save.{word}" for name, word in HUB.items()},
            **{name: f"save.{name}" for name in ("force", "quantize")},
            "rounds": "times.rounds",
        },
    ),
    RankConfig: (
        "rank",
        {
            **{
                **TEXT,
                **VALID,
                "run": "study",
                "score_sentences": "max_sentences",
                "max_sentences": "max_sentences",
                "export": "remove.export",
            },
            **dict.fromkeys(("keep", "keep_fraction"), "highest.count"),
            **{name: REFIT[name] for name in ("compensate", "sequential", "anchor")},
            **dict.fromkeys((*AFTER, "out", "force", "remove"), "what follows the choice is for hs.prune"),
        },
    ),
}
HEADS, TEXTS = {"mask", "protect", "heads", "keep_only"}, {"target", "labels", "clean", "corrupt", "answer"}


def kinds(hint: Any) -> set[Any]:
    """The types of a union without None; what Python callers may give for paths and lists of words."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    wider = {Path: get_args(PathName), tuple[str, ...]: (str, Iterable[str]), tuple[int, ...]: (int, Iterable[int])}
    return {kind for part in parts if part is not type(None) for kind in wider.get(part, (part,))}


def names_in(thing: Any) -> dict[str, Any]:
    """What annotations of a function or class mean; aliases that are written as strings are anything."""
    names = {**vars(sys.modules[thing.__module__]), "Unpack": Unpack, "pd": pd, "nn": torch.nn}
    return names | {name: Any for name, value in names.items() if isinstance(value, str)}


@cache
def keywords(place: str) -> dict[str, tuple[set[Any], Any]]:
    """Types and defaults of the keywords of a function of the API, those in a TypedDict included."""
    function = inspect.unwrap(PLACES[place])
    names = names_in(function)
    hints = get_type_hints(function, names)
    parameters = inspect.signature(function).parameters
    found = {name: (kinds(hints[name]), each.default) for name, each in parameters.items() if name in hints}
    for name, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            (more,) = get_args(hints[name])
            found.pop(name)
            written = {option: each.__forward_arg__ for option, each in more.__annotations__.items()}
            found |= {option: (kinds(eval(hint, names_in(more))), None) for option, hint in written.items()}
    return found


@pytest.mark.parametrize("config", ELSEWHERE, ids=lambda config: config.__name__)
def test_every_option_of_a_command_is_a_keyword_of_the_api(config: type[Any]) -> None:
    """Of the same name, type and default, or another one that is named here, or it is said why there is none."""
    method, elsewhere = ELSEWHERE[config]
    hints, own = get_type_hints(config), keywords(method)
    assert elsewhere.keys() - TEXT.keys() <= hints.keys()
    for entry in fields(config):
        word = elsewhere.get(entry.name)
        if word is not None:
            place, _, keyword = word.rpartition(".")
            assert " " in word or keyword in keywords(place or method), f"{entry.name}: there is no {word}"
        elif entry.name not in own:
            assert entry.name in keywords("load"), f"{method} has no {entry.name}"
        elif entry.name not in HEADS | TEXTS:
            types, default = own[entry.name]
            assert Any in types or types >= kinds(hints[entry.name]), entry.name
            assert default in (None, inspect.Parameter.empty, entry.default), entry.name
    words = {word.rpartition(".")[2] for word in elsewhere.values()} | {entry.name for entry in fields(config)}
    assert own.keys() - words - analysis_options().keys() <= ONLY_PYTHON | TEXTS


ONLY_PYTHON = {"self", "text", "progress", "parse", "study", "tokenised", "second", "refit", "valid"}


@pytest.mark.parametrize("config", [LearnConfig, SweepConfig, RankConfig, ShrinkConfig])
def test_what_takes_options_as_the_commands_do_takes_all(config: type[Any]) -> None:
    """`hs.prune` takes the options of a config by their names: every one has a type that Python can give."""
    hints = get_type_hints(config)
    for entry in fields(config):
        if entry.default is not MISSING and entry.name != "method":
            given = checked_value(entry.name, hints[entry.name], entry.default)
            assert given == entry.default and type(given) is type(entry.default), entry.name


def test_a_sweep_is_made_from_python(tmp_path: Path) -> None:
    source = written("en", tmp_path, 3)
    options = {"methods": "magnitude", "keep": [60], "valid_source": source, "valid_target": written("de", tmp_path, 3)}
    with_checkpoint: Any = hs.prune
    sweep = with_checkpoint(hs.assets.trained(), "sweep", out="sweep", bootstrap=10, device="cpu", **options)
    assert list(sweep.table["method"].unique()) and (tmp_path / "sweep" / "sweep.csv").exists()
