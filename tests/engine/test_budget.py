"""Heads off within a budget: a part of the text, measured as if there were no more of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headscope.config import AnalyzeConfig
from headscope.config.declarations import checked_options
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.joint import LEAST, PASSES, SMALL, affordable, with_budget
from headscope.engine.plan import analyze, choose_analyses
from headscope.errors import ConfigError
from headscope.results.study import Study
from tests.oracles import speakers
from tests.oracles.run_options import run_options


def test_a_budget_pays_a_part_of_the_text() -> None:
    corpus, few = (open_corpus([f"Line {number}." for number in range(count)]) for count in (200, SMALL // 2))
    part = affordable(corpus, 40.0, 10)
    assert isinstance(part, Corpus) and part.count == 50 == len(list(part))
    numbers = [sentence.number for sentence in part]
    assert numbers == sorted(numbers) and numbers[0] < 40 and numbers[-1] >= 160, "from all of its length"
    again = affordable(corpus, 40.0, 10)
    assert isinstance(again, Corpus) and [sentence.number for sentence in again] == numbers
    assert affordable(corpus, 40.0, 40) is corpus is affordable(corpus, 1e9, 0)
    assert affordable(few, 30.0, 30) is few, "a small text has the budget of a larger one"
    assert "needs 1,000 passes of a sentence" in str(affordable(corpus, 1000.0, LEAST * 1000 // 200 - 1))


def ablated(corpus: Corpus, **options: Any) -> Study:
    names = ["confidence", "ablation"]
    its = speakers.checkpoint("gpt2")
    return analyze(its, corpus, analyses=choose_analyses(only=names), options=run_options(**options), replicates=50)


@pytest.mark.slow
def test_a_part_is_measured_as_if_there_were_no_more() -> None:
    """Value, interval and test of the sentences that are measured; those that are not are no units of resampling."""
    corpus = speakers.corpus("gpt2", count=67)
    found, whole = ablated(corpus, ablation_passes=1), ablated(corpus, ablation_passes=0)
    measured = int(67 / 5.5)
    assert found.record["sampled"] == {"ablation": f"{measured} of 67"} and not whole.record["sampled"]
    # 2 layers of 3 heads: 1 + 3 · 1 + 3 · 1/2 passes
    share = corpus.share(measured / 67, seed=1)
    lines = [line._replace(number=number) for number, line in enumerate(share)]
    alone = ablated(Corpus("alone", len(lines), "0" * 40, lambda: iter(lines)))
    columns = ["ablation", "ablation_low", "ablation_high"]
    np.testing.assert_allclose(found.heads[columns], alone.heads[columns], rtol=1e-6)
    np.testing.assert_allclose(found.tables["importance"]["p"], alone.tables["importance"]["p"], rtol=1e-5)
    assert not np.allclose(whole.heads["ablation"], found.heads["ablation"])
    assert found.record["signatures"]["ablation"]["ablation-n"] == f"{measured} of 67"
    assert f"ablation on {measured} of 67 sentences" in found.record["remarks"]
    assert found.answers()[1].sentence.endswith(f"ablation on {measured} of 67 sentences")
    assert whole.record["signatures"]["ablation"] == {"m": "ablation.v1", "objective": "loss.v1", "with": "zero"}


def test_what_is_too_dear_is_estimated() -> None:
    """A budget of no eight sentences leaves ablation out, and the headline says that it is an estimate."""
    its, corpus = speakers.checkpoint("gpt2"), speakers.corpus("gpt2", count=30)
    options = run_options(ablation_passes=1)
    study = analyze(its, corpus, analyses=choose_analyses(only=["ablation", "taylor"]), options=options, replicates=5)
    assert "ablation" in study.heads  # 64 sentences' worth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscope.engine.joint.SMALL", 30)
        study = analyze(
            its, corpus, analyses=choose_analyses(only=["ablation", "taylor"]), options=options, replicates=5
        )
        assert "ablation" not in study.heads and study.left_out[0].why.startswith("needs 6 passes")
        assert study.answers()[1].question == "Which heads the model needs (estimated)"
        with pytest.raises(ConfigError, match="no analysis can run: ablation: needs"):
            analyze(its, corpus, analyses=choose_analyses(only=["ablation"]), options=options)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"importance": "cheap"}, PASSES),
        ({"faithfulness": True}, PASSES),
        ({"importance": "all"}, 0),
        ({"importance": "cheap", "also": ("ablation",)}, 0),
        ({"only": ("importance",)}, 0),
        ({"only": ("ablation",), "analysis_options": {"ablation_passes": 5}}, 5),
        ({"importance": "cheap", "analysis_options": {"ablation_passes": 0}}, 0),
    ],
)
def test_who_asks_for_ablation_by_name_gets_all_of_it(options: dict[str, Any], passes: int) -> None:
    given = checked_options(options.pop("analysis_options", {}))
    config = AnalyzeConfig(checkpoint="model", source="text", out="run", analysis_options=given, **options)  # type: ignore[arg-type]
    assert with_budget(config).analysis_options["ablation_passes"] == passes
