"""Sentences whose attention a run keeps: which are taken, and that their weights are those of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headscope.data.corpus import open_corpus
from headscope.engine.attention_maps import SHORT, attention_maps, short_examples
from headscope.heads import HeadId, Site
from tests.oracles.checkpoints import hugging

LINES = ["a b c", "b " * (SHORT + 1), "c a", "b c a b"]
SIDES = {
    "bert": {"encoder-self": ("source", "source")},
    "gpt2": {"decoder-self": ("source", "source")},
    "bart": {
        "encoder-self": ("source", "source"),
        "decoder-self": ("target", "target"),
        "cross": ("target", "source"),
    },
}


@pytest.mark.parametrize("kind", SIDES)
def test_the_first_short_sentences_are_kept_with_the_weights_of_every_head(kind: str, tmp_path: Path) -> None:
    checkpoint = hugging(kind)
    texts = {"source": tmp_path / "source", "target": tmp_path / "target"}
    for path in texts.values():
        path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    corpus = open_corpus(texts["source"], target=texts["target"] if kind == "bart" else None)
    kept = short_examples(checkpoint, corpus, 2, limit=61)
    assert [example.number for example in kept] == [0, 2]  # the second line is too long
    for example in kept:
        assert set(example.weights) == set(SIDES[kind]) and set(example.texts) == set(example.subwords)
        for site, (query, key) in SIDES[kind].items():
            heads = sum(count for (own, _), count in checkpoint.layout.items() if own == site)
            assert example.weights[site].shape == (heads, len(example.subwords[query]), len(example.subwords[key]))
    (first, *_) = corpus
    maps = attention_maps(checkpoint, first, limit=61)
    for site in SIDES[kind]:
        assert maps.between(Site(site)) == SIDES[kind][site]
        captured = maps.captured[site, 1]["weights"][0].float().numpy()
        np.testing.assert_allclose(kept[0].weights[site][-len(captured) :] / 255, captured, atol=0.003)


def test_masked_heads_are_off_and_where_all_are_long_none_is_kept(tmp_path: Path) -> None:
    checkpoint = hugging("bert")
    (tmp_path / "text").write_text("a b c a\n", encoding="utf-8")
    corpus = open_corpus(tmp_path / "text")
    off = [HeadId(Site.ENCODER_SELF, 0, head) for head in range(3)]
    whole, less = (short_examples(checkpoint, corpus, 1, limit=61, off=heads)[0] for heads in ([], off))
    np.testing.assert_array_equal(whole.weights["encoder-self"][:3], less.weights["encoder-self"][:3])
    assert (whole.weights["encoder-self"][3:] != less.weights["encoder-self"][3:]).any()  # the next layer sees less
    assert short_examples(checkpoint, corpus, 1, limit=4) == []  # it would be cut off
