"""Relevance of heads by the package lxt: run by `lxt_agreement.py` in an environment where lxt imports.

Run: python lxt_reference.py GIVEN.pt OUT.pt

Reads model configs, weights and inputs, patches transformers as lxt's documentation says, and writes input · gradient
at every output projection's input, [b h] per layer. Knows nothing of headscope.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from lxt.efficient import monkey_patch

OUTPUT = {"llama": "self_attn.o_proj", "gpt2": "attn.c_proj", "bert": "attention.output.dense"}


def relevances(kind: str, settings: dict[str, Any]) -> torch.Tensor:
    """[layer b h] of the largest logit at each real position, all together."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    configuration = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    importlib.import_module(f"lxt.efficient.models.{kind}")
    monkey_patch(modeling)
    config = getattr(configuration, settings["config_class"])(**settings["config"])
    config._attn_implementation = "eager"
    model = getattr(modeling, settings["class"])(config).to(torch.float64).eval()
    missing = model.load_state_dict(settings["state"], strict=False).missing_keys
    assert all("position" in name or "bias" in name or "decoder" in name or "lm_head" in name for name in missing), (
        missing
    )
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    contexts: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        inputs[0].retain_grad()
        contexts.append(inputs[0])

    for name, module in model.named_modules():
        if name.endswith(OUTPUT[kind]):
            module.register_forward_pre_hook(keep)
    states = model.get_input_embeddings()(settings["ids"]).requires_grad_()
    logits = model(inputs_embeds=states, attention_mask=settings["mask"]).logits
    (logits.max(dim=-1).values * settings["mask"]).sum().backward()
    heads = settings["heads"]
    products = [x * x.grad for x in contexts if x.grad is not None]
    return torch.stack([product.unflatten(-1, (heads, -1)).sum(dim=(1, 3)) for product in products]).detach()


def main() -> None:
    """Explain every model that the file holds; each in turn, as lxt patches for good."""
    cases = torch.load(sys.argv[1], weights_only=True)
    torch.save({kind: relevances(kind, settings) for kind, settings in cases.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
