"""Faithfulness of rankings: performance while heads are removed in the order of a ranking, and in the reverse order.

Removing the most important heads first should lower performance early, the least important first late. The area
between the two curves measures how well a ranking separates them (perturbation curves of pixels, Samek et al. 2017,
§III; ΔA of Achtibat et al. 2024).

CPR and CMD measure how much of the model's performance its most important heads reach alone (Mechanistic
Interpretability Benchmark, Mueller et al. 2025, arXiv 2504.13151). They are computed as in `evaluation.py` of the MIB
circuit track, with heads in the place of edges: f(p) = (m(C_p) − m(∅)) / (m(all) − m(∅)), where C_p keeps the
int(p · N) heads with the highest scores and ablates the others, and ∅ ablates all N heads. CPR is the area under f, CMD
the area under |1 − f|, by trapezoids over p from 0.001 to 1, so that f ≡ 1 has a CPR of 0.999. Since heads are not
edges, the numbers cannot be compared with that benchmark's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.attribution.gatevector import explained_batch
from headscope.attribution.objectives.base import OBJECTIVES, Objective, choose_objective
from headscope.attribution.patching import record_contexts
from headscope.bootstrap import Array, Bootstrap, Estimate, GroupSums, Ratio, interval
from headscope.config.analyze import AnalyzeOptions
from headscope.config.commands import TranslateOptions
from headscope.config.declarations import import_target, measure_of, measured_columns
from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.engine.base import Analysis, RunOptions
from headscope.engine.faithfulness.orders import (
    Scores,
    agreement,
    order_heads,
    random_order,
    scores_of,
    shuffle_weights,
)
from headscope.engine.plan import analyze
from headscope.errors import ConfigError, flag
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.evaluation.quality import text_score
from headscope.evaluation.translation import text_mode, translate_lines
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.progress import Progress
from headscope.results.study import INTERRUPTED, Study

Masks = Sequence[Sequence[HeadId]]
Step = Callable[[int], None]
HIGHER_IS_BETTER = {"accuracy", "bleu"}
"""Metrics that drop under a harmful mask; all others rise."""


@dataclass
class PerformanceDrop:
    """Metrics under masks of heads: `sums` per sentence and mask, or `values` of the corpus [mask].

    The first mask is empty; drops are differences to it.
    """

    sums: dict[str, GroupSums] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    objective: str = "loss"


def measure_drop(
    checkpoint: Checkpoint, corpus: Corpus, masks: Masks, options: LikelihoodOptions, *, objective: str, step: Step
) -> PerformanceDrop:
    """The loss and accuracy under every mask, or for another `objective` its damage; empty: the default objective.

    The context of a masked head is 0, or for the objective of answers to prompts its context on the corrupt prompt.
    KeyboardInterrupt if not the whole text was scored.
    """
    assert not masks[0], "differences are to the first mask, which is empty"
    name = choose_objective(objective, checkpoint, **corpus.comes_with, has_answers=corpus.has_contrast)
    if name == "loss":
        losses = likelihood(checkpoint, corpus, options, masks=masks, progress=step)
        if not losses.complete:
            raise KeyboardInterrupt
        return PerformanceDrop({"loss": losses.nll, "accuracy": losses.right})
    damage = _damage(checkpoint, corpus, masks, options, OBJECTIVES.get(name)(seed=options.seed), step)
    return PerformanceDrop({name: damage}, objective=name)


def _damage(
    checkpoint: Checkpoint, corpus: Corpus, masks: Masks, options: LikelihoodOptions, objective: Objective, step: Step
) -> GroupSums:
    sums = GroupSums()
    labels = corpus.has_labels or checkpoint.predicts == "words"
    stream = batches(corpus, checkpoint, tokens=options.tokens, limit=options.limit, long=options.long, labels=labels)
    with torch.inference_mode():
        for batch in stream:
            on_device, corrupt = batch.to(checkpoint.device), None
            if objective.needs_prompts:
                corrupt = record_contexts(checkpoint, on_device.corrupted_batch).contexts
            with explained_batch(checkpoint, objective, on_device, layer_index=None, other_contexts=corrupt) as f:
                damages = [-f(f.gates_without(heads)) for heads in masks[1:]]
            columns = torch.stack([torch.zeros_like(damages[0]), *damages], dim=1)
            sums.add(batch.indices, Ratio(columns, f.counts[:, None].expand_as(columns)))
            step(len(batch.indices))
    return sums


def bleu_scores(
    checkpoint: Checkpoint, corpus: Corpus, plan: RemovalSteps, *, tokens: int, progress: Progress
) -> Array:
    """BLEU of detokenised translations under every mask of a curve; NaN for other masks."""
    references = [checkpoint.join_subwords(sentence.target or "") for sentence in corpus]
    on_curves = {number for numbers in plan.curves.values() for number in numbers}
    scores = np.full(len(plan.masks), np.nan)
    with progress("translating without heads", corpus.count * len(on_curves)) as step:
        for number in sorted(on_curves):
            with masked(checkpoint.model, plan.masks[number]):
                lines = (sentence.source for sentence in corpus)
                best = translate_lines(checkpoint, lines, options=TranslateOptions(), tokens=tokens, progress=step)
                hypotheses = [translations[0].text for translations in best]
            scores[number] = text_score("bleu", hypotheses, references, text=text_mode(checkpoint)[0]).value
    return scores


SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def faithfulness(drops: Tensor, everything: Tensor) -> Tensor:
    """f [… p] of drops m(all) − m(C_p) [… p] and of m(all) − m(∅) [… 1]; NaN where ∅ does as well as all."""
    return torch.where(everything == 0, torch.nan, 1 - drops / everything)


def cpr(f: Tensor) -> Tensor:
    """∫ f dp for f [… p] at `SHARES`."""
    return torch.trapezoid(f, torch.tensor(SHARES, dtype=f.dtype), dim=-1)


def cmd(f: Tensor) -> Tensor:
    """∫ |1 − f| dp for f [… p] at `SHARES`."""
    return torch.trapezoid((1 - f).abs(), torch.tensor(SHARES, dtype=f.dtype), dim=-1)


ORDERS = ("most important first", "least important first")
MIB: Mapping[str, Callable[[Tensor], Tensor]] = {"cpr": cpr, "cmd": cmd}
"""The areas of that benchmark. Heads are ordered by score for CPR, by absolute score for CMD."""
Mask = tuple[HeadId, ...]


@dataclass(frozen=True)
class RemovalSteps:
    """The masks to measure; all other fields are indices into `masks`, whose first mask is empty.

    `curves[name, order]` has a mask for each point of a curve, at which `removal_counts` heads are removed,
    `singles[head]` that of one head, `circuits[name, measure]` that of the heads outside the circuit at each of
    `SHARES`, `everything` that of all heads.
    """

    masks: tuple[Mask, ...]
    curves: Mapping[tuple[str, str], tuple[int, ...]]
    removal_counts: tuple[int, ...]
    singles: Mapping[HeadId, int]
    circuits: Mapping[tuple[str, str], tuple[int, ...]]
    everything: int


def plan_removals(rankings: Mapping[str, Scores], *, steps: int, random_orders: int, seed: int) -> RemovalSteps:
    """Masks for the curves and circuits of all rankings and of `random_orders` random orders, and of each head alone.

    ConfigError for fewer than two steps or heads, and if there is no ranking.
    """
    if not rankings:
        raise ConfigError(f"no ranking to test: run an importance ({flag.importance}), or confidence or entropy")
    heads = list(next(iter(rankings.values())))
    if steps < 2 or len(heads) < 2:
        raise ConfigError(f"{flag('faithfulness_steps', steps)} of {len(heads)} heads: at least 2 of each are needed")
    sizes = tuple(sorted({round(len(heads) * n / steps) for n in range(steps + 1)}))
    orders = {name: order_heads(scores) for name, scores in rankings.items()}
    orders |= {f"random:{n}": random_order(heads, seed=seed + n) for n in range(random_orders)}
    masks: dict[frozenset[HeadId], int] = {frozenset(): 0}

    def mask_number(heads: Sequence[HeadId]) -> int:
        return masks.setdefault(frozenset(heads), len(masks))

    curves = {}
    for name, order in orders.items():
        for direction, removal_order in zip(ORDERS, (order, order[::-1]), strict=True):
            curves[name, direction] = tuple(mask_number(removal_order[:count]) for count in sizes)
    by_head = {head: mask_number([head]) for head in heads}
    everything = mask_number(heads)
    circuits = {}
    for (name, order), measure in product(orders.items(), MIB):
        if name in rankings and measure == "cmd" and measure_of(name).signed:
            order = order_heads({head: abs(score) for head, score in rankings[name].items()})
        # all but the first int(share · N) heads are ablated
        circuits[name, measure] = tuple(mask_number(order[int(share * len(order)) :]) for share in SHARES)
    mask_tuples = tuple(tuple(sorted(mask, key=str)) for mask in masks)
    return RemovalSteps(mask_tuples, curves, sizes, by_head, circuits, everything)


def compare_rankings(
    plan: RemovalSteps,
    drop: PerformanceDrop,
    rankings: Mapping[str, Scores],
    shuffled_scores: Mapping[str, Scores],
    bootstrap: Bootstrap,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table of curves of every metric, and the table of rankings, sorted by area.

    Areas and agreement with ablation are by the first metric. Where there are `shuffled_scores`, a ranking's agreement
    with itself on shuffled weights should be near 0.
    """
    curves = [_curves(plan, metric, drops) for metric, drops in _drops(drop, bootstrap).items()]
    total, count = bootstrap.sums(next(iter(drop.sums.values())))  # there is always an objective
    means = total / count  # [1+r masks]
    areas = {name: _areas(plan, name, means) for name, _ in plan.curves}
    random_areas = {
        measure: [float(own[measure].value) for name, own in areas.items() if name.startswith("random:")] or [np.nan]
        for measure in ("area", *MIB)
    }
    single = {head: float(means[0, number] - means[0, 0]) for head, number in plan.singles.items()}
    rows = []
    for name, scores in rankings.items():
        cells = {
            measure: area.cell(measure) | {f"{measure}_random": float(np.mean(random_areas[measure]))}
            for measure, area in areas[name].items()
        }
        rows.append(
            {
                "ranking": name,
                "important": measure_of(name).keep or "highest",
                **cells["area"],
                "area_random_sd": np.std(random_areas["area"], ddof=1) if len(random_areas["area"]) > 1 else np.nan,
                "ablation_spearman": agreement(scores, single),
                **cells["cpr"],
                **cells["cmd"],
                "shuffled_spearman": agreement(scores, shuffled_scores[name]) if name in shuffled_scores else np.nan,
            }
        )
    table = pd.DataFrame(rows).sort_values("area", ascending=False, kind="stable", ignore_index=True)
    table.insert(0, "place", np.arange(1, len(table) + 1))
    return pd.concat(curves, ignore_index=True), table


