"""The growth loss and its window, the disagreement loss, and the variants that use them."""

import json
import math
from pathlib import Path

import pytest
import torch

from headscope.config.option import make_config
from headscope.errors import ConfigError
from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import SITES, Site
from headscope.model.native.layers import Attention
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.taps import capture
from headscope.training.config import TrainConfig
from headscope.training.losses import (
    fork_loss,
    fork_open,
    fork_total,
    growth_loss,
    mean_cosine,
    nuclear_norms,
    off_diagonal,
)
from headscope.training.trainer import make_run
from headscope.training.variant import VARIANTS
from headscope.training.variants.disagreement import Disagreement, DisagreementOptions
from headscope.training.variants.mixing import matrices_of
from tests.oracles import growth as oracle
from tests.oracles import lessons, native


def matrices(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(h, h, generator=generator, dtype=torch.float64).requires_grad_() for h in sizes]


def test_the_gradient_of_growth_is_minus_gamma_times_the_polar_factor() -> None:
    alphas = {Site.ENCODER_SELF: matrices(5, 5), Site.CROSS: matrices(7, 3)}
    ratios = {Site.ENCODER_SELF: 0.5, Site.DECODER_SELF: 1.0, Site.CROSS: 2.0}
    loss = growth_loss(alphas, gamma=3.0, ratios=ratios, radius=0.25)
    assert float(loss.detach()) == pytest.approx(3 * 0.25 * (0.5 * 2 + 2.0 * 2))
    loss.backward()
    for site, group in alphas.items():
        for alpha in group:
            assert alpha.grad is not None
            expected = -3.0 * ratios[site] * oracle.polar(alpha.detach())
            torch.testing.assert_close(alpha.grad, expected, rtol=0, atol=1e-9)


