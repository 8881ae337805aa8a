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
from headscope.export.base import ENGINES
from headscope.pruning.ranking.criterion import CRITERIA
from headscope.relevance.rulesets import RULE_SETS
from headscope.training.variant import VARIANTS

GROUPS = {"importance": "`--importance`", "prompts": "with prompts"}
"""Groups of analyses that have a part of the page to themselves, and what else runs them."""


def analyses(*, group: str = "") -> str:
    """A section for every analysis of a group, or of none, in the order of their columns in heads.csv."""
    members = (cls for _, cls in ANALYSES if (cls.group if cls.group in GROUPS else "") == group)
    classes = sorted(members, key=lambda cls: cls.order)
    index = " · ".join(f"[`{cls.name}`](#{anchor(cls.name)})" for cls in classes)
    return "\n".join([index, "", *_sections(classes)])


def _sections(classes: list[Any]) -> Iterator[str]:
    """The sections of analyses; only the first of a kind has their shared text."""
    first: dict[str, str] = {}
    for cls in classes:
        shared = [inspect.cleandoc(base.__doc__ or "") for base in _kind(cls)]
        first_names = [first.setdefault(text, cls.name) for text in shared]
        yield from (f"### `{cls.name}`", "")
        for text, name in zip(shared, first_names, strict=True):
            yield from (text if name == cls.name else f"As [`{name}`](#{anchor(name)}).", "")
        yield from (inspect.cleandoc(cls.__doc__ or ""), "", *_facts(cls), "")


def _facts(cls: Any) -> Iterator[str]:
    """Columns of an analysis, then what it needs and has."""
    if cls.measures:
        yield from (f"Columns: {', '.join(map(_measure, cls.measures))}.", "")
    group = GROUPS.get(cls.group, "")
    facts = {
        "Sites": ", ".join(site.value for site in sorted(cls.sites)) if len(cls.sites) < 3 else "",
        "Needs": ", ".join(NEEDS[need] for need in sorted(cls.needs)),
        "Runs": "by default" if cls.default else f"{group} or `--also`" if group else "with `--also`",
        "Labels": ", ".join(f"`{function.name}`" for function in cls.functions),
        "Options": ", ".join(f"`{cls.name}.{option.name}`".replace("_", "-") for option in fields(cls.Options)),
        "Version": str(cls.version),
    }
    yield " · ".join(f"{name}: {value}" for name, value in facts.items() if value)


NEEDS = {
    "parse": "a parse (`--parse`)",
    "frequencies": "frequencies of subwords (counted over the text unless given)",
    "labels": "what decoders should predict (`--target` for encoder–decoders)",
    "objective": "an objective",
    "gradient": "an objective and its gradients",
    "contrast": "prompts (`--clean`, `--corrupt`, `--answer`)",
}


def _kind(cls: Any) -> list[type]:
    """The documented base classes of a class in its own file."""
    bases = (base for base in cls.__mro__[1:-1] if base.__module__ == cls.__module__)
    return [base for base in reversed(list(bases)) if vars(base).get("__doc__")]


def _describe(cls: Any) -> list[str]:
    """The docstring of a class, after those of its base classes, as paragraphs."""
    return "\n\n".join(inspect.cleandoc(part.__doc__ or "") for part in (*_kind(cls), cls)).splitlines()


def _measure(measure: Measure) -> str:
    low, high = measure.range
    span = "" if low is None and high is None else f"{'…' if low is None else low} to {'…' if high is None else high}"
    facts = "; ".join(filter(None, (span, measure.keep and f"ranking keeps the {measure.keep}")))
    return f"`{measure.name}`" + (f" ({facts})" if facts else "")


def criteria() -> str:
    """A section for every criterion that is not a column of heads.csv."""
    return "\n".join(line for name, cls in CRITERIA for line in _criterion(name, cls))


def _criterion(name: str, cls: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "", *_describe(cls), "", f"The lowest go first, as {cls.why}.", "")


def variants() -> str:
    """A section for every variant of training."""
    lines = []
    for name, cls in VARIANTS:
        lines += [f"### `{name}`", "", *_describe(cls), ""]
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
        f"| `{name}` | {_cell(engine.summary.split(', of ')[0])} | {_cell(' '.join(_describe(type(engine))))} | "
        f"{', '.join(f'`{kind}`: {about}' for kind, about in engine.quantizations.items())} |"
        for name, engine in ENGINES
    )
    head = "| `--export`, `--to` | what is written | of which models | `--quantize` |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows, ""])


def anchor(heading: str) -> str:
    """The anchor of a section on GitHub and the site."""
    return re.sub(r"[^\w -]", "", heading).replace(" ", "-")


def _cell(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
