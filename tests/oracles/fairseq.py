"""Small fairseq checkpoints in their real layouts, and fairseq's forward pass again, straight from its keys."""

import argparse
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, List  # noqa: UP035 - omegaconf pickles these

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCE, TARGET = 23, 19  # vocabularies, the four special ids included
BASE: dict[str, Any] = {
    "arch": "transformer_iwslt_de_en",
    "task": "translation",
    "source_lang": "de",
    "target_lang": "en",
    "data": "data-bin/some.de-en",
    "activation_fn": "relu",
    "max_source_positions": 31,
    "max_target_positions": 29,
    "dropout": 0.1,
    "adam_betas": "(0.9,0.98)",
    "update_freq": [1],
    **{f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in
       {"embed_dim": 12, "ffn_embed_dim": 10, "layers": 2, "attention_heads": 3}.items()},
}  # fmt: skip
LM = {key: value for key, value in BASE.items() if not key.startswith("encoder_")} | {
    "arch": "transformer_lm",
    "task": "language_modeling",
    "decoder_normalize_before": True,
}


def is_lm(options: dict[str, Any]) -> bool:
    return bool(options["arch"].startswith("transformer_lm"))


def state(options: dict[str, Any], *, alphas: tuple[str, ...] = (), seed: int = 0) -> OrderedDict[str, Tensor]:
    """Random weights with the keys and shapes of fairseq 0.10; `alphas` names modules that get the fork's matrix."""
    generator = torch.Generator().manual_seed(seed)
    weights: OrderedDict[str, Tensor] = OrderedDict()

    def draw(name: str, *shape: int) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * (0.5 if len(shape) > 1 else 0.3)
        if name.endswith("norm.weight") or name.endswith("layernorm_embedding.weight"):
            weights[name] += 1

    for side in ("decoder",) if is_lm(options) else ("encoder", "decoder"):
        d, ffn = options[f"{side}_embed_dim"], options[f"{side}_ffn_embed_dim"]
        wide = options.get("decoder_input_dim", d) if side == "decoder" else d
        size = SOURCE if side == "encoder" and not options.get("share_all_embeddings") else TARGET
        weights[f"{side}.version"] = torch.tensor([3.0])
        draw(f"{side}.embed_tokens.weight", size, wide)
        if options.get(f"{side}_learned_pos"):
            length = options["max_source_positions" if side == "encoder" else "max_target_positions"]
            draw(f"{side}.embed_positions.weight", length + 2, d)
        else:
            weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        for layer in range(options[f"{side}_layers"]):
            for site in ("self_attn", "encoder_attn") if side == "decoder" and not is_lm(options) else ("self_attn",):
                name = f"{side}.layers.{layer}.{site}"
                memory = options["encoder_embed_dim"] if site == "encoder_attn" else d
                if f"{side}.{layer}.{site}" in alphas or "all" in alphas:
                    heads = options[f"{side}_attention_heads"]
                    draw(f"{name}.alphas", heads, heads)
                    weights[f"{name}.alphas_bias"] = torch.zeros(heads, 1)
                for part, inputs in (("k", memory), ("v", memory), ("q", d), ("out", d)):
                    draw(f"{name}.{part}_proj.weight", d, inputs)
                    draw(f"{name}.{part}_proj.bias", d)
                norm(draw, f"{name}_layer_norm", d)
            name = f"{side}.layers.{layer}"
            for part, outputs, inputs in (("fc1", ffn, d), ("fc2", d, ffn)):
                draw(f"{name}.{part}.weight", outputs, inputs)
                draw(f"{name}.{part}.bias", outputs)
            norm(draw, f"{name}.final_layer_norm", d)
        if options.get("layernorm_embedding"):
            norm(draw, f"{side}.layernorm_embedding", d)
        if options.get(f"{side}_normalize_before") and not (side == "decoder" and options.get("no_decoder_final_norm")):
            norm(draw, f"{side}.layer_norm", d)
        if wide != d:
            draw("decoder.project_in_dim.weight", d, wide)
    out = options.get("decoder_output_dim", options["decoder_embed_dim"])
    if out != options["decoder_embed_dim"]:
        draw("decoder.project_out_dim.weight", out, options["decoder_embed_dim"])
    if options.get("share_all_embeddings"):
        weights["encoder.embed_tokens.weight"] = weights["decoder.embed_tokens.weight"]
    if options.get("share_decoder_input_output_embed") or options.get("share_all_embeddings"):
        weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    else:
        draw("decoder.output_projection.weight", TARGET, out)
    return weights


