"""Refits that are anchored to other text, and the compensation that is taken: against plain refits and brute force."""

from collections import defaultdict
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import headscope as hs
from headscope.data.corpus import Corpus, open_corpus
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId
from headscope.model.fast_products import FastProducts
from headscope.model.taps import masked
from headscope.pruning.closed_form.anchors import language_of, random_text, second_text, shuffled_text
from headscope.pruning.closed_form.bench import SEARCH_LINES, RefitBench
from headscope.pruning.closed_form.compensate import (
    CalibrationText,
    Candidate,
    Choice,
    RefittedCopy,
    best_candidate,
    compensate,
    share,
    split_text,
)
from headscope.pruning.closed_form.damage import DamageMeter, Performance
from headscope.pruning.closed_form.moments import Moments
from headscope.pruning.closed_form.output_projections import output_projections
from headscope.pruning.options.shared import Refit
from tests.oracles import closed_form as oracle
from tests.oracles import speakers

pytestmark = pytest.mark.slow

BACKEND: Any = torch.backends.mkldnn
REMOVED = {
    "bert": "encoder-self.0.1,encoder-self.1.0",
    "gpt2": "decoder-self.0.2,decoder-self.1.1",
    "marian": "encoder-self.0.2,decoder-self.0.1,cross.1.4",
}


def mixed_moments(checkpoint: Checkpoint, corpus: Corpus, anchor: Any, *, moments: Moments | None = None) -> Moments:
    """The moments of a text with an anchor."""
    by_anchor = {} if moments is None else {"": moments}
    bench = RefitBench(checkpoint, CalibrationText(corpus, corpus), Refit(), moments=by_anchor)
    return bench.anchored_moments(Refit(anchor=anchor).anchor)


@cache
def reverse_text(kind: str) -> Corpus:
    """The text with the words of every line in reverse order: as many tokens, other contexts."""

    def reverse(line: str | None) -> Any:
        return line and " ".join(reversed(line.split()))

    lines = [pair._replace(source=reverse(pair.source), target=reverse(pair.target)) for pair in text(kind)]
    return Corpus("backwards", len(lines), "1" * 40, lambda: iter(lines), has_target=text(kind).has_target)


@cache
def text(kind: str) -> Corpus:
    return speakers.corpus(kind, count=23)


def sides(corpus: Corpus) -> Any:
    """A text as `anchor` takes it."""
    source = [sentence.source for sentence in corpus]
    return (source, [str(sentence.target) for sentence in corpus]) if corpus.has_target else source


@pytest.mark.parametrize("kind", ["bert", "llama", "marian"])
def test_anchored_moments_are_weighted_means_over_tokens(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    sentences = list(reverse_text(kind))[:5]
    moments = mixed_moments(
        checkpoint, text(kind), sides(Corpus("few", 5, "", lambda: iter(sentences), has_target=text(kind).has_target))
    )
    first, second = (oracle.contexts(kind, checkpoint, part) for part in (text(kind), sentences))
    for projection in output_projections(checkpoint):
        sums = moments.of(projection)
        assert sums is not None
        rows = [torch.from_numpy(part[projection.site_layers[0]]) for part in (first, second)]
        mean = torch.stack([part.mean(dim=0) for part in rows]).mean(dim=0)
        products = torch.stack([part.T @ part / len(part) for part in rows]).mean(dim=0)
        assert torch.allclose(sums.mean, mean, atol=1e-12) and torch.allclose(sums.second, products, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "marian"])
