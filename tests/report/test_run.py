"""Reading a run back."""

import json
from pathlib import Path

import pytest

from headscope.errors import ConfigError
from headscope.heads import Site, select_heads
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable
from tests.makers.runs import SIGNATURE, make_run


@pytest.fixture
def run(tmp_path: Path) -> Study:
    return Study.open(make_run(tmp_path / "bert", {"encoder-self": [3, 2, 0], "cross": []}, extra=("lrp",)))


def test_run_says_what_it_was(run: Study) -> None:
    assert run.name == "bert"
    assert run.model == "all-MiniLM-L6-v2 (bert)"
    assert run.data == "test_2016_flickr.en, 1,000 sentences"
    pairs = {"source": "a.en", "source2": "b.en", "sentences": 40}
    assert Study({}, {"data": pairs}).data == "a.en and b.en, 40 pairs"
    assert run.signature == SIGNATURE
    assert run.layout == {"encoder-self": [3, 2, 0]}  # a site without layers is left out
    assert [str(head) for head in select_heads("encoder-self.1.*", run.head_layout)] == [
        "encoder-self.1.0",
        "encoder-self.1.1",
    ]
    assert run.head_layout[Site.ENCODER_SELF, 2] == 0


def test_measures_are_the_numbers_without_their_bounds(run: Study) -> None:
    assert run.measures == ["confidence", "sharpness", "entropy_share", "distance", "lrp"]
    with pytest.raises(ConfigError, match=r"bert.*'confidance'.*'confidence'"):
        run.require("confidance")


def test_tables_are_read_when_asked_for(run: Study) -> None:
    (run.path / "syntactic.csv").unlink()
    assert list(run.table("positional").columns[:5]) == ["site", "layer", "head", "offset", "count"]
    assert run.similarity["encoder-self/0/cosine"].shape == (3, 3)
    with pytest.raises(MissingTable, match=r"bert.*syntactic\.csv.*--also syntactic"):
        _ = Study.open(run.path).table("syntactic")
    _edit(run.path, left_out=[{"analysis": "syntactic", "why": "needs --parse"}], remarks=["alignment: 6 are few"])
    for name, why in (("syntactic", "needs --parse"), ("alignment", "6 are few")):  # what was said then
        with pytest.raises(MissingTable, match=rf"{name}\.csv \({name}: {why}\)$"):
            _ = Study.open(run.path).table(name)
    (run.path / "similarity.npz").unlink()
    with pytest.raises(MissingTable, match=r"similarity\.npz"):
        _ = Study.open(run.path).similarity


def _edit(path: Path, **fields: object) -> None:
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    (path / "run.json").write_text(json.dumps(meta | fields), encoding="utf-8")
