"""One sentence a head: what its labels say, what explains it, and its pairs of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headscope.data.token_text import Marks, display_subword
from headscope.description.features import GROUPS
from headscope.heads import HeadId

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
ONLY = "only the sentence"
"""What explains a head of which a description says less than half."""
NAMED, MAX_PAIRS = 0.05, 3
"""Groups that add less than this share are not named; so many pairs of words are."""


def sentence(phrases: Sequence[str], row: Mapping[Any, Any], pairs: Sequence[tuple[str, str]]) -> str:
    """Of what labels say, shares (columns of heads.csv) and pairs of a query and a key; "" for nothing."""
    parts = [*phrases]
    shares, beyond = leading_shares(row), row.get("beyond_sinks", float("nan"))
    if shares:
        condition = "" if beyond != beyond else f"beyond sinks ({beyond:.2f} of the weight) "
        parts.append(
            f"{condition}explained by " + ", ".join(f"{_by(group, row)} {share:.2f}" for group, share in shares)
        )
    if row.get("explained", float("nan")) < 0.5:
        parts.append(f"{min(1 - row['explained'], 1):.2f} only the sentence says")
    if pairs and any(group == "lexical" for group, _ in shares):
        parts.append("highest: " + ", ".join(f"“{query}” → “{key}”" for query, key in pairs[:MAX_PAIRS]))
    return "; ".join(parts)


def leading_shares(row: Mapping[Any, Any]) -> list[tuple[str, float]]:
    """The groups that explain something of a head, with what each adds, the largest first."""
    shares = [(group, float(row.get(f"explained_{group}", 0.0))) for group in GROUPS]
    return sorted((part for part in shares if part[1] >= NAMED), key=lambda part: -part[1])


def mostly(row: Mapping[Any, Any]) -> str:
    """What explains the most of a head, in words: one group where all explain half of it; "" where that is unknown."""
    whole = row.get("explained", float("nan"))
    if whole != whole:
        return ""
    group = leading_group(row)
    return _by(group, row) if group else ONLY


def _by(group: str, row: Mapping[Any, Any]) -> str:
    """A group in words: position has first and special tokens in it, unless sinks were excluded."""
    beyond = row.get("beyond_sinks", float("nan"))
    return "position and sinks" if group == "position" and beyond != beyond else BY[group]


def leading_group(row: Mapping[Any, Any]) -> str:
    """The group that explains the most of a head; "" where all together explain less than half, or nothing is known."""
    leading = leading_shares(row) if row.get("explained", float("nan")) >= 0.5 else []
    return leading[0][0] if leading else ""


def descriptions(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame], marks: Marks = "") -> list[str]:
    """A sentence for every row of heads.csv, from the evidence of labels (`labels`) and `token_pairs`.

    Of labels that say the same of a head the first speaks, in the order of the analyses: on the text before on random
    tokens. `marks` says how the vocabulary marks words.
    """
    phrases: dict[HeadId, dict[str, str]] = {}
    pairs: dict[HeadId, list[tuple[str, str]]] = {}
    for row in tables["labels"].to_dict("records") if "labels" in tables else ():
        if row["given"]:
            phrase = row["description"]
            phrases.setdefault(HeadId.of_row(row), {}).setdefault(phrase.partition(":")[0], phrase)
    for row in tables["token_pairs"].to_dict("records") if "token_pairs" in tables else ():
        if row["kind"] == "lexical":
            pairs.setdefault(HeadId.of_row(row), []).append(
                (display_subword(row["query"], marks), display_subword(row["key"], marks))
            )
    head_rows = ((HeadId.of_row(row), row) for row in heads.to_dict("records"))
    return [sentence([*phrases.get(head, {}).values()], row, pairs.get(head, [])) for head, row in head_rows]
