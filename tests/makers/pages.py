"""Runs for pages, larger and nastier than `tests.makers.runs` makes them, and a browser to look at pages."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.config.declarations import measure_of
from headscope.engine.evidence.need import function_need_table
from headscope.files.tables import Example, as_arrays
from tests.makers.runs import Layout, make_run

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = '</script><img src=x onerror="window.broken=1"><b>&amp;\'\u202e\u2028{{data}}'
"""Text that breaks a page where it is taken for markup, in a script or in an attribute."""


def make_examples(path: Path, layout: Layout, *, count: int, length: int, text: str = "") -> None:
    """`examples.npz` of a run: random attention, sharp as that of trained models, on sentences of `length` words."""
    random = np.random.default_rng(1)
    words = [text or f"word{index}" for index in range(length)]
    attention = {
        site: (255 * random.dirichlet(np.full(length, 0.1), (sum(counts), length))).round().astype(np.uint8)
        for site, counts in layout.items()
        if sum(counts)
    }
    sides = {"source": words, **({"target": words} if "cross" in layout else {})}
    texts = {side: " ".join(words) for side in sides}
    examples = [Example(number, texts, sides, attention) for number in range(count)]
    arrays: dict[str, Any] = as_arrays(examples)
    np.savez(path / "examples.npz", **arrays)


def add_importance(path: Path, *, seed: int = 1) -> None:
    """Columns of importances with intervals, some below zero, in heads.csv."""
    random = np.random.default_rng(seed)
    table = pd.read_csv(path / "heads.csv", keep_default_na=False)
    for name, scale in (("ablation", 0.05), ("taylor", 1.0)):
        values = (
            random.normal(0.5 * scale, scale, len(table)) if name == "ablation" else random.gamma(2, size=len(table))
        )
        table[name], table[f"{name}_low"], table[f"{name}_high"] = values, values - scale / 2, values + scale / 2
    table.to_csv(path / "heads.csv", index=False)


def add_function_need(path: Path) -> pd.DataFrame:
    """`importance_functions.csv` of the importances that `add_importance` adds."""
    heads = pd.read_csv(path / "heads.csv", keep_default_na=False)
    table = function_need_table(heads, [measure_of(name) for name in ("ablation", "taylor")])
    table.to_csv(path / "importance_functions.csv", index=False)
    return table


def add_descriptions(path: Path) -> None:
    """Add outputs of `explained`: shares and sentences in heads.csv, examples.csv, token_pairs.csv; words of "None"."""
    table = pd.read_csv(path / "heads.csv", keep_default_na=False)
    shares = {"position": 0.5, "token": 0.05, "classes": -0.02, "lexical": 0.2, "syntax": 0.0}
    table = table.assign(**{f"explained_{group}": share for group, share in shares.items()}, explained=0.73)
    table.loc[1, "explained"] = 0.3
    table["description"] = [f"does what head {row} does" if row else HOSTILE for row in range(len(table))]
    table.to_csv(path / "heads.csv", index=False)
    heads = table[["site", "layer", "head"]].to_dict("records")
    words = [f"w{number}" for number in range(40)]
    examples, pairs = [], []
    for head in heads:
        for rank, (query, key) in enumerate(((3, 5), (30, 2)), start=1):
            texts = {}
            for end, center in (("query", query), ("key", key)):
                start = max(0, center - 12)
                span = [f"[{word}]" if n == center else word for n, word in enumerate(words)][start : start + 24]
                texts[f"{end}_text"] = "… " * (start > 0) + " ".join(span) + " …"
            columns = {"rank": rank, "sentence": 6, "weight": 0.9, "query": words[query], "key": words[key]}
            examples.append(head | columns | {"query_position": query, "key_position": key} | texts)
        numbers = {"score": 2.5, "weight": 0.7, "expected": 0.1, "count": 6}
        pairs += [head | {"kind": kind, "rank": 1, "query": "None", "key": "dog"} | numbers for kind in PAIRS]
    pd.DataFrame(examples).to_csv(path / "examples.csv", index=False)
    pd.DataFrame(pairs).to_csv(path / "token_pairs.csv", index=False)


PAIRS = ("lexical", "surprising")


def removal_run(path: Path) -> Path:
    """A folder as of `headscope prune remove`, without its model."""
    path.mkdir(parents=True)
    sizes = dict.fromkeys(("flops", "cache", "cross_cache", "attention_flops", "output_flops", "read"), 0)
    sizes |= {"bytes": 4000, "attention_parameters": 400}
    record = {
        "kind": "removal",
        "source": {"path": "model", "format": "native", "digest": 64 * "0"},
        "kept": {"encoder-self": {"0": [1, 2]}},
        "opens": [],
        "removed": ["encoder-self.0.0"],
        "merged": {},
        "before": {**sizes, "parameters": 1000, "attention_heads": 9},
        "after": {**sizes, "parameters": 900, "attention_heads": 8},
        "times": [
            {"what": "forward", "sentences": 1, "tokens": 0, "before": 0.02, "after": 0.01, "least": 1.9, "most": 2.1}
            | {"at_most": 2.2}
        ],
        "verified": {
            **{"data": "text", "sentences": 4, "difference": 1e-7, "tolerance": 1e-5, "cached": None},
            **{"reloaded": 0.0, "searched": 8, "searches": 8},
        },
        "quality": {
            **{"metric": "accuracy", "title": "accuracy", "text": "held-out.txt", "sentences": 40, "margin": "1 %"},
            **{"before": {"value": 0.9}, "after": {"value": 0.85}, "loss": [0.3, 0.4], "why": "", "needed": 400},
            "verdict": {
                **{"worse": 0.05, "worse_limit": 0.09, "margin": 0.009, "detectable": 0.06},
                "verdict": "not established",
            },
        },
        "elsewhere": None,
        "layers": None,
        "compensation": None,
        "engines": [],
        "notes": [],
    }
    (path / "pruning.json").write_text(json.dumps(record), encoding="utf-8")
    return path


def edit_record(path: Path, **fields: Any) -> None:
    """Change entries of run.json."""
    record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    (path / "run.json").write_text(json.dumps(record | fields), encoding="utf-8")


def large_run(path: Path, *, layers: int = 24, heads: int = 16, sentences: int = 0) -> Path:
    """A run of encoder, decoder and cross attention with many measures; every layer has the numbers of the first."""
    sites = ("encoder-self", "decoder-self", "cross")
    make_run(path, {site: [heads] for site in sites}, extra=tuple(f"measure{number}" for number in range(40)))
    for name in ("heads", "positional", "syntactic"):
        table = pd.read_csv(path / f"{name}.csv", keep_default_na=False)
        pd.concat([table.assign(layer=layer) for layer in range(layers)]).to_csv(path / f"{name}.csv", index=False)
    with np.load(path / "similarity.npz") as archive:
        arrays = dict(archive)
    similar = {key.replace("/0/", f"/{layer}/"): array for key, array in arrays.items() for layer in range(layers)}
    np.savez(path / "similarity.npz", **similar)
    layout = {site: [heads] * layers for site in sites}
    edit_record(path, layout=layout)
    if sentences:
        make_examples(path, layout, count=sentences, length=16)
    return path


def hostile_run(path: Path) -> Path:
    """A run of which every text is `HOSTILE`: labels, words, names, remarks."""
    layout = {"encoder-self": [2, 2]}
    make_run(path, layout)
    table = pd.read_csv(path / "heads.csv", keep_default_na=False)
    table["functions"] = [f"positional:{HOSTILE}", HOSTILE, "", "sink"]
    table["syntactic_relation"] = HOSTILE
    table[f"odd {HOSTILE}"] = 1.5
    table.to_csv(path / "heads.csv", index=False)
    relations = pd.read_csv(path / "syntactic.csv")
    relations["label"] = HOSTILE
    relations.to_csv(path / "syntactic.csv", index=False)
    make_examples(path, layout, count=2, length=4, text=HOSTILE)
    checkpoint = {"path": f"models/{HOSTILE}", "format": HOSTILE, "digest": HOSTILE, "model_type": HOSTILE}
    data = {"source": HOSTILE, "target": None, "sentences": 3}
    edit_record(path, checkpoint=checkpoint, data=data, remarks=[HOSTILE], command=["headscope", HOSTILE])
    edit_record(path, left_out=[{"analysis": HOSTILE, "why": HOSTILE}], signature=HOSTILE)
    return path


def find_browser(environment: Mapping[str, str]) -> str:
    """A Chromium: HEADSCOPE_CHROMIUM, or on PATH; without one tests are skipped, but where CI is set they fail."""
    path = environment.get("HEADSCOPE_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path:
        return path
    reason = "no Chromium on PATH: install one (`make browser`), or say where it is in HEADSCOPE_CHROMIUM"
    if environment.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium that playwright drives; it never looks for one of its own."""
    path = find_browser(os.environ)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()
