"""Patching by hooks on transformers' own eager model, one prompt, one head and one position after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headscope.heads import Site, SiteLayer
from headscope.model.interface import through_attend
from headscope.model.taps import capture
from tests.oracles.prompts import Prompt


def outputs(model: Any, kind: str) -> dict[SiteLayer, Any]:
    """The output projection of every (site, layer): what it reads are the contexts of all heads, side by side."""
    if kind == "bert":
        return {(Site.ENCODER_SELF, n): part.attention.output.dense for n, part in enumerate(model.bert.encoder.layer)}
    if kind == "gpt2":
        return {(Site.DECODER_SELF, n): part.attn.c_proj for n, part in enumerate(model.transformer.h)}
    if kind == "llama":
        return {(Site.DECODER_SELF, n): part.self_attn.o_proj for n, part in enumerate(model.model.layers)}
    assert kind == "t5"
    modules = {(Site.ENCODER_SELF, n): part.layer[0].SelfAttention.o for n, part in enumerate(model.encoder.block)}
    modules |= {(Site.DECODER_SELF, n): part.layer[0].SelfAttention.o for n, part in enumerate(model.decoder.block)}
    return modules | {(Site.CROSS, n): part.layer[1].EncDecAttention.o for n, part in enumerate(model.decoder.block)}


class Eager:
    """A model on one prompt: m, and what its output projections read."""

    def __init__(self, model: Any, kind: str, prompt: Prompt, heads: dict[SiteLayer, int]) -> None:
        self.model, self.kind, self.prompt, self.heads = model, kind, prompt, heads
        self.outputs = outputs(model, kind)
        self.inputs: dict[SiteLayer, Tensor] = {}

    def embed(self, ids: list[int]) -> Tensor:
        """Input embeddings [1 t d] of a prompt."""
        embeddings: Tensor = self.model.get_input_embeddings()(torch.tensor([ids])).detach()
        return embeddings

    def m(self, ids: list[int] | None, *, embeddings: Tensor | None = None) -> Tensor:
        """The logit of the answer less that of the wrong one, or log p of the answer."""
        inputs: dict[str, Any] = {"inputs_embeds": embeddings} if ids is None else {"input_ids": torch.tensor([ids])}
        if self.prompt.target is not None:
            inputs["decoder_input_ids"] = torch.tensor([self.prompt.target])
        with through_attend(self.model, implementation="eager"):
            logits = self.model(**inputs).logits[0]
        logits = logits[self.prompt.position] if logits.ndim == 2 else logits  # [V], or [classes]
        if self.prompt.wrong is None:
            logits = torch.log_softmax(logits, dim=-1)
        value: Tensor = logits[self.prompt.answer]
        return value if self.prompt.wrong is None else value - logits[self.prompt.wrong]

    @contextmanager
    def patch_inputs(self, changes: dict[SiteLayer, dict[int, Tensor]] | None = None) -> Iterator[None]:
        """Within the block `inputs` has what the projections read; heads of `changes` read another context [t k]."""

        def make_hook(key: SiteLayer) -> Any:
            def hook(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                states = inputs[0]
                if changes and key in changes:
                    width = states.shape[-1] // self.heads[key]
                    states = states.clone()
                    for head, other in changes[key].items():
                        states[0, :, head * width : (head + 1) * width] = other
                elif torch.is_grad_enabled() and not states.requires_grad:
                    states = states.detach().requires_grad_()
                self.inputs[key] = states
                return (states,)

            return hook

        handles = [part.register_forward_pre_hook(make_hook(key)) for key, part in self.outputs.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def contexts(self, ids: list[int]) -> dict[SiteLayer, Tensor]:
        """Inputs of every projection [t h k]."""
        with torch.no_grad(), self.patch_inputs():
            self.m(ids)
        return {key: self._split_heads(key, states) for key, states in self.inputs.items()}

    def gradients(self, ids: list[int] | None, *, embeddings: Tensor | None = None) -> dict[SiteLayer, Tensor]:
        """dm / d(what every projection reads) [t h k]."""
        with torch.enable_grad(), self.patch_inputs():
            value = self.m(ids, embeddings=embeddings)
            grads = torch.autograd.grad(value, list(self.inputs.values()), allow_unused=True)
        return {
            key: self._split_heads(key, torch.zeros_like(states) if gradient is None else gradient)
            for (key, states), gradient in zip(self.inputs.items(), grads, strict=True)
        }

    def _split_heads(self, key: SiteLayer, states: Tensor) -> Tensor:
        contexts: Tensor = states[0].detach().unflatten(-1, (self.heads[key], -1))
        return contexts


def exact(eager: Eager, direction: str) -> dict[SiteLayer, Tensor]:
    """m(clean) − m(patched), or m(patched) − m(corrupt), of every head [h]."""
    prompt = eager.prompt
    base, other = (prompt.clean, prompt.corrupt) if direction == "noising" else (prompt.corrupt, prompt.clean)
    contexts = eager.contexts(other)
    with torch.no_grad():
        before, effects = eager.m(base), {}
        for key, heads in eager.heads.items():
            effects[key] = torch.zeros(heads, dtype=torch.float64)
            for head in range(heads):
                with eager.patch_inputs({key: {head: contexts[key][:, head]}}):
                    after = eager.m(base)
                effects[key][head] = before - after if direction == "noising" else after - before
    return effects


def first_order(eager: Eager, direction: str) -> dict[SiteLayer, Tensor]:
    """Σ over positions and width of (z_clean − z_corrupt) · ∂m/∂z in the run that is changed."""
    prompt = eager.prompt
    gradients = eager.gradients(prompt.clean if direction == "noising" else prompt.corrupt)
    clean, corrupt = eager.contexts(prompt.clean), eager.contexts(prompt.corrupt)
    return {key: ((clean[key] - corrupt[key]) * gradients[key]).sum(dim=(0, 2)) for key in eager.heads}


def integrated_gradients(eager: Eager, steps: int) -> dict[SiteLayer, Tensor]:
    """Attribution with the mean gradient between the corrupt and the clean embeddings."""
    prompt = eager.prompt
    ends = eager.embed(prompt.corrupt), eager.embed(prompt.clean)
    clean, corrupt = eager.contexts(prompt.clean), eager.contexts(prompt.corrupt)
    effects = {key: torch.zeros(heads, dtype=torch.float64) for key, heads in eager.heads.items()}
    for step in range(steps):
        gradients = eager.gradients(None, embeddings=ends[0] + step / steps * (ends[1] - ends[0]))
        for key in effects:
            effects[key] += ((clean[key] - corrupt[key]) * gradients[key]).sum(dim=(0, 2)) / steps
    return effects


def by_weights(eager: Eager, direction: str, channel: str) -> dict[SiteLayer, Tensor]:
    """Σ over t and s of (A_clean-like − A_corrupt-like) · ∂m/∂A, with A of one query or key changed; causal models.

    ∂m/∂A[t, s] is ∂m/∂z[t] · v[s]; for "value" A stays and v changes.
    """
    prompt = eager.prompt
    base, other = (prompt.clean, prompt.corrupt) if direction == "noising" else (prompt.corrupt, prompt.clean)
    sign = -1 if direction == "noising" else 1
    gradients = eager.gradients(base)
    records = []
    for ids in (base, other):
        with torch.no_grad(), capture(eager.model, ("query", "key", "value")) as record:
            eager.model(input_ids=torch.tensor([ids]))
        records.append(record)
    effects = {}
    for key, heads in eager.heads.items():
        effects[key] = torch.zeros(heads, dtype=torch.float64)
        for head in range(heads):
            intact, donor = ({name: part[key][name][0, head] for name in ("query", "key", "value")} for part in records)
            hybrid = {**intact, channel: donor[channel]}
            gradient = gradients[key][:, head]
            for t in range(len(gradient)):
                before, after = _row(intact, t), _row(hybrid, t)
                for s in range(t + 1):
                    change = after[s] * hybrid["value"][s] - before[s] * intact["value"][s]
                    effects[key][head] += sign * float(gradient[t] @ change)
    return effects


def _row(states: dict[str, Tensor], t: int) -> Tensor:
    """The weights of query t on the keys up to it."""
    query, keys = states["query"][t], states["key"][: t + 1]
    return torch.softmax(keys @ query / query.shape[-1] ** 0.5, dim=-1)
