"""The study of variants: its plan before its runs, its verdicts, and its committed page made again from its tables."""

import csv
import dataclasses
import importlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from headscope.heads import HeadId, Site
from headscope.training.config import TrainConfig
from headscope.training.swaps import read_schedule
from headscope.training.variant import VARIANTS
from tests.makers.modules import ROOT

RESULTS = ROOT / "benchmarks" / "variants"
FLAGS = {"mae-uniform": " --uniform", "mae-nobcd": " --no-bcd", "baseline-0.2": " --dropout 0.2"}
FLAGS["swap-soft"] = " --dynamic soft"
FLAGS["mae-uniform-0.2"] = FLAGS["mae-uniform"] + FLAGS["baseline-0.2"]


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"variants.{name}")


def runs(arm: str, values: dict[int, float], column: str = "valid_nll", **more: Any) -> list[dict[str, Any]]:
    return [{"arm": arm, "seed": seed, column: value, **more} for seed, value in values.items()]


def test_a_difference_has_the_interval_and_p_value_of_students_t() -> None:
    difference = part("verdicts").Difference.of([0.9, 1.0, 1.1])
    assert difference.mean == pytest.approx(1.0)
    assert difference.reach == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    t = 1.0 / (0.1 / 3**0.5)
    assert difference.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6), "exact for two degrees of freedom"
    assert part("verdicts").Difference.of([0.5]) is None
    assert part("verdicts").Difference.of([0.0, 0.0]).p == 1.0


def test_p_values_are_adjusted_as_holm_did() -> None:
    adjusted = part("verdicts").holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert part("verdicts").holm([0.9, 0.8]) == [1.0, 1.0]


def test_each_of_the_four_words() -> None:
    design, verdicts = part("design"), part("verdicts")
    names = ("better", "worse", "same", "lost", "idle")
    claims = [design.Claim(name, "loss", "valid_nll", name, "base", -1, -0.1, "") for name in names]
    rows = runs("base", {1: 2.0, 2: 2.1, 3: 1.9})
    rows += runs("better", {1: 1.900, 2: 2.001, 3: 1.799})
    rows += runs("worse", {1: 2.100, 2: 2.199, 3: 2.001})
    rows += runs("same", {1: 2.01, 2: 2.08, 3: 1.91})
    rows += runs("lost", {1: 1.5})
    rows += runs("idle", {1: 1.5, 2: 1.6, 3: 1.4})
    judged = verdicts.verdicts(claims, rows, {"idle": "gates"})
    assert [verdict.word for verdict in judged] == ["reproduced", "contradicted", "undecided", "untested", "untested"]
    assert judged[0].p_adjusted == pytest.approx(3 * judged[0].difference.p), "three claims were tested"
    assert judged[0].holds_published
    assert judged[1].holds_published is False
    assert judged[4].why == "idle: gates"


def test_an_arm_that_did_nothing_is_found_and_named() -> None:
    design, verdicts = part("design"), part("verdicts")
    arms = {arm.name: arm for arm in design.ARMS}
    moved = {"gate_steps": 9.0, "gate_change": 0.2}
    rows = runs("mae", {1: 1.9, 2: 2.07}, "gate_entropy", **moved) + runs("swap", {1: 32.0}, "swaps")
    assert verdicts.idle(arms.values(), rows) == {"mae": "gate_entropy of seed 2 is 2.07, must be at most 2"}
    assert "mixing" in verdicts.idle(arms.values(), runs("mixing", {1: 1.9})), "without the number nothing is shown"


def test_the_number_of_seeds_follows_from_deviation_and_width() -> None:
    verdicts = part("verdicts")
    seeds = verdicts.seeds_needed(0.02, 0.02)
    reaches = [stdtrit(count - 1, 0.975) * 0.02 / count**0.5 for count in (seeds - 1, seeds)]
    assert reaches[0] > 0.02 >= reaches[1]
    assert verdicts.detectable(0.02, 6) < verdicts.detectable(0.02, 6, tests=9)


def test_power_is_that_of_the_noncentral_t() -> None:
    verdicts = part("verdicts")
    luck = np.random.default_rng(0)
    drawn = luck.normal(verdicts.detectable(0.7, 5, tests=9), 0.7, size=(100_000, 5))
    statistic = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / 5**0.5)
    found = (np.abs(statistic) > stdtrit(4, 1 - 0.05 / 18)).mean()
    assert found == pytest.approx(0.8, abs=0.005)


