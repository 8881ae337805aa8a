"""Every architecture of the list has its listed outcome: opened, masked and cut, or refused with the listed reason."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.errors import CheckpointError, HeadscopeError
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.export.base import choose_export
from headscope.formats.base import open_checkpoint, write_checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.size import count_flops
from headscope.heads import HeadId
from headscope.model.discovery import AttentionSite, find_attention
from headscope.model.forward import max_abs_difference, outputs, reference
from headscope.model.interface import through_attend
from headscope.model.prefix_cache import resumable_layers
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import capture
from headscope.pruning.removal import verify as verification
from headscope.pruning.removal.merge_plan import plan_merge
from tests.contracts.architectures import BY_NAME, sharpen
from tests.contracts.catalogue import Entry, catalogue
from tests.makers.wrappers import hugging_face
from tests.oracles import tiny

CATALOGUE = catalogue()
every = pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
LIMIT = 1e-9
RELOAD_LIMIT = 1e-5
"""Largest difference to a model opened from disk, whose class recomputes its buffers in float32."""


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Search greedily for a few tokens, without the warnings of transformers about tiny sizes."""
    from transformers.utils import logging as messages

    monkeypatch.setattr(verification, "NEW_TOKENS", 2)
    monkeypatch.setattr(verification, "BEAM", 1)
    level = messages.get_verbosity()
    messages.set_verbosity(logging.CRITICAL)
    yield
    messages.set_verbosity(level)


def build(entry: Entry) -> HuggingFaceCheckpoint:
    """The tiny model in double precision, whose experts multiply one by one, as an opened checkpoint's do."""
    return hugging_face(sharpen(entry.model()).double())


def choose_heads(checkpoint: HuggingFaceCheckpoint, *, groups: bool) -> list[HeadId]:
    """No heads in the first layer of each site; in the others some, of which odd layers lose whole groups.

    Layers with one set of weights lose the same heads, and not all of them.
    """
    heads = []
    sites = {attention.site for attention in checkpoint.attention_sites.order}
    first = {site: min(attention.layer for attention in checkpoint.attention_sites.at(site)) for site in sites}
    for modules in checkpoint.attention_sites.modules:
        for attention in modules:
            empties = attention.layer == first[attention.site] and len(modules) == 1
            numbers = range(attention.heads) if empties else some_of(attention, modules[0].layer, groups=groups)
            heads += [HeadId(attention.site, attention.layer, head) for head in numbers]
    return heads


def some_of(attention: AttentionSite, layer: int, *, groups: bool) -> list[int]:
    share = attention.heads // attention.groups
    if share == 1:
        return [layer % attention.heads]
    if groups and layer % 2 and attention.groups > 1:
        return list(range(share))
    return [group * share + (layer + group) % share for group in range(attention.groups)]


@every
def test_architectures_come_out_as_the_list_says(entry: Entry, tmp_path: Path) -> None:
    if entry.is_refused:
        with pytest.raises(CheckpointError, match=entry.because) as error:
            find_attention(sharpen(entry.model()))
        assert "\n" not in str(error.value)
        return
    checkpoint = build(entry)
    heads, data = choose_heads(checkpoint, groups=entry.groups), read_input_texts(checkpoint, None, None, sentences=1)
    assert_captured(checkpoint, data)
    if entry.outcome == "masked only":
        assert_masked_only(checkpoint, heads, data, entry.because)
        return
    plan = plan_removal(checkpoint.attention_sites, heads)
    shrunk = choose_export(None, checkpoint).build(checkpoint, plan)
    proof = verification.verify(checkpoint, shrunk, heads, data)
    assert proof.difference <= max(LIMIT, proof.tolerance)
    assert proof.searched == proof.searches
    assert shrunk.layout == plan.layout
    assert parameters(shrunk) < parameters(checkpoint)
    if entry.name in BY_NAME:
        assert_masked_is_zeroed(checkpoint, heads, data)
    assert_reloaded(shrunk, tmp_path / "small", data)


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.task != "picture"])
def test_limits_are_those_of_tables(name: str) -> None:
    """A model takes as many tokens as its limit and no more; one without a limit more than its config names."""
    if CATALOGUE[name].is_refused:
        pytest.skip("refused")
    checkpoint = build(CATALOGUE[name])
    if checkpoint.reads_sound or checkpoint._reads != "input_ids":
        pytest.skip("reads no text")

    def run(length: int) -> None:
        text = pad_side([Encoded([5] * length, [False] * length)])
        with torch.no_grad():
            checkpoint.forward(Batch(torch.arange(1), 0, text, text if checkpoint.two_sided else None))

    run(checkpoint.limit or 3 * 61 + 1)
    if checkpoint.limit is not None:
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            run(checkpoint.limit + 1)


def parameters(checkpoint: HuggingFaceCheckpoint) -> int:
    return sum(parameter.numel() for parameter in checkpoint.model.parameters())


