"""The facts about a checkpoint that `headscope show` prints."""

from __future__ import annotations

from typing import Any

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.engine.base import ANALYSES
from headscope.evaluation.metrics.base import fitting_metrics
from headscope.formats.base import Checkpoint
from headscope.heads import SITES
from headscope.model.mixing.base import mixing_name, mixings_of


def checkpoint_overview(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, architecture, attention by site, parameters by part, tokenizer, and which analyses fit.

    CheckpointError where the model's heads cannot be seen.
    """
    facts = checkpoint.facts()
    sites = []
    for site in SITES:
        attention_sites = checkpoint.attention_sites.at(site)
        if attention_sites:
            sites.append(
                {
                    "site": site.value,
                    "layers": len(attention_sites),
                    "heads": [attention_site.heads for attention_site in attention_sites],
                    "width": [attention_site.width for attention_site in attention_sites],
                    "groups": [attention_site.groups for attention_site in attention_sites],
                }
            )
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        **facts,
        "digest": f"sha256:{checkpoint.digest}",
        "sites": sites,
        "mixing": _mixing(checkpoint),
        "parameters": checkpoint.parameters_by_part(),
        "labels": list(checkpoint.label_names),
        "metrics": [{"name": name, "needs": needs} for name, needs in fitting_metrics(checkpoint).items()],
        "objectives": _objectives(checkpoint),
        "analyses": _analyses(checkpoint, facts),
    }


def _mixing(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Where a model mixes its heads, and how: sites and layers of every kind of mixing."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for site, layer, mixing in mixings_of(checkpoint.model):
        if mixing.summary:
            found.setdefault((site.value, mixing_name(mixing), mixing.summary), []).append(layer)
    return [
        {"site": site, "layers": layers, "mixing": name, "summary": summary}
        for (site, name, summary), layers in found.items()
    ]


def _objectives(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What importances explain and gates learn by: whether it fits, and with which option."""
    given = {
        "": {"has_target": False, "has_labels": False},
        "--target": {"has_target": True, "has_labels": False},
        "--labels": {"has_target": False, "has_labels": True},
    }
    rows = []
    for name, cls in OBJECTIVES:
        reasons = {option: cls.applies(checkpoint, **texts) for option, texts in given.items()}
        needs = next((option for option, reason in reasons.items() if reason is None), None)
        needs = "--clean" if needs == "" and cls.needs_prompts else needs
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
        rows.append(
            {"name": cls.name, "fits": not refusal, "why": refusal, "summary": cls.summary, "default": cls.default}
        )
    return rows
