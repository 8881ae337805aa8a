"""The public API: the same numbers and files as the commands, texts in memory, models left as they were."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pandas.testing import assert_frame_equal

import headscope as hs
from headscope.api.commands import PRUNING
from headscope.config.analyze import AnalyzeConfig
from headscope.config.commands import EvaluateConfig, TranslateOptions
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError, command_flag, flag, flags
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.evaluation.translation import translate_lines
from tests.makers.figures import draw_nothing
from tests.oracles.memory import CHEAP, SOURCES, TARGETS, N, assert_reopens

pytestmark = pytest.mark.slow


def test_importing_headscope_is_light_and_lazy(python: Callable[..., str]) -> None:
    code = """
import sys, headscope as hs
assert {"load", "analyze", "prune", "train", "evaluate", "plot", "Model", "Study"} <= set(dir(hs))
hs.HeadId.parse("cross.0.1"), hs.HeadscopeError, hs.assets.trained_model(), hs.AnalyzeConfig, hs.TrainConfig, hs.Refit
print([name for name in ("torch", "numpy", "pandas", "transformers", "matplotlib", "rich") if name in sys.modules])
"""
    assert python("-c", code).strip() == "[]"


def test_commands_take_what_methods_take() -> None:
    for name in ("analyze", "evaluate"):
        method, function = (list(inspect.signature(getattr(api, name)).parameters.values()) for api in (hs.Model, hs))
        assert [function[0].name, *function[1:]] == ["model", *method[1:]]
        assert getattr(hs, name).__doc__ == getattr(hs.Model, name).__doc__


def test_errors_name_options_as_python_writes_them_and_in_commands_as_flags() -> None:
    def names() -> str:
        return f"{flag('max_length', 9)}, {flag('bcd', False)} or {flags('source', 'valid_source')}"

    assert names() == "max_length=9, bcd=False or text and valid_source"
    with flag.spelling(command_flag):
        assert names() == "--max-length 9, --no-bcd or --source and --valid-source"
    assert flag.max_length == "max_length"


def _checkpoint_and_text(files: tuple[Path, Path]) -> dict[str, Any]:
    return {"checkpoint": hs.assets.trained_model(), "source": files[0], "target": files[1], "device": "cpu"}


def test_a_study_has_the_numbers_and_the_files_of_the_command(
    pair: hs.Model, caption_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    shared = {**CHEAP, "detail": True, "mask": "cross.1.2"}
    run_analysis(AnalyzeConfig(**_checkpoint_and_text(caption_files), out=tmp_path / "command", **shared))
    study = pair.analyze(caption_files[0], target=caption_files[1], **shared)
    assert study.save(tmp_path / "study") == tmp_path / "study"
    assert_reopens(study)
    files = {path.relative_to(tmp_path / "study") for path in (tmp_path / "study").rglob("*") if path.is_file()}
    assert Path("figures/heads.png") in files and Path("detail/confidence.npz") in files
    assert files == {path.relative_to(tmp_path / "command") for path in (tmp_path / "command").rglob("*.*")}
    for name in files - {Path("run.json")}:
        assert (tmp_path / "study" / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    mine, theirs = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("study", "command"))
    for name in set(theirs) - {"command", "seconds", "options"}:
        assert mine[name] == theirs[name], name
    assert mine["options"] | {"out": None} == theirs["options"] | {"out": None}
    assert study.signature == theirs["signature"] and study.record["complete"]


def test_texts_may_be_files_lists_and_pairs(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    expected = pair.analyze(str(caption_files[0]), target=caption_files[1], **CHEAP)
    texts: dict[str, tuple[Any, ...]] = {
        "list": (SOURCES, TARGETS),
        "pairs": (list(zip(SOURCES, TARGETS, strict=True)),),
        "tuple": ((SOURCES, TARGETS),),
        "tuple of paths": ((caption_files[0], str(caption_files[1])),),
        "generator": ((line for line in SOURCES), caption_files[1]),
        "series": (caption_files[0], pd.Series(TARGETS)),
    }
    for kind, (text, *target) in texts.items():
        study = pair.analyze(text, **CHEAP, **({"target": target[0]} if target else {}))
        assert_frame_equal(study.heads, expected.heads, obj=kind)
        assert study.signature == expected.signature, kind


def test_two_studies_are_compared(pair: hs.Model, tmp_path: Path) -> None:
    first = pair.analyze(SOURCES[:5], out=tmp_path / "first", figures=False, **CHEAP)
    second = pair.analyze(SOURCES[5:], **CHEAP)
    assert hs.plot([first, second], "compare", measure="offset_share").axes
    assert hs.plot([tmp_path / "first", second], "compare").axes
    page = hs.plot([tmp_path / "first", second], "report", out=tmp_path / "page.html")
    assert "Do they order the heads alike" in page.read_text(encoding="utf-8")
    figure = second.plot("attention", heads="encoder-self.0.*", sentence=SOURCES[0], out=tmp_path / "attention.svg")
    assert figure.axes and "encoder-self.0.1" in (tmp_path / "attention.svg").read_text(encoding="utf-8")


def test_nothing_is_written_unless_a_call_says_so(
    pair: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = pair.analyze(SOURCES, target=TARGETS, **CHEAP)
    study.plot("heads")
    pair.remove(pair.rank(by="confidence", study=study).lowest(3)).translate(SOURCES[:1])
    pair.evaluate(SOURCES, target=TARGETS, metrics="perplexity")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_scores_are_those_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"beam": 2, "bootstrap": 11, "mask": "cross.0.1,cross.0.2"}
    config = EvaluateConfig(**_checkpoint_and_text(caption_files), **options)
    expected = run_evaluation(config)
    evaluation = pair.evaluate(SOURCES, target=TARGETS, **{**options, "mask": ["cross.0.1", "cross.0.2"]})
    assert evaluation.scores == expected.scores and str(evaluation.signature) == str(expected.signature)
    assert_frame_equal(evaluation.sentences, expected.sentences)
    assert evaluation["bleu"].name == "BLEU"
    assert repr(evaluation).startswith("<Evaluation: BLEU ") and f"on {N} sentences" in repr(evaluation)
    with pytest.raises(ConfigError, match=r"\b3\b"):
        evaluation[3]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'belu'.*'bleu'"):
        evaluation["belu"]


def test_each_head_off_is_that_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"heads": "cross.1.*", "metrics": ("perplexity",), "bootstrap": 11}
    config = EvaluateConfig(**_checkpoint_and_text(caption_files), each_head=True, **options)
    table = pair.evaluate_heads(SOURCES, target=TARGETS, **{**options, "metrics": "perplexity"})
    expected = run_each_head(config)
    assert_frame_equal(table, expected.table)
    assert table.attrs["signature"] == str(expected.signature) and len(table) == 9


def test_translations_are_those_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    beams = translate_lines(pair.checkpoint, SOURCES, options=TranslateOptions(beam=3), tokens=2048)
    expected = [best[0].text for best in beams]
    assert pair.translate(SOURCES, beam=3) == pair.translate(caption_files[0], beam=3) == expected
    assert pair.translate(["", *SOURCES[:2], " "], beam=3) == ["", *expected[:2], ""]
    assert pair.translate(SOURCES[:4], mask="cross.*.*") != expected[:4]
    lists = pair.translations(SOURCES[:4], beam=3, nbest=2)
    assert [best[0].text for best in lists] == expected[:4]
    assert all(first.score >= second.score for first, second in lists)
    model: Any = pair
    with pytest.raises(ConfigError, match=r"'beams'.*'beam'"):
        model.translate(SOURCES[:1], beams=3)


def test_prune_writes_what_the_command_writes(caption_files: tuple[Path, Path], tmp_path: Path) -> None:
    text: dict[str, Any] = {"source": str(caption_files[0]), "target": caption_files[1]}
    options: dict[str, Any] = {"sites": "encoder-self", "keep": 16, "updates": 2, "freeze": "model", "device": "cpu"}
    options["progress"] = lambda *entry: events.append(entry)
    events: list[tuple[str, int, int]] = []
    noise = torch.get_rng_state()
    choice = hs.prune(hs.assets.trained_model(), "subset", out=tmp_path / "subset", **text, **options)
    assert_reopens(choice)
    assert repr(choice) == "<Ranking: subset: 16 of 24 heads stay; by subset, whose gates learn which>"
    assert len(choice.removed) == 8 and ("learning", 2, 2) in events
    assert torch.equal(torch.get_rng_state(), noise)  # the caller's own random numbers stay as they are
    assert len((tmp_path / "subset" / "removed.txt").read_text().splitlines()) == 8
    ranking = hs.prune(hs.assets.trained_model(), "rank", out=tmp_path / "rank", by="magnitude", keep=20, device="cpu")
    assert hs.load(hs.assets.trained_model()).rank(by="magnitude").lowest(52) == ranking.removed
    assert hs.plot([tmp_path / "rank"], "pruning").axes


@pytest.mark.parametrize("method", PRUNING)
def test_every_way_to_prune_names_what_it_cannot_use(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'warmth'"):
        hs.prune(hs.assets.trained_model(), method, out=tmp_path / "out", warmth=3)  # type: ignore[call-overload]


@pytest.mark.filterwarnings("default:without validation text:UserWarning")
def test_train_writes_a_model_that_opens(caption_files: tuple[Path, Path], tmp_path: Path) -> None:
    events: list[tuple[str, int, int]] = []
    noise = torch.get_rng_state()
    sizes: dict[str, Any] = {"vocab_size": 60, "d_model": 16, "d_ffn": 16, "heads": 4, "d_head": 8}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1}
    options: dict[str, Any] = {"updates": 3, "bleu_every": 0, "betas": [0.9, 0.99], "device": "cpu"}
    options |= {"source": caption_files[0], "target": str(caption_files[1])}
    options["progress"] = lambda *entry: events.append(entry)
    outcome = hs.train("wide", out=tmp_path / "run", **sizes, **options)
    assert_reopens(outcome)
    assert outcome.update == 3 and events[-1] == ("training", 3, 3)
    assert torch.equal(torch.get_rng_state(), noise)
    with pytest.raises(ConfigError, match=r"^resume.*'wide'.*'baseline'"):
        hs.train(out=tmp_path / "run", resume=True)
    with pytest.warns(UserWarning, match="^without validation text.*valid_source and valid_target"):
        assert hs.train("wide", out=tmp_path / "run", resume=True, updates=5).update == 5
    model = hs.load(tmp_path / "run" / "last")
    assert model.layout[hs.Site.CROSS, 0] == 4 and len(model.translate(["A dog runs."])) == 1
    assert hs.plot(tmp_path / "run", "training").axes


@pytest.fixture(autouse=True)
def _no_figures_pile_up() -> Iterator[None]:
    yield
    import matplotlib.pyplot

    assert not matplotlib.pyplot.get_fignums()  # figures are the caller's, not pyplot's
