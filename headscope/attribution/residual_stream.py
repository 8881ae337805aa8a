"""The matrices by which heads of a decoder read from and write to the residual stream, from the weights alone.

A head reads norm(x) W and writes z W_O. Norms are folded into the matrices next to them (Elhage et al. 2021, "Handling
Layer Normalization"): the gain of the norm before the layer into W_Q, W_K and W_V; of a norm on the layer's output
(Gemma 3) into W_O; of the last norm into W_U; of a norm on each head's queries or keys before they are rotated (Qwen3,
Gemma 3) into W_Q or W_K. Where a norm subtracts the mean, so do the folded matrices. The 1/σ of a norm remains, one
factor for each position. Shifts and biases are left out: they are the same for every token. Vectors are rows: x W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.attribution.readout import Norm, Readout, find_readout, observed_norms, probe_text, proportion, read_norm
from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.attention import precise
from headscope.model.discovery import eval_mode
from headscope.model.interface import through_attend, watch_modules
from headscope.model.mixing.base import mixings_of
from headscope.model.projections import Slices, WeightOwners
from headscope.model.stored_weights import matrix_of
from headscope.model.taps import gated

NO_QUERY_KEY = "for the heads' rows of queries and keys cannot be told (one norm may be of all heads together)"
"""The reason where queries and keys cannot be analysed."""
CHUNK = 8192  # rows of the vocabulary that are multiplied at a time


@dataclass(frozen=True)
class HeadFactors:
    """The matrices of every query head of one layer, its norm folded in: query, key, value [h d k], output [h k d].

    Query and key are None where a norm of all heads together (OLMo 2), or one behind the rotation (HunYuan), cannot be
    folded in. `centred`: the layer's norm subtracts the mean of its input.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    output: Tensor
    centred: bool


