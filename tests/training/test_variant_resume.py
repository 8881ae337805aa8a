"""Variants go on after a restart as if nothing had happened, and runs of swaps do what their schedules say."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.errors import ConfigError
from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import Site
from headscope.progress import no_progress
from headscope.training.config import TrainingPosition
from headscope.training.head_scores import head_scores
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS
from headscope.training.variants.swap import SwapHeads, SwapOptions
from tests.makers.studies import study_of
from tests.oracles import lessons
from tests.oracles.swaps import differing, schedule

pytestmark = pytest.mark.slow

SWAPS = [f"cross.0.{head} cross.1.{head}" for head in range(3)]
SHORT: dict[str, Any] = {"precision": "float32", "bleu_every": 0, "log_every": 1000}


def test_a_schedule_may_move_and_grow_but_options_may_not_change(tmp_path: Path) -> None:
    def scheduled(file: str, swaps: dict[int, list[str]], epochs: int, *, resume: bool = True) -> int:
        variant = SwapHeads(SwapOptions(swap_schedule=schedule(tmp_path / file, swaps)))
        return train(lessons.config(tmp_path, max_epochs=epochs, **SHORT), variant, resume=resume).epoch

    scheduled("first.json", {2: SWAPS}, 2, resume=False)
    assert scheduled("moved.json", {2: SWAPS, 3: SWAPS}, 3) == 3
    other = SwapHeads(SwapOptions(swap_schedule=tmp_path / "moved.json", swap_moments=True))
    with pytest.raises(ConfigError, match=r"other options: --swap-moments \(was False, is True\);"):
        train(lessons.config(tmp_path, max_epochs=4, **SHORT), other, resume=True)


def test_what_gates_did_before_an_interruption_counts_in_the_next_line_of_metrics(tmp_path: Path) -> None:
    """Their entropy is noted in every tenth update, and a line comes at the end: of updates 10 and 20."""
    cls, lines = VARIANTS.get("mae"), []
    for name in ("whole", "parts"):
        config = lessons.config(tmp_path / name, max_epochs=4, validate_every=1000, **SHORT)
        displays: list[Any] = [lessons.StopsAfter(13), no_progress] if name == "parts" else [no_progress]
        for shown in displays:
            result = train(config, cls(cls.Options(gate_every=1)), progress=shown, resume=name == "parts")
        assert (result.reason, result.update) == ("epochs", 24)
        with (config.out / "metrics.csv").open(encoding="utf-8") as file:
            (line,) = csv.DictReader(file)
        lines.append({key: value for key, value in line.items() if "gate" in key or "expert" in key})
    assert lines[0]["gate_entropy"] and lines[0] == lines[1]


def test_dynamic_swaps_are_undone(tmp_path: Path) -> None:
    its = lessons.begin(tmp_path, "swap", dynamic=("hard", "soft", "none"), score="uniqueness", dynamic_end=(3,))
    before = lessons.weights(its)
    for epoch, moved in ((1, True), (2, False), (3, False), (4, False)):
        lessons.variant(its).after_epoch(its, TrainingPosition(epoch=epoch))
        changed = differing(before, lessons.weights(its))
        assert bool(changed) is moved and not any("cross" in name for name in changed)
    history = lessons.variant(its).history(its)
    assert history["swaps.encoder-self"] == 2 and history["swapped.encoder-self"] == 0
    assert "swaps.cross" not in history


def test_scores_are_those_of_the_analyses(tmp_path: Path) -> None:
    """confidence, base, advanced and pairwise of the run's validation text, measured by `analyze`."""
    from headscope.data.corpus import open_corpus
    from headscope.training.checkpoints import checkpoint

    its = lessons.begin(tmp_path, "baseline")
    its.model.eval()
    files = lessons.texts(tmp_path)
    corpus = open_corpus(files["valid_source"], target=files["valid_target"])
    names = {"confidence": "confidence"} | {name: f"confidence.{name}" for name in ("base", "advanced", "pairwise")}
    study = study_of(checkpoint(its), corpus, *names.values(), replicates=2).heads
    for score, name in names.items():
        found = head_scores(its.model, its.validation(), score=score)
        assert set(found) == set(Site)
        for site, layers in found.items():
            for layer, scores in layers.items():
                expected = study[(study.site == site.value) & (study.layer == layer)][name.replace(".", "_")]
                torch.testing.assert_close(
                    scores, torch.tensor(expected.tolist(), dtype=torch.float64), rtol=1e-6, atol=1e-6
                )


def test_uniqueness_sentence_by_sentence(tmp_path: Path) -> None:
    from headscope.model.taps import capture

    its = lessons.begin(tmp_path, "baseline")
    its.model.eval()
    found = head_scores(its.model, its.validation(), score="uniqueness")
    sums = {place: torch.zeros(3, dtype=torch.float64) for place in its.model.declared_attention().layout}
    count = 0
    pairs = its.data.valid
    assert pairs is not None
    from headscope.training.prepare import collate

    for number in range(len(pairs)):
        batch = collate(pairs, torch.tensor([number]).numpy())
        count += 1
        with torch.no_grad(), capture(its.model, ("context",)) as heads:
            final_states(its.model, batch)
        for place, total in sums.items():
            seen = heads[place]["context"][0]
            for i in range(3):
                total[i] += sum(float((seen[i] - seen[j]).norm()) for j in range(3)) / 2
    for (site, layer), total in sums.items():
        torch.testing.assert_close(found[site][layer], total / count, rtol=1e-9, atol=1e-9)
