"""`prune sweep`: its numbers against evaluation and slow loops, resuming after a kill, refusals."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from sacrebleu.metrics.bleu import BLEU

from headscope.bootstrap import Bootstrap
from headscope.distributed import Processes
from headscope.errors import ConfigError, HeadscopeError
from headscope.evaluation.before_after import compare
from headscope.evaluation.metrics.base import METRICS, Translations, add_groups, resample
from headscope.formats.base import open_checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import Site
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.sweep import sweep as sweep_module
from headscope.pruning.sweep.cells import Cell, cells_of, read_cells
from headscope.pruning.sweep.methods import run_cell
from headscope.pruning.sweep.sweep import run_sweep
from headscope.results.sweep import Sweep, open_pruned
from headscope.training.from_scratch import config_without
from tests.makers.figures import draw
from tests.makers.shared import write_lines
from tests.makers.sweeps import config, letters, make_words, validate
from tests.oracles import checkpoints, non_inferiority, tiny

pytestmark = pytest.mark.slow

MINUTES = ["minutes"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A native model and texts: it is evaluated on its own translation, but for every fifth line."""
    return make_words(tmp_path_factory.mktemp("words"), checkpoints.small())


def test_sums_of_groups_give_sacrebleus_corpus_score() -> None:
    hypotheses, references = letters(1031, "abcde", 3), letters(1031, "abcde", 4)
    sums = METRICS.get("bleu").sums(Translations(hypotheses, references))[:, 0]
    expected = BLEU().corpus_score(hypotheses, [references]).score
    assert sums.shape == (1024, 10) and expected > 3
    assert METRICS.get("bleu").of(sums.sum(axis=0, keepdims=True))[0] == pytest.approx(expected, abs=1e-10)
    rows = np.arange(2 * 1026.0).reshape(1026, 2)
    assert add_groups(rows)[:2].tolist() == (rows[:2] + rows[1024:]).tolist()


@pytest.mark.parametrize("name", ["bleu", "perplexity", "accuracy"])
def test_comparisons_equal_plain_loops(name: str) -> None:
    rng = np.random.default_rng(2)
    columns = 10 if name == "bleu" else 2
    counts = rng.integers(3, 9, size=(13, columns)).astype(float)
    if name == "bleu":
        counts[:, 4:8] += 9
    first, second = counts, counts + np.eye(columns)[0] * rng.integers(-2, 3, size=(13, 1))
    metric, bootstrap = METRICS.get(name), Bootstrap(seed=4, replicates=53)
    values, second_values = (resample(metric.of, sums, bootstrap) for sums in (first, second))
    result = compare(values, second_values)

    def value(sums: np.ndarray[Any, Any], times: list[int]) -> float:
        total = [sum(times[i] * row[c] for i, row in enumerate(sums)) for c in range(columns)]
        if name == "bleu":
            precision = sum(math.log(total[n] / total[4 + n]) for n in range(4)) / 4
            return 100 * math.exp(precision) * min(1.0, math.exp(1 - total[9] / total[8]))
        return math.exp(total[0] / total[1]) if name == "perplexity" else total[0] / total[1]

    draws = bootstrap.draws(13).int().tolist()
    difference = value(first, [1] * 13) - value(second, [1] * 13)
    differences = [value(first, times) - value(second, times) for times in draws]
    mean = sum(differences) / len(differences)
    extreme = [draw - mean for draw in differences if abs(draw - mean) >= abs(difference)]
    assert min(extreme) < 0 < max(extreme), "both tails count"
    assert result.value == pytest.approx(value(first, [1] * 13)) and result.difference == pytest.approx(difference)
    assert result.p == pytest.approx((1 + len(extreme)) / 54)
    assert result.low == pytest.approx(np.quantile([value(first, times) for times in draws], 0.025))
    assert result.difference_high == pytest.approx(np.quantile(differences, 0.975))
    equal = compare(values, values)
    assert (equal.p, equal.difference, equal.difference_low) == (1.0, 0.0, 0.0)
    index = next(n for n in range(13) if first[n, 0] != second[n, 0])
    one_sentence = compare(*(resample(metric.of, sums[[index]], bootstrap) for sums in (first, second)))
    assert one_sentence.difference and math.isnan(one_sentence.p), "one sentence tells nothing of others"


