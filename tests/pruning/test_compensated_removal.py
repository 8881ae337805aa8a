"""Removal with refitted output projections: smaller models equal refitted masked ones, saved, reloaded, and alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headscope.config import Companions
from headscope.data.corpus import Corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, Export, open_checkpoint, write_checkpoint
from headscope.heads import HeadId
from headscope.model.forward import max_abs_difference, outputs
from headscope.model.interface import through_attend
from headscope.model.removal_plan import RemovalPlan, plan_removal
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.calibration import CalibrationText, split_text
from headscope.pruning.model_inputs import InputTexts, texts
from headscope.pruning.options.refit import Refit
from headscope.pruning.removal.export import choose_export
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import remove_planned
from tests.oracles import speakers
from tests.oracles.speakers import SPEAKERS, Speaker, V
from tests.oracles.tiny import END, PAD, START

pytestmark = pytest.mark.slow

GONE = {
    "bert": "encoder-self.0.1,encoder-self.1.0,encoder-self.1.2",
    "gpt2": "decoder-self.0.*,decoder-self.1.1",
    "llama": "decoder-self.0.0,decoder-self.0.1,decoder-self.0.2",
    "t5": "encoder-self.0.2,decoder-self.0.1,decoder-self.1.0,cross.0.0,cross.1.*",
    "marian": "encoder-self.0.2,decoder-self.0.1,cross.1.4,cross.1.2",
    "modernbert": "encoder-self.0.1,encoder-self.2.0,encoder-self.3.*",
    "native-post": "encoder-self.0.1,cross.0.0",
    "native-pre": "encoder-self.0.1,cross.0.0",
}
WITHOUT_BIAS = ("llama", "t5", "modernbert")


def modernbert() -> Any:
    config = transformers.ModernBertConfig(
        vocab_size=V,
        hidden_size=30,
        intermediate_size=11,
        num_hidden_layers=4,
        num_attention_heads=3,
        local_attention=4,
        max_position_embeddings=97,
        pad_token_id=PAD,
        cls_token_id=START,
        sep_token_id=END,
    )
    return transformers.ModernBertForMaskedLM(config)


def opened(kind: str) -> Checkpoint:
    if kind == "modernbert":
        return speakers.wrapped(modernbert, Speaker(modernbert, (START,), (END,), masked=True))
    if kind == "marian":
        return with_positions_of_the_class()
    checkpoint = speakers.checkpoint(kind)
    if kind.startswith("native"):
        checkpoint = checkpoint.with_model(checkpoint.model)
        checkpoint.format = "native"
    return checkpoint


def with_positions_of_the_class() -> Checkpoint:
    """Marian's sinusoidal positions are not saved: the class computes them, and random ones would not come back."""
    make = SPEAKERS["marian"].make
    assert make is not None
    checkpoint = speakers.wrapped(make, SPEAKERS["marian"])
    plain = dict(make().double().named_parameters())
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if "embed_positions" in name:
                parameter.copy_(plain[name])
    return checkpoint


def text(kind: str, count: int = 17) -> Corpus:
    return speakers.corpus("bert" if kind == "modernbert" else kind, count=count)


def gone(kind: str) -> list[HeadId]:
    layout = opened(kind).layout
    heads = []
    for name in GONE[kind].split(","):
        site, layer, head = name.split(".")
        counts = {(place[0].value, place[1]): count for place, count in layout.items()}
        numbers = range(counts[site, int(layer)]) if head == "*" else [int(head)]
        heads += [HeadId.parse(f"{site}.{layer}.{number}") for number in numbers]
    return heads


def shrink(
    checkpoint: Checkpoint,
    plan: RemovalPlan,
    *,
    export: Export,
    data: InputTexts,
    text: CalibrationText,
    calibration: Refit,
) -> Shrunk:
    """A removal that is refitted on a text."""
    bench = RefitBench(checkpoint, text, calibration, add_bias=export.adds_bias)
    return remove_planned(checkpoint, plan, export=export, data=data, bench=bench)


