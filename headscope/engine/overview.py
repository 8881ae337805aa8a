"""Variants of each kind by name, and whether they fit a checkpoint: `headscope list` and `headscope show`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.config.declarations import import_target, measured_columns, rankable_columns
from headscope.engine.base import ANALYSES, Analysis
from headscope.errors import ConfigError, flag, flags
from headscope.evaluation.metrics.base import fitting_metrics
from headscope.formats.base import Checkpoint
from headscope.formats.size import cache_bytes
from headscope.heads import SITES, Site
from headscope.model.discovery import AttentionSite
from headscope.model.mixing.base import mixings_of
from headscope.model.stored_weights import parameters_by_part
from headscope.registry import unknown


def checkpoint_overview(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, architecture, attention by site, parameters by part, tokenizer, and which analyses fit.

    CheckpointError where the model's heads cannot be seen.
    """
    facts = checkpoint.facts()
    sites = [
        {
            "site": site.value,
            "layers": len(attention_sites),
            "numbers": [attention_site.layer for attention_site in attention_sites],
            "heads": [attention_site.heads for attention_site in attention_sites],
            "width": [attention_site.width for attention_site in attention_sites],
            "groups": [attention_site.groups for attention_site in attention_sites],
            "windows": _windows(checkpoint, attention_sites),
            "shared": [
                [call.layer for call in calls]
                for calls in checkpoint.attention_sites.modules
                if len(calls) > 1 and calls[0].site is site
            ],
        }
        for site in SITES
        if (attention_sites := checkpoint.attention_sites.at(site))
    ]
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        **facts,
        "reads": "sound" if checkpoint.reads_sound else "text",
        "digest": f"sha256:{checkpoint.digest}",
        "sites": sites,
        "mixing": _mixing(checkpoint),
        "parameters": parameters_by_part(checkpoint.model),
        "cache": dict(zip(("own", "cross"), cache_bytes(checkpoint), strict=True)),
        "labels": list(checkpoint.label_names),
        "metrics": [{"name": name, "needs": needs} for name, needs in fitting_metrics(checkpoint).items()],
        "objectives": _objectives(checkpoint),
        "analyses": _analyses(checkpoint, facts),
    }


def _windows(checkpoint: Checkpoint, attention_sites: Iterable[AttentionSite]) -> list[dict[str, Any]]:
    """Layers with a sliding window, and its number of tokens.

    Read from the attention module, as in transformers, or from its config where all layers are alike (Mistral).
    """
    layers_by_window: dict[int, list[int]] = {}
    for attention_site in attention_sites:
        module = checkpoint.model.get_submodule(attention_site.name)
        of_all = getattr(getattr(module, "config", None), "sliding_window", None)
        window = getattr(module, "sliding_window", of_all)
        if isinstance(window, int) and window > 0 and attention_site.site is not Site.CROSS:
            layers_by_window.setdefault(window, []).append(attention_site.layer)
    return [{"tokens": window, "layers": layers} for window, layers in layers_by_window.items()]


