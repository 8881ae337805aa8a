"""Patching: the effect on an answer when one head gets its context of another prompt, exactly or by gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch

from headscope.attribution.objectives.predictions import AnswerObjective
from headscope.attribution.patching import (
    CHANNELS,
    CONTEXT,
    PromptEffects,
    exact_effects,
    first_order_effects,
    integrated_effects,
)
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import IGNORED, Batch
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, RunOptions, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers

prompts_option = partial(option, panel="Prompts")


@dataclass(frozen=True)
class PatchingOptions:
    """Options of analyses that put activations of one run into another."""

    direction: Literal["noising", "denoising"] = prompts_option(
        "noising", "Which run is changed: that on the clean prompt, or that on the corrupt one."
    )


class _PromptAnalysis(Analysis):
    """An analysis of clean and corrupt prompts, with the table patching_prompts.csv and remarks on the answers."""

    reads = "contexts"
    group = "prompts"
    default = False
    needs = frozenset({"contrast"})
    merges = ("prompts",)

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.prompts: dict[int, dict[str, Any]] = {}  # by number: the prompt's row of patching_prompts.csv

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return AnswerObjective.applies(checkpoint, has_target=False, has_labels=False)

    def ratios(
        self, checkpoint: Checkpoint, batch: Batch, result: PromptEffects, names: Mapping[str, str]
    ) -> dict[tuple[str, Site, int], Ratio]:
        """Effects [b h] as statistics, named by `names`; the prompts are added to the table."""
        contrasts = batch.contrasts
        assert contrasts is not None
        columns = {
            "position": contrasts.positions,
            "answer": contrasts.answers,
            "wrong": contrasts.wrong,
            "longer": contrasts.longer,
            "clean": result.clean.double(),
            "corrupt": result.corrupt.double(),
        }
        for number, *values in zip(batch.indices.tolist(), *(part.tolist() for part in columns.values()), strict=True):
            row = {"prompt": number + 1, **dict(zip(columns, values, strict=True))}
            row |= {name: _word(checkpoint, row[name]) for name in ("answer", "wrong")}
            self.prompts[number] = row
        return {
            (names[patch], site, layer): Ratio(values, torch.ones(len(values), 1))
            for patch, effects in result.effects.items()
            for (site, layer), values in effects.items()
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        prompts = pd.DataFrame([self.prompts[number] for number in sorted(self.prompts)])
        report.tables["patching_prompts"] = prompts
        report.remarks += _remarks(prompts)
        return report


@analysis
class Patching(_PromptAnalysis):
    """The loss of a prompt's answer when one head has its context of the corrupt prompt.

    m = logit(answer) − logit(wrong answer), or log p(answer). The head's context is replaced at all positions and all
    above it is computed anew: `patching` = m(clean) − m(patched), mean over prompts; with `direction=denoising` clean
    heads go into the corrupt run, m(patched) − m(corrupt) (Heimersheim & Nanda 2024; Wang et al. 2022). Positive: the
    head carries the answer. `patching_share` = Σ effects / Σ (m(clean) − m(corrupt)). Both prompts have as many
    subwords.
    """

    name = "patching"
    order = 400
    many_passes = True
    summary = "what an answer loses when one head gives what it gives on the corrupt prompt"
    measures = (
        Measure(
            "patching",
            "effect of patching",
            unit="logits",
            signed=True,
            overview=6,
            keep="highest",
            why="the answer depends least on what they carry",
        ),
        Measure("patching_share", "share of the effect of the prompt", signed=True),
    )
    Options = PatchingOptions
    signature_entry = "patched:{direction}/context"
    layer_index: LayerIndex | None = None

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.layer_index = resumable_layers(checkpoint.model)

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        direction, index = self.options.direction, self.layer_index
        result = exact_effects(checkpoint, batch, direction=direction, layer_index=index, tick=self.tick)
        ratios = self.ratios(checkpoint, batch, result, {CONTEXT: "patching"})
        total_effect = (result.clean - result.corrupt)[:, None]  # [b 1]
        for (_, site, layer), ratio in list(ratios.items()):
            ratios["patching_share", site, layer] = Ratio(ratio.total, total_effect.to(ratio.total))
        return ratios


@analysis
class AttributionPatching(_PromptAnalysis):
    """First-order estimate of `patching`: Σ (z − z') · ∂m/∂z over positions (Nanda 2023; Kramár et al. 2024).

    z is a head's context in the changed run, z' in the other, m the objective of `patching`; mean over prompts, with
    its signs. Two forward passes and one backward pass for all heads. Three more columns swap only queries, keys or
    values and compute the context anew, softmax included: for queries and keys the correction of AtP*, with all
    positions of a head at once. No GradDrop.
    """

    name = "attribution_patching"
    order = 401
    summary = "the effect of patching to first order, and what comes through queries, keys and values"
    measures = (
        Measure(
            "attribution_patching",
            "attribution patching",
            unit="logits",
            signed=True,
            keep="highest",
            why="the answer depends least on what they carry, to first order",
        ),
        Measure("attribution_patching_query", "attribution patching, queries", unit="logits", signed=True),
        Measure("attribution_patching_key", "attribution patching, keys", unit="logits", signed=True),
        Measure("attribution_patching_value", "attribution patching, values", unit="logits", signed=True),
    )
    Options = PatchingOptions
    signature_entry = "patched:{direction}/context"

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        result = first_order_effects(checkpoint, batch, direction=self.options.direction)
        names = {CONTEXT: self.name} | {channel: f"{self.name}_{channel}" for channel in CHANNELS}
        return self.ratios(checkpoint, batch, result, names)


@dataclass(frozen=True)
class EapIgOptions:
    """Options of `eap_ig`."""

    eap_steps: int = prompts_option(
        30, "Points of `eap_ig` between the corrupt and the clean prompt.", metavar="N", minimum=1, maximum=1000
    )


@analysis
class EapIg(_PromptAnalysis):
    """(z_clean − z_corrupt) · mean of ∂m/∂z along the path of input embeddings (EAP-IG, Hanna et al. 2024).

    z is a head's context, m the objective of `patching`. Gradients are taken at e_corrupt + (n / N)(e_clean −
    e_corrupt), n = 0 … N − 1 (`eap-steps`), as in the authors' program. The unit is a head, where the authors score
    edges. Positive: the head speaks for the answer. N forward and backward passes, and two forward ones.
    """

    name = "eap_ig"
    order = 402
    many_passes = True
    summary = "the effect of patching by gradients averaged from the corrupt prompt to the clean one"
    measures = (
        Measure(
            "eap_ig",
            "EAP-IG",
            unit="logits",
            signed=True,
            keep="highest",
            why="the answer depends least on what they carry, by integrated gradients",
        ),
    )
    Options = EapIgOptions
    signature_entry = "eap-steps:{eap_steps}"

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        result = integrated_effects(checkpoint, batch, steps=self.options.eap_steps)
        return self.ratios(checkpoint, batch, result, {CONTEXT: self.name})


def _word(checkpoint: Checkpoint, number: int) -> str:
    """The subword or class of an answer; empty for `IGNORED`."""
    if number == IGNORED:
        return ""
    if checkpoint.predicts == "classes":
        return checkpoint.label_names[number]
    return checkpoint.subwords([number], side="target")[0]


def _remarks(prompts: pd.DataFrame) -> list[str]:
    """Remarks on the answers to the prompts; where the model fails there is nothing to explain."""
    means, right = prompts[["clean", "corrupt"]].mean(), (prompts[["clean", "corrupt"]] > 0).sum()
    kind = "logit difference" if (prompts["wrong"] != "").all() else "log-probability or logit difference"
    text = f"prompts: mean {kind} of the answers {means.clean:.3g} on clean and {means.corrupt:.3g} on corrupt prompts"
    if (prompts["wrong"] != "").all():
        text += f"; the answer before the wrong one on {right.clean} and {right.corrupt} of {len(prompts)}"
    remarks = [text]
    if means.clean <= means.corrupt:
        remarks.append(
            "the answers are no likelier on clean prompts than on corrupt ones; are the files in their places?"
        )
    if longer := int(prompts["longer"].sum()):
        remarks.append(f"answers of {longer} prompts have several subwords; the first is read (patching_prompts.csv)")
    return remarks
