"""What pages say of everything that is registered: its own docstring, options and columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from html import escape
from typing import Any

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.config.declarations import Measure
from headscope.engine.base import ANALYSES
from headscope.pruning.engines.base import ENGINES
from headscope.pruning.ranking.criterion import CRITERIA
from headscope.relevance.rulesets import RULE_SETS
from headscope.training.variant import VARIANTS

GROUPS = {"importance": "`--importance`", "prompts": "with prompts"}
"""Groups of analyses that have a part of the page to themselves, and what else runs them."""


def analyses(*, group: str = "") -> str:
    """A section for every analysis of a group, or of none, in the order of their columns in heads.csv."""
    members = (each for _, each in ANALYSES if (each.group if each.group in GROUPS else "") == group)
    chosen = sorted(members, key=lambda each: each.order)
    rows = (f"| {_link(each)} | {_cell(each.summary)} |" for each in chosen)
    sections = (line for each in chosen for line in _analysis(each))
    return "\n".join(["| analysis | what it measures |", "| --- | --- |", *rows, "", *sections])


def _link(cls: Any) -> str:
    return f"[`{cls.name}`](#{anchor(cls.name)})"


def _analysis(cls: Any) -> Iterator[str]:
    yield from (f"### `{cls.name}`", "", *_described(cls), "")
    if cls.measures:
        yield from ("| column | range | ranking keeps |", "| --- | --- | --- |")
        yield from (_measure(measure) for measure in cls.measures)
        yield ""
    group = GROUPS.get(cls.group, "")
    facts = {
        "Sites": ", ".join(site.value for site in sorted(cls.sites)) if len(cls.sites) < 3 else "",
        "Needs": ", ".join(NEEDS[need] for need in sorted(cls.needs)),
        "Runs": "by default" if cls.default else f"{group} or `--also`" if group else "with `--also`",
        "Labels": ", ".join(f"`{function.name}`" for function in cls.functions),
        "Options": ", ".join(f"`{cls.name}.{option.name}`".replace("_", "-") for option in fields(cls.Options)),
        "Version": str(cls.version),
    }
    yield from (" · ".join(f"{name}: {value}" for name, value in facts.items() if value), "")


NEEDS = {
    "parse": "a parse (`--parse`)",
    "frequencies": "frequencies of subwords (counted over the text unless given)",
    "labels": "what decoders should predict (`--target` for encoder–decoders)",
    "objective": "an objective",
    "gradient": "an objective and its gradients",
    "contrast": "prompts (`--clean`, `--corrupt`, `--answer`)",
}


def _described(cls: Any) -> list[str]:
    """The docstring of a class, after those of the classes it is a kind of, as paragraphs."""
    bases = [base for base in cls.__mro__[1:-1] if base.__module__ == cls.__module__ and "__doc__" in vars(base)]
    return "\n\n".join(inspect.cleandoc(each.__doc__ or "") for each in (*reversed(bases), cls)).splitlines()


def _measure(measure: Measure) -> str:
    low, high = measure.range
    span = "" if low is None and high is None else f"{'…' if low is None else low} to {'…' if high is None else high}"
    return f"| `{measure.name}` | {span or '–'} | {measure.keep or '–'} |"


def criteria() -> str:
    """A section for every criterion that is no column of heads.csv."""
    return "\n".join(line for name, cls in CRITERIA for line in _criterion(name, cls))


def _criterion(name: str, cls: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "", *_described(cls), "", f"The lowest go first, as {cls.why}.", "")


def variants() -> str:
    """A section for every variant of training."""
    lines = []
    for name, cls in VARIANTS:
        lines += [f"### `{name}`", "", *_described(cls), ""]
    return "\n".join(lines)


def objectives() -> str:
    """A row for every objective."""
    rows = [f"| `{name}` | {_cell(cls.summary)} |" for name, cls in OBJECTIVES]
    return "\n".join(["| objective | |", "| --- | --- |", *rows, ""])


def rules() -> str:
    """A row for every set of relevance rules."""
    rows = [f"| `{name}` | {_cell(rule_set.summary)} |" for name, rule_set in RULE_SETS]
    return "\n".join(["| rules | |", "| --- | --- |", *rows, ""])


def engines() -> str:
    """A row for every engine that models are exported to."""
    rows = (
        f"| `{name}` | {_cell(engine.summary)} | {_cell(' '.join(_described(type(engine))))} | "
        f"{', '.join(f'`{kind}`: {about}' for kind, about in engine.quantizations.items())} | "
        f'`pip install "{engine.install}"` |'
        for name, engine in ENGINES
    )
    head = "| `--export`, `--to` | what is written | of which models | `--quantize` | needs |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows, ""])


def anchor(heading: str) -> str:
    """Where GitHub and the site link to a section."""
    return re.sub(r"[^\w -]", "", heading).replace(" ", "-")


def _cell(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