def _areas(plan: RemovalSteps, name: str, means: Tensor) -> dict[str, Estimate]:
    """The areas of a ranking: "area" = ∫ drop(most important first) − drop(least important first), CPR, and CMD.

    The integral is over the share of heads removed; `means` [1+r masks] of the metric are on the corpus and in each
    replicate.
    """
    first, last = (means[:, list(plan.curves[name, order])] for order in ORDERS)
    share = torch.tensor(plan.removal_counts, dtype=torch.float64) / plan.removal_counts[-1]
    areas = {"area": interval(torch.trapezoid(first - last, share, dim=-1))}
    drops = means - means[:, :1]
    for measure, integrate in MIB.items():
        f = faithfulness(drops[:, list(plan.circuits[name, measure])], drops[:, plan.everything, None])
        areas[measure] = interval(integrate(f))
    return areas


def _drops(drop: PerformanceDrop, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Each metric's difference to the intact model under every mask, with intervals; positive is worse."""
    drops = {}
    for name, sums in drop.sums.items():
        total, count = bootstrap.sums(sums)
        losses = total / count * (-1 if name in HIGHER_IS_BETTER else 1)
        drops[name] = interval(losses - losses[:, :1])
    for name, values in drop.values.items():
        change = values[0] - values if name in HIGHER_IS_BETTER else values - values[0]
        no_interval = np.full(len(values), np.nan)
        drops[name] = Estimate(change, no_interval, no_interval)
    return drops


def _curves(plan: RemovalSteps, metric: str, drops: Estimate) -> pd.DataFrame:
    share = np.array(plan.removal_counts) / plan.removal_counts[-1]
    frames = []
    for (name, order), numbers in plan.curves.items():
        about = {"ranking": name, "order": order, "removed": plan.removal_counts, "share": share, "metric": metric}
        frames.append(pd.DataFrame({**about, **drops.at(np.array(numbers)).columns("harm")}))
    return pd.concat(frames, ignore_index=True)


def try_rankings(
    study: Study,
    checkpoint: Checkpoint,
    corpus: Corpus,
    analyses: Sequence[type[Analysis]],
    *,
    config: AnalyzeOptions,
    options: RunOptions,
    progress: Progress,
) -> None:
    """Test the rankings of a study's heads and of the pruning criteria, and add the tables to the study.

    `analyses` measure the heads again, on shuffled weights. Heads are masked as in `headscope evaluate --mask`. A
    KeyboardInterrupt after the removals leaves out BLEU and shuffled weights. ConfigError if there is nothing to test,
    and for BLEU if the model or the corpus has no translations.
    """

    def criteria() -> Mapping[str, Scores]:
        if config.only:
            return {}
        criterion = "headscope.pruning.ranking.criterion"
        context = import_target(f"{criterion}:ScoringContext")(checkpoint, corpus, options.batching, options)
        scores: Mapping[str, Scores] = import_target(f"{criterion}:scores_by_criteria")(context)
        return scores

    heads = study.heads
    rankings, refusals = scores_of(heads, criteria())
    if config.faithfulness_bleu and not (checkpoint.two_sided and corpus.has_target):
        raise ConfigError(f"{flag.faithfulness_bleu} needs a model that translates, and a {flag.target}")
    steps, orders = config.faithfulness_steps, config.faithfulness_seeds
    plan = plan_removals(rankings, steps=steps, random_orders=orders, seed=config.seed)
    limit, tokens = options.batching.limit, options.batching.tokens
    assert limit is not None, "run_options says it"
    reading = LikelihoodOptions(tokens, limit, config.long, "random", config.seed)
    with progress("removing heads", corpus.count) as step:
        drop = measure_drop(checkpoint, corpus, plan.masks, reading, objective=config.objective, step=step)
    bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
    shuffled_scores: Mapping[str, Scores] = {}
    try:
        if config.faithfulness_bleu:
            drop.values["bleu"] = bleu_scores(checkpoint, corpus, plan, tokens=tokens, progress=progress)
        ranking_analyses = [cls for cls in analyses if any(measure.keep for measure in cls.measures)]
        anew = partial(analyze, progress=progress, title="analysing shuffled weights")
        with shuffle_weights(checkpoint.model, seed=config.seed):
            shuffled_study = anew(checkpoint, corpus, analyses=ranking_analyses, options=options)
            shuffled_scores, _ = scores_of(shuffled_study.heads, criteria())
    except KeyboardInterrupt:
        why = f"{INTERRUPTED} when heads had been removed; BLEU and shuffled weights have no numbers"
        study.interrupt("faithfulness", why)
    corrupt = OBJECTIVES.get(drop.objective).needs_prompts
    replacement = "what they give on the corrupt prompt" if corrupt else "nothing"
    remarks = [f"faithfulness: {len(plan.singles)} heads (N of CPR and CMD), of which those removed give {replacement}"]
    remarks += [f"{name} is no ranking: {reason}" for name, reason in refusals.items()]
    measures = measured_columns()
    if columns := [column for column in heads.columns if column in measures and not measures[column][1].keep]:
        remarks.append(f"no agreed direction, so not tested as rankings: {', '.join(columns)}")
    study.record["remarks"] += remarks
    curves, table = compare_rankings(plan, drop, rankings, shuffled_scores, bootstrap)
    study.tables = {**study.tables, "faithfulness": curves, "faithfulness_rankings": table}
