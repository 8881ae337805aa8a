"""The tables, claims and figures of variants_study.py, from whatever of it is finished."""

from __future__ import annotations

import csv
import datetime
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headscope
from headscope.files.writing import write_atomically
from headscope.heads import SITES, Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headscope.report.readers.run import AnalysisRun

TEST = "test_2016_flickr"
SPREAD = {site: f"confidence_spread.{site}" for site in SITES}
MODULE = ["site", "layer"]
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 degree of freedom and more
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """A variant with its options, as the study trains it."""

    name: str
    title: str
    variant: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What to type for the same training, without the shared options."""
        words = []
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words.append(f"--{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(["headscope train", self.variant, *words])


@dataclass(frozen=True)
class Claim:
    """What a paper says: a column of an arm is more (`sign` 1) or less (-1) than of another arm, or than a number."""

    text: str
    published: str
    column: str
    arm: str
    against: str | float
    sign: int = 1


MHR, MAE = "Azov & Landau, IWSLT14 de-en", "Peng et al. 2020, IWSLT14 de-en"
CLAIMS = (
    Claim("Mixing is better than the baseline", f"{MHR}: BLEU 35.04, 34.51", "bleu", "mixing", "baseline"),
    Claim("Swaps by schedule are better than the baseline", f"{MHR}: 34.74, 34.51", "bleu", "swap-manual", "baseline"),
    Claim("Soft swaps are better than the baseline", f"{MHR}: 34.76, 34.51", "bleu", "swap-soft", "baseline"),
    Claim(
        "Mixing balances the confidence of decoder self-attention (deviation over heads is less)",
        "Azov & Landau, figure 5; its two maps seem to be of different measures",
        SPREAD[Site.DECODER_SELF],
        "mixing",
        "baseline",
        -1,
    ),
    Claim(
        "Swaps by schedule balance the confidence of cross attention (deviation over heads is less)",
        "Azov & Landau, figure 5; its two maps seem to be of different measures",
        SPREAD[Site.CROSS],
        "swap-manual",
        "baseline",
        -1,
    ),
    Claim(
        "With the growth loss matrices mix more than without (share of weight off the diagonal)",
        "Azov & Landau, figure of the matrices",
        "off_diagonal",
        "mixing",
        "mixing-free",
    ),
    Claim(
        "With the growth loss they become skew-symmetric off the diagonal (share of squares; 0.5 is chance)",
        "Azov & Landau, figure of the matrices",
        "off_diagonal_skew",
        "mixing",
        0.5,
    ),
    Claim("MAE is better than the baseline", f"{MAE}: 35.5, 34.6", "bleu", "mae", "baseline"),
    Claim("Uni-MAE is better than the baseline", f"{MAE}: 34.9, 34.6", "bleu", "mae-uniform", "baseline"),
    Claim("MAE is better than Uni-MAE", f"{MAE}: 35.5, 34.9", "bleu", "mae", "mae-uniform"),
    Claim("MAE is better than NoBCD", f"{MAE}: 35.5, 34.8", "bleu", "mae", "mae-nobcd"),
    Claim(
        "Encoder gates of MAE decide more than those of NoBCD (entropy is less)",
        "Peng et al. 2020, WMT14 en-de: 1.91, 2.02 nats of 2.08",
        "gate_entropy",
        "mae",
        "mae-nobcd",
        -1,
    ),
    Claim(
        "MAE takes no more than 1.2 times the baseline's time (here with 2 G epochs of 5 instead of 1)",
        "Peng et al. 2020: about 1.2",
        "time_ratio",
        "mae",
        1.2,
        -1,
    ),
)


def analysed(folder: Path) -> bool:
    """Whether an analysis has ended."""
    note = folder / "run.json"
    return note.exists() and bool(json.loads(note.read_text(encoding="utf-8")).get("complete"))


def report(out: Path, arms: Sequence[Arm]) -> None:
    """Write table.csv, table.md, runs.csv and figures/ of whatever is finished.

    What an earlier runs.csv and figures/ there say of runs whose folders are gone stays.
    """
    rows = list(rows_of(out))
    table = [line for arm in arms if (line := summary(arm, rows))]
    figures = draw(out, arms) if rows else []
    for name, lines in (("runs.csv", rows), ("table.csv", table)):
        text = csv_text(lines)
        write_atomically(out / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    page = markdown(out, arms, rows, table, figures)
    write_atomically(out / "table.md", lambda path: path.write_text(page, encoding="utf-8"))


def rows_of(out: Path) -> Iterable[Row]:
    """A row for every finished run: its result, and what the analysis says of its heads."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "runs").glob("*/result.json"))]
    there = {(row["arm"], row["seed"]) for row in found}
    found += [row for row in earlier(out / "runs.csv") if (row["arm"], row["seed"]) not in there]
    base = {row["seed"]: row["cpu_seconds"] for row in found if row["arm"] == "baseline"}
    for row in sorted(found, key=lambda row: (row["seed"], row["arm"])):
        ratio = {"time_ratio": row["cpu_seconds"] / base[row["seed"]]} if base.get(row["seed"]) else {}
        analysis = out / "analysis" / f"{row['arm']}-{row['seed']}"
        yield row | ratio | (of_heads(analysis) if analysed(analysis) else {})


