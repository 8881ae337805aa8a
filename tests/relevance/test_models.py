"""Backward rule sets on the architectures of transformers and on checkpoints: batches, steps, refusals."""

from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headscope.data.batching import Omissions, batches
from headscope.data.encoded import Batch
from headscope.engine.plan import choose_analyses
from headscope.errors import CheckpointError, ConfigError
from headscope.heads import Site, SiteLayer
from headscope.model import attention
from headscope.model.taps import observing
from headscope.relevance.backward import Backward, explain_backward, recording
from headscope.relevance.rulesets import RULE_SETS, Explanation
from tests.contracts.architectures import ARCHITECTURES, BY_NAME, Architecture, build, inputs_of, row_of
from tests.makers.studies import study_of
from tests.oracles import speakers, tiny

NAMES = tuple(name for name, rule_set in RULE_SETS if isinstance(rule_set, Backward))
EXPLAINABLE = [entry for entry in ARCHITECTURES if entry.name != "gpt_oss"]  # its router has no rule


def rule_sets(*names: str) -> list[Backward]:
    values = [RULE_SETS.get(name) for name in names or NAMES]
    assert all(isinstance(rule_set, Backward) for rule_set in values)
    return values  # type: ignore[return-value]


def explain(model: Any, inputs: dict[str, Tensor], *names: str) -> dict[str, Any]:
    """Relevances of the largest logit at every real position."""
    rules_of = {rule_set.name: rule_set.rules for rule_set in rule_sets(*names)}
    with recording(model, rules_of) as record:
        logits = model(**inputs).logits
    with torch.enable_grad():
        top = logits.max(dim=-1).values  # [b t] or [b]
        mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
        value = (top if mask is None or top.ndim == 1 else top * mask).sum()
    return {name: record.relevance(value, rules) for name, rules in rules_of.items()}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EXPLAINABLE, ids=lambda entry: entry.name)
def test_batch_equals_single_sentences(architecture: Architecture) -> None:
    """The sentence in the middle is padded on both sides; every architecture has every rule set."""
    model = build(architecture, implementation="eager", dtype="float64")
    inputs = inputs_of(architecture, lengths=(7, 4, 6), targets=(5, 2, 4), dtype=torch.float64)
    together = explain(model, inputs)
    for row in range(3):
        single = (
            {"pixel_values": inputs["pixel_values"][row : row + 1]}
            if architecture.task == "picture"
            else row_of(inputs, row)
        )
        for name, relevances in explain(model, single).items():
            assert set(relevances) == set(architecture.layout)
            for site_layer, alone in relevances.items():
                batch_relevance = together[name][site_layer]
                for part in ("raw", "absolute", "value_share", "qk_share"):
                    expected = getattr(alone, part)[0, 0]
                    gap = (getattr(batch_relevance, part)[0, row] - expected).abs().max()
                    assert gap <= 1e-4 * float(alone.absolute.max()), (name, site_layer, part)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "t5", "bart"])
def test_gradient_equals_plain_autograd(name: str) -> None:
    """Beside every other rule set in the same graph; read with a tap that knows nothing of rules."""
    architecture = BY_NAME[name]
    model = build(architecture, implementation="headscope", dtype="float64")
    inputs = inputs_of(architecture, dtype=torch.float64)
    contexts: list[Tensor] = []
    with attention.tap_contexts(lambda call, context: contexts.append(call.context)):
        value = model(**inputs).logits.max(dim=-1).values.sum()
    gradients = torch.autograd.grad(value, contexts)
    expected = [(c * g).detach().sum(dim=(2, 3)) for c, g in zip(contexts, gradients, strict=True)]
    order: list[SiteLayer] = []
    with torch.no_grad(), observing(model, lambda site_layer, call: order.append((site_layer.site, site_layer.layer))):
        model(**inputs)
    relevances = explain(model, inputs)["gradient"]
    for site_layer, numbers in zip(order, expected, strict=True):
        torch.testing.assert_close(relevances[site_layer].raw[0], numbers, rtol=1e-5, atol=1e-6)


