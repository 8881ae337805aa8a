"""Files of a sweep: models that compute what the table says, and damaged files that are noticed."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Text

from headscope.config.analyze import AnalyzeConfig
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError, HeadscopeError
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.huggingface.shrink import zeroed_model
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from headscope.pruning.sweep.cells import labeller
from headscope.pruning.sweep.sweep import run_sweep
from headscope.results.sweep import Sweep, open_pruned
from tests.makers.figures import draw
from tests.makers.shared import write_lines
from tests.makers.sweeps import config, make_words, validate
from tests.oracles import checkpoints, fairseq, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_words(tmp_path_factory.mktemp("words"), checkpoints.small())


def kept_rows(sweep: Sweep, words: dict[str, Any], **options: Any) -> list[Any]:
    """The rows of pruned models, each checked against `evaluate` of its kept model."""
    table: list[Any] = list(sweep.cells.itertuples())
    rows = [row for row in table if row.method != "unpruned"]
    for row in rows:
        scores = validate({**words, "checkpoint": str(sweep.folder / row.model)}, **options)
        assert scores[row.metric] == pytest.approx(row.value, rel=1e-5), row.cell
        assert math.exp(row.loss) == pytest.approx(scores["perplexity"], rel=1e-5), row.cell
    return rows


@pytest.mark.parametrize(
    "options",
    [
        {"methods": ("l0", "subset", "magnitude"), "keep": (5,), "compensate": "least-squares"},
        {"methods": ("magnitude",), "keep": (3, 16), "tune_updates": 2},
        {"methods": ("magnitude",), "compensate": "mean", "tune_updates": 1},
    ],
)
def test_kept_models_compute_what_the_table_says(
    words: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    sweep = run_sweep(config(words, tmp_path / "out", keep_models=True, **options))
    rows = kept_rows(sweep, words, text="tokenised-lowercase")
    assert [row.model for row in rows] == [f"runs/{row.cell}/model" for row in rows]
    assert not any("no model" in remark for remark in sweep.record["remarks"])
    intact = validate(words, text="tokenised-lowercase")["perplexity"]
    assert all(math.exp(row.loss) != pytest.approx(intact, rel=1e-3) for row in rows if row.kept < 16)
    for row in (row for row in rows if row.kept < 16):
        survivors = sweep.survivors[sweep.survivors["cell"] == row.cell]
        expected = {(entry.site, entry.layer, entry.head) for entry in survivors.itertuples()}
        kept = json.loads((tmp_path / "out" / row.model / "pruning.json").read_text())["kept"]
        heads = {(site, int(layer), head) for site in kept for layer in kept[site] for head in kept[site][layer]}
        assert heads == expected and len(expected) == row.kept
        layout = open_checkpoint(str(tmp_path / "out" / row.model)).layout
        counts = Counter((site, layer) for site, layer, _ in expected)
        assert {(site.value, layer): count for (site, layer), count in layout.items() if count} == counts


def test_controls_are_kept_as_they_were_measured_and_done_again_with_a_cell(
    words: dict[str, Any], tmp_path: Path
) -> None:
    recipe = write_lines(tmp_path / "recipe.toml", ["updates = 3", "max-tokens = 61", "warmup = 1", "average = 2"])
    sweep_config = config(words, tmp_path / "out", methods=("l0",), from_scratch=True, recipe=recipe, keep_models=True)
    first = run_sweep(sweep_config)
    rows = kept_rows(first, words, text="tokenised-lowercase")
    assert [row.control for row in rows] == ["", "from scratch"] and "/scratch/" in rows[1].model
    (tmp_path / "out" / "cells" / "l0-keep3-seed1.json").unlink()
    repeat = run_sweep(sweep_config)
    pd.testing.assert_frame_equal(repeat.cells.drop(columns="minutes"), first.cells.drop(columns="minutes"), rtol=1e-6)
    (tmp_path / "out" / "sweep.json").write_text("{")
    with pytest.raises(HeadscopeError, match=r"--out.*--force"):
        run_sweep(sweep_config)


@pytest.mark.parametrize(("kind", "method"), [("narrowed", "magnitude"), ("closed", "subset"), ("fairseq", "subset")])
def test_every_format_keeps_its_models(tmp_path: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`narrowed` has lost heads before; `closed` is a class without narrowing, where heads are masked."""
    text = write_lines(
        tmp_path / "text", [" ".join(random.Random(n).choices(tiny.WORDS, k=2 + n % 5)) for n in range(7)]
    )
    words: dict[str, Any] = {"source": text, "valid_source": text}
    if kind == "closed":
        monkeypatch.setattr(HuggingFaceCheckpoint, "alterations", {"zero": zeroed_model})
    if kind in ("narrowed", "closed"):
        checkpoints.save_model(tmp_path / "whole", "gpt2")
        words["checkpoint"] = str(tmp_path / "whole")
        if kind == "narrowed":
            removal = {"checkpoint": words["checkpoint"], "heads": "decoder-self.0.1", "rounds": 0}
            words["checkpoint"] = str(run_removal(RemoveConfig(out=tmp_path / "small", **removal)).path)
    else:
        options = fairseq.BASE | {"share_decoder_input_output_embed": True}
        weights = fairseq.state(options, alphas=("encoder.0.self_attn",))
        words["checkpoint"] = str(fairseq.write(tmp_path / "in" / "best.pt", options, weights))
        fairseq.dictionaries(tmp_path / "in")
        words |= {"target": text, "valid_target": text}
    options = {"methods": (method,), "keep": (2,), "metric": "perplexity"}
    options |= {} if method == "magnitude" else {"updates": 1}
    sweep = run_sweep(config(words, tmp_path / "out", keep_models=True, **options))
    models = [open_checkpoint(str(tmp_path / "out" / row.model)) for row in kept_rows(sweep, words)]
    layout = open_checkpoint(words["checkpoint"]).layout
    assert all((model.layout == layout) == (kind == "closed") for model in models) and len(models) == 1


