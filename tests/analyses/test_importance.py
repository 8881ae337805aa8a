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
from tests.oracles import gate_gradients, speakers, written
from tests.oracles.shuffled import in_folds
from tests.oracles.speakers import SPEAKERS, make_example

pytestmark = pytest.mark.slow

KINDS = tuple(SPEAKERS)
HALF = ("llama", "t5")  # their norms compute in float32
every_kind = pytest.mark.parametrize("kind", KINDS)
GRADIENTS = ("gradient", "taylor")


def text(kind: str) -> Corpus:
    """Seven sentences in three folds, so that batches have several."""
    return in_folds(speakers.corpus(kind, count=7), 3)


def study(kind: str, *names: str, tokens: int = 10**9, **options: Any) -> Study:
    return study_of(speakers.checkpoint(kind), text(kind), *names, tokens=tokens, **options)


def column(its: Study, name: str, table: str = "heads") -> dict[HeadId, float]:
    frame = its.heads if table == "heads" else its.tables[table]
    return {HeadId(Site(row["site"]), row["layer"], row["head"]): row[name] for _, row in frame.iterrows()}


def same(found: Mapping[HeadId, float], expected: Mapping[HeadId, float], *, kind: str) -> None:
    known = [abs(value) for value in expected.values() if not np.isnan(value)]  # NaN: not measured there
    assert found.keys() == expected.keys() and any(known)
    scale = max(known)
    for head, value in expected.items():
        assert found[head] == pytest.approx(value, abs=(1e-6 if kind in HALF else 1e-10) * scale, nan_ok=True), head


@cache
def gates(kind: str) -> list[tuple[int, int, dict[SiteLayer, torch.Tensor]]]:
    """Of every sentence: its fold, its number of labels, and ∂loss/∂ξ [h t] at every place."""
    its, found = speakers.checkpoint(kind), []
    for sentence in text(kind):
        one = make_example(kind, sentence)
        gradients = gate_gradients.position_gates(its.model, partial(one.loss, its))
        found.append((sentence.number % FOLDS, len(one.labels), gradients))
    return found


def expected(kind: str, granularity: str) -> tuple[dict[HeadId, float], dict[HeadId, float]]:
    """Mean absolute value and mean square, summed in loops."""
    absolute, square = {}, {}
    for head in all_heads(speakers.checkpoint(kind).layout):
        place, units = (head.site, head.layer), []  # (∂L/∂ξ, what it counts for)
        for fold, count, gradients in gates(kind):
            along = gradients[place][head.head]
            if granularity == "token":
                units += [(value.item(), 1, fold) for value in along]
            else:
                units.append((sum(along.tolist()), count, fold))
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
    found = study(kind, *GRADIENTS, granularity=granularity)
    absolute, square = expected(kind, granularity)
    for raw in (column(found, "raw", "gradient"), column(found, "gradient_raw")):
        same(raw, absolute, kind=kind)
    same(column(found, "taylor"), square, kind=kind)
    scaled: dict[HeadId, float] = {}
    for site, layer in {(head.site, head.layer) for head in absolute}:
        mine = {head: value for head, value in absolute.items() if (head.site, head.layer) == (site, layer)}
        length = sum(value**2 for value in mine.values()) ** 0.5
        scaled |= {head: value / length for head, value in mine.items()}
    same(column(found, "gradient"), scaled, kind=kind)
    assert found.record["signatures"]["gradient"] == {"m": "gradient.v2", "objective": "loss.v1", "grain": granularity}


@every_kind
def test_contribution(kind: str) -> None:
    its, found = speakers.checkpoint(kind), study(kind, "contribution", keep_special=True)
    sums: dict[HeadId, list[tuple[float, float]]] = {}
    for sentence in text(kind):
        seen = written.capture_example(its, make_example(kind, sentence, hide=False))
        for head in all_heads(its.layout):
            place = (head.site, head.layer)
            sums.setdefault(head, []).extend(written.contributions(kind, its, place, head.head, seen[place]))
    for name, which in (("contribution", 0), ("contribution_sum", 1)):
        means = {head: sum(pair[which] for pair in pairs) / len(pairs) for head, pairs in sums.items()}
        same(column(found, name), means, kind=kind)


@every_kind
def test_magnitude(kind: str) -> None:
    its, found = speakers.checkpoint(kind), study(kind, "magnitude")
    names = ("norm_q", "norm_k", "norm_v", "norm_o")
    product = dict.fromkeys(all_heads(its.layout), 1.0)
    for part, name in enumerate(names):
        norms = {}
        for head in product:
            whole = written.matrix(kind, its, (head.site, head.layer), part)
            rows = its.layout[head.site, head.layer]
            groups = 2 if kind == "llama" and part in (1, 2) else rows
            blocks = (whole.T if part == 3 else whole).reshape(groups, -1)
            norms[head] = float(np.sqrt(sum(x * x for x in blocks[head.head * groups // rows].tolist())))
            product[head] *= norms[head]
        same(column(found, name, "magnitude"), norms, kind="")
        if part == 3:
            same(column(found, "magnitude"), norms, kind="")
    same(column(found, "magnitude_all"), product, kind="")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if SPEAKERS[kind].direct])
def test_direct_logit(kind: str) -> None:
    its, found = speakers.checkpoint(kind), study(kind, "direct_logit")
    heads = [head for head in all_heads(its.layout) if head.site is not Site.ENCODER_SELF]
    totals, count = dict.fromkeys(heads, 0.0), 0
    for sentence in text(kind):
        one = make_example(kind, sentence)
        count += len(one.labels)
        for head in heads:
            totals[head] += written.direct(kind, its, one, (head.site, head.layer), head.head)
    same(column(found, "direct_logit"), {head: total / count for head, total in totals.items()}, kind=kind)


def test_closed_heads_have_no_gradient_and_the_others_theirs() -> None:
    kind, off = "gpt2", [HeadId(Site.DECODER_SELF, 0, 1)]
    its = speakers.checkpoint(kind)
    with masked(its.model, off):
        found = column(study(kind, "gradient"), "signed", "gradient")
        total: dict[HeadId, float] = dict.fromkeys(all_heads(its.layout), 0.0)
        count = 0
        for sentence in text(kind):
            one = make_example(kind, sentence)
            count += len(one.labels)
            gradients = gate_gradients.position_gates(its.model, partial(one.loss, its))
            for head in total:
                total[head] += gradients[head.site, head.layer][head.head].sum().item()
    assert found[off[0]] == 0
    del found[off[0]], total[off[0]]
    same(found, {head: value / count for head, value in total.items()}, kind=kind)
