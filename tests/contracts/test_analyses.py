"""What holds for every registered analysis: a new file in `analyses/` is tried here without a change."""

import re
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from headscope.bootstrap import FOLDS
from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.engine import plan
from headscope.engine.base import ANALYSES, Analysis, HeadBatch, RunOptions
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.heads import HeadId, Site
from headscope.model.taps import gated
from headscope.pruning.scores_file import columns
from headscope.results.study import Study
from tests.contracts.studies import OPTIONS, made, numbers
from tests.makers.figures import with_tables
from tests.makers.studies import study_of
from tests.oracles import tiny
from tests.oracles.shuffled import reverse_folds

NAMES = ANALYSES.names()
KINDS = ("bert", "gemma", "t5")
NEEDS = {"parse", "frequencies", "labels", "objective", "gradient", "contrast"}


def fits(name: str, kind: str) -> bool:
    """Whether a tiny model is one that an analysis is for."""
    cls, checkpoint = ANALYSES.get(name), made(kind)[0]
    sites = {place.site for place in checkpoint.attention_sites.order}
    return bool(cls.sites & sites) and cls.applies(checkpoint) is None


def explains(name: str) -> bool:
    """Whether an analysis makes passes of its own, which take their time: it gets few sentences."""
    return ANALYSES.get(name).explain is not Analysis.explain


def measured_before_gates(name: str) -> bool:
    """Whether an analysis does not explain what gates leave."""
    return not ANALYSES.get(name).needs & {"objective", "gradient"} and not explains(name)


CASES = [(name, kind) for name in NAMES for kind in KINDS if fits(name, kind)]
"""What there is of analyses and models: what is none is not collected."""
PLACE, SUMMARIES = ["site", "layer", "head"], ("labels.", "importance")
every_analysis = pytest.mark.parametrize("name", NAMES)
ALONE = [
    (name, kinds[0] if explains(name) else kinds[place % len(kinds)])
    for place, name in enumerate(NAMES)
    if (kinds := [kind for of, kind in CASES if of == name])
]
"""Every analysis once, on the models in turn; all of a group together are tried on every model."""
every_alone = pytest.mark.parametrize(("name", "kind"), ALONE)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_group_once = pytest.mark.parametrize(("own", "kind"), [(False, "t5"), (True, "gemma")])
both_groups = pytest.mark.parametrize("own", [False, True], ids=["shared passes", "own passes"])

Studied = tuple[HuggingFaceCheckpoint, Corpus]


@pytest.fixture(autouse=True)
def few_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the random sequences that analyses read two batches are enough."""
    monkeypatch.setattr(plan, "RANDOM_SEQUENCES", 2 * FOLDS)
    monkeypatch.setattr(plan, "RANDOM_BLOCK", 9)


def group(own: bool, kind: str = "bert") -> list[type[Analysis]]:
    """The analyses for a tiny model that make passes of their own, or those that share one."""
    return [ANALYSES.get(name) for name, of in CASES if of == kind and explains(name) is own]


def text_of(own: bool, kind: str = "bert") -> Studied:
    """The model and the text that a group reads."""
    return made(kind, "ablation" if own else "")


def study(
    its: Studied, analyses: list[type[Analysis]], *, tokens: int = 101, seed: int = 1, keep: bool = False
) -> Study:
    """Analyses on a tiny model."""
    return study_of(*its, *analyses, tokens=tokens, replicates=19, keep_special=keep, seed=seed, **OPTIONS)


@cache
def usual(kind: str, name: str) -> Study:
    """One analysis alone, without options, made once for several tests."""
    return study(made(kind, name), [ANALYSES.get(name)])


@cache
def together(kind: str, own: bool, *, order: Any = batches, tokens: int = 101, seed: int = 1) -> Study:
    """All analyses of a group in one study, with batches in an order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "batches", order)
        return study(text_of(own, kind), group(own, kind), tokens=tokens, seed=seed)


def same_numbers(one: Study, other: Study, *, within: float) -> None:
    first, second = numbers(one), numbers(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=within, rtol=0, err_msg=name)
    assert one.labels == other.labels and one.remarks == other.remarks
    pd.testing.assert_frame_equal(one.heads, other.heads, check_exact=False, atol=within, rtol=0)


