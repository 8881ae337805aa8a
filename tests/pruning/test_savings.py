"""How times are taken: in turns, with outputs of one length, and with their spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headscope.config.small import TranslateOptions
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.size import flops, size
from headscope.model.forward import ModelInputs, outputs
from headscope.model.interface import through_attend
from headscope.model.native.beams import SearchConfig
from headscope.model.taps import frozen_parameters
from headscope.pruning.model_inputs import InputTexts, texts
from headscope.pruning.removal.verify import Timing, speedup_bound, time_interleaved
from headscope.results.removal import flops_breakdown
from tests.makers import decoders
from tests.makers.translators import WORDS, trained_here
from tests.oracles import checkpoints


def test_models_take_turns_and_rounds_say_how_far_they_differ() -> None:
    seconds = {"before": iter([4.0, 9.0, 6.0]), "after": iter([2.0, 3.0, 4.0])}
    asked: list[str] = []

    def took(which: str) -> Callable[[], float]:
        def answer() -> float:
            asked.append(which)
            return next(seconds[which])

        return answer

    found = time_interleaved("forward", 1, took("before"), took("after"), 3)
    assert asked == ["before", "after", "after", "before", "before", "after"]
    assert (found.before, found.after, found.speedup) == (6.0, 3.0, 2.0) and (found.least, found.most) == (1.5, 3.0)


@pytest.mark.parametrize("name", ["native", "bert", "gpt2", "bart"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Also of modules: what lies within attention, and nothing of what surrounds it."""
    made: Checkpoint = checkpoints.small() if name == "native" else checkpoints.hugging(name)
    model, (batch, *_) = made.model, texts(made, None, None, sentences=4).feeds
    with through_attend(model), frozen_parameters(model), FlopCounterMode(display=False) as counter:
        outputs(model, batch)
    found, counted = flops(made, batch), counter.get_flop_counts()
    attention = [name for name, part in model.named_modules() if id(part) in made.attention_sites.calls]
    assert found["all"] == counter.get_total_flops() > found["attention"] > 0
    assert found["attention"] == sum(sum(counted[f"{type(model).__name__}.{name}"].values()) for name in attention)


def test_what_counting_allows_and_what_is_left() -> None:
    """By hand, of a Llama: two for each multiplication and addition, three matrices of a feed-forward block."""
    model = decoders.decoder("llama", tie_word_embeddings=False)
    made = HuggingFaceCheckpoint(path="memory", model=model, tokenizer=None, digest=None)
    ids = torch.ones(2, 7, dtype=torch.long)
    data = InputTexts((), "random", (ModelInputs({"input_ids": ids}, None),))
    whole = size(made, data.feeds)
    d, h, g, k, f, v, layers = 64, 8, 4, 16, 96, decoders.VOCABULARY, 3
    scores = 2 * 2 * (2 * h * 7 * 7 * k)  # of both products of weights and states, of two texts
    assert whole.attention_flops == layers * (14 * 2 * d * (2 * h * k + 2 * g * k) + scores)
    assert whole.output_flops == 14 * 2 * d * v
    assert whole.flops == whole.attention_flops + whole.output_flops + layers * 14 * 2 * 3 * d * f
    assert whole.read == whole.bytes - 4 * v * d  # rows of the input embedding

    untied, tied = (size(trained_here(tie_output=each), ()) for each in (False, True))
    assert untied.read == untied.bytes - 4 * len(WORDS) * 12 and tied.read == tied.bytes

    half = replace(whole, flops=whole.flops // 2, read=whole.read * 3 // 4, cache=whole.cache // 4)
    forward, search = (Timing(what, 8, 1.0, 1.0, 1.0) for what in ("forward", "beam search"))
    assert speedup_bound(forward, whole, half) == pytest.approx(2) == speedup_bound(search, whole, half)
    step = replace(forward, what="decoding", tokens=3, context=11)
    read = [each.read + 8 * 11 * each.cache for each in (whole, half)]
    assert speedup_bound(step, whole, half) == pytest.approx(read[0] / read[1])
    assert flops_breakdown({"flops": 200, "attention_flops": 50, "output_flops": 30}) == (
        "60% feed-forward blocks and others, 25% attention, 15% the output layer"
    )


@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
def test_translations_of_a_native_model_have_the_length_that_is_forced(rule: str) -> None:
    made = checkpoints.small()
    made.search = SearchConfig() if rule == "fairseq" else SearchConfig.story_of_heads()
    found = made.translations(["a b c", "d", "e f g a b c d e"], TranslateOptions(beam=2, exact=7))
    assert {len(best[0].text.split()) for best in found} == {7}


def test_translations_of_a_transformers_model_have_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    its: Any = checkpoints.hugging("bart")
    asked: list[Any] = []

    def generate(input_ids: torch.Tensor, *, generation_config: Any, **_: Any) -> torch.Tensor:
        asked.append(generation_config)
        return input_ids

    monkeypatch.setattr(its.model, "generate", generate)
    its.translations(["ah"], TranslateOptions(beam=2, exact=7))
    (config,) = asked
    assert (config.min_new_tokens, config.max_new_tokens, config.max_length) == (7, 7, None)
