"""State dicts with TransformerLens' names, opened as the class of transformers that computes the same.

Causal models become GPT-2, bidirectional ones the pre-norm encoder XLM-RoBERTa-XL. Sizes come from the shapes of
weights; activation, direction, vocabulary and labels from a JSON file of the same name beside the weights, see
`LensSettings`. Layers without norm weights (folded or centred models) get ones and zeros, attention-only layers a
feed-forward block that adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from headscope.config import Companions
from headscope.config.option import make_config
from headscope.errors import CheckpointError, ConfigError, reason_of, restate
from headscope.files.reading import file_digest, read_object
from headscope.formats.base import FORMATS
from headscope.formats.huggingface.format import FolderFormat
from headscope.formats.pickles import is_torch_file, read_tensors, read_torch

if TYPE_CHECKING:
    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

QUERIES = "blocks.0.attn.W_Q"
LINEAR_TANH = 2.0**-12  # scales the input of a tanh into its linear part; an input of 1 gets a relative error of 2e-8


@dataclass(frozen=True, kw_only=True)
class LensSettings:
    """Settings of a JSON file beside the weights, under TransformerLens' names where it has one.

    `attention_dir`: the default is causal if the model has as many outputs as inputs; else bidirectional, a classifier
    of position 0. `tokenizer`: a folder or hub id. Without it, `vocabulary`: the tokens in the order of their ids, some
    of which are `start`, `end`, `pad` and `unknown`. `labels`: names of the classes.
    """

    act_fn: Literal["gelu_new", "gelu", "relu", "silu", "gelu_fast"] = "gelu_new"
    attention_dir: Literal["causal", "bidirectional"] | None = None
    eps: float = 1e-5
    tokenizer: str | None = None
    vocabulary: tuple[str, ...] = ()
    start: str | None = None
    end: str | None = None
    pad: str | None = None
    unknown: str | None = None
    labels: tuple[str, ...] = ()

    def special_ids(self) -> dict[str, Any]:
        """Ids of special tokens for a config of transformers; CheckpointError for one outside the vocabulary."""
        ids = {"bos_token_id": self.start, "eos_token_id": self.end, "pad_token_id": self.pad}
        if unknown := {*ids.values()} - {None, *self.vocabulary}:
            raise CheckpointError(f"the special token {unknown.pop()!r} is not in the vocabulary")
        return {name: None if token is None else self.vocabulary.index(token) for name, token in ids.items()}


class TransformerLensFormat(FolderFormat):
    """A file of torch.save with TransformerLens' names; it is written as a Hugging Face folder."""

    name = "transformerlens"
    summary = "a *.pt state dict with TransformerLens' names (blocks.0.attn.W_Q), settings in a .json beside it"

    def recognise(self, path: Path) -> bool:
        return path.is_file() and is_torch_file(path, QUERIES)

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> HuggingFaceCheckpoint:
        from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

        file, settings_path = Path(path), Path(path).with_suffix(".json")
        files, content = [file, *([settings_path] if settings_path.is_file() else [])], read_torch(file)
        if not isinstance(content, Mapping) or QUERIES not in content:
            raise CheckpointError(f"{path} holds no state dict with TransformerLens' names, such as {QUERIES}")
        state = {name: tensor.float() for name, tensor in read_tensors(file, content).items()}
        with restate(CheckpointError, f"{path}: {{why}}", CheckpointError, ConfigError):
            values = read_object(settings_path, error=CheckpointError) if files[1:] else {}
            settings = make_config(LensSettings, values, what=settings_path.name)
            with restate(CheckpointError, "weights do not fit together ({why})", KeyError, RuntimeError, ValueError):
                model = build_model(state, settings)
            tokenizer, why_no_tokenizer = _open_tokenizer(settings, settings_path)
        model = model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype)).to(device).eval()
        checkpoint = HuggingFaceCheckpoint(
            path=path, model=model, tokenizer=tokenizer, digest=file_digest(files), why_no_tokenizer=why_no_tokenizer
        )
        checkpoint.format, checkpoint.read_files = self.name, tuple(files[1:])
        return checkpoint


