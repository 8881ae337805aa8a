"""The tables of docs/gallery.md, of the runs in docs/figures/runs and of benchmarks/variants."""

from __future__ import annotations

import json

import pandas as pd

from tests.makers.doc_pages.pruning_report import table
from tests.makers.documented import DOCS
from tests.makers.modules import ROOT

RUNS = {"gallery-bert": "sentence encoder", "gallery-en-de": "translation model"}
SITES = ("encoder-self", "decoder-self", "cross")


def runs() -> str:
    """Functions of the heads of every run of the gallery."""
    head = ["checkpoint", "sentences", "heads", "with a function", "which", "most confident"]
    return table(head, [_run(name, title) for name, title in RUNS.items()])


def _run(name: str, title: str) -> list[str]:
    folder = DOCS / "figures" / "runs" / name
    heads = pd.read_csv(folder / "heads.csv", keep_default_na=False)
    sentences = json.loads((folder / "run.json").read_text(encoding="utf-8"))["data"]["sentences"]
    labels = heads.loc[heads["functions"] != "", "functions"]
    kinds = labels.str.split(";").explode().str.partition(":")[0].value_counts()
    sinks = heads["functions"].str.split(";").map(lambda names: "sink" in names)
    best = heads[~sinks].nlargest(1, "confidence").iloc[0]
    which = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0])))
    place = f"{best['site']}.{best['layer']}.{best['head']} ({best['confidence']:.2f})"
    return [title, str(sentences), str(len(heads)), str(len(labels)), which, place]


def variants() -> str:
    """What was recorded of the heads of every arm of the study, means over its seeds."""
    recorded = pd.read_csv(ROOT / "benchmarks/variants/runs.csv").groupby("arm").mean(numeric_only=True)
    titles = pd.read_csv(ROOT / "benchmarks/variants/table.csv").set_index("arm")[["title", "seeds"]]
    columns = {"confidence": "confidence", "entropy_share": "entropy, share of the largest"}
    head = ["arm", "seeds", *(f"{title}: {' / '.join(SITES)}" for title in columns.values()), "heads with a function"]
    return table(
        head,
        (
            [
                str(row["title"]),
                str(row["seeds"]),
                *(" / ".join(f"{row[f'{column}.{site}']:.2f}" for site in SITES) for column in columns),
                f"{row['heads_with_function']:.1f}",
            ]
            for row in titles.join(recorded).to_dict("records")
        ),
    )


TABLES = {"gallery-runs": runs, "gallery-variants": variants}
