"""`prune rank --allocate uniform`: equal numbers of heads in every layer of a stack, and models made of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headscope as hs
from headscope.config.commands import TranslateOptions
from headscope.errors import ConfigError
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.formats.base import Checkpoint
from headscope.formats.size import count_flops, measure_size
from headscope.heads import HeadId, Site
from headscope.model.forward import ModelInputs, outputs
from headscope.model.interface import through_attend
from headscope.model.native.beams import STORY_SEARCH, SearchConfig
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import frozen_parameters
from headscope.pruning.gate_layout import GateLayout, unit_remarks
from headscope.pruning.ranking.ranking import check_keep, rank_heads, uniform_counts, uniform_keep
from headscope.pruning.removal.verify import Timing, speedup_bound, time_interleaved
from tests.makers import decoders, wrappers
from tests.makers.translators import WORDS, build_translator
from tests.oracles import checkpoints


def scores_of(gates: GateLayout) -> dict[HeadId, float]:
    noise = torch.Generator().manual_seed(3)
    heads = [head for unit in gates.units for head in unit] + list(gates.protected_heads)
    return dict(zip(sorted(heads), torch.rand(len(heads), generator=noise).tolist(), strict=True))


def test_every_layer_of_a_stack_keeps_its_best_in_equal_numbers(pair: hs.Model) -> None:
    gates = GateLayout(pair.checkpoint.attention_sites)
    scores, successes = scores_of(gates), 0
    for keep in range(1, gates.heads + 1):
        try:
            counts = uniform_counts(gates, keep)
        except ConfigError:
            continue
        successes += 1
        removed = set(gates.closed_heads(rank_heads(gates, keep, lambda _: scores, allocation="uniform").stays_open))
        assert len(removed) == gates.heads - keep
        for (site, layer), count in gates.counts.items():
            heads = [HeadId(site, layer, head) for head in range(count)]
            left = set(heads) - removed
            assert len(left) == counts["encoder" if site is Site.ENCODER_SELF else "decoder"]
            assert left == set(sorted(heads, key=lambda head: -scores[head])[: len(left)])
    assert successes >= 3


def test_shares_of_the_stacks_are_as_equal_as_can_be(pair: hs.Model) -> None:
    gates = GateLayout(pair.checkpoint.attention_sites)
    encoder = sum(site is Site.ENCODER_SELF for site, _ in gates.counts)
    layers = {"encoder": encoder, "decoder": len(gates.counts) - encoder}
    for fraction in (0.0, 0.4, 0.7, 1.0):
        counts = uniform_counts(gates, uniform_keep(gates, fraction))
        assert sum(counts[name] * layers[name] for name in layers) == uniform_keep(gates, fraction)
        assert all(count >= 1 for count in counts.values())
    for keep in range(1, gates.heads + 1):
        pairs = product(range(1, 9), repeat=2)
        pairs_of_counts = [(e, d) for e, d in pairs if e * layers["encoder"] + d * layers["decoder"] == keep]
        if pairs_of_counts:
            counts = uniform_counts(gates, keep)
            assert abs(counts["encoder"] - counts["decoder"]) == min(abs(e - d) for e, d in pairs_of_counts)


def test_groups_and_protected_heads_are_counted() -> None:
    sites = hs.load(decoders.decoder("llama")).checkpoint.attention_sites
    gates = GateLayout(sites, protect=[HeadId(Site.DECODER_SELF, 1, 5)])
    scores = scores_of(gates)
    kept = gates.remaining_heads(
        gates.closed_heads(rank_heads(gates, 12, lambda _: scores, allocation="uniform").stays_open)
    )
    assert [sum(head.layer == layer for head in kept) for layer in range(3)] == [4, 4, 4]
    assert set(kept) >= {HeadId(Site.DECODER_SELF, 1, 4), HeadId(Site.DECODER_SELF, 1, 5)}
    with_empty_layers = GateLayout(checkpoints.small().attention_sites)
    with pytest.raises(ConfigError, match="decoder"):
        uniform_keep(with_empty_layers, 0.5)
    with pytest.raises(ConfigError, match=r"--keep 10.*6 or 12"):
        uniform_counts(gates, 10)


def test_a_layer_whose_heads_are_all_protected_keeps_them() -> None:
    sites = hs.load(decoders.decoder("llama")).checkpoint.attention_sites
    gates = GateLayout(sites, protect=[HeadId(Site.DECODER_SELF, 0, head) for head in range(8)])
    with pytest.raises(ConfigError, match=r"--keep 12.*keep 24$"):  # it left 8, 4 and 4, which are 16
        rank_heads(gates, 12, lambda _: scores_of(gates), allocation="uniform")
    assert bool(rank_heads(gates, 24, lambda _: scores_of(gates), allocation="uniform").stays_open.all())


# `--allocate per-group`: as many query heads in every group of a layer, layers as many as their scores say.


SELF = Site.DECODER_SELF


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load(decoders.decoder("qwen3", num_hidden_layers=2, num_key_value_heads=2))


def per_group(gates: GateLayout, removed: list[HeadId]) -> list[list[int]]:
    """How many heads every group of every layer keeps."""
    kept = set(gates.remaining_heads(removed))
    return [[sum(HeadId(SELF, layer, 4 * group + h) in kept for h in range(4)) for group in (0, 1)] for layer in (0, 1)]


@pytest.mark.parametrize(("steps", "protect"), [(1, ()), (3, ()), (1, (HeadId(SELF, 0, 1),))])
def test_what_goes_is_the_best_that_leaves_groups_of_one_size(
    model: hs.Model, steps: int, protect: tuple[HeadId, ...]
) -> None:
    """Against all ways to keep as many of each group: none keeps a larger sum of scores."""
    gates = GateLayout(model.checkpoint.attention_sites, whole_groups=False, protect=protect)
    scores = scores_of(gates)

    def best_of(layer: int, group: int, n: int) -> float:
        heads = [HeadId(SELF, layer, 4 * group + h) for h in range(4)]
        subsets = [subset for subset in combinations(heads, n) if {*protect} & {*heads} <= {*subset}]
        return max((sum(scores[head] for head in subset) for subset in subsets), default=-math.inf)

    for keep in range(2 * len(protect), 17, 2):
        removed = gates.closed_heads(
            rank_heads(gates, keep, lambda _: scores, steps=steps, allocation="per-group").stays_open
        )
        assert len(removed) == 16 - keep
        assert all(len(set(of_layer)) == 1 for of_layer in per_group(gates, removed))
        plan_removal(model.checkpoint.attention_sites, removed or [HeadId(SELF, 0, h) for h in range(8)])
        best = max(
            sum(best_of(layer, group, n) for layer, n in enumerate((first, keep // 2 - first)) for group in (0, 1))
            for first in range(5)
            if 0 <= keep // 2 - first <= 4
        )
        assert sum(scores[head] for head in gates.remaining_heads(removed)) == pytest.approx(best)


def test_where_only_whole_layers_can_go_that_is_said_and_shares_of_them_are_refused() -> None:
    """A share of every layer emptied the last layers, whatever their scores."""
    sites = hs.load(decoders.decoder("qwen3", num_key_value_heads=1)).checkpoint.attention_sites
    gates = GateLayout(sites)
    assert gates.whole_layers and "--allocate per-group" in unit_remarks(gates)[0]
    with pytest.raises(ConfigError, match=r"--allocate per-layer: heads of a layer.*global, or per-group"):
        check_keep(gates, 16, "per-layer")
    check_keep(gates, 24, "per-layer")
    for single in (GateLayout(sites, whole_groups=False), GateLayout(checkpoints.small().attention_sites)):
        assert not unit_remarks(single)
    two_groups = hs.load(decoders.decoder("qwen3", num_key_value_heads=2)).checkpoint.attention_sites
    assert not GateLayout(two_groups).whole_layers
    assert not GateLayout(two_groups, protect=[HeadId(SELF, layer, 0) for layer in range(3)]).whole_layers


# How times are taken: in turns, with outputs of one length, and with their spread.


def test_models_take_turns_and_rounds_say_how_far_they_differ() -> None:
    seconds = {"before": iter([0.5, 4.0, 9.0, 6.0]), "after": iter([0.5, 2.0, 3.0, 4.0])}
    calls: list[str] = []

    def timer(name: str) -> Callable[[], float]:
        def seconds_of_call() -> float:
            calls.append(name)
            return next(seconds[name])

        return seconds_of_call

    times = time_interleaved("forward", 1, timer("before"), timer("after"), 3)
    assert calls == ["before", "after", "before", "after", "after", "before", "before", "after"]
    assert (times.before, times.after, times.speedup) == (6.0, 3.0, 2.0) and (times.least, times.most) == (1.5, 3.0)


@pytest.mark.parametrize("name", ["native", "bert", "gpt2", "bart"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Also by module: the operations within attention, without those around it."""
    checkpoint: Checkpoint = checkpoints.small() if name == "native" else checkpoints.huggingface(name)
    model, (batch, *_) = checkpoint.model, read_input_texts(checkpoint, None, None, sentences=4).feeds
    with through_attend(model), frozen_parameters(model), FlopCounterMode(display=False) as counter:
        outputs(model, batch)
    flops, counts = count_flops(checkpoint, batch), counter.get_flop_counts()
    attention = [name for name, part in model.named_modules() if id(part) in checkpoint.attention_sites.calls]
    assert flops["all"] == counter.get_total_flops() > flops["attention"] > 0
    assert flops["attention"] == sum(sum(counts[f"{type(model).__name__}.{name}"].values()) for name in attention)


