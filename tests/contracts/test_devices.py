"""All code that touches tensors, on simulated devices (`tests/oracles/simulation.py`): the numbers are the CPU's.

Tensors of two devices do not meet there, so what is made along the way (masks, buffers, random numbers) is made where
the model is. Kernels, their rounding and their memory are the CPU's. Where the environment has
`HEADSCOPE_TEST_DEVICE=cuda:0` the same runs on that device instead.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope as hs
from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import FOLDS
from headscope.engine import plan
from headscope.engine.base import ANALYSES, Analysis, Attention
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.pruning.ranking.criterion import CRITERIA, ScoringContext, criterion_named
from headscope.pruning.removal import verify as verification
from headscope.results.study import Study
from headscope.training.variant import (
    VARIANTS,
    VariantChain,  # noqa: F401  (registers what combines)
)
from tests.contracts.studies import OPTIONS, load_tiny, numbers
from tests.makers.studies import run_options, study_of
from tests.oracles import checkpoints, lessons, prompts, speakers
from tests.oracles import simulation as machine
from tests.oracles.shuffled import in_folds
from tests.oracles.simulation import FIRST, SECOND, Counts, simulate_devices

REAL = machine.DEVICE is not None
DEVICE = machine.DEVICE or FIRST
ATOL = 1e-9
ATOL_HALF = 0.05 if REAL else 1e-6  # a real device rounds products of bfloat16 in its own order
simulated_only = pytest.mark.skipif(REAL, reason="concerns simulated devices")
TEXT = [name for name, cls in ANALYSES if "contrast" not in cls.needs]
PROMPTS = [name for name, cls in ANALYSES if "contrast" in cls.needs]
SLOW = {"shapley", "causal_head_gating", "streaming"}
"""Analyses of very many passes, of the kinds that other analyses make."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Provide devices, and let analyses read one batch of random sequences only."""
    monkeypatch.setattr(plan, "RANDOM_SEQUENCES", FOLDS)
    monkeypatch.setattr(plan, "RANDOM_BLOCK", 5)
    if REAL:
        yield Counts()
        return
    with simulate_devices() as counts:
        yield counts


def copy_to(checkpoint: Any, target: str | torch.dtype = DEVICE) -> Any:
    """The checkpoint with a copy of its model on a device, or in a dtype."""
    return checkpoint.with_model(copy.deepcopy(checkpoint.model).to(target))


def assert_same(one: Study, other: Study, *, atol: float = ATOL) -> None:
    first, second = numbers(one), numbers(other)
    assert first.keys() == second.keys() and first
    for name in first:
        np.testing.assert_allclose(second[name], first[name], atol=atol, rtol=0, err_msg=name)
    assert one.labels == other.labels and one.remarks == other.remarks
    assert [left.analysis for left in one.left_out] == [left.analysis for left in other.left_out]


def study(model: Checkpoint, text: Any, names: list[str], *, attention: Attention = "dense", tokens: int = 61) -> Study:
    options = OPTIONS | {"attention": attention, "detail": True, "eap_steps": 1, "chg_steps": 1, "chg_fits": 1}
    return study_of(model, in_folds(text, 1), *names, tokens=tokens, replicates=7, **options)


@pytest.mark.parametrize(("kind", "attention"), [("bert", "dense"), ("t5", "dense")])
def test_every_analysis_of_text(kind: str, attention: Attention) -> None:
    checkpoint, corpus = load_tiny(kind, "ablation", sentences=2)
    own_passes = {name for name in TEXT if ANALYSES.get(name).explain is not Analysis.explain}
    of_bert = {"explained", "ablation"} | SLOW  # whose steps are of no kind of attention
    left_out = of_bert if kind == "t5" else SLOW if attention == "dense" else own_passes
    names = [name for name in TEXT if name not in left_out]
    assert_same(*(study(twin, corpus, names, attention=attention) for twin in (checkpoint, copy_to(checkpoint))))


def test_every_analysis_of_prompts() -> None:
    checkpoint, corpus = speakers.checkpoint("gpt2"), prompts.corpus("gpt2")
    assert_same(*(study(twin, corpus, PROMPTS, tokens=1000) for twin in (checkpoint, copy_to(checkpoint))))


