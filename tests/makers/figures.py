"""Every kind of figure, of invented runs: what each is drawn of, and where its texts stand."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from headscope.report.figures.pruning import FIGURES
from headscope.report.figures.sentence import draw_maps
from headscope.report.figures.training import ConfidenceHistory
from headscope.report.registry import find_figure
from headscope.report.sheet import Sheet
from headscope.report.styles import FigureStyle
from headscope.results.study import Study
from headscope.results.sweep import Sweep
from headscope.results.training import Training
from tests.makers.runs import Layout, heads_of, make_run

LAYOUTS: dict[str, Layout] = {
    "2x2": {"encoder-self": [2, 2]},
    "three sites": {"encoder-self": [7, 5, 3, 0], "decoder-self": [7, 2], "cross": [1, 7]},
}
IMPORTANCES = ("taylor", "gradient_raw", "ablation", "integrated_gradients")
SWEEP_METHODS = {"l0": (1.0, 2), "gradient": (2.0, 2), "random": (5.0, 2)}
Figures = dict[str, Callable[[FigureStyle], Figure]]


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Figures are made, but get no layout, and empty images are saved: `tests/report` looks at what is in them."""

    def save(figure: Figure, target: Any, **looks: Any) -> None:
        if isinstance(target, (str, Path)):
            Path(target).write_text("<svg></svg>", encoding="utf-8")
        else:
            target.write("<svg></svg>")

    patch.setattr(Figure, "savefig", save)
    patch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)


def draw(name: str, *runs: Any, style: FigureStyle | None = None, **options: Any) -> Figure:
    """A figure by its name, with some of its options."""
    figure = find_figure(name)
    result: Figure = figure.draw_runs(runs, figure.Options(**options), style)
    return result


def draw_words(
    weights: np.ndarray, queries: list[str], keys: list[str], names: Sequence[str], style: FigureStyle | None = None
) -> Figure:
    """The figure of attention weights [n t s] that are there."""
    style = style or FigureStyle()
    with style.in_use():
        sheet = Sheet(style)
        draw_maps(sheet, dict(zip(names, weights, strict=True)), (queries, keys), model="all-MiniLM-L6-v2 (bert)")
        return sheet.finish()


def every_figure(folder: Path, layout: Layout) -> Figures:
    """Functions that draw every kind of figure, of runs of this layout written into the folder."""
    run = Study.open(make_measured(folder / "run", layout))
    other = Study.open(make_run(folder / "other", layout, seed=7, tables=(), extra=IMPORTANCES))
    sweep = Sweep.open(make_sweep(folder / "sweep", layout))
    plain, mae = (Training.open(make_training(folder / name, layout, name)) for name in ("baseline", "mae"))
    words = ["[CLS]", "$x$", "a##y", "", "\n", "anticonstitutionally", "[SEP]"]
    weights = np.random.default_rng(3).dirichlet(np.ones(len(words)), size=(2, len(words)))
    maps = weights, words, words, ("encoder-self.0.0", "encoder-self.1.0")
    names = ("heads", "functions", "positional", "syntactic", "similarity", "experts", "rankings", "faithfulness")
    calls: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {name: (name, (run,), {}) for name in names}
    calls |= {
        "sorted": ("heads", (run,), {"measure": ("confidence", "ablation"), "sort": True}),
        "compare": ("compare", (run, other), {"measure": "ablation"}),
        "discrepancy": ("discrepancy", (run, run), {}),
        "training": ("training", (plain, mae), {}),
        "gates": ("gates", (mae,), {}),
        "confidence": ("confidence", (make_epochs(run),), {}),
        **{f"pruning {kind}": ("pruning", (sweep,), {"figure": kind}) for kind in FIGURES},
    }
    figures: Figures = {
        kind: lambda style, name=name, runs=runs, options=options: draw(name, *runs, style=style, **options)  # type: ignore[misc]
        for kind, (name, runs, options) in calls.items()
    }
    return figures | {"attention": lambda style: draw_words(*maps, style)}


def make_measured(path: Path, layout: Layout) -> Path:
    """A run of `analyze` with importances, faithfulness and experts."""
    make_run(path, layout, extra=IMPORTANCES)
    random = np.random.default_rng(5)
    make_faithfulness(path, random)
    _make_experts(path, layout, random)
    return path


