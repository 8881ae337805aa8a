"""`evaluate --against`: a smaller model is compared with the intact one, never with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.config.evaluate import EvaluateConfig
from headscope.errors import ConfigError
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from tests.oracles import classifiers

pytestmark = pytest.mark.slow

NAMES = ["cosine", "token-cosine", "l2", "token-l2"]
GONE = "encoder-self.0.1,encoder-self.1.*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, and `small`: the same without some heads."""
    folder = tmp_path_factory.mktemp("against")
    classifiers.folder(folder / "whole", "bert-encoder")
    (folder / "text").write_text("".join(f"{text}\n" for text in classifiers.texts(11)))
    options: dict[str, Any] = {"rounds": 0, "dtype": "float64", "source": folder / "text"}
    run_removal(RemoveConfig(checkpoint=str(folder / "whole"), out=folder / "small", heads=GONE, **options))
    return folder


def scores(folder: Path, checkpoint: str, **options: Any) -> tuple[dict[str, float], str]:
    """Values by metric, and the remarks as one text."""
    given = {"checkpoint": str(folder / checkpoint), "source": folder / "text", "dtype": "float64", "bootstrap": 10}
    evaluation = run_evaluation(EvaluateConfig(**{**given, **options}))
    return {score.metric: score.value for score in evaluation.scores}, " ".join(evaluation.remarks)


def test_a_small_model_is_compared_with_what_it_was_made_of(folder: Path) -> None:
    masked, _ = scores(folder, "whole", mask=GONE)
    found, remarks = scores(folder, "small")
    assert list(found) == NAMES and found == pytest.approx(masked, abs=1e-9) and found["cosine"] < 0.999
    assert str(folder / "whole") in remarks and "pruning.json" in remarks
    assert scores(folder, "small", against=str(folder / "whole"))[0] == pytest.approx(masked, abs=1e-9)
    table = run_each_head(
        EvaluateConfig(
            checkpoint=str(folder / "small"), source=folder / "text", dtype="float64", each_head=True, bootstrap=10
        )
    ).table
    assert table["cosine"].iloc[0] == pytest.approx(masked["cosine"], abs=1e-9)


def test_the_api_compares_with_the_model_that_heads_were_removed_from(folder: Path) -> None:
    texts = classifiers.texts(11)
    whole = hs.load(folder / "whole", device="cpu", dtype="float64")
    wanted = {score.metric: score.value for score in whole.evaluate(texts, mask=GONE, bootstrap=10).scores}
    small, reopened = whole.remove(GONE), hs.load(folder / "small", device="cpu", dtype="float64")
    tried = [
        small.evaluate(texts, bootstrap=10),
        reopened.evaluate(texts, bootstrap=10),
        reopened.evaluate(texts, against=whole, bootstrap=10),
        reopened.evaluate(texts, against=folder / "whole", bootstrap=10),
    ]
    whole_path = whole.checkpoint.path
    del whole  # its files are what is left of it
    tried.append(small.evaluate(texts, bootstrap=10))
    assert whole_path in " ".join(tried[-1].remarks)
    for evaluation in tried:
        assert {score.metric: score.value for score in evaluation.scores} == pytest.approx(wanted, abs=1e-9)
    alone = hs.load(folder / "whole", device="cpu", dtype="float64")
    with pytest.raises(ConfigError, match=r"no head is masked.*; give --against CKPT"):
        alone.evaluate(texts)
    with alone.masked(GONE):
        assert alone.evaluate(texts, bootstrap=10)["cosine"].value == pytest.approx(wanted["cosine"])
    with pytest.raises(ConfigError, match=r"against is 3.*text"):
        alone.evaluate(texts, against=3)  # type: ignore[arg-type]
