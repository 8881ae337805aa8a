"""The public API: the same numbers and files as the commands, texts in memory, models left as they were."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pandas.testing import assert_frame_equal

import headscope as hs
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.engine.study import run_analysis
from headscope.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HeadscopeError,
    OutputError,
    options_as_flags,
    python_errors,
    python_words,
)
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.evaluation.translation import translate_lines
from headscope.formats.base import open_checkpoint
from headscope.formats.fairseq.from_native import fairseq_model
from headscope.formats.translate_options import TranslateOptions
from tests.oracles import checkpoints
from tests.oracles.memory import CHEAP, SOURCES, TARGETS, N, in_memory, loaded

pytestmark = pytest.mark.slow

# What is imported, and what is there.


def test_importing_headscope_is_light_and_lazy(python: Callable[..., str]) -> None:
    code = """
import sys, headscope as hs
assert {"load", "analyze", "prune", "train", "evaluate", "plot", "Model", "Study"} <= set(dir(hs))
hs.HeadId.parse("cross.0.1"), hs.HeadscopeError, hs.assets.trained(), hs.AnalyzeConfig, hs.TrainConfig, hs.Refit
print([name for name in ("torch", "numpy", "pandas", "transformers", "matplotlib", "rich") if name in sys.modules])
"""
    assert python("-c", code).strip() == "[]"


def test_nothing_below_the_api_imports_it() -> None:
    root = Path(hs.__file__).parent
    own = {root / "api", root / "cli"}  # the commands are above it
    below = [path for path in root.rglob("*.py") if path.parent not in own and path != root / "__init__.py"]
    assert len(below) > 100
    assert not [path for path in below if "headscope.api" in path.read_text(encoding="utf-8")]


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert callable(hs.load) and all(getattr(hs, name) is not None for name in hs.__all__)
    assert all(isinstance(getattr(hs, name), types.FunctionType) for name in ("analyze", "evaluate", "plot", "train"))
    assert dir(hs) == sorted(hs.__all__)  # also now that modules are imported
    with pytest.raises(AttributeError, match="'anlyze'"):
        hs.anlyze  # noqa: B018


def test_commands_take_what_methods_take() -> None:
    for name in ("analyze", "evaluate"):
        method, function = (list(inspect.signature(getattr(of, name)).parameters.values()) for of in (hs.Model, hs))
        assert [function[0].name, *function[1:]] == ["model", *method[1:]]
        assert getattr(hs, name).__doc__ == getattr(hs.Model, name).__doc__


def test_errors_name_options_as_python_writes_them_and_in_commands_as_flags() -> None:
    def refused() -> str:
        with pytest.raises(ConfigError) as error, python_errors():
            raise ConfigError("--max-length 9 is more than the 5 positions of the model")
        return str(error.value)

    assert refused().startswith("max_length 9 is")
    with options_as_flags():
        assert refused().startswith("--max-length 9 is")
    assert refused().startswith("max_length 9 is")


# Analyses.


def test_a_study_has_the_numbers_and_the_files_of_the_command(
    pair: hs.Model, caption_files: tuple[Path, Path], tmp_path: Path
) -> None:
    shared = {**CHEAP, "detail": True, "mask": "cross.1.2"}
    run_analysis(
        AnalyzeConfig(
            checkpoint=hs.assets.trained(),
            out=tmp_path / "command",
            source=caption_files[0],
            target=caption_files[1],
            device="cpu",
            **shared,
        )
    )
    study = pair.analyze(caption_files[0], target=caption_files[1], **shared)
    assert study.save(tmp_path / "study") == tmp_path / "study"
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


@pytest.mark.parametrize("kind", ["list", "pairs", "tuple", "tuple of paths", "generator", "series"])
def test_texts_may_be_files_lists_and_pairs(
    pair: hs.Model, caption_files: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    expected = pair.analyze(str(caption_files[0]), target=caption_files[1], **CHEAP)
    given: dict[str, tuple[Any, ...]] = {
        "list": (SOURCES, TARGETS),
        "pairs": (list(zip(SOURCES, TARGETS, strict=True)),),
        "tuple": ((SOURCES, TARGETS),),
        "tuple of paths": ((caption_files[0], str(caption_files[1])),),
        "generator": ((line for line in SOURCES), caption_files[1]),
        "series": (caption_files[0], pd.Series(TARGETS)),
    }
    text, *target = given[kind]
    study = pair.analyze(text, **CHEAP, **({"target": target[0]} if target else {}))
    assert_frame_equal(study.heads, expected.heads)
    assert study.signature == expected.signature


def test_sentences_of_a_list_may_end_in_a_line_feed(pair: hs.Model) -> None:
    plain = pair.analyze(SOURCES[:3], **CHEAP)
    assert pair.analyze([f"{line}\n" for line in SOURCES[:3]], **CHEAP).signature == plain.signature


def test_parses_of_a_file_may_belong_to_a_list(tmp_path: Path) -> None:
    parses, text = hs.assets.sample("conllu"), hs.assets.sample("en").read_text(encoding="utf-8").splitlines()
    model = hs.load(hs.assets.trained())
    options: dict[str, Any] = {"only": "syntactic", "max_sentences": 20, "min_instances": 2, "bootstrap": 10}
    studies = [model.analyze(given, parse=parses, **options) for given in (text, None)]
    assert_frame_equal(studies[0].table("syntactic"), studies[1].table("syntactic"))


def test_what_a_study_leaves_out_is_said(pair: hs.Model) -> None:
    study = pair.analyze(SOURCES, only=["confidence", "syntactic"], bootstrap=5)
    assert [(each.analysis, each.why) for each in study.left_out] == [
        ("cross and decoder-self", "need a --target, which the decoder is to read"),
        ("syntactic", "needs --parse stanza or --parse FILE.conllu"),
    ]
    assert "syntactic (needs --parse stanza" in study._repr_html_()


def test_tables_arrays_and_labels_of_a_study(pair: hs.Model) -> None:
    study = pair.analyze(SOURCES, target=TARGETS, **CHEAP)
    assert list(study.tables) == ["heads", "positional", "labels"] and study.table("heads") is study.heads
    assert len(study.heads) == 72 and study.sentences == N and study.complete and not study.left_out
    assert study.arrays["cross/1/cka"].shape == (8, 8)
    assert "encoder-self/0/cosine_low" in study.arrays
    assert all(isinstance(head, hs.HeadId) for head in study.labels)
    assert "72 heads" in repr(study)
    page = study._repr_html_()
    assert "72 heads" in page and "confidence_low" not in page
    assert study.signature.replace("|", "")[:20] in page.replace("|", "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("heads", {"measure": ["confidence", "offset_share"], "sort": True}),
        ("heads", {"measure": "confidence"}),
        ("functions", {}),
        ("positional", {}),
        ("similarity", {"measure": "cka"}),
    ],
)
def test_a_figure_of_a_study_is_that_of_its_files(
    pair: hs.Model, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    study = pair.analyze(SOURCES, target=TARGETS, out=tmp_path / "run", figures=False, **CHEAP)
    figure = hs.plot(study, name, out=tmp_path / "a.svg", **options)
    hs.plot(tmp_path / "run", name, out=tmp_path / "b.svg", **options)
    assert figure.get_size_inches().min() > 0
    assert (tmp_path / "a.svg").read_bytes().replace(b"a.svg", b"") == (tmp_path / "b.svg").read_bytes()


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


def test_removal_with_refitted_output_projections(pair: hs.Model) -> None:
    heads = pair.rank(by="obs", text=SOURCES, target=TARGETS).lowest(24)
    before = [parameter.clone() for parameter in pair.model.parameters()]
    more: dict[str, Any] = {
        "text": SOURCES * 3,
        "target": TARGETS * 3,
        "valid": hs.Texts(SOURCES[:5], TARGETS[:5]),
    }
    plain, refitted = (
        pair.remove(heads, refit=hs.Refit(method=method), **more) for method in ("none", "least-squares")
    )
    assert all(torch.equal(old, new) for old, new in zip(before, pair.model.parameters(), strict=True))
    assert plain.removed == refitted.removed and plain.sizes == refitted.sizes
    assert plain.compensation is not None and refitted.compensation is not None
    losses = refitted.compensation["performance"]
    assert losses["removed"] == plain.compensation["performance"]["removed"]
    assert losses["intact"]["value"] < losses["refitted"]["value"] < losses["removed"]["value"]
    assert refitted.verified["difference"] < 1e-5 and pair.remove(heads).compensation is None


def test_convenience_functions_are_the_methods(pair: hs.Model) -> None:
    assert_frame_equal(
        hs.analyze(hs.assets.trained(), SOURCES, **CHEAP).heads, hs.analyze(pair, SOURCES, **CHEAP).heads
    )
    scores = hs.evaluate(hs.assets.trained(), SOURCES, target=TARGETS, metrics="perplexity", bootstrap=10)
    assert scores["perplexity"] == pair.evaluate((SOURCES, TARGETS), metrics=["perplexity"], bootstrap=10)["perplexity"]


# Evaluation and translation.


def _checkpoint_and_text(files: tuple[Path, Path]) -> dict[str, Any]:
    return {"checkpoint": hs.assets.trained(), "source": files[0], "target": files[1]}


def test_scores_are_those_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"beam": 2, "bootstrap": 11, "mask": "cross.0.1,cross.0.2"}
    config = EvaluateConfig(**_checkpoint_and_text(caption_files), device="cpu", **options)
    expected = run_evaluation(config)
    found = pair.evaluate(SOURCES, target=TARGETS, **{**options, "mask": ["cross.0.1", "cross.0.2"]})
    assert found.scores == expected.scores and str(found.signature) == str(expected.signature)
    assert_frame_equal(found.sentences, expected.sentences)
    assert found["bleu"].name == "BLEU"
    assert repr(found).startswith("<Evaluation: BLEU ") and f"on {N} sentences" in repr(found)
    with pytest.raises(ConfigError, match=r"\b3\b"):
        found[3]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'belu'.*'bleu'"):
        found["belu"]


def test_each_head_off_is_that_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    config = EvaluateConfig(
        **_checkpoint_and_text(caption_files),
        each_head=True,
        heads="cross.1.*",
        metrics=("perplexity",),
        bootstrap=11,
        device="cpu",
    )
    table = pair.evaluate_heads(SOURCES, target=TARGETS, heads="cross.1.*", metrics="perplexity", bootstrap=11)
    expected = run_each_head(config)
    assert_frame_equal(table, expected.table)
    assert table.attrs["signature"] == str(expected.signature) and len(table) == 9


def test_translations_are_those_of_the_command(pair: hs.Model, caption_files: tuple[Path, Path]) -> None:
    found = translate_lines(pair.checkpoint, SOURCES, options=TranslateOptions(beam=3), tokens=2048)
    expected = [best[0].text for best in found]
    assert pair.translate(SOURCES, beam=3) == pair.translate(caption_files[0], beam=3) == expected
    assert pair.translate(["", *SOURCES[:2], " "], beam=3) == ["", *expected[:2], ""]
    assert pair.translate(SOURCES[:4], mask="cross.*.*") != expected[:4]
    several = pair.translations(SOURCES[:4], beam=3, nbest=2)
    assert [best[0].text for best in several] == expected[:4]
    assert all(first.score >= second.score for first, second in several)
    model: Any = pair
    with pytest.raises(ConfigError, match=r"'beams'.*'beam'"):
        model.translate(SOURCES[:1], beams=3)


# What goes wrong.


def endless(gates: torch.Tensor) -> torch.Tensor:
    """Gates of which one of the last row is infinite."""
    gates.view(-1, gates.shape[-1])[-1, 5] = torch.inf
    return gates


untyped: Any = hs  # the calls below are wrong on purpose, some of them in their types
WRONG: list[tuple[Callable[[Any], Any], type[HeadscopeError], str]] = [
    (lambda m: m.analyze("A dog runs."), DataError, "'A dog runs.'"),
    (lambda m: m.analyze([]), DataError, "empty"),
    (lambda m: m.analyze(["a", " "]), DataError, "sentence 2.*empty"),
    (lambda m: m.analyze(["a", 3]), DataError, "sentence 2.*int.*string"),
    (lambda m: m.analyze(["a", "\ud800"]), DataError, "sentence 2.*1.*surrogate"),
    (lambda m: m.analyze(5), ConfigError, "int.*text.*path"),
    (lambda m: m.analyze({"a", "b"}), ConfigError, "set.*text.*path"),
    (lambda m: m.analyze(pd.DataFrame({"en": ["a"]})), ConfigError, "DataFrame.*text.*path"),
    (lambda m: m.analyze(("a", "b", "c")), DataError, "tuple of 3.*pair"),
    (lambda m: m.analyze((["a"], ["b"]), target=["c"]), DataError, "target"),
    (lambda m: m.analyze([("a", "b")], target=["c"]), DataError, "target"),
    (lambda m: m.analyze(["a"], target=["b", "c"]), DataError, "1 sentences.*2 sentences"),
    (lambda m: m.analyze(), ConfigError, "no text.*text FILE.*parse FILE"),
    (lambda m: m.analyze(["a"], onyl="x"), ConfigError, "analyze 'onyl'.*'only'"),
    (lambda m: m.analyze(["a"], only="confidance"), ConfigError, "'confidance'.*'confidence'"),
    (lambda m: m.analyze(["a"], seed="x"), ConfigError, "seed is 'x'.*whole number"),
    (
        lambda m: m.analyze(["a"], importance=1),
        ConfigError,
        "importance is 1.*'none'",
    ),
    (lambda m: m.analyze(["a"], only=5), ConfigError, "only is 5"),
    (
        lambda m: loaded("bert").analyze(["a"], max_length=999),
        ConfigError,
        "^max_length 999.*97",
    ),
    (lambda m: m.analyze(["a"], long="cut"), ConfigError, "^long is 'cut'.*truncate.*refuse"),
    (lambda m: m.analyze(["a"], mask="cross.7.0"), ConfigError, r"'cross\.7\.0'"),
    (lambda m: m.analyze(["a"], mask=[3]), ConfigError, "3.*'encoder-self.0.0'"),
    (lambda m: m.analyze(["a"], progress="bar"), ConfigError, "progress='bar'.*True, False"),
    (lambda m: m.analyze(["a"], only="syntactic"), ConfigError, "syntactic.*parse stanza"),
    (lambda m: m.rank(by="gradiant", text=["a"]), ConfigError, "'gradiant'.*'gradient'"),
    (lambda m: m.rank(by="confidence"), ConfigError, "^by confidence.*text FILE"),
    (lambda m: m.rank(by="random", sites="encoder"), ConfigError, "^sites encoder.*encoder-self"),
    (lambda m: m.remove([]), ConfigError, "head"),
    (
        lambda m: m.remove("cross.0.0", refit=hs.Refit()),
        ConfigError,
        "^compensate least-squares",
    ),
    (
        lambda m: hs.Refit(method="mean", sequential=True),
        ConfigError,
        "^sequential.*least-squares",
    ),
    (lambda m: hs.Refit(method="median"), ConfigError, "'median'.*'mean'"),
    (lambda m: m.remove("cross.0.0", text=["a"], refit=hs.Refit()), DataError, "output projections"),
    (lambda m: m.remove("cross.0.0", keep_only="cross.*.*"), ConfigError, "heads.*keep_only"),
    (lambda m: m.remove(m.rank(by="random")), ConfigError, r"a Ranking names no heads.*ranking\.lowest\(12\)"),
    (lambda m: m.rank(by="random", steps=0), ConfigError, "^steps is 0.*1"),
    (lambda m: m.rank(by="magnitude", steps=2), ConfigError, "^steps 2.*magnitude"),
    (lambda m: m.rank(by="random", damping=0.1), ConfigError, "^damping"),
    (lambda m: m.rank(by="random", allocate="best"), ConfigError, "^allocate is 'best'.*global"),
    (lambda m: m.rank(by="random", objective="loss"), ConfigError, "^objective is about text"),
    (lambda m: m.remove("cross.0.0", export="native"), ConfigError, "^export native"),
    (lambda m: m.evaluate(["a"]), ConfigError, "target"),
    (lambda m: m.evaluate([("a", "b")], metrics="blue"), ConfigError, "unknown metric 'blue'.*bleu"),
    (lambda m: m.translate([("a", "b")]), ConfigError, "one text"),
    (lambda m: m.translate(["a"], beam=0), ConfigError, "beam"),
    (lambda m: m(["a", "b"], target=["c"]), DataError, "lines"),
    (lambda m: m.gated({("cross", 9): torch.ones(8)}).__enter__(), ConfigError, r"\('cross', 9\)"),
    (lambda m: m.gated({("cross", 1): torch.ones(7)}).__enter__(), ConfigError, "7.*cross.1.*8"),
    (
        lambda m: m.gated({"cross.1.2": float("nan")}).__enter__(),
        ConfigError,
        r"cross\.1\.2.*nan.*finite",
    ),
    (
        lambda m: m.gated({("cross", 1): endless(torch.ones(8))}).__enter__(),
        ConfigError,
        r"cross\.1\.5.*inf",
    ),
    (
        lambda m: m.gated({("cross", 1): endless(torch.ones(3, 8))}).__enter__(),
        ConfigError,
        r"cross\.1\.5.*inf",
    ),
    (lambda m: m.gated({"cross.1.2": -1e39}).__enter__(), ConfigError, r"cross\.1\.2.*-inf"),
    (lambda m: m.gated({("cross", 1): 0.5}).__enter__(), ConfigError, r"cross\.1.*\[\]"),
    (lambda m: m.gated({"cross.1.2": "x"}).__enter__(), ConfigError, r"'cross\.1\.2'.*'x'.*number"),
    (
        lambda m: m.gated({"cross.1.2": [1.0, 0.0]}).__enter__(),
        ConfigError,
        r"'cross\.1\.2'.*\[1\.0, 0\.0\].*number",
    ),
    (lambda m: m.gated(7).__enter__(), ConfigError, "int.*heads"),
    (lambda m: hs.load("no/such/thing/at/all"), CheckpointError, "no/such/thing/at/all"),
    *(
        (call, ConfigError, f"^{message}")
        for call, message in (
            (lambda m: untyped.load(7), "source.*int.*path"),
            (lambda m: untyped.load("x", device=3), "device is 3.*text"),
            (lambda m: m.analyze(None), "no text"),
            (lambda m: m.analyze(["a"], target=5), "target: .*int.*path.*list"),
            (lambda m: m.analyze(["a"], labels=5), "labels: .*int"),
            (lambda m: m.analyze(["a"], figures="no"), "figures is 'no'.*True or False"),
            (lambda m: m.analyze(["a"], mask=5), "mask: .*int"),
            (lambda m: m.analyze(["a"], max_length="nine"), "max_length is 'nine'.*whole number"),
            (lambda m: m.analyze(["a"], out=5), "out is 5.*path"),
            (lambda m: m.rank(by=3), "by is 3.*text"),
            (lambda m: m.rank(by="random", study=3), "study.*int.*analyze"),
            (lambda m: m.rank(by="random", sites=3), "sites is 3"),
            (lambda m: m.rank(by="random", protect=3), "protect: .*int"),
            (lambda m: m.rank(by="random").lowest("x"), "count is 'x'.*whole number"),
            (lambda m: m.remove(5), "heads: .*int"),
            (lambda m: m.remove("cross.0.0", refit="mean"), r"refit.*str.*hs\.Refit\("),
            (lambda m: m.remove("cross.0.0", text=5), "text: .*int"),
            (lambda m: m.remove("cross.0.0", metric=5), "metric is 5.*text"),
            (
                lambda m: m.remove(merge_kv=2, merge_by=5),
                "^merge_by is 5.*path",
            ),
            (lambda m: untyped.Refit(damping="x"), "damping is 'x'.*number"),
            (lambda m: m.analyze(untyped.Texts(["a"], pairs=1)), "pairs is 1.*True.*False"),
            (lambda m: m.evaluate(["a"], metrics=5), "metrics is 5"),
            (lambda m: m.evaluate(["a"], against=5), "against is 5.*text"),
            (lambda m: m.translate(5), "text: .*int"),
            (lambda m: m.translations(["a"], nbest="x"), "nbest is 'x'.*whole number"),
            (lambda m: m.gated(pd.DataFrame([[1]])).__enter__(), "gates: "),
            (lambda m: m.capture(5).__enter__(), ".*5"),
            (lambda m: m.convert(5, to="native"), "out is 5.*path"),
            (lambda m: m.convert("x", to=5), "to is 5.*text"),
            (lambda m: untyped.plot(5), "runs: .*int.*study"),
            (lambda m: untyped.plot([5]), "runs: .*int"),
            (lambda m: untyped.plot("x", 5), "unknown figure 5"),
            (lambda m: untyped.train(5, out="x"), "unknown variant.*5"),
            (lambda m: untyped.prune("x", 5, out="x"), "unknown way to prune 5"),
        )
    ),
    (lambda m: hs.load(torch.nn.Linear(2, 2)), ConfigError, "Linear"),
    (lambda m: hs.load(in_memory("gpt2")[0], device="cpu"), ConfigError, "device="),
    (lambda m: hs.load(hs.assets.trained(), tokenizer=1), ConfigError, "tokenizer="),
    (lambda m: hs.load(hs.assets.trained(), dtype="int8"), ConfigError, "dtype 'int8'"),
    (lambda m: hs.load(hs.assets.trained(), bpe="x"), ConfigError, "^bpe.*native"),
    (lambda m: hs.load(in_memory("gpt2")[0]).analyze(["a"]), CheckpointError, "GPT2LMHeadModel"),
    (lambda m: untyped.prune(m, "rank", out="x"), ConfigError, "prune.*path"),
    (lambda m: untyped.prune("x", "rnak", out="x"), ConfigError, "'rnak'.*'rank'"),
    (lambda m: hs.prune("x", "rank", out="x", kepe=3), ConfigError, "prune rank 'kepe'"),
    (lambda m: hs.train("bseline", out="x"), ConfigError, "'bseline'.*'baseline'"),
    (lambda m: hs.train(out="x", lrate=3.0), ConfigError, "train baseline 'lrate'"),
    (lambda m: hs.plot("nowhere"), HeadscopeError, "nowhere"),
    (
        lambda m: hs.plot(m.analyze(["a"], **CHEAP), "haeds"),
        ConfigError,
        "'haeds'.*'heads'",
    ),
    (lambda m: hs.plot(["a", "b"], "heads"), ConfigError, "'heads'.*2"),
    (lambda m: hs.plot([m.analyze(["a"], **CHEAP)], "training"), ConfigError, "training.*study"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_errors_are_one_line_in_the_words_of_python(
    pair: hs.Model, call: Callable[[hs.Model], Any], error: type[HeadscopeError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(pair)
    assert isinstance(caught.value, hs.HeadscopeError)
    outside = re.sub("`headscope [^`]*`", "", str(caught.value))  # a command is as it is typed
    assert "\n" not in str(caught.value) and " --" not in f" {outside}"


def test_a_study_says_what_it_lacks(pair: hs.Model) -> None:
    study = pair.analyze(SOURCES[:3], only="confidence", bootstrap=5)
    for call, message in (
        (lambda: study.table("positonal"), "no positonal.csv"),
        (lambda: study.plot("positional"), "analyze with also positional"),
        (lambda: study.plot("similarity"), "similarity"),
        (lambda: study.plot("faithfulness"), "analyze with faithfulness"),
        (
            lambda: study.plot("heads", colour=1),
            "plot heads 'colour'.*measure, range, sort",
        ),
        (lambda: study.plot("heads", measure="entropy"), "'entropy'"),
        (lambda: pair.rank(by="entropy", study=study), "heads.csv.*'entropy'"),
    ):
        with pytest.raises(HeadscopeError, match=message):
            call()


def test_what_lies_in_a_folder_is_replaced_only_with_force(pair: hs.Model, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    calls: list[bool] = []
    with pytest.raises(OutputError, match="mine"):
        pair.analyze(SOURCES, out=tmp_path / "run", progress=lambda *_: calls.append(True), **CHEAP)
    assert not calls  # refused before anything is measured
    study = pair.analyze(SOURCES[:2], out=tmp_path / "new", figures=False, **CHEAP)
    with pytest.raises(OutputError):
        study.save(tmp_path / "new")
    study.save(tmp_path / "new", figures=False, force=True)


def test_options_in_messages_are_written_as_in_python() -> None:
    assert (
        python_words("--max-length 3 is more; give --out DIR, a-b --c") == "max_length 3 is more; give out DIR, a-b c"
    )
    told = "run `headscope analyze … --importance` first, `a --b` or --max-length"
    assert python_words(told) == "run `headscope analyze … --importance` first, `a b` or max_length"


def test_commands_in_messages_stay_as_they_are_typed() -> None:
    with pytest.raises(CheckpointError, match="`headscope prune remove --export masked` leaves zeros"), python_errors():
        fairseq_model(checkpoints.small())


# Progress.


def test_progress_is_reported_to_a_function(pair: hs.Model) -> None:
    told: list[tuple[str, int, int]] = []
    pair.analyze(SOURCES, progress=lambda *entry: told.append(entry), **CHEAP)
    assert told[0] == ("analysing", 0, N) and told[-1] == ("analysing", N, N)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_bar_is_shown_on_demand(pair: hs.Model, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pair.analyze(SOURCES, progress=True, **CHEAP)
    printed = capfd.readouterr()
    assert "analysing" in printed.err and not printed.out


# Pruning and training.


def test_prune_writes_what_the_command_writes(caption_files: tuple[Path, Path], tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "source": str(caption_files[0]),
        "target": caption_files[1],
        "sites": "encoder-self",
        "device": "cpu",
    }
    told: list[tuple[str, int, int]] = []
    noise = torch.get_rng_state()
    choice = hs.prune(
        hs.assets.trained(),
        "subset",
        out=tmp_path / "subset",
        keep=16,
        updates=2,
        freeze="model",
        progress=lambda *entry: told.append(entry),
        **shared,
    )
    assert repr(choice) == "<Ranking: subset: 16 of 24 heads stay; by subset, whose gates learn which>"
    assert len(choice.removed) == 8 and ("learning", 2, 2) in told
    assert torch.equal(torch.get_rng_state(), noise)  # the caller's own random numbers stay as they are
    assert len((tmp_path / "subset" / "removed.txt").read_text().splitlines()) == 8
    ranked = hs.prune(hs.assets.trained(), "rank", out=tmp_path / "rank", by="magnitude", keep=20, device="cpu")
    assert hs.load(hs.assets.trained()).rank(by="magnitude").lowest(52) == ranked.removed
    assert hs.plot([tmp_path / "rank"], "pruning").axes


def test_train_writes_a_model_that_opens(caption_files: tuple[Path, Path], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    noise = torch.get_rng_state()
    outcome = hs.train(
        "wide",
        out=tmp_path / "run",
        source=caption_files[0],
        target=str(caption_files[1]),
        vocab_size=60,
        d_model=16,
        d_ffn=16,
        heads=4,
        d_head=8,
        encoder_layers=1,
        decoder_layers=1,
        updates=3,
        bleu_every=0,
        betas=[0.9, 0.99],
        device="cpu",
        progress=lambda *entry: told.append(entry),
    )
    assert outcome.update == 3 and told[-1] == ("training", 3, 3)
    assert torch.equal(torch.get_rng_state(), noise)
    with pytest.raises(ConfigError, match=r"^resume.*'wide'.*'baseline'"):
        hs.train(out=tmp_path / "run", resume=True)
    assert hs.train("wide", out=tmp_path / "run", resume=True, updates=5).update == 5
    trained = hs.load(tmp_path / "run" / "last")
    assert trained.layout[hs.Site.CROSS, 0] == 4 and len(trained.translate(["A dog runs."])) == 1
    assert hs.plot(tmp_path / "run", "training").axes


@pytest.fixture(autouse=True)
def _no_figures_pile_up() -> Iterator[None]:
    yield
    import matplotlib.pyplot

    assert not matplotlib.pyplot.get_fignums()  # figures are the caller's, not pyplot's


def test_a_checkpoint_that_was_opened_already_is_a_model() -> None:
    opened = open_checkpoint(hs.assets.trained(), device="cpu")
    assert len(hs.Model(opened).heads) == 72
