"""The analysis of mixing matrices: its numbers against formulas, where it applies, and its figure."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.data.corpus import open_corpus
from tests.makers.studies import study_of
from tests.oracles import mhr

CORPUS = open_corpus(["w5 w6"], target=["w7"])


def test_numbers_of_every_matrix() -> None:
    its = mhr.small()
    found = study_of(its, CORPUS, "alphas")
    entries, modules, spectrum = (found.tables[name] for name in ("alphas", "alphas_modules", "alphas_spectrum"))
    places = 0
    for site, layer, _, attention in its.model.attention_modules():
        h = attention.heads
        its_modules = modules[(modules.site == site.value) & (modules.layer == layer)]
        assert len(its_modules) == (h > 0)
        if not h:
            continue
        places += 1
        mixing: Any = attention.mixing
        a = mixing.alpha.detach().numpy()
        mine = entries[(entries.site == site.value) & (entries.layer == layer)]
        entry: Any
        for entry in mine.itertuples():
            assert entry.alpha == a[entry.head, entry.source]
        assert len(mine) == h * h
        row = its_modules.iloc[0]
        values = np.sqrt(np.clip(np.sort(np.linalg.eigvalsh(a.T @ a))[::-1], 0, None))
        assert row.heads == h and row.nuclear_norm == pytest.approx(values.sum())
        off = sum(abs(a[i, j]) for i in range(h) for j in range(h) if i != j)
        assert row.off_diagonal == pytest.approx(off / np.abs(a).sum())
        skew = [((a[i, j] - a[j, i]) / 2) ** 2 for i in range(h) for j in range(h)]
        assert row.skew_share == pytest.approx(sum(skew) / (a**2).sum())
        assert row.from_identity == pytest.approx(np.sqrt(((a - np.eye(h)) ** 2).sum()))
        singular = spectrum[(spectrum.site == site.value) & (spectrum.layer == layer)].singular_value
        np.testing.assert_allclose(singular, values, atol=1e-10)
        heads = found.heads[(found.heads.site == site.value) & (found.heads.layer == layer)]
        np.testing.assert_array_equal(heads["alpha_own"], a.diagonal())
        share = [1 - abs(a[i, i]) / np.abs(a[i]).sum() for i in range(h)]
        np.testing.assert_allclose(heads["alpha_others"], share)
    assert places == 7 and len(modules) == 7


def test_nuclear_norms_are_those_of_the_original(shared: Path) -> None:
    reference = json.loads((shared / "oracles/mhr/alpha/oracle/teacher_forced_reference.json").read_text())
    its, _ = mhr.theirs(shared / "oracles")
    modules = study_of(its, CORPUS, "alphas").tables["alphas_modules"]
    norms = reference[next(key for key in reference if key.startswith("nuclear"))]
    names = {
        "encoder-self": "encoder.{}.self_attn",
        "decoder-self": "decoder.{}.self_attn",
        "cross": "decoder.{}.enc_attn",
    }
    row: Any
    for row in modules.itertuples():
        assert row.nuclear_norm == pytest.approx(norms[names[row.site].format(row.layer)], abs=1e-3)
    assert len(modules) == 9