def test_a_cell_is_what_evaluate_says_of_the_masked_model(words: dict[str, Any], tmp_path: Path) -> None:
    sweep = run_sweep(config(words, tmp_path / "out", methods=("random", "confidence"), keep=(2, 7), seeds=2))
    table = sweep.cells.set_index("cell")
    names = ["unpruned", *(f"random-keep{keep}-seed{seed}" for keep in (2, 7) for seed in (1, 2))]
    assert table.index.tolist() == [*names, "confidence-keep2-seed1", "confidence-keep7-seed1"]
    intact = validate(words, text="tokenised-lowercase")
    assert 20 < intact["bleu"] < 100 and table.loc["unpruned", "value"] == pytest.approx(intact["bleu"], abs=1e-9)
    for name in (names[1], names[4], "confidence-keep7-seed1"):
        survivors = sweep.survivors[sweep.survivors["cell"] == name]
        kept = {f"{row.site}.{row.layer}.{row.head}" for row in survivors.itertuples()}
        all_heads = {f"{row.site}.{row.layer}.{row.head}" for row in sweep.survivors[:16].itertuples()}
        assert len(all_heads) == 16 and len(kept) == table.loc[name, "kept"]
        masked = validate(words, text="tokenised-lowercase", mask=",".join(sorted(all_heads - kept)))
        assert table.loc[name, "value"] == pytest.approx(masked["bleu"], abs=1e-9)
        assert math.exp(float(table["loss"][name])) == pytest.approx(masked["perplexity"], rel=1e-9)
        assert table.loc[name, "difference"] == pytest.approx(masked["bleu"] - intact["bleu"], abs=1e-9)
    sites = table[["kept_encoder-self", "kept_decoder-self", "kept_cross"]]
    assert (sites.sum(axis=1) == table["kept"]).all() and list(sites.loc["unpruned"]) == [5, 5, 6]
    heads = [sweep.survivors[sweep.survivors["cell"] == name].iloc[:, 4:7] for name in names[3:5]]
    assert heads[0].to_numpy().tolist() != heads[1].to_numpy().tolist()


def test_a_cell_is_refitted_as_prune_rank_refits(words: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ("magnitude",), "metric": "perplexity"}
    for tuning, refit in (
        ({}, {"compensate": "least-squares"}),
        ({"tune_updates": 1, "lr": 1e-9}, {"compensate": "least-squares", "sequential": True}),
    ):
        out = tmp_path / f"sweep{len(tuning)}"
        sweep = run_sweep(config(words, out, **options, **tuning, **refit))
        assert "compensate:least-squares" in str(sweep.signature)
        texts = {name: words[name] for name in ("checkpoint", "source", "target")}
        choice = run_ranking(
            RankConfig(**texts, out=tmp_path / f"rank{len(tuning)}", by="magnitude", keep=3, **refit, batch_tokens=61)
        )
        mask = ",".join(map(str, choice.removed))
        model = {**words, "checkpoint": str(choice.folder / "model")}
        row = sweep.cells[sweep.cells.method == "magnitude"].iloc[0]
        assert row["value"] == pytest.approx(validate(model, mask=mask, batch_tokens=61)["perplexity"], rel=1e-5)
        plain = validate(words, mask=mask, batch_tokens=61)["perplexity"]
        assert row["value"] != pytest.approx(plain, rel=1e-4)