def test_regimes_are_compared_and_the_stricter_bound_is_told() -> None:
    regimes = part("regimes")
    losses = {"baseline": (2.0, 2.1, 2.2), "mixing": (1.9, 2.01, 2.09)}
    rows = [row for arm, values in losses.items() for row in runs(arm, dict(enumerate(values, 1)))]
    swapped = [{**row, "arm": {"baseline": "mixing", "mixing": "baseline"}[row["arm"]]} for row in rows]
    table = regimes.table_of_regimes(rows, [], swapped, [rows, []])
    line = next(cells for cells in table if cells[0].startswith("mixing"))
    assert line[-1] == "yes in 10,000 × 20; the reverse in 29,000 × 5; yes in 29,000 × 10" and line[2] == ""
    claims = [claim for claim in part("design").REGIME_CLAIMS if claim.source == "7"]
    (judged,) = part("verdicts").verdicts(claims, regimes.on_all([swapped, []]), {})
    assert judged.word == "contradicted", "the same arms on the full text have names of their own"
    weak = runs("mae", {1: 1.8, 2: 1.9}, "gate_entropy", gate_steps=9.0, gate_change=0.03)
    assert "mae would be left out, and 7 claims untested" in regimes.strictly(weak)
    assert regimes.strictly(runs("mae", {1: 1.8}, "gate_entropy", gate_steps=9.0, gate_change=0.3)) == ""


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ((1.9, 2.0, 2.11), "mae-uniform: not tested; mae: regularisation; mixing: more than this dropout brings"),
        ((1.9, 2.2, 2.3), "mae-uniform: not tested; mae: not decided; mixing: not decided"),
    ],
)
def test_what_is_regularisation_follows_from_the_claims(control: tuple[float, ...], said: str) -> None:
    regimes, design, verdicts = (part(name) for name in ("regimes", "design", "verdicts"))
    losses = {
        "baseline": (2.0, 2.1, 2.2),
        design.CONTROL: control,
        "mae": (1.901, 2.001, 2.1),
        "mixing": (1.8, 1.9001, 2.01),
    }
    rows = [row for arm, values in losses.items() for row in runs(arm, dict(enumerate(values, 1)))]
    words = regimes.regularisation(verdicts.verdicts(design.REGIME_CLAIMS, rows, {}), rows)
    assert re.sub(r" \(.*?\)", "", "; ".join(words)) == f"mae-uniform-0.2: not tested; {said}"


@pytest.mark.parametrize("epochs", [5, 20, 50])
def test_the_schedule_is_the_forks_scaled_and_leaves_heads_where_they_were(epochs: int, tmp_path: Path) -> None:
    path = tmp_path / "swaps.json"
    path.write_text(json.dumps(part("design").swap_schedule(epochs)))
    schedule = read_schedule(path, {(Site.CROSS, layer): 8 for layer in range(3)})
    assert sorted(schedule) == {5: [2, 3, 4, 5], 20: [2, 3, 4, 5], 50: [3, 7, 9, 11]}[epochs]
    assert all(len(swaps) == 8 for swaps in schedule.values())
    pair = (schedule[min(schedule)][3].first, schedule[min(schedule)][3].second)
    assert pair == (HeadId(Site.CROSS, 0, 3), HeadId(Site.CROSS, 2, 3))


def test_arms_and_recipe_are_options_that_train_has(tmp_path: Path) -> None:
    design, study = part("design"), part("runs")
    assert set(design.RECIPE) <= {field.name for field in dataclasses.fields(TrainConfig)}
    setting = study.Setting(tmp_path, tmp_path, design.RECIPE, 1, "cpu", "")
    for arm in (*design.ARMS, *design.REGIME_ARMS):
        VARIANTS.get(arm.variant).Options(**arm.options)
        config = study.train_config(setting, arm, 1)
        assert (config.lr, config.max_epochs, config.heads) == (arm.lr, design.EPOCHS, 8)
    names = {arm.name for arm in design.ARMS} | {"swap-soft"}
    assert {claim.arm for claim in design.CLAIMS} <= names
    assert len(set(design.CLAIMS)) == len(design.CLAIMS)


