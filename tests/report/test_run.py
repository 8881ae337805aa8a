"""Reading a run back, and `make_run`, which the other report tests import."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headscope.errors import ConfigError, HeadscopeError
from headscope.heads import Site, select_heads
from headscope.report.readers.run import AnalysisRun, MissingTable, RunError, load_run

LABELS = ["nsubj>", "nsubj<", "obj>", "obj<", "amod>", "amod<", "advmod>", "advmod<"]
SIGNATURE = (
    "m:confidence.voita+entropy+positional.v1+syntactic.v1+rare_words.v1+similarity.v1|eos:excl|unit:piece|"
    "rel:nsubj,obj,amod,advmod|data:sha1:6f1ed002ab5595859014ebf0951522d9,n=1000|"
    "ckpt:sha256:9c1f0f5b3cb42a5d7e11c0fe|torch:2.13.0|dtype:float32|device:cpu|seed:1|v:0.1.0"
)


def make_run(
    path: Path,
    layout: dict[str, list[int]],
    *,
    seed: int = 1,
    tables: tuple[str, ...] = ("positional", "syntactic", "similarity"),
    extra: tuple[str, ...] = (),
    name: str = "models/all-MiniLM-L6-v2",
) -> Path:
    """A run directory as `headscope analyze` writes it, with plausible random numbers."""
    random = np.random.default_rng(seed)
    path.mkdir(parents=True)
    heads = pd.DataFrame([_head_row(random, place, extra) for place in _places(layout)])
    heads.to_csv(path / "heads.csv", index=False)
    if "positional" in tables:
        rows = [row for _, head in heads.iterrows() for row in _offset_rows(random, head)]
        pd.DataFrame(rows).to_csv(path / "positional.csv", index=False)
    if "syntactic" in tables:
        rows = [row for _, head in heads.iterrows() for row in _relation_rows(random, head)]
        pd.DataFrame(rows).to_csv(path / "syntactic.csv", index=False)
    if "similarity" in tables:
        np.savez(path / "similarity.npz", **_similarity(random, layout))
    meta = {
        "signature": SIGNATURE,
        "checkpoint": {"path": name, "format": "huggingface", "digest": "9c1f", "model_type": "bert"},
        "data": {"source": "data/test_2016_flickr.en", "target": None, "sentences": 1000},
        "options": {},
        "layout": layout,
        "left_out": [],
        "complete": True,
    }
    (path / "run.json").write_text(json.dumps(meta), encoding="utf-8")
    return path


def _places(layout):
    return [
        (site, layer, head)
        for site, counts in layout.items()
        for layer, count in enumerate(counts)
        for head in range(count)
    ]


def _head_row(random, place, extra):
    site, layer, head = place
    confidence = float(np.clip(random.beta(2, 4), 0.05, 0.95))
    functions = []
    if head % 5 == 1 and layer % 3 != 2:
        functions.append(f"positional:{(-1, 1, -2, -12, 0)[(layer + head) % 5]}")
    if random.random() < 0.25 and layer > 0:
        functions.append(f"syntactic:{LABELS[random.integers(len(LABELS))]}")
    if random.random() < 0.05:
        functions += ["syntactic:compound<", "sink"]
    if layer == 0 and head == 0:
        functions.append("rare")
    if site != "encoder-self" and random.random() < 0.2:
        functions.append(("previous", "duplicate", "induction")[layer % 3])
    row = {"site": site, "layer": layer, "head": head}
    values = {"confidence": confidence, "entropy_share": 1 - confidence * 0.8, "distance": random.gamma(3)}
    values |= {name: float(random.normal()) for name in extra}
    for name, value in values.items():
        row |= {name: value, f"{name}_low": value - 0.01, f"{name}_high": value + 0.01}
    best = [label.partition(":")[2] for label in functions if label.startswith("syntactic")]
    return row | {"syntactic_relation": best[0] if best else "", "functions": ";".join(functions)}


def _offset_rows(random, head):
    modal = [int(f.partition(":")[2]) for f in head["functions"].split(";") if f.startswith("positional")]
    offsets = np.unique(np.clip(np.round(random.normal(0, 6, 40)), -30, 30).astype(int))
    shares = random.dirichlet(np.ones(len(offsets)))
    found = dict(zip(offsets.tolist(), shares.tolist(), strict=True))
    if modal:
        found = {offset: share * 0.05 for offset, share in found.items()}
        found[modal[0]] = found.get(modal[0], 0) + 0.95
    place = {key: head[key] for key in ("site", "layer", "head")}
    return [
        place | {"offset": o, "count": int(s * 1e4), "share": s, "share_low": s, "share_high": s}
        for o, s in sorted(found.items())
    ]


def _relation_rows(random, head):
    rows = []
    for number, label in enumerate(LABELS):
        baseline = 0.2 + 0.05 * number
        accuracy = float(np.clip(baseline + random.normal(-0.1, 0.1), 0, 1))
        if f"syntactic:{label}" in head["functions"]:
            accuracy = min(baseline + 0.25, 1.0)
        rows.append(
            {key: head[key] for key in ("site", "layer", "head")}
            | {"relation": label[:-1], "label": label, "count": 100 + number, "baseline_offset": -1}
            | {"direction": "head-to-dependent" if label.endswith(">") else "dependent-to-head"}
            | {"accuracy": accuracy, "accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.02}
            | {"baseline": baseline, "baseline_low": baseline - 0.02, "baseline_high": baseline + 0.02}
            | {"margin": accuracy - baseline, "margin_low": -1.0, "margin_high": 1.0}
        )
    return rows


def _similarity(random, layout):
    arrays = {}
    for site, counts in layout.items():
        for layer, count in enumerate(counts):
            vectors = random.normal(size=(count, 5)) + 0.4
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            cosine = unit @ unit.T
            found = {"cosine": cosine, "l2": np.sqrt(np.maximum(2 - 2 * cosine, 0)), "cka": cosine**2}
            for name, matrix in found.items():
                for part in ("", "_low", "_high"):
                    arrays[f"{site}/{layer}/{name}{part}"] = matrix
    return arrays


@pytest.fixture
def run(tmp_path: Path) -> AnalysisRun:
    return load_run(make_run(tmp_path / "bert", {"encoder-self": [3, 2, 0], "cross": []}, extra=("lrp",)))


def test_run_says_what_it_was(run: AnalysisRun) -> None:
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


def test_measures_are_the_numbers_without_their_bounds(run: AnalysisRun) -> None:
    assert run.measures == ["confidence", "entropy_share", "distance", "lrp"]
    with pytest.raises(ConfigError, match=r"run bert: unknown measure 'confidance'; did you mean 'confidence'"):
        run.require("confidance")


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    _edit(path, complete=False, data={"source": "a/x.en", "target": "a/x.de", "sentences": 1200})
    assert load_run(path).data == "x.en → x.de, 1,200 sentences, interrupted"


def test_untelling_names_come_with_their_folder(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]}, name="packages/bert-small/model")
    _edit(path, data={"source": None, "parse": "ud/en.conllu.gz"})
    assert load_run(path).model == "bert-small/model (bert)"
    assert load_run(path).data == "en.conllu.gz"


def test_tables_are_read_when_asked_for(run: AnalysisRun) -> None:
    (run.path / "syntactic.csv").unlink()
    assert list(run.table("positional").columns[:5]) == ["site", "layer", "head", "offset", "count"]
    assert run.similarity["encoder-self/0/cosine"].shape == (3, 3)
    with pytest.raises(MissingTable, match=r"run bert has no syntactic.csv; run .* --only syntactic. first"):
        _ = run.table("syntactic")
    (run.path / "similarity.npz").unlink()
    with pytest.raises(MissingTable, match=r"no similarity.npz"):
        _ = load_run(run.path).similarity


def test_an_empty_functions_column_reads_as_text(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    table = pd.read_csv(path / "heads.csv")
    table["functions"] = ""
    table.to_csv(path / "heads.csv", index=False)
    assert load_run(path).heads["functions"].tolist() == ["", ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run r: run.json is no JSON"),
        ("run.json", "[1]", "run.json has no signature and no layout; analyse again"),
        ("run.json", '{"signature": "s", "layout": {"cross": [1.5]}}', "each site a list of head counts"),
        ("heads.csv", "", "run r: heads.csv is malformed .No columns"),
        ("heads.csv", "site,layer\n", "heads.csv is malformed: it has no column head, functions"),
        ("heads.csv", "site,layer,head,functions\na,b,c,d,e,f\n1,2,3,4\n1\n", "heads.csv is malformed"),
        ("heads.csv", "site,layer,head,functions\ncross,x,0,\n", "column layer must hold numbers"),
        ("heads.csv", "site,layer,head,functions\ncross,0,0,\n", "holds cross.0.0, which the layout"),
        ("heads.csv", "site,layer,head,functions\nencoder-self,0,2,\n", "holds encoder-self.0.2, which"),
        ("heads.csv", "site,layer,head,functions\n" + "encoder-self,0,1,\n" * 2, "encoder-self.0.1 twice"),
        ("heads.csv", b"site,layer,head,functions\n\xff\xfe,0,0,\n", "heads.csv is malformed .*utf-8"),
    ],
)
def test_broken_files_end_in_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = make_run(tmp_path / "r", {"encoder-self": [2]})
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match=message) as caught:
        load_run(path)
    assert "\n" not in str(caught.value)


def test_broken_detail_tables(run: AnalysisRun) -> None:
    (run.path / "positional.csv").write_text("site,layer,head,offset,share\nencoder-self,0,9,1,0.5\n")
    with pytest.raises(RunError, match=r"positional.csv of run bert holds encoder-self.0.9"):
        _ = run.table("positional")
    (run.path / "similarity.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(RunError, match=r"run bert: similarity.npz cannot be read"):
        _ = run.similarity


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is no directory; name one"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"it has no run.json; make one with"):
        load_run(tmp_path)
    assert issubclass(MissingTable, RunError)
    assert issubclass(RunError, HeadscopeError)


def _edit(path: Path, **fields: object) -> None:
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    (path / "run.json").write_text(json.dumps(meta | fields), encoding="utf-8")