def make_faithfulness(path: Path, random: np.random.Generator) -> None:
    """Tables of `analyze --faithfulness`: curves of importances, of confidence and of random orders."""
    names = [*IMPORTANCES, "confidence", *(f"random:{n}" for n in range(3))]
    shares = np.linspace(0, 1, 6)
    rows = []
    for number, name in enumerate(names):
        for order, power in (("most important first", 0.4 + 0.1 * number), ("least important first", 2.5)):
            power = 1 + 0.2 * random.normal() if name.startswith("random") else power
            for share in shares:
                harm = 3 * share**power
                row = {"ranking": name, "order": order, "removed": round(20 * share), "share": share, "metric": "loss"}
                rows.append(row | {"harm": harm, "harm_low": harm * 0.95, "harm_high": harm * 1.05})
    pd.DataFrame(rows).to_csv(path / "faithfulness.csv", index=False)
    rankings = [
        {"place": n + 1, "ranking": name, "area": 2 - 0.3 * n, "area_low": 1.8 - 0.3 * n, "area_high": 2.2 - 0.3 * n}
        | {"area_random": 0.1, "area_random_sd": 0.2}
        for n, name in enumerate([*IMPORTANCES, "confidence"])
    ]
    pd.DataFrame(rankings).to_csv(path / "faithfulness_rankings.csv", index=False)


def _make_experts(path: Path, layout: Layout, random: np.random.Generator) -> None:
    experts, gates, tokens = [], [], []
    for site, counts in layout.items():
        for layer, count in enumerate(counts):
            site_layer = {"site": site, "layer": layer}
            shares = random.dirichlet(np.ones(count)) if count > 1 else np.zeros(0)
            for expert, share in enumerate(shares):
                ends = {"responsibility_low": share * 0.9, "responsibility_high": share * 1.1}
                experts.append(site_layer | {"expert": expert, "lacks": expert, "responsibility": share} | ends)
                tokens += [site_layer | {"expert": expert, "token": f"word{n}", "pmi": 1 / (n + 1)} for n in range(8)]
            if count > 1:
                entropy = -float((shares * np.log(shares)).sum())
                gates.append(site_layer | {"entropy": entropy, "even": float(np.log(count))})
    for name, table in (("experts", experts), ("experts_gates", gates), ("experts_tokens", tokens)):
        pd.DataFrame(table).to_csv(path / f"{name}.csv", index=False)


def make_sweep(
    path: Path,
    layout: Layout,
    *,
    methods: Mapping[str, tuple[float, int]] = SWEEP_METHODS,
    shares: Sequence[float] = (0.75, 0.5, 0.25),
    controls: Sequence[str] = (),
    labels: Sequence[str] = ("positional:-1", "syntactic:nsubj>", "rare", ""),
    metric: str = "bleu",
) -> Path:
    """A folder as of `prune sweep`, with gates where they are learnt. methods: the loss without heads, and seeds."""
    random = np.random.default_rng(9)
    heads = heads_of(layout)
    total = len(heads)
    rows, survivors = [], []
    cells = [
        (method, share, control, seed)
        for method, (_, seeds) in methods.items()
        for share in shares
        for control in (("", "from scratch") if method in controls else ("",))
        for seed in range(1, seeds + 1)
    ]
    for method, share, control, seed in [("unpruned", 1.0, "", 1), *cells]:
        kept = sorted(random.permutation(total)[: max(1, round(total * share))])
        spread = 0.0 if method == "unpruned" else methods[method][0] + bool(control)
        value = 35 - spread * (1 - share) - 0.1 * seed
        cell = f"{method}-{len(kept)}-{seed}{control}"
        size = "" if method == "unpruned" else f"keep {len(kept)}"
        row = {"method": method, "control": control, "size": size, "seed": seed, "kept": len(kept), "of": total}
        row |= {f"kept_{site}": sum(heads[n][0] == site for n in kept) for site in layout}
        quality = {"metric": metric, "value": value, "low": value - 1, "high": value + 1}
        rows.append(row | quality | {"difference": value - 35, "loss": 1.7 + (35 - value) / 10, "cell": cell})
        if control:
            continue
        survivors += [
            dict(zip(("site", "layer", "head"), heads[n], strict=True))
            | {"method": method, "size": size, "cell": cell, "functions": labels[n % len(labels)]}
            for n in kept
        ]
        if method in ("l0", "subset") and seed == 1:
            _make_gates(path / "runs" / cell, heads, random)
    pd.DataFrame(rows).to_csv(path / "sweep.csv", index=False)
    pd.DataFrame(survivors).to_csv(path / "survivors.csv", index=False)
    (path / "sweep.json").write_text(json.dumps({"signature": "m:prune.sweep", "source": {"path": "models/en-de"}}))
    return path