def shrunk(
    kind: str, *, export: str | None = None, method: str = "least-squares", sequential: bool = False
) -> tuple[Checkpoint, Shrunk]:
    """A model and what it shrinks to, made once for several tests."""
    return _shrunk(kind, export, method, sequential)


@cache
def _shrunk(kind: str, export: str | None, method: str, sequential: bool) -> tuple[Checkpoint, Shrunk]:
    checkpoint = opened(kind)
    calibration = Refit(method=method, sequential=sequential)
    done = shrink(
        checkpoint,
        plan_removal(checkpoint.attention_sites, gone(kind), whole_groups=export != "masked"),
        export=choose_export(export, checkpoint),
        data=texts(checkpoint, None, None, sentences=5),
        text=split_text(text(kind), None, sentences=1000),
        calibration=calibration,
    )
    return checkpoint, done


def run(checkpoint: Checkpoint, done: Shrunk) -> Tensor:
    """Outputs of a model for the first batch that models are compared on."""
    with through_attend(checkpoint.model):
        return outputs(checkpoint.model, done.data.feeds[0])


@pytest.mark.parametrize(("kind", "sequential"), [*((kind, False) for kind in GONE), ("marian", True)])
def test_the_smaller_model_is_the_refitted_masked_one(kind: str, sequential: bool, tmp_path: Path) -> None:
    checkpoint, done = shrunk(kind, sequential=sequential)
    compensated = done.compensated
    assert compensated is not None and done.verified.difference < 1e-10
    whole, small = compensated.checkpoint, done.checkpoint
    assert whole.layout == checkpoint.layout != small.layout
    wanted = run(whole, done)
    assert max_abs_difference(run(small, done), wanted) < 1e-10
    assert max_abs_difference(run(checkpoint, done), wanted) > 1e-4
    (tmp_path / "small").mkdir()
    written = write_checkpoint(small, tmp_path / "small", Companions())
    if kind.startswith("native"):
        return
    again = open_checkpoint(str(written.path), dtype="float64")
    assert again.layout == small.layout
    assert max_abs_difference(run(again, done), wanted) < 1e-10


@pytest.mark.parametrize("kind", ["bert", "t5", "marian", "native-pre"])
def test_refitting_helps_in_every_module_and_mean_lies_between(kind: str) -> None:
    methods = ("none", "least-squares") if kind in WITHOUT_BIAS else ("none", "mean", "least-squares")
    records: dict[str, Any] = {}
    for method in methods:
        _, done = shrunk(kind, export="masked" if kind in WITHOUT_BIAS else None, method=method)
        assert done.compensated is not None
        records[method] = done.compensated.record()
    for modules in zip(*(record["modules"] for record in records.values()), strict=True):
        errors = [module["error"] for module in modules]
        assert errors == sorted(errors, reverse=True) and errors[0] == modules[0]["error_without"]
    assert set(records["none"]["performance"]) == {"intact", "removed"}


@pytest.mark.parametrize("kind", WITHOUT_BIAS)
def test_a_bias_is_added_where_the_export_carries_it(kind: str) -> None:
    _, free = shrunk(kind)
    _, bound = shrunk(kind, export="masked")
    assert free.compensated is not None and bound.compensated is not None
    for with_bias, without in zip(free.compensated.refits, bound.compensated.refits, strict=True):
        assert (with_bias.affine, without.affine) == (True, False)
        assert with_bias.error <= without.error and not without.refit.shift.any()
    assert "have no bias, and this export adds none" in " ".join(bound.compensated.remarks())
    assert not any("no bias" in remark for remark in free.compensated.remarks())


def test_no_class_of_transformers_holds_an_added_bias() -> None:
    checkpoint, _ = shrunk("t5")
    heads = [HeadId(site, layer, 0) for site, layer in checkpoint.layout]
    pair = split_text(text("t5"), None, sentences=1000)
    options = Refit(method="least-squares")
    data = texts(checkpoint, None, None, sentences=3)
    plan = plan_removal(checkpoint.attention_sites, heads)
    done = shrink(
        checkpoint, plan, export=choose_export("self-contained", checkpoint), data=data, text=pair, calibration=options
    )
    native = choose_export("native", checkpoint)
    assert native.refine is not None
    with pytest.raises(ConfigError, match="biases"):
        native.refine(done.checkpoint, done.removal)
    plain = shrink(checkpoint, plan, export=native, data=data, text=pair, calibration=options)
    assert plain.verified.difference < 1e-10 and not hasattr(plain.checkpoint.model.config, "narrowed")


