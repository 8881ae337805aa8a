"""Run directories as `headscope analyze` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

Layout = dict[str, list[int]]
LABELS = ["nsubj>", "nsubj<", "obj>", "obj<", "amod>", "amod<", "advmod>", "advmod<"]
SIGNATURE = (
    "m:confidence.voita+entropy+positional.v1+syntactic.v1+rare_words.v1+similarity.v1|eos:excl|unit:piece|"
    "rel:nsubj,obj,amod,advmod|data:sha1:6f1ed002ab5595859014ebf0951522d9,n=1000|"
    "ckpt:sha256:9c1f0f5b3cb42a5d7e11c0fe|torch:2.13.0|dtype:float32|device:cpu|seed:1|v:0.1.0"
)


def make_run(
    path: Path,
    layout: Layout,
    *,
    seed: int = 1,
    tables: tuple[str, ...] = ("positional", "syntactic", "similarity"),
    extra: tuple[str, ...] = (),
    name: str = "models/all-MiniLM-L6-v2",
) -> Path:
    """A run directory as `headscope analyze` writes it, with plausible random numbers."""
    random = np.random.default_rng(seed)
    path.mkdir(parents=True)
    heads = pd.DataFrame([_head_row(random, head_id, extra) for head_id in heads_of(layout)])
    heads.to_csv(path / "heads.csv", index=False)
    if "positional" in tables:
        rows = [row for _, head in heads.iterrows() for row in _offset_rows(random, head)]
        pd.DataFrame(rows).to_csv(path / "positional.csv", index=False)
    if "syntactic" in tables:
        rows = [row for _, head in heads.iterrows() for row in _relation_rows(random, head)]
        pd.DataFrame(rows).to_csv(path / "syntactic.csv", index=False)
    if "similarity" in tables:
        np.savez(path / "similarity.npz", **_similarity(random, layout))
    meta = {
        "signature": SIGNATURE,
        "checkpoint": {"path": name, "format": "huggingface", "digest": "9c1f", "model_type": "bert"},
        "data": {"source": "data/test_2016_flickr.en", "target": None, "sentences": 1000},
        "options": {},
        "layout": layout,
        "left_out": [],
        "complete": True,
    }
    (path / "run.json").write_text(json.dumps(meta), encoding="utf-8")
    return path


def heads_of(layout: Layout) -> list[tuple[str, int, int]]:
    """Site, layer and head of every head."""
    return [
        (site, layer, head)
        for site, counts in layout.items()
        for layer, count in enumerate(counts)
        for head in range(count)
    ]


def _head_row(random: np.random.Generator, head_id: tuple[str, int, int], extra: Sequence[str]) -> dict[str, Any]:
    site, layer, head = head_id
    confidence = float(np.clip(random.beta(2, 4), 0.05, 0.95))
    functions = []
    if head % 5 == 1 and layer % 3 != 2:
        functions.append(f"positional:{(-1, 1, -2, -12, 0)[(layer + head) % 5]}")
    if random.random() < 0.25 and layer > 0:
        functions.append(f"syntactic:{LABELS[random.integers(len(LABELS))]}")
    if random.random() < 0.05:
        functions += ["syntactic:compound<", "sink"]
    if layer == 0 and head == 0:
        functions.append("rare")
    if site != "encoder-self" and random.random() < 0.2:
        functions.append(("previous", "duplicate", "induction")[layer % 3])
    row = {"site": site, "layer": layer, "head": head}
    values = {
        "confidence": confidence,
        "sharpness": 8 * confidence,
        "entropy_share": 1 - confidence * 0.8,
        "distance": random.gamma(3),
    }
    values |= {name: float(random.normal()) for name in extra}
    for name, value in values.items():
        row |= {name: value, f"{name}_low": value - 0.01, f"{name}_high": value + 0.01}
    best = [label.partition(":")[2] for label in functions if label.startswith("syntactic")]
    return row | {"syntactic_relation": best[0] if best else "", "functions": ";".join(functions)}


def _offset_rows(random: np.random.Generator, head: pd.Series) -> list[dict[str, Any]]:
    modal = [int(f.partition(":")[2]) for f in head["functions"].split(";") if f.startswith("positional")]
    offsets = np.unique(np.clip(np.round(random.normal(0, 6, 40)), -30, 30).astype(int))
    shares = random.dirichlet(np.ones(len(offsets)))
    histogram = dict(zip(offsets.tolist(), shares.tolist(), strict=True))
    if modal:
        histogram = {offset: share * 0.05 for offset, share in histogram.items()}
        histogram[modal[0]] = histogram.get(modal[0], 0) + 0.95
    ids = {key: head[key] for key in ("site", "layer", "head")}
    return [
        ids | {"offset": o, "count": int(s * 1e4), "queries": 10_000, "share": s, "share_low": s, "share_high": s}
        for o, s in sorted(histogram.items())
    ]


def _relation_rows(random: np.random.Generator, head: pd.Series) -> list[dict[str, Any]]:
    rows = []
    for number, label in enumerate(LABELS):
        baseline = 0.2 + 0.05 * number
        accuracy = float(np.clip(baseline + random.normal(-0.1, 0.1), 0, 1))
        if f"syntactic:{label}" in head["functions"]:
            accuracy = min(baseline + 0.25, 1.0)
        rows.append(
            {key: head[key] for key in ("site", "layer", "head")}
            | {"relation": label[:-1], "label": label, "count": 100 + number, "baseline_offset": -1}
            | {"direction": "head-to-dependent" if label.endswith(">") else "dependent-to-head"}
            | {"accuracy": accuracy, "accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.02}
            | {"baseline": baseline, "baseline_low": baseline - 0.02, "baseline_high": baseline + 0.02}
            | {"margin": accuracy - baseline, "margin_low": -1.0, "margin_high": 1.0}
        )
    return rows


def _similarity(random: np.random.Generator, layout: Layout) -> dict[str, Any]:
    arrays = {}
    for site, counts in layout.items():
        for layer, count in enumerate(counts):
            vectors = random.normal(size=(count, 5)) + 0.4
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            cosine = unit @ unit.T
            matrices = {"cosine": cosine, "l2": np.sqrt(np.maximum(2 - 2 * cosine, 0)), "cka": cosine**2}
            for name, matrix in matrices.items():
                for part in ("", "_low", "_high"):
                    arrays[f"{site}/{layer}/{name}{part}"] = matrix
    return arrays
