"""Compensations on the text that was calibrated on and on another kind: masking, least squares, what `auto` takes.

Run: python benchmarks/anchored_refits.py bert|translation --data DIR [--ud DIR] --out FILE.csv [--methods NAMES]
     [--kept N,N] [--damping X] [--anchor NAME] [--compared NAMES] [--sequential] [--development]

DIR of --data has Multi30k, that of --ud the UD treebanks EWT and PUD. 400 training sentences are calibrated on (and
ranked by), the 100 after them are the held-out text that `auto` compares on; its second text ships (`varied`).
Test texts are others: for `bert` 200 validation captions and 300 sentences of EWT's development text (cosine of
sentence vectors to the intact model's), for `translation` test_2016_flickr and 300 sentences of the parallel treebanks
PUD (loss in nats, and by how much it is more than the intact model's), without --ud the sample, of which an anchor has
half. A row for every ranking, number of heads kept
and compensation; --damping is that of the rankings that refit, --anchor that of those that are measured.
NAME:measured is `--allocate measured`, --sequential that of `auto`. --development measures on what choices may be made
by: training sentences 401 to 600, for `bert` 200 sentences of the treebank PUD (en_pud-ud-test of --ud) and the half of
the sample that is no anchor.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from closed_form_pruning import kept_by, lines, open_model

import headscope as hs
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.base import RunOptions
from headscope.engine.faithfulness.orders import Scores
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.calibration import CalibrationText
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.gate_layout import gate_layout
from headscope.pruning.options.refit import Refit, RefitOptions
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.ranking.scoring import measured_scores, moments_of, orders_of

CALIBRATED, HELD_OUT = 400, 100
COMPARED = {
    "least-squares": RefitOptions(),
    "least-squares, mixed": RefitOptions(anchor="mixed"),
    "least-squares, general": RefitOptions(anchor="general"),
    "sequential": RefitOptions(sequential=True),
    "feed-forward": RefitOptions(sequential=True, feed_forward=True),
    "feed-forward, general": RefitOptions(damping=0.1, sequential=True, feed_forward=True, anchor="general"),
    "feed-forward, noised": RefitOptions(damping=0.3, sequential=True, feed_forward=True, anchor="noised"),
    "feed-forward, spliced": RefitOptions(damping=0.1, sequential=True, feed_forward=True, anchor="spliced"),
    "auto": None,
}


def treebank(path: Path, count: int) -> list[str]:
    """The first sentences of 21 to 159 characters of a .conllu.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [line.removeprefix("# text = ").strip() for line in file if line.startswith("# text = ")]
    return [text for text in texts if 20 < len(text) + len("# text = ") - 9 < 160][:count]


def translated(ud: Path, count: int) -> Corpus:
    """Sentences of PUD of 21 to 159 characters, English and German."""
    sides = {side: dict(_by_name(ud / f"{side}_pud-ud-test.conllu.gz")) for side in ("en", "de")}
    names = [name for name, text in sides["en"].items() if 20 < len(text) < 160 and name in sides["de"]][:count]
    return open_corpus([sides["en"][name] for name in names], target=[sides["de"][name] for name in names])


def _by_name(path: Path) -> Iterator[tuple[str, str]]:
    """sent_id and text of every sentence of a .conllu.gz file."""
    name = ""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.removeprefix("# ").strip().partition(" = ")
            name = value if key == "sent_id" else name
            if key == "text":
                yield name, value


def parallel(data: Path, name: str, count: int, *, target: bool) -> Corpus:
    """The first lines of a file, with their translations."""
    sides = [lines(data / f"{name}.{side}.gz", count) for side in (("en", "de") if target else ("en",))]
    return open_corpus(sides[0], target=sides[1] if target else None)


def tests_of(model: str, data: Path, ud: Path | None) -> dict[str, Corpus]:
    """The test texts, of the kind that was calibrated on first."""
    if model == "translation":
        sample = open_corpus(hs.assets.sample("en"), target=hs.assets.sample("de"))
        other = sample if ud is None else translated(ud, 300)
        return {"captions": parallel(data, "test_2016_flickr", 1000, target=True), "other": other}
    assert ud is not None, "--ud has the other text"
    other = open_corpus(treebank(ud / "en_ewt-ud-dev.conllu.gz", 300))
    return {"captions": parallel(data, "val", 200, target=False), "other": other}


