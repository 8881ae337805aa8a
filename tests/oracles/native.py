"""The native Transformer again, sentence by sentence and head by head, straight from its state dict.

Also the small models that the tests use: prime sizes, float64, weights large enough to matter.
"""

import math
from typing import Any

import torch
from torch import Tensor

from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig

SOURCE, TARGET = 23, 19  # vocabularies
STACK: dict[str, Any] = dict(d_model=13, d_ffn=17, d_head=5, d_value=7)


def config(*, decoder_only: bool = False, model: dict[str, Any] | None = None, **stack: Any) -> TransformerConfig:
    """Two encoder layers and three decoder layers with different head counts; `stack` overrides both sides."""
    options = STACK | stack
    shallow: dict[str, Any] = {"self_heads": (3, 2)}
    if decoder_only:
        return TransformerConfig(decoder=StackConfig(**(shallow | {"vocabulary": TARGET} | options)), **(model or {}))
    cross_mixing = {"cross_mixing": options["self_mixing"]} if options.get("self_mixing") else {}
    deep: dict[str, Any] = {"self_heads": (2, 0, 3), "cross_heads": (3, 2, 1)}
    return TransformerConfig(
        encoder=StackConfig(**(shallow | {"vocabulary": SOURCE} | options)),
        decoder=StackConfig(**(deep | {"vocabulary": TARGET} | options | cross_mixing)),
        **(model or {}),
    )


def model(seed: int = 0, **options: Any) -> Transformer:
    """A model of `config(**options)` with every parameter random, norms and biases too."""
    torch.manual_seed(seed)
    transformer = Transformer(config(**options)).double().eval()
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if parameter.ndim == 1 or "alpha" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(1.5)
    return transformer


def texts(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources [3 7] and targets [3 5] with their masks; the sentence in the middle is padded on both sides."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SOURCE, (3, 7), generator=generator)
    target = torch.randint(TARGET, (3, 5), generator=generator)
    source_mask, target_mask = torch.ones(3, 7, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool)
    source_mask[1, 4:], target_mask[1, 2:] = False, False
    return source, target, source_mask, target_mask


def batch_logits(transformer: Transformer) -> Tensor:
    """Logits [3 5 V] of these texts, padding included."""
    source, target, source_mask, target_mask = texts()
    output: Tensor = transformer(source, target, source_mask=source_mask, target_mask=target_mask)
    return output


def logits(transformer: Transformer, source: list[int] | None, target: list[int]) -> Tensor:
    """Logits [t V] for one sentence without padding."""
    state = {key: value.double() for key, value in transformer.state_dict().items()}
    config = transformer.config
    memory = None
    if source is not None and config.encoder is not None:
        memory = _stack(state, "encoder", config.encoder, source, None, zero=False)
    x = _stack(state, "decoder", config.decoder, target, memory, zero=config.start == "zero")
    if "before_output.weight" in state:
        x = x @ state["before_output.weight"].T
    output: Tensor = x @ state["output.weight"].T
    return output + state["output.bias"] if "output.bias" in state else output


def _stack(
    state: dict[str, Tensor], side: str, config: StackConfig, ids: list[int], memory: Tensor | None, *, zero: bool
) -> Tensor:
    x = torch.stack([_embed(state, side, config, number, n, zero) for n, number in enumerate(ids)])
    x = _norm(state, f"{side}.embeddings.norm", config, x)
    for layer in range(config.layers):
        for part, keys in (("self_attention", None), ("cross_attention", memory), ("ffn", None)):
            name = f"{side}.layers.{layer}.{part}"
            if f"{name}_norm.weight" not in state:
                continue
            y = _norm(state, f"{name}_norm", config, x) if config.norm == "pre" else x
            if part == "ffn":
                y = _ffn(state, name, config, y)
            else:
                y = _attention(state, name, config, y, y if keys is None else keys, side == "decoder" and keys is None)
            x = x + y if config.norm == "pre" else _norm(state, f"{name}_norm", config, x + y)
    return _norm(state, f"{side}.norm", config, x)


def _embed(state: dict[str, Tensor], side: str, config: StackConfig, number: int, n: int, zero: bool) -> Tensor:
    x = state[f"{side}.embeddings.tokens.weight"][number] * (math.sqrt(config.d_model) if config.scale_embedding else 1)
    x = x + state.get(f"{side}.embeddings.bias", torch.zeros_like(x))
    if zero and n == 0:
        x = torch.zeros_like(x)
    if f"{side}.embeddings.projection.weight" in state:
        x = state[f"{side}.embeddings.projection.weight"] @ x
    position = n + config.position_offset
    if config.positions == "learned":
        return x + state[f"{side}.embeddings.positions.weight"][position]
    if config.positions == "none":
        return x
    waves = config.d_model // 2
    angles = [position * math.exp(-k * math.log(10000) / (waves - 1)) for k in range(waves)]
    wave = [math.sin(a) for a in angles] + [math.cos(a) for a in angles] + [0.0] * (config.d_model % 2)
    return x + torch.tensor(wave, dtype=x.dtype)


def _norm(state: dict[str, Tensor], name: str, config: StackConfig, x: Tensor) -> Tensor:
    if f"{name}.weight" not in state:
        return x
    centred = x - x.mean(dim=-1, keepdim=True)
    spread = (centred.square().mean(dim=-1, keepdim=True) + config.norm_epsilon).sqrt()
    return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]