def test_a_cell_has_the_heads_that_prune_rank_leaves(words: dict[str, Any], tmp_path: Path) -> None:
    kept = {}
    for allocate in ("global", "per-layer", "measured"):
        options: dict[str, Any] = {"allocate": allocate, "batch_tokens": 241}
        out = tmp_path / allocate
        sweep = run_sweep(config(words, out, methods=("entropy",), keep=(5,), metric="perplexity", **options))
        assert (f"allocate:{allocate}" in str(sweep.signature)) == (allocate != "global")
        kept[allocate] = set(read_cells(out)["entropy-keep5-seed1"]["kept"])
    for allocate in ("per-layer", "measured"):
        texts = {name: words[name] for name in ("checkpoint", "source", "target")}
        options = {"allocate": allocate, "batch_tokens": 241}
        choice = run_ranking(RankConfig(**texts, out=tmp_path / f"rank {allocate}", by="entropy", keep=5, **options))
        ranking = choice.tables["ranking"]
        expected = {f"{row.site}.{row.layer}.{row.head}" for row in ranking[ranking.kept == 1].itertuples()}
        assert kept[allocate] == expected != kept["global"]


def test_learnt_cells_have_their_heads_and_keep_their_trajectories(words: dict[str, Any], tmp_path: Path) -> None:
    methods = {"methods": ("l0", "subset"), "keep": (7,), "sites": ("decoder-self", "cross")}
    sweep = run_sweep(config(words, tmp_path / "out", **methods, keep_models=True))
    cells = sweep.cells[sweep.cells["method"] != "unpruned"]
    assert cells["kept"].tolist() == [7, 7] and set(cells["of"]) == {11} and "kept_encoder-self" not in cells
    assert cells["lambda"].notna().tolist() == [True, False]
    row: Any = sweep.cells.set_index("cell").loc["subset-keep7-seed1"]
    run = tmp_path / "out" / "runs" / "subset-keep7-seed1"
    scores = validate(words | {"checkpoint": str(tmp_path / "out" / row["model"])}, text="tokenised-lowercase")
    assert row["value"] == pytest.approx(scores["bleu"], abs=1e-9)
    assert math.exp(row["loss"]) == pytest.approx(scores["perplexity"], rel=1e-6)
    assert (run / "gates.csv").is_file()
    by_lambda = run_sweep(config(words, tmp_path / "priced", methods=("l0",), keep=(), lambdas=(0.0, 0.3)))
    assert by_lambda.cells["size"].tolist() == ["", "lambda 0", "lambda 0.3"]
    assert not (tmp_path / "priced" / "runs" / "l0-lambda0-seed1" / "model").exists()


def test_the_control_is_trained_with_as_many_heads(words: dict[str, Any], tmp_path: Path) -> None:
    """It starts as its recipe says (fairseq draws biases); another seed is another model."""
    plain = ["updates = 2", "max-tokens = 61", "warmup = 1", "average = 0"]
    recipe = write_lines(tmp_path / "recipe.toml", [*plain, "initial = 'fairseq'"])
    options = dict(methods=("subset",), keep=(5,), from_scratch=True, recipe=recipe, keep_models=True, beam=1)
    sweep = run_sweep(config(words, tmp_path / "out", **options, seeds=2))
    assert sweep.cells["control"].tolist() == ["", "", "", "from scratch", "from scratch"]
    kept = [column for column in sweep.cells.columns if column.startswith("kept")]
    assert sweep.cells[kept].iloc[1].tolist() == sweep.cells[kept].iloc[3].tolist()
    folder = tmp_path / "out" / "runs" / "subset-keep5-seed1"
    control = open_checkpoint(str(folder / "scratch" / "last"), dtype="float32")
    survivors = sweep.survivors[sweep.survivors["cell"] == "subset-keep5-seed1"]
    by_layer: Any = survivors.groupby(["site", "layer"])
    counts = {(Site(site), int(layer)): len(rows) for (site, layer), rows in by_layer}
    assert {site_layer: count for site_layer, count in control.layout.items() if count} == counts
    scores = validate(words | {"checkpoint": str(folder / "scratch" / "last")}, text="tokenised-lowercase")
    assert math.exp(sweep.cells["loss"].iloc[3]) == pytest.approx(scores["perplexity"], rel=1e-6)
    assert set(sweep.survivors["cell"]) == {"unpruned", "subset-keep5-seed1", "subset-keep5-seed2"}
    fresh, other = (
        open_checkpoint(str(folder.with_name(f"subset-keep5-seed{seed}") / "fresh"), dtype="float32") for seed in (1, 2)
    )
    embeddings = [checkpoint.model.state_dict()["encoder.embeddings.tokens.weight"] for checkpoint in (fresh, other)]
    assert not torch.equal(*embeddings)
    linear = [part for name, part in fresh.model.named_modules() if "ffn" in name and isinstance(part, torch.nn.Linear)]
    assert linear and all(bool(part.bias.any()) for part in linear)
    intact = checkpoints.small()
    assert config_without(intact.model, []) == intact.model.config
    write_lines(tmp_path / "wrong.toml", ["max-updats = 3"])
    with pytest.raises(ConfigError, match=r"--recipe.*'max_updats'.*'updates'"):
        run_sweep(config(words, tmp_path / "x", **options | {"recipe": tmp_path / "wrong.toml"}))
    with pytest.raises(ConfigError, match="headscope train"):
        run_sweep(config(words, tmp_path / "x", **options | {"recipe": None}))
    longer = write_lines(tmp_path / "longer.toml", ["updates = 5", "max-tokens = 61", "warmup = 1", "average = 0"])
    with pytest.raises(ConfigError, match="recipe"):
        run_sweep(config(words, tmp_path / "out", **options | {"recipe": longer, "seeds": 3}))