def test_auto_takes_what_brute_force_finds(kind: str) -> None:
    checkpoint, heads = speakers.checkpoint(kind), [HeadId.parse(name) for name in REMOVED[kind].split(",")]
    parts = split_text(text(kind), None, sentences=100)
    other = speakers.corpus(kind, count=7, seed=5)
    bench = RefitBench(checkpoint, parts, Refit(method="auto", check=sides(other)))
    compensation = bench.compensation(heads)
    meters = [DamageMeter(checkpoint, corpus) for corpus in (parts.held_out, other)]
    with masked(checkpoint.model, heads):
        baselines = [meter.measure().damage for meter in meters]
    harms = {"none": 1.0}
    candidates = bench.refit_candidates(heads)
    steps = ("", "-strength=0.5", "-strength=0.25")
    names = [f"least-squares{anchor}{step}" for anchor in ("", "-mixed") for step in steps]
    assert [refit.name for refit in candidates if refit.method != "mean"] == names
    for options in candidates:
        moments = mixed_moments(checkpoint, parts.calibration, options.anchor)
        model = RefittedCopy.of(checkpoint, compensate(checkpoint, moments, heads, options)).model
        damages = [meter.measure(model).damage for meter in meters]
        name = Candidate(options, performance(0), performance(0)).name
        harms[name] = max(share(damage, baseline) for damage, baseline in zip(damages, baselines, strict=True))
    assert compensation.choice is not None and len(compensation.choice.candidates) == len(harms)
    assert compensation.choice.best.name == min(harms, key=lambda name: harms[name])
    for candidate in compensation.choice.candidates:
        assert max(candidate.harms(compensation.choice.masked)) == pytest.approx(harms[candidate.name], rel=1e-6)
    assert all(harm <= 1 for harm in compensation.choice.best.harms(compensation.choice.masked))
    assert compensation.options.method == compensation.choice.best.options.method != "auto"
    held_out = compensation.choice.best.held_out
    assert meters[0].measure(compensation.checkpoint.model).damage == pytest.approx(held_out.damage, rel=1e-9)


def test_auto_refits_language_models_half_the_way_or_less() -> None:
    llama = speakers.checkpoint("llama")
    bench = RefitBench(llama, split_text(text("llama"), None, sentences=100), Refit(method="auto"))
    candidates = bench.refit_candidates([HeadId.parse("decoder-self.0.0")])
    names = [options.name for options in candidates if options.method != "mean"]
    assert names == ["least-squares-strength=0.5", "least-squares-strength=0.25"]


@pytest.mark.parametrize(("kind", "lines"), [("llama", [4, 19]), ("bert", [4, 7]), ("marian", [4, 7])])
def test_searches_measure_language_models_on_their_own_text_and_others_on_a_second(kind: str, lines: list[int]) -> None:
    checkpoint, other = speakers.checkpoint(kind), speakers.corpus(kind, count=7, seed=5)
    parts = split_text(text(kind), None, sentences=100)
    bench = RefitBench(checkpoint, parts, Refit(method="auto", check=sides(other)))
    meters = bench.search_meters()
    assert [meter.corpus.count for meter in meters] == lines
    assert {meter.objective.name for meter in meters} == {"divergence"}


def test_searches_measure_on_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.pruning.closed_form.bench.SEARCH_SUBWORDS", 3 * SEARCH_LINES)
    bench = RefitBench(speakers.checkpoint("llama"), split_text(text("llama"), None, sentences=100), Refit())
    held_out, _ = bench.search_meters()
    widths = [[batch.source.ids.shape[1] for batch, _ in meter.intact] for meter in (held_out, bench.held_out)]
    assert 3 < max(widths[0]) == max(widths[1])