def test_what_counting_allows_and_what_is_left() -> None:
    """By hand for a Llama: 2 FLOPs per multiplication and addition, three matrices in a feed-forward block."""
    model = decoders.decoder("llama", tie_word_embeddings=False)
    checkpoint = wrappers.hugging_face(model)
    ids = torch.ones(2, 7, dtype=torch.long)
    data = InputTexts((), "random", (ModelInputs({"input_ids": ids}, None),))
    intact = measure_size(checkpoint, data.feeds)
    d, h, g, k, f, v, layers = 64, 8, 4, 16, 96, decoders.VOCABULARY, 3
    scores = 2 * 2 * (2 * h * 7 * 7 * k)  # of both products of weights and states, of two texts
    assert intact.attention_flops == layers * (14 * 2 * d * (2 * h * k + 2 * g * k) + scores)
    assert intact.output_flops == 14 * 2 * d * v
    assert intact.flops == intact.attention_flops + intact.output_flops + layers * 14 * 2 * 3 * d * f
    assert intact.read == intact.bytes - 4 * v * d  # rows of the input embedding

    separate, tied = (measure_size(build_translator(tie_output=tie), ()) for tie in (False, True))
    assert separate.read == separate.bytes - 4 * len(WORDS) * 12 and tied.read == tied.bytes

    smaller = replace(intact, flops=intact.flops // 2, read=intact.read * 3 // 4, cache=intact.cache // 4)
    forward, search = (Timing(name, 8, 1.0, 1.0, 1.0) for name in ("forward", "beam search"))
    assert speedup_bound(forward, intact, smaller) == pytest.approx(2) == speedup_bound(search, intact, smaller)
    step = replace(forward, what="decoding", tokens=3, context=11)
    bytes_read = [size.read + 8 * 11 * size.cache for size in (intact, smaller)]
    assert speedup_bound(step, intact, smaller) == pytest.approx(bytes_read[0] / bytes_read[1])


@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
def test_translations_of_a_native_model_have_the_length_that_is_forced(rule: str) -> None:
    checkpoint = checkpoints.small()
    checkpoint.search = SearchConfig() if rule == "fairseq" else STORY_SEARCH
    translations = checkpoint.translations(["a b c", "d", "e f g a b c d e"], TranslateOptions(beam=2, exact=7))
    assert {len(best[0].text.split()) for best in translations} == {7}
