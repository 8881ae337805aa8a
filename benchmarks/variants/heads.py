"""Numbers about the heads of a run: what they attend to, how alike they are, and what mixes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from headscope.heads import SITES

MODULE = ["site", "layer"]
# columns of metrics.csv, and what they are here
HISTORY = {"swaps.schedule": "swaps", "gate_steps": "gate_steps", "gate_change": "gate_change"}
MEANS = {
    "confidence": "confidence",
    "entropy_share": "entropy_share",
    "similarity_cosine": "similarity",
    "similarity_cka": "cka",
    "offset_share": "offset_share",
}


def numbers_of_heads(analysis: Path, metrics: Path) -> dict[str, float]:
    """All numbers of one run, by column of runs.csv, from the folder of its analysis and its history of training."""
    heads = pd.read_csv(analysis / "heads.csv")
    numbers = of_attention(heads) | of_relevance(heads) | of_history(metrics)
    if (analysis / "experts_gates.csv").exists():
        gates = pd.read_csv(analysis / "experts_gates.csv").query("site == 'encoder-self'")
        numbers["gate_entropy"] = float(gates["entropy"].mean())
    if (analysis / "syntax" / "syntactic.csv").exists():
        numbers |= of_syntax(pd.read_csv(analysis / "syntax" / "syntactic.csv"))
    if (analysis / "alphas.csv").exists():
        numbers |= of_matrices(pd.read_csv(analysis / "alphas.csv"))
    return numbers


def of_attention(heads: pd.DataFrame) -> dict[str, float]:
    """Means over the heads of a site, the deviation of confidence over them, and how many heads have a function."""
    numbers = {}
    for site in SITES:
        rows = heads[heads["site"] == site.value]
        if rows.empty:
            continue
        for column, name in MEANS.items():
            if column in rows:
                numbers[f"{name}.{site}"] = float(rows[column].mean())
        numbers[f"confidence_spread.{site}"] = float(rows["confidence"].std(ddof=0))
    if "functions" in heads:
        labels = heads["functions"].fillna("").str.split(";").explode()
        numbers["heads_with_function"] = float((heads["functions"].fillna("") != "").sum())
        numbers["positional_heads"] = float(labels.str.startswith("positional:").sum())
    return numbers


def of_relevance(heads: pd.DataFrame) -> dict[str, float]:
    """How many heads of a module share its relevance: exp of the entropy of the shares, mean over modules; 1 to h."""
    if "lrp" not in heads:
        return {}
    counts = []
    for _, rows in heads.groupby(MODULE):
        shares = np.asarray(rows["lrp"], dtype=float).clip(min=0)
        shares = shares[shares > 0] / shares.sum()
        counts.append(math.exp(-float((shares * np.log(shares)).sum())))
    return {"relevant_heads": float(np.mean(counts))}


def of_syntax(accuracies: pd.DataFrame) -> dict[str, float]:
    """Accuracy of the best head less that of the best fixed offset, mean over relations and directions."""
    return {"syntactic_margin": float(accuracies.groupby("label")["margin"].max().mean())}


def of_matrices(entries: pd.DataFrame) -> dict[str, float]:
    """Share of absolute weight off the diagonal, and share of squares off it that is skew-symmetric (chance: 0.5)."""
    square = [rows.pivot(index="head", columns="source", values="alpha") for _, rows in entries.groupby(MODULE)]
    matrices = np.stack([np.asarray(matrix, dtype=float) for matrix in square])  # modules, h, h
    off = matrices * (1 - np.eye(matrices.shape[-1]))
    skew = (off - off.swapaxes(1, 2)) / 2
    return {
        "off_diagonal": float(np.mean(np.abs(off).sum((1, 2)) / np.abs(matrices).sum((1, 2)))),
        "off_diagonal_skew": float((skew**2).sum() / max((off**2).sum(), 1e-300)),
    }


def of_history(metrics: Path) -> dict[str, float]:
    """The last value of what a variant noted as it trained."""
    history = pd.read_csv(metrics)
    return {
        name: float(history[column].dropna().iloc[-1])
        for column, name in HISTORY.items()
        if column in history and history[column].notna().any()
    }