def build_model(state: Mapping[str, Tensor], settings: LensSettings) -> Any:
    """The model of transformers with the weights of a state dict; CheckpointError if no class computes the same."""
    heads, d, width = state[QUERIES].shape
    foreign = [name for name in state if name.endswith((".W_gate", "._W_K", ".attn.rotary_sin", ".attn.W_pos"))]
    reasons = {
        f"it has {foreign[0]}" if foreign else "": bool(foreign),
        "it has no pos_embed.W_pos": "pos_embed.W_pos" not in state,
        f"its {heads} heads of width {width} are not {d} wide": heads * width != d,
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise CheckpointError(f"{why}, so neither GPT-2 nor XLM-RoBERTa-XL computes it; give its Hugging Face model")
    layers, inputs = sum(name.endswith(".attn.W_Q") for name in state), len(state["embed.W_E"])
    direction = settings.attention_dir or ("causal" if inputs == state["unembed.W_U"].shape[1] else "bidirectional")
    build = _decoder if direction == "causal" else _encoder
    sizes = {"vocab_size": inputs, "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads}
    model, weights = build({**_neutral(state, layers), **state}, sizes, settings)
    fixed = {name: own for name, own in model.state_dict().items() if name.endswith(("position_ids", "token_type_ids"))}
    model.load_state_dict({**fixed, **{name: tensor.contiguous() for name, tensor in weights.items()}})
    return model


def _neutral(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Neutral weights for the norms, biases and blocks that folded, centred and attention-only models lack."""
    h, d, k = state[QUERIES].shape
    m = state["blocks.0.mlp.W_in"].shape[1] if "blocks.0.mlp.W_in" in state else 1
    norm = {"w": torch.ones(d), "b": torch.zeros(d)}
    layer = {f"{name}.{part}": value for name in ("ln1", "ln2") for part, value in norm.items()}
    layer |= {f"attn.b_{letter}": torch.zeros(h, k) for letter in "QKV"}
    layer |= {"mlp.W_in": torch.zeros(d, m), "mlp.W_out": torch.zeros(m, d)}
    layer |= {"attn.b_O": torch.zeros(d), "mlp.b_in": torch.zeros(m), "mlp.b_out": torch.zeros(d)}
    weights = {f"blocks.{n}.{name}": value for n in range(layers) for name, value in layer.items()}
    weights |= {f"ln_final.{part}": value for part, value in norm.items()}
    return weights | {"unembed.b_U": torch.zeros(state["unembed.W_U"].shape[1])}


DECODER = {
    **{"ln_1": ("ln1",), "ln_2": ("ln2",), "attn.c_attn": ("attn.Q", "attn.K", "attn.V"), "attn.c_proj": ("attn.O",)},
    **{"mlp.c_fc": ("mlp.in",), "mlp.c_proj": ("mlp.out",)},
}
ENCODER = {
    **{"attention.self_attn_layer_norm": ("ln1",), "LayerNorm": ("ln2",), "attention.output.dense": ("attn.O",)},
    **{f"attention.self.{name}": (f"attn.{name[0].upper()}",) for name in ("query", "key", "value")},
    **{"intermediate.dense": ("mlp.in",), "output.dense": ("mlp.out",)},
}
"""Parts of a layer in TransformerLens that each module of transformers joins."""


def _layers(
    state: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]], prefix: str, layers: int, *, transposes: bool
) -> dict[str, Tensor]:
    """Weights of all layers under the names of a table; `transposes`: matrices are [out in]."""
    weights = {}
    for n in range(layers):
        for module, parts in table.items():
            matrices, biases = [], []
            for block, _, part in (name.partition(".") for name in parts):
                if not part:
                    matrices, biases = [state[f"blocks.{n}.{block}.w"]], [state[f"blocks.{n}.{block}.b"]]
                    continue
                weight = state[f"blocks.{n}.{block}.W_{part}"]  # [h d k], [h k d] of W_O, [in out]
                flat = weight.permute(1, 0, 2).flatten(1) if part in "QKV" else weight.flatten(0, -2)
                matrices.append(flat.T if transposes else flat)
                biases.append(state[f"blocks.{n}.{block}.b_{part}"].flatten())
            weights[f"{prefix}.{n}.{module}.weight"] = torch.cat(matrices, 0 if transposes else -1)
            weights[f"{prefix}.{n}.{module}.bias"] = torch.cat(biases)
    return weights


def _decoder(
    state: Mapping[str, Tensor], sizes: Mapping[str, int], settings: LensSettings
) -> tuple[Any, dict[str, Tensor]]:
    """A GPT-2, which has no output bias: the final norm's bias gets a part that W_U turns into the output bias."""
    from transformers import GPT2Config, GPT2LMHeadModel

    matrix, bias = state["unembed.W_U"].double(), state["unembed.b_U"].double()
    if sizes["vocab_size"] != len(bias):
        raise CheckpointError(f"a causal model of {sizes['vocab_size']} inputs and {len(bias)} outputs is no GPT-2")
    config = GPT2Config(
        **sizes,
        n_positions=len(state["pos_embed.W_pos"]),
        n_inner=state["blocks.0.mlp.W_in"].shape[1],
        activation_function=settings.act_fn,
        layer_norm_epsilon=settings.eps,
        tie_word_embeddings=False,
        **settings.special_ids(),
    )
    weights = {"transformer.wte.weight": state["embed.W_E"], "transformer.wpe.weight": state["pos_embed.W_pos"]}
    weights |= _layers(state, DECODER, "transformer.h", sizes["num_hidden_layers"], transposes=False)
    norm_bias = torch.linalg.lstsq(matrix.T, bias[:, None], driver="gelsd").solution[:, 0]  # [d], bias = W_Uᵀ norm_bias
    residual = bias - norm_bias @ matrix
    if (residual - residual.mean()).abs().max() > 1e-4:  # a constant changes no probability
        raise CheckpointError("the bias unembed.b_U is none that W_U can make, and GPT-2 has no bias of its outputs")
    weights["transformer.ln_f.weight"] = state["ln_final.w"]
    weights["transformer.ln_f.bias"] = state["ln_final.b"] + norm_bias.float()
    return GPT2LMHeadModel(config), weights | {"lm_head.weight": state["unembed.W_U"].T}


def _encoder(
    state: Mapping[str, Tensor], sizes: Mapping[str, int], settings: LensSettings
) -> tuple[Any, dict[str, Tensor]]:
    """An XLM-RoBERTa-XL; as a classifier it reads position 0, through a tanh that is kept in its linear part."""
    from transformers import XLMRobertaXLConfig, XLMRobertaXLForSequenceClassification, XLMRobertaXLModel

    special = settings.special_ids()
    first = (special["pad_token_id"] or 0) + 1  # positions count from the padding's id
    positions = torch.nn.functional.pad(state["pos_embed.W_pos"], (0, 0, first, 0))
    d, outputs = sizes["hidden_size"], state["unembed.W_U"].shape[1]
    config = XLMRobertaXLConfig(
        **sizes,
        intermediate_size=state["blocks.0.mlp.W_in"].shape[1],
        hidden_act=settings.act_fn,
        max_position_embeddings=len(positions),
        type_vocab_size=1,
        layer_norm_eps=settings.eps,
        **{**special, "pad_token_id": first - 1},
    )
    config.num_labels = outputs
    if settings.labels:
        config.id2label = dict(enumerate(settings.labels))
        config.label2id = {label: number for number, label in enumerate(settings.labels)}
    weights = {
        "embeddings.word_embeddings.weight": state["embed.W_E"],
        "embeddings.position_embeddings.weight": positions,
        "embeddings.token_type_embeddings.weight": torch.zeros(1, d),
        **_layers(state, ENCODER, "encoder.layer", sizes["num_hidden_layers"], transposes=True),
        **{f"encoder.LayerNorm.{end}": state[f"ln_final.{end[0]}"] for end in ("weight", "bias")},
    }
    if sizes["vocab_size"] == outputs:
        return XLMRobertaXLModel(config, add_pooling_layer=False), weights
    classifier = {
        "dense.weight": LINEAR_TANH * torch.eye(d),
        "dense.bias": torch.zeros(d),
        "out_proj.weight": state["unembed.W_U"].T / LINEAR_TANH,
        "out_proj.bias": state["unembed.b_U"],
    }
    weights = {f"roberta.{name}": tensor for name, tensor in weights.items()}
    weights |= {f"classifier.{name}": tensor for name, tensor in classifier.items()}
    return XLMRobertaXLForSequenceClassification(config), weights


def _open_tokenizer(settings: LensSettings, settings_path: Path) -> tuple[Any, str]:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if settings.tokenizer is not None:
        folder = settings_path.parent / settings.tokenizer
        where = str(folder) if folder.is_dir() else settings.tokenizer
        try:
            return AutoTokenizer.from_pretrained(where, trust_remote_code=False), ""
        except Exception as error:  # whatever transformers raises
            why = reason_of(error, max_length=120)
            raise CheckpointError(f"{settings_path}: no tokenizer {where} ({why})") from None
    if not settings.vocabulary:
        return None, f'write {settings_path.name} with "tokenizer" or "vocabulary"'
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = dict(zip(names, (settings.start, settings.end, settings.pad, settings.unknown), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer(settings), **special), ""


def _word_tokenizer(settings: LensSettings) -> Any:
    """A tokenizer for a list of tokens: of characters if all but special tokens are one character, else of words."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    number_of = {token: number for number, token in enumerate(settings.vocabulary)}
    outside = settings.unknown or "[outside the vocabulary]"  # an id without embedding, at which texts are refused
    tokenizer = Tokenizer(models.WordLevel({outside: len(number_of), **number_of}, unk_token=outside))
    special = {settings.start, settings.end, settings.pad, settings.unknown}
    of_characters = all(len(token) == 1 for token in settings.vocabulary if token not in special)
    split = pre_tokenizers.Split(Regex("."), "isolated") if of_characters else pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = split
    ends = [token for token in (settings.start, settings.end) if token is not None]
    template = " ".join(filter(None, [settings.start, "$A", settings.end]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, number_of[token]) for token in ends]
    )
    return tokenizer


FORMATS.register("transformerlens", TransformerLensFormat(), where=__name__)
