"""Contracts of every registered analysis: a new file in `analyses/` is tested here without a change."""

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
from tests.contracts.studies import OPTIONS, load_tiny, numbers
from tests.makers.figures import with_tables
from tests.makers.studies import study_of
from tests.oracles import tiny
from tests.oracles.shuffled import reverse_folds

NAMES = ANALYSES.names()
KINDS = ("bert", "gemma", "t5")
NEEDS = {"parse", "frequencies", "labels", "objective", "gradient", "contrast"}


def fits(name: str, kind: str) -> bool:
    """Whether an analysis applies to a tiny model."""
    cls, checkpoint = ANALYSES.get(name), load_tiny(kind)[0]
    sites = {site.site for site in checkpoint.attention_sites.order}
    return bool(cls.sites & sites) and cls.applies(checkpoint) is None


def explains(name: str) -> bool:
    """Whether an analysis makes passes of its own, which are slow: it gets few sentences."""
    return ANALYSES.get(name).explain is not Analysis.explain


def measured_before_gates(name: str) -> bool:
    """Whether gates of heads do not change what an analysis reads."""
    return not ANALYSES.get(name).needs & {"objective", "gradient"} and not explains(name)


CASES = [(name, kind) for name in NAMES for kind in KINDS if fits(name, kind)]
"""Every analysis with every model to which it applies."""
HEAD_COLUMNS, SUMMARIES = ["site", "layer", "head"], ("labels.", "importance")
every_analysis = pytest.mark.parametrize("name", NAMES)
ALONE = [
    (name, kinds[0] if explains(name) else kinds[index % len(kinds)])
    for index, name in enumerate(NAMES)
    if (kinds := [kind for case, kind in CASES if case == name])
]
"""Every analysis once, on the models in turn; a whole group runs on every model."""
every_alone = pytest.mark.parametrize(("name", "kind"), ALONE)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_group_once = pytest.mark.parametrize(("own_passes", "kind"), [(False, "t5"), (True, "gemma")])
both_groups = pytest.mark.parametrize("own_passes", [False, True], ids=["shared passes", "own passes"])

ModelAndText = tuple[HuggingFaceCheckpoint, Corpus]


@pytest.fixture(autouse=True)
def few_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let analyses read two batches of random sequences only."""
    monkeypatch.setattr(plan, "RANDOM_SEQUENCES", 2 * FOLDS)
    monkeypatch.setattr(plan, "RANDOM_BLOCK", 9)


def group(own_passes: bool, kind: str = "bert") -> list[type[Analysis]]:
    """The analyses for a tiny model that make passes of their own, or those that share one."""
    return [ANALYSES.get(name) for name, case_kind in CASES if case_kind == kind and explains(name) is own_passes]


def text_of(own_passes: bool, kind: str = "bert") -> ModelAndText:
    """The model and the text that a group reads."""
    return load_tiny(kind, "ablation" if own_passes else "")


def study(
    inputs: ModelAndText, analyses: list[type[Analysis]], *, tokens: int = 101, seed: int = 1, keep: bool = False
) -> Study:
    """Analyses on a tiny model."""
    return study_of(*inputs, *analyses, tokens=tokens, replicates=19, keep_special=keep, seed=seed, **OPTIONS)


@cache
def single_study(kind: str, name: str) -> Study:
    """One analysis alone, without options, computed once for several tests."""
    return study(load_tiny(kind, name), [ANALYSES.get(name)])


@cache
def joint_study(kind: str, own_passes: bool, *, order: Any = batches, tokens: int = 101, seed: int = 1) -> Study:
    """All analyses of a group in one study, with batches in an order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "batches", order)
        return study(text_of(own_passes, kind), group(own_passes, kind), tokens=tokens, seed=seed)


def assert_close(one: Study, other: Study, *, atol: float) -> None:
    first, second = numbers(one), numbers(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=atol, rtol=0, err_msg=name)
    assert one.labels == other.labels and one.remarks == other.remarks
    pd.testing.assert_frame_equal(one.heads, other.heads, check_exact=False, atol=atol, rtol=0)