# Functions of the heads that a sweep leaves: in the whole model, and in each pruned model itself.


def run_analyze(words: dict[str, Any], out: Path, checkpoint: str, **options: Any) -> Path:
    """A run that labels by the estimate alone, so that a head's label does not depend on the other heads."""
    texts: dict[str, Any] = {"source": words["valid_source"], "target": words["valid_target"]}
    options |= {"only": ("positional",), "analysis_options": {"label_rule": "published"}, "figures": False}
    return run_analysis(AnalyzeConfig(checkpoint=checkpoint, out=out, **texts, **options)).path


def head_names(table: pd.DataFrame) -> list[str]:
    return [f"{row.site}.{row.layer}.{row.head}" for row in table.itertuples()]


def read_labels(run: Path) -> dict[str, str]:
    """Of the heads that have some, in self attention."""
    heads = pd.read_csv(run / "heads.csv").fillna({"functions": ""})
    return {head: text for head, text in zip(head_names(heads), heads["functions"], strict=True) if text}


def cell_labels(survivors: pd.DataFrame, cell: str) -> dict[str, str]:
    rows = survivors[survivors["cell"] == cell]
    return {head: text for head, text in zip(head_names(rows), rows["relabelled"], strict=True) if text}


def test_a_sweep_labels_pruned_models_as_analyze_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.analyses.positional.THRESHOLD", 0.4)
    words = make_words(tmp_path, checkpoints.small())
    run = run_analyze(words, tmp_path / "whole", words["checkpoint"])
    options = {"methods": ("l0", "random"), "keep": (9,), "functions": run, "relabel": True, "keep_models": True}
    sweep = run_sweep(config(words, tmp_path / "out", **options))
    intact = read_labels(run)
    assert cell_labels(sweep.survivors, "unpruned") == intact and any(intact.values())
    for row in sweep.cells[1:].itertuples():
        path = run_analyze(words, tmp_path / str(row.cell), str(tmp_path / "out" / str(row.model)))
        assert sorted(cell_labels(sweep.survivors, str(row.cell)).values()) == sorted(read_labels(path).values())
        rows = sweep.survivors[sweep.survivors["cell"] == row.cell]
        assert rows["functions"].tolist() == [intact.get(head, "") for head in head_names(rows)]
    assert (sweep.survivors["relabelled"] != sweep.survivors["functions"]).any()
    (pruned,) = open_pruned([tmp_path / "out"])
    texts = [text.get_text() for text in draw("pruning", pruned, figure="functions").findobj(Text)]
    assert {"l0, before", "l0, after", "random, before", "random, after"} <= set(texts)
    with pytest.raises(ConfigError, match=r"--relabel True.*False"):
        run_sweep(config(words, tmp_path / "out", **{**options, "relabel": False}))
    words["valid_source"].write_text("a b\n" * 17, encoding="utf-8")
    with pytest.raises(ConfigError, match="whole"):
        run_sweep(config(words, tmp_path / "other", **options))


@pytest.mark.parametrize(
    ("kind", "share", "options"),
    [
        ("native", 0.3, {"mask": "encoder-self.0.*,cross.0.*"}),
        ("gpt2", 0.1, {"template": "{source} = {target}", "examples": 1}),
    ],
)
def test_heads_are_labelled_again_with_the_mask_and_the_template_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("headscope.analyses.positional.THRESHOLD", share)
    words = make_words(tmp_path, checkpoints.small())
    path = str(checkpoints.save_model(tmp_path / kind, kind)) if kind == "gpt2" else words["checkpoint"]
    run, checkpoint = run_analyze(words, tmp_path / "run", path, **options), open_checkpoint(path)
    assert labeller(run, checkpoint)(checkpoint, []) == read_labels(run) != {}
