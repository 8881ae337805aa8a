"""Removal with refitted output projections: smaller models equal refitted masked ones, saved, reloaded, and alone."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headscope.data.corpus import Corpus
from headscope.evaluation.model_inputs import read_input_texts
from headscope.export.base import choose_export
from headscope.formats.base import Checkpoint, open_checkpoint, write_checkpoint
from headscope.heads import HeadId, all_heads, select_heads
from headscope.model.forward import max_abs_difference, outputs
from headscope.model.interface import through_attend
from headscope.model.removal_plan import plan_removal
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.compensate import CalibrationText, RefittedCopy, compensate, split_text
from headscope.pruning.closed_form.moments import Moments, collect_moments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import remove_planned
from tests.contracts.architectures import CATALOGUE
from tests.oracles import speakers
from tests.oracles.speakers import SPEAKERS, Speaker
from tests.oracles.tiny import END, START

pytestmark = pytest.mark.slow

REMOVED = {
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


def open_model(kind: str) -> Checkpoint:
    if kind == "modernbert":
        return speakers.wrap_model(make := CATALOGUE["modernbert"].model, Speaker(make, (START,), (END,), masked=True))
    if kind == "marian":
        return open_marian()
    checkpoint = speakers.checkpoint(kind)
    if kind.startswith("native"):
        checkpoint = checkpoint.with_model(checkpoint.model)
        checkpoint.format = "native"
    return checkpoint


def open_marian() -> Checkpoint:
    """Marian's sinusoidal positions are not saved: the class computes them, and random ones would not come back."""
    make = SPEAKERS["marian"].make
    assert make is not None
    checkpoint = speakers.wrap_model(make, SPEAKERS["marian"])
    plain = dict(make().double().named_parameters())
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if "embed_positions" in name:
                parameter.copy_(plain[name])
    return checkpoint


def text(kind: str, count: int = 17) -> Corpus:
    return speakers.corpus("bert" if kind == "modernbert" else kind, count=count)


@cache
def shrink_model(kind: str, *, name: str | None = None, sequential: bool = False) -> tuple[Checkpoint, Shrunk]:
    """A model and its smaller export, built once for several tests."""
    checkpoint = open_model(kind)
    export = choose_export(name, checkpoint)
    heads = select_heads(REMOVED[kind], checkpoint.layout)
    plan = plan_removal(checkpoint.attention_sites, heads, whole_groups=name != "masked")
    calibration = Refit(method="least-squares", sequential=sequential, add_bias=export.adds_bias)
    bench = RefitBench(checkpoint, split_text(text(kind), None, sentences=1000), calibration)
    return checkpoint, remove_planned(
        checkpoint, plan, export, read_input_texts(checkpoint, None, None, sentences=5), bench
    )


def run_model(checkpoint: Checkpoint, result: Shrunk) -> Tensor:
    """Outputs of a model for the first batch that models are compared on."""
    with through_attend(checkpoint.model):
        return outputs(checkpoint.model, result.data.feeds[0])


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in REMOVED), ("marian", {"sequential": True})])
def test_the_smaller_model_is_the_refitted_masked_one(kind: str, options: dict[str, bool], tmp_path: Path) -> None:
    checkpoint, result = shrink_model(kind, **options)
    compensation = result.compensation
    assert compensation is not None and result.verification.difference < 1e-10
    refit, small = compensation.checkpoint, result.checkpoint
    assert refit.layout == checkpoint.layout != small.layout
    expected = run_model(refit, result)
    assert max_abs_difference(run_model(small, result), expected) < 1e-10
    assert max_abs_difference(run_model(checkpoint, result), expected) > 1e-4
    (tmp_path / "small").mkdir()
    files = write_checkpoint(small, tmp_path / "small")
    if kind.startswith("native"):
        return
    again = open_checkpoint(str(files.path), dtype="float64")
    assert again.layout == small.layout
    assert max_abs_difference(run_model(again, result), expected) < 1e-10


@pytest.mark.parametrize("kind", WITHOUT_BIAS)
def test_a_bias_is_added_where_the_export_carries_it(kind: str) -> None:
    _, free = shrink_model(kind)
    _, bound = shrink_model(kind, name="masked")
    assert free.compensation is not None and bound.compensation is not None
    for with_bias, without in zip(free.compensation.refits, bound.compensation.refits, strict=True):
        assert (with_bias.affine, without.affine) == (True, False)
        assert with_bias.error <= without.error and not without.refit.shift.any()
    assert "have no bias, and this export adds none" in " ".join(bound.compensation.remarks())
    assert not any("no bias" in remark for remark in free.compensation.remarks())


