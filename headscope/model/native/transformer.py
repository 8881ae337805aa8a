"""The native Transformer: encoder–decoder or decoder-only, depending on its `TransformerConfig`.

It declares its own attention (`declared_attention`, `attention_projections`), so that no probe is needed, and decodes
step by step with a cache (`begin`, `step`; see `headscope.model.native.beams`). Head counts are part of its config, so
a model with fewer heads is an ordinary one (`shrink_transformer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import Site, SiteLayer, by_layer
from headscope.model.attention import makes_weights
from headscope.model.discovery import AttentionSite, AttentionSites
from headscope.model.native.layers import (
    PADDING,
    Attention,
    AttentionCache,
    Layer,
    LayerCaches,
    LearnedPositions,
    SinusoidalPositions,
    View,
    new_linear,
    shapes_only,
)
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.projections import Projections, Slices
from headscope.model.removal_plan import RemovalPlan
from headscope.model.streaming import causal_mask


class Embeddings(nn.Module):
    """Tokens and their positions: scale · table[id] (+ bias) (projected) + position (normalised)."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        d, e = config.d_model, config.d_embedding or config.d_model
        self.scale = d**0.5 if config.scale_embedding else 1.0
        self.tokens = nn.Embedding(config.vocabulary, e)
        nn.init.normal_(self.tokens.weight, std=e**-0.5)
        self.bias = nn.Parameter(torch.zeros(e)) if config.embedding_bias else None
        self.projection = new_linear(e, d, bias=False) if e != d else None
        self.positions: SinusoidalPositions | LearnedPositions | None = None
        if config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(d, config.position_offset)
        elif config.positions == "learned":
            assert config.max_positions is not None
            self.positions = LearnedPositions(config.max_positions, d, config.position_offset)
            nn.init.normal_(self.positions.weight, std=d**-0.5)
        self.norm = nn.LayerNorm(d, eps=config.norm_epsilon) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, positions: Tensor, *, bound: int, zero: Tensor | None = None) -> Tensor:
        """States [b t d] of ids [b t] at positions [b t] or [t], all below `bound`; embeddings at `zero` [b t] are 0.

        Padding (the padding id at position `PADDING`) is embedded as in fairseq.
        """
        x: Tensor = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.bias is not None:
            x = x + self.bias
        if zero is not None:
            x = x.masked_fill(zero[..., None], 0.0)
        if self.projection is not None:
            x = self.projection(x)
        if self.positions is not None:
            x = x + self.positions(positions, x, bound=bound)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class Stack(nn.Module):
    """Embeddings, layers, and the norm after them: an encoder or a decoder."""

    def __init__(self, config: StackConfig, *, d_memory: int | None = None) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, number, d_memory=d_memory) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon) if config.final_norm else None

    def forward(self, x: Tensor, view: View, caches: list[LayerCaches] | None = None) -> Tensor:
        """Embedded states [b t d] through all layers."""
        for number, layer in enumerate(self.layers):
            x = layer(x, view, None if caches is None else caches[number])
        return x if self.norm is None else self.norm(x)


@dataclass
class TransformerState:
    """State of incremental decoding: caches of every layer, one row per hypothesis.

    `memory` [b s d] and `memory_mask` [b 1 1 s] come from the encoder; `length` is the number of cached positions.
    """

    caches: list[LayerCaches]
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    length: int = 0

    def select(self, order: Tensor, *, same_sentence: bool = False) -> None:
        """Reorder rows: new row i is old row order[i]; `same_sentence`: both always belong to the same sentence."""
        for self_cache, cross in self.caches:
            self_cache.select(order)
            cross.select(order, keys=not same_sentence)
        if not same_sentence and self.memory is not None:
            self.memory = self.memory.index_select(0, order)
            self.memory_mask = None if self.memory_mask is None else self.memory_mask.index_select(0, order)


