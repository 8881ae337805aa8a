"""How times are taken: in turns, with outputs of one length, and with their spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headscope.formats.translate_options import TranslateOptions
from headscope.model.decoding.beams import SearchConfig
from headscope.pruning.removal.savings import in_turns
from tests.oracles import checkpoints


def test_models_take_turns_and_rounds_say_how_far_they_differ() -> None:
    seconds = {"before": iter([4.0, 9.0, 6.0]), "after": iter([2.0, 3.0, 4.0])}
    asked: list[str] = []

    def took(which: str) -> Callable[[], float]:
        def answer() -> float:
            asked.append(which)
            return next(seconds[which])

        return answer

    found = in_turns("forward", 1, took("before"), took("after"), 3)
    assert asked == ["before", "after", "after", "before", "before", "after"]
    assert (found.before, found.after, found.speedup) == (6.0, 3.0, 2.0) and (found.least, found.most) == (1.5, 3.0)


@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
def test_translations_of_a_native_model_have_the_length_that_is_forced(rule: str) -> None:
    made = checkpoints.small()
    made.search = SearchConfig() if rule == "fairseq" else SearchConfig.story_of_heads()
    config = made._searching(TranslateOptions(beam=2, exact=7))
    hypotheses = made.translate(["a b c", "d", "e f g a b c d e"], config)
    assert {len(of_text[0].ids) for of_text in hypotheses} == {8}, "the end symbol besides"


def test_translations_of_a_transformers_model_have_it_too() -> None:
    its = checkpoints.hugging("bart")
    config = its._generation_config(TranslateOptions(beam=2, exact=7))
    assert (config.min_new_tokens, config.max_new_tokens, config.max_length) == (8, 8, None)