def test_at_the_identity_the_push_is_on_the_diagonal_and_the_radius_is_in_no_gradient() -> None:
    slopes = []
    for radius in (1e-4, 10.0):
        alpha = torch.eye(5, dtype=torch.float64).requires_grad_()
        growth_loss({Site.CROSS: [alpha]}, gamma=2.0, ratios={Site.CROSS: 1.0}, radius=radius).backward()
        assert alpha.grad is not None
        torch.testing.assert_close(alpha.grad, -2 * torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
        slopes.append(alpha.grad)
    assert torch.equal(*slopes)


def test_a_capped_matrix_is_pushed_no_further() -> None:
    small, large = (scale * torch.eye(3, dtype=torch.float64) for scale in (1.9, 2.1))
    pair = [small.requires_grad_(), large.requires_grad_()]
    growth_loss({Site.CROSS: pair}, gamma=1.0, ratios={Site.CROSS: 1.0}, cap=2.0).backward()
    assert pair[0].grad is not None and pair[0].grad.trace() == pytest.approx(-3)
    assert pair[1].grad is None or not pair[1].grad.any()


def test_norms_and_off_diagonal_shares() -> None:
    alphas = matrices(3, 5, 3)
    for alpha, norm in zip(alphas, nuclear_norms(alphas), strict=True):
        values = torch.linalg.eigvalsh(alpha.detach().T @ alpha.detach()).clamp_min(0).sqrt()
        assert float(norm.detach()) == pytest.approx(float(values.sum()))
        size = alpha.detach().abs()
        expected = sum(float(size[i, j]) for i in range(len(size)) for j in range(len(size)) if i != j) / float(
            size.sum()
        )
        assert off_diagonal(alpha) == pytest.approx(expected)


def test_the_forks_window_is_the_one_it_was_seen_to_open() -> None:
    """mhr.md §2.3: 29,000 sentences in 545 updates, start 0.0045: open for the last 4 updates of epoch 1, shut for
    the first of epoch 2, then open: the alphas' Adam counters said 4 and 548."""
    sizes = [29000 // 545 + (number < 29000 % 545) for number in range(545)][::-1]
    sentences, open_updates, ends = 0, 0, []
    for _ in range(2):
        for number, size in enumerate(sizes):
            open_updates += fork_open(sentences, 0.0045, first_of_epoch=number == 0)
            sentences += size
        ends.append(open_updates)
    assert ends[1] - ends[0] == 544 and 1 <= ends[0] <= 5
    assert not fork_open(0, 0.0, first_of_epoch=True) and fork_open(1, 0.0, first_of_epoch=True)
    edge = round(0.31 * 40 * 160239)
    assert not fork_open(edge - 1, 0.31, first_of_epoch=False) and fork_open(edge + 1, 0.31, first_of_epoch=False)
    assert not fork_open(edge + 1, 0.31, first_of_epoch=True)
    assert not fork_open(40 * 160239, None, first_of_epoch=False)


@pytest.mark.slow
def test_the_forks_loss_and_gradients_are_the_references(shared: Path) -> None:
    """Every setting of loss_reference.json; losses and totals agree to the last digits of single precision."""
    reference = json.loads((shared / "oracles/mhr/alpha/oracle/loss_reference.json").read_text())
    model, entropy, contexts = oracle.fork_batch(shared / "oracles")
    alphas = matrices_of(model)
    count = 0
    for name, expected in reference.items():
        args = expected["args"]
        if "loss" not in expected:  # the fork itself fails without a radius
            continue
        loss = entropy
        if "cosine_sim_loss" in args:
            parts = [[contexts[site, layer] for layer in range(3)] for site in SITES]
            loss = loss + args["cosine_sim_loss"] * fork_loss(*parts)
        ratios = dict(zip(SITES, (args.get(f"{n}_alpha_loss_ratio", 0.0) for n in ("enc_self", "dec_self", "dec_enc")),
                          strict=True))  # fmt: skip
        sentences = round((1 - args.get("batch_num", 1.0)) * 160239 * 40)
        is_open = "gamma_conf" in args and fork_open(sentences, args["start_after"], first_of_epoch=False)
        if is_open:
            loss = loss + growth_loss(alphas, gamma=args["gamma_conf"], ratios=ratios, radius=args["radius"])
        assert float(loss.detach()) == pytest.approx(expected["loss"], rel=2e-7), name
        model.zero_grad()
        loss.backward(retain_graph=True)
        for site in SITES:
            for layer, alpha in enumerate(alphas[site]):
                slope = expected["alpha_grad"][oracle.KEYS[site].format(layer)]
                assert (slope is not None) == (is_open and ratios[site] != 0), name
                if slope is not None:
                    count += 1
                    target = torch.tensor(slope)
                    torch.testing.assert_close(alpha.grad, target, rtol=0, atol=5e-6 * float(target.abs().max()))
                total = expected["cosine_similarity_total"][oracle.KEYS[site].format(layer)]
                assert float(fork_total(contexts[site, layer].detach())) == pytest.approx(total, rel=1e-6)
    assert count == 9 * 3 + 6


def test_cosines_are_means_over_pairs_and_real_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, 3:] = False
    total, count = 0.0, 0
    for b in range(2):
        for t in range(5):
            if real[b, t]:
                count += 1
                for i in range(3):
                    for j in range(3):
                        x, y = context[b, i, t], context[b, j, t]
                        total += float(x @ y / (x.norm() * y.norm())) / 9
    assert float(mean_cosine(context, real)) == pytest.approx(total / count, rel=1e-12)
    assert float(mean_cosine(context[:, :1].expand(2, 3, 5, 7), real)) == pytest.approx(1)


def test_before_the_window_mixing_is_the_baseline_bit_for_bit(tmp_path: Path) -> None:
    mixing = lessons.begin(tmp_path / "a", "mixing", start_after=0.5)
    plain = lessons.begin(tmp_path / "b", "baseline")
    for run in (mixing, plain):
        torch.manual_seed(0)  # of dropout
        lessons.updates(run, 4)
    mine, theirs = lessons.weights(mixing), lessons.weights(plain)
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    alphas = {key: value for key, value in mine.items() if key not in theirs}
    assert len(alphas) == 5 and all(torch.equal(value, torch.eye(3).double()) for value in alphas.values())
    assert not any(alpha in mixing.optimizer.state for group in matrices_of(mixing.model).values() for alpha in group)


@pytest.mark.parametrize("compat", ["none", "fork"])
def test_an_open_window_adds_the_push_to_the_gradient(compat: str, tmp_path: Path) -> None:
    """By default gamma·r·UVᵀ beside the mean loss, in the fork gamma·r·UVᵀ / tokens."""
    slopes, tokens = [], 0
    for number, gamma in enumerate((0.0, 0.7)):
        growth = {"gamma": gamma, "start_after": 0.0, "ratios": (1.0, 0.0, 2.0), "compat": compat}
        run = lessons.begin(tmp_path / str(number), "mixing", shared={"dropout": 0.0}, **growth)
        lessons.variant(run).sentences = 1  # the fork's first batch of all is outside
        alphas = matrices_of(run.model)
        lessons.variant(run).before_update(run, run.position)
        run.model.zero_grad()
        run.model.train()
        batches = lessons.next_batch(run) * 2
        tokens = sum(batch.predictions for batch in batches)
        run.variant.step(run, batches, run.gradients)
        assert all(alpha.grad is None for alpha in alphas[Site.DECODER_SELF])
        slopes.append([alpha.grad for site in (Site.ENCODER_SELF, Site.CROSS) for alpha in alphas[site]])
    scale = 0.7 if compat == "none" else 0.7 * 2 / tokens
    for index, (without, push) in enumerate(zip(*slopes, strict=True)):
        ratio = 1.0 if index == 0 else 2.0
        torch.testing.assert_close(push - without, -scale * ratio * torch.eye(3).double(), rtol=0, atol=1e-10)


def test_a_window_that_opens_late_starts_adam_there(tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "mixing", shared={"updates": 8, "max_epochs": None}, start_after=0.5)
    lessons.updates(run, 7)
    steps = {int(run.optimizer.state[alpha]["step"]) for group in matrices_of(run.model).values() for alpha in group}
    assert steps == {3}
    history = lessons.variant(run).history(run)
    assert history["window"] == 1 and history["nuclear_norm.cross"] > 1 and 0 < history["off_diagonal.cross"] < 1


def test_disagreement_adds_the_mean_cosine_of_every_target_token(tmp_path: Path) -> None:
    sums = []
    for number, weight in enumerate((0.0, 2.0)):
        run = lessons.begin(tmp_path / str(number), "disagreement", shared={"dropout": 0.0}, weight=weight)
        run.model.zero_grad()
        sums.append((run.variant.step(run, lessons.next_batch(run), run.gradients), lessons.variant(run).latest, run))
    (plain, _, _), (outcome, cosine, run) = sums
    assert outcome.loss - plain.loss == pytest.approx(2 * cosine * outcome.tokens, rel=1e-9)
    batch = lessons.next_batch(run)[0]
    contexts: list[float] = []
    with torch.no_grad(), capture(run.model, ("context",)) as heads:
        final_states(run.model, batch)
    for site in SITES:
        for layer in range(1 if site is Site.ENCODER_SELF else 2):
            contexts.append(float(mean_cosine(heads[site, layer]["context"], batch.sides(site)[0].real)))
    assert cosine == pytest.approx(math.fsum(contexts) / 5, rel=1e-9)


def test_wide_and_narrow_have_the_parameters_of_their_formulas() -> None:
    """papers.md §7: width 256, 8 heads, no biases of queries, keys and values."""
    stack = StackConfig(vocabulary=5, d_model=256, d_ffn=8, d_head=32, self_heads=(8,))
    for name, options, expected in (
        ("wide", {}, 2_097_408),
        ("narrow", {}, 90_368),
        ("narrow", {"shared_qkv": True}, 68_864),
        ("wide", {"d_head": 32}, 262_400),
    ):
        cls = VARIANTS.get(name)
        config = cls(cls.Options(qkv_bias=False, **options)).shape(TransformerConfig(decoder=stack)).decoder
        assert sum(p.numel() for p in Attention(config, 8, d_memory=256).parameters()) == expected, (name, options)
    wide = VARIANTS.get("wide")
    with pytest.raises(ConfigError, match=r"--shared-qkv.*--head-input slice"):
        make_config(wide.Options, {"shared_qkv": True})
    with pytest.raises(ConfigError, match=r"--d-head.*0"):
        make_config(wide.Options, {"d_head": 0})
    dims = wide(wide.Options()).shape(native.config())
    assert (
        dims.encoder is not None and dims.encoder.d_head == dims.decoder.d_head == 13 and dims.decoder.d_value is None
    )


def test_a_run_with_the_forks_cosine_loss_has_the_references_loss_and_gradients(tmp_path: Path, shared: Path) -> None:
    """Padding takes part: it is embedded as there, and does not learn where it is read."""
    folder = shared / "oracles/mhr"
    expected = json.loads((folder / "alpha/oracle/loss_reference.json").read_text())["cosine_only"]
    for side in ("de", "en"):
        lines = (folder / f"data/test.bpe.{side}").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / side).write_text("".join(lines[:16]), encoding="utf-8")
    config = TrainConfig(
        source=tmp_path / "de", target=tmp_path / "en", out=tmp_path / "run", init=f"{folder}/alpha/checkpoint_best.pt",
        dicts=folder / "data", precision="float32", dropout=0.0, max_epochs=1, max_tokens=10**6,
    )  # fmt: skip
    run = make_run(config, Disagreement(DisagreementOptions(weight=0.1, compat="fork")))
    run.model.zero_grad()
    run.model.train()
    sums = run.variant.step(run, lessons.next_batch(run), run.gradients)
    assert sums.sentences == 16 and sums.loss == pytest.approx(expected["loss"], rel=2e-7)
    for site, layer, _, module in run.model.attention_modules():
        key = oracle.KEYS[site].format(layer)
        for name, projection in (("qproj", module.query), ("vproj", module.value)):
            assert projection.weight.grad is not None
            norm = float(projection.weight.grad.norm()) * sums.tokens
            assert norm == pytest.approx(expected[f"{name}_grad_norm"][key], rel=1e-4)
    table = run.model.get_parameter("encoder.embeddings.tokens.weight")
    assert table.grad is not None and run.data.source is not None
    assert not table.grad[run.data.source.pad].any()
