"""Hard concrete gates against the original's numbers, and their effect on models of every kind."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, Site
from headscope.model.mixing.base import hard_concrete
from headscope.model.taps import gated
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.examples import LabelLoss, TrainingExamples
from headscope.pruning.learning.finetuning import Recipe, Tuner, trained_parameters
from headscope.pruning.learning.learn import run_learning
from headscope.pruning.learning.learners.l0 import L0, L0Options, noisy_gates, nonzero_probability
from headscope.pruning.options.choice import LearnConfig
from headscope.pruning.removal import remove
from tests.makers.removals import remove_heads
from tests.makers.shared import SHIPPED_FOLDER, write_lines
from tests.oracles import checkpoints, speakers

pytestmark = pytest.mark.slow

TEMPERATURES = {"t033": 0.33, "t050": 0.5, "t066": 0.66}
KINDS = ("bert", "llama", "marian", "native-pre")


@pytest.mark.parametrize(("tag", "temperature"), TEMPERATURES.items())
def test_gates_penalties_and_gradients_are_the_originals(tag: str, temperature: float) -> None:
    """gates.npz was computed by the story-of-heads program in float32, with the noise that it holds."""
    arrays = np.load(SHIPPED_FOLDER / "story-of-heads" / "gates.npz")
    log_a = torch.tensor(arrays["log_a"], dtype=torch.float64, requires_grad=True)

    def assert_close(actual: torch.Tensor, name: str) -> None:
        np.testing.assert_allclose(actual.detach().numpy(), arrays[f"{tag}/{name}"], rtol=1e-6, atol=1e-6)

    assert_close(hard_concrete(log_a), "eval_gate")
    assert_close((log_a > 0).double(), "eval_gate_hard")
    assert_close(torch.autograd.grad(hard_concrete(log_a).sum(), log_a)[0], "d_evalgate_d_log_a")
    open_probability = nonzero_probability(log_a, temperature=temperature)
    assert_close(open_probability, "closed_p_nonzero")
    assert_close(open_probability.sum(), "penalty_sum")
    assert_close(torch.autograd.grad(open_probability.sum(), log_a)[0], "d_penalty_d_log_a")
    assert_close((hard_concrete(log_a) > 0).double().mean(), "nonzero_fraction")
    rows = log_a.detach().expand(64, -1).clone().requires_grad_()
    gates = noisy_gates(rows, torch.tensor(arrays[f"{tag}/train_u"], dtype=torch.float64), temperature=temperature)
    assert_close(gates, "train_gate")
    slopes = torch.autograd.grad(gates.sum(), rows)[0].numpy()
    np.testing.assert_allclose(slopes, arrays[f"{tag}/d_traingate_d_log_a"], rtol=1e-5, atol=1e-6)


def build_l0(checkpoint: Checkpoint, *, sites: tuple[str, ...] = (), updates: int = 1, **options: Any) -> L0:
    rng = torch.Generator().manual_seed(7)
    return L0(GateLayout(checkpoint.attention_sites, sites=sites), L0Options(**options), updates=updates, generator=rng)


def test_both_conventions_of_lambda() -> None:
    """λ on the mean over modules equals λ on the sum over heads divided by the number of gated modules."""
    checkpoint = speakers.checkpoint("marian")
    penalties = {}
    for convention in ("paper", "code"):
        gates = build_l0(checkpoint, strength=0.3, strength_as=convention)
        penalty = gates.penalty()
        assert penalty is not None
        penalties[convention] = penalty.item()
    l0, modules = build_l0(checkpoint, strength=1.0), len(checkpoint.layout)
    heads = nonzero_probability(l0.weights.detach())
    assert modules == 5
    assert math.isclose(penalties["paper"], 0.3 * heads.sum().item(), rel_tol=1e-12)
    per_module = heads.split([checkpoint.layout[site_layer] for site_layer in dict.fromkeys(l0.gating.modules)])
    mean = sum(part.sum().item() for part in per_module) / modules
    assert math.isclose(penalties["code"], 0.3 * mean, rel_tol=1e-12)
    facts = build_l0(checkpoint, strength=0.3, strength_as="code").facts()
    assert facts["lambda_code"] == pytest.approx(0.3) and facts["lambda_paper"] == pytest.approx(0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gates_are_those_of_the_loss(kind: str) -> None:
    """One step of plain gradient descent equals a finite difference, through every kind of model."""
    checkpoint = speakers.checkpoint(kind)
    data = TrainingExamples(checkpoint, speakers.corpus(kind), limit=60)
    gates = GateLayout(checkpoint.attention_sites)
    batch = data.batch(data.plan(tokens=200)[0], seed=3)
    values = torch.full((len(gates.units),), 0.7, dtype=torch.float64, requires_grad=True)

    def loss(point: torch.Tensor) -> torch.Tensor:
        with gated(checkpoint.model, gates.spread(point)):
            return LabelLoss(0.1).of(checkpoint, batch)[0]

    (slopes,) = torch.autograd.grad(loss(values), values)
    assert len(slopes) * int(gates.sizes[0]) == sum(checkpoint.layout.values())
    for number in (0, len(slopes) - 1):
        step = torch.zeros_like(slopes)
        step[number] = size = 1e-3 if kind in ("llama", "t5") else 1e-5  # these normalise in float32 whatever comes
        with torch.no_grad():
            difference = (loss(values + step) - loss(values - step)) / (2 * size)
        tolerance = 1e-3 if kind in ("llama", "t5") else 1e-5
        assert math.isclose(slopes[number].item(), difference.item(), rel_tol=tolerance, abs_tol=1e-7)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "marian", "native-post"])
def test_the_loss_is_asked_of_every_sentence(kind: str) -> None:
    """-log p and counts of a whole corpus in batches equal those of each sentence alone, without padding."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind)
    data = TrainingExamples(checkpoint, corpus, limit=60)
    total, count = 0.0, 0
    with torch.no_grad():
        for numbers in data.plan(tokens=40):
            _, nll, predictions = LabelLoss().of(checkpoint, data.batch(numbers, seed=1))
            total, count = total + nll.item(), count + predictions
    questions = [speakers.make_example(kind, sentence) for sentence in corpus]
    with torch.no_grad():
        assert math.isclose(total, sum(question.loss(checkpoint).item() for question in questions), rel_tol=1e-9)
    assert count == sum(len(question.labels) for question in questions)