def assert_captured(checkpoint: HuggingFaceCheckpoint, data: InputTexts) -> None:
    """Capture has every head's weights, which sum to 1 at most (less with an extra sink)."""
    with capture(checkpoint.model) as record:
        outputs(checkpoint.model, data.feeds[0])
    assert record.calls.keys() == checkpoint.layout.keys()
    for site_layer, heads in checkpoint.layout.items():
        weights = record[site_layer]["weights"]
        assert weights.shape[1] == heads
        assert (weights >= 0).all() and (weights.sum(dim=-1) <= 1 + 1e-6).all()


def assert_masked_only(checkpoint: HuggingFaceCheckpoint, heads: list[HeadId], data: InputTexts, because: str) -> None:
    """Masked heads change the outputs, and their removal is refused in one line."""
    plain, without = outputs(checkpoint.model, data.feeds[0]), reference(checkpoint, heads, data.feeds[0])
    assert without.isfinite().all() and not torch.allclose(plain, without)
    assert count_flops(checkpoint, data.feeds[0])["all"] > 0  # modules of DBRX are given parameters
    plan = plan_removal(checkpoint.attention_sites, heads)
    with pytest.raises(HeadscopeError, match=because) as error:
        verification.verify(checkpoint, choose_export(None, checkpoint).build(checkpoint, plan), heads, data)
    assert "\n" not in str(error.value)


def assert_masked_is_zeroed(checkpoint: HuggingFaceCheckpoint, heads: list[HeadId], data: InputTexts) -> None:
    """Masking equals zeros in the heads' columns of the output projections."""
    plan = plan_removal(checkpoint.attention_sites, heads, whole_groups=False)
    model: Any = checkpoint.alter_heads(plan, "zero").model
    with through_attend(model):
        actual = outputs(model, data.feeds[0])
    expected = reference(checkpoint, heads, data.feeds[0])
    assert max_abs_difference(actual, expected) <= 1e-6  # models that round to float32 on their way


def assert_reloaded(shrunk: Any, folder: Path, data: InputTexts) -> None:
    """A checkpoint that is saved and opened again computes the same."""
    folder.mkdir()
    write_checkpoint(shrunk, folder)
    again = open_checkpoint(str(folder), dtype="float64")
    assert again.layout == shrunk.layout
    actual, expected = (outputs(checkpoint.model, data.feeds[0]) for checkpoint in (again, shrunk))
    assert max_abs_difference(actual, expected) <= RELOAD_LIMIT


@pytest.mark.parametrize("name", ["inkling_text", "stablelm-norms", "lfm3"])
def test_parts_beside_the_projections_are_merged_too(name: str) -> None:
    """Convolutions of keys (Inkling) and norms of one head each (StableLM) have a mean as projections have."""
    checkpoint = build(CATALOGUE[name])
    plan, data = plan_merge(checkpoint.attention_sites, (1,)), read_input_texts(checkpoint, None, None, sentences=1)
    pool = checkpoint.alter_heads(plan, "pool")
    merged = pool.alter_heads(plan, "shrink")
    assert verification.verify(pool, merged, [], data).difference <= LIMIT
    assert {attention.groups for attention in merged.attention_sites.order} == {1}


@pytest.mark.parametrize("name", ["inkling_text", "stablelm-norms", "qwen3-one-group"])
def test_parts_beside_the_projections_go_twice(name: str, tmp_path: Path) -> None:
    checkpoint: Any = build(CATALOGUE[name])
    data = read_input_texts(checkpoint, None, None, sentences=1)
    for folder in ("once", "twice"):
        heads = [
            HeadId(attention.site, attention.layer, group * (attention.heads // attention.groups))
            for attention in checkpoint.attention_sites.order
            for group in range(attention.groups)
        ]
        shrunk = checkpoint.alter_heads(plan_removal(checkpoint.attention_sites, heads), "shrink")
        assert verification.verify(checkpoint, shrunk, heads, data).difference <= LIMIT
        (tmp_path / folder).mkdir()
        write_checkpoint(shrunk, tmp_path / folder)
        checkpoint = open_checkpoint(str(tmp_path / folder), dtype="float64")


def test_a_decoder_starts_with_what_its_own_config_says() -> None:
    """T5Gemma has no decoder_start_token_id: its decoder's config says what comes first."""
    entry = CATALOGUE["t5gemma"]
    checkpoint = build(entry)
    checkpoint.tokenizer = tiny.tokenizer([], [tiny.END])
    (text,) = checkpoint.encode(["ah bi ch"], side="target", limit=9)
    assert text.ids[0] == entry.sizes["decoder"]["bos_token_id"]


def test_passes_are_computed_in_full_where_layers_share_keys() -> None:
    """Gemma 3n: a layer that is left out of a pass would leave no keys and values for those above it."""
    assert resumable_layers(build(CATALOGUE["gemma3n_text"]).model) is None
