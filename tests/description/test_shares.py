"""Shares of heads that were made by hand, and fits against plain softmax regression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headscope.analyses.explained import add_tests
from headscope.bootstrap import Bootstrap
from headscope.description.features import FEATURES
from headscope.description.loglinear import Description, fitted, loss_and_gradient, with_pairs
from headscope.description.pair_function import Masses, functions_for, masses
from headscope.description.sample import Laid
from headscope.description.shares import Explained, among, explained
from headscope.engine.base import ANALYSES, AnalysisReport, HeadBatch
from headscope.engine.evidence.labels import LabelTests
from headscope.engine.plan import analyze
from headscope.heads import Site
from tests.makers import handmade
from tests.oracles import loglinear, tiny
from tests.oracles.run_options import run_options

pytestmark = pytest.mark.slow

RULES = (
    handmade.before,
    handmade.sink,
    handmade.mixture,
    handmade.subject,
    handmade.same,
    handmade.parent,
    handmade.even,
)
BEFORE, SINK, MIXTURE, SUBJECT, SAME, PARENT, EVEN = range(len(RULES))


@pytest.fixture(scope="module")
def laid() -> Laid:
    return handmade.laid(handmade.sample(RULES, sentences=120))


@pytest.fixture(scope="module")
def found(laid: Laid) -> tuple[Explained, Masses]:
    its = explained(laid)
    functions = functions_for(Site.ENCODER_SELF, [pairs for part in laid.pairs for pairs in part])
    return its, masses(laid, functions, its.position)


def shares(found: Explained) -> dict[str, np.ndarray]:
    room = found.room.sum(0)
    return {group: (gained.sum(0) / room).numpy() for group, gained in found.gained.items()}


def test_heads_made_by_hand_are_explained_by_what_they_follow(found: tuple[Explained, Masses]) -> None:
    its = shares(found[0])
    for head in (BEFORE, SINK, MIXTURE):
        assert its["position"][head] == pytest.approx(1, abs=0.02)
    assert its["token"][SAME] < 0.8 and its["classes"][SAME] == pytest.approx(1, abs=0.02)
    for head in (SUBJECT, PARENT):
        assert its["lexical"][head] < 0.9 and its["syntax"][head] == pytest.approx(1, abs=0.02)
    assert np.isnan(its["syntax"][EVEN])


def test_position_alone_explains_what_plain_regression_finds() -> None:
    """Held-out shares of position beside those of softmax regression that is fitted for long, without a ridge."""
    made = handmade.sample((handmade.subject, handmade.mixture), sentences=80)
    laid = handmade.laid(made)
    expected = loglinear.held_out_shares(laid, FEATURES["position"])
    assert shares(explained(laid))["position"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("exclude_sinks", "piece"), [(False, 2**19), (True, 2**19), (False, 200), (False, 5000)])
def test_gradients_are_those_of_autograd(exclude_sinks: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows of a sentence, or sentences, are worked on at a time."""
    monkeypatch.setattr("headscope.description.loglinear.PIECE", piece)
    monkeypatch.setattr("headscope.description.loglinear.LEAST_ROWS", 2)
    sample = handmade.sample(RULES, sentences=7, dtype=torch.float64)
    laid = handmade.laid(sample, width=5, exclude_sinks=exclude_sinks)
    blocks = [loglinear.in_double(block) for block in laid.blocks]
    tables = (laid.tables[0].double(), laid.tables[1].double())
    features, rows = [0, 2, 4], [block.sentences % 3 > 0 for block in blocks]
    start = Description(torch.zeros(sum(laid.inventory.sizes), len(RULES), dtype=torch.float64))
    description = with_pairs(start, blocks, features, rows, tables, rank=3)
    flat = description.flat() + 0.1 * torch.randn(description.flat().shape, generator=torch.Generator().manual_seed(2))
    loss, gradient, watched = loss_and_gradient(description.like(flat), blocks, features, rows, tables)
    variable = flat.clone().requires_grad_()
    expected = loglinear.losses(description.like(variable), blocks, features, rows, tables)
    assert torch.allclose(loss, expected[0]) and torch.allclose(watched, expected[1])
    assert torch.allclose(gradient, torch.autograd.grad(expected[0].sum(), variable)[0], atol=1e-10)


def test_beyond_sinks_it_does_not_matter_how_much_rests() -> None:
    """Heads that follow a rule with 0.04 of their weight are described as those that follow it with all."""
    rules = (handmade.before, handmade.same, handmade.parent, handmade.even)
    busy, idle = (
        handmade.laid(
            handmade.sample([handmade.resting(rule, rest) for rule in rules], sentences=120), exclude_sinks=True
        )
        for rest in (0.0, 0.96)
    )
    whole, rows = (part.sum(0) for part in busy.counted)
    assert torch.allclose(idle.counted[0].sum(0), 0.04 * whole, rtol=1e-4) and bool((whole <= rows + 1e-3).all())
    every, little = explained(busy), explained(idle)
    for group, share in shares(every).items():
        assert shares(little)[group] == pytest.approx(share, abs=0.02, nan_ok=True)
    assert shares(every)["position"][0] == pytest.approx(1, abs=0.02)
    functions = functions_for(Site.ENCODER_SELF, [pairs for part in busy.pairs for pairs in part])
    labels = []
    for laid, found in ((busy, every), (idle, little)):
        tests, report = LabelTests(5), AnalysisReport()
        sums = masses(laid, functions, found.position)
        add_tests(tests, sums, laid, found.sentences, Bootstrap(seed=1, replicates=99), Site.ENCODER_SELF)
        tests.conclude(report)
        labels.append({head.head: set(names) for head, names in report.labels.items()})
    for given in labels:
        assert {"looks:same-token", "looks:same-class"} <= given.pop(1) and given == {2: {"looks:parent"}}


