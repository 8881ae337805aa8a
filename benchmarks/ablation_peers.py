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
                vectors = mean_pooled(checkpoint.states(batch), batch.source.real)
                return torch.nn.functional.cosine_similarity(intact, vectors, dim=-1)

            attributions = []
            for layer in model.encoder.layer:
                ablator = LayerFeatureAblation(likeness, layer.attention.output.dense)
                values = ablator.attribute(
                    batch.source.ids, layer_mask=columns, layer_baselines=0, attribute_to_layer_input=True
                )
                attributions.append(values[:, 0, ::width])
        return torch.cat(attributions, dim=1)

    return run


def transformer_lens(checkpoint: Checkpoint) -> Side:
    """run_with_hooks on hook_z; the bridge wants a masked-word head, which costs about as much as the encoder."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertForMaskedLM

    model: Any = checkpoint.model
    masked = BertForMaskedLM(model.config)
    masked.bert.load_state_dict(model.state_dict(), strict=False)
    bridge = TransformerBridge.boot_transformers(
        "bert-base-uncased", hf_model=masked.eval(), tokenizer=getattr(checkpoint, "tokenizer", None), device="cpu"
    )
    layers, heads = len(masked.bert.encoder.layer), checkpoint.attention_sites.order[0].heads
    states: list[Tensor] = []
    masked.bert.encoder.register_forward_hook(lambda _, __, output: states.append(output[0]))

    def run(batch: Batch) -> Tensor:
        def vector(hooks: list[Any]) -> Tensor:
            states.clear()
            bridge.run_with_hooks(batch.source.ids, attention_mask=batch.source.real.long(), fwd_hooks=hooks)
            return mean_pooled(states[-1], batch.source.real)

        with torch.no_grad():
            intact = vector([])
            vectors = [
                vector([(f"blocks.{layer}.attn.hook_z", lambda z, hook, head=head: _without(z, head))])
                for layer in range(layers)
                for head in range(heads)
            ]
        return torch.stack([1 - torch.nn.functional.cosine_similarity(intact, x, dim=-1) for x in vectors], dim=1)

    return run


def _without(contexts: Tensor, head: int) -> Tensor:
    """Contexts [b t h k] with one head's set to zero."""
    copy = contexts.clone()
    copy[:, :, head] = 0
    return copy


def nnsight(checkpoint: Checkpoint) -> Side:
    """A trace for every head, which writes zeros into the input of the output projection."""
    from nnsight import NNsight

    model: Any = checkpoint.model
    tracer = NNsight(model)
    heads, width = checkpoint.attention_sites.order[0].heads, checkpoint.attention_sites.order[0].width

    def run(batch: Batch) -> Tensor:
        inputs = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
        damages = []
        with torch.no_grad(), through_attend(model, implementation="eager"):
            intact = mean_pooled(checkpoint.states(batch), batch.source.real)
            for number in range(len(model.encoder.layer)):
                for head in range(heads):
                    columns = slice(head * width, (head + 1) * width)
                    with tracer.trace(**inputs):
                        tracer.encoder.layer[number].attention.self.output[0][:, :, columns] = 0
                        states = tracer.output[0].save()
                    vectors = mean_pooled(states, batch.source.real)
                    damages.append(1 - torch.nn.functional.cosine_similarity(intact, vectors, dim=-1))
        return torch.stack(damages, dim=1)

    return run