class Strange(nn.Module):
    """A norm by the largest number, which no rule set knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(dim=-1, keepdim=True) * self.weight


@pytest.mark.parametrize(
    ("parent", "name", "part", "message"),
    [
        ("", "post_attention_layernorm", Strange(42), r"Strange \(model.layers.1.post_.*norm\).*'abs'.*attnlrp"),
        # 0.5 at zero: f(x)/x has no meaning
        ("mlp", "act_fn", nn.Sigmoid(), r"Sigmoid \(model.layers.1.mlp.act_fn\).*'sigmoid'"),
    ],
)
def test_what_has_no_rule_is_refused_by_name_and_nothing_is_left_behind(
    parent: str, name: str, part: nn.Module, message: str
) -> None:
    model, inputs = build(BY_NAME["llama"], implementation="eager"), inputs_of(BY_NAME["llama"])
    setattr(model.model.layers[1].get_submodule(parent), name, part)
    before = _state(model)
    with pytest.raises(CheckpointError, match=message):
        explain(model, inputs, "attnlrp")
    assert _state(model) == before
    relevances = explain(model, inputs, "gradient")["gradient"]  # needs no rule
    assert all(relevance.raw.isfinite().all() for relevance in relevances.values())
    assert _state(model) == before


def _state(model: nn.Module) -> list[Any]:
    """All that `recording` changes: forwards, hooks, flags, modes, implementation, context variables."""
    parts = [
        ("forward" in part.__dict__, len(part._forward_hooks), len(part._forward_pre_hooks), part.training)
        for part in model.modules()
    ]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    variables = {var.name: value for var, value in copy_context().items() if var.name.startswith("headscope")}
    config: Any = model.config
    modes = torch.overrides._get_current_function_mode_stack()
    return [parts, flags, variables, len(modes), torch.is_grad_enabled(), config._attn_implementation]


def batch_of(checkpoint: Any, count: int, *, labels: bool) -> tuple[Any, Batch]:
    candidates = batches(
        tiny.corpus(7, count=count), checkpoint, tokens=10**6, limit=61, omissions=Omissions(), labels=labels
    )
    return checkpoint, max(candidates, key=lambda batch: len(batch.indices))


def sum_positions(explanation: Explanation) -> dict[Any, Tensor]:
    return {site_layer: relevance.raw.sum(dim=0) for site_layer, relevance in explanation.relevance.items()}


def _words() -> tuple[Any, Batch]:
    """A tiny GPT-2 with a head, and a batch with padding and labels."""
    return batch_of(speakers.checkpoint("gpt2"), 17, labels=True)


def test_targets_are_the_logits_they_say() -> None:
    checkpoint, batch = _words()
    with torch.no_grad():
        logits = checkpoint.logits(batch)
    values = {
        target: explain_backward(checkpoint, batch, rule_sets("cp"), target=target, steps="each")["cp"].values.T
        for target in ("top1", "reference", "contrastive")
    }
    assert batch.labels is not None
    for b, t in batch.source.real.nonzero().tolist():
        row = logits[b, t]
        top = float(row.max())
        other_logits = sum(float(logit) for n, logit in enumerate(row) if n != int(row.argmax()))
        assert float(values["top1"][b, t]) == pytest.approx(top, rel=1e-9)
        assert float(values["contrastive"][b, t]) == pytest.approx(top - other_logits / len(row), rel=1e-9)
        label = int(batch.labels[b, t])
        assert float(values["reference"][b, t]) == pytest.approx(0.0 if label < 0 else float(row[label]), rel=1e-9)
    for value in values.values():
        assert not value[~batch.source.real].any()


def test_representation_is_explained_where_nothing_is_predicted() -> None:
    checkpoint, batch = batch_of(tiny.checkpoint("bert", 7), 5, labels=False)
    explanation = explain_backward(checkpoint, batch, rule_sets("cp"), target="top1", steps="each")["cp"]
    with torch.no_grad():
        states = checkpoint.states(batch)
    for row, real in enumerate(batch.source.real):
        assert float(explanation.values[0, row]) == pytest.approx(float(states[row, real].mean(dim=0).norm()), rel=1e-6)
    with pytest.raises(ConfigError, match="--target-token reference"):
        explain_backward(checkpoint, batch, rule_sets("cp"), target="reference", steps="sum")


def test_what_is_said_of_a_prediction_does_not_depend_on_the_passes() -> None:
    """Raw relevance is summed over predictions and divided by how many there are."""
    model, corpus, lrp = speakers.checkpoint("gpt2"), speakers.corpus("gpt2", count=5), choose_analyses(only=["lrp"])
    single, total = (
        study_of(model, corpus, *lrp, replicates=3, rules="cp", steps=steps).tables["lrp"] for steps in ("each", "sum")
    )
    np.testing.assert_allclose(single["raw"], total["raw"], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_analysis_sums_to_one_over_the_heads_of_a_layer() -> None:
    corpus, options = tiny.corpus(7, count=11, target=True), {"tokens": 101, "replicates": 13}
    study: Any = study_of(tiny.checkpoint("t5", 7), corpus, "lrp", **options, detail=True, rules="cp,attnlrp")
    sums = study.heads.groupby(["site", "layer"])["lrp"].sum()
    np.testing.assert_allclose(sums, 1.0, rtol=1e-6)
    table = study.tables["lrp"]
    assert list(dict.fromkeys(table["rules"])) == ["cp", "attnlrp"]
    first = table[table["rules"] == "cp"]
    np.testing.assert_allclose(first["relevance"], study.heads["lrp"], rtol=1e-9)
    assert (first["qk_share"] == 0).all() and (table[table["rules"] == "attnlrp"]["qk_share"] != 0).any()
    np.testing.assert_allclose(first["value_share"], first["raw"], rtol=1e-6)
    detail = study.detail["lrp"]["0/encoder-self"]  # [position, layer, head]
    assert detail.shape == (1, 2, 3)
    np.testing.assert_allclose(detail.sum(axis=-1), 1.0, rtol=1e-5)
    pivot = table.pivot_table(index=["site", "layer"], columns=["rules", "head"], values="relevance", sort=False)
    ranks = pivot["cp"].rank(axis=1).corrwith(pivot["attnlrp"].rank(axis=1), axis=1)
    agreement = study.tables["lrp_rules"]
    assert agreement["spearman"].tolist() == pytest.approx(ranks.tolist())
    assert agreement["second_head"].tolist() == pivot["attnlrp"].idxmax(axis=1).tolist()
    assert study.record["signatures"]["lrp"]["rules"] == "cp+attnlrp"


@pytest.mark.parametrize("target", ["top1", "reference", "contrastive"])
def test_one_pass_for_all_positions_is_the_sum_of_a_pass_for_each(target: Any) -> None:
    checkpoint, batch = _words()
    together = explain_backward(checkpoint, batch, rule_sets(), target=target, steps="sum")
    apart = explain_backward(checkpoint, batch, rule_sets(), target=target, steps="each")
    for name in NAMES:
        torch.testing.assert_close(together[name].counts, apart[name].counts.sum(dim=0, keepdim=True))
        torch.testing.assert_close(together[name].values, apart[name].values.sum(dim=0, keepdim=True))
        expected = sum_positions(apart[name])
        for site_layer, raw in sum_positions(together[name]).items():
            torch.testing.assert_close(raw, expected[site_layer], rtol=1e-9, atol=1e-11)
        decoder = apart[name].relevance[Site.DECODER_SELF, 0]
        for position in range(decoder.by_query.shape[0]):  # a prediction owes nothing to later positions
            assert not decoder.by_query[position, :, :, position + 1 :].any()
