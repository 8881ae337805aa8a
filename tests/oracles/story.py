"""story-of-heads: the forward pass for one sentence in float64 numpy, from the formulas, and files of checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = Mapping[str, Array]


def logits(arrays: Arrays, hp: Mapping[str, Any], source: list[int], target: list[int]) -> Array:
    """[t V] for every position of `target`, whose first token sees a zero vector."""
    d = hp["hid_size"]
    scale = np.sqrt(d) if hp.get("rescale_emb") else 1.0
    table = arrays["mod/emb_inp/mat:0" if hp.get("share_emb") else "mod/emb_out/mat:0"].astype(float)
    x = arrays["mod/emb_inp/mat:0"].astype(float)[source] * scale
    if hp.get("inp_emb_bias"):
        x = x + arrays["mod/emb_inp_bias:0"].reshape(-1)
    memory = stack(arrays, hp, "enc", x + signal(len(source), d), None)
    y = np.concatenate([np.zeros((1, d)), table[target[:-1]] * scale]) + signal(len(target), d)
    y = stack(arrays, hp, "dec", y, memory)
    output: Array = y @ (table.T if hp.get("dwwt") else arrays["loss_xent_lm/logits/W:0"])
    return output + arrays["loss_xent_lm/logits/b:0"] if hp.get("loss_bias") else output


def stack(arrays: Arrays, hp: Mapping[str, Any], side: str, x: Array, memory: Array | None) -> Array:
    for i in range(hp.get(f"num_layers_{side}") or hp["num_layers"]):
        for name in [f"{side}_attn-{i}", *([f"dec_enc_attn-{i}"] if side == "dec" else []), f"{side}_ffn-{i}"]:
            var = {key.removeprefix(f"mod/{name}/"): value for key, value in arrays.items() if f"mod/{name}/" in key}
            raw = x
            x = norm(x, var, "layer_norm/") if hp["res_steps"] == "nlda" else x
            if "ffn" in name:
                x = np.maximum(x @ var["conv1/W:0"] + var["conv1/b:0"], 0) @ var["conv2/W:0"] + var["conv2/b:0"]
            else:
                x = attention(var, hp, x, memory if name.startswith("dec_enc") else None, causal=side == "dec")
            x = raw + x
            x = norm(x, var, "layer_norm/") if hp["res_steps"] == "ldan" else x
    return norm(x, arrays, f"mod/{side}_out_norm/") if hp.get("normalize_out") else x


def attention(var: Arrays, hp: Mapping[str, Any], x: Array, memory: Array | None, *, causal: bool) -> Array:
    d, heads = hp["hid_size"], hp["num_heads"]
    key, value = hp.get("key_size", d), hp.get("value_size", d)
    states = memory if memory is not None else x
    w, b = var["mem_conv/W:0"], var["mem_conv/b:0"]
    if "query_conv/W:0" in var:
        q, (k, v) = x @ var["query_conv/W:0"] + var["query_conv/b:0"], np.split(states @ w + b, [key], axis=1)
    else:
        q = (x @ w + b)[:, :key]
        k, v = np.split((states @ w + b)[:, key:], [key], axis=1)
    gates = var.get("gate/log_a:0", np.full(heads, 9.0)).reshape(-1)
    contexts = []
    for h in range(heads):
        qkv = [part[:, h * size // heads : (h + 1) * size // heads] for part, size in ((q, key), (k, key), (v, value))]
        scores = (qkv[0] / np.sqrt(key // heads)) @ qkv[1].T
        if causal and memory is None:
            scores = scores - 1e9 * np.triu(np.ones_like(scores), 1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        gate = np.clip(1.2 / (1 + np.exp(-gates[h].astype(float))) - 0.1, 0, 1)
        contexts.append(weights / weights.sum(axis=1, keepdims=True) @ qkv[2] * gate)
    return np.concatenate(contexts, axis=1) @ var["out_conv/W:0"] + var["out_conv/b:0"]


def norm(x: Array, var: Arrays, name: str) -> Array:
    x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-6)
    return x * var[f"{name}scale:0"] + var[f"{name}bias:0"]


def signal(length: int, d: int) -> Array:
    rates = np.exp(-np.arange(d // 2) * np.log(10000) / (d // 2 - 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles), np.zeros((length, d % 2))], axis=1)


def make(hp: Mapping[str, Any], words: tuple[int, int], ffn: int, seed: int) -> dict[str, Array]:
    """Random arrays of a model."""
    rng = np.random.default_rng(seed)
    d = hp["hid_size"]
    key, value = hp.get("key_size", d), hp.get("value_size", d)
    shapes: dict[str, tuple[int, ...]] = {"mod/emb_inp/mat:0": (max(words) if hp.get("share_emb") else words[0], d)}
    if not hp.get("share_emb"):
        shapes["mod/emb_out/mat:0"] = (words[1], d)
    if hp.get("inp_emb_bias"):
        shapes["mod/emb_inp_bias:0"] = (1, 1, d)
    linear: dict[str, tuple[int, int]] = {}
    norms = [f"mod/{side}_out_norm" for side in ("enc", "dec")] if hp.get("normalize_out") else []
    for side in ("enc", "dec"):
        for i in range(hp.get(f"num_layers_{side}") or hp["num_layers"]):
            linear |= {f"mod/{side}_ffn-{i}/conv1": (d, ffn), f"mod/{side}_ffn-{i}/conv2": (ffn, d)}
            cross = hp.get("multihead_attn_format", "v1") == "v1"
            for name in [f"mod/{side}_attn-{i}", *([f"mod/dec_enc_attn-{i}"] if side == "dec" else [])]:
                separate = cross and "dec_enc" in name
                linear |= {f"{name}/query_conv": (d, key)} if separate else {}
                linear |= {f"{name}/mem_conv": (d, key * (1 if separate else 2) + value)}
                linear |= {f"{name}/out_conv": (value, d)}
                kind = {"enc_attn": "enc-self", "dec_attn": "dec-self", "dec_enc_attn": "dec-enc"}
                if kind[name[4:].rpartition("-")[0]] in hp.get("concrete_heads", ()):
                    shapes[f"{name}/gate/log_a:0"] = (1, hp["num_heads"], 1, 1)
                norms.append(f"{name}/layer_norm")
            norms.append(f"mod/{side}_ffn-{i}/layer_norm")
    for name, shape in linear.items():
        shapes |= {f"{name}/W:0": shape, f"{name}/b:0": shape[1:]}
    shapes |= {f"{name}/{part}:0": (d,) for name in norms for part in ("scale", "bias")}
    shapes |= {} if hp.get("dwwt") else {"loss_xent_lm/logits/W:0": (d, words[1])}
    shapes |= {"loss_xent_lm/logits/b:0": (words[1],)} if hp.get("loss_bias") else {}
    return {name: rng.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}


BASE_HP: dict[str, Any] = {"res_steps": "nlda", "rescale_emb": False}  # what arrays do not tell, beside the heads
HP: dict[str, Any] = BASE_HP | {"num_layers": 2, "num_heads": 2, "hid_size": 10, "normalize_out": True}


def write(folder: Path, hp: dict[str, Any], arrays: dict[str, Any], words: tuple[int, int] = (7, 11)) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "model.npz", **arrays)
    (folder / "hp.json").write_text(json.dumps(hp))
    for name, count in zip(("src", "dst"), words, strict=True):
        pieces = ["_BOS_", "_EOS_", "_UNK_", *(f"{name}{n}" for n in range(3, count))]
        (folder / f"{name}.voc.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return folder / "model.npz"