def development_texts(model: str, data: Path, ud: Path | None) -> dict[str, Corpus]:
    """Texts that choices may be made by, of the kind that was calibrated on first."""
    captions = parallel(data, "train", 600, target=model == "translation").after(400)
    if model == "translation":
        return {"captions": captions}
    assert ud is not None, "--ud has the other text"
    sample = open_corpus(hs.assets.sample("en").read_text(encoding="utf-8").splitlines()[1::2])
    other = open_corpus(treebank(ud / "en_pud-ud-test.conllu.gz", 200))
    return {"captions": captions, "other": other, "sample": sample}


def scores_by(method: str, context: ScoringContext) -> Scores:
    """The scores of a ranking, the highest stay; NAME:measured is allocated by measuring."""
    name, _, allocation = method.partition(":")
    criterion = criterion_named(name)
    scores = criterion.direction().apply(criterion.scores(context))
    if allocation != "measured":
        return scores
    return measured_scores(context, orders_of(context, gate_layout(context.checkpoint.attention_sites).units, scores))


def rows(
    bench: RefitBench, meters: dict[str, DamageMeter], heads: list[HeadId], *, compared: dict[str, RefitOptions | None]
) -> Iterator[dict[str, Any]]:
    """A row for every compensation."""
    checkpoint = bench.checkpoint

    def measured(name: str, model: Any = None) -> dict[str, Any]:
        found = {text: meter.measure(model) for text, meter in meters.items()}
        values = {text: each.value for text, each in found.items()}
        return {"compensation": name, **values, **{f"{text}_damage": each.damage for text, each in found.items()}}

    with masked(checkpoint.model, heads):
        yield measured("none")
    for name, options in compared.items():
        began, taken = time.process_time(), ""
        if options is None:
            done = bench.compensated(heads)
            assert done.choice is not None
            model, taken = done.checkpoint.model, done.choice.taken.name
        else:
            model = bench.copy_with(bench.refits(heads, options)).model
        seconds = time.process_time() - began
        yield {**measured(name, model), "taken": taken, "seconds": seconds}


def study(checkpoint: Checkpoint, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every ranking, number of heads kept and compensation."""
    text = parallel(given.data, "train", CALIBRATED + HELD_OUT, target=given.model == "translation")
    both = CalibrationText(text.first(CALIBRATED), text.after(CALIBRATED))
    layout = gate_layout(checkpoint.attention_sites)
    context = ScoringContext(
        checkpoint,
        both.calibration,
        options=RunOptions(),
        candidates=layout.gated_heads,
        damping=given.damping,
        anchor=given.anchor,
    )
    bench = RefitBench(checkpoint, both, Refit(method="auto", sequential=given.sequential), moments=moments_of(context))
    texts = (development_texts if given.development else tests_of)(given.model, given.data, given.ud)
    meters = {name: DamageMeter.of(checkpoint, corpus) for name, corpus in texts.items()}
    compared = {name: COMPARED[name] for name in given.compared.split(";")}
    for method in given.methods.split(","):
        scores = scores_by(method, context)
        for kept in map(int, given.kept.split(",")):
            heads = layout.closed(kept_by(scores, layout, kept))
            for row in rows(bench, meters, heads, compared=compared):
                yield {"method": method, "damping": given.damping, "anchor": given.anchor, "kept": kept, **row}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["bert", "translation"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ud", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", default="confidence,output-norm,wanda,obs")
    parser.add_argument("--kept", default="36,24")
    parser.add_argument("--damping", type=float, default=1e-4)
    parser.add_argument("--anchor", default="")
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--development", action="store_true")
    parser.add_argument("--compared", default="least-squares;least-squares, general;auto")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for row in study(open_model(given.model), given):
        found.append(row)
        print(row, flush=True)
        pd.DataFrame(found).to_csv(given.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
