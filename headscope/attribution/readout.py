"""The path from the residual stream to logits, and from heads to the stream, found by one pass over a short text.

Direct logit attribution (Elhage et al. 2021) needs a residual stream to which every head adds its output, one norm
after it, and one matrix to the vocabulary. Whether a model has these is read from the autograd graph of the pass: only
additions and constant factors (Granite's `residual_multiplier`) may lie between the output of an attention and the
final state, and at most one norm of that attention's output alone (Gemma 3, OLMo 2). A norm after the addition (BERT,
Marian) or a layer between the last norm and the vocabulary (masked language models) is refused with that reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.discovery import eval_mode
from headscope.model.interface import watch_modules
from headscope.model.projections import WeightOwners
from headscope.model.stored_weights import without_saved_tensors
from headscope.model.taps import frozen_parameters

PROBE_TOKENS = 5
LARGE = 100.0  # entries of a state so large that a norm's epsilon does not matter; their squares fit half precision
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative; half precision: 0.05
RESHAPES = frozenset(
    {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0", "ToCopyBackward0"}
)
"""Nodes of the autograd graph that change only the shape or type."""

ObservedNorms = list[tuple[nn.Module, Tensor, Tensor]]
"""Norms with their inputs and outputs."""


@dataclass(frozen=True)
class Norm:
    """y = gain · (x − mean) / σ + shift; `centred` says whether the mean is subtracted (LayerNorm, not RMSNorm)."""

    module: nn.Module
    gain: Tensor
    shift: Tensor
    centred: bool

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """1/σ [… 1] of every state, by least squares from input x and output y [… d]."""
        unscaled = self.gain * self.centre(x)
        return ((y - self.shift) * unscaled).sum(-1, keepdim=True) / unscaled.square().sum(-1, keepdim=True)

    def centre(self, x: Tensor) -> Tensor:
        """x, minus its mean if `centred`."""
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class StreamWriting:
    """The map from a layer's attention output o to the stream: factor · norm(o); `norm` None: factor · o."""

    factor: float = 1.0
    norm: Norm | None = None

    def fold(self, slices: Tensor) -> Tensor:
        """Slices of W_O [h k d] with factor and gain folded in; what they write lacks only the norm's 1/σ and shift."""
        slices = slices * self.factor
        return slices if self.norm is None else self.norm.centre(slices) * self.norm.gain.to(slices.dtype)


