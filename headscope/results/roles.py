"""Roles: short noun phrases for labels of heads. Labels with the same meaning have the same role."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.config.declarations import head_functions

SINK = "first or special tokens (sink)"
NONE = "none found"
ROLES: Mapping[str, str] = {
    "previous": "previous token",
    "duplicate": "earlier occurrences of the token",
    "induction": "induction",
    "rare": "one of the two rarest tokens",
    "sink": SINK,
    "aligned:predicted": "source word of the predicted token",
    "aligned:fed": "source word of the token that was fed",
    "aligned:successor": "source word after the one of the token that was fed",
    "massive": "tokens with massive activations",
    "copying": "copies what it attends to",
    "copy-suppression": "suppresses what it attends to",
    "retrieval": "copies from far back",
    "successor": "next one in an order",
    "averages:after": "even weight over what follows",
    "averages:before": "even weight over what precedes",
}
"""Roles of the labels that need no parsing."""
NEAR_OFFSETS = {-1: ROLES["previous"], 0: "the token itself", 1: "next token"}


def role_of(label: str) -> str:
    """The role that a label names: `positional:-1` and `previous` are the previous token."""
    if label in ROLES:
        return ROLES[label]
    kind, _, detail = label.partition(":")
    if kind == "positional" and detail.lstrip("+-").isdigit():
        offset = int(detail)
        return NEAR_OFFSETS.get(offset) or f"{abs(offset)} tokens {'back' if offset < 0 else 'ahead'}"
    if kind == "syntactic":
        relation = detail.rstrip("<>")
        return f"dependent → head ({relation})" if detail.endswith("<") else f"head → dependent ({relation})"
    if kind == "looks":
        return f"looks at {detail.replace('-', ' ').replace('_', ' ')}"
    family = head_functions().get(kind)
    meaning = family.meaning.removeprefix(f"{kind}: ") if family else kind.replace("_", " ")
    return f"{meaning} ({detail})" if detail else meaning


def roles_of(labels: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Names of heads by role, from labels by head: rare roles first, sinks last."""
    heads: dict[str, list[str]] = {}
    for name, labels_of_head in labels.items():
        for role in dict.fromkeys(map(role_of, labels_of_head)):
            heads.setdefault(role, []).append(name)
    return dict(sorted(heads.items(), key=lambda entry: (entry[0] == SINK, len(entry[1]), entry[0])))
