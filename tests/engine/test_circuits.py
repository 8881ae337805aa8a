"""CPR and CMD: by the published formula, of rankings, and with heads ablated by the corrupt prompt."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from headscope.bootstrap import Bootstrap, GroupSums, Ratio
from headscope.engine.faithfulness.comparison import (
    SHARES,
    PerformanceDrop,
    RemovalSteps,
    cmd,
    compare_rankings,
    cpr,
    measure_drop,
    plan_removals,
)
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.heads import HeadId, Site, all_heads
from tests.oracles import patching, prompts, speakers

HEADS = [HeadId(Site.DECODER_SELF, layer, head) for layer in range(3) for head in range(7)]  # 21
LUCK = np.random.default_rng(4)
SCORES = dict(zip(HEADS, LUCK.normal(size=21).tolist(), strict=True))
WORTH = dict(zip(HEADS, LUCK.normal(size=21).tolist(), strict=True))


@pytest.mark.parametrize(
    ("f", "areas"),
    [(lambda p: 1.0, (0.999, 0.0)), (lambda p: p, (0.4999995, 0.4990005)), (lambda p: 1.5, (1.4985, 0.4995))],
)
def test_areas_of_known_curves(f: object, areas: tuple[float, float]) -> None:
    assert callable(f)
    values = torch.tensor([f(share) for share in SHARES], dtype=torch.float64)
    assert (float(cpr(values)), float(cmd(values))) == pytest.approx(areas, abs=1e-12)


def model_of(kept: set[HeadId]) -> float:
    """m of a model that has these heads left: not additive."""
    total = sum(WORTH[head] for head in kept)
    value: float = total + 0.3 * total**2 + 0.1 * len(kept)
    return value


def sums_of(plan: RemovalSteps) -> GroupSums:
    sums = GroupSums()
    for n in range(5):
        row = [(n + 1) * (7.0 - model_of(set(HEADS) - set(off))) for off in plan.masks]
        sums.add(torch.tensor([n]), Ratio(torch.tensor([row]).double(), torch.tensor([[n + 1.0]]).double()))
    return sums


def published(scores: dict[HeadId, float]) -> tuple[float, float]:
    """Areas under f and |1 − f|, point by point."""
    order = sorted(HEADS, key=lambda head: -scores[head])
    f = []
    for p in SHARES:
        circuit = model_of(set(order[: int(p * 21)]))
        f.append((circuit - model_of(set())) / (model_of(set(HEADS)) - model_of(set())))
    lost = [abs(1 - y) for y in f]
    areas = [
        sum((b - a) * (y + z) / 2 for (a, y), (b, z) in pairwise(zip(SHARES, values, strict=True)))
        for values in (f, lost)
    ]
    return areas[0], areas[1]


@pytest.mark.parametrize("name", ["ablation", "gradient"])  # scores with a sign, and without
def test_columns_are_those_of_the_formula(name: str) -> None:
    plan = plan_removals({name: SCORES}, steps=2, random_orders=2, seed=1)
    drop = PerformanceDrop({"loss": sums_of(plan)})
    row = compare_rankings(plan, drop, {name: SCORES}, Bootstrap(seed=1, replicates=19)).rankings.iloc[0]
    sized = {head: abs(score) for head, score in SCORES.items()} if name == "ablation" else SCORES
    assert row.cpr == pytest.approx(published(SCORES)[0]) and row.cmd == pytest.approx(published(sized)[1])
    assert row.cpr_low <= row.cpr + 1e-9 and row.cmd <= row.cmd_high + 1e-9
    drawn = []
    for number in range(2):
        order = [HEADS[n] for n in np.random.default_rng([1 + number, 21]).permutation(21)]
        drawn.append(published({head: -place for place, head in enumerate(order)}))
    assert (row.cpr_random, row.cmd_random) == pytest.approx(tuple(np.mean(drawn, axis=0)))


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_heads_of_prompts_are_ablated_by_the_corrupt_prompt(kind: str) -> None:
    its = speakers.checkpoint(kind)
    everything = list(all_heads(its.layout))
    masks = [[], everything[1:4], everything]
    options = LikelihoodOptions(101, 60, "truncate", "random", 1)
    drop = measure_drop(its, prompts.corpus(kind), masks, options, objective="answer", step=lambda count: None)
    found = drop.sums["answer"].total.sum(dim=0) / drop.sums["answer"].count.sum(dim=0)
    expected = torch.zeros(3, dtype=torch.float64)
    for prompt in prompts.prompts(kind):
        eager = patching.Eager(its.model, kind, prompt, dict(its.layout))
        contexts = eager.contexts(prompt.corrupt)
        with torch.no_grad():
            for number, mask in enumerate(masks):
                changes: dict[patching.Place, dict[int, torch.Tensor]] = {}
                for head in mask:
                    place = (head.site, head.layer)
                    changes.setdefault(place, {})[head.head] = contexts[place][:, head.head]
                with eager.reading(changes):
                    changed = eager.m(prompt.clean)
                expected[number] += (eager.m(prompt.clean) - changed) / prompts.COUNT
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert expected[1:].abs().min() > 1e-3
