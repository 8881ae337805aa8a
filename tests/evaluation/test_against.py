"""`evaluate --against`: a smaller model is compared with the intact one, never with itself."""

from pathlib import Path
from typing import Any

import pytest

from headscope.config.commands import EvaluateConfig
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