@dataclass(frozen=True)
class Readout:
    """logits = factor · weight · norm(x) + const, weight [V d], x the stream; `norm` None where there is none.

    `writing` has the map from attention outputs to x for every layer of the decoder.
    """

    weight: Tensor
    factor: float
    norm: Norm | None
    writing: Mapping[SiteLayer, StreamWriting]

    def direction(self, labels: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The direction [n d] in which a vector added to x [n d] raises the logit of labels [n] over the mean logit.

        The norm's σ is a constant; y [n d] is the norm of x.
        """
        direction = self.factor * (self.weight[labels] - self.weight.mean(dim=0)).to(x.dtype)
        return direction if self.norm is None else self.norm.centre(direction * self.norm.gain) * self.norm.scale(x, y)


def find_readout(checkpoint: Checkpoint) -> Readout | str:
    """The readout of a model whose decoder heads write directly to the stream, or the reason why there is none."""
    try:
        layer, weight = checkpoint.unembedding()
    except CheckpointError as error:
        return str(error)
    model, finals = checkpoint.model, list[Tensor]()
    owners, projections = WeightOwners(model), checkpoint.projections.items()
    owner_of = {
        site_layer: owners.of(parts.output)
        for site_layer, parts in projections
        if site_layer[0] is not Site.ENCODER_SELF
    }
    outputs: dict[SiteLayer, Any] = dict.fromkeys(owner_of)  # nodes of the graph
    modules: dict[Any, nn.Module] = {
        site_layer: owner[1] for site_layer, owner in owner_of.items() if owner is not None
    }
    modules[None] = layer

    def record(site_layer: SiteLayer | None, inputs: tuple[Any, ...], output: Any) -> None:
        if site_layer is None:
            finals.append(inputs[0])
        else:
            outputs[site_layer] = output.grad_fn

    with (
        torch.enable_grad(),
        eval_mode(model),
        frozen_parameters(model, trainable=True),
        observed_norms(model) as norms,
        watch_modules(modules, record),
        without_saved_tensors(),
    ):
        logits = checkpoint.logits(probe_text(checkpoint)).detach()
    final = finals[-1]
    expected = final.detach() @ weight.T
    factor = proportion(logits - logits[:, :1], expected - expected[:, :1])  # a constant bias cancels
    if factor is None:
        return "its logits are not a multiple of weight times final state plus a constant bias (capped, say)"
    with torch.no_grad():
        for module, x, y in reversed(norms):
            share = proportion(final.detach(), y.detach())
            if share is not None:
                norm = read_norm(module, x.detach(), y.detach())
                if norm is None:
                    return f"its last norm ({type(module).__name__}) is of an unknown kind"
                writing = _find_writing(norms, outputs, x)
                return writing if isinstance(writing, str) else Readout(weight, factor * share, norm, writing)
    writing = _find_writing(norms, outputs, final)
    return writing if isinstance(writing, str) else Readout(weight, factor, None, writing)


@contextmanager
def observed_norms(model: nn.Module) -> Iterator[ObservedNorms]:
    """Within the block the calls of a model's norms are recorded, with their inputs and outputs."""
    norms: ObservedNorms = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and inputs[0].shape == output.shape:
            norms.append((module, inputs[0], output))

    with watch_modules(filter(looks_like_norm, model.modules()), record):
        yield norms


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module without submodules has a vector as weight, or no weight and a name that ends in Norm (OLMo)."""
    weight = getattr(module, "weight", None)
    is_leaf = not any(True for _ in module.children())
    return is_leaf and (weight.ndim == 1 if isinstance(weight, Tensor) else type(module).__name__.endswith("Norm"))


def probe_text(checkpoint: Checkpoint, rows: int = 1) -> Batch:
    """A batch of different short texts of common words, the same on both sides of a model that has two."""
    common = checkpoint.common_ids()[: 3 * PROBE_TOKENS]
    texts = [[common[(3 * n + start) % len(common)] for n in range(PROBE_TOKENS)] for start in range(rows)]
    side = pad_side([Encoded(ids, [False] * PROBE_TOKENS) for ids in texts]).to(checkpoint.device)
    return Batch(torch.arange(rows), 0, side, side if checkpoint.two_sided else None)


def _find_writing(
    observed: ObservedNorms, nodes: Mapping[SiteLayer, Any], x: Tensor
) -> dict[SiteLayer, StreamWriting] | str:
    """The map from every attention output to x, if only additions, factors and one norm lie between; else a reason."""
    norms = {norm_output.grad_fn: (module, norm_input, norm_output) for module, norm_input, norm_output in observed}
    outputs = {node: site_layer for site_layer, node in nodes.items() if node is not None}
    writings = dict[SiteLayer, StreamWriting]()
    visited_nodes, waiting = set[Any](), [(x.grad_fn, 1.0)]
    while waiting:
        node, factor = waiting.pop()
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        if node in outputs:
            writings[outputs[node]] = StreamWriting(factor)
        elif node in norms and (site_layer := _origin(norms[node][1].grad_fn, outputs)):
            module, norm_input, norm_output = norms[node]
            if norm := read_norm(module, norm_input.detach(), norm_output.detach()):
                writings[site_layer] = StreamWriting(factor, norm)
        elif (node_factor := _factor(node)) is not None:
            waiting += [(parent, factor * node_factor) for parent, _ in node.next_functions]
    if unreachable := [f"{site}.{layer}" for site, layer in nodes if (site, layer) not in writings]:
        obstacle = "more than additions, constant factors and a norm of its own"
        return f"the output of {unreachable[0]} passes {obstacle} on its way to the last norm (post-norm, say)"
    return writings


def _origin(node: Any, outputs: Mapping[Any, SiteLayer]) -> SiteLayer | None:
    """The (site, layer) whose output this node of the graph is, up to its shape or type; None if it is another's."""
    while node not in outputs and type(node).__name__ in RESHAPES:
        node = node.next_functions[0][0]
    return outputs.get(node)


def _factor(node: Any) -> float | None:
    """The factor by which a node of the graph multiplies its inputs before it adds them; None for other operations."""
    kind = type(node).__name__
    if kind in RESHAPES or (kind == "AddBackward0" and node._saved_alpha == 1):
        return 1.0
    if kind not in ("MulBackward0", "DivBackward0"):
        return None
    try:
        number = float(node._saved_other)
    except (RuntimeError, TypeError):  # the other factor is a tensor, which the pass did not save
        return None
    return number if kind == "MulBackward0" else 1 / number


def read_norm(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """Gain, shift and kind of a norm, from its outputs for two states; None if they do not give y [… d] for x."""
    state = LARGE * (1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)).to(x.dtype)  # ±100 in turns [d]
    shift = module(torch.zeros_like(state))
    for subtracts_mean in (True, False):
        centred = state - state.mean() if subtracts_mean else state
        gain = (module(state) - shift) * centred.square().mean().sqrt() / centred
        norm = Norm(module, gain, shift, subtracts_mean)
        if _is_close(norm.gain * norm.centre(x) * norm.scale(x, y) + shift, y):
            return norm
    return None


def proportion(a: Tensor, b: Tensor) -> float | None:
    """The factor f with a = f · b, None if there is none."""
    if a.shape != b.shape:
        return None
    factor = (a * b).sum() / b.square().sum()
    return float(factor) if _is_close(factor * b, a) else None


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() <= TOLERANCE.get(expected.dtype, 0.05) * expected.norm())