def _make_gates(folder: Path, heads: Sequence[tuple[str, int, int]], random: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    speeds = random.normal(0, 2, len(heads))
    rows = [
        {"update": update, "site": site, "layer": layer, "head": head, "gate": 1.0}
        | {"open": float(1 / (1 + np.exp(-speed * update / 50)))}
        for update in (0, 50, 100)
        for (site, layer, head), speed in zip(heads, speeds, strict=True)
    ]
    pd.DataFrame(rows).to_csv(folder / "gates.csv", index=False)


def make_training(path: Path, layout: Layout, variant: str) -> Path:
    """A folder as of `train`; a mixture has gates that decide more and more, others a norm that hardly moves."""
    path.mkdir()
    random = np.random.default_rng(len(variant))
    rows = []
    for line in range(1, 11):
        row: dict[str, Any] = {"update": line * 1000, "epoch": 1, "sentences": line, "tokens": line * 3e5}
        row |= {
            "seconds": line,
            "nll": 8 / line + random.normal(0, 0.05),
            "valid_nll": 8 / line if line % 2 == 0 else None,
        }
        row |= {"bleu": 3.0 * line if line % 5 == 0 else None}
        if variant == "mae":
            row |= {"gate_entropy": 2 - 0.1 * line} | {f"gate_entropy.{site}": 2 - 0.1 * line for site in layout}
            row |= {
                f"expert_share.{site}.{layer}.{expert}": share
                for site, counts in layout.items()
                for layer, count in enumerate(counts)
                if count > 1
                for expert, share in enumerate(random.dirichlet(np.full(count, 5.0)))
            }
        else:
            row |= {f"nuclear_norm.{site}": 1 + 1e-6 * (line % 2) for site in layout}
        rows.append(row)
    pd.DataFrame(rows).to_csv(path / "metrics.csv", index=False)
    meta = {"kind": "training", "variant": variant, "signature": f"m:train.{variant}", "data": {"sentences": 29000}}
    (path / "run.json").write_text(json.dumps(meta))
    return path


def make_epochs(run: Study) -> ConfidenceHistory:
    """Confidence of the run's heads from epoch to epoch; of a large model the first layers."""
    layout = {site: counts[:3] for site, counts in run.layout.items()}
    random = np.random.default_rng(2)
    scores = {
        (site, layer): random.uniform(0.2, 0.6, (5, count))
        for site, counts in layout.items()
        for layer, count in enumerate(counts)
        if count
    }
    record = {**run.record, "layout": layout, "method": "base"}
    history = ConfidenceHistory({"heads": run.heads}, record, folder=run.folder)
    history.epochs, history.scores = (1, 2, 3, 4, 5), scores
    return history


def with_tables(study: Study, **tables: pd.DataFrame) -> Study:
    """A copy of a study with other tables."""
    return Study({**study.tables, **tables}, study.record, arrays=study.arrays, folder=study.folder)


def words(figure: Figure) -> list[Text]:
    """Headline, notes and key."""
    return [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]


def shown_ticks(axis: Any) -> list[Text]:
    """The labels of ticks that are in view and not empty."""
    low, high = sorted(axis.get_view_interval())
    edge = 1e-9 * (high - low)
    ticks = [tick for tick in axis.get_major_ticks() if low - edge <= tick.get_loc() <= high + edge]
    return [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]


def texts(figure: Figure) -> list[Text]:
    """Every text that a reader sees."""
    result = words(figure)
    for axes in figure.axes:
        result += [*axes.texts, *shown_ticks(axes.xaxis), *shown_ticks(axes.yaxis), axes.xaxis.label, axes.yaxis.label]
        result += [artist for artist in axes.get_children() if isinstance(artist, Text)]  # titles
        result += [axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()]
    return list({id(text): text for text in result if text.get_text() and text.get_visible()}.values())


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Texts and where they stand, in pixels."""
    with figure.style.in_use():  # type: ignore[attr-defined]
        figure.draw_without_rendering()  # labels find their place only then
        return [(text.get_text(), text.get_window_extent()) for text in texts(figure)]


def overlapping(labels: Sequence[tuple[str, Bbox]], *, slack: float = 1.0) -> list[tuple[str, str]]:
    """Pairs of texts that stand on each other."""
    ends = np.array([box.extents for _, box in labels])
    left, bottom, right, top = (ends[:, n] for n in range(4))
    wide = np.minimum(right[:, None], right) - np.maximum(left[:, None], left) > slack
    tall = np.minimum(top[:, None], top) - np.maximum(bottom[:, None], bottom) > slack
    pairs = np.argwhere(np.triu(wide & tall, 1))
    return [(labels[a][0], labels[b][0]) for a, b in pairs]