@pytest.mark.parametrize("kind", ["bert", "llama", "t5", "marian", "modernbert"])
def test_the_self_contained_folder_adds_its_biases_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers runs the folder's code; contracts/test_removal runs it where headscope is not installed."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _, result = shrink_model(kind)
    assert result.compensation is not None
    (tmp_path / kind).mkdir()
    write_checkpoint(result.checkpoint, tmp_path / kind)
    task = {"llama": "CausalLM", "t5": "Seq2SeqLM", "marian": "Seq2SeqLM"}.get(kind, "MaskedLM")
    loader = getattr(transformers, f"AutoModelFor{task}")
    model = loader.from_pretrained(tmp_path / kind, trust_remote_code=True, dtype=torch.float64).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    code = (tmp_path / kind / "modeling_headscope.py").read_text(encoding="utf-8")
    assert "import headscope" not in code and "from headscope" not in code
    feed = result.data.feeds[0]
    with torch.no_grad():
        logits = model(**feed.arguments).logits
    assert max_abs_difference(logits[feed.real], run_model(result.compensation.checkpoint, result)) < 1e-5


def test_what_is_measured_on_was_not_calibrated_on() -> None:
    corpus = text("bert", count=53)
    pair = split_text(corpus, None, sentences=1000)
    numbers = [[sentence.number for sentence in part] for part in (pair.calibration, pair.held_out)]
    assert numbers == [list(range(43)), list(range(43, 53))]
    assert split_text(corpus, None, sentences=9).calibration.count == 9
    other = text("bert", count=5)
    assert split_text(corpus, other, sentences=1000) == CalibrationText(corpus.first(53), other)


# Refitted output projections, against masked models and against the intact one.


KINDS = ("bert", "gpt2", "llama", "t5", "marian", "native-pre", "native-post")


@cache
def calibrate(kind: str) -> tuple[Checkpoint, Moments, tuple[HeadId, ...]]:
    """A model, its moments, and the half of its heads that `obs` removes."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=31)
    scores = criterion_named("obs").scores(ScoringContext(checkpoint, corpus))
    order = sorted(scores, key=lambda head: scores[head])
    size = 3 if kind == "llama" else 1
    return checkpoint, collect_moments(checkpoint, corpus), tuple(order[: len(order) // 2 // size * size])


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_gains_and_only_modules_that_lose_heads_change(kind: str) -> None:
    checkpoint, moments, heads = calibrate(kind)
    refits = compensate(checkpoint, moments, heads)
    site_layers = {site_layer for refit in refits for site_layer in refit.projection.site_layers}
    assert site_layers == {(head.site, head.layer) for head in heads}
    for refit in refits:
        columns = refit.projection.columns(
            [head for head in heads if (head.site, head.layer) in refit.projection.site_layers]
        )
        if len(columns) < refit.projection.weight.shape[1]:  # where all heads go nothing is left to refit
            assert 0 <= refit.error < refit.error_without
        assert not refit.refit.weight[:, columns].any() and refit.refit.damping > 0
        assert refit.projection.has_bias or not refit.refit.shift.any()
    if not any(refit.projection.mixing for refit in refits):  # folding is another model
        model = RefittedCopy.of(checkpoint, refits).model
        after = dict(model.named_parameters())
        names = {name for name, old in checkpoint.model.named_parameters() if not torch.equal(old, after[name])}
        owners = [refit.projection.owner for refit in refits]
        kinds = ("weight", "bias") if refits[0].projection.has_bias else ("weight",)
        assert names == {f"{owner}.{name}" for owner in owners for name in kinds}
        shared = {id(weights) for weights in checkpoint.model.parameters()}
        assert names == {name for name, weights in after.items() if id(weights) not in shared}


@pytest.mark.parametrize("kind", ["bert", "marian", "native-post"])
@pytest.mark.parametrize("method", ["mean", "least-squares"])
def test_a_refit_in_part_lies_on_the_way_to_it(kind: str, method: Any) -> None:
    checkpoint, moments, heads = calibrate(kind)
    mask, part, full = (
        compensate(checkpoint, moments, heads, options)
        for options in (Refit(method="none"), Refit(method=method, strength=0.3), Refit(method=method))
    )
    for before, middle, after in zip(mask, part, full, strict=True):
        for name in ("weight", "shift"):
            first, actual, last = (getattr(refit.refit, name) for refit in (before, middle, after))
            assert torch.allclose(actual, 0.7 * first + 0.3 * last, rtol=1e-12, atol=1e-12)
        assert after.error < middle.error < middle.error_without == before.error


@pytest.mark.parametrize("kind", ["bert", "native-post"])
def test_a_module_without_heads_gives_its_mean(kind: str) -> None:
    checkpoint, moments, _ = calibrate(kind)
    heads = [head for head in all_heads(checkpoint.layout) if head.layer == 0]
    refits = compensate(checkpoint, moments, heads)
    for refit in refits:
        assert isinstance(refit.projection, OutputProjection)
        sums = moments.of(refit.projection)
        assert sums is not None and not refit.refit.weight.any()
        assert torch.allclose(refit.refit.shift, refit.projection.weight @ sums.mean)