def test_half_precision() -> None:
    checkpoint, corpus = load_tiny("bert", "confidence")
    bf16 = copy_to(checkpoint, torch.bfloat16)
    names = [name for name in TEXT if ANALYSES.get(name).default]
    assert_same(study(bf16, corpus, names), study(copy_to(bf16), corpus, names), atol=ATOL_HALF)


@simulated_only
def test_a_device_without_float64() -> None:
    """Like MPS: sums are float32, with their rounding errors beside them."""
    checkpoint, corpus = load_tiny("bert", "confidence")
    single = copy_to(checkpoint, torch.float32)
    names = [name for name in TEXT if ANALYSES.get(name).default and ANALYSES.get(name).passes]
    with simulate_devices(float64=False):  # nothing is known yet of the second device, and it has no backward pass
        actual = study(copy_to(single, SECOND), corpus, names)
    assert_same(study(single, corpus, names), actual, atol=3e-6)


def test_every_objective() -> None:
    checkpoint = speakers.checkpoint("bert")
    corpus = in_folds(speakers.corpus("bert", count=2), 1)
    for name in OBJECTIVES.names():
        results: list[Any] = []
        for twin in (checkpoint, copy_to(checkpoint)):
            try:
                results.append(study_of(twin, corpus, "gradient", objective=name, **OPTIONS))
            except hs.HeadscopeError as error:
                results.append(str(error))
        if isinstance(results[0], str):
            assert results[0] == results[1]
        else:
            assert_same(*results)


def test_every_criterion() -> None:
    checkpoint = speakers.checkpoint("native-pre")
    corpus = in_folds(speakers.corpus("native-pre", count=3), 1)
    other = copy_to(checkpoint)
    for name in CRITERIA.names():
        criterion = criterion_named(name)
        text = corpus if criterion.reads_text else None
        first, second = (
            criterion.scores(ScoringContext(twin, text, options=run_options(**OPTIONS))) for twin in (checkpoint, other)
        )
        np.testing.assert_allclose(list(second.values()), list(first.values()), rtol=1e-7, atol=ATOL, err_msg=name)


def lines(kind: str, count: int = 8) -> dict[str, Any]:
    """Text for the functions of the API."""
    sentences = list(speakers.corpus(kind, count=count))
    texts: dict[str, Any] = {"text": [sentence.source for sentence in sentences]}
    if sentences[0].target is not None:
        texts["target"] = [sentence.target for sentence in sentences]
    return texts


