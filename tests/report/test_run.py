"""Reading a run back."""

import json
from pathlib import Path

import pandas as pd
import pytest

from headscope.errors import ConfigError, HeadscopeError
from headscope.heads import Site, select_heads
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable, RunError
from tests.makers.runs import SIGNATURE, make_run


@pytest.fixture
def run(tmp_path: Path) -> Study:
    return Study.open(make_run(tmp_path / "bert", {"encoder-self": [3, 2, 0], "cross": []}, extra=("lrp",)))


def test_run_says_what_it_was(run: Study) -> None:
    assert run.name == "bert"
    assert run.model == "all-MiniLM-L6-v2 (bert)"
    assert run.data == "test_2016_flickr.en, 1,000 sentences"
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


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    _edit(path, complete=False, data={"source": "a/x.en", "target": "a/x.de", "sentences": 1200})
    assert Study.open(path).data == "x.en → x.de, 1,200 sentences, interrupted"


def test_untelling_names_come_with_their_folder(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]}, name="packages/bert-small/model")
    _edit(path, data={"source": None, "parse": "ud/en.conllu.gz"})
    assert Study.open(path).model == "bert-small/model (bert)"
    assert Study.open(path).data == "en.conllu.gz"


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


def test_an_empty_functions_column_reads_as_text(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    table = pd.read_csv(path / "heads.csv")
    table["functions"] = ""
    table.to_csv(path / "heads.csv", index=False)
    assert Study.open(path).heads["functions"].tolist() == ["", ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run r: run.json"),
        ("run.json", "[1]", "run.json.*signature.*layout"),
        ("heads.csv", "", "run r: heads.csv"),
        ("heads.csv", "site,layer\n", "heads.csv.*head, functions"),
        ("heads.csv", "site,layer,head,functions\na,b,c,d,e,f\n1,2,3,4\n1\n", "heads.csv"),
        ("heads.csv", "site,layer,head,functions\ncross,x,0,\n", "layer"),
        ("heads.csv", b"site,layer,head,functions\n\xff\xfe,0,0,\n", "heads.csv.*utf-8"),
    ],
)
def test_broken_files_end_in_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match=message) as caught:
        Study.open(path)
    assert "\n" not in str(caught.value)


def test_broken_detail_tables(run: Study) -> None:
    (run.path / "positional.csv").write_text("site,layer,offset,share\nencoder-self,0,1,0.5\n")
    with pytest.raises(RunError, match=r"positional\.csv.*bert.*no column head"):
        _ = run.table("positional", "head")
    (run.path / "similarity.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(RunError, match=r"bert.*similarity\.npz"):
        _ = run.similarity


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="directory"):
        Study.open(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"run\.json"):
        Study.open(tmp_path)
    assert issubclass(MissingTable, RunError)
    assert issubclass(RunError, HeadscopeError)


def _edit(path: Path, **fields: object) -> None:
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    (path / "run.json").write_text(json.dumps(meta | fields), encoding="utf-8")