def _mixing(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    layers_by_mixing: dict[tuple[str, str, str], list[int]] = {}
    for site, layer, mixing in mixings_of(checkpoint.model):
        layers_by_mixing.setdefault((site.value, mixing.name, mixing.summary), []).append(layer)
    return [
        {"site": site, "layers": layers, "mixing": name, "summary": summary}
        for (site, name, summary), layers in layers_by_mixing.items()
    ]


def _objectives(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    texts_of = {
        "": {"has_target": False, "has_labels": False},
        flag.target: {"has_target": True, "has_labels": False},
        flag.labels: {"has_target": False, "has_labels": True},
    }
    rows = []
    for name, cls in OBJECTIVES:
        reasons = {option: cls.applies(checkpoint, **texts) for option, texts in texts_of.items()}
        needs = next((option for option, reason in reasons.items() if reason is None), None)
        needs = flag.clean if needs == "" and cls.needs_prompts else needs
        refusal = "" if needs is not None else f"no: {reasons['']}"
        row = {"name": name, "fits": not refusal, "why": refusal, "needs": needs or "", "trains": cls.trains}
        rows.append({**row, "summary": cls.summary})
    return rows


def _analyses(checkpoint: Checkpoint, facts: dict[str, Any]) -> list[dict[str, Any]]:
    sites = {attention_site.site for attention_site in checkpoint.attention_sites.order}
    rows = []
    for _, cls in sorted(ANALYSES, key=lambda entry: entry[1].order):
        refusal = ""
        if cls.passes and not facts["tokenizer"]:
            refusal = "no: the checkpoint has no tokenizer"
        elif cls.passes and not cls.sites & sites:
            refusal = "no: for " + " or ".join(site.value for site in SITES if site in cls.sites)
        elif reason := cls.applies(checkpoint):
            refusal = f"no: {reason.removeprefix('is ')}"
        needs = flags(*cls.decoder_needs) if cls.decoder_needs and not checkpoint.two_sided else ""
        row = {"name": cls.name, "fits": not refusal, "why": refusal, "needs": needs}
        rows.append({**row, "summary": cls.summary, "default": cls.default})
    return rows


@dataclass(frozen=True)
class Item:
    """A listed variant: its summary, what it needs beside the text, its cost, and why it does not fit."""

    name: str
    summary: str
    needs: str = ""
    cost: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of variants: its registry as "module:NAME", functions for their needs and cost.

    `overview` is the key of `checkpoint_overview` with the variants that fit a checkpoint, if there is one.
    """

    summary: str
    registry: str
    needs: Callable[[Any], str] | None = None
    cost: Callable[[Any], str] | None = None
    overview: str = ""

    def variants(self) -> dict[str, Any]:
        """Its variants by name."""
        members: Any = import_target(self.registry)
        return members() if inspect.isfunction(members) else dict(members)

    def items(self, overview: Mapping[str, Any] | None) -> list[Item]:
        """The variants in the order of the registry; with a checkpoint's overview also why some do not fit."""
        rows = {row["name"]: row for row in (overview or {}).get(self.overview, ())}
        items = []
        for name, variant in self.variants().items():
            refusal = rows[name].get("why", "") if name in rows else "for other kinds of models" if rows else ""
            needs = rows.get(name, {}).get("needs") or (self.needs(variant) if self.needs else "")
            cost = self.cost(variant) if self.cost else ""
            cls = variant if isinstance(variant, type) else type(variant)
            summary = str(getattr(variant, "summary", "") or inspect.cleandoc(cls.__doc__ or "").split("\n")[0])
            items.append(Item(name, summary, needs, cost, refusal.removeprefix("no: ")))
        return items


def _analysis_needs(cls: Any) -> str:
    objective = f"an {flag.objective}, or the default one"
    words = {
        "parse": flag.parse,
        "labels": f"predictions: a {flag.target}, or a model that predicts words",
        "objective": objective,
        "gradient": objective,
        "contrast": flags("clean", "corrupt", "answer"),
    }  # frequencies are counted on the text where no file has them
    needs = [words[need] for need in sorted(cls.needs) if need in words]
    of_decoders = [f"decoders: {flags(*cls.decoder_needs)}"] if cls.decoder_needs else []
    return "; ".join(dict.fromkeys([*needs, *of_decoders]))


def _analysis_cost(cls: Any) -> str:
    if cls.explain is not Analysis.explain:
        return "many passes of its own" if cls.many_passes else "passes of its own"
    if not cls.passes:  # it has no common pass: it reads weights, or the text by itself
        return "weights alone" if cls.read is Analysis.read else "many passes of its own"
    if "gradient" in cls.needs:
        return "one backward pass, shared"
    return "the forward pass, shared"


KINDS: Mapping[str, Kind] = {
    "analyses": Kind(
        "what `headscope analyze` measures of every head (--only, --also)",
        "headscope.engine.base:ANALYSES",
        _analysis_needs,
        _analysis_cost,
        "analyses",
    ),
    "pair-functions": Kind(
        "relations of two words that descriptions of heads are tested for",
        "headscope.description.pair_function:PAIR_FUNCTIONS",
        lambda function: flag.parse if function.needs_parse else "",
    ),
    "criteria": Kind(
        "what `headscope prune` ranks heads by (--by), columns of heads.csv among them",
        "headscope.pruning.ranking.criterion:CRITERIA",
        cost=lambda cls: "weights alone" if not cls.reads_text else "one pass" if cls.one_pass else "many passes",
    ),
    "objectives": Kind(
        "what importance explains: loss, accuracy, … (--objective)",
        "headscope.attribution.objectives.base:OBJECTIVES",
        lambda cls: flags("clean", "corrupt", "answer") if cls.needs_prompts else "",
        overview="objectives",
    ),
    "metrics": Kind(
        "scores of `headscope evaluate` (--metrics)", "headscope.evaluation.metrics.base:METRICS", overview="metrics"
    ),
    "rules": Kind("rule sets of relevance (`--set lrp.rules=NAME`)", "headscope.relevance.rulesets:RULE_SETS"),
    "formats": Kind("checkpoint formats that are opened (--format)", "headscope.formats.base:FORMATS"),
    "engines": Kind("programs that models are written for (`headscope convert --to`)", "headscope.export.base:ENGINES"),
    "figures": Kind("figures of runs (`headscope plot NAME`)", "headscope.report.registry:plot_figures"),
    "learners": Kind("ways to learn gates (`headscope prune NAME`)", "headscope.pruning.options.choice:LEARNERS"),
    "mixings": Kind("ways in which models mix heads", "headscope.model.mixing.base:MIXINGS"),
    "variants": Kind("models that `headscope train` makes", "headscope.training.variant:VARIANTS"),
}
"""The kinds that `headscope list` takes, by name."""


def catalogue(kind: str, overview: Mapping[str, Any] | None = None) -> list[Item]:
    """All variants of a kind; with a checkpoint's `overview` (of `Model.overview`) also why some do not fit it.

    Criteria are followed by the columns of heads.csv that heads can be ranked by. ConfigError for an unknown kind, and
    for an overview if the kind does not depend on the checkpoint.
    """
    if kind not in KINDS:
        raise ConfigError(unknown("kind", kind, list(KINDS)))
    if overview is not None and not KINDS[kind].overview:
        depend = ", ".join(name for name, kind_entry in KINDS.items() if kind_entry.overview)
        raise ConfigError(f"{kind} are the same for every checkpoint; leave it out, or list {depend}")
    items = KINDS[kind].items(overview)
    if kind == "criteria":
        of = measured_columns()
        columns = rankable_columns().items()
        items += [Item(name, measure.words, cost=f"the analysis {of[name][0].name}") for name, measure in columns]
    return items
