"""Voita et al. 2019's layer-wise relevance of heads, in closed form: `voita_relevance(…)`.

The paper's own program, as it is since June 2021, forms (length · width)² Jacobians and runs once per target position.
Here transitions are built in blocks, do not depend on the relevance, and serve all positions.

For each explained position the start is 1.0 at one logit (the indicator, not the logit's value). Relevance of a head
is read at its context as it enters the output projection, after mixing and gates. Relevance of the input is that of
the sum that enters the first layer: embeddings and positions are not gone into.

The rule sets: `voita` is the program's default; the others are its other modes and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import precise_type
from headscope.model.discovery import eval_mode
from headscope.model.forward import Pool, mean_pooled
from headscope.relevance.rulesets import (
    Explanation,
    Relevance,
    RuleSet,
    Steps,
    Target,
    explained_output,
    explained_quantity,
    explained_units,
    join_relevance,
    register,
)
from headscope.relevance.voita.propagation import propagate
from headscope.relevance.voita.rules import OutputUnits, VoitaRules, VoitaSettings
from headscope.relevance.voita.trace import trace_model


def starting_relevance(checkpoint: Checkpoint, batch: Batch, output: Tensor, quantity: str) -> Tensor | OutputUnits:
    """The relevance that an output starts with; position p is explained at p."""
    if quantity == "representation":
        real = (batch.source if batch.target is None else batch.target).real
        return projection_shares(output, real, checkpoint.pool)
    dtype = precise_type(output.dtype)
    classes, is_explained = (part.to(output.device) for part in explained_units(checkpoint, batch, output, quantity))
    if classes.ndim == 1:  # of a classifier
        return torch.nn.functional.one_hot(classes, output.shape[-1])[None].to(dtype)
    tokens = torch.arange(classes.shape[1], device=classes.device)[:, None].expand(-1, len(classes))
    return OutputUnits(tokens, torch.where(is_explained, classes, 0).T, is_explained.T.to(dtype))


def projection_shares(states: Tensor, real: Tensor, pool: Pool = mean_pooled) -> Tensor:
    """Contributions of neurons [1 b t d] to the length of the pooled vector: each times the length's gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        own = states.to(precise_type(states.dtype)).detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pool(own, real.clone()).norm(dim=-1).sum(), own)
    return (own.detach() * gradient)[None]


BLOCK_BYTES = 2**28
COPIES = 8  # of the widest states that are held at a time, counting queries, keys and values


@dataclass(frozen=True)
class VoitaRelevance:
    """Relevance of heads per (site, layer).

    `inputs` [p b t d] is that of what enters the first layer of each stack, neuron by neuron, the encoder's first;
    `memory` [p b s d] that of the encoder's output (None: there is none). Both are left out where not wanted.
    `is_explained` [p b] says which entries are explained positions and not padding.
    """

    heads: dict[tuple[Site, int], Relevance]
    inputs: tuple[Tensor, ...]
    memory: Tensor | None
    is_explained: Tensor


def voita_relevance(
    checkpoint: Checkpoint,
    batch: Batch,
    *,
    settings: VoitaSettings | None = None,
    target: Target = "top1",
    neurons: bool = True,
) -> VoitaRelevance:
    """Relevance for the predictions of a batch; position p of the result is each sentence's position p.

    `target` "top1": the likeliest token at the position; "reference": the one that should be there (positions
    without a label are not explained). A classifier is explained at its class, a model that predicts nothing by the
    projection of its mean-pooled final state on its own direction, each neuron starting with its share of it:
    both once, at p = 0. A contrast of logits is no indicator, which this rule starts from: ConfigError.
    """
    if target == "contrastive":
        raise ConfigError(
            f"target {target!r} does not go with voita, which starts from 1.0 at one output; choose top1 or "
            "reference, or a gradient-based rule set"
        )
    quantity = explained_quantity(checkpoint, has_target=batch.target is not None, target=target)
    return relevance_of_pass(
        checkpoint.model,
        lambda: explained_output(checkpoint, batch, target)[0],
        lambda output: starting_relevance(checkpoint, batch, output, quantity),
        settings=settings,
        neurons=neurons,
    )