class Transformer(nn.Module):
    """A Transformer built from its config. Masks are True for real tokens; None: no padding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = None if config.encoder is None else Stack(config.encoder)
        self.decoder = Stack(config.decoder, d_memory=None if config.encoder is None else config.encoder.d_model)
        d = config.decoder.d_model
        self.before_output = None if config.d_output is None else new_linear(d, config.d_output, bias=False)
        self.output = new_linear(config.d_output or d, config.decoder.vocabulary, bias=config.output_bias)
        self.tie()

    def tie(self) -> None:
        """Make tied weights one parameter again (after replacing one of them)."""
        if self.config.share_embeddings and self.encoder is not None:
            self.encoder.embeddings.tokens.weight = self.decoder.embeddings.tokens.weight
        if self.config.tie_output:
            self.output.weight = self.decoder.embeddings.tokens.weight

    def tied(self) -> dict[str, str]:
        """Pairs of names of one parameter in the state dict: {copy: original}."""
        table = "decoder.embeddings.tokens.weight"
        copies = {"encoder.embeddings.tokens.weight": table} if self.config.share_embeddings else {}
        return copies | ({"output.weight": table} if self.config.tie_output else {})

    def forward(
        self,
        source: Tensor | None = None,
        target: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [b t V] of the token after each decoder input target [b t]; source [b s] is the encoder's.

        A decoder-only model takes `target` alone.
        """
        if target is None or (source is None) is not (self.encoder is None):
            needs = "target alone (it is decoder-only)" if self.encoder is None else "source and target"
            raise ConfigError(f"this model takes {needs}")
        memory = None if source is None else self.encode(source, source_mask)
        return self.logits(self.decode(target, memory, memory_mask=source_mask, target_mask=target_mask))

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The encoder's output [b s d]."""
        assert self.encoder is not None, "a decoder-only model has no encoder"
        view = View(mask=_visible(source_mask), real=source_mask)
        x = self.encoder.embeddings(source, _positions(source, source_mask), bound=source.shape[1])
        return self.encoder(x, view)

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """The decoder's output [b t d] for all positions at once."""
        t = target.shape[1]
        mask: Tensor
        if makes_weights():
            mask = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()[None, None]  # [1 1 t s]
            if target_mask is not None:
                mask = mask & target_mask[:, None, None, :].bool()
        else:
            mask = causal_mask(t, target_mask, device=target.device)
        view = View(mask, target_mask, True, memory, _visible(memory_mask))
        return self.decoder(self._embed(target, _positions(target, target_mask)), view)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the vocabulary [… V] for decoder outputs [… d]."""
        return self.output(states if self.before_output is None else self.before_output(states))

    def begin(self, source: Tensor, source_mask: Tensor | None = None) -> TransformerState:
        """The state after reading a source; in a decoder-only model after all but the last token of a prompt."""
        caches = [(AttentionCache(), AttentionCache()) for _ in self.decoder.layers]
        if self.encoder is not None:
            return TransformerState(caches, self.encode(source, source_mask), _visible(source_mask))
        assert source_mask is None, "a prompt has no padding"
        state = TransformerState(caches)
        if source.shape[1] > 1:
            self._advance(source[:, :-1], state)
        return state

    def step(self, ids: Tensor, state: TransformerState) -> Tensor:
        """Logits [b V] of the token after `ids` [b], which become the next decoder input; updates `state`."""
        return self.logits(self._advance(ids[:, None], state)[:, -1])

    def _advance(self, ids: Tensor, state: TransformerState) -> Tensor:
        t, past = ids.shape[1], state.length
        positions = torch.arange(past, past + t, device=ids.device)
        mask = torch.ones(t, past + t, dtype=torch.bool, device=ids.device).tril(past)[None, None] if t > 1 else None
        view = View(mask, None, True, state.memory, state.memory_mask)
        state.length = past + t
        return self.decoder(self._embed(ids, positions, past=past), view, state.caches)

    def _embed(self, ids: Tensor, positions: Tensor, *, past: int = 0) -> Tensor:
        zero = (positions == 0).expand(ids.shape) if self.config.start == "zero" and past == 0 else None
        return self.decoder.embeddings(ids, positions, bound=past + ids.shape[1], zero=zero)

    def attention_modules(self) -> Iterator[tuple[Site, int, str, Attention]]:
        """Every attention module with its site, layer and name, in the order of sites and layers."""
        sites = [(Site.ENCODER_SELF, "encoder", "self_attention"), (Site.DECODER_SELF, "decoder", "self_attention")]
        for site, side, name in [*sites, (Site.CROSS, "decoder", "cross_attention")]:
            stack = getattr(self, side)
            for layer, block in enumerate([] if stack is None else stack.layers):
                module = getattr(block, name)
                if module is not None:
                    yield site, layer, f"{side}.layers.{layer}.{name}", module

    def declared_attention(self) -> AttentionSites:
        """The attention sites that `headscope.model.discovery` would find by probing."""
        order: list[AttentionSite] = []
        calls: dict[int, tuple[AttentionSite, ...]] = {}
        for site, layer, name, module in self.attention_modules():
            attention_site = AttentionSite(site, layer, module.heads, module.heads, module.d_head, name)
            order.append(attention_site)
            calls[id(module)] = (attention_site,)
        return AttentionSites(tuple(order), calls)

    def attention_projections(self) -> dict[SiteLayer, Projections]:
        """The projections that `headscope.model.projections` would find from gradients, of layers with heads."""
        by_site = {}
        for site, layer, _, module in self.attention_modules():
            if not module.heads:
                continue
            query, key, value = (_rows(part.weight, module, width) for part, width in module.inputs())
            columns = torch.arange(module.heads * module.d_value).view(module.heads, module.d_value)
            output = Slices(module.output.weight, 1, tuple(columns.to(module.output.weight.device)))
            by_site[site, layer] = Projections(query, key, value, output)
        return by_site


def _rows(weight: Tensor, module: Attention, width: int) -> Slices:
    """The rows of each head in a query, key or value projection; all heads have the same ones if they share it."""
    rows = torch.arange(width, device=weight.device)
    units = [rows + (0 if module.shared else head * width) for head in range(module.heads)]
    return Slices(weight, 0, tuple(units))


def _visible(real: Tensor | None) -> Tensor | None:
    """The attention mask [b 1 1 s] of real keys [b s]."""
    return None if real is None else real[:, None, None, :].bool()


def _positions(ids: Tensor, real: Tensor | None) -> Tensor:
    """The number of real tokens before each token [b t] (or [t]); `PADDING` for padding."""
    if real is None:
        return torch.arange(ids.shape[1], device=ids.device)
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real.bool(), PADDING)


@torch.no_grad()
def folded_weights(model: Transformer) -> dict[str, Tensor]:
    """The state dict of `model` with every mixing folded into its output projection (see `Mixing.fold`)."""
    state = {key: value.detach() for key, value in model.state_dict().items()}
    for site, layer, name, module in model.attention_modules():
        if module.mixing is None:
            continue
        if not module.mixing.foldable:
            why = f"is {type(module.mixing).__name__}, which depends on its input"
            raise ConfigError(f"the mixing of {site.value}.{layer} {why}; it cannot be folded into a projection")
        state = {key: value for key, value in state.items() if not key.startswith(f"{name}.mixing.")}
        state[f"{name}.output.weight"] = module.mixing.fold(module.output.weight).detach().contiguous()
    return state


def without_mixing(config: TransformerConfig) -> TransformerConfig:
    """A config without mixings."""
    return config.with_stacks(lambda stack: replace(stack, self_mixing=None, cross_mixing=None, mixing_options={}))


def fold_mixings(model: Transformer) -> Transformer:
    """A copy of `model` with mixings folded into output projections; ConfigError if one cannot be folded."""
    copy = Transformer(without_mixing(model.config)).to(next(model.parameters()))
    copy.load_state_dict(folded_weights(model))
    return copy.train(model.training)


def shrink_transformer(model: Transformer, removal: RemovalPlan) -> Transformer:
    """A copy of a native model without the removed heads; mixings are folded into the output projections first.

    Removed heads have zero contexts *before* the mixing, like masked heads. ConfigError if a mixing depends on its
    input (MAE gates) and cannot be folded.
    """
    state = folded_weights(model)
    for site, layer, name, module in model.attention_modules():
        kept_heads = removal.kept[site, layer]
        weights = {}
        for part, width in (("query", module.d_head), ("key", module.d_head), ("value", module.d_value)):
            rows = _head_rows(range(min(len(kept_heads), 1)) if module.shared else kept_heads, width)
            for kind in ("weight", "bias"):
                if (parameter := f"{name}.{part}.{kind}") in state:
                    weights[parameter] = state[parameter][rows]
        weights[f"{name}.output.weight"] = state[f"{name}.output.weight"][:, _head_rows(kept_heads, module.d_value)]
        if module.reads_slices:
            weights[f"{name}.slice_of_head"] = state[f"{name}.slice_of_head"][list(kept_heads)]
        state |= weights
    first = next(model.parameters())
    with shapes_only():
        config = without_mixing(model.config)
        encoder = None if config.encoder is None else _stack(config.encoder, removal, Site.ENCODER_SELF)
        decoder = _stack(config.decoder, removal, Site.DECODER_SELF)
        smaller = Transformer(replace(config, encoder=encoder, decoder=decoder))
    smaller.load_state_dict({key: value.clone() for key, value in state.items()}, assign=True)
    smaller.tie()
    return smaller.to(first.device).train(model.training)


def zeroed_transformer(model: Transformer, removal: RemovalPlan) -> Transformer:
    """A copy of the same size, mixings folded, whose removed heads have zeros in the output projection."""
    copy, removed_heads = fold_mixings(model), by_layer(removal.removed)
    with torch.no_grad():
        for site, layer, _, module in copy.attention_modules():
            module.output.weight[:, _head_rows(removed_heads.get((site, layer), ()), module.d_value)] = 0
    return copy


def _head_rows(heads: range | tuple[int, ...] | list[int], width: int) -> Tensor:
    """The indices of the rows of these heads, `width` for each, in order."""
    starts = torch.tensor(list(heads), dtype=torch.long)[:, None] * width
    return (starts + torch.arange(width)).flatten()


def _stack(stack: StackConfig, removal: RemovalPlan, site: Site) -> StackConfig:
    """The config of a stack with the remaining head counts; the number of input slices does not change."""
    counts = tuple(len(removal.kept[site, layer]) for layer in range(stack.layers))
    cross = tuple(len(removal.kept[Site.CROSS, layer]) for layer in range(len(stack.cross_heads)))
    slices = stack.chunks if stack.head_input == "slice" else None
    return replace(stack, self_heads=counts, cross_heads=cross, slices=slices)