def finished(out: Path, arm: str, seed: int, loss: float, **numbers: float | str) -> None:
    run = out / "runs" / f"{arm}-{seed}"
    run.mkdir(parents=True)
    note = {"arm": arm, "seed": seed, "valid_nll": loss, "best_epoch": 1, "parameters": 1000, "bleu": 30.0 - loss}
    note |= {"signature": f"m:train|commit:{'ab' * 20}", "ended": "2026-01-02", "machine": "a processor", "threads": 1}
    (run / "result.json").write_text(json.dumps(note | numbers))
    (run / "metrics.csv").write_text(f"update,epoch,valid_nll\n1,1,{loss}\n2,1,\n3,2,{loss + 0.5}\n")


def accuracies(analysis: Path, margins: tuple[float, float, float]) -> None:
    """Two relations; the first has two heads."""
    (analysis / "syntax").mkdir(parents=True)
    rows = zip((0, 1, 0), ("nsubj>", "nsubj>", "obj<"), margins, strict=True)
    text = "".join(f"encoder-self,0,{head},{label},{margin}\n" for head, label, margin in rows)
    (analysis / "syntax" / "syntactic.csv").write_text("site,layer,head,label,margin\n" + text)
    heads = "site,layer,head,confidence\nencoder-self,0,0,0.5\n"
    (analysis / "heads.csv").write_text(heads)


@pytest.mark.slow
def test_the_report_is_made_of_whatever_is_finished_and_again_from_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = importlib.import_module("variants_study")
    out, results = tmp_path / "study", tmp_path / "results"

    def report() -> str:
        monkeypatch.setattr("sys.argv", ["study", "report", "--out", str(out), "--results", str(results)])
        study.main()
        return (results / "table.md").read_text()

    assert "untested: fewer than two pairs" in report()
    for seed in (1, 2, 3):
        finished(out, "baseline", seed, 2.0 + seed / 10, **{"confidence.cross": 0.5})
        finished(out, "mae-uniform", seed, 1.9 + seed / 10 + seed / 1000, **{"confidence.cross": 0.6 + seed / 100})
        finished(out, "mae", seed, 1.7 + seed / 10, gate_entropy=2.07, gate_steps=9, gate_change=0.2)
    (out / "analysis" / "mae-2" / "words").mkdir(parents=True)
    (out / "analysis" / "mae-2" / "words" / "experts_tokens.csv").write_text(
        "site,layer,expert,token,pmi,count\nencoder-self,0,0,null,1.25,20\nencoder-self,1,0,no,1,20\ncross,0,0,no,1,20\n"
    )
    (results / "cost.csv").write_text(
        "round,arm,seconds\n0,baseline,1.0\n0,mae-uniform,1.1\n1,baseline,2.0\n1,mae-uniform,2.4\n"
    )
    for seed, better in ((1, 0.05), (2, 0.07), (3, 0.09)):
        accuracies(out / "analysis" / f"baseline-{seed}", margins=(-0.2, 0.1, 0.3))
        accuracies(out / "analysis" / f"mae-uniform-{seed}", margins=(-0.2, 0.1 + better, 0.3 + better))
    text = report()
    assert "| syntax: the best head over a fixed offset, encoder | 0.200 |" in text
    assert "| +0.070 ± 0.050 |" in text
    assert "modal offset" not in text, "a number that no run has is left out"
    assert "| Uni-MAE-7 | 0.003 | 3 | 2.1020 (0.1010) | -0.0980 ± 0.0025 |" in text
    assert "1.15 ± 0.64" in text
    assert re.search(r"mae-uniform has a lower validation loss than baseline .*\| \*\*reproduced\*\*", text)
    assert "mae is left out: gate_entropy of seed 1 is 2.07, must be at most 2" in text
    assert "| MAE-7 | 0.003" not in text
    assert "seeds that are missing: baseline 4, 5; baseline-rate 1, 2, 3, 4, 5; " in text
    assert "| MAE-7 | gate_entropy | at most 2 | 2.07 to 2.07 |" in text
    assert "| 0 | null 1.25 (20) |" in text
    assert "| confidence, cross | 0.500 |" in text
    assert "+0.120 ± 0.025" in text
    assert "abababababab" in text
    assert {path.name for path in (results / "figures").iterdir()} == {"effects.png"}
    with (results / "curves.csv").open() as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"1", "2"}
    shutil.rmtree(out)
    assert report() == text
    capsys.readouterr()


def experts(out: Path, run: str) -> None:
    (out / "analysis" / run / "words").mkdir(parents=True)
    rows = "encoder-self,0,0,null,1.25,20\nencoder-self,0,0,no,1.0,20\n"
    (out / "analysis" / run / "words" / "experts_tokens.csv").write_text("site,layer,expert,token,pmi,count\n" + rows)


