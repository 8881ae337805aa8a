"""The path from final states to logits, and whether heads write to it directly, found by one pass over a probe.

Direct logit attribution (Elhage et al. 2021) needs a residual stream to which every head only adds, one norm
after it, and one matrix to the vocabulary. Whether a model has these is read from the graph of the pass: the
output of every attention must be reached from the final state through additions and constant factors (Granite's
`residual_multiplier`) alone, but for one norm that an attention module may have to itself (Gemma 3, OLMo 2). A
norm after the addition (BERT, Marian) or a layer between the last norm and the vocabulary (masked language models) is
refused with that reason.
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
from headscope.heads import Site
from headscope.model.discovery import eval_mode
from headscope.model.interface import watch_modules
from headscope.model.projections import WeightOwners
from headscope.model.stored_weights import without_saved_tensors
from headscope.model.taps import frozen_parameters

PROBE = 5
FAR = 100.0  # a state so large that the norm's epsilon does not matter, and its square fits half precision
NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative; half precision: 0.05
SHAPES = frozenset(
    {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0", "ToCopyBackward0"}
)

ObservedNorms = list[tuple[nn.Module, Tensor, Tensor]]
"""Norms, what they read, and what they give."""


@dataclass(frozen=True)
class Norm:
    """y = gain · (x − mean) / σ + shift; `centred` says whether the mean is subtracted (LayerNorm, not RMSNorm)."""

    module: nn.Module
    gain: Tensor
    shift: Tensor
    centred: bool

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """1/σ of every state [… 1], by least squares over x and y [… d]."""
        before_scale = self.gain * self.centre(x)
        return ((y - self.shift) * before_scale).sum(-1, keepdim=True) / before_scale.square().sum(-1, keepdim=True)

    def centre(self, x: Tensor) -> Tensor:
        """x, minus its mean if `centred`."""
        return x - x.mean(dim=-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class StreamWriting:
    """The map from a layer's attention output o to the stream: factor · norm(o); `norm` None: factor · o."""

    factor: float = 1.0
    norm: Norm | None = None

    def fold(self, slices: Tensor) -> Tensor:
        """Slices of W_O [h k d] that write as it comes into the stream, but for the norm's 1/σ and shift."""
        slices = slices * self.factor
        return slices if self.norm is None else self.norm.centre(slices) * self.norm.gain.to(slices.dtype)