@torch.inference_mode(False)
@torch.no_grad()
def relevance_of_pass(
    model: nn.Module,
    forward: Callable[[], Tensor],
    start: Callable[[Tensor], Tensor | OutputUnits],
    *,
    settings: VoitaSettings | None = None,
    block_bytes: int = BLOCK_BYTES,
    neurons: bool = True,
) -> VoitaRelevance:
    """Relevance in any forward pass of a model, which is left as it was; `start` maps its output to that there.

    That is a tensor [p …] with the output's shape, or `OutputUnits`. `block_bytes` is the budget for what is held at a
    time beside the activations of the forward pass and the result; `neurons` says whether the result has relevances
    neuron by neuron, which take length² · width. CheckpointError where an operation has no rule.
    """
    with eval_mode(model):
        with trace_model(model) as trace:
            output = forward()
        at_output = start(output)
    rules = VoitaRules(
        settings or VoitaSettings(), sentences=trace.sentences, dtype=precise_type(output.dtype), block=block_bytes
    )
    values = at_output.values if isinstance(at_output, OutputUnits) else at_output
    steps = [step for step in trace.steps if step.kind in ("root", "linear", "norm", "add")]
    if isinstance(at_output, OutputUnits):
        steps = steps[:-1]  # the logits, of which single units are explained
    widest = max((step.output.numel() for step in steps), default=1)
    size = max(1, block_bytes // (COPIES * widest * values.element_size()))
    parts = [propagate(trace, output, part, rules) for part in _split(at_output, size)]
    heads = {layer: join_relevance([part.heads[layer] for part in parts]) for layer in parts[0].heads}
    names = [name for name in trace.roots if name in parts[0].roots] if neurons else []
    inputs = tuple(torch.cat([part.roots[name] for part in parts]) for name in names)
    memories = [part.memory for part in parts if part.memory is not None] if neurons else []
    if not isinstance(at_output, OutputUnits):
        values = values.reshape(len(values), trace.sentences, -1).ne(0).any(dim=-1)
    return VoitaRelevance(heads, inputs, torch.cat(memories) if memories else None, values != 0)


def _split(start: Tensor | OutputUnits, size: int) -> list[Tensor | OutputUnits]:
    if isinstance(start, Tensor):
        return list(torch.split(start, size))
    columns = (torch.split(column, size) for column in (start.tokens, start.classes, start.values))
    return [OutputUnits(*parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Voita(RuleSet):
    """Starts from an indicator at each position; rescaling is not linear, so positions are explained one by one."""

    name: str
    summary: str
    settings: VoitaSettings = field(default_factory=VoitaSettings)
    linear = False
    steps = "each"

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """`values` are 1 where something is explained: the indicator, not a logit."""
        if steps != "each":
            raise ConfigError(f"{self.name} is not linear, it explains each position by itself; choose steps 'each'")
        relevance = voita_relevance(checkpoint, batch, settings=self.settings, target=target, neurons=False)
        counts = relevance.is_explained.float()
        return Explanation(relevance.heads, counts, counts)


for name, summary, settings in (
    ("voita", "LRP as in Voita et al.'s program, 2021: alpha-beta rule on exact Jacobians", VoitaSettings()),
    ("voita-constant", "the same with attention weights as constants", VoitaSettings(attention_constant=True)),
    ("voita-eps", "the same in its signed mode (ill-conditioned at norms)", VoitaSettings(mode="eps")),
    (
        "voita-eps-constant",
        "the signed mode with attention weights as constants",
        VoitaSettings(mode="eps", attention_constant=True),
    ),
    ("voita-paper", "contribution ratios of the paper's appendix A", VoitaSettings(version="paper")),
):
    register(Voita(name, summary, settings))