def test_runs_of_two_directories_make_the_tables_that_one_makes(tmp_path: Path) -> None:
    collect = part("collect").collect
    numbers = {"baseline": 2.0, "mae": 1.123456789012345}
    for number, (arm, seed) in enumerate((arm, seed) for seed in (1, 2) for arm in numbers):
        for out in (tmp_path / "whole", tmp_path / f"part{seed}"):
            gates = {"gate_steps": 9.0} if arm == "mae" else {}
            finished(out, arm, seed, numbers[arm] + number / 7, **gates)
            experts(out, f"{arm}-{seed}")
    for results in ("one", "two"):
        (tmp_path / results).mkdir()
    collect(tmp_path / "whole", tmp_path / "one")
    for seed in (2, 1, 1):
        collect(tmp_path / f"part{seed}", tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_text() == path.read_text(), path.name
    assert len(list((tmp_path / "one").iterdir())) == 3


def test_a_run_made_again_elsewhere_stands_beside_the_first_and_is_no_run(tmp_path: Path) -> None:
    page, (first, again, results) = part("page"), (tmp_path / name for name in ("first", "again", "results"))
    results.mkdir()
    for seed in (1, 2):
        finished(first, "baseline", seed, 2.0 + seed)
    finished(again, "baseline", 2, 4.0125, machine="another")
    part("collect").collect(first, results)
    before = (results / "runs.csv").read_bytes()
    part("collect").collect_repeats(again, results)
    assert (results / "runs.csv").read_bytes() == before
    page.write_page(results)
    assert "(repeated.csv): baseline 2 4.0000 on a processor, +0.0125 on another." in (results / "table.md").read_text()


def test_relevance_that_later_code_found_stands_where_the_run_has_none(tmp_path: Path) -> None:
    """One head has all the relevance of the first layer, two share that of the second: 1.5 on average."""
    heads = "site,layer,head,lrp\ncross,0,0,2\ncross,0,1,0\ncross,1,0,3\ncross,1,1,3\n"
    finished(tmp_path, "baseline", 1, 2.0)
    for arm, seed in (("mae", 1), ("mae", 2)):
        finished(tmp_path, arm, seed, 2.0)
        folder = tmp_path / "analysis" / f"{arm}-{seed}" / "relevance"
        folder.mkdir(parents=True)
        (folder / "heads.csv").write_text(heads)
    part("collect").collect_relevance(tmp_path, tmp_path)
    runs = "arm,seed,relevant_heads\nbaseline,1,1.25\nmae,1,1.75\nmae,2,\n"
    (tmp_path / "runs.csv").write_text(runs)
    rows = part("collect").rows_of_runs(tmp_path)
    assert [row["relevant_heads"] for row in rows] == pytest.approx([1.25, 1.75, 1.5])


@pytest.mark.parametrize("part_of_signature", ["commit:" + "cd" * 20, "data:sha256=1,n=5"])
def test_runs_of_another_study_are_not_added(tmp_path: Path, part_of_signature: str) -> None:
    collect = part("collect").collect
    finished(tmp_path / "first", "baseline", 1, 2.0)
    finished(tmp_path / "second", "baseline", 2, 2.0, signature=f"m:train|{part_of_signature}")
    (tmp_path / "results").mkdir()
    collect(tmp_path / "first", tmp_path / "results")
    before = (tmp_path / "results" / "runs.csv").read_bytes()
    with pytest.raises(SystemExit, match="--results"):
        collect(tmp_path / "second", tmp_path / "results")
    assert (tmp_path / "results" / "runs.csv").read_bytes() == before


def test_the_claim_about_cost_is_tested_over_rounds(tmp_path: Path) -> None:
    seconds = {"baseline": (1.0, 2.0, 4.0), "mae": (1.3, 2.7, 5.0)}
    rows = "".join(f"{number},{arm},{its[number]}\n" for arm, its in seconds.items() for number in range(3))
    (tmp_path / "cost.csv").write_text("round,arm,seconds\n" + rows)
    for seed, loss in ((1, 2.0), (2, 2.1)):
        finished(tmp_path, "baseline", seed, loss)
        finished(tmp_path, "mae", seed, loss - 0.1, gate_entropy=1.7, gate_steps=9, gate_change=0.2)
    part("collect").collect(tmp_path, tmp_path)
    part("page").write_page(tmp_path)
    difference = part("verdicts").Difference.of([0.1, 0.15, 0.05])
    assert (
        f"| {difference.shown(4)} (3 rounds) | {difference.p:.2g} | **undecided** |"
        in (tmp_path / "table.md").read_text()
    )
    table = pd.read_csv(tmp_path / "table.csv").set_index("arm")
    assert table.loc["mae", "cost_ratio"] == pytest.approx(1.3)
    assert table.loc["mae", "seeds"] == 2


def test_the_page_says_which_runs_are_of_which_machine_and_which_pairs_of_two() -> None:
    def of(arm: str, machine: str, *seeds: int) -> list[dict[str, Any]]:
        return runs(arm, dict.fromkeys(seeds, 2.0), machine=machine)

    first = of("baseline", "one", 1, 2, 3) + of("mae", "one", 1, 2)
    assert part("page").machines(first) == "one"
    both = first + of("baseline", "two", 5) + of("mae", "two", 5) + of("wide-low", "two", 1, 2)
    assert part("page").machines(both) == (
        "one, and two (baseline 5; mae 5; wide-low 1, 2), so differences of wide-low 1, 2 "
        "from the baseline are between two machines"
    )


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git {words[0]} says nothing here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_the_committed_page_is_that_of_the_committed_tables(tmp_path: Path) -> None:
    if not (RESULTS / "runs.csv").exists():
        pytest.skip("the runs of the plan are not finished")
    for path in RESULTS.iterdir():
        if path.suffix == ".csv" or path.is_dir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    part("page").write_page(tmp_path)
    for name in ("table.md", "table.csv"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text(), name


def test_the_documentation_says_what_the_tables_say() -> None:
    design, page, verdicts = part("design"), part("page"), part("verdicts")
    rows = part("collect").read_table(RESULTS / "runs.csv")
    more = part("collect").read_table(RESULTS / "regimes" / "runs.csv")
    commands = {arm.name: f"`{arm.variant}{FLAGS.get(arm.name, '')}`" for arm in (*design.ARMS, *design.REGIME_ARMS)}
    full = part("regimes").on_all(page.full_runs(RESULTS))
    commands |= {f"{arm}{of}": f"{say}{of}" for of in (design.ON_ALL, design.ON_GPU) for arm, say in commands.items()}
    found = [
        *verdicts.verdicts(design.CLAIMS, rows, verdicts.idle(design.ARMS, rows)),
        *verdicts.verdicts(design.REGIME_CLAIMS, rows + more + full, {}),
    ]
    judged = {(verdict.claim.arm, verdict.claim.against, verdict.claim.family): verdict for verdict in found}
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    published = [arms[:2] for arms in design.BETTER if arms[0] in {arm.name for arm in design.ARMS}]
    for arm, against in published:
        cells = []
        for family, digits in (("loss", 3), ("bleu", 1)):
            verdict = judged[arm, against, family]
            cells += [verdict.difference.shown(digits).replace("-", "−"), verdict.word]
        assert f"| {commands[arm]} than {commands[against]} | {' | '.join(cells)} |" in text
    assert len(published) == 6
    for claim in design.REGIME_CLAIMS:
        verdict = judged[claim.arm, claim.against, "regime"]
        shown = verdict.difference.shown(3).replace("-", "−") if verdict.difference else ""
        assert f"| {commands[claim.arm]} than {commands[claim.against]} | {shown} | {verdict.word} |" in text


@pytest.mark.parametrize(
    ("plan", "table"),
    [
        ("PLAN.md", "runs.csv"),
        *(("PLAN-regimes.md", f"{folder}/runs.csv") for folder in ("regimes", "full-text", "full-text-gpu")),
    ],
)
def test_the_plan_was_committed_before_every_run(plan: str, table: str) -> None:
    if not (RESULTS / table).exists():
        pytest.skip("the runs of the plan are not finished")
    first = git("log", "--diff-filter=A", "--format=%H", "--", f"benchmarks/variants/{plan}").splitlines()
    if not first:
        pytest.skip("the history of this checkout is cut off")
    signatures = pd.read_csv(RESULTS / table)["signature"]
    for commit in {signature.rsplit("|commit:", 1)[1] for signature in signatures}:
        git("cat-file", "-e", commit)
        order = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", first[-1], commit]
        assert subprocess.run(order, check=False).returncode == 0, f"{commit} is not after the plan"