def common_numbers(one: Study, other: Study) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Numbers of one analysis alone beside those in a study of several; summaries, which are of all, are left out."""
    theirs = numbers(with_tables(other, heads=one.heads[HEAD_COLUMNS].merge(other.heads, on=HEAD_COLUMNS, how="left")))
    return {name: (values, theirs[name]) for name, values in numbers(one).items() if not name.startswith(SUMMARIES)}


def assert_close_alone(one: Study, other: Study, *, atol: float) -> None:
    for name, (first, second) in common_numbers(one, other).items():
        np.testing.assert_allclose(first, second, atol=atol, rtol=0, err_msg=name)
    assert set(one.remarks) <= set(other.remarks)
    assert all(set(labels) <= set(other.labels[head]) for head, labels in one.labels.items())


def check(study: Study, checkpoint: HuggingFaceCheckpoint, corpus: Corpus) -> None:
    """One row per head; every number finite or NaN, inside its interval; labels of heads that exist."""
    rows: list[Any] = list(study.heads.itertuples())
    ids = [HeadId(Site(row.site), row.layer, row.head) for row in rows]
    layout = checkpoint.layout
    assert len(set(ids)) == len(ids) > 0
    assert all(head.head < layout[head.site, head.layer] for head in ids)
    for site, layer in {(head.site, head.layer) for head in ids}:
        assert sum(head.site is site and head.layer == layer for head in ids) == layout[site, layer]
    assert study.sentences == (corpus.count if study.sentences else 0) and study.complete
    by_name = numbers(study)
    for name, values in by_name.items():
        assert not np.isinf(values).any(), name
        if f"{name}_low" in by_name:
            low, high = by_name[f"{name}_low"], by_name[f"{name}_high"]
            has_value = ~np.isnan(values)
            if study.sentences > 1 and not name.startswith("importance_functions."):  # nor of few heads
                assert not (np.isnan(low) | np.isnan(high))[has_value].any(), name
            has_value &= ~np.isnan(low)
            assert np.isnan(low)[~has_value].all() and np.isnan(high)[~has_value].all(), name
            slack = 1e-9 * (1 + abs(values[has_value]))
            assert (low[has_value] <= values[has_value] + slack).all(), name
            assert (values[has_value] <= high[has_value] + slack).all(), name
    assert set(study.labels) <= set(ids) and all(study.labels.values())
    functions = {head: text for head, text in zip(ids, study.heads.functions, strict=True) if text}
    assert functions == {head: ";".join(labels) for head, labels in study.labels.items()}


@every_analysis
def test_says_what_it_is(name: str) -> None:
    cls = ANALYSES.get(name)
    assert cls.name == name and isinstance(cls.version, int) and cls.version >= 1
    assert cls.summary and "\n" not in cls.summary and len(cls.summary) < 100
    assert cls.__doc__ and cls.__doc__.strip()[-1] in ".)"
    assert cls.passes <= {"text", "random", "scrambled"} and cls.needs <= NEEDS and cls.sites
    signature = cls(RunOptions()).signature()
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in signature.items())
    assert not any(mark in text for text in (*signature, *signature.values()) for mark in "|\n")


def test_every_measure_has_a_title_of_its_own() -> None:
    """Titles of columns, and of numbers of two heads, are declared and unique."""
    for attribute in ("measures", "pairs"):
        measures = [measure for name in NAMES for measure in getattr(ANALYSES.get(name), attribute)]
        assert measures and [measure.name for measure in measures if not measure.title] == []
        assert not [m.title for m in measures if "_" in re.sub(r"W_[A-Z]+", "", m.title) or m.title != m.title.strip()]
        titles = {measure.name: measure.label for measure in measures}
        assert len(set(titles.values())) == len(titles)


@every_alone
def test_numbers_are_sound(name: str, kind: str) -> None:
    result = single_study(kind, name)
    check(result, *load_tiny(kind, name))
    assert result.record["signatures"][name]["m"].startswith(name.partition(".")[0])
    assert len(result.heads.columns) > 4 or result.arrays, "it measured nothing"
    names = set(columns(result.heads))
    assert names <= {measure.name for measure in ANALYSES.get(name).measures}, "columns that it does not declare"


@every_group_once
def test_special_tokens_can_be_kept(own_passes: bool, kind: str) -> None:
    check(study(text_of(own_passes, kind), group(own_passes, kind), keep=True), *text_of(own_passes, kind))


@every_alone
def test_other_analyses_do_not_matter(name: str, kind: str) -> None:
    # Gemma's norms compute in float32, whatever the model's type, and gradients go through them
    atol = 1e-6 if kind == "gemma" and ANALYSES.get(name).needs & {"objective", "gradient"} else 1e-10
    assert_close_alone(single_study(kind, name), joint_study(kind, explains(name), tokens=1), atol=atol)


@every_kind
@both_groups
def test_batches_do_not_matter(own_passes: bool, kind: str) -> None:
    single = joint_study(kind, own_passes, tokens=1)
    check(single, *text_of(own_passes, kind))
    assert_close(single, joint_study(kind, own_passes, order=reverse_folds), atol=1e-6 if kind == "gemma" else 1e-10)


@every_alone
def test_seed_decides_about_intervals(name: str, kind: str) -> None:
    one = single_study(kind, name)
    pairs = common_numbers(one, joint_study(kind, explains(name), seed=2))
    ends = [key for key in pairs if key.endswith(("_low", "_high"))]
    first = {key: values for key, (values, _) in pairs.items()}
    wide = any((first[key] != first[key.rpartition("_")[0]])[~np.isnan(first[key])].any() for key in ends)
    differs = any(not np.array_equal(*pairs[key], equal_nan=True) for key in ends)
    assert wide == differs or (ANALYSES.get(name).sampled and not wide), "without an interval only values move"
    other = [key for key in pairs.keys() - set(ends) if not np.array_equal(*pairs[key], equal_nan=True)]
    if ANALYSES.get(name).sampled:
        assert other or name == "streaming", "what is sampled follows from the seed; two steps need not tell"
    elif ANALYSES.get(name).passes == {"text"}:
        assert not other


def test_what_is_observed_is_left_alone() -> None:
    def watch(cls: Any) -> Any:
        class Watching(cls):
            def observe(self, heads: HeadBatch) -> Any:
                before = {key: value.clone() for key, value in _tensors(heads).items()}
                ratios = super().observe(heads)
                after = _tensors(heads)
                assert all(torch.equal(before[key], after[key]) for key in before), cls.name
                assert all(ratio.total.isfinite().all() for ratio in ratios.values()), cls.name
                return ratios

        return Watching

    inputs = load_tiny("t5", "ablation")
    study(inputs, [watch(cls) for cls in group(False, "t5") if cls.observe is not Analysis.observe])


def _tensors(heads: HeadBatch) -> dict[str, Tensor]:
    tensors = {key: value for key, value in vars(heads).items() if isinstance(value, Tensor)}
    for side in ("query_side", "key_side"):
        values = vars(getattr(heads, side)).items()
        tensors |= {f"{side}.{key}": value for key, value in values if isinstance(value, Tensor)}
    tensors |= {"weights": heads.weights, "visible": heads.visible}
    assert {"context", "queries", "keys", "key_side.ids"} <= set(tensors)
    return tensors


@both_groups
def test_layer_of_one_head(own_passes: bool) -> None:
    check(study(text_of(own_passes, "single"), group(own_passes)), *text_of(own_passes, "single"))


def test_gates_are_no_obstacle() -> None:
    """Contexts are those before gates: a closed head is measured as before, later layers change.

    What the model makes of a head does change when it is closed.
    """
    inputs = load_tiny("bert")
    names = [cls for cls in group(False) if measured_before_gates(cls.name)]
    with gated(inputs[0].model, [HeadId(Site.ENCODER_SELF, 1, head) for head in range(3)]):
        gated_study = study(inputs, names)
    assert_close(study(inputs, names), gated_study, atol=0)


@both_groups
def test_layers_of_different_width(own_passes: bool) -> None:
    """BERT whose second layer has two of three heads left."""
    checkpoint, corpus = tiny.checkpoint("bert", 7), text_of(own_passes)[1]
    model: Any = checkpoint.model
    attention = model.encoder.layer[1].attention
    for projection in (attention.self.query, attention.self.key, attention.self.value):
        projection.weight, projection.bias = (
            nn.Parameter(parameter[:10].detach().clone()) for parameter in (projection.weight, projection.bias)
        )
    attention.output.dense.weight = nn.Parameter(attention.output.dense.weight[:, :10].detach().clone())
    attention.self.num_attention_heads, attention.self.all_head_size = 2, 10
    result = study((checkpoint, corpus), group(own_passes))
    check(result, checkpoint, corpus)
    assert list(result.heads["head"]) == [0, 1, 2, 0, 1]


@every_group_once
def test_corpus_with_nothing_to_measure(own_passes: bool, kind: str) -> None:
    """One sentence of one word, whose relations lie inside it."""
    checkpoint, corpus = text_of(own_passes, kind)
    first = next(iter(corpus))
    lonely = Corpus("one", 1, "0" * 40, lambda: iter([first]), corpus.has_target, corpus.has_parses)
    check(study((checkpoint, lonely), group(own_passes, kind)), checkpoint, lonely)
