"""The layer-wise relevance of heads of Voita et al. 2019, in closed form: `voita_relevance(…)`.

The authors' program (since June 2021) computes Jacobians with (length · width)² entries, once per target position.
Here transitions are computed in blocks, once for all positions.

For each explained position the relevance at the output is 1.0 at one logit (an indicator, not the logit's value). The
relevance of a head is read at its context as it enters the output projection, after mixing and gates. The relevance of
the input is that of the sum of embeddings and positions that enters the first layer.

The rule set `voita` is the program's default; the others are its other modes and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
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
    """The relevance at the output: 1.0 at one unit of each position p, or shares of the pooled vector's length."""
    if quantity == "representation":
        real = (batch.source if batch.target is None else batch.target).real
        return projection_shares(output, real, checkpoint.pool)
    dtype = precise_type(output.dtype)
    classes, is_explained = (part.to(output.device) for part in explained_units(checkpoint, batch, output, quantity))
    if classes.ndim == 1:  # a classifier's
        return torch.nn.functional.one_hot(classes, output.shape[-1])[None].to(dtype)
    tokens = torch.arange(classes.shape[1], device=classes.device)[:, None].expand(-1, len(classes))
    return OutputUnits(tokens, torch.where(is_explained, classes, 0).T, is_explained.T.to(dtype))


def projection_shares(states: Tensor, real: Tensor, pool: Pool = mean_pooled) -> Tensor:
    """The share of each neuron [1 b t d] in the length of the pooled vector: its value times the length's gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        variable = states.to(precise_type(states.dtype)).detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pool(variable, real.clone()).norm(dim=-1).sum(), variable)
    return (variable.detach() * gradient)[None]


BLOCK_BYTES = 2**28
COPIES = 8  # of the widest states in memory at a time, with queries, keys and values


@dataclass(frozen=True)
class VoitaRelevance:
    """The relevance of heads by (site, layer), and of neurons if requested.

    `inputs` has the relevance [p b t d] of the input of each stack's first layer, the encoder's first; `memory`
    [p b s d] is that of the encoder's output (None: there is none). `is_explained` [p b] marks explained positions.
    """

    heads: dict[SiteLayer, Relevance]
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
    """The relevance of heads for the predictions of a batch; p is the position in each sentence.

    `target` "top1" explains the likeliest token at each position, "reference" the correct one (positions without a
    label are not explained). A classifier is explained at its class; a model that predicts nothing by the length of
    its mean-pooled final state, of which each neuron starts with its share: both once, at p = 0. ConfigError for the
    target "contrastive", because the rule starts from one logit.
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
    """The relevance of heads in any `forward` pass of a model; `start` gives the relevance at its output.

    That is a tensor [p …] for an output […], or `OutputUnits`. `block_bytes` limits the memory beside activations and
    result; `neurons`: the result has the relevance of neurons too, which takes length² · width. CheckpointError where
    an operation has no rule.
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
        steps = steps[:-1]  # not the logits, of which only single units have relevance
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
    """The relevance at the output in parts of `size` explained positions."""
    if isinstance(start, Tensor):
        return list(torch.split(start, size))
    columns = (torch.split(column, size) for column in (start.tokens, start.classes, start.values))
    return [OutputUnits(*parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Voita(RuleSet):
    """Starts from an indicator at each position; rescaling is not linear, so each position is explained by itself."""

    name: str
    summary: str
    settings: VoitaSettings = field(default_factory=VoitaSettings)
    linear = False
    steps = "each"

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """The relevance of heads; `values` are the indicators, 1 at explained positions."""
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