def test_hidden_tokens_change_with_the_epoch_and_are_fifteen_per_cent() -> None:
    checkpoint = speakers.checkpoint("bert")
    data = TrainingExamples(checkpoint, speakers.corpus("bert", count=300), limit=60)
    numbers = np.arange(300)
    first, repeat, next_epoch = (data.batch(numbers, seed=1, epoch=epoch) for epoch in (1, 1, 2))
    assert first.labels is not None and repeat.labels is not None and next_epoch.labels is not None
    assert torch.equal(first.source.ids, repeat.source.ids) and not torch.equal(first.labels, next_epoch.labels)
    hidden = first.labels != -100
    assert bool((hidden.sum(dim=1) == 1).all())  # sentences of 1 to 7 words
    mask_share = (first.source.ids[hidden] == checkpoint.mask_id()).double().mean().item()
    same_share = (first.source.ids[hidden] == first.labels[hidden]).double().mean().item()
    assert 0.7 < mask_share < 0.9 and 0.04 < same_share < 0.2
    assert not (hidden & first.source.special).any() and not (hidden & ~first.source.real).any()


def test_noise_in_training_only_and_the_model_is_as_before() -> None:
    gpt2 = speakers.checkpoint("gpt2")
    gates = build_l0(gpt2, strength=0.1)
    with torch.no_grad():
        assert not torch.equal(gates.training_gates(), gates.training_gates())
    assert torch.equal(gates.gates(), gates.gates())
    before = {name: value.clone() for name, value in gpt2.model.state_dict().items()}
    flags, mode = [weights.requires_grad for weights in gpt2.model.parameters()], gpt2.model.training
    Tuner(gpt2, TrainingExamples(gpt2, speakers.corpus("gpt2"), limit=60), Recipe(updates=2, lr=0.1), [], gates).run()
    assert all(torch.equal(value, before[name]) for name, value in gpt2.model.state_dict().items())
    assert [weights.requires_grad for weights in gpt2.model.parameters()] == flags and gpt2.model.training is mode


