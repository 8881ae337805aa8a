"""Beam search against searches on plain lists, against all sequences there are, and against itself in batches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.heads import HeadId, Site
from headscope.model.native.beams import Hypothesis, SearchConfig, search
from headscope.model.native.transformer import Transformer
from headscope.model.taps import capture, gated
from tests.oracles import beam as slow
from tests.oracles import native

pytestmark = pytest.mark.slow

START = END = 2
PAD, UNKNOWN = 1, 3


def model(seed: int = 0, **options: Any) -> Transformer:
    """A model whose distributions are neither flat nor sure, over a tiny vocabulary."""
    made = native.model(seed, **options)
    with torch.no_grad():
        made.output.weight.mul_(0.7)
    return made


def sources() -> tuple[Tensor, Tensor]:
    source, _, mask, _ = native.texts()
    return source, mask


def next_log_p(made: Transformer, source: Tensor, mask: Tensor, start: int = START) -> slow.NextLogP:
    """The full model on every prefix, without any cache."""
    memory = made.encode(source[mask][None])
    known: dict[tuple[int, ...], list[float]] = {}

    def look(ids: tuple[int, ...]) -> list[float]:
        if ids not in known:
            states = made.decode(torch.tensor([[start, *ids]]), memory)
            known[ids] = made.logits(states)[0, -1].log_softmax(-1).tolist()
        return known[ids]

    return look


def agree(found: list[Hypothesis], expected: slow.Found) -> None:
    assert [h.ids for h in found] == [ids for ids, _ in expected[: len(found)]]
    assert [h.score for h in found] == pytest.approx([score for _, score in expected[: len(found)]], abs=1e-9)


def find(made: Transformer, source: Tensor, mask: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
    return search(made, source, mask, start=START, end=END, pad=PAD, unknown=UNKNOWN, config=config)


@pytest.mark.parametrize(("norm", "seed"), [("pre", 0), ("post", 1)])
@pytest.mark.parametrize(("beam", "power", "least"), [(1, 1.0, 1), (3, 1.0, 1), (5, 0.0, 2), (7, 2.0, 0)])
def test_fairseq_rule_finds_what_lists_find(norm: str, seed: int, beam: int, power: float, least: int) -> None:
    made = model(seed, norm=norm)
    source, mask = sources()
    config = SearchConfig(beam=beam, best=beam, power=power, max_extra=6, min_extra=least)
    for n, found in enumerate(find(made, source, mask, config)):
        look = next_log_p(made, source[n], mask[n])
        expected = slow.fairseq(look, beam=beam, end=END, pad=PAD, most=6, least=least, power=power)
        assert len(found) == len(expected)
        agree(found, expected)


@pytest.mark.parametrize(("beam", "spread"), [(1, 3.0), (4, 3.0), (5, 0.4)])
def test_story_rule_finds_what_lists_find(beam: int, spread: float) -> None:
    made = model(beam, norm="pre", whole={"start": "zero"})
    source, mask = sources()
    config = SearchConfig.story_of_heads(beam=beam, best=beam, spread=spread)
    found = search(made, source, mask, start=0, end=END, config=config)
    for n, its in enumerate(found):
        length = int(mask[n].sum())
        look = next_log_p(made, source[n], mask[n], start=0)
        bounds = {"most": 2 * length + 3, "least": length // 4 - 1}
        agree(its, slow.story(look, beam=beam, end=END, power=0.6, spread=spread, **bounds))


@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
@pytest.mark.parametrize("seed", range(2))
def test_a_batch_finds_what_its_sentences_find_alone(rule: str, seed: int) -> None:
    made = model(seed)
    source, mask = sources()
    config = (
        SearchConfig(beam=3, best=3, max_ratio=1.0, max_extra=3) if rule == "fairseq" else SearchConfig.story_of_heads()
    )
    together = find(made, source, mask, config)
    for n in range(3):
        (alone,) = find(made, source[n][mask[n]][None], None, config)
        assert [h.ids for h in alone] == [h.ids for h in together[n]]
        assert [h.score for h in alone] == pytest.approx([h.score for h in together[n]], abs=1e-10)


def test_length_bounds() -> None:
    source, mask = sources()
    config = SearchConfig(beam=3, max_ratio=1.0, max_extra=0, min_ratio=1.0, min_extra=0)
    found = find(model(2), source, mask, config)
    assert [len(its[0].ids) - 1 for its in found] == mask.sum(dim=1).tolist()
    short = find(model(2), source, mask, SearchConfig(beam=3, max_extra=50, min_extra=50, limit=4))
    assert [len(its[0].ids) for its in short] == [5, 5, 5]


def test_capture_and_gates_reach_the_search() -> None:
    made = model(4)
    source, mask = sources()
    config = SearchConfig(beam=3, max_extra=5)
    with capture(made) as seen:
        plain = find(made, source, mask, config)
    steps = max(len(h.ids) for its in plain for h in its)
    assert len(seen.calls[Site.ENCODER_SELF, 0]) == 1
    for site in (Site.DECODER_SELF, Site.CROSS):
        calls = seen.calls[site, 0]
        assert len(calls) >= steps
        assert calls[0]["weights"].shape[0] == 3
        assert calls[1]["weights"].shape[:1] == (9,)
        assert all(torch.allclose(c["weights"].sum(-1), torch.ones(1).double()) for c in calls)
    heads = [HeadId(Site.CROSS, 0, head) for head in range(3)]
    with gated(made, heads):
        closed = find(made, source, mask, config)
    assert [its[0].score for its in closed] != [its[0].score for its in plain]
    assert [its[0].score for its in find(made, source, mask, config)] == [its[0].score for its in plain]
