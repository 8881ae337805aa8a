"""A native Transformer with fewer heads: head counts are part of its config, so the result is an ordinary model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.heads import Site, by_layer
from headscope.model.native.layers import shapes_only
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.removal_plan import RemovalPlan


@torch.no_grad()
def folded_weights(model: Transformer) -> dict[str, Tensor]:
    """The state dict of `model` with every mixing folded into its output projection (see `Mixing.fold`)."""
    state = {key: value.detach() for key, value in model.state_dict().items()}
    for site, layer, name, module in model.attention_modules():
        if module.mixing is None:
            continue
        if not module.mixing.foldable:
            raise ConfigError(
                f"the mixing of {site.value}.{layer} is {type(module.mixing).__name__}, which depends on its input; "
                "it cannot be folded into the output projection"
            )
        state = {key: value for key, value in state.items() if not key.startswith(f"{name}.mixing.")}
        state[f"{name}.output.weight"] = module.mixing.fold(module.output.weight).detach().contiguous()
    return state


def without_mixing(config: TransformerConfig) -> TransformerConfig:
    """A config without mixings."""

    def plain(stack: StackConfig) -> StackConfig:
        return replace(stack, self_mixing=None, cross_mixing=None, mixing_options={})

    return config.with_stacks(plain)


def fold_mixings(model: Transformer) -> Transformer:
    """A copy of `model` that computes the same without mixing; ConfigError where a mixing cannot be folded."""
    copy = Transformer(without_mixing(model.config)).to(next(model.parameters()))
    copy.load_state_dict(folded_weights(model))
    return copy.train(model.training)


def shrink_transformer(model: Transformer, removal: RemovalPlan) -> Transformer:
    """A copy of a native model without the removed heads; mixings are folded into the output projections first.

    Heads that are removed attend to nothing *before* the mixing, as masked ones do. ConfigError where a mixing
    depends on its input (MAE gates) and cannot be folded.
    """
    state = folded_weights(model)
    for site, layer, name, module in model.attention_modules():
        kept_heads = removal.kept[site, layer]
        weights = {}
        for part, width in (("query", module.d_head), ("key", module.d_head), ("value", module.d_value)):
            rows = _rows(range(min(len(kept_heads), 1)) if module.shared else kept_heads, width)
            for kind in ("weight", "bias"):
                if (parameter := f"{name}.{part}.{kind}") in state:
                    weights[parameter] = state[parameter][rows]
        weights[f"{name}.output.weight"] = state[f"{name}.output.weight"][:, _rows(kept_heads, module.d_value)]
        if module.sliced:
            weights[f"{name}.slice_of_head"] = state[f"{name}.slice_of_head"][list(kept_heads)]
        state |= weights
    first = next(model.parameters())
    with shapes_only():
        config = without_mixing(model.config)
        encoder = None if config.encoder is None else _stack(config.encoder, removal, Site.ENCODER_SELF)
        decoder = _stack(config.decoder, removal, Site.DECODER_SELF)
        smaller = Transformer(replace(config, encoder=encoder, decoder=decoder))
    for copy, original in smaller.tied().items():
        state.setdefault(copy, state[original])
    smaller.load_state_dict({key: value.clone() for key, value in state.items()}, assign=True)
    smaller.tie()
    return smaller.to(first.device).train(model.training)


def zeroed_transformer(model: Transformer, removal: RemovalPlan) -> Transformer:
    """A copy of the same size, mixings folded, whose removed heads have zeros in the output projection."""
    state = {key: value.clone() for key, value in folded_weights(model).items()}
    removed_heads = by_layer(removal.removed)
    for site, layer, name, module in model.attention_modules():
        if heads := removed_heads.get((site, layer)):
            state[f"{name}.output.weight"][:, _rows(heads, module.d_value)] = 0
    copy = Transformer(without_mixing(model.config)).to(next(model.parameters()))
    copy.load_state_dict(state)
    return copy.train(model.training)


def _rows(heads: range | tuple[int, ...] | list[int], width: int) -> Tensor:
    starts = torch.tensor(list(heads), dtype=torch.long)[:, None] * width
    return (starts + torch.arange(width)).flatten()


def _stack(stack: StackConfig, removal: RemovalPlan, site: Site) -> StackConfig:
    """Head counts that are left; the slices that heads read stay as many as they were."""
    counts = tuple(len(removal.kept[site, layer]) for layer in range(stack.layers))
    cross = tuple(len(removal.kept[Site.CROSS, layer]) for layer in range(len(stack.cross_heads)))
    slices = stack.chunks if stack.head_input == "slice" else None
    return replace(stack, self_heads=counts, cross_heads=cross, slices=slices)
