"""One sentence a head, made of what is established about it, strongest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headscope.data.token_text import Marks, shown
from headscope.description.features import GROUPS
from headscope.description.pair_function import PAIR_FUNCTIONS
from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    import pandas as pd

BY = {
    "position": "position",
    "token": "the key token",
    "classes": "classes of words",
    "lexical": "pairs of words",
    "syntax": "syntax",
}
"""The groups of a description in words."""
WORDS = {
    "aligned:predicted": "looks at the source word of the token being predicted",
    "aligned:fed": "looks at the source word of the token that was fed",
    "previous": "looks at the token before",
    "duplicate": "looks at earlier occurrences of the same token",
    "induction": "looks at what followed earlier occurrences of the same token",
    "rare": "looks at the rarest token",
    "sink": "rests on one place, whatever the query",
}
ONLY = "only the sentence"
"""What explains a head of which a description says less than half."""
NAMED, MOST_PAIRS = 0.05, 3
"""Groups that add less than this share are not named; so many pairs of words are."""


def label_in_words(label: str) -> str:
    """What a head with a label does: `positional:-1` → looks at the token before."""
    kind, _, detail = label.partition(":")
    if label in WORDS:
        return WORDS[label]
    if kind == "positional":
        return _offset(int(detail))
    if kind == "looks" and detail in PAIR_FUNCTIONS.names():
        return f"looks at {PAIR_FUNCTIONS.get(detail).meaning}"
    if kind == "syntactic":
        ends = ("head", "dependent") if detail.endswith(">") else ("dependent", "head")
        return f"looks from {ends[0]} to {ends[1]} along {detail[:-1]}"
    return label


def _offset(offset: int) -> str:
    if offset == 0:
        return "looks at the token itself"
    where = "before" if offset < 0 else "after"
    return f"looks at the token {where}" if abs(offset) == 1 else f"looks {abs(offset)} tokens {where}"


def sentence(labels: Sequence[tuple[str, float]], row: Mapping[Any, Any], pairs: Sequence[tuple[str, str]]) -> str:
    """Of labels with their values, shares (columns of heads.csv) and pairs of a query and a key; "" for nothing."""
    ordered = sorted(labels, key=lambda label: -label[1])
    parts = [f"{label_in_words(label)}: {value:.2f}" for label, value in ordered]
    shares, beyond = leading_shares(row), row.get("beyond_sinks")
    if shares:
        said = "" if beyond is None else f"beyond sinks ({beyond:.2f} of the weight) "
        parts.append(f"{said}explained by " + ", ".join(f"{BY[group]} {share:.2f}" for group, share in shares))
    if row.get("explained", float("nan")) < 0.5:
        parts.append(f"{min(1 - row['explained'], 1):.2f} only the sentence says")
    if pairs and any(group == "lexical" for group, _ in shares):
        parts.append("highest: " + ", ".join(f"“{query}” → “{key}”" for query, key in pairs[:MOST_PAIRS]))
    return "; ".join(parts)


def leading_shares(row: Mapping[Any, Any]) -> list[tuple[str, float]]:
    """The groups that explain something of a head, with what each adds, the largest first."""
    found = [(group, float(row.get(f"explained_{group}", 0.0))) for group in GROUPS]
    return sorted((part for part in found if part[1] >= NAMED), key=lambda part: -part[1])


def mostly(row: Mapping[Any, Any]) -> str:
    """What explains the most of a head, in words: one group where all explain half of it; "" where that is unknown."""
    whole = row.get("explained", float("nan"))
    if whole != whole:
        return ""
    group = leading_group(row)
    return BY[group] if group else ONLY


def leading_group(row: Mapping[Any, Any]) -> str:
    """The group that explains the most of a head; "" where all together explain less than half, or nothing is known."""
    leading = leading_shares(row) if row.get("explained", float("nan")) >= 0.5 else []
    return leading[0][0] if leading else ""


def descriptions(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame], marks: Marks = "") -> list[str]:
    """A sentence for every row of heads.csv, from the evidence of labels (`labels`) and `token_pairs`.

    `marks` says how the vocabulary marks words.
    """
    labels: dict[HeadId, dict[str, float]] = {}
    pairs: dict[HeadId, list[tuple[str, str]]] = {}
    for row in tables["labels"].to_dict("records") if "labels" in tables else ():
        if row["given"]:
            of_head = labels.setdefault(_head(row), {})
            of_head[row["label"]] = max(row["value"], of_head.get(row["label"], row["value"]))
    for row in tables["token_pairs"].to_dict("records") if "token_pairs" in tables else ():
        if row["kind"] == "lexical":
            pairs.setdefault(_head(row), []).append((shown(row["query"], marks), shown(row["key"], marks)))
    rows = heads.to_dict("records")
    return [sentence([*labels.get(_head(row), {}).items()], row, pairs.get(_head(row), [])) for row in rows]


def _head(row: Mapping[Any, Any]) -> HeadId:
    return HeadId(Site(row["site"]), int(row["layer"]), int(row["head"]))