@pytest.mark.parametrize("kind", ["marian", "t5", "native-post"])
def test_frozen_sides(kind: str) -> None:
    """Freezing the decoder leaves parameters of the encoder alone; shared ones are frozen with either side."""
    checkpoint = speakers.checkpoint(kind)
    names = {id(parameter): name for name, parameter in checkpoint.model.named_parameters()}
    of_encoder = {names[id(weights)] for weights in trained_parameters(checkpoint, "decoder")}
    of_decoder = {names[id(weights)] for weights in trained_parameters(checkpoint, "encoder")}
    assert of_encoder and all("encoder." in name for name in of_encoder)
    assert of_decoder and not any(name.startswith(("encoder.", "model.encoder.")) for name in of_decoder)
    all_names = {names[id(weights)] for weights in trained_parameters(checkpoint, "none")}
    assert of_encoder | of_decoder < all_names or of_encoder | of_decoder == all_names
    assert all("embed" in name or "shared" in name for name in all_names - of_encoder - of_decoder)
    assert trained_parameters(checkpoint, "model") == []
    with pytest.raises(ConfigError, match="--freeze decoder"):
        trained_parameters(speakers.checkpoint("gpt2"), "decoder")


def test_gates_go_by_whole_groups() -> None:
    checkpoint = speakers.checkpoint("llama")
    layout = GateLayout(checkpoint.attention_sites)
    assert {len(unit) for unit in layout.units} == {3} and layout.heads == 12
    assert layout.kept_units(6) == 2
    with pytest.raises(ConfigError, match=r"--keep 7.*6 or 9"):
        layout.kept_units(7)
    with pytest.raises(ConfigError, match=r"; keep 3$"):  # --keep 0 is refused
        layout.kept_units(1)
    with_protection = GateLayout(checkpoint.attention_sites, protect=[HeadId(Site.DECODER_SELF, 1, 4)])
    assert len(with_protection.units) == 3 and with_protection.protected_heads[0] == HeadId(Site.DECODER_SELF, 1, 3)
    gates = with_protection.spread(torch.zeros(3))
    assert gates[Site.DECODER_SELF, 1].tolist() == [0, 0, 0, 1, 1, 1]
    l0 = build_l0(checkpoint, strength=0.3, temperature=0.5)
    penalty, probability = l0.penalty(), nonzero_probability(l0.weights.detach(), temperature=0.5)
    assert penalty is not None and penalty.item() == pytest.approx(0.3 * 3 * probability.sum().item(), rel=1e-12)
    assert torch.equal(l0.open_probability(), probability)


# The whole command, on a small model on disk.


def write_texts(folder: Path) -> dict[str, Path]:
    """Pairs of lines in which the target repeats the source's first letters."""
    rng = np.random.default_rng(3)
    lines = [rng.choice(list("abcdefg"), size=rng.integers(2, 6)) for _ in range(60)]
    source = write_lines(folder / "a", map(" ".join, lines))
    return {"source": source, "target": write_lines(folder / "b", (" ".join(line[:2]) for line in lines))}


def save_model(folder: Path) -> Path:
    NATIVE.save(checkpoints.small(), folder / "whole")
    return folder / "whole"


def learn(folder: Path, name: str, **options: Any) -> Any:
    path = folder / "whole" if (folder / "whole").exists() else save_model(folder)
    texts = write_texts(folder)
    settings: dict[str, Any] = {"updates": 6, "batch_tokens": 100, "lr": 1e-3, **texts, **options}
    method = {key: settings.pop(key) for key in ("strength", "keep", "strength_as", "start") if key in settings}
    config = LearnConfig(checkpoint=str(path), out=folder / name, method=L0Options(**method), device="cpu", **settings)
    return run_learning(config)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in save_model(tmp_path).iterdir()}
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        learn(tmp_path, name, strength=0.1, seed=seed, updates=2)
    names = ("gates.csv", "ranking.csv", "removed.txt", "model/model.safetensors")
    first, repeat, other = ([(tmp_path / run / name).read_bytes() for name in names] for run in ("one", "two", "three"))
    assert first == repeat and first[0] != other[0] and first[3] != other[3]
    assert {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()} == before


def test_lambda_searched_for_a_number_of_heads(tmp_path: Path) -> None:
    choice = learn(tmp_path, "run", keep=7, gate_lr=0.6, updates=30, tune_updates=3)
    assert len(choice.kept) == 7 == sum(choice.tables["ranking"].kept)
    assert choice.record["learning"]["decision"] == "the 7 largest log_a"
    assert abs(choice.record["learning"]["heads_with_log_a_above_0"] - 7) <= 3
    assert set(choice.quality) == {"before", "gated", "masked", "tuned"}
    assert choice.quality["tuned"] < choice.quality["masked"]
    gates = pd.read_csv(tmp_path / "run" / "gates.csv")
    assert list(gates.columns) == ["update", "site", "layer", "head", "gate", "open", "lambda", "temperature"]
    assert len(gates) == 31 * sum(open_checkpoint(str(tmp_path / "whole")).layout.values())
    assert gates["lambda"].nunique() > 10 and gates.gate.between(0, 1).all()


