"""Mixings that are fixed and linear, merged into the output projections: the same model without a mixing slot."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig


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


def unmixed(config: TransformerConfig) -> TransformerConfig:
    """A config without mixings."""

    def plain(stack: StackConfig) -> StackConfig:
        return replace(stack, self_mixing=None, cross_mixing=None, mixing_options={})

    return config.with_stacks(plain)


def fold_mixings(model: Transformer) -> Transformer:
    """A copy of `model` that computes the same without mixing; ConfigError where a mixing cannot be folded."""
    folded = Transformer(unmixed(model.config)).to(next(model.parameters()))
    folded.load_state_dict(folded_weights(model))
    return folded.train(model.training)
