"""State dicts with TransformerLens' names: against that program's forward pass, written down plainly."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu

from headscope.errors import CheckpointError
from headscope.formats.base import FORMATS, Checkpoint, open_checkpoint, write_checkpoint
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import plan_removal

VOCABULARY = ["[start]", "[pad]", "[end]", *"abcdefgh"]
SETTINGS = {"vocabulary": VOCABULARY, "start": "[start]", "pad": "[pad]", "end": "[end]"}
ACTS = {"relu": relu, "gelu_new": lambda x: gelu(x, approximate="tanh"), "gelu": gelu}


def state(*, outputs: int = 11, inner: int = 13, norms: bool = True, bias: bool = True) -> dict[str, Tensor]:
    """Two layers of three heads of width 5."""
    torch.manual_seed(3)
    h, d, k = 3, 15, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape) / math.sqrt(shape[-1] if len(shape) > 1 else 4)

    weights = {"embed.W_E": normal(len(VOCABULARY), d), "pos_embed.W_pos": normal(12, d)}
    for n in range(2):
        part = {f"attn.W_{letter}": normal(h, d, k) for letter in "QKV"} | {"attn.W_O": normal(h, k, d)}
        part |= {f"attn.b_{letter}": normal(h, k) for letter in "QKV"} | {"attn.b_O": normal(d)}
        part |= {"attn.mask": torch.ones(12, 12).tril().bool(), "attn.IGNORE": torch.tensor(-1e5)}
        if inner:
            part |= {"mlp.W_in": normal(d, inner), "mlp.b_in": normal(inner)}
            part |= {"mlp.W_out": normal(inner, d), "mlp.b_out": normal(d)}
        if norms:
            part |= {f"ln{i}.{name}": normal(d) + (name == "w") for i in (1, 2) for name in "wb"}
        weights |= {f"blocks.{n}.{name}": value for name, value in part.items()}
    if norms:
        weights |= {"ln_final.w": normal(d) + 1, "ln_final.b": normal(d)}
    matrix = normal(d, outputs)
    return weights | {"unembed.W_U": matrix} | ({"unembed.b_U": normal(d) @ matrix} if bias else {})


def plain_logits(weights: dict[str, Tensor], ids: list[int], *, causal: bool, act: str, eps: float) -> Tensor:
    """Logits [t V] of one text without padding, as TransformerLens computes them."""
    w = {name: value.double() for name, value in weights.items() if value.is_floating_point()}

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
        return x * w[f"{name}.w"] + w[f"{name}.b"] if f"{name}.w" in w else x

    n = len(ids)
    x = w["embed.W_E"][ids] + w["pos_embed.W_pos"][:n]
    for layer in range(2):
        prefix = f"blocks.{layer}."
        y = norm(x, f"{prefix}ln1")
        q, k, v = (
            torch.einsum("td,hdk->htk", y, w[f"{prefix}attn.W_{letter}"]) + w[f"{prefix}attn.b_{letter}"][:, None]
            for letter in "QKV"
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        z = scores.softmax(-1) @ v
        x = x + torch.einsum("htk,hkd->td", z, w[f"{prefix}attn.W_O"]) + w[f"{prefix}attn.b_O"]
        if f"{prefix}mlp.W_in" in w:
            hidden = ACTS[act](norm(x, f"{prefix}ln2") @ w[f"{prefix}mlp.W_in"] + w[f"{prefix}mlp.b_in"])
            x = x + hidden @ w[f"{prefix}mlp.W_out"] + w[f"{prefix}mlp.b_out"]
    return norm(x, "ln_final") @ w["unembed.W_U"] + w.get("unembed.b_U", torch.zeros(()))


def load(folder: Path, weights: dict[str, Tensor], **settings: Any) -> Checkpoint:
    torch.save(weights, folder / "model.pt")
    (folder / "model.json").write_text(json.dumps({**SETTINGS, **settings}))
    return open_checkpoint(str(folder / "model.pt"), device="cpu", dtype="float64")


@pytest.mark.parametrize("make", [{}, {"norms": False}, {"inner": 0}, {"bias": False}], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu_new"])
def test_a_causal_model_is_a_gpt2(make: dict[str, Any], act: str, tmp_path: Path) -> None:
    weights = state(**make)
    checkpoint = load(tmp_path, weights, act_fn=act, eps=1e-4)
    assert checkpoint.format == "transformerlens" and checkpoint.layout == {(Site.DECODER_SELF, n): 3 for n in range(2)}
    for ids in ([0, 3, 4, 5], [0, 9, 7, 3, 3, 8, 2]):
        logits = checkpoint.model(torch.tensor([ids])).logits[0].detach()
        expected = plain_logits(weights, ids, causal=True, act=act, eps=1e-4)
        torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", [{}, {"norms": False}, {"inner": 0}], ids=str)
def test_a_classifier_reads_position_0_and_sees_no_padding(make: dict[str, Any], tmp_path: Path) -> None:
    weights = state(outputs=3, **make)
    checkpoint = load(tmp_path, weights, act_fn="relu", labels=["x", "y", "z"])
    assert checkpoint.predicts == "classes" and checkpoint.label_names == ("x", "y", "z")
    texts = ["abc", "hgfedcba", "c"]
    rows = [row.ids for row in checkpoint.encode(texts, side="source", limit=12)]
    assert rows[0] == [0, 3, 4, 5, 2]
    longest = max(map(len, rows))
    padded = torch.tensor([ids + [1] * (longest - len(ids)) for ids in rows])
    logits = checkpoint.model(padded, attention_mask=(padded != 1).long()).logits.detach()
    expected = torch.stack([plain_logits(weights, ids, causal=False, act="relu", eps=1e-5)[0] for ids in rows])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_an_encoder_without_a_class_predicts_nothing(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, state(), attention_dir="bidirectional")
    assert checkpoint.predicts == "nothing" and checkpoint.layout == {(Site.ENCODER_SELF, n): 3 for n in range(2)}


def test_heads_are_cut_out_and_the_folder_opens_with_transformers(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, state(outputs=3), labels=["x", "y", "z"])
    export = FORMATS.get("transformerlens").exports[0]
    plan = plan_removal(checkpoint.attention_sites, [HeadId(Site.ENCODER_SELF, 1, 0)], whole_groups=export.whole_groups)
    (tmp_path / "small").mkdir()
    result = write_checkpoint(export.build(checkpoint, plan), tmp_path / "small")
    copy = open_checkpoint(str(result.path), device="cpu")
    assert result.format == copy.format == "huggingface" and copy.layout[Site.ENCODER_SELF, 1] == 2
    assert [row.ids for row in copy.encode(["abc"], side="source", limit=12)] == [[0, 3, 4, 5, 2]]


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"pos_embed.W_pos": None}, {}, "no pos_embed.W_pos.*Hugging Face model"),
        ({"blocks.0.mlp.W_gate": torch.ones(15, 13)}, {}, "W_gate.*neither GPT-2"),
        ({"blocks.1.attn.W_O": torch.ones(3, 4, 15)}, {}, "do not fit together"),
        ({"unembed.b_U": torch.arange(11.0), "unembed.W_U": torch.eye(15)[:, :9]}, {}, "do not fit together"),
        ({"unembed.b_U": torch.arange(11.0), "unembed.W_U": torch.ones(15, 11)}, {}, "b_U is none that W_U can make"),
        ({}, {"act_fn": "swish"}, "act_fn is 'swish'"),
        ({}, {"actfn": "relu"}, "'actfn'.*act_fn"),
        ({}, {"eps": "small"}, "eps is 'small'"),
        ({}, {"start": "<s>"}, "'<s>' is not in the vocabulary"),
    ],
)
def test_what_does_not_fit_is_said(
    change: dict[str, Tensor | None], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    weights = {name: value for name, value in (state() | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        load(tmp_path, weights, **settings)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.slow
def test_the_bracket_classifier_of_a_course(shared: Path, tmp_path: Path) -> None:
    """ARENA's model and its 400 strings: all classes are right."""
    folder = shared / "data" / "arena"
    (tmp_path / "brackets.pt").write_bytes((folder / "brackets_model_state_dict.pt").read_bytes())
    settings = {"act_fn": "relu", "vocabulary": ["[start]", "[pad]", "[end]", "(", ")"], "start": "[start]"}
    settings |= {"pad": "[pad]", "end": "[end]", "labels": ["unbalanced", "balanced"]}
    (tmp_path / "brackets.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(str(tmp_path / "brackets.pt"), device="cpu")
    texts = (folder / "brackets.txt").read_text().splitlines()
    correct = 0
    for text, label in zip(texts, (folder / "brackets.labels").read_text().splitlines(), strict=True):
        ids = checkpoint.encode([text], side="source", limit=42)[0].ids
        correct += checkpoint.label_names[int(checkpoint.model(torch.tensor([ids])).logits.argmax())] == label
    assert (len(texts), correct) == (400, 400)