def test_removal_and_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "NEW_TOKENS", 2)
    monkeypatch.setattr(verification, "BEAM", 1)
    llama = speakers.checkpoint("llama")
    names = [f"{site}.{layer}.{head}" for (site, layer), n in list(llama.layout.items())[:1] for head in range(n)]
    refit, removed = hs.Refit(method="least-squares"), names[: len(names) // 2]
    small = [hs.Model(twin).remove(removed, refit=refit, **lines("llama", 10)) for twin in (llama, copy_to(llama))]
    assert small[0].layout == small[1].layout
    weights = [dict(twin.model.named_parameters()) for twin in small]
    for name, values in weights[0].items():
        assert weights[1][name].device == torch.device(DEVICE)
        atol = 1e-5 if REAL else 1e-7  # refits of what norms of float32 have rounded
        torch.testing.assert_close(weights[1][name].cpu(), values, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", ["bert", "native"])
def test_evaluation(kind: str) -> None:
    checkpoint: Any = checkpoints.small() if kind == "native" else speakers.checkpoint(kind)
    pair = {"text": checkpoints.SOURCES[:2], "target": checkpoints.TARGETS[:2]}
    texts = pair if kind == "native" else lines(kind, 2)
    one, other = (hs.Model(twin).evaluate(**texts, bootstrap=2) for twin in (checkpoint, copy_to(checkpoint)))
    assert one.scores and len(one.scores) == len(other.scores)
    for first, second in zip(one.scores, other.scores, strict=True):
        assert first.metric == second.metric and second.value == pytest.approx(first.value, abs=1e-7, nan_ok=True)


def test_translation_with_beams() -> None:
    from headscope.config.commands import TranslateOptions

    for checkpoint in (checkpoints.small(), checkpoints.huggingface("bart")):
        texts = checkpoints.SOURCES[:3] if checkpoint.format == "native" else ["ah ai", "bj ck dl"]
        one, other = (
            [[h.text for h in best] for best in twin.translations(texts, TranslateOptions(beam=3, max_len_b=5))]
            for twin in (checkpoint, copy_to(checkpoint))
        )
        assert one == other


@pytest.mark.parametrize("kind", ["bert", "native-pre"])
def test_gates_masks_and_capture(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    results = []
    for twin in (checkpoint, copy_to(checkpoint)):
        model = hs.Model(twin)
        (site, layer), heads = next(iter(model.layout.items()))
        values: Any = {(site, layer): torch.linspace(0.1, 0.9, heads)}
        with model.gated(values), model.masked([HeadId(site, layer, 0)]), model.capture("weights", "context") as record:
            states = model(lines(kind, 3)["text"], target=lines(kind, 3).get("target"))
        results.append((states.cpu(), record[site, layer]["weights"].cpu(), record[site, layer]["context"].cpu()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ATOL)


def learn_gates(device: str, folder: Path, words: dict[str, Any]) -> Any:
    from headscope.pruning.learning.learn import run_learning
    from headscope.pruning.options.choice import LEARNERS, LearnConfig

    options = LEARNERS.get("subset").Options(keep=4)
    config = LearnConfig(**words, out=folder, method=options, updates=3, device=device, batch_tokens=61)
    run_learning(config)
    import pandas as pd

    return pd.read_csv(folder / "gates.csv").select_dtypes("number").to_numpy().ravel().tolist()


def test_gates_are_learnt(tmp_path: Path) -> None:
    from tests.makers.sweeps import make_words

    words = make_words(tmp_path, checkpoints.small())
    del words["valid_source"], words["valid_target"]
    one, other = (learn_gates(device, tmp_path / device[:3], words) for device in ("cpu", DEVICE))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "swap": {"dynamic": ("soft", "soft", "soft")},
    "mae": {"gate_every": 2},
    "mixing": {"gamma": 0.1, "start_after": 0.0},
}


@pytest.mark.parametrize("name", VARIANTS.names())
def test_every_variant_trains(name: str, tmp_path: Path) -> None:
    """Without dropout, whose random numbers depend on the device, like those by which MAE draws its experts."""
    if REAL and name == "mae":
        pytest.skip("draws its experts by random numbers of the device")
    results = []
    for device in ("cpu", DEVICE):
        (tmp_path / device).mkdir()
        shared = {"device": device, "dropout": 0.0, "precision": "float64"}
        run = lessons.begin(tmp_path / device, name, shared=shared, **VARIANT_OPTIONS.get(name, {}))
        lessons.updates(run, 2)
        results.append(lessons.weights(run))
    for key, values in results[0].items():
        if not key.endswith("key.bias"):  # its gradient is zero but for rounding, which Adam makes as large as any
            torch.testing.assert_close(results[1][key].cpu(), values, rtol=0, atol=ATOL, msg=key)


@simulated_only
def test_layers_on_two_devices() -> None:
    """A model spread as by `--device-map`: only the tensors between layers are moved."""
    checkpoint = speakers.checkpoint("llama")
    corpus = speakers.corpus("llama", count=5)
    other = copy_to(checkpoint, FIRST)
    model: Any = other.model
    for part in (model.model.layers[1], model.model.norm, model.lm_head):
        part.to(SECOND)
        part.register_forward_pre_hook(_to_second, with_kwargs=True)
    # no gradients: the backward pass of this backend knows one device
    names = [name for name in TEXT if ANALYSES.get(name).default and ANALYSES.get(name).passes]
    assert_same(study(checkpoint, corpus, names), study(other, corpus, names), atol=1e-6)  # Llama's norms are float32


def _to_second(module: Any, args: Any, kwargs: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda entry: entry.to(SECOND) if isinstance(entry, torch.Tensor) else entry, (args, kwargs)
    )


@simulated_only
def test_the_pretended_devices_count(device: Counts) -> None:
    values = torch.ones(2, 3).to(FIRST, non_blocking=True)
    assert (device.kernels, device.syncs, device.uploads) == (0, 0, 0)
    (values.T @ values).view(-1)
    assert (device.kernels, device.syncs) == (1, 0)
    for read in (values.sum().item, values[0].tolist, values.cpu, values.nonzero, lambda: values[values > 0]):
        device.clear()
        read()
        assert device.syncs == 1, read
    device.clear()
    torch.ones(2).to(FIRST)
    assert device.uploads == 1