@pytest.mark.parametrize("kind", ["bert", "llama", "t5", "marian", "modernbert"])
def test_the_self_contained_folder_adds_its_biases_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code, not headscope's, is what transformers runs; contracts/test_removal runs it where headscope is not."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _, done = shrunk(kind)
    assert done.compensated is not None
    (tmp_path / kind).mkdir()
    write_checkpoint(done.checkpoint, tmp_path / kind, Companions())
    task = {"llama": "CausalLM", "t5": "Seq2SeqLM", "marian": "Seq2SeqLM"}.get(kind, "MaskedLM")
    loader = getattr(transformers, f"AutoModelFor{task}")
    model = loader.from_pretrained(tmp_path / kind, trust_remote_code=True, dtype=torch.float64).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    code = (tmp_path / kind / "modeling_headscope.py").read_text(encoding="utf-8")
    assert "import headscope" not in code and "from headscope" not in code
    feed = done.data.feeds[0]
    with torch.no_grad():
        logits = model(**feed.arguments).logits
    assert max_abs_difference(logits[feed.real], run(done.compensated.checkpoint, done)) < 1e-5


def test_what_is_measured_on_was_not_calibrated_on() -> None:
    corpus = text("bert", count=53)
    pair = split_text(corpus, None, sentences=1000)
    numbers = [[sentence.number for sentence in part] for part in (pair.calibration, pair.held_out)]
    assert numbers == [list(range(43)), list(range(43, 53))]
    assert split_text(corpus, None, sentences=9).calibration.count == 9
    other = text("bert", count=5)
    assert split_text(corpus, other, sentences=1000) == CalibrationText(corpus.first(53), other)


def test_performance_is_the_loss_of_the_three_models() -> None:
    checkpoint, done = shrunk("marian")
    compensated = done.compensated
    assert compensated is not None
    held_out = list(compensated.text.held_out)
    models = {"intact": checkpoint, "refitted": compensated.checkpoint}
    for name, model in models.items():
        questions = [speakers.asked("marian", sentence) for sentence in held_out]
        with torch.no_grad():
            total = sum(float(question.loss(model)) for question in questions)
        loss = total / sum(len(question.labels) for question in questions)
        assert compensated.performance[name].value == pytest.approx(loss, rel=1e-9)
    damages = {name: performance.damage for name, performance in compensated.performance.items()}
    assert damages["intact"] == 0 and damages["removed"] > 0


