"""Gradient-like and weight-like importances against slow re-derivations, in float64, one sentence at a time."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from headscope.bootstrap import FOLDS
from headscope.data.corpus import Corpus
from headscope.heads import HeadId, Site, SiteLayer, all_heads
from headscope.model.taps import masked
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import gate_gradients, head_outputs, speakers
from tests.oracles.shuffled import in_folds
from tests.oracles.speakers import SPEAKERS, make_example

pytestmark = pytest.mark.slow

KINDS = tuple(SPEAKERS)
SINGLE = ("llama", "t5")  # their norms compute in float32
every_kind = pytest.mark.parametrize("kind", KINDS)
GRADIENTS = ("gradient", "taylor")


def text(kind: str) -> Corpus:
    """Seven sentences in three folds, so that batches have several."""
    return in_folds(speakers.corpus(kind, count=7), 3)


def study(kind: str, *names: str, tokens: int = 10**9, **options: Any) -> Study:
    return study_of(speakers.checkpoint(kind), text(kind), *names, tokens=tokens, **options)


def column(study: Study, name: str, table: str = "heads") -> dict[HeadId, float]:
    frame = study.heads if table == "heads" else study.tables[table]
    return {HeadId(Site(row["site"]), row["layer"], row["head"]): row[name] for _, row in frame.iterrows()}


def assert_same(actual: Mapping[HeadId, float], expected: Mapping[HeadId, float], *, kind: str) -> None:
    magnitudes = [abs(value) for value in expected.values() if not np.isnan(value)]  # NaN: not measured there
    assert actual.keys() == expected.keys() and any(magnitudes)
    scale = max(magnitudes)
    for head, value in expected.items():
        assert actual[head] == pytest.approx(value, abs=(1e-6 if kind in SINGLE else 1e-10) * scale, nan_ok=True), head


@cache
def gates(kind: str) -> list[tuple[int, int, dict[SiteLayer, torch.Tensor]]]:
    """The fold, the number of labels and ∂loss/∂ξ [h t] by (site, layer), for every sentence."""
    checkpoint, rows = speakers.checkpoint(kind), []
    for sentence in text(kind):
        example = make_example(kind, sentence)
        gradients = gate_gradients.position_gates(checkpoint.model, partial(example.loss, checkpoint))
        rows.append((sentence.number % FOLDS, len(example.labels), gradients))
    return rows


def expected(kind: str, granularity: str) -> tuple[dict[HeadId, float], dict[HeadId, float]]:
    """Mean absolute value and mean square, summed in loops."""
    absolute, square = {}, {}
    for head in all_heads(speakers.checkpoint(kind).layout):
        site_layer, units = (head.site, head.layer), []  # (∂L/∂ξ, what it counts for)
        for fold, count, gradients in gates(kind):
            gradient = gradients[site_layer][head.head]
            if granularity == "token":
                units += [(value.item(), 1, fold) for value in gradient]
            else:
                units.append((sum(gradient.tolist()), count, fold))
        if granularity == "batch":  # here a batch is a fold
            units = [
                (sum(u[0] for u in units if u[2] == fold), sum(u[1] for u in units if u[2] == fold), fold)
                for fold in {u[2] for u in units}
            ]
        total = sum(count for _, count, _ in units)
        absolute[head] = sum(abs(value) for value, _, _ in units) / total
        square[head] = sum(value**2 / count for value, count, _ in units) / total
    return absolute, square


@every_kind
@pytest.mark.parametrize("granularity", ["token", "example", "batch"])
def test_gradient_and_taylor(kind: str, granularity: str) -> None:
    result = study(kind, *GRADIENTS, granularity=granularity)
    absolute, square = expected(kind, granularity)
    for raw in (column(result, "raw", "gradient"), column(result, "gradient_raw")):
        assert_same(raw, absolute, kind=kind)
    assert_same(column(result, "taylor"), square, kind=kind)
    norms: dict[HeadId, float] = {}
    for site, layer in {(head.site, head.layer) for head in absolute}:
        in_layer = {head: value for head, value in absolute.items() if (head.site, head.layer) == (site, layer)}
        length = sum(value**2 for value in in_layer.values()) ** 0.5
        norms |= {head: value / length for head, value in in_layer.items()}
    assert_same(column(result, "gradient"), norms, kind=kind)
    assert result.record["signatures"]["gradient"] == {"m": "gradient.v2", "objective": "loss.v1", "grain": granularity}


@every_kind
def test_contribution(kind: str) -> None:
    checkpoint, result = speakers.checkpoint(kind), study(kind, "contribution", keep_special=True)
    sums: dict[HeadId, list[tuple[float, float]]] = {}
    for sentence in text(kind):
        states = head_outputs.capture_example(checkpoint, make_example(kind, sentence, hide=False))
        for head in all_heads(checkpoint.layout):
            site_layer = (head.site, head.layer)
            terms = head_outputs.contributions(kind, checkpoint, site_layer, head.head, states[site_layer])
            sums.setdefault(head, []).extend(terms)
    for name, index in (("contribution", 0), ("contribution_sum", 1)):
        means = {head: sum(pair[index] for pair in pairs) / len(pairs) for head, pairs in sums.items()}
        assert_same(column(result, name), means, kind=kind)


@every_kind
def test_magnitude(kind: str) -> None:
    checkpoint, result = speakers.checkpoint(kind), study(kind, "magnitude")
    names = ("norm_q", "norm_k", "norm_v", "norm_o")
    product = dict.fromkeys(all_heads(checkpoint.layout), 1.0)
    for part, name in enumerate(names):
        norms = {}
        for head in product:
            matrix = head_outputs.matrix(kind, checkpoint, (head.site, head.layer), part)
            rows = checkpoint.layout[head.site, head.layer]
            groups = 2 if kind == "llama" and part in (1, 2) else rows
            blocks = (matrix.T if part == 3 else matrix).reshape(groups, -1)
            norms[head] = float(np.sqrt(sum(x * x for x in blocks[head.head * groups // rows].tolist())))
            product[head] *= norms[head]
        assert_same(column(result, name, "magnitude"), norms, kind="")
        if part == 3:
            assert_same(column(result, "magnitude"), norms, kind="")
    assert_same(column(result, "magnitude_all"), product, kind="")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if SPEAKERS[kind].direct])
def test_direct_logit(kind: str) -> None:
    checkpoint, result = speakers.checkpoint(kind), study(kind, "direct_logit")
    heads = [head for head in all_heads(checkpoint.layout) if head.site is not Site.ENCODER_SELF]
    totals, count = dict.fromkeys(heads, 0.0), 0
    for sentence in text(kind):
        example = make_example(kind, sentence)
        count += len(example.labels)
        for head in heads:
            totals[head] += head_outputs.direct(kind, checkpoint, example, (head.site, head.layer), head.head)
    assert_same(column(result, "direct_logit"), {head: total / count for head, total in totals.items()}, kind=kind)


def test_closed_heads_have_no_gradient_and_the_others_theirs() -> None:
    kind, off = "gpt2", [HeadId(Site.DECODER_SELF, 0, 1)]
    checkpoint = speakers.checkpoint(kind)
    with masked(checkpoint.model, off):
        signed = column(study(kind, "gradient"), "signed", "gradient")
        total: dict[HeadId, float] = dict.fromkeys(all_heads(checkpoint.layout), 0.0)
        count = 0
        for sentence in text(kind):
            example = make_example(kind, sentence)
            count += len(example.labels)
            gradients = gate_gradients.position_gates(checkpoint.model, partial(example.loss, checkpoint))
            for head in total:
                total[head] += gradients[head.site, head.layer][head.head].sum().item()
    assert signed[off[0]] == 0
    del signed[off[0]], total[off[0]]
    assert_same(signed, {head: value / count for head, value in total.items()}, kind=kind)