def _ffn(state: dict[str, Tensor], name: str, config: StackConfig, x: Tensor) -> Tensor:
    inner = x @ state[f"{name}.inner.weight"].T + state[f"{name}.inner.bias"]
    gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    inner = inner.clamp_min(0) if config.activation == "relu" else gelu
    return inner @ state[f"{name}.outer.weight"].T + state[f"{name}.outer.bias"]


def _attention(state: dict[str, Tensor], name: str, config: StackConfig, x: Tensor, y: Tensor, causal: bool) -> Tensor:
    wide = config.d_value or config.d_head
    heads = state[f"{name}.output.weight"].shape[1] // wide
    contexts = []
    for head in range(heads):
        query = _project(state, f"{name}.query", config, x, head, config.d_head, name)
        key = _project(state, f"{name}.key", config, y, head, config.d_head, name)
        value = _project(state, f"{name}.value", config, y, head, wide, name)
        rows = []
        for t in range(len(x)):
            visible = t + 1 if causal else len(y)
            scores = torch.stack([query[t] @ key[s] for s in range(visible)]) / math.sqrt(config.d_head)
            weights = scores.exp() / scores.exp().sum()
            rows.append(sum((weights[s] * value[s] for s in range(visible)), torch.zeros_like(value[0])))
        contexts.append(torch.stack(rows))
    alpha = state.get(f"{name}.mixing.alpha")
    if alpha is not None and heads:
        zero = torch.zeros_like(contexts[0])
        contexts = [sum((alpha[i, j] * contexts[j] for j in range(heads)), zero) for i in range(heads)]
    out = state.get(f"{name}.output.bias", torch.zeros(config.d_model, dtype=x.dtype)).expand(len(x), -1)
    for head, context in enumerate(contexts):
        out = out + context @ state[f"{name}.output.weight"][:, head * wide : (head + 1) * wide].T
    return out


def _project(
    state: dict[str, Tensor], name: str, config: StackConfig, x: Tensor, head: int, width: int, module: str
) -> Tensor:
    row = 0 if config.shared_qkv else head * width
    weight = state[f"{name}.weight"][row : row + width]
    if config.head_input == "slice":
        chunk = x.shape[1] // config.chunks
        first = int(state[f"{module}.slice_of_head"][head]) * chunk
        x = x[:, first : first + chunk]
    bias = state.get(f"{name}.bias")
    return x @ weight.T + (0 if bias is None else bias[row : row + width])
