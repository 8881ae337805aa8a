"""Mixtures of attentive experts: their identities, what their gates may see, and how they are trained."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.errors import ConfigError, HeadscopeError
from headscope.formats.transformer_checkpoint import final_states
from headscope.model.mixing.base import Queries, build_mixing
from headscope.model.mixing.experts import (
    Experts,
    Gate,
    RealBatchNorm,
    expert_mode,
    experts_of,
    head_factors,
    masked_mean,
    membership,
)
from headscope.model.native.transformer import Transformer, fold_mixings
from headscope.training import checkpoints
from headscope.training.trainer import make_run
from headscope.training.variant import VARIANTS
from tests.oracles import experts as oracle
from tests.oracles import lessons, native
from tests.oracles.experts import perturb_gates


def experts(heads: int = 5, **options: Any) -> Experts:
    mixing = build_mixing("experts.v1", heads=heads, d_value=7, d_model=11, options=options).double().eval()
    assert isinstance(mixing, Experts)
    return mixing


@pytest.mark.parametrize(("heads", "size"), [(5, 4), (5, 3), (3, 1), (2, 1)])
def test_a_mixture_is_one_factor_for_each_head(heads: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(heads, 3, 7, generator=generator, dtype=torch.float64)
    gates = torch.randn(len(oracle.experts_of(heads, size)), generator=generator, dtype=torch.float64).softmax(0)
    factors = head_factors(gates, heads=heads, size=size)
    output = sum(factors[head] * outputs[head] for head in range(heads))
    torch.testing.assert_close(output, oracle.mixture(outputs, gates, size), rtol=0, atol=1e-12)
    assert float(factors.sum()) == pytest.approx(heads)
    if size == heads - 1:
        torch.testing.assert_close(factors, heads / (heads - 1) * (1 - gates), rtol=0, atol=1e-12)
    assert membership(8, 6).shape == (28, 8)


@pytest.mark.parametrize("options", [{}, {"size": 2}, {"uniform": True}, {"norm": "batch"}])
def test_even_responsibilities_are_plain_attention(options: dict[str, Any]) -> None:
    mixture, context = experts(**options), torch.randn(2, 5, 3, 7).double()
    output = mixture(context, Queries(torch.randn(2, 3, 11).double()))
    torch.testing.assert_close(output, context, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", ["sampled", "argmax", "random"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0, 2])
def test_one_expert_at_a_time(mode: Any, causal: bool, size: int) -> None:
    """Factors are h/k or 0 and add up to h; the choice is one for each sentence where the gate is."""
    mixture = perturb_gates(experts(size=size))
    queries = Queries(torch.randn(64, 3, 11).double(), causal=causal)
    with expert_mode([mixture], mode):
        factors = mixture.factors(queries)
    assert factors is not None and factors.shape == (64, 3 if causal and mode != "random" else 1, 5)
    k = mixture.size
    assert ((factors == 0) | (factors == 5 / k)).all()
    torch.testing.assert_close(factors.sum(-1), torch.full(factors.shape[:2], 5.0).double())
    if mode != "argmax":
        assert len(factors[:, 0].unique(dim=0)) > 1
    else:
        best = mixture.log_gates(queries).argmax(-1)
        assert torch.equal(factors, membership(5, k).double()[best] * 5 / k)
    assert mixture.mode == "soft"


def test_where_the_gate_stays_the_draw_stays() -> None:
    """The noise is one for each sentence: equal inputs at all positions give one expert."""
    mixture = perturb_gates(experts())
    states = torch.randn(64, 1, 11).double().expand(64, 6, 11)
    with expert_mode([mixture], "sampled"):
        choice = mixture.choose(Queries(states, causal=True))
    assert (choice == choice[:, :1]).all() and len(choice[:, 0].unique()) > 1


@pytest.mark.parametrize("window", [0, 3, 100])
def test_means_over_real_positions(window: int) -> None:
    states = torch.randn(3, 6, 11, generator=torch.Generator().manual_seed(1)).double()
    real = torch.ones(3, 6, dtype=torch.bool)
    real[1, 2:] = False
    full, _ = masked_mean(Queries(states, real), window=window)
    causal, _ = masked_mean(Queries(states, real, causal=True), window=window)
    assert full.shape == (3, 1, 11) and causal.shape == (3, 6, 11)
    for b in range(3):
        valid = [t for t in range(6) if real[b, t]]
        torch.testing.assert_close(full[b, 0], sum(states[b, t] for t in valid) / len(valid), rtol=0, atol=1e-12)
        for t in valid:
            span = range(max(0, t - window + 1) if window else 0, t + 1)
            torch.testing.assert_close(causal[b, t], sum(states[b, s] for s in span) / len(span), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [0, 2, 3])
@pytest.mark.parametrize("lengths", [[1] * 6, [3, 1, 2], [5, 1]])
def test_step_by_step_the_means_are_the_same(window: int, lengths: list[int]) -> None:
    """Padding on the left too, as prompts have it."""
    states = torch.randn(2, 6, 11).double()
    real = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    expected, _ = masked_mean(Queries(states, real, causal=True), window=window)
    memory: dict[str, torch.Tensor] = {}
    means, begin = [], 0
    for length in lengths:
        part = slice(begin, begin + length)
        means.append(masked_mean(Queries(states[:, part], real[:, part], True, memory), window=window)[0])
        begin += length
    torch.testing.assert_close(torch.cat(means, dim=1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_no_later_target_position_reaches_a_decoder_gate_while_it_learns(norm: str) -> None:
    """The statistics of a batch are over all its positions."""
    options = {"size": 0, "norm": norm, "hidden": 5}
    model = perturb_gates(Transformer(native.config(self_mixing="experts.v1", mixing_options=options)).double().train())
    source, target, *_ = native.texts()
    other = target.clone()
    other[:, 3] = (other[:, 3] + 1) % native.TARGET
    state = copy.deepcopy(model.state_dict())
    outputs = []
    for _ in range(2):  # the second time with running statistics that are no longer 0 and 1
        for inputs in (target, other):
            model.load_state_dict(state)
            torch.manual_seed(0)
            outputs.append(model(source, inputs))
        state = copy.deepcopy(model.state_dict())
        before, after = outputs[-2:]
        assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3:], after[:, 3:])
    outputs[-1].sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_batch_norm_sees_no_padding() -> None:
    norm, plain = RealBatchNorm(11).double(), torch.nn.BatchNorm1d(11).double()
    x, real = torch.randn(3, 4, 11).double() * 3 + 1, torch.rand(3, 4) > 0.4
    output = norm(x, real, learning=True)
    torch.testing.assert_close(output[real], plain.train()(x[real]), rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm(x, real, learning=False)[real], plain.eval()(x[real]), rtol=0, atol=1e-12)
    assert norm(x[:1, :1], real[:1, :1] | True, learning=True).isfinite().all()


def test_a_gate_has_as_many_parameters_as_the_papers() -> None:
    """papers.md §1.2: d = 512, 8 heads."""
    assert sum(p.numel() for p in Gate(512, 8, hidden=256, norm="batch", dropout=0.1).parameters()) == 134_408
    assert sum(p.numel() for p in Gate(512, 28, hidden=256, norm="batch", dropout=0.1).parameters()) == 139_548


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (5, {"size": 5}, "5.*1 to 4"),
        (40, {"size": 20}, "40.*137846528820.*20"),
        (5, {"norm": "group"}, "norm.*'group'.*batch, layer, none"),
        (5, {"window": -1}, "window.*-1"),
        (5, {"hidden": -1}, "hidden|-1"),
    ],
)
def test_mixtures_that_cannot_be(heads: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experts(heads, **options)


GATE = ".mixing.gate."


def step_once(run: Any, epoch: int) -> set[str]:
    """Names of the state that one update in that epoch changes."""
    perturb_gates(run.model)
    run.position = replace(run.position, epoch=epoch)
    before = lessons.weights(run)
    lessons.updates(run)
    after = lessons.weights(run)
    return {key for key in before if not torch.equal(before[key], after[key])}


@pytest.mark.parametrize("size", [0, 1])
def test_f_steps_leave_gates_alone(size: int, tmp_path: Path) -> None:
    """Bit for bit, running statistics of batch norm too."""
    run = lessons.begin(tmp_path, "mae", gate_norm="batch", gate_every=2, expert_heads=size)
    keys = step_once(run, epoch=1)
    assert keys and not any(GATE in key for key in keys)
    assert not any(id(gate) in map(id, run.trained_parameters) for gate in lessons.variant(run).gates)


def test_g_steps_change_gates_only(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "mae", shared={"max_tokens": 200, "log_every": 1}, gate_norm="batch", gate_every=2)
    perturb_gates(run.model)
    before = lessons.weights(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "descend", stop_after(type(run).descend))
        with pytest.raises(Stop):
            run.model.train()
            run.position = type(run.position)(epoch=2)
            run.variant.step(run, lessons.next_batch(run), run.gradients)
    after = lessons.weights(run)
    keys = {key for key in before if not torch.equal(before[key], after[key])}
    assert keys and all(GATE in key for key in keys)
    assert {key for key in before if GATE in key} == keys
    other_parameters = [parameter for name, parameter in run.model.named_parameters() if GATE not in name]
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in other_parameters)
    assert all(p.requires_grad for p in run.model.parameters())
    history = lessons.variant(run).history(run)
    assert history["gate_entropy"] > 0


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_gates_start_as_far_apart_as_asked(tmp_path: Path, scale: float) -> None:
    run = lessons.begin(tmp_path, "mae", gate_scale=scale)
    for mixture in experts_of(run.model):
        assert mixture.gate is not None
        weight = mixture.gate.outer.weight
        bound = scale * (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound <= float(weight.detach().abs().max()) <= bound
        assert not mixture.gate.outer.bias.any()


class Stop(Exception):
    """The G step is over."""


def stop_after(descend: Any) -> Any:
    def instead(run: Any, optimizer: Any, batches: Any) -> None:
        descend(run, optimizer, batches)
        raise Stop

    return instead


def test_joint_training_moves_both(tmp_path: Path) -> None:
    keys = step_once(lessons.begin(tmp_path, "mae", bcd=False), epoch=1)
    assert any(GATE in key for key in keys) and any("ffn" in key for key in keys)


def test_without_gates_the_checkpoint_is_a_plain_model(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "mae", uniform=True)
    assert not any("mixing" in key for key in run.model.state_dict())
    lessons.updates(run, 2)
    run.model.eval()
    batch = lessons.next_batch(run)[0]
    plain = fold_mixings(run.model)
    assert plain.config.decoder.self_mixing is None
    torch.testing.assert_close(final_states(plain, batch), final_states(run.model, batch), rtol=0, atol=1e-12)


def test_tuning_a_trained_mixture(tmp_path: Path) -> None:
    """FTG trains gates, FTG+ the output projections too, and the shape is that of the model given."""
    run = lessons.begin(tmp_path / "a", "mae", expert_heads=1, gate_hidden=7)
    lessons.updates(run, 2)
    checkpoints.save(run, "last")
    init = str(tmp_path / "a" / "run" / "last")
    for number, (tune, parts) in enumerate((("gates", (GATE,)), ("gates+output", (GATE, "attention.output.")))):
        cls = VARIANTS.get("mae")
        tuning = make_run(lessons.config(tmp_path / str(number), init=init), cls(cls.Options(tune=tune)))
        keys = step_once(tuning, epoch=1)
        names = {name for name, _ in tuning.model.named_parameters() if any(part in name for part in parts)}
        buffers = {key for key in keys if "running" in key}
        assert keys - buffers == names
    cls = VARIANTS.get("mae")
    with pytest.raises(HeadscopeError, match=r"--init.*--uniform"):
        make_run(lessons.config(tmp_path, init=init), cls(cls.Options(uniform=True)))


def test_plain_sgd_on_the_gates(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "mae", shared={"dropout": 0.0}, gate_dropout=0.0, gate_every=1, gate_lr=0.5)
    perturb_gates(run.model)
    run.model.train()
    before = [gate.detach().clone() for gate in lessons.variant(run).gates]
    run.gradients(lessons.next_batch(run))
    slopes = [gate.grad.clone() for gate in lessons.variant(run).gates]
    run.model.zero_grad()
    run.variant.step(run, lessons.next_batch(run), run.gradients)
    for gate, start, slope in zip(lessons.variant(run).gates, before, slopes, strict=True):
        torch.testing.assert_close(gate.detach(), start - 0.5 * slope, rtol=0, atol=1e-12)