def earlier(path: Path) -> list[dict[str, Any]]:
    """The rows of a table of runs, if there is one: numbers as numbers, empty cells left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: number(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def number(text: str) -> int | float | str:
    """What a cell of a table holds."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def of_heads(folder: Path) -> dict[str, float]:
    """Numbers of an analysis: deviation over the heads of a site of their confidence, and what mixes them."""
    import numpy as np
    import pandas as pd

    heads = pd.read_csv(folder / "heads.csv")
    spread = heads.groupby("site")["confidence"].std(ddof=0)
    found = {SPREAD[site]: float(spread[site.value]) for site in SITES if site.value in spread}
    if (folder / "experts_gates.csv").exists():
        gates = pd.read_csv(folder / "experts_gates.csv").query("site == 'encoder-self'")
        found["gate_entropy"] = float(gates["entropy"].mean())
    if (folder / "alphas.csv").exists():
        entries = pd.read_csv(folder / "alphas.csv")
        square = [its.pivot(index="head", columns="source", values="alpha") for _, its in entries.groupby(MODULE)]
        matrices = np.stack([np.asarray(one, dtype=float) for one in square])  # modules, h, h
        off = matrices * (1 - np.eye(matrices.shape[-1]))
        skew = (off - off.swapaxes(1, 2)) / 2
        found["off_diagonal"] = float(np.mean(np.abs(off).sum((1, 2)) / np.abs(matrices).sum((1, 2))))
        found["off_diagonal_skew"] = float((skew**2).sum() / max((off**2).sum(), 1e-300))
    return found


