"""Rankings: the heads removed by score, in one step or several, and the command's inputs and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.config.option import make_config
from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import open_checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, Site, all_heads
from headscope.model.taps import masked
from headscope.pruning.closed_form.compensate import RefittedCopy
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.removal import remove
from tests.makers import decoders
from tests.makers.shared import Command, succeed
from tests.oracles import checkpoints, speakers

SCORES = dict(enumerate(np.random.default_rng(1).permutation(60).tolist()))


def random_scores(gates: GateLayout) -> dict[HeadId, float]:
    return {head: float(SCORES[number]) for number, head in enumerate(all_heads(gates.counts))}


def test_the_lowest_scores_go() -> None:
    gates = GateLayout(checkpoints.small().attention_sites)
    scores = random_scores(gates)
    for keep in (0, 1, 7, gates.heads):
        ranks = rank_heads(gates, keep, lambda removed: scores)
        removed = gates.closed_heads(ranks.stays_open)
        assert len(removed) == gates.heads - keep
        kept = [head for head in scores if head not in removed]
        assert not removed or not kept or max(scores[head] for head in removed) < min(scores[head] for head in kept)
        assert [gates.units[number][0] for number in ranks.order()] == sorted(scores, key=lambda head: -scores[head])


def test_tables_have_a_row_a_head_where_gates_hold_different_numbers() -> None:
    gates = GateLayout(checkpoints.small().attention_sites)
    first, second, third, *_ = (head for unit in gates.units for head in unit)
    gates.units = ((first, second), (third,))
    table = gates.table(score=torch.tensor([3.0, 5.0]), update=7)
    assert table["score"].tolist() == [3.0, 3.0, 5.0] and table["update"].tolist() == [7, 7, 7]
    assert table["head"].tolist() == [first.head, second.head, third.head]


def test_every_layer_keeps_its_share() -> None:
    gates = GateLayout(checkpoints.small().attention_sites)
    scores = random_scores(gates)
    for keep in range(gates.heads + 1):
        ranks = rank_heads(gates, keep, lambda removed: scores, allocation="per-layer")
        removed = set(gates.closed_heads(ranks.stays_open))
        assert len(removed) == gates.heads - keep
        for (site, layer), count in gates.counts.items():
            heads = [HeadId(site, layer, head) for head in range(count)]
            left = [head for head in heads if head not in removed]
            assert abs(len(left) - keep * count / gates.heads) < 1
            best = sorted(heads, key=lambda head: -scores[head])[: len(left)]
            assert set(best) == set(left)


@pytest.mark.parametrize("per_layer", [False, True])
def test_scores_are_asked_for_anew_in_every_step(per_layer: bool) -> None:
    """Scores change sign after the first step: the second half is chosen by the new scores."""
    gates = GateLayout(checkpoints.small().attention_sites)
    scores, calls = random_scores(gates), []

    def score(removed: list[HeadId]) -> dict[HeadId, float]:
        calls.append(list(removed))
        return {head: -value if removed else value for head, value in scores.items()}

    keep = gates.heads - 8
    ranks = rank_heads(gates, keep, score, steps=2, allocation="per-layer" if per_layer else "global")
    assert calls[0] == [] and len(calls) == 2 and set(calls[1]) == set(_heads_at(gates, ranks.step.tolist(), 1))
    assert set(calls[1]) < set(gates.closed_heads(ranks.stays_open)) and len(gates.closed_heads(ranks.stays_open)) == 8
    if not per_layer:
        low = sorted(scores, key=lambda head: scores[head])
        assert set(calls[1]) == set(low[:4]) and set(_heads_at(gates, ranks.step.tolist(), 2)) == set(low[-4:])
    last = [ranks.step[number].item() for number in ranks.order()]
    assert last == sorted(last, key=lambda step: -step if step else -99)


def _heads_at(gates: GateLayout, steps: list[int], step: int) -> list[HeadId]:
    return [gates.units[number][0] for number, removal_step in enumerate(steps) if removal_step == step]


def test_groups_go_together_by_their_mean() -> None:
    gates = GateLayout(speakers.checkpoint("llama").attention_sites)
    scores = {head: float(head.head == 4) * 10 + head.layer for head in all_heads(gates.counts)}
    ranks = rank_heads(gates, 3, lambda removed: scores)
    assert {str(head) for head in gates.closed_heads(~ranks.stays_open)} == {
        f"decoder-self.1.{head}" for head in (3, 4, 5)
    }


def test_heads_without_a_number_are_named() -> None:
    gates = GateLayout(checkpoints.small().attention_sites)
    scores = random_scores(gates) | {HeadId(Site.CROSS, 1, 0): float("nan")}
    with pytest.raises(ConfigError, match=r"1 of \d+.*cross\.1\.0.*--sites"):
        rank_heads(gates, 3, lambda removed: scores)


# The whole command, on a small model on disk.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rank")
    NATIVE.save(checkpoints.small(), path / "whole")
    (path / "a").write_text("a b c\nb c\nd e f g\na\n" * 2, encoding="utf-8")
    (path / "b").write_text("a b\nb c a\nd e f g d\na b\n" * 2, encoding="utf-8")
    return path


def run_rank(folder: Path, out: Path, **options: Any) -> Any:
    """Run `prune rank`; a removal is not timed before and after."""
    texts = {"source": folder / "a", "target": folder / "b"}
    settings: dict[str, Any] = {"device": "cpu", **texts, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remove, "timings", lambda *_, **__: [])
        return run_ranking(make_config(RankConfig, {"checkpoint": folder / "whole", "out": out, **settings}))


@pytest.mark.slow
def test_a_ranking_is_refitted_before_it_is_tuned(folder: Path, tmp_path: Path) -> None:
    """The written model is the refitted masked one, of full size; the pruned model computes the same."""
    plain = run_rank(folder, tmp_path / "plain", by="obs", keep=8)
    refit = run_rank(folder, tmp_path / "refitted", by="obs", keep=8, compensate="least-squares", remove=True)
    assert refit.removed == plain.removed and not (tmp_path / "plain" / "model").exists()
    assert {name: refit.quality[name] for name in plain.quality} == plain.quality
    assert "compensate:least-squares" in str(refit.signature) and refit.record["source"] == plain.record["source"]
    corpus = open_corpus(folder / "a", target=folder / "b")
    losses = {}
    for name, heads in (("model", refit.removed), ("pruned", [])):
        checkpoint = open_checkpoint(str(tmp_path / "refitted" / name), device="cpu")
        with masked(checkpoint.model, heads):
            losses[name] = DamageMeter(checkpoint, corpus).measure().value
    assert losses["model"] == pytest.approx(losses["pruned"], rel=1e-9)
    assert losses["model"] == pytest.approx(refit.quality["refitted"], rel=1e-6)
    tuning = run_rank(folder, tmp_path / "tuned", by="obs", keep=8, compensate="mean", tune_updates=2, lr=1e-9)
    assert tuning.quality["tuned"] == pytest.approx(tuning.quality["refitted"], rel=1e-5)
    assert tuning.quality["refitted"] != refit.quality["refitted"]
    options: dict[str, Any] = {"by": "obs", "keep": 8, "compensate": "least-squares", "sequential": True}
    sequential = run_rank(folder, tmp_path / "sequential", **options)
    intact = open_checkpoint(str(folder / "whole"), device="cpu")
    model = RefittedCopy.of(intact, sequential_refits(intact, corpus, plain.removed, Refit(damping=0.1))).model
    expected = DamageMeter(intact, corpus).measure(model).value
    assert sequential.quality["refitted"] == pytest.approx(expected, rel=1e-6) != refit.quality["refitted"]
    assert "compensate:least-squares-sequential" in str(sequential.signature)


@pytest.mark.slow
def test_files_of_a_ranking_and_what_remove_makes_of_them(folder: Path, tmp_path: Path) -> None:
    protect = "cross.0.0,encoder-self.0.*"
    choice = run_rank(folder, tmp_path / "run", by="gradient", keep=8, protect=protect, remove=True, steps=2)
    ranking = pd.read_csv(tmp_path / "run" / "ranking.csv")
    assert list(ranking.columns) == ["site", "layer", "head", "score", "rank", "kept", "step"]
    removed = (tmp_path / "run" / "removed.txt").read_text().split()
    kept = (tmp_path / "run" / "kept.txt").read_text().split()
    assert len(kept) == 8 and "cross.0.0" in kept and sum(name.startswith("encoder-self.0.") for name in kept) >= 2
    assert sorted([*removed, *kept]) == sorted(map(str, [*choice.kept, *choice.removed]))
    record = json.loads((tmp_path / "run" / "pruning.json").read_text())
    assert record["removed"] == removed and record["kept"] == 8 and record["nll"].keys() == {"before", "masked"}
    assert record["signature"].startswith("m:prune.rank|by:gradient|keep:8|steps:2|")
    smaller = open_checkpoint(str(tmp_path / "run" / "pruned"))
    assert sum(smaller.layout.values()) == 8


@pytest.mark.slow
def test_tuning_recovers_some_of_it_and_closed_heads_stay_closed(folder: Path, tmp_path: Path) -> None:
    options = {"by": "random", "keep": 4, "tune_updates": 8, "lr": 1e-2, "batch_tokens": 100}
    choice = run_rank(folder, tmp_path / "run", **options)
    assert choice.quality["tuned"] < choice.quality["masked"]
    repeat = run_rank(folder, tmp_path / "again", **options)
    assert repeat.quality == choice.quality
    other = run_rank(folder, tmp_path / "other", by="random", keep=4, seed=2)
    assert other.removed != choice.removed
    assert sum(open_checkpoint(str(tmp_path / "run" / "model")).layout.values()) == choice.record["heads"]


@pytest.mark.slow
def test_scores_from_a_file_and_from_a_run(folder: Path, tmp_path: Path) -> None:
    first = run_rank(folder, tmp_path / "one", by="taylor", keep=5)
    table = pd.read_csv(tmp_path / "one" / "ranking.csv")
    csv = tmp_path / "own.csv"
    table[["site", "layer", "head"]].assign(entropy=-table.score, other=1).to_csv(csv, index=False)
    files: list[dict[str, Any]] = [{"by": str(tmp_path / "one" / "ranking.csv")}, {"by": str(csv), "column": "entropy"}]
    for options in files:
        assert run_rank(folder, tmp_path / Path(options["by"]).stem, keep=5, **options).removed == first.removed
    (tmp_path / "analysed").mkdir()
    table.assign(taylor=table.score, strange=-table.score).to_csv(tmp_path / "analysed" / "heads.csv", index=False)
    columns: list[dict[str, Any]] = [{"by": "taylor"}, {"by": "strange", "keep_lowest": True}]
    for number, options in enumerate(columns):
        choice = run_rank(folder, tmp_path / f"from{number}", keep=5, run=tmp_path / "analysed", **options)
        assert choice.removed == first.removed
    for digest, other in ((first.record["source"]["digest"], False), ("f00", True)):
        (tmp_path / "analysed" / "run.json").write_text(json.dumps({"checkpoint": {"digest": digest}}))
        again = run_rank(folder, tmp_path / f"of{digest}", keep=5, run=tmp_path / "analysed", by="taylor")
        remarks = again.record["remarks"]
        assert any("measured other weights than those of" in remark for remark in remarks) is other
    assert run_rank(folder, tmp_path / "low", keep=5, by="taylor", keep_lowest=True).removed != first.removed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stage"),
    [
        (["rank", "--by", "magnitude", "--tune-updates", "3"], "tuned"),
        (["rank", "--by", "magnitude", "--compensate", "least-squares"], "refitted"),
        (["l0", "--updates", "3"], "masked"),
        (["l0", "--updates", "2", "--tune-updates", "2"], "tuned"),
    ],
    ids=str,
)
def test_what_is_measured_of_a_trained_model_is_what_is_saved_of_it(
    tmp_path: Path, command: Command, method: list[str], stage: str
) -> None:
    """A checkpoint in half precision learns in float32; the learnt weights are rounded again to be stored."""
    folder, out, text = tmp_path / "whole", tmp_path / "out", tmp_path / "text.en"
    decoders.decoder("llama", num_hidden_layers=1).bfloat16().save_pretrained(folder)
    decoders.byte_level().save_pretrained(folder)
    text.write_text("".join(f"one {word} two and then some more of it\n" for word in "abcdefgh"))
    source = ("--source", text)
    output = succeed(command, "prune", *method, folder, "--keep", 4, *source, "--out", out, "--verbose")
    assert ("rounded to bfloat16, as the checkpoint stores them" in output) is (stage != "refitted")
    json_text = succeed(command, "evaluate", out / "model", "--mask", out / "removed.txt", *source, "--json")
    losses, record = json.loads((out / "pruning.json").read_text())["nll"], json.loads(json_text)["record"]
    assert losses[stage] == pytest.approx(record["nll"] / record["tokens"], abs=1e-6)


def test_a_damping_that_is_given_holds_whatever_it_is(folder: Path) -> None:
    texts = {"checkpoint": str(folder / "whole"), "source": folder / "a", "target": folder / "b"}
    options: dict[str, Any] = {**texts, "out": folder / "out", "by": "obs", "keep": 8, "compensate": "least-squares"}
    assert RankConfig(**options).refit.damping is None
    assert RankConfig(**options, damping=1e-4).refit.damping == 1e-4