def test_functions_of_survivors_are_counted(words: dict[str, Any], tmp_path: Path) -> None:
    layout = open_checkpoint(words["checkpoint"]).layout
    labels = ["positional:-1;rare", "", "syntactic:nsubj>"]
    heads = [(site.value, layer, head) for (site, layer), count in layout.items() for head in range(count)]
    table = pd.DataFrame(heads, columns=["site", "layer", "head"]).assign(
        functions=[labels[head] for *_, head in heads]
    )
    (tmp_path / "run").mkdir()
    table.to_csv(tmp_path / "run" / "heads.csv", index=False)
    sweep = run_sweep(config(words, tmp_path / "out", keep=(5,), functions=tmp_path / "run"))
    counts = sweep.cells.set_index("cell")
    first, second, third = (sum(head == number for *_, head in heads) for number in range(3))
    names = ["functions_positional", "functions_rare", "functions_none", "functions_syntactic"]
    assert list(counts.loc["unpruned", names]) == [first, first, second, third]
    survivors = sweep.survivors[sweep.survivors["cell"] == "random-keep5-seed1"]
    assert counts.loc["random-keep5-seed1", "functions_rare"] == sum("rare" in text for text in survivors["functions"])
    table.assign(functions="").to_csv(tmp_path / "run" / "heads.csv", index=False)  # no head has one: a column of NaN
    run_sweep(config(words, tmp_path / "none", keep=(5,), functions=tmp_path / "run"))