@dataclass(frozen=True)
class ResidualStream:
    """The self attention of a decoder, seen from its residual stream.

    `norms` has the norm before the projections of every layer with heads, in order (None: it reads the stream itself),
    `head_norms` the norms of its queries and of its keys (None: they cannot be folded in). `table` [V d] times `scale`
    are the embeddings, or `table` says why these cannot be told.
    """

    checkpoint: Checkpoint
    readout: Readout
    norms: dict[SiteLayer, Norm | None]
    head_norms: dict[SiteLayer, tuple[Norm | None, Norm | None] | None]
    table: Tensor | str
    scale: float

    @property
    def layers(self) -> list[int]:
        """The layers with self attention in order, also those whose heads are all removed."""
        order = self.checkpoint.attention_sites.order
        return sorted(part.layer for part in order if part.site is Site.DECODER_SELF)

    @cached_property
    def embeddings(self) -> Tensor:
        """W_E [V d]."""
        assert isinstance(self.table, Tensor)
        return self.table * self.scale

    def factors(self, site_layer: SiteLayer) -> HeadFactors:
        """The matrices of one layer's heads; a key/value group's are repeated for its query heads."""
        projections, norm = self.checkpoint.projections[site_layer], self.norms[site_layer]
        output_slices = output_slices_at(self.checkpoint, site_layer)
        assert isinstance(output_slices, Tensor), "find_stream checks it"
        output, heads = self.readout.writing[site_layer].fold(constant(output_slices)), len(output_slices)
        assert projections.value is not None, "find_stream checks it"
        value = _folded_matrices(projections.value, norm, heads)
        query, key, head_norms = None, None, self.head_norms[site_layer]
        if head_norms is not None:
            query, key = (
                None if slices is None else _folded_matrices(slices, norm, heads, head_norm)
                for slices, head_norm in zip((projections.query, projections.key), head_norms, strict=True)
            )
        return HeadFactors(query, key, value, output, norm is not None and norm.centred)

    def unembed(self, vector: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits [… V] (or of `ids`) of vectors written to the stream [… d], for σ = 1, without the norm's shift."""
        norm = self.readout.norm
        normalised = vector if norm is None else norm.centre(vector) * constant(norm.gain)
        weight = self.readout.weight if ids is None else self.readout.weight[ids]
        return normalised @ constant(weight).T * self.readout.factor

    def reaches_logits(self, vector: Tensor, logits: Tensor) -> Tensor:
        """Whether the range of logits [… V] exceeds the rounding error of the vectors [… d] that gave them: […]."""
        size = vector.norm(dim=-1) * constant(self.readout.weight).norm(dim=-1).max() * abs(self.readout.factor)
        rounding = vector.shape[-1] * torch.finfo(vector.dtype).eps
        return logits.amax(dim=-1) - logits.amin(dim=-1) > rounding * size

    def vocabulary_product(self) -> Tensor:
        """W_U W_E [d d] with the last norm folded in, a sum over the vocabulary."""
        table, weight = self.embeddings, self.readout.weight
        product = constant(weight).new_zeros(weight.shape[1], table.shape[1])
        count = min(len(table), len(weight))  # either may be padded
        for first in range(0, count, CHUNK):
            rows = slice(first, min(first + CHUNK, count))
            product += constant(weight[rows]).T @ constant(table[rows])
        norm = self.readout.norm
        centred_product = product if norm is None else norm.centre(product.T * constant(norm.gain)).T
        return centred_product * self.readout.factor


_REASONS: WeakKeyDictionary[Checkpoint, dict[bool, str | None]] = WeakKeyDictionary()


def why_no_stream(checkpoint: Checkpoint, *, embeddings: bool) -> str | None:
    """Why `find_stream` finds no residual stream in a checkpoint, None if it does; found once per checkpoint."""
    reasons = _REASONS.setdefault(checkpoint, {})
    if embeddings not in reasons:
        stream = find_stream(checkpoint, embeddings=embeddings)
        reasons[embeddings] = stream if isinstance(stream, str) else None
    return reasons[embeddings]


def stream_of(checkpoint: Checkpoint, *, embeddings: bool) -> ResidualStream:
    """The residual stream of a checkpoint; ConfigError with the reason where `find_stream` finds none."""
    stream = find_stream(checkpoint, embeddings=embeddings)
    if isinstance(stream, str):
        raise ConfigError(stream)
    return stream


def find_stream(checkpoint: Checkpoint, *, embeddings: bool) -> ResidualStream | str:
    """The residual stream of a decoder, to which every head adds its output; or the reason why there is none.

    With `embeddings` also the embeddings of tokens must enter it unchanged, up to a factor.
    """
    sites = {site for site, _ in checkpoint.layout}
    if Site.DECODER_SELF not in sites:
        return f"is for decoders; this model has {', '.join(sorted(site.value for site in sites))}"
    if checkpoint.predicts != "words":
        return "needs a model that predicts words (one with a language-model head)"
    site_layers: list[SiteLayer] = []
    for site_layer in checkpoint.projections:
        if site_layer[0] is Site.DECODER_SELF:
            slices = output_slices_at(checkpoint, site_layer)
            if isinstance(slices, str):
                return f"{site_layer[0]}.{site_layer[1]}: {slices}"
            parts = checkpoint.projections[site_layer]
            if parts.value is None:
                return f"{site_layer[0]}.{site_layer[1]}: its heads' rows of the projection of values cannot be told"
            if parts.value.weight.shape[1 - parts.value.axis] != slices.shape[-1]:
                return f"{site_layer[0]}.{site_layer[1]}: its heads read a part of the stream only"
            site_layers.append(site_layer)
    if not site_layers:
        return "needs heads of the decoder, and none of decoder-self is left"
    readout = find_readout(checkpoint)
    if isinstance(readout, str):
        return readout
    with torch.no_grad(), eval_mode(checkpoint.model), through_attend(checkpoint.model):
        site_layers.sort(key=lambda site_layer: site_layer[1])
        probe = _Probe(checkpoint, site_layers)
        norms = {site_layer: probe.norm(site_layer) for site_layer in site_layers}
        head_norms = {site_layer: probe.head_norms(site_layer) for site_layer in site_layers}
        table, scale = probe.embeddings()
    known_norms: dict[SiteLayer, Norm | None] = {}
    for site_layer, norm in norms.items():
        if isinstance(norm, str):
            return f"{site_layer[0]}.{site_layer[1]}: {norm}"
        known_norms[site_layer] = norm
    if embeddings and isinstance(table, str):
        return table
    return ResidualStream(checkpoint, readout, known_norms, head_norms, table, scale)


def output_slices(checkpoint: Checkpoint) -> dict[SiteLayer, Tensor | str]:
    """Each head's slice of the output projection [h k d] at every (site, layer), or why there is none.

    A fixed linear mixing is folded in.
    """
    return {site_layer: output_slices_at(checkpoint, site_layer) for site_layer in checkpoint.projections}


def output_slices_at(checkpoint: Checkpoint, site_layer: SiteLayer) -> Tensor | str:
    """Each head's slice of the output projection [h k d] at one (site, layer), or why there is none."""
    output = checkpoint.projections[site_layer].output
    mixing = next((part for *pair, part in mixings_of(checkpoint.model) if tuple(pair) == site_layer), None)
    if output is None:
        return "its heads' slices of the output projection cannot be told"
    if mixing is None:
        return output.matrices()
    if not mixing.foldable:
        return "its heads are mixed depending on the input"
    weight = mixing.fold(output.weight.detach()).detach()
    return torch.stack([weight[:, unit].T for unit in output.units])


def read_states(stream: ResidualStream, ids: Tensor) -> dict[SiteLayer, Tensor]:
    """States [n d] in which the heads of each layer read the tokens `ids` [n], before its norm.

    The first layer reads the embeddings, later ones these with the first layer's MLP added (`after_first_layer`).
    """
    embeddings, after = constant(stream.embeddings[ids.to(stream.embeddings.device)]), after_first_layer(stream, ids)
    return {(site, layer): after if layer > stream.layers[0] else embeddings for site, layer in stream.norms}


@torch.no_grad()
def after_first_layer(stream: ResidualStream, ids: Tensor) -> Tensor:
    """States [n d] in which the second layer reads the tokens `ids` [n]: x + MLP(norm(x)), x their embeddings.

    The gates of the first layer's heads are 0 and positions are left out: "effective embeddings" (Gould et al. 2023;
    McDougall et al. 2023). In a model of one layer the last norm reads them.
    """
    checkpoint, (first, *later) = stream.checkpoint, stream.layers
    model, device = checkpoint.model, checkpoint.device
    inputs: list[Tensor] = []
    entry = layer_block(model, checkpoint, (Site.DECODER_SELF, first))
    norm = stream.readout.norm
    end = norm.module if norm else checkpoint.unembedding()[0]
    if later:
        end = layer_block(model, checkpoint, (Site.DECODER_SELF, later[0]))
    states = stream.embeddings[ids.to(device)].to(checkpoint.dtype)[:, None]  # [n 1 d]
    closed_gates = {
        site_layer: torch.zeros(heads, device=device)
        for site_layer, heads in checkpoint.layout.items()
        if site_layer[1] == first and site_layer[0] is not Site.ENCODER_SELF
    }
    side = pad_side([Encoded.plain([int(number)]) for number in ids]).to(device)
    batch = Batch(torch.arange(len(ids)), 0, side, side if checkpoint.two_sided else None)

    def enter(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return ((states, *arguments[1:]), keywords) if arguments else (arguments, keywords | {"hidden_states": states})

    with (
        eval_mode(model),
        entry.register_forward_pre_hook(enter, with_kwargs=True),
        seen_states([end], lambda _, x: inputs.append(x)),
        gated(model, closed_gates),
    ):
        checkpoint.forward(batch) if later or norm else checkpoint.logits(batch)
    return constant(inputs[0][:, 0])


def layer_block(model: nn.Module, checkpoint: Checkpoint, site_layer: SiteLayer) -> nn.Module:
    """The module of a layer: the innermost one around its attention that is an entry of a ModuleList."""
    name = next(part.name for part in checkpoint.attention_sites.order if part.site_layer == site_layer)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if length > 1 and isinstance(model.get_submodule(".".join(parts[: length - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:length]))
    return model.get_submodule(name)


@contextmanager
def seen_states(modules: Iterable[nn.Module], see: Callable[[nn.Module, Tensor], object]) -> Iterator[None]:
    """Within the block `see` is called with every module and the states [b t d] of its input."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        candidates = [*arguments, keywords.get("hidden_states"), keywords.get("x")]
        states = next((value for value in candidates if isinstance(value, Tensor) and value.ndim == 3), None)
        if states is not None:
            see(module, states)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _folded_matrices(slices: Slices, norm: Norm | None, heads: int, after: Norm | None = None) -> Tensor:
    """The heads' matrices of a projection [h d k], with the gains of the norm before and the one after it folded in."""
    matrices = constant(slices.matrices())  # [g k d]
    if norm is not None:
        matrices = norm.centre(matrices * constant(norm.gain))
    matrices = matrices.transpose(1, 2)
    if after is not None:
        matrices = after.centre(matrices) * constant(after.gain)
    return matrices.repeat_interleave(heads // len(matrices), dim=0)


def constant(values: Tensor) -> Tensor:
    """The values detached, in float32 at least."""
    return precise(values.detach())


def _by_heads(states: Tensor) -> tuple[Tensor, ...]:
    """States of heads in both orders, [b t h k] and [b h t k]; empty where they are not of four dimensions."""
    return (states, states.transpose(1, 2)) if states.ndim == 4 else ()


class _Probe:
    """One pass of two short texts, with the recorded inputs and outputs of norms, embeddings, projections, layers."""

    def __init__(self, checkpoint: Checkpoint, site_layers: list[SiteLayer]) -> None:
        model, self.projections = checkpoint.model, checkpoint.projections
        self.tables: list[tuple[Tensor, Tensor]] = []
        self.inputs: dict[tuple[SiteLayer, str], Tensor] = {}
        self.products: dict[tuple[SiteLayer, str], Tensor] = {}
        names = {part.site_layer: part.name for part in checkpoint.attention_sites.order}
        self.attention = {site_layer: model.get_submodule(names[site_layer]) for site_layer in site_layers}
        self.blocks = {site_layer: layer_block(model, checkpoint, site_layer) for site_layer in site_layers}
        self.entries: dict[nn.Module, list[Tensor]] = {block: [] for block in self.blocks.values()}
        owners, batch = WeightOwners(model), probe_text(checkpoint, rows=2)
        projections = {
            (site_layer, name): owners.of(getattr(self.projections[site_layer], name))
            for site_layer in site_layers
            for name in ("query", "key", "value")
        }

        def table(module: nn.Module, inputs: tuple[Any, ...], _: Tensor) -> None:
            if inputs and isinstance(inputs[0], Tensor) and torch.equal(inputs[0], batch.source.ids):
                self.tables.append((matrix_of(module), inputs[0]))

        def read(key: tuple[SiteLayer, str], inputs: tuple[Any, ...], output: Tensor) -> None:
            self.inputs.setdefault(key, inputs[0])
            self.products.setdefault(key, output)

        tables = watch_modules([part for part in model.modules() if isinstance(part, nn.Embedding)], table)
        products = watch_modules({key: owner[1] for key, owner in projections.items() if owner}, read)
        entries = seen_states(self.entries, lambda block, x: self.entries[block].append(x))
        with observed_norms(model) as self.norms, tables, products, entries:
            checkpoint.logits(batch)

    def head_norms(self, site_layer: SiteLayer) -> tuple[Norm | None, Norm | None] | None:
        """The norms applied to each head's queries and keys directly after their projections.

        None where a norm of heads comes later, behind a rotation (HunYuan): its gain cannot be folded in.
        """
        norms, norm_modules = list[Norm | None](), list[nn.Module]()
        for name in ("query", "key"):
            product, slices = self.products.get((site_layer, name)), getattr(self.projections[site_layer], name)
            states = torch.empty(0)  # [b t h k]
            if slices is not None and product is not None and product.ndim == 3:
                states = product[..., torch.stack(slices.units).to(product.device)]
            matching = (norm for norm in self.norms if any(torch.equal(x, states) for x in _by_heads(norm[1])))
            norm = next(matching, None)
            norm_modules += [] if norm is None else [norm[0]]
            norms.append(None if norm is None else read_norm(*norm))
        inside = [*self.attention[site_layer].modules()]
        later = {module for module, x, _ in self.norms if module in inside and _by_heads(x)} - {*norm_modules}
        return None if later else (norms[0], norms[1])

    def norm(self, site_layer: SiteLayer) -> Norm | str | None:
        """The norm before a layer's projections, None where they read the stream itself; or why it cannot be told."""
        values_input = self.inputs.get((site_layer, "value"))
        if values_input is None:
            return "the input of its projections cannot be told"
        for module, x, y in reversed(self.norms):
            if torch.equal(y, values_input):
                return read_norm(module, x, y) or f"its norm ({type(module).__name__}) is of an unknown kind"
        if any(torch.equal(entry, values_input) for entry in self.entries[self.blocks[site_layer]]):
            return None
        return "the input of its projections is neither the stream nor a known norm of it"

    def embeddings(self) -> tuple[Tensor | str, float]:
        """The embeddings of tokens [V d] and the factor on their way to the first layer; or why they cannot be told."""
        if first := next(iter(self.entries.values())):
            difference = first[0][0] - first[0][1]  # of two tokens at one position [t d]
            for table, ids in self.tables:
                rows = table[ids]
                factor = proportion(difference, rows[0] - rows[1])
                if factor is not None:
                    return table, factor
        return "its embeddings pass more than a factor on their way to the first layer (a norm or a projection)", 1.0