def test_fewer_tokens_than_columns_and_dead_heads_are_damped_and_said_so() -> None:
    checkpoint = speakers.wrapped(SPEAKERS["bert"].make or modernbert, SPEAKERS["bert"], 23)
    with torch.no_grad():
        checkpoint.model.get_parameter("bert.encoder.layer.0.attention.self.value.weight")[5:10] = 0
        checkpoint.model.get_parameter("bert.encoder.layer.0.attention.self.value.bias")[5:10] = 0
    few = Corpus(
        "few",
        9,
        "0" * 40,
        lambda: iter([sentence for sentence in text("bert", 41) if len(sentence.source.split()) == 1][:9] * 9),
    )
    done = shrink(
        checkpoint,
        plan_removal(checkpoint.attention_sites, [HeadId.parse("encoder-self.0.0")]),
        export=choose_export(None, checkpoint),
        data=texts(checkpoint, None, None, sentences=3),
        text=CalibrationText(few, few),
        calibration=Refit(method="least-squares", damping=0.0),
    )
    assert done.compensated is not None
    (refit,) = done.compensated.refits
    assert refit.refit.raised > 0 and bool(refit.refit.weight.isfinite().all())
    assert "damping was raised" in " ".join(done.compensated.remarks())
    assert math.isfinite(done.compensated.performance["refitted"].value)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a small BERT, and text.en (23 lines) beside it."""
    write_folder = tmp_path / "bert"
    write_folder.mkdir()
    write_checkpoint(opened("bert"), write_folder, Companions())
    lines = "".join(f"{sentence.source}\n" for sentence in text("bert", 23))
    (tmp_path / "text.en").write_text(lines, encoding="utf-8")
    (tmp_path / "few.en").write_text("a b\nb c\n", encoding="utf-8")
    return write_folder


def test_the_command_says_what_refitting_is_worth(
    command: Callable[..., tuple[int, str, str]], bert: Path, tmp_path: Path
) -> None:
    arguments = ("prune", "remove", bert, "--heads", "encoder-self.0.1", "--rounds", 0, "--device", "cpu")
    calibrated = ("--compensate", "least-squares", "--source", tmp_path / "text.en")
    status, out, _ = command(*arguments, *calibrated, "--out", tmp_path / "small", "--verbose")
    assert status == 0
    for line in ("held out: 4 lines of text.en", "heads removed", "least-squares", "those of the refitted model"):
        assert line in out
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))["compensation"]
    assert record["calibration"]["sentences"] == 19 and record["held_out"]["sentences"] == 4
    assert set(record["performance"]) == {"intact", "removed", "refitted"}
    status, out, _ = command(
        *arguments, *calibrated, "--valid-source", tmp_path / "few.en", "--out", tmp_path / "other", "--json"
    )
    record = json.loads(out)["record"]["compensation"]
    assert record["calibration"]["sentences"] == 23 and record["held_out"]["sentences"] == 2
    signatures = {
        json.loads((tmp_path / name / "pruning.json").read_text())["signature"] for name in ("small", "other")
    }
    assert len(signatures) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compensate", "least-squares"], "give --source FILE"),
        (["--labels", "text.en", "--source", "text.en"], "is no classifier"),
        (["--objective", "loss"], "--objective is what a refit is measured by"),
        (["--source", "text.en", "--metric", "bleu"], "bleu needs "),
        (["--source", "text.en", "--margin", "-1"], "--margin"),
        (["--compensate", "least", "--source", "text.en"], "--compensate is 'least'; it must be 'none'"),
        (
            ["--compensate", "mean", "--source", "text.en", "--set", "damping=0.1"],
            "--damping is for --compensate least-squares",
        ),
        (["--source", "text.en", "--sequential"], "--sequential is for --compensate least-squares, not none"),
        (["--source", "text.en", "--feed-forward"], "--feed-forward is for --compensate least-squares, not none"),
        (["--compensate", "least-squares", "--source", "text.en", "--set", "damping=-1"], "--damping is '-1'"),
        (["--compensate", "least-squares", "--source", "text.en", "--set", "damping=nan"], "must be at least 0"),
        (["--compensate", "least-squares", "--source", "few.en"], "too few to refit output projections on: 2 of"),
        (["--compensate", "least-squares", "--source", "text.en", "--calibration-sentences", "3"], "too few"),
        (["--compensate", "least-squares", "--source", "text.en", "--valid-target", "few.en"], "is for --valid-source"),
        (["--compensate", "least-squares", "--source", "text.en", "--target", "text.en"], "--target"),
        (["--compensate", "least-squares", "--source", "text.en", "--valid-source", "no.en"], "there is no file no.en"),
    ],
    ids=str,
)
def test_what_is_refused_takes_one_line_and_leaves_nothing(
    command: Callable[..., tuple[int, str, str]],
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command("prune", "remove", bert, "--out", "small", "--heads", "encoder-self.0.1", *options)
    assert (status, out) == (2, "") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "small").exists()


def test_a_decoder_needs_a_target() -> None:
    checkpoint = opened("marian")
    corpus = text("marian")
    alone = replace(corpus, has_target=False, read=lambda: (s._replace(target=None) for s in corpus.read()))
    with pytest.raises(ConfigError, match="decoder-self"):
        shrink(
            checkpoint,
            plan_removal(checkpoint.attention_sites, gone("marian")),
            export=choose_export(None, checkpoint),
            data=texts(checkpoint, None, None, sentences=3),
            text=split_text(alone, None, sentences=100),
            calibration=Refit(method="least-squares"),
        )