@pytest.fixture
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts on the 12 or 17 sentences of these tests, which establish nothing otherwise."""
    monkeypatch.setattr("headscope.evaluation.non_inferiority.FEWEST", 12)


@pytest.mark.usefixtures("few_are_enough")
def test_verdicts_of_a_sweep_put_sentences_and_seeds_together(words: dict[str, Any], tmp_path: Path) -> None:
    """Each row of verdicts equals the oracle's on the mean over seeds; two methods share 5 %, largest size first."""
    options = {"methods": ("random", "confidence"), "keep": (3, 15), "seeds": 2, "bootstrap": 60}
    sweeps = {
        margin: run_sweep(config(words, tmp_path / "out", **options, margin=margin)) for margin in (None, "3", "1000")
    }
    table, rows = sweeps["3"].cells, sweeps["3"].verdicts
    cells = {name: read_cells(tmp_path / "out")[name]["sums"] for name in table["cell"]}

    def bleu(sums: list[list[float]]) -> float:
        total = [int(sum(column)) for column in zip(*sums, strict=True)]
        return float(BLEU.compute_bleu(total[:4], total[4:8], total[8], total[9]).score)

    def lose_all(line: Sequence[float]) -> list[float]:
        return [*4 * [0.0], *line[4:]]

    for _, row in rows.iterrows():
        method, kept = row["method"], row["kept"]
        names = table[(table["method"] == method) & (table["kept"] == kept)]["cell"]
        pairs = [(cells["unpruned"], cells[name]) for name in names]
        expected = non_inferiority.judge(bleu, pairs, margin=3.0, ruin=lose_all, level=0.975, fewest=12)
        larger = rows[(rows["method"] == method) & (rows["kept"] > kept)]["verdict"]
        if expected["verdict"] != "worse" and set(larger) - {"non-inferior"}:
            expected["verdict"] = "not tested"
        assert len(names) == (2 if method == "random" else 1)
        baseline = table["value"].iloc[0]  # no more can be lost
        expected["worse_limit"] = min(expected["worse_limit"], baseline)
        expected["detectable"] = expected["detectable"] if expected["detectable"] <= baseline else math.nan
        for column, value in expected.items():
            target = value if column == "verdict" else pytest.approx(value, rel=1e-4, abs=1e-8, nan_ok=True)
            assert row[column] == target, column
        cell = table.set_index("cell").loc[names.iloc[0]]
        assert cell["worse"] == pytest.approx(-cell["difference"]) and cell["worse_limit"] >= cell["worse"]
    assert table["verdict"].iloc[0] == "" and math.isnan(table["worse"].iloc[0])
    assert set(sweeps["1000"].verdicts["verdict"]) == {"non-inferior"}
    assert sweeps[None].verdicts["margin"].tolist() == pytest.approx([table["value"].iloc[0] / 100] * 4)
    assert "non-inferior" not in set(sweeps[None].verdicts["verdict"])
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (
        record["verdicts"][0]["verdict"] == "non-inferior"
        and record["conclusions"] == sweeps["1000"].record["conclusions"]
    )
    (pruned,) = open_pruned([tmp_path / "out"])
    notes = [line.split(";")[0] for line in pruned.record["conclusions"]]
    assert notes[:2] == [f"{method}: 13 of 16 heads can go within 1e+03 BLEU" for method in ("random", "confidence")]
    headline, *details = pruned.answers()
    assert headline.sentence == "out: random: 13 of 16 heads can go within 1e+03 BLEU" and details[0].detail
    figure = draw("pruning", pruned)
    assert any("13 of 16 heads can go" in text.get_text() for text in figure.findobj(Text))


def test_a_text_that_is_too_small_establishes_nothing_and_says_so(tmp_path: Path) -> None:
    """Also where no translation changes, as without a head that adds nothing."""
    checkpoint = checkpoints.small()
    output = checkpoint.projections[Site.CROSS, 0].output
    assert output is not None
    with torch.no_grad():
        output.weight[:, output.units[0]] = 0
    sweep = run_sweep(config(make_words(tmp_path, checkpoint), tmp_path / "out", methods=("magnitude",), keep=(1, 15)))
    assert set(sweep.verdicts["verdict"]) <= {"worse", "not established"}
    row = sweep.verdicts.set_index("kept").loc[15]
    assert row["verdict"] == "not established" and row["worse"] == 0
    largest = METRICS.get("bleu").largest_loss(np.array(read_cells(tmp_path / "out")["unpruned"]["sums"]))
    assert row["worse_limit"] == pytest.approx((1 - 0.05 ** (1 / 17)) * largest)
    line = sweep.record["conclusions"][0]
    assert line.startswith("magnitude: not established that heads can go within ")
    assert " BLEU; with 15 kept worse by 0, at most " in line
    assert line.endswith(f"this test set could have seen a loss of {row['detectable']:.3g} at least")
    power_note = "smallest loss that this test set could have seen (power 80 %): "
    assert sweep.record["conclusions"][-1].startswith(power_note)
    verdict_note = "out: no size is shown to be as good as the unpruned model; "
    assert sweep.answers()[0].sentence.startswith(verdict_note + power_note)