def test_only_encoder_heads_go_and_the_decoder_stays_as_it_was(tmp_path: Path) -> None:
    choice = learn(tmp_path, "run", strength=1.0, sites=("encoder-self",), gate_lr=0.6, updates=10)
    assert choice.removed and {head.site for head in choice.removed} == {Site.ENCODER_SELF}
    before, after = (
        open_checkpoint(str(path), dtype="float32").model.state_dict()
        for path in (tmp_path / "whole", tmp_path / "run/model")
    )
    changed_names = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed_names and all(name.startswith("encoder.") for name in changed_names)
    assert json.loads((tmp_path / "run" / "pruning.json").read_text())["learning"]["freeze"] == "decoder"


def test_removing_takes_the_list_and_what_was_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove, "timings", lambda *_, **__: [])
    choice = learn(tmp_path, "run", keep=9, updates=2, remove=True)
    smaller = open_checkpoint(str(choice.record["removed_to"]))
    assert sum(smaller.layout.values()) == 9
    by_hand = remove_heads(tmp_path / "run" / "model", tmp_path / "by-hand", str(tmp_path / "run" / "removed.txt"))
    state = open_checkpoint(str(by_hand.path)).model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in smaller.model.state_dict().items())


def test_a_run_that_was_killed_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"keep": 7, "updates": 9, "save_every": 4}
    learn(tmp_path, "whole-run", **options)
    count, real = [0], L0.after_update

    def dies(self: L0) -> None:
        count[0] += 1
        if count[0] == 7:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(L0, "after_update", dies)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path, "killed", **options)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["state.pt"]
    with pytest.raises(ConfigError, match=r"--resume.*--seed"):
        learn(tmp_path, "killed", resume=True, **options, seed=5)
    learn(tmp_path, "killed", resume=True, **options)
    for name in ("gates.csv", "ranking.csv", "removed.txt", "model/model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole-run" / name).read_bytes(), name
    assert not (tmp_path / "killed" / "state.pt").exists()


def test_gates_of_the_checkpoint_itself_do_not_learn() -> None:
    checkpoint = checkpoints.small(self_mixing="hard-concrete.v1")
    names = {id(parameter): name for name, parameter in checkpoint.model.named_parameters()}
    frozen_names = set(names.values()) - {names[id(weights)] for weights in trained_parameters(checkpoint, "none")}
    assert frozen_names and all(name.endswith("mixing.log_a") for name in frozen_names)


def test_a_trained_model_loses_nothing_without_a_price_and_heads_with_one(shared: Path, tmp_path: Path) -> None:
    """The story-of-heads oracle on its own pairs; the gates alone learn, from the program's random start."""
    folder = shared / "oracles" / "story-of-heads"
    pairs = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
    source, target = (write_lines(tmp_path / side, [pair[side] for pair in pairs]) for side in ("src", "dst"))
    options: dict[str, Any] = {"checkpoint": str(folder / "model.npz"), "source": source, "target": target}
    options |= {"updates": 20, "gate_lr": 0.6, "freeze": "model", "device": "cpu"}
    kept_counts = []
    for strength in (0.0, 0.1):
        choice = run_learning(LearnConfig(**options, out=tmp_path / f"{strength}", method=L0Options(strength=strength)))
        kept_counts.append(len(choice.kept))
        if strength == 0:
            assert max(choice.quality["masked"], choice.quality["gated"]) <= choice.quality["before"]
        assert not choice.record["model"] and not (tmp_path / f"{strength}" / "model").exists()
    assert 36 >= kept_counts[0] > 30 > kept_counts[1], kept_counts


def test_seeds_decide_about_order_hidden_tokens_and_noise_each_by_itself(tmp_path: Path) -> None:
    checkpoint = speakers.checkpoint("bert")
    data = TrainingExamples(checkpoint, speakers.corpus("bert", count=60), limit=60)
    orders = [[group.tolist() for group in data.plan(tokens=60, order=(seed, 1))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    hidden = [(data.batch(np.arange(60), seed=seed).labels == -100).tolist() for seed in (1, 1, 2)]  # type: ignore[union-attr]
    assert hidden[0] == hidden[1] != hidden[2]
    for seed in (1, 2):  # of one batch that is all of the text
        learn(tmp_path, f"{seed}", strength=0.1, seed=seed, updates=1, batch_tokens=10**6)
    assert (tmp_path / "1" / "gates.csv").read_bytes() != (tmp_path / "2" / "gates.csv").read_bytes()