def shared(one: Study, other: Study) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What one analysis alone found, and the same in a study of several; summaries are of all and left out."""
    theirs = numbers(with_tables(other, heads=one.heads[PLACE].merge(other.heads, on=PLACE, how="left")))
    return {name: (found, theirs[name]) for name, found in numbers(one).items() if not name.startswith(SUMMARIES)}


def same_alone(one: Study, other: Study, *, within: float) -> None:
    for name, (first, second) in shared(one, other).items():
        np.testing.assert_allclose(first, second, atol=within, rtol=0, err_msg=name)
    assert set(one.remarks) <= set(other.remarks)
    assert all(set(labels) <= set(other.labels[head]) for head, labels in one.labels.items())


def check(its: Study, checkpoint: HuggingFaceCheckpoint, corpus: Corpus) -> None:
    """One row per head; every number finite or NaN, inside its interval; labels of heads that exist."""
    rows: list[Any] = list(its.heads.itertuples())
    ids = [HeadId(Site(row.site), row.layer, row.head) for row in rows]
    layout = checkpoint.layout
    assert len(set(ids)) == len(ids) > 0
    assert all(head.head < layout[head.site, head.layer] for head in ids)
    for site, layer in {(head.site, head.layer) for head in ids}:
        assert sum(head.site is site and head.layer == layer for head in ids) == layout[site, layer]
    assert its.sentences == (corpus.count if its.sentences else 0) and its.complete
    found = numbers(its)
    for name, values in found.items():
        assert not np.isinf(values).any(), name
        if f"{name}_low" in found:
            low, high = found[f"{name}_low"], found[f"{name}_high"]
            known = ~np.isnan(values)
            if its.sentences > 1 and not name.startswith("importance_functions."):  # nor of few heads
                assert not (np.isnan(low) | np.isnan(high))[known].any(), name
            known &= ~np.isnan(low)
            assert np.isnan(low)[~known].all() and np.isnan(high)[~known].all(), name
            slack = 1e-9 * (1 + abs(values[known]))
            assert (low[known] <= values[known] + slack).all(), name
            assert (values[known] <= high[known] + slack).all(), name
    assert set(its.labels) <= set(ids) and all(its.labels.values())
    written = {head: text for head, text in zip(ids, its.heads.functions, strict=True) if text}
    assert written == {head: ";".join(labels) for head, labels in its.labels.items()}


@every_analysis
def test_says_what_it_is(name: str) -> None:
    cls = ANALYSES.get(name)
    assert cls.name == name and isinstance(cls.version, int) and cls.version >= 1
    assert cls.summary and "\n" not in cls.summary and len(cls.summary) < 100
    assert cls.__doc__ and cls.__doc__.strip()[-1] in ".)"
    assert cls.passes <= {"text", "random", "scrambled"} and cls.needs <= NEEDS and cls.sites
    mine = cls(RunOptions()).signature()
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in mine.items())
    assert not any(mark in text for text in (*mine, *mine.values()) for mark in "|\n")


def test_every_measure_has_a_title_of_its_own() -> None:
    """What figures, pages and tables call a column, or a number of two heads, is declared and told from the others."""
    for attribute in ("measures", "pairs"):
        declared = [measure for name in NAMES for measure in getattr(ANALYSES.get(name), attribute)]
        assert declared and [measure.name for measure in declared if not measure.title] == []
        assert not [m.title for m in declared if "_" in re.sub(r"W_[A-Z]+", "", m.title) or m.title != m.title.strip()]
        titles = {measure.name: measure.label for measure in declared}
        assert len(set(titles.values())) == len(titles)


@every_alone
def test_numbers_are_sound(name: str, kind: str) -> None:
    its = usual(kind, name)
    check(its, *made(kind, name))
    assert its.record["signatures"][name]["m"].startswith(name.partition(".")[0])
    assert len(its.heads.columns) > 4 or its.arrays, "it measured nothing"
    measured = set(columns(its.heads))
    assert measured <= {measure.name for measure in ANALYSES.get(name).measures}, "columns that it does not declare"


@every_group_once
def test_special_tokens_can_be_kept(own: bool, kind: str) -> None:
    check(study(text_of(own, kind), group(own, kind), keep=True), *text_of(own, kind))


@every_alone
def test_other_analyses_do_not_matter(name: str, kind: str) -> None:
    # Gemma's norms compute in float32, whatever the model's type, and gradients go through them
    within = 1e-6 if kind == "gemma" and ANALYSES.get(name).needs & {"objective", "gradient"} else 1e-10
    same_alone(usual(kind, name), together(kind, explains(name), tokens=1), within=within)


@every_kind
@both_groups
def test_batches_do_not_matter(own: bool, kind: str) -> None:
    single = together(kind, own, tokens=1)
    check(single, *text_of(own, kind))
    same_numbers(single, together(kind, own, order=reverse_folds), within=1e-6 if kind == "gemma" else 1e-10)


@every_alone
def test_seed_decides_about_intervals(name: str, kind: str) -> None:
    one = usual(kind, name)
    both = shared(one, together(kind, explains(name), seed=2))
    ends = [key for key in both if key.endswith(("_low", "_high"))]
    first = {key: found for key, (found, _) in both.items()}
    wide = any((first[key] != first[key.rpartition("_")[0]])[~np.isnan(first[key])].any() for key in ends)
    moved = any(not np.array_equal(*both[key], equal_nan=True) for key in ends)
    assert wide == moved or (ANALYSES.get(name).sampled and not wide), "without an interval only values move"
    other = [key for key in both.keys() - set(ends) if not np.array_equal(*both[key], equal_nan=True)]
    if ANALYSES.get(name).sampled:
        assert other or name == "streaming", "what is sampled follows from the seed; two steps need not tell"
    elif ANALYSES.get(name).passes == {"text"}:
        assert not other


def test_what_is_observed_is_left_alone() -> None:
    def watched(cls: Any) -> Any:
        class Watched(cls):
            def observe(self, heads: HeadBatch) -> Any:
                before = {key: value.clone() for key, value in _tensors(heads).items()}
                found = super().observe(heads)
                after = _tensors(heads)
                assert all(torch.equal(before[key], after[key]) for key in before), cls.name
                assert all(ratio.total.isfinite().all() for ratio in found.values()), cls.name
                return found

        return Watched

    few = made("t5", "ablation")
    study(few, [watched(cls) for cls in group(False, "t5") if cls.observe is not Analysis.observe])


def _tensors(heads: HeadBatch) -> dict[str, Tensor]:
    found = {key: value for key, value in vars(heads).items() if isinstance(value, Tensor)}
    for side in ("query_side", "key_side"):
        values = vars(getattr(heads, side)).items()
        found |= {f"{side}.{key}": value for key, value in values if isinstance(value, Tensor)}
    found |= {"weights": heads.weights, "visible": heads.visible}
    assert {"context", "queries", "keys", "key_side.ids"} <= set(found)
    return found


@both_groups
def test_layer_of_one_head(own: bool) -> None:
    check(study(text_of(own, "single"), group(own)), *text_of(own, "single"))


def test_gates_are_no_obstacle() -> None:
    """Contexts are those before gates: a closed head is measured as before, later layers change.

    What the model makes of a head does change when it is closed.
    """
    its = made("bert")
    names = [cls for cls in group(False) if measured_before_gates(cls.name)]
    with gated(its[0].model, [HeadId(Site.ENCODER_SELF, 1, head) for head in range(3)]):
        found = study(its, names)
    same_numbers(study(its, names), found, within=0)


@both_groups
def test_layers_of_different_width(own: bool) -> None:
    """BERT whose second layer has two of three heads left."""
    checkpoint, corpus = tiny.checkpoint("bert", 7), text_of(own)[1]
    model: Any = checkpoint.model
    attention = model.encoder.layer[1].attention
    for projection in (attention.self.query, attention.self.key, attention.self.value):
        projection.weight, projection.bias = (
            nn.Parameter(each[:10].detach().clone()) for each in (projection.weight, projection.bias)
        )
    attention.output.dense.weight = nn.Parameter(attention.output.dense.weight[:, :10].detach().clone())
    attention.self.num_attention_heads, attention.self.all_head_size = 2, 10
    its = study((checkpoint, corpus), group(own))
    check(its, checkpoint, corpus)
    assert list(its.heads["head"]) == [0, 1, 2, 0, 1]


@every_group_once
def test_corpus_with_nothing_to_measure(own: bool, kind: str) -> None:
    """One sentence of one word, whose relations lie inside it."""
    checkpoint, corpus = text_of(own, kind)
    first = next(iter(corpus))
    lonely = Corpus("one", 1, "0" * 40, lambda: iter([first]), corpus.has_target, corpus.has_parses)
    check(study((checkpoint, lonely), group(own, kind)), checkpoint, lonely)
