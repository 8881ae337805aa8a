"""Gradient Interaction Modifications inside transformers' own models, by numbers that are detached.

Written from decoders.md §10: 0.25 x + 0.75 x without gradient is x, with a quarter of its gradient; a softmax without
gradient plus T (softmax(x/T) − the same without gradient) is the softmax, with the gradient of the higher temperature.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "oracle-gim"
TEMPERATURE, QUARTER, HALF = 2.0, 0.25, 0.5


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, with a share of its gradient."""
    return factor * x + ((1 - factor) * x).detach()


def _softmax(scores: Tensor) -> Tensor:
    soft = torch.softmax(scores / TEMPERATURE, dim=-1)
    return torch.softmax(scores, dim=-1).detach() + TEMPERATURE * (soft - soft.detach())


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    size = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scale_gradient(query, QUARTER) @ scale_gradient(key, QUARTER).transpose(-1, -2) * size
    contexts = _softmax(scores if mask is None else scores + mask) @ scale_gradient(value, HALF)
    return contexts.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _frozen(norm: Any) -> Any:
    centred = isinstance(norm, nn.LayerNorm)
    eps: float = norm.eps if centred else norm.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        deviation = x - x.mean(dim=-1, keepdim=True) if centred else x
        y: Tensor = deviation / (deviation.square().mean(dim=-1, keepdim=True) + eps).sqrt().detach() * norm.weight
        return y + norm.bias if centred else y

    return forward


@contextmanager
def modify_gradients(model: Any) -> Iterator[None]:
    """Within the block the model's gradients are GIM's; its outputs are what they were."""
    before, forwards = model.config._attn_implementation, {}
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            forwards[module] = _frozen(module)
        elif isinstance(module, transformers.models.llama.modeling_llama.LlamaMLP):
            forwards[module] = lambda x, mlp=module: mlp.down_proj(
                scale_gradient(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), HALF)
            )
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for module in forwards:
            del module.forward


def relevances(model: Any, outputs: list[Any], ids: list[int], *, heads: int) -> tuple[Tensor, Tensor]:
    """Σ z · ∂logit/∂z of every head [layer h] for the likeliest token after the last one, and the logits [V].

    `outputs` are the output projections, whose inputs are z of all heads.
    """
    contexts: list[Tensor] = []

    def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
        contexts.append(inputs[0])

    handles = [module.register_forward_pre_hook(hook) for module in outputs]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    pairs = zip(contexts, torch.autograd.grad(logits.max(), contexts), strict=True)
    parts = [(z * gradient).detach()[0].unflatten(-1, (heads, -1)).sum(dim=(0, 2)) for z, gradient in pairs]
    return torch.stack(parts), logits.detach()


def gpt2(implementation: str) -> Any:
    """GPT-2 of two layers and three heads in float64, whose weights are sines: no generator decides about them."""
    config = transformers.GPT2Config(
        vocab_size=29, n_embd=15, n_layer=2, n_head=3, n_positions=11, bos_token_id=0, eos_token_id=0
    )
    model: Any = transformers.GPT2LMHeadModel(config).double().eval()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            indices = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(torch.sin(indices * math.sqrt(2) + number).view_as(parameter) * 0.7)
            if "ln_" in name and name.endswith("weight"):
                parameter.add_(1.5)
    return model


def gpt2_outputs(model: Any) -> list[Any]:
    """Its output projections."""
    return [block.attn.c_proj for block in model.transformer.h]