class Precisions(TorchFunctionMode):
    """The precision of products in which each function ran."""

    def __init__(self) -> None:
        self.of = defaultdict[Any, set[str]](set)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func].add(BACKEND.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


def test_searches_round_products_with_weights_and_reports_do_not() -> None:
    exact, parts = BACKEND.matmul.fp32_precision, split_text(text("llama"), None, sentences=100)
    bench = RefitBench(speakers.checkpoint("llama"), parts, Refit())
    for meter in [*(meters := bench.search_meters()), bench.held_out]:
        with Precisions() as precisions:
            meter.measure()
        assert precisions.of[linear] == {"bf16" if meter in meters else exact}
        assert precisions.of[scaled_dot_product_attention] == {exact}
    with FastProducts(), pytest.raises(RuntimeError):
        linear(torch.ones(2, 3), torch.ones(2, 5))
    assert BACKEND.matmul.fp32_precision == exact != "bf16"


def performance(damage: float) -> Performance:
    return Performance("loss", 2 + damage, damage, 3, 7)


def candidate(method: Any, held_out: float, check: float) -> Candidate:
    return Candidate(Refit(method=method), performance(held_out), performance(check))


def test_the_least_harm_on_the_worse_text() -> None:
    base = candidate("none", 0.4, 0.2)
    worse, better = candidate("least-squares", 0.1, 0.3), candidate("mean", 0.36, 0.18)
    assert best_candidate([base, worse], base) is base and best_candidate([base, worse, better], base) is better
    assert best_candidate([base, candidate("mean", 0.5, 0.01)], base) is base
    assert "0.3" not in Choice([base, better], better, "t").warning == ""
    warning = Choice([base, worse], worse, "t").warning
    assert "worse than masking on other text: loss 2.3000 against 2.2000 on 3 sentences (t)" in warning
    assert share(0.0, 0.0) == share(-0.2, -0.1) == share(-0.05, -0.1) == 0 and share(1e-9, 0.0) > 1
    gain = candidate("none", 0.4, -0.02)
    small_gain, harm = candidate("least-squares", 0.1, -0.01), candidate("least-squares", 0.05, 0.001)
    assert best_candidate([gain, harm], gain) is gain, "a loss on other text where masking is none"
    assert best_candidate([gain, small_gain, harm], gain) is small_gain, "less of a gain on one text is no harm"
    assert Choice([gain, small_gain], small_gain, "t").warning == "" != Choice([gain, harm], harm, "t").warning
    gains = [candidate("none", -0.1, -0.02), candidate("mean", -0.2, -0.01), candidate("least-squares", -0.01, -0.01)]
    assert best_candidate(gains, gains[0]) is gains[1]


def test_cheap_texts() -> None:
    checkpoint, corpus = speakers.checkpoint("marian"), text("marian")
    word_shuffle = shuffled_text(checkpoint, corpus)
    for side in ("source", "target"):
        before, after = ([getattr(line, side).split() for line in part] for part in (corpus, word_shuffle))
        assert list(map(len, before)) == list(map(len, after)) and before != after
        assert sorted(chain(*before)) == sorted(chain(*after))
    assert [len(line.source) for line in shuffled_text(checkpoint, open_corpus(["abcdef", "mno"]))] == [6, 3]
    draws = random_text(checkpoint, corpus)
    assert draws.count == corpus.count and draws.has_target and list(draws) == list(random_text(checkpoint, corpus))
    assert list(draws) != list(random_text(checkpoint, corpus, seed=2)) and all(line.target for line in draws)


def test_the_second_text() -> None:
    captions = {side: hs.assets.captions(side).read_text(encoding="utf-8").splitlines() for side in ("en", "de")}
    assert {side: language_of(lines) for side, lines in captions.items()} == {"en": "en", "de": "de"}
    assert language_of(["Un chien court sur la plage", "Il y a des gens dans la rue"]) is None
    tiny = speakers.checkpoint("bert")
    assert second_text(tiny, text("bert"))[1] is False
    checkpoint = open_checkpoint(str(hs.assets.trained_model()), device="cpu")
    parallel = open_corpus(captions["en"], target=captions["de"])
    sample, is_predictable = second_text(checkpoint, parallel)
    assert is_predictable and sample.name == "headscope's varied text" and sample.has_target and sample.count == 120
    check_text, _ = second_text(checkpoint, parallel, (captions["de"], captions["en"]))
    assert check_text.count == 240
    with pytest.raises(ConfigError, match="--check"):
        second_text(checkpoint, parallel, (captions["en"],))