@dataclass(frozen=True)
class Readout:
    """logits = factor · weight · norm(x) + const, weight [V d]; `norm` None where there is none.

    `writing` says of every layer of the decoder's heads how what they write comes into x.
    """

    weight: Tensor
    factor: float
    norm: Norm | None
    writing: Mapping[tuple[Site, int], StreamWriting]

    def direction(self, labels: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The direction [n d] on which a vector added to x [n d] raises the logit of labels [n] over the mean logit.

        The norm's σ is a constant; y [n d] is the norm of x.
        """
        direction = self.factor * (self.weight[labels] - self.weight.mean(dim=0)).to(x.dtype)
        return direction if self.norm is None else self.norm.centre(direction * self.norm.gain) * self.norm.scale(x, y)


def find_readout(checkpoint: Checkpoint) -> Readout | str:
    """The readout of a model whose decoder's heads write directly to it, or why there is none."""
    try:
        layer, weight = checkpoint.unembedding()
    except CheckpointError as error:
        return str(error)
    model, finals = checkpoint.model, list[Tensor]()
    owners, projections = WeightOwners(model), checkpoint.projections.items()
    places = {place: owners.of(it.output) for place, it in projections if place[0] is not Site.ENCODER_SELF}
    outputs: dict[tuple[Site, int], Any] = dict.fromkeys(places)  # nodes of the graph
    modules: dict[Any, nn.Module] = {place: owner[1] for place, owner in places.items() if owner is not None}
    modules[None] = layer

    def see(place: tuple[Site, int] | None, inputs: tuple[Any, ...], output: Any) -> None:
        if place is None:
            finals.append(inputs[0])
        else:
            outputs[place] = output.grad_fn

    with (
        torch.enable_grad(),
        eval_mode(model),
        frozen_parameters(model, trainable=True),
        observed_norms(model) as norms,
        watch_modules(modules, see),
        without_saved_tensors(),
    ):
        logits = checkpoint.logits(probe_text(checkpoint)).detach()
    final = finals[-1]
    expected = final.detach() @ weight.T
    factor = proportion(logits - logits[:, :1], expected - expected[:, :1])  # a bias of all positions is gone
    if factor is None:
        return "its logits are bent or biased after the output layer"
    with torch.no_grad():
        for module, x, y in reversed(norms):
            share = proportion(final.detach(), y.detach())
            if share is not None:
                norm = read_norm(module, x.detach(), y.detach())
                if norm is None:
                    return f"its last norm ({type(module).__name__}) is of an unknown kind"
                writing = _direct(norms, outputs, x)
                return writing if isinstance(writing, str) else Readout(weight, factor * share, norm, writing)
    writing = _direct(norms, outputs, final)
    return writing if isinstance(writing, str) else Readout(weight, factor, None, writing)


@contextmanager
def observed_norms(model: nn.Module) -> Iterator[ObservedNorms]:
    """Within the block the norms of a model are noted as it runs, with what each reads and gives."""
    norms: ObservedNorms = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and inputs[0].shape == output.shape:
            norms.append((module, inputs[0], output))

    with watch_modules(filter(normalises, model.modules()), note):
        yield norms


def normalises(module: nn.Module) -> bool:
    """Whether a module looks like a norm: a leaf with a vector of gains, or one of that name without any (OLMo)."""
    weight = getattr(module, "weight", None)
    is_leaf = not any(True for _ in module.children())
    return is_leaf and (weight.ndim == 1 if isinstance(weight, Tensor) else type(module).__name__.endswith("Norm"))


def probe_text(checkpoint: Checkpoint, rows: int = 1) -> Batch:
    """Different short texts of common words, read on both sides of a model that has two."""
    common = checkpoint.common_ids()[: 3 * PROBE]
    texts = [[common[(3 * n + start) % len(common)] for n in range(PROBE)] for start in range(rows)]
    side = pad_side([Encoded(ids, [False] * PROBE) for ids in texts]).to(checkpoint.device)
    return Batch(torch.arange(rows), 0, side, side if checkpoint.two_sided else None)


def _direct(
    seen_norms: ObservedNorms, nodes: Mapping[tuple[Site, int], Any], x: Tensor
) -> dict[tuple[Site, int], StreamWriting] | str:
    """The path of every attention output into x, if it has only additions, factors and at most one norm of its own."""
    norms = {output.grad_fn: (module, read, output) for module, read, output in seen_norms}
    outputs = {node: place for place, node in nodes.items() if node is not None}
    writings = dict[tuple[Site, int], StreamWriting]()
    visited_nodes, waiting = set[Any](), [(x.grad_fn, 1.0)]
    while waiting:
        node, factor = waiting.pop()
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        if node in outputs:
            writings[outputs[node]] = StreamWriting(factor)
        elif node in norms and (place := _origin(norms[node][1].grad_fn, outputs)):
            module, read, output = norms[node]
            if norm := read_norm(module, read.detach(), output.detach()):
                writings[place] = StreamWriting(factor, norm)
        elif (node_factor := _factor(node)) is not None:
            waiting += [(parent, factor * node_factor) for parent, _ in node.next_functions]
    if unreachable := [f"{site}.{layer}" for site, layer in nodes if (site, layer) not in writings]:
        obstacle = "more than additions, constant factors and a norm of its own"
        return f"what {unreachable[0]} writes passes {obstacle} on its way to the last norm (post-norm, say)"
    return writings


def _origin(node: Any, outputs: Mapping[Any, tuple[Site, int]]) -> tuple[Site, int] | None:
    """Whose output this step of a graph is, or gives another shape or type; None for anything else."""
    while node not in outputs and type(node).__name__ in SHAPES:
        node = node.next_functions[0][0]
    return outputs.get(node)


def _factor(node: Any) -> float | None:
    """By what a step of a graph multiplies all that it is given. Returns None if it does something else."""
    kind = type(node).__name__
    if kind in SHAPES or (kind == "AddBackward0" and node._saved_alpha == 1):
        return 1.0
    if kind not in ("MulBackward0", "DivBackward0"):
        return None
    try:
        number = float(node._saved_other)
    except (RuntimeError, TypeError):  # a tensor, which is not kept here
        return None
    return number if kind == "MulBackward0" else 1 / number


def read_norm(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """Gain, shift and kind of a norm, from its outputs for a few states; None if they do not give y [… d] for x."""
    far = FAR * (1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)).to(x.dtype)  # [d]
    shift = module(torch.zeros_like(far))
    for subtracts_mean in (True, False):
        centre = far - far.mean() if subtracts_mean else far
        gain = (module(far) - shift) * centre.square().mean().sqrt() / centre
        norm = Norm(module, gain, shift, subtracts_mean)
        if _near(norm.gain * norm.centre(x) * norm.scale(x, y) + shift, y):
            return norm
    return None


def proportion(a: Tensor, b: Tensor) -> float | None:
    """The factor f with a = f · b. Returns None if there is none."""
    if a.shape != b.shape:
        return None
    factor = (a * b).sum() / b.square().sum()
    return float(factor) if _near(factor * b, a) else None


def _near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() <= NEAR.get(expected.dtype, 0.05) * expected.norm())