@pytest.mark.usefixtures("few_are_enough")
def test_distances_to_the_intact_model_need_a_margin_of_their_own(tmp_path: Path) -> None:
    """Their baseline is 0, so a percentage of it is no margin."""
    checkpoints.save_model(tmp_path / "bert", "bert-without-head")
    text = write_lines(
        tmp_path / "text", [" ".join(random.Random(n).choices(tiny.WORDS, k=2 + n % 5)) for n in range(12)]
    )
    words = {"checkpoint": str(tmp_path / "bert"), "source": text, "valid_source": text, "metric": "l2"}
    sweep = run_sweep(config(words, tmp_path / "out"))
    assert sweep.verdicts["verdict"].tolist() == [""]
    assert any(
        "distance to the intact model is 0, of which 1 % is nothing" in remark for remark in sweep.record["remarks"]
    )
    with pytest.raises(ConfigError, match=r"^--margin 2%.*--margin"):
        run_sweep(config(words, tmp_path / "out", margin="2%"))
    verdicts = {
        margin: run_sweep(config(words, tmp_path / "out", margin=margin)).verdicts for margin in ("9", "0.0001")
    }
    assert verdicts["9"]["verdict"].tolist() == ["non-inferior"]
    assert verdicts["0.0001"]["verdict"].tolist() != ["non-inferior"] and verdicts["9"]["worse"].iloc[0] > 0


def record_cells(monkeypatch: pytest.MonkeyPatch, *, stop_after: int = 99) -> list[str]:
    """A list that receives the names of finished cells; Ctrl-C after `stop_after` of them."""
    names: list[str] = []

    def record_cell(context: Any, cell: Cell) -> Any:
        if len(names) == stop_after:
            raise KeyboardInterrupt
        result = run_cell(context, cell)
        names.append(cell.name)
        return result

    monkeypatch.setattr(sweep_module, "run_cell", record_cell)
    return names


def without_minutes(sweep: Sweep) -> pd.DataFrame:
    return sweep.cells.drop(columns=MINUTES)


def test_only_what_is_missing_is_done(words: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"methods": ("subset", "random"), "keep": (3,), "seeds": 2}
    with monkeypatch.context() as patch:
        assert len(record_cells(patch, stop_after=3)) == 0
        with pytest.raises(KeyboardInterrupt):
            run_sweep(config(words, tmp_path / "out", **options))
    assert pd.read_csv(tmp_path / "out" / "sweep.csv")["cell"].tolist() == [
        "unpruned", "subset-keep3-seed1", "subset-keep3-seed2",
    ]  # fmt: skip
    names = record_cells(monkeypatch)
    complete = run_sweep(config(words, tmp_path / "out", **options))
    assert names == ["random-keep3-seed1", "random-keep3-seed2"]
    assert len(set(complete.cells["loss"])) == 5, "another seed is another subset, learnt or drawn"
    clean = run_sweep(config(words, tmp_path / "clean", **options))
    pd.testing.assert_frame_equal(without_minutes(complete), without_minutes(clean), rtol=1e-12)
    names.clear()
    (tmp_path / "out" / "cells" / ".half.json").write_text("{")
    run_sweep(config(words, tmp_path / "out", **options))
    assert names == []
    larger = run_sweep(config(words, tmp_path / "out", **options | {"keep": (3, 5), "seeds": 1}))
    assert names == ["subset-keep5-seed1", "random-keep5-seed1"] and len(larger.cells) == 7


