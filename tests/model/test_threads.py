"""Threads that suit the work, and pieces of work on several threads: their order, torch's threads, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Barrier, get_ident

import pytest
import torch
from torch import Tensor, nn

from headscope.assets import demo_checkpoint, sample, trained
from headscope.data.corpus import open_corpus
from headscope.engine.plan import analyze, choose_analyses
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.model import threads as chosen
from headscope.model.process_settings import process_settings
from headscope.model.threads import (
    LARGE,
    LEAST_ROWS,
    MOST,
    allowed,
    parallel_map,
    product_size,
    threads_for,
    threads_for_pass,
)
from headscope.pruning.learning.examples import training_examples
from headscope.pruning.learning.finetuning import Recipe, Tuner, mean_loss, trained_parameters
from headscope.pruning.model_inputs import texts
from headscope.pruning.removal.verify import search_some, verify
from tests.oracles.run_options import run_options

pytestmark = pytest.mark.slow

SMALL = nn.Linear(7, 5)


@pytest.fixture(params=[1, 2, 3 * MOST])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items_and_torch_keeps_its_threads(threads: int) -> None:
    assert parallel_map(lambda number: number * number, range(11)) == [number * number for number in range(11)]
    assert parallel_map(lambda number: number, []) == []
    assert torch.get_num_threads() == threads


def test_workers_share_torchs_threads(threads: int) -> None:
    workers = min(threads, MOST)
    together = Barrier(workers, timeout=900)

    def seen(_: int) -> tuple[int, int]:
        together.wait()
        return get_ident(), torch.get_num_threads()

    found = parallel_map(seen, range(workers))
    assert len({ident for ident, _ in found}) == workers
    assert {each for _, each in found} == {threads // workers}


def test_nothing_is_recorded_for_gradients(threads: int) -> None:
    weight = torch.ones(3, requires_grad=True)

    def doubled(_: int) -> Tensor:
        return weight * 2

    assert not any(each.requires_grad for each in parallel_map(doubled, range(5)))


def test_an_error_comes_out(threads: int) -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda number: 1 // number, [2, 1, 0, 3])
    assert torch.get_num_threads() == threads


def test_a_product_is_the_mean_of_a_models_matrices_times_the_positions() -> None:
    model = nn.Sequential(nn.Embedding(1009, 7), nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 13, bias=False))
    assert product_size(model, 100) == 100 * (7 * 5 + 5 * 13) / 2
    assert product_size(model, 1) == LEAST_ROWS * (7 * 5 + 5 * 13) / 2
    assert product_size(nn.Embedding(1009, 7), 100) == 0
    assert [threads_for(size, 3) for size in (0, LARGE - 1, LARGE, 2 * LARGE)] == [1, 1, 3, 3]


def test_what_is_small_is_what_the_shipped_models_take() -> None:
    """The demonstration's model is small whatever the batch; a BERT is not, from some twenty sentences on."""
    small, bert = (open_checkpoint(path, device="cpu").model for path in (trained(), demo_checkpoint()))
    assert product_size(small, 2048) < LARGE <= product_size(bert, 20 * 12)


@pytest.fixture
def command() -> Iterator[None]:
    """The process is that of a command."""
    with process_settings():
        yield


def test_the_matrices_of_a_model_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(7, 5)
    assert product_size(model, 100) == 3500
    monkeypatch.setattr(model, "modules", lambda: pytest.fail("counted again"))
    assert product_size(model, 200) == 7000


def test_only_commands_change_the_number_of_threads(threads: int) -> None:
    with threads_for_pass(SMALL, 3):
        assert (torch.get_num_threads(), allowed()) == (threads, threads)


@pytest.mark.usefixtures("command")
def test_small_passes_have_one_thread_and_large_ones_all(threads: int) -> None:
    large = LARGE // (7 * 5) + 1
    for positions, wanted in ((3, 1), (large, threads)):
        with threads_for_pass(SMALL, positions):
            assert (torch.get_num_threads(), allowed()) == (wanted, threads)
            with threads_for_pass(SMALL, large):  # what is within is judged by itself
                assert (torch.get_num_threads(), allowed()) == (threads, threads)
            assert torch.get_num_threads() == wanted
        assert (torch.get_num_threads(), allowed()) == (threads, threads)


@pytest.mark.usefixtures("command")
def test_an_error_leaves_torch_its_threads(threads: int) -> None:
    with suppress(ZeroDivisionError), threads_for_pass(SMALL, 3):
        assert 1 // 0
    assert (torch.get_num_threads(), allowed()) == (threads, threads)


@pytest.mark.usefixtures("command")
def test_a_model_elsewhere_changes_nothing(threads: int) -> None:
    with threads_for_pass(nn.Linear(2, 3, device="meta"), 1):
        assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("command")
def test_pieces_of_a_small_pass_are_spread_over_all_threads(threads: int) -> None:
    workers = min(threads, MOST)
    together = Barrier(workers, timeout=900)

    def seen(_: int) -> int:
        together.wait()
        return get_ident()

    with threads_for_pass(SMALL, 3):
        assert len(set(parallel_map(seen, range(workers)))) == workers
        assert torch.get_num_threads() == 1


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    """The model of the demonstration."""
    return open_checkpoint(trained(), device="cpu")


CORPUS = open_corpus(sample("en"), target=sample("de"), max_sentences=2)


def analysed(checkpoint: Checkpoint) -> None:
    analyses, options = (
        choose_analyses(only=("confidence", "lrp", "gradient", "ablation")),
        run_options(ablate_with="zero"),
    )
    analyze(checkpoint, CORPUS, analyses=analyses, options=options, replicates=2)


def scored(checkpoint: Checkpoint) -> None:
    likelihood(checkpoint, CORPUS, LikelihoodOptions(tokens=2048, limit=512))


def translated(checkpoint: Checkpoint) -> None:
    checkpoint.translations(["a man ."], TranslateOptions(beam=2, max_extra=3))


def learnt(checkpoint: Checkpoint) -> None:
    data = training_examples(checkpoint, CORPUS, limit=512)
    Tuner(checkpoint, data, Recipe(updates=2, lr=0.0), trained_parameters(checkpoint, "none")).run()
    mean_loss(checkpoint, data, tokens=2048, seed=1, gates=None)


def proved(checkpoint: Checkpoint) -> None:
    data = texts(checkpoint, None, None, sentences=2)
    verify(checkpoint, checkpoint, (), data)
    search_some(checkpoint, data, beam=2)


@pytest.mark.parametrize("work", [analysed, scored, translated, learnt, proved])
@pytest.mark.parametrize(("large", "wanted"), [(False, 1), (True, 3)])
def test_every_kind_of_pass_has_the_threads_that_suit_it(
    small: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Checkpoint], None],
    large: bool,
    wanted: int,
) -> None:
    """In a command; that a library user's number stays what it is, is seen in test_process_settings.py."""
    if large:
        monkeypatch.setattr(chosen, "LARGE", 0)
    seen: set[int] = set()
    layer = small.model.get_submodule("encoder.layers.0")
    hook = layer.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with process_settings():
            work(small)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        hook.remove()
    assert seen == {wanted}