@pytest.mark.parametrize(("resting", "share"), [(0, 0.0), (1, 0.25), (2, 0.5)])
def test_how_many_heads_rest_on_first_and_special_tokens(resting: int, share: float) -> None:
    rules = [handmade.sink] * resting + [handmade.before, handmade.even, handmade.parent, handmade.before][resting:]
    assert handmade.sample(rules, sentences=40).resting() == share


@pytest.mark.parametrize("resting", [1, 3])
def test_where_many_heads_rest_the_rest_of_their_weight_is_described(resting: int) -> None:
    """Of the six heads of a BERT one, or three, give [CLS] 0.9 of their weight."""
    its, options = tiny.checkpoint("bert", 3), run_options(explained_steps=1)

    class Made(ANALYSES.get("explained")):  # type: ignore[misc]
        def observe(self, heads: HeadBatch) -> Any:
            weights = heads.weights.clone()
            for head in range(3):
                if 3 * heads.layer + head < resting:
                    weights[:, head] *= 0.1
                    weights[:, head, :, 0] += 0.9
            assert heads.rows is not None
            return super().observe(replace(heads, rows=heads.rows._replace(weights=weights)))

    study = analyze(its, tiny.corpus(3, count=17), analyses=[Made], options=options, replicates=19)
    assert ("beyond_sinks" in study.heads) is (resting == 3)
    described = "".join(study.heads["description"])
    assert ("position and sinks" in described) is (resting == 1)
    if resting == 3:
        assert (study.heads["beyond_sinks"][:3] < 0.1).all() and (study.heads["beyond_sinks"][3:] > 0.1).all()
        answer = next(answer for answer in study.answers() if answer.question == "What explains their weights")
        assert answer.sentence.startswith("6 heads beyond first and special tokens, which have 0.")
    given = {row["head"] for row in study.tables["examples"].to_dict("records") if row["layer"] == 0}
    assert given == {0, 1, 2} and (study.tables["examples"]["key_position"] > 0).all()


def test_fits_reach_the_minimum_of_plain_regression_and_heads_do_not_depend_on_each_other() -> None:
    laid = handmade.laid(handmade.sample((handmade.mixture, handmade.subject), sentences=30))
    features, rows = [0, 1], [torch.ones(len(block.sentences), dtype=torch.bool) for block in laid.blocks]
    start = Description(torch.zeros(sum(laid.inventory.sizes), 2))

    def loss(description: Description, heads: slice) -> torch.Tensor:
        blocks = [replace(block, weights=block.weights[..., heads]) for block in laid.blocks]
        return loss_and_gradient(description, blocks, features, rows, laid.tables)[0]

    everyone = slice(None)
    together = fitted(start, laid.blocks, features, rows, laid.tables, steps=60)
    least = loglinear.least_loss(laid, features)
    assert (loss(together, everyone) / least).numpy() == pytest.approx(1, abs=0.01)
    alone = fitted(
        Description(start.theta[:, 1:]),
        [replace(block, weights=block.weights[..., 1:2]) for block in laid.blocks],
        features,
        rows,
        laid.tables,
        steps=60,
    )
    assert torch.allclose(loss(alone, slice(1, 2)), loss(together, everyone)[1:], rtol=1e-3)


def test_pairs_that_never_met_are_looked_at_alone(found: tuple[Explained, Masses]) -> None:
    """By loops over rows; and a head that follows positions is explained there as well as anywhere."""
    torch.manual_seed(2)
    weights = torch.rand(2, 3, 5, 2, dtype=torch.float64).softmax(dim=2)
    logs = torch.randn(2, 3, 5, 2, dtype=torch.float64).log_softmax(dim=2)
    some = torch.rand(2, 3, 5) < 0.6
    some[1, 2] = False
    gained, room, even = among(weights, logs, some)
    for b in range(2):
        for h in range(2):
            expected = [0.0, 0.0, 0.0]
            for n in range(3):
                keys = some[b, n].nonzero()[:, 0]
                w, p = weights[b, n, keys, h], logs[b, n, keys, h].exp()
                own, said = w / w.sum(), p / p.sum()
                expected[0] += float((w.sum() * (own * (said * len(keys)).log()).sum()).nan_to_num())
                expected[1] += float((w.sum() * (own * (own * len(keys)).log()).sum()).nan_to_num())
                expected[2] += float(w.sum()) * float(np.log(max(1, len(keys))))
            assert [float(part[b, h]) for part in (gained, room, even)] == pytest.approx(expected)
    got, there = (part.sum(0) for part in found[0].unmet)
    for head in (EVEN, SINK):  # nothing to say, and nothing but dust
        assert got[head] == there[head] == 0 < found[0].room.sum(0)[SINK]
    assert there[SUBJECT] > 0 and float(got[MIXTURE] / there[MIXTURE]) == pytest.approx(1, abs=0.05)