def test_other_options_texts_and_checkpoints_are_refused(words: dict[str, Any], tmp_path: Path) -> None:
    run_sweep(config(words, tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"--score-sentences 500.*4.*--out.*--force"):
        run_sweep(config(words, tmp_path / "out", score_sentences=4))
    other = words | {"valid_source": words["source"], "valid_target": words["target"]}
    with pytest.raises(ConfigError, match="validation text"):
        run_sweep(config(other, tmp_path / "out"))
    NATIVE.save(checkpoints.small(1), tmp_path / "model")
    with pytest.raises(ConfigError, match="checkpoint"):
        run_sweep(config(words | {"checkpoint": str(tmp_path / "model")}, tmp_path / "out"))
    (tmp_path / "out" / "mine.txt").write_text("stays")
    with pytest.raises(HeadscopeError, match=r"mine\.txt.*headscope prune sweep"):
        run_sweep(config(words, tmp_path / "out", score_sentences=4, keep=(5,), force=True))
    (tmp_path / "out" / "mine.txt").unlink()
    sweep = run_sweep(config(words, tmp_path / "out", score_sentences=4, keep=(5,), force=True))
    assert sweep.cells["kept"].tolist() == [16, 5] and sweep.folder == tmp_path / "out"
    assert not (tmp_path / "out.new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(HeadscopeError, match=r"\bx\b"):
        run_sweep(config(words, tmp_path / "full"))


def test_torchruns_processes_share_cells_and_a_control_stays_with_its_cell() -> None:
    plain = [Cell("unpruned"), *(Cell("l0", keep=keep, seed=seed) for keep in (2, 4) for seed in (1, 2))]
    cells = [*plain, *(Cell(pruned.method, pruned.keep, None, pruned.seed, control=True) for pruned in plain[1:])]
    shares = []
    for rank in range(3):
        share = Processes(rank, 3).share([cell.folder for cell in cells])
        shares.append([cell for cell in cells if cell.folder in share])
    assert sorted(cell.name for share in shares for cell in share) == sorted(cell.name for cell in cells)
    for rank_cells in shares:
        for cell in rank_cells:
            assert not cell.control or any(other.name == cell.folder for other in rank_cells)


@pytest.mark.parametrize(("options", "seeds"), [({}, 1), ({"tune_updates": 2}, 2)])
def test_rankings_have_all_seeds_where_they_are_trained(options: dict[str, Any], seeds: int, tmp_path: Path) -> None:
    words = {"checkpoint": "model", "source": tmp_path / "a", "valid_source": tmp_path / "a"}
    config_of_two = config(words, tmp_path / "out", methods=("magnitude", "random"), seeds=2, **options)
    cells = cells_of(config_of_two, GateLayout(checkpoints.small().attention_sites), lambda name: name == "random")
    assert [cell.method for cell in cells] == ["unpruned", *seeds * ["magnitude"], "random", "random"]


def test_rankings_that_are_drawn_have_all_seeds(words: dict[str, Any], tmp_path: Path) -> None:
    """Scores may draw in their analysis, its random tokens, or the tokens hidden by the objective."""
    methods: dict[str, Any] = {"methods": ("shapley", "gradient"), "keep": (2,), "seeds": 2, "metric": "perplexity"}
    plain = run_sweep(config(words, tmp_path / "plain", score_sentences=1, sites=("cross",), **methods))
    assert plain.cells["cell"].tolist()[1:] == ["shapley-keep2-seed1", "shapley-keep2-seed2", "gradient-keep2-seed1"]
    checkpoints.save_model(tmp_path / "bert", "bert")
    text = write_lines(tmp_path / "text", [" ".join(random.Random(n).choices(tiny.WORDS, k=9)) for n in range(5)])
    hidden = {"checkpoint": str(tmp_path / "bert"), "source": text, "valid_source": text}
    sweep = run_sweep(config(hidden, tmp_path / "out", **methods | {"methods": ("gradient", "magnitude")}))
    assert sweep.cells["cell"].tolist()[1:] == ["gradient-keep2-seed1", "gradient-keep2-seed2", "magnitude-keep2-seed1"]
    scores = [pd.read_csv(tmp_path / "out" / "scores" / f"gradient-seed{seed}.csv")["score"] for seed in (1, 2)]
    assert not scores[0].equals(scores[1])
