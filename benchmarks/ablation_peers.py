"""Every head of a BERT off in turn, as users of captum, TransformerLens and nnsight do it: a whole pass for each.

Each function makes, for a checkpoint, a function from a batch to every sentence's cosine distance to the intact
vector, [b N]. They serve `ablation.py` as oracles and for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.forward import mean_pooled
from headscope.model.interface import through_attend

Side = Callable[[Batch], Tensor]


def captum_layers(checkpoint: Checkpoint) -> Side:
    """captum's LayerFeatureAblation on the attention modules, with a mask of the heads' columns."""
    from captum.attr import LayerFeatureAblation

    model: Any = checkpoint.model
    heads, width = checkpoint.attention_sites.order[0].heads, checkpoint.attention_sites.order[0].width
    columns = torch.arange(heads).repeat_interleave(width)[None, None]

    def run(batch: Batch) -> Tensor:
        with torch.no_grad(), through_attend(model, implementation="eager"):
            intact = mean_pooled(checkpoint.states(batch), batch.source.real)

            def likeness(_: Tensor) -> Tensor:
                found = mean_pooled(checkpoint.states(batch), batch.source.real)
                return torch.nn.functional.cosine_similarity(intact, found, dim=-1)

            found = []
            for layer in model.encoder.layer:
                joined = LayerFeatureAblation(likeness, layer.attention.output.dense)
                values = joined.attribute(
                    batch.source.ids, layer_mask=columns, layer_baselines=0, attribute_to_layer_input=True
                )
                found.append(values[:, 0, ::width])
        return torch.cat(found, dim=1)

    return run


def transformer_lens(checkpoint: Checkpoint) -> Side:
    """run_with_hooks on hook_z; the bridge wants a masked-word head, which costs about as much as the encoder."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertForMaskedLM

    own: Any = checkpoint.model
    masked = BertForMaskedLM(own.config)
    masked.bert.load_state_dict(own.state_dict(), strict=False)
    bridge = TransformerBridge.boot_transformers(
        "bert-base-uncased", hf_model=masked.eval(), tokenizer=getattr(checkpoint, "tokenizer", None), device="cpu"
    )
    layers, heads = len(masked.bert.encoder.layer), checkpoint.attention_sites.order[0].heads
    seen: list[Tensor] = []
    masked.bert.encoder.register_forward_hook(lambda _, __, output: seen.append(output[0]))

    def run(batch: Batch) -> Tensor:
        def vector(hooks: list[Any]) -> Tensor:
            seen.clear()
            bridge.run_with_hooks(batch.source.ids, attention_mask=batch.source.real.long(), fwd_hooks=hooks)
            return mean_pooled(seen[-1], batch.source.real)

        with torch.no_grad():
            intact = vector([])
            found = [
                vector([(f"blocks.{layer}.attn.hook_z", lambda z, hook, head=head: _without(z, head))])
                for layer in range(layers)
                for head in range(heads)
            ]
        return torch.stack([1 - torch.nn.functional.cosine_similarity(intact, each, dim=-1) for each in found], dim=1)

    return run


def _without(contexts: Tensor, head: int) -> Tensor:
    """Contexts [b t h k] with one head's set to zero."""
    changed = contexts.clone()
    changed[:, :, head] = 0
    return changed


def nnsight(checkpoint: Checkpoint) -> Side:
    """A trace for every head, which writes zeros into the input of the output projection."""
    from nnsight import NNsight

    own: Any = checkpoint.model
    wrapped = NNsight(own)
    heads, width = checkpoint.attention_sites.order[0].heads, checkpoint.attention_sites.order[0].width

    def run(batch: Batch) -> Tensor:
        inputs = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
        damages = []
        with torch.no_grad(), through_attend(own, implementation="eager"):
            intact = mean_pooled(checkpoint.states(batch), batch.source.real)
            for number in range(len(own.encoder.layer)):
                for head in range(heads):
                    columns = slice(head * width, (head + 1) * width)
                    with wrapped.trace(**inputs):
                        wrapped.encoder.layer[number].attention.self.output[0][:, :, columns] = 0
                        states = wrapped.output[0].save()
                    found = mean_pooled(states, batch.source.real)
                    damages.append(1 - torch.nn.functional.cosine_similarity(intact, found, dim=-1))
        return torch.stack(damages, dim=1)

    return run
