"""Contracts of every analysis of prompts: a new file in `analyses/` that needs them is tested here without a change."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from headscope.engine.base import ANALYSES, Attention
from headscope.pruning.scores_file import columns
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import prompts, speakers

NAMES = [name for name, cls in ANALYSES if "contrast" in cls.needs]
KINDS = ("gpt2", "t5", "native-pre")

every_analysis = pytest.mark.parametrize("name", NAMES)
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def study(kind: str, name: str, *, tokens: int = 1000, attention: Attention = "dense") -> Study:
    options: dict[str, Any] = {"tokens": tokens, "replicates": 19, "attention": attention, "eap_steps": 1}
    return study_of(speakers.checkpoint(kind), prompts.corpus(kind), name, **options)


@every_analysis
@every_kind
def test_every_head_has_numbers_inside_their_intervals(name: str, kind: str) -> None:
    heads, layout = study(kind, name).heads, speakers.checkpoint(kind).layout
    assert len(heads) == sum(layout.values()) and study(kind, name).sentences == prompts.COUNT
    names = {measure.name for measure in ANALYSES.get(name).measures}
    assert set(columns(heads)) == names
    for column in names:
        values, low, high = (heads[f"{column}{end}"].to_numpy() for end in ("", "_low", "_high"))
        assert np.isfinite(values).all() and (low <= values + 1e-9).all() and (values <= high + 1e-9).all(), column


@every_analysis
@every_kind
def test_neither_batches_nor_streaming_matter(name: str, kind: str) -> None:
    dense, other = study(kind, name), study(kind, name, tokens=1, attention="streamed")
    for column in columns(dense.heads):
        np.testing.assert_allclose(other.heads[column], dense.heads[column], atol=1e-9, rtol=0, err_msg=column)
    message = f"attention: streamed for {prompts.COUNT} sentences"
    assert message in other.remarks and dense.remarks == [remark for remark in other.remarks if remark != message]
