"""Removal with refitted output projections: smaller models equal refitted masked ones, saved, reloaded, and alone."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headscope.data.corpus import Corpus
from headscope.evaluation.model_inputs import InputTexts, texts
from headscope.export.base import choose_export
from headscope.formats.base import Checkpoint, Export, open_checkpoint, write_checkpoint
from headscope.heads import HeadId
from headscope.model.forward import max_abs_difference, outputs
from headscope.model.interface import through_attend
from headscope.model.removal_plan import RemovalPlan, plan_removal
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.compensate import CalibrationText, split_text
from headscope.pruning.options.shared import Refit
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import remove_planned
from tests.contracts.architectures import CATALOGUE
from tests.oracles import speakers
from tests.oracles.speakers import SPEAKERS, Speaker
from tests.oracles.tiny import END, START

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


def opened(kind: str) -> Checkpoint:
    if kind == "modernbert":
        return speakers.wrapped(make := CATALOGUE["modernbert"].model, Speaker(make, (START,), (END,), masked=True))
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
    bench = RefitBench(checkpoint, text, replace(calibration, add_bias=export.adds_bias))
    return remove_planned(checkpoint, plan, export, data, bench)


def shrunk(
    kind: str, *, export: str | None = None, method: str = "least-squares", sequential: bool = False
) -> tuple[Checkpoint, Shrunk]:
    """A model and what it shrinks to, made once for several tests."""
    return _shrunk(kind, export, method, sequential)


@cache
def _shrunk(kind: str, export: str | None, method: Any, sequential: bool) -> tuple[Checkpoint, Shrunk]:
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
    compensated = done.compensation
    assert compensated is not None and done.verification.difference < 1e-10
    whole, small = compensated.checkpoint, done.checkpoint
    assert whole.layout == checkpoint.layout != small.layout
    wanted = run(whole, done)
    assert max_abs_difference(run(small, done), wanted) < 1e-10
    assert max_abs_difference(run(checkpoint, done), wanted) > 1e-4
    (tmp_path / "small").mkdir()
    written = write_checkpoint(small, tmp_path / "small")
    if kind.startswith("native"):
        return
    again = open_checkpoint(str(written.path), dtype="float64")
    assert again.layout == small.layout
    assert max_abs_difference(run(again, done), wanted) < 1e-10


@pytest.mark.parametrize("kind", WITHOUT_BIAS)
def test_a_bias_is_added_where_the_export_carries_it(kind: str) -> None:
    _, free = shrunk(kind)
    _, bound = shrunk(kind, export="masked")
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
    """Its code, not headscope's, is what transformers runs; contracts/test_removal runs it where headscope is not."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _, done = shrunk(kind)
    assert done.compensation is not None
    (tmp_path / kind).mkdir()
    write_checkpoint(done.checkpoint, tmp_path / kind)
    task = {"llama": "CausalLM", "t5": "Seq2SeqLM", "marian": "Seq2SeqLM"}.get(kind, "MaskedLM")
    loader = getattr(transformers, f"AutoModelFor{task}")
    model = loader.from_pretrained(tmp_path / kind, trust_remote_code=True, dtype=torch.float64).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    code = (tmp_path / kind / "modeling_headscope.py").read_text(encoding="utf-8")
    assert "import headscope" not in code and "from headscope" not in code
    feed = done.data.feeds[0]
    with torch.no_grad():
        logits = model(**feed.arguments).logits
    assert max_abs_difference(logits[feed.real], run(done.compensation.checkpoint, done)) < 1e-5


def test_what_is_measured_on_was_not_calibrated_on() -> None:
    corpus = text("bert", count=53)
    pair = split_text(corpus, None, sentences=1000)
    numbers = [[sentence.number for sentence in part] for part in (pair.calibration, pair.held_out)]
    assert numbers == [list(range(43)), list(range(43, 53))]
    assert split_text(corpus, None, sentences=9).calibration.count == 9
    other = text("bert", count=5)
    assert split_text(corpus, other, sentences=1000) == CalibrationText(corpus.first(53), other)