def summary(arm: Arm, rows: Sequence[Row]) -> dict[str, Any] | None:
    """A line of the table: means and deviations (n − 1) over seeds; None where no seed has finished."""
    mine = [row for row in rows if row["arm"] == arm.name]
    if not mine:
        return None
    line: dict[str, Any] = {"arm": arm.name, "variant": arm.title, "seeds": len(mine)}
    line["parameters"] = mine[0]["parameters"]
    for column in ("bleu", "valid_nll", "cpu_seconds", "time_ratio", "seconds", *SPREAD.values()):
        values = [row[column] for row in mine if column in row]
        line[column] = statistics.fmean(values) if values else None
        line[f"{column}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return line


def csv_text(lines: Sequence[Row]) -> str:
    """Comma-separated, with every column that any line has."""
    import pandas as pd

    return str(pd.DataFrame(list(lines)).to_csv(index=False))


def tried(claim: Claim, rows: Sequence[Row]) -> str:
    """What the numbers say of a claim: the difference of pairs with one seed, and a word."""
    values = {(row["arm"], row["seed"]): row[claim.column] for row in rows if claim.column in row}
    differences = []
    for (arm, seed), value in values.items():
        other = values.get((claim.against, seed)) if isinstance(claim.against, str) else claim.against
        if arm == claim.arm and other is not None:
            differences.append(value - other)
    return judged(differences, claim.sign)


def judged(differences: Sequence[float], sign: int) -> str:
    """`reproduced` where the 95 % interval of the mean difference (Student's t) lies on the side of `sign`."""
    count = len(differences)
    if not count:
        return "no numbers yet"
    mean = statistics.fmean(differences)
    agrees = mean * sign > 0
    if count == 1:
        return f"open, one seed only: {mean:+.3g}, {'that' if agrees else 'not that'} direction"
    t95 = T95[count - 2] if count - 2 < len(T95) else T95[-1]
    reach = t95 * statistics.stdev(differences) / count**0.5
    shown = f"{mean:+.3g} ± {reach:.2g} (95 %, {count} seeds)"
    if not agrees:
        return f"not reproduced: {shown}, not that direction"
    if reach >= abs(mean):
        return f"not reproduced: {shown}, that direction, but no more than seeds differ"
    return f"reproduced: {shown}"


def draw(out: Path, arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """The figures that the analyses of the first seed allow, and those that are there already, with what each shows."""
    from headscope.report.figures.alphas import alphas_figure
    from headscope.report.figures.compare import compare_figure
    from headscope.report.figures.training import load_history, training_figure
    from headscope.report.layout.save import write_figure
    from headscope.report.readers.run import load_run

    runs = {arm.name: load_run(its) for arm in arms if analysed(its := out / "analysis" / f"{arm.name}-1")}
    done = [path for arm in arms if ((path := out / "runs" / f"{arm.name}-1") / "result.json").exists()]
    wanted: list[tuple[str, str, Callable[[], Figure] | None]] = []
    for arm, site in (("mixing", Site.DECODER_SELF), ("swap-manual", Site.CROSS), ("swap-soft", Site.CROSS)):
        text = f"Confidence of {site} heads, baseline (A) and {arm} (B), seed 1, {TEST}"
        figure = None
        if {"baseline", arm} <= runs.keys():
            figure = partial(compare_figure, of_site(runs["baseline"], site), of_site(runs[arm], site))
        wanted.append((f"confidence-{arm}-{site}.png", text, figure))
    for arm in ("mixing", "mixing-free"):
        text = f"Matrices of {arm}, seed 1 ({'with' if arm == 'mixing' else 'without'} the nuclear-norm loss)"
        wanted.append((f"alphas-{arm}.png", text, partial(alphas_figure, runs[arm]) if arm in runs else None))
    course = partial(training_figure, [load_history(path) for path in done]) if done else None
    wanted.append(("training.png", "Loss and histories of variants, seed 1", course))
    for name, _, make in wanted:
        if make:
            write_figure(make(), out / "figures" / name, force=True)
    return [(name, text) for name, text, _ in wanted if (out / "figures" / name).exists()]


def of_site(run: AnalysisRun, site: Site) -> AnalysisRun:
    """A run with the heads of one site only."""
    layout = {site.value: run.meta["layout"][site.value]}
    return replace(run, meta={**run.meta, "layout": layout}, heads=run.heads[run.heads["site"] == site.value])


def markdown(
    out: Path, arms: Sequence[Arm], rows: Sequence[Row], table: Sequence[Row], figures: Sequence[tuple[str, str]]
) -> str:
    """The report."""
    about = json.loads((out / "study.json").read_text(encoding="utf-8"))
    slice_ = f" --max-sentences {about['max_sentences']}" if about["max_sentences"] else ""
    seeds = sorted({row["seed"] for row in rows})
    signature = next((row["bleu_signature"] for row in rows), "")
    machine = sorted({str(row["threads"] or "torch's") for row in rows})
    parts = [
        "# Variants on Multi30k, German to English\n",
        f"`python benchmarks/variants_study.py --data DIR --out DIR --epochs {about['epochs']}{slice_}`, "
        f"{datetime.date.today():%F}; runs ended {' to '.join(ends(rows)) or '(none yet)'}; seeds finished: "
        f"{', '.join(map(str, seeds)) or 'none'}; headscope {headscope.__version__}; CPU threads: "
        f"{', '.join(machine) or '-'}.\n",
        f"3+3 layers, d_model 128, 8 heads, feed-forward 256; {about['epochs']} epochs, the last model; the same data "
        f"order, updates and recipe for all ({', '.join(f'{k} {v}' for k, v in about['recipe'].items())}; MAE's "
        "warm-up is not doubled). BLEU: "
        f"{TEST}, beam 5, sacreBLEU 13a of text lower-cased on both sides ({signature}). Loss: mean -log p of a piece "
        "of the validation text, nats. Mean ± deviation over seeds (n − 1). Time: CPU seconds of training and "
        "validation of its loss; the machine may have been shared.\n",
        rows_of_table([HEAD, *map(line_of_table, table)]),
        "\n## Published claims\n",
        rows_of_table([("claim", "published", "here"), *((c.text, c.published, tried(c, rows)) for c in CLAIMS)]),
        "\nA difference is of pairs of runs with one seed. Confidence: mean of the largest weight of a query "
        f"(closing token left out), all of {TEST}, references read in.\n",
        f"## Commands\n\nShared by all: `{shared(about)}`; the seed is `--seed`.\n",
        rows_of_table([("variant", "command"), *((arm.title, f"`{arm.command}`") for arm in arms)]),
        "\n## Figures\n" if figures else "",
        *(f"![{text}](figures/{name})\n\n{text}.\n" for name, text in figures),
    ]
    return "\n".join(part for part in parts if part)


def shared(about: Mapping[str, Any]) -> str:
    """The options of every training."""
    texts = {"source": "train.de.gz", "target": "train.en.gz", "valid-source": "val.de.gz", "valid-target": "val.en.gz"}
    given = {**about["recipe"], "max_epochs": about["epochs"], "max_sentences": about["max_sentences"]}
    options = texts | {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    return " ".join(f"--{name} {value}" for name, value in options.items())


HEAD = ("variant", "seeds", "BLEU", "validation loss", "parameters", "CPU s", "× baseline", "wall s")


def line_of_table(line: Row) -> tuple[str, ...]:
    """The cells of a variant."""

    def cell(column: str, digits: int) -> str:
        value, spread = line[column], line[f"{column}_sd"]
        if value is None:
            return "-"
        return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")

    numbers = [cell("bleu", 2), cell("valid_nll", 4), f"{line['parameters']:,}", cell("cpu_seconds", 0)]
    return (line["variant"], str(line["seeds"]), *numbers, cell("time_ratio", 2), cell("seconds", 0))


def rows_of_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rest])


def ends(rows: Sequence[Row]) -> list[str]:
    """The first and the last day on which a run ended."""
    days = sorted({row["ended"] for row in rows})
    return [days[0], days[-1]] if len(days) > 1 else days