def norm(draw: Any, name: str, d: int) -> None:
    draw(f"{name}.weight", d)
    draw(f"{name}.bias", d)


def fuse_qkv(weights: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """As versions before 0.8 write it: queries, keys and values of one module in one matrix."""
    old_weights: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in weights.items():
        start, _, end = key.rpartition("_proj.")
        if start.endswith((".q", ".k", ".v")):
            parts = [weights[f"{start[:-1]}{part}_proj.{end}"] for part in "qkv"]
            old_weights[f"{start[:-1]}in_proj_{end}"] = torch.cat(parts)
        else:
            old_weights[key] = tensor
    return old_weights


def as_version_05(weights: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """As fairseq 0.5 writes it: norms by number, the output as embed_out, no version."""
    names = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    }
    old_weights: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in weights.items():
        side = key.partition(".")[0]
        for number, name in enumerate(names[side]):
            key = key.replace(f".{name}.", f".layer_norms.{number}.")
        if not key.endswith("version"):
            old_weights["decoder.embed_out" if key.startswith("decoder.output_projection") else key] = tensor
    return old_weights


def logits(options: dict[str, Any], weights: dict[str, Tensor], source: list[int] | None, prev: list[int]) -> Tensor:
    """fairseq's logits [t V] of one sentence in double precision; weights under modern keys."""
    weights = {key: tensor.double() for key, tensor in weights.items()}
    memory = None if source is None else _stack(options, weights, "encoder", source, None)
    x = _stack(options, weights, "decoder", prev, memory)
    if "decoder.project_out_dim.weight" in weights:
        x = F.linear(x, weights["decoder.project_out_dim.weight"])
    return F.linear(x, weights["decoder.output_projection.weight"])


def _stack(o: dict[str, Any], w: dict[str, Tensor], side: str, ids: list[int], memory: Tensor | None) -> Tensor:
    d = o[f"{side}_embed_dim"]
    x = w[f"{side}.embed_tokens.weight"][ids] * (1 if o.get("no_scale_embedding") else math.sqrt(d))
    if "decoder.project_in_dim.weight" in w and side == "decoder":
        x = F.linear(x, w["decoder.project_in_dim.weight"])
    if f"{side}.embed_positions.weight" in w:
        x = x + w[f"{side}.embed_positions.weight"][2 : 2 + len(ids)]
    elif not o.get("no_token_positional_embeddings"):
        rates = torch.exp(torch.arange(d // 2).double() * -(math.log(10000) / (d // 2 - 1)))
        angles = torch.arange(2, 2 + len(ids)).double()[:, None] * rates
        x = x + torch.cat([angles.sin(), angles.cos()], dim=1)
    x = _norm(w, f"{side}.layernorm_embedding", x)
    pre = bool(o.get(f"{side}_normalize_before"))
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_fast": lambda y: F.gelu(y, approximate="tanh"),
    }
    act = activations[o["activation_fn"]]
    for layer in range(o[f"{side}_layers"]):
        name = f"{side}.layers.{layer}"
        parts: list[tuple[str, Any]] = [
            (
                "self_attn_layer_norm",
                lambda y, n=name: _attention(o, w, side, f"{n}.self_attn", y, y, side == "decoder"),
            )
        ]
        if memory is not None:
            parts.append(
                (
                    "encoder_attn_layer_norm",
                    lambda y, n=name: _attention(o, w, side, f"{n}.encoder_attn", y, memory, False),
                )
            )
        parts.append(("final_layer_norm", lambda y, n=name: _linear(w, f"{n}.fc2", act(_linear(w, f"{n}.fc1", y)))))
        for part, sublayer in parts:
            x = x + sublayer(_norm(w, f"{name}.{part}", x)) if pre else _norm(w, f"{name}.{part}", x + sublayer(x))
    return _norm(w, f"{side}.layer_norm", x)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" not in w:
        return x
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def _attention(
    o: dict[str, Any], w: dict[str, Tensor], side: str, name: str, x: Tensor, y: Tensor, causal: bool
) -> Tensor:
    heads = o[f"{side}_attention_heads"]
    k = x.shape[1] // heads
    query, key, value = (_linear(w, f"{name}.{part}_proj", z) for part, z in (("q", x), ("k", y), ("v", y)))
    contexts = []
    for h in range(heads):
        columns = slice(h * k, (h + 1) * k)
        scores = (query[:, columns] * k**-0.5) @ key[:, columns].T
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        contexts.append(scores.softmax(dim=-1) @ value[:, columns])
    if f"{name}.alphas" in w:
        contexts = [sum(row[j] * contexts[j] for j in range(heads)) for row in w[f"{name}.alphas"]]
    return _linear(w, f"{name}.out_proj", torch.cat(contexts, dim=1))


def write(
    path: Path, options: dict[str, Any], weights: dict[str, Tensor], *, carrier: str = "args", legacy: bool = False
) -> Path:
    """A checkpoint file with training state; `carrier` says where the options stand."""
    content = {
        **wrap_options(options, carrier),
        "model": weights,
        "optimizer_history": [{"criterion_name": "C", "lr_scheduler_state": {"best": 4.3}, "num_updates": 7}],
        "extra_state": {"metrics": {"default": [(10, "loss", "AverageMeter", {"val": torch.tensor(4.0), "round": 3})]}},
        "last_optimizer_state": {
            "state": {0: {"step": 7, "exp_avg": torch.zeros(3, 5)}},
            "param_groups": [{"lr": 0.1}],
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with omegaconf():
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def wrap_options(options: dict[str, Any], carrier: str) -> dict[str, Any]:
    if carrier == "args":
        return {"args": argparse.Namespace(**options)}
    task = {key: options[key] for key in ("data", "source_lang", "target_lang")}
    flat = {"_name": options["arch"], **{key: value for key, value in options.items() if key != "arch"}}
    if carrier == "namespace":
        return {"args": None, "cfg": {"model": argparse.Namespace(**options), "task": task}}
    if carrier == "nested":
        for side in ("encoder", "decoder"):
            names = [key for key in flat if key.startswith(f"{side}_")]
            flat[side] = {key.removeprefix(f"{side}_"): flat.pop(key) for key in names}
    if carrier == "omegaconf":
        return {"args": None, "cfg": {"model": flat, "task": task}} | {
            "cfg": DictConfig({"model": DictConfig(flat), "task": DictConfig(task)})
        }
    return {"args": None, "cfg": {"model": flat, "task": task}}


class DictConfig:
    """Pickles as omegaconf's class of this name does."""

    def __init__(self, content: dict[str, Any]) -> None:
        # classes and types by their names; torch.save calls str and int as Python 2 did
        self._metadata = {"key_type": str, "object_type": int, "ref_type": Dict, "element_type": List[int]}  # noqa: UP006
        self._content = {
            key: value if isinstance(value, DictConfig) else AnyNode(value) for key, value in content.items()
        }


class AnyNode:
    """Pickles as omegaconf's class of this name does."""

    def __init__(self, value: Any) -> None:
        self._parent, self._val = None, value


@contextmanager
def omegaconf() -> Iterator[None]:
    """Within the block the two classes above are those of omegaconf."""
    homes = {"omegaconf": (), "omegaconf.dictconfig": (DictConfig,), "omegaconf.nodes": (AnyNode,)}
    before = {name: sys.modules.get(name) for name in homes}
    for name, classes in homes.items():
        sys.modules[name] = types.ModuleType(name)
        for cls in classes:
            setattr(sys.modules[name], cls.__name__, cls)
            cls.__module__ = name
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def dictionaries(folder: Path, *, alone: bool = False) -> Path:
    """dict.de.txt and dict.en.txt (or dict.txt) with as many pieces as the models have embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"dict.txt": TARGET} if alone else {"dict.de.txt": SOURCE, "dict.en.txt": TARGET}
    for name, size in sizes.items():
        pieces = ["a@@", "b@@", "c", "d", *(f"w{n}" for n in range(size))]
        text = "".join(f"{piece} {90 - n}\n" for n, piece in enumerate(pieces[: size - 4]))
        (folder / name).write_text(text, encoding="utf-8")
    return folder
