"""Remove heads in the order of every ranking, and the other way round; rank the rankings by the gap.

Most important first must harm early, least important first late: the area between the two curves says how
well an order tells them apart (the heads' analogue of perturbation curves, Samek et al. 2017, §III; ΔA of
Achtibat et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from headscope.bootstrap import Array, Bootstrap, Estimate, GroupSums
from headscope.engine.faithfulness.harm import PerformanceDrop
from headscope.engine.faithfulness.orders import Scores, agreement, ordered, random_order
from headscope.errors import ConfigError
from headscope.heads import HeadId

ORDERS = ("most important first", "least important first")
Mask = tuple[HeadId, ...]


@dataclass(frozen=True)
class RemovalPlan:
    """Which masks to measure: `curves[name, order]` and `singles` are places in `masks`, whose first is empty.

    `removed` [step] says how many heads are off at each point of a curve.
    """

    masks: tuple[Mask, ...]
    curves: Mapping[tuple[str, str], tuple[int, ...]]
    removed: tuple[int, ...]
    singles: Mapping[HeadId, int]


@dataclass(frozen=True)
class RankingComparison:
    """Tidy curves, and one row per ranking, the best first."""

    curves: pd.DataFrame
    rankings: pd.DataFrame
    remarks: list[str] = field(default_factory=list)


def plan_removals(
    rankings: Mapping[str, Scores], *, steps: int, random_orders: int, seed: int, singles: bool = True
) -> RemovalPlan:
    """Masks for the curves of all rankings, of `random_orders` random ones, and of each head alone.

    ConfigError for fewer than two steps or one head, and where there is no ranking.
    """
    if not rankings:
        raise ConfigError("no ranking to test: run an importance (--importance), or confidence or entropy")
    heads = list(next(iter(rankings.values())))
    if steps < 2 or len(heads) < 2:
        raise ConfigError(f"--faithfulness-steps {steps} of {len(heads)} heads: at least 2 of each are needed")
    removed = tuple(sorted({round(len(heads) * n / steps) for n in range(steps + 1)}))
    orders = {name: ordered(scores) for name, scores in rankings.items()}
    orders |= {f"random:{n}": random_order(heads, seed=seed + n) for n in range(random_orders)}
    places: dict[frozenset[HeadId], int] = {frozenset(): 0}

    def place(off: Sequence[HeadId]) -> int:
        return places.setdefault(frozenset(off), len(places))

    curves = {}
    for name, order in orders.items():
        for which, its in zip(ORDERS, (order, order[::-1]), strict=True):
            curves[name, which] = tuple(place(its[:count]) for count in removed)
    alone = {head: place([head]) for head in heads} if singles else {}
    return RemovalPlan(tuple(tuple(sorted(off, key=str)) for off in places), curves, removed, alone)


def compare_rankings(
    its: RemovalPlan, harm: PerformanceDrop, rankings: Mapping[str, Scores], bootstrap: Bootstrap
) -> RankingComparison:
    """Curves of every metric, and by the first of them areas, agreement with ablation, and places."""
    curves = [_curves(its, name, value) for name, value in _differences(its, harm, bootstrap).items()]
    main = next(iter(harm.sums), None)
    assert main is not None, "there is always an objective"
    areas = {name: _area(its, name, harm.sums[main], bootstrap) for name in {name for name, _ in its.curves}}
    chance = np.array([float(areas[name].value) for name in areas if name.startswith("random:")])
    single = _single_harm(its, harm.sums[main])
    rows = []
    for name, scores in rankings.items():
        area = areas[name]
        rows.append(
            {
                "ranking": name,
                "area": float(area.value),
                "area_low": float(area.low),
                "area_high": float(area.high),
                "area_random": float(chance.mean()) if len(chance) else float("nan"),
                "area_random_sd": float(chance.std(ddof=1)) if len(chance) > 1 else float("nan"),
                "ablation_spearman": agreement(scores, single) if single else float("nan"),
            }
        )
    table = pd.DataFrame(rows).sort_values("area", ascending=False, kind="stable", ignore_index=True)
    table.insert(0, "place", np.arange(1, len(table) + 1))
    return RankingComparison(pd.concat(curves, ignore_index=True), table)


def _differences(its: RemovalPlan, harm: PerformanceDrop, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """How far each metric is from the intact model's under every mask, with intervals; positive is worse."""
    found = {}
    for name, sums in harm.sums.items():
        sign = -1.0 if name in harm.falls else 1.0

        def gap(total: torch.Tensor, count: torch.Tensor, sign: float = sign) -> torch.Tensor:
            mean = total / count
            return sign * (mean - mean[:, :1])

        found[name] = bootstrap.function(gap, sums)
    for name, values in harm.plain.items():
        away = values[0] - values if name in harm.falls else values - values[0]
        nothing = np.full(len(values), np.nan)
        found[name] = Estimate(away, nothing, nothing)
    return found


def _curves(its: RemovalPlan, metric: str, gaps: Estimate) -> pd.DataFrame:
    frames = []
    for (name, order), places in its.curves.items():
        at = np.array(places)
        frames.append(
            pd.DataFrame(
                {
                    "ranking": name,
                    "order": order,
                    "removed": its.removed,
                    "share": np.array(its.removed) / its.removed[-1],
                    "metric": metric,
                    "harm": gaps.value[at],
                    "harm_low": gaps.low[at],
                    "harm_high": gaps.high[at],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _area(its: RemovalPlan, name: str, sums: GroupSums, bootstrap: Bootstrap) -> Estimate:
    """∫ harm(most important first) − harm(least important first) over the share of heads removed."""
    first, last = (torch.tensor(its.curves[name, order]) for order in ORDERS)
    share = torch.tensor(its.removed, dtype=torch.float64) / its.removed[-1]

    def between(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        mean = total / count
        return torch.trapezoid(mean[:, first] - mean[:, last], share, dim=-1)

    return bootstrap.function(between, sums)


def _single_harm(its: RemovalPlan, sums: GroupSums) -> dict[HeadId, float]:
    mean: Array = (sums.total.sum(dim=0) / sums.count.sum(dim=0)).numpy()
    return {head: float(mean[place] - mean[0]) for head, place in its.singles.items()}


def with_randomised(
    verdict: RankingComparison, rankings: Mapping[str, Scores], shuffled: Mapping[str, Scores]
) -> RankingComparison:
    """The verdict with each ranking's agreement with itself on shuffled weights: near 0 is as it should be."""
    found: Callable[[str], float] = lambda name: (  # noqa: E731
        agreement(rankings[name], shuffled[name]) if name in shuffled else float("nan")
    )
    table = verdict.rankings.assign(shuffled_spearman=[found(name) for name in verdict.rankings["ranking"]])
    return RankingComparison(verdict.curves, table, verdict.remarks)
