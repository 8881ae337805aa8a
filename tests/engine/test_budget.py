"""Ablation within a budget: a part of the text gives the numbers of that part alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.bootstrap import Bootstrap, GroupSums, Ratio
from headscope.config.analyze import AnalyzeConfig
from headscope.config.declarations import checked_options
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.attention_maps import SHORT, attention_maps, short_examples
from headscope.engine.faithfulness.comparison import (
    SHARES,
    PerformanceDrop,
    RemovalSteps,
    cmd,
    compare_rankings,
    cpr,
    measure_drop,
    plan_removals,
)
from headscope.engine.joint import MIN_SENTENCES, PASSES, SMALL_CORPUS, affordable, with_budget
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.heads import HeadId, Site, SiteLayer, all_heads
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import patching, prompts, speakers
from tests.oracles.checkpoints import huggingface


def test_a_budget_pays_a_part_of_the_text() -> None:
    corpus, small = (open_corpus([f"Line {number}." for number in range(count)]) for count in (200, SMALL_CORPUS // 2))
    part = affordable(corpus, 40.0, 10)
    assert isinstance(part, Corpus) and part.count == 50 == len(list(part))
    numbers = [sentence.number for sentence in part]
    assert numbers == sorted(numbers) and numbers[0] < 40 and numbers[-1] >= 160, "from all of its length"
    again = affordable(corpus, 40.0, 10)
    assert isinstance(again, Corpus) and [sentence.number for sentence in again] == numbers
    assert affordable(corpus, 40.0, 40) is corpus is affordable(corpus, 1e9, 0)
    assert affordable(small, 30.0, 30) is small, "a small text has the budget of a larger one"
    assert "needs 1,000 passes of a sentence" in str(affordable(corpus, 1000.0, MIN_SENTENCES * 1000 // 200 - 1))


def run_ablation(corpus: Corpus, **options: Any) -> Study:
    names = ["confidence", "ablation"]
    checkpoint = speakers.checkpoint("gpt2")
    return study_of(checkpoint, corpus, *names, replicates=50, **options)


@pytest.mark.slow
def test_a_part_is_measured_as_if_there_were_no_more() -> None:
    """Value, interval and test of the measured sentences; the others are not resampled."""
    corpus = speakers.corpus("gpt2", count=67)
    sampled, full = run_ablation(corpus, ablation_passes=1), run_ablation(corpus, ablation_passes=0)
    count = int(67 / 5.5)
    assert sampled.record["sampled"] == {"ablation": f"{count} of 67"} and not full.record["sampled"]
    # 2 layers of 3 heads: 1 + 3 · 1 + 3 · 1/2 passes
    share = corpus.share(count / 67, seed=1)
    lines = [line._replace(number=number) for number, line in enumerate(share)]
    alone = run_ablation(Corpus("alone", len(lines), "0" * 40, lambda: iter(lines)))
    columns = ["ablation", "ablation_low", "ablation_high"]
    np.testing.assert_allclose(sampled.heads[columns], alone.heads[columns], rtol=1e-6)
    np.testing.assert_allclose(sampled.tables["importance"]["p"], alone.tables["importance"]["p"], rtol=1e-5)
    assert not np.allclose(full.heads["ablation"], sampled.heads["ablation"])
    assert sampled.record["signatures"]["ablation"]["ablation-n"] == f"{count} of 67"
    assert f"ablation on {count} of 67 sentences" in sampled.record["remarks"]
    assert sampled.answers()[1].sentence.endswith(f"ablation on {count} of 67 sentences")
    assert full.record["signatures"]["ablation"] == {"m": "ablation.v1", "objective": "loss.v1", "with": "zero"}


def test_what_is_too_dear_is_estimated() -> None:
    """A budget below eight sentences leaves ablation out, and the headline says that it is an estimate."""
    checkpoint, corpus = speakers.checkpoint("gpt2"), speakers.corpus("gpt2", count=30)
    study = study_of(checkpoint, corpus, "ablation", "taylor", ablation_passes=1)
    assert "ablation" in study.heads  # 64 sentences' worth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscope.engine.joint.SMALL_CORPUS", 30)
        study = study_of(checkpoint, corpus, "ablation", "taylor", ablation_passes=1)
        assert "ablation" not in study.heads and study.left_out[0].why.startswith("needs 6 passes")
        assert study.answers()[1].question == "Which heads the model needs (estimated)"
        with pytest.raises(ConfigError, match="no analysis can run: ablation: needs"):
            study_of(checkpoint, corpus, "ablation", ablation_passes=1)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"importance": "cheap"}, PASSES),
        ({"faithfulness": True}, PASSES),
        ({"importance": "all"}, 0),
        ({"importance": "cheap", "also": ("ablation",)}, 0),
        ({"only": ("importance",)}, 0),
        ({"only": ("ablation",), "analysis_options": {"ablation_passes": 5}}, 5),
        ({"importance": "cheap", "analysis_options": {"ablation_passes": 0}}, 0),
    ],
)
def test_who_asks_for_ablation_by_name_gets_all_of_it(options: dict[str, Any], passes: int) -> None:
    extra = checked_options(options.pop("analysis_options", {}))
    config = AnalyzeConfig(checkpoint="model", source="text", out="run", analysis_options=extra, **options)  # type: ignore[arg-type]
    assert with_budget(config).analysis_options["ablation_passes"] == passes


# CPR and CMD: by the published formula, of rankings, and with heads ablated by the corrupt prompt.


HEADS = [HeadId(Site.DECODER_SELF, layer, head) for layer in range(3) for head in range(7)]  # 21
RNG = np.random.default_rng(4)
SCORES = dict(zip(HEADS, RNG.normal(size=21).tolist(), strict=True))
EFFECTS = dict(zip(HEADS, RNG.normal(size=21).tolist(), strict=True))


@pytest.mark.parametrize(
    ("f", "areas"),
    [(lambda p: 1.0, (0.999, 0.0)), (lambda p: p, (0.4999995, 0.4990005)), (lambda p: 1.5, (1.4985, 0.4995))],
)
def test_areas_of_known_curves(f: object, areas: tuple[float, float]) -> None:
    assert callable(f)
    values = torch.tensor([f(share) for share in SHARES], dtype=torch.float64)
    assert (float(cpr(values)), float(cmd(values))) == pytest.approx(areas, abs=1e-12)


def performance(heads: set[HeadId]) -> float:
    """m of a model with these heads only: not additive."""
    total = sum(EFFECTS[head] for head in heads)
    value: float = total + 0.3 * total**2 + 0.1 * len(heads)
    return value


def sums_of(plan: RemovalSteps) -> GroupSums:
    sums = GroupSums()
    for n in range(5):
        row = [(n + 1) * (7.0 - performance(set(HEADS) - set(off))) for off in plan.masks]
        sums.add(torch.tensor([n]), Ratio(torch.tensor([row]).double(), torch.tensor([[n + 1.0]]).double()))
    return sums


def areas_of(scores: dict[HeadId, float]) -> tuple[float, float]:
    """Areas under f and |1 − f|, point by point."""
    order = sorted(HEADS, key=lambda head: -scores[head])
    f = []
    for p in SHARES:
        circuit = performance(set(order[: int(p * 21)]))
        f.append((circuit - performance(set())) / (performance(set(HEADS)) - performance(set())))
    distances = [abs(1 - y) for y in f]
    areas = [
        sum((b - a) * (y + z) / 2 for (a, y), (b, z) in pairwise(zip(SHARES, values, strict=True)))
        for values in (f, distances)
    ]
    return areas[0], areas[1]


@pytest.mark.parametrize("name", ["ablation", "gradient"])  # scores with a sign, and without
def test_columns_are_those_of_the_formula(name: str) -> None:
    plan = plan_removals({name: SCORES}, steps=2, random_orders=2, seed=1)
    drop = PerformanceDrop({"loss": sums_of(plan)})
    _, table = compare_rankings(plan, drop, {name: SCORES}, {}, Bootstrap(seed=1, replicates=19))
    row = table.iloc[0]
    magnitudes = {head: abs(score) for head, score in SCORES.items()} if name == "ablation" else SCORES
    assert row.cpr == pytest.approx(areas_of(SCORES)[0]) and row.cmd == pytest.approx(areas_of(magnitudes)[1])
    assert row.cpr_low <= row.cpr + 1e-9 and row.cmd <= row.cmd_high + 1e-9
    random_areas = []
    for number in range(2):
        order = [HEADS[n] for n in np.random.default_rng([1 + number, 21]).permutation(21)]
        random_areas.append(areas_of({head: -rank for rank, head in enumerate(order)}))
    assert (row.cpr_random, row.cmd_random) == pytest.approx(tuple(np.mean(random_areas, axis=0)))


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_heads_of_prompts_are_ablated_by_the_corrupt_prompt(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    heads = list(all_heads(checkpoint.layout))
    masks = [[], heads[1:4], heads]
    options = LikelihoodOptions(101, 60, "truncate", "random", 1)
    drop = measure_drop(checkpoint, prompts.corpus(kind), masks, options, objective="answer", step=lambda count: None)
    drops = drop.sums["answer"].total.sum(dim=0) / drop.sums["answer"].count.sum(dim=0)
    expected = torch.zeros(3, dtype=torch.float64)
    for prompt in prompts.prompts(kind):
        eager = patching.Eager(checkpoint.model, kind, prompt, dict(checkpoint.layout))
        contexts = eager.contexts(prompt.corrupt)
        with torch.no_grad():
            for number, mask in enumerate(masks):
                changes: dict[SiteLayer, dict[int, torch.Tensor]] = {}
                for head in mask:
                    site_layer = (head.site, head.layer)
                    changes.setdefault(site_layer, {})[head.head] = contexts[site_layer][:, head.head]
                with eager.patch_inputs(changes):
                    ablated_m = eager.m(prompt.clean)
                expected[number] += (eager.m(prompt.clean) - ablated_m) / prompts.COUNT
    torch.testing.assert_close(drops, expected, atol=1e-9, rtol=0)
    assert expected[1:].abs().min() > 1e-3


# Sentences whose attention a run keeps: which are taken, and that their weights are those of the model.


LINES = ["a b c", "b " * (SHORT + 1), "c a", "b c a b"]
SIDES = {
    "bert": {"encoder-self": ("source", "source")},
    "gpt2": {"decoder-self": ("source", "source")},
    "bart": {"encoder-self": ("source", "source"), "decoder-self": ("target", "target"), "cross": ("target", "source")},
}


@pytest.mark.parametrize("kind", SIDES)
def test_the_first_short_sentences_are_kept_with_the_weights_of_every_head(kind: str, tmp_path: Path) -> None:
    checkpoint = huggingface(kind)
    texts = {"source": tmp_path / "source", "target": tmp_path / "target"}
    for path in texts.values():
        path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    corpus = open_corpus(texts["source"], target=texts["target"] if kind == "bart" else None)
    examples = short_examples(checkpoint, corpus, 2, limit=61)
    assert [example.number for example in examples] == [0, 2]  # the second line is too long
    for example in examples:
        assert set(example.weights) == set(SIDES[kind]) and set(example.texts) == set(example.subwords)
        for site, (query, key) in SIDES[kind].items():
            heads = sum(count for (layer_site, _), count in checkpoint.layout.items() if layer_site == site)
            assert example.weights[site].shape == (heads, len(example.subwords[query]), len(example.subwords[key]))
    (first, *_) = corpus
    maps = attention_maps(checkpoint, first, limit=61)
    for site in SIDES[kind]:
        assert maps.side_names(Site(site)) == SIDES[kind][site]
        weights = maps.tensors[site, 1]["weights"][0].float().numpy()
        np.testing.assert_allclose(examples[0].weights[site][-len(weights) :] / 255, weights, atol=0.003)


def test_masked_heads_are_off_and_where_all_are_long_none_is_kept(tmp_path: Path) -> None:
    checkpoint = huggingface("bert")
    (tmp_path / "text").write_text("a b c a\n", encoding="utf-8")
    corpus = open_corpus(tmp_path / "text")
    off = [HeadId(Site.ENCODER_SELF, 0, head) for head in range(3)]
    full, masked = (short_examples(checkpoint, corpus, 1, limit=61, off=heads)[0] for heads in ([], off))
    np.testing.assert_array_equal(full.weights["encoder-self"][:3], masked.weights["encoder-self"][:3])
    assert (full.weights["encoder-self"][3:] != masked.weights["encoder-self"][3:]).any()  # the next layer sees less
    assert short_examples(checkpoint, corpus, 1, limit=4) == []  # it would be cut off
