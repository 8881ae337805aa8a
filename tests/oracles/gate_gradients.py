"""∂L/∂ξ of a gate on every head at every position, one sentence at a time, by making the gates variables."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headscope.heads import SiteLayer
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.discovery import track_calls


def position_gates(model: nn.Module, value: Callable[[], Tensor]) -> dict[SiteLayer, Tensor]:
    """Gradients [h t] of value() with respect to a gate of one on each head's context at each position."""
    gates: dict[SiteLayer, Tensor] = {}

    with track_calls(model) as walk, torch.enable_grad():

        def tap(call: AttentionCall, context: Tensor) -> Tensor:
            call_site = walk.attention_site(call.module)
            assert call_site is not None
            gate = gates[call_site.site, call_site.layer] = torch.ones(context.shape[1:3], dtype=context.dtype)
            return context * gate.requires_grad_()[None, :, :, None]

        with tap_contexts(tap, before_mixing=True):
            objective = value()
        gradients = torch.autograd.grad(objective, list(gates.values()), allow_unused=True)
    return {
        site_layer: torch.zeros_like(gates[site_layer]) if gradient is None else gradient
        for site_layer, gradient in zip(gates, gradients, strict=True)
    }
