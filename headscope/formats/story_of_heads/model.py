"""Story-of-heads models: one table tells arrays and weights of the `Transformer`, hyper-parameters tell the config.

Hyper-parameters come from a file, and from array shapes where these tell. Three things shape every number and leave no
trace in arrays, so they are never guessed: `res_steps`, whose default differs between the original's classes,
`rescale_emb`, which every published recipe sets although its default is False, and `num_heads`, which only gates show.
Dropouts, search, and `alive_heads` have the original's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor

from headscope.config.option import BEAM, POWER, make_config
from headscope.errors import CheckpointError, ConfigError, flag, restate
from headscope.files.archives import Arrays
from headscope.files.reading import read_object, read_toml
from headscope.heads import Site
from headscope.model.native.transformer_config import StackConfig, TransformerConfig

Form = Literal["matrix", "vector", "embedding bias", "gates"]
SOURCE, TARGET = "mod/emb_inp/mat:0", "mod/emb_out/mat:0"
QKV = ("query", "key", "value")
SLOT = re.compile(r"\w*(Adam|Adagrad|Adadelta|RMSProp|Momentum|Ftrl|Average)(_\d+)?")
COUNTER = re.compile(r"(.*/)?(global_step|batch_no|learning_rate_multiplier|beta[12]_power(_\d+)?):0")


@dataclass(frozen=True)
class ArrayRule:
    """One array and the weights that it joins along their first axis; a "matrix" is stored transposed."""

    array: str
    weights: tuple[str, ...]
    form: Form = "vector"

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """The array of weights."""
        matrix = torch.cat([state[name] for name in self.weights])
        if self.form == "matrix":
            return matrix.T
        if self.form == "embedding bias":
            return matrix.view(1, 1, -1)
        return matrix.view(1, -1, 1, 1) if self.form == "gates" else matrix

    def unpack(self, array: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of an array; the sizes of the parts are those in `shapes`."""
        matrix = array.T if self.form == "matrix" else array
        matrix = matrix.flatten() if self.form in ("embedding bias", "gates") else matrix
        parts = torch.split(matrix, [len(shapes[name]) for name in self.weights])
        return {name: part.contiguous() for name, part in zip(self.weights, parts, strict=True)}


def is_training_state(name: str, weights: Collection[str]) -> bool:
    """Whether an array is of an optimizer (`…/<weight>/Adam:0`) or a counter of steps: no result depends on it."""
    if COUNTER.fullmatch(name):
        return True
    scope, _, slot = name.removesuffix(":0").rpartition("/")
    return SLOT.fullmatch(slot) is not None and any(
        f"/{scope}".endswith(f"/{weight.removesuffix(':0')}") for weight in weights
    )


def array_rules(config: TransformerConfig, *, loss: str, one_matrix: bool, shared: bool) -> Iterator[ArrayRule]:
    """All arrays of a model; `one_matrix`: cross attention has one matrix for queries, keys and values."""
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None
    table = "decoder.embeddings.tokens.weight"
    yield ArrayRule(SOURCE, (table if config.share_embeddings else "encoder.embeddings.tokens.weight",))
    if not shared:
        yield ArrayRule(TARGET, (table,))
    if encoder.embedding_bias:
        yield ArrayRule("mod/emb_inp_bias:0", ("encoder.embeddings.bias",), "embedding bias")
    for side, name, stack in (("enc", "encoder", encoder), ("dec", "decoder", decoder)):
        gates = "hard-concrete.v1"
        for i in range(stack.layers):
            layer = f"{name}.layers.{i}"
            yield from _attention(f"mod/{side}_attn-{i}", f"{layer}.self_attention", True, stack.self_mixing == gates)
            if side == "dec":
                array, weight = f"mod/dec_enc_attn-{i}", f"{layer}.cross_attention"
                yield from _attention(array, weight, one_matrix, stack.cross_mixing == gates)
            for array, part in (("conv1", "inner"), ("conv2", "outer")):
                yield from _linear(f"mod/{side}_ffn-{i}/{array}", (f"{layer}.ffn.{part}",))
            yield from _norm(f"mod/{side}_ffn-{i}/layer_norm", f"{layer}.ffn_norm")
        if stack.final_norm:
            yield from _norm(f"mod/{side}_out_norm", f"{name}.norm")
    if not config.tie_output:
        yield ArrayRule(f"{loss}/logits/W:0", ("output.weight",), "matrix")
    if config.output_bias:
        yield ArrayRule(f"{loss}/logits/b:0", ("output.bias",))


def _attention(array: str, weight: str, one_matrix: bool, gated: bool) -> Iterator[ArrayRule]:
    if one_matrix:
        yield from _linear(f"{array}/mem_conv", tuple(f"{weight}.{part}" for part in QKV))
    else:
        yield from _linear(f"{array}/query_conv", (f"{weight}.query",))
        yield from _linear(f"{array}/mem_conv", (f"{weight}.key", f"{weight}.value"))
    yield from _linear(f"{array}/out_conv", (f"{weight}.output",))
    yield from _norm(f"{array}/layer_norm", f"{weight}_norm")
    if gated:
        yield ArrayRule(f"{array}/gate/log_a:0", (f"{weight}.mixing.log_a",), "gates")


def _linear(array: str, modules: tuple[str, ...]) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/W:0", tuple(f"{module}.weight" for module in modules), "matrix")
    yield ArrayRule(f"{array}/b:0", tuple(f"{module}.bias" for module in modules))


def _norm(array: str, weight: str) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/scale:0", (f"{weight}.weight",))
    yield ArrayRule(f"{array}/bias:0", (f"{weight}.bias",))


NORMS: Mapping[str, Literal["pre", "post"]] = {"nlda": "pre", "ldan": "post"}
SITES = {"enc-self": Site.ENCODER_SELF, "dec-self": Site.DECODER_SELF, "dec-enc": Site.CROSS}
MODULES = {"enc-self": "enc_attn", "dec-self": "dec_attn", "dec-enc": "dec_enc_attn"}
UNKNOWN_HERE = ("dst_reverse", "dst_rand_offset", "force_bos", "attn_beta", "replace")
LOSS = "loss_xent_lm"
LOGITS = re.compile(r"(.+)/logits/[Wb]:0")
GATES = re.compile(r"mod/(\w+)-\d+/gate/log_a:0")


@dataclass(frozen=True, kw_only=True)
class Hp:
    """What a file may say; None where the arrays tell. Names and defaults are the original's."""

    res_steps: str
    rescale_emb: bool
    num_layers: int | None = None
    num_layers_enc: int = 0
    num_layers_dec: int = 0
    num_heads: Annotated[int, Ge(1)] | None = None
    hid_size: int | None = None
    emb_size: int | None = None
    key_size: int | None = None
    value_size: int | None = None
    normalize_out: bool | None = None
    inp_emb_bias: bool | None = None
    share_emb: bool | None = None
    dwwt: bool | None = None
    loss_bias: bool | None = None
    loss_name: str | None = None
    multihead_attn_format: str | None = None
    res_dropout: float = 0.1
    attn_dropout: float = 0.0
    relu_dropout: float = 0.0
    attn_value_dropout: float = 0.0
    beam_size: Annotated[int, Ge(1), Le(BEAM)] = 12
    beam_spread: float = 3.0
    len_alpha: Annotated[float, Ge(-POWER), Le(POWER)] = 1.0
    gated: tuple[str, ...] | None = field(default=None)
    alive: Mapping[str, Any] = field(default_factory=dict)


class Shape(NamedTuple):
    """What the arrays and the hyper-parameters say together."""

    config: TransformerConfig
    combined: bool
    shared: bool


def read_hp(path: Path) -> tuple[Hp, dict[str, Any]]:
    """Hyper-parameters from JSON or TOML, and the file's content; ConfigError says what is wrong with them."""
    values = read_toml(path) if path.suffix == ".toml" else read_object(path, error=ConfigError)
    if str(values.get("res_steps")) not in NORMS:
        raise ConfigError(
            f"{path}: res_steps is {str(values.get('res_steps'))[:20]!r}; headscope knows 'nlda' (norm before) and "
            "'ldan' (norm after the sum), and the arrays do not tell which"
        )
    if values.get("rescale_emb") is None:
        raise ConfigError(
            f"{path}: rescale_emb is not said, and the arrays do not tell it; say true (as published recipes) or false"
        )
    if unsupported_names := [name for name in UNKNOWN_HERE if values.get(name)]:
        setting = f"{unsupported_names[0]} = {str(values[unsupported_names[0]])[:20]}"
        raise ConfigError(f"{path}: {setting} is not supported; set it to 0 to read the model without it")
    names = {entry.name for entry in fields(Hp)} - {"gated", "alive"}
    with restate(ConfigError, f"{path}: {{why}}"):
        hp = make_config(Hp, {name: value for name, value in values.items() if name in names and value is not None})
        return _with_gates(hp, values.get("concrete_heads"), values.get("alive_heads") or {}), values


def _with_gates(hp: Hp, gated: Any, alive: Any) -> Hp:
    tables = alive.values() if isinstance(alive, Mapping) else [None]
    masks = [mask for table in tables for mask in (table if isinstance(table, list) else [None])]
    if not all(isinstance(mask, list) and all(gate in (0, 1) for gate in mask) for mask in masks):
        raise ConfigError("alive_heads must give lists of 0 and 1, a list per layer, for attention types")
    sites = None if gated is None else tuple(gated) if isinstance(gated, (list, tuple, dict)) else (str(gated),)
    names = [str(name) for name in (*(sites or ()), *alive)]
    if strange := [name for name in names if name not in SITES]:
        raise ConfigError(f"there is no attention type {strange[0][:20]!r}; available: {', '.join(SITES)}")
    if len(names) > len(set(names)):
        raise ConfigError("an attention type is in concrete_heads and in alive_heads, or twice; it has gates once")
    return replace(hp, gated=sites, alive=dict(alive))


def loss_scope(arrays: Arrays, hp: Hp) -> str:
    """The scope of the output projection: as the file says, else as the arrays tell, else the original's default."""
    if hp.loss_name is not None:
        return hp.loss_name
    scopes = sorted(match[1] for name in arrays.names if (match := LOGITS.fullmatch(name)))
    return scopes[0] if scopes and LOSS not in scopes else LOSS


def set_aside(hp: Hp, name: str) -> bool:
    """Whether an array has gates that the file leaves out knowingly: by its `concrete_heads` or `alive_heads`."""
    match = GATES.fullmatch(name)
    site = next((site for site, module in MODULES.items() if match and module == match[1]), None)
    return site is not None and (site in hp.alive or (hp.gated is not None and site not in hp.gated))


def shape_of(arrays: Arrays, hp: Hp) -> Shape:
    """The model's config; CheckpointError names an array that is missing."""
    if SOURCE not in arrays.names:
        raise CheckpointError(f"{arrays.path} has no array {SOURCE!r}, which every model of this format has")
    layers = [hp.num_layers_enc or hp.num_layers, hp.num_layers_dec or hp.num_layers]
    counts = [_layers(arrays, side, layers) for side, layers in zip(("enc", "dec"), layers, strict=True)]
    if (gated := hp.gated) is None:  # attention types with trained gates: those that have arrays
        with_gates = [name for name, module in MODULES.items() if f"mod/{module}-0/gate/log_a:0" in arrays.names]
        gated = tuple(name for name in with_gates if counts[name != "enc-self"] and name not in hp.alive)
    heads = _heads(arrays, hp, gated)
    shared = TARGET not in arrays.names if hp.share_emb is None else hp.share_emb
    loss = loss_scope(arrays, hp)
    tied = f"{loss}/logits/W:0" not in arrays.names if hp.dwwt is None else hp.dwwt
    words = [_size(arrays, SOURCE, 0), _size(arrays, SOURCE if shared else TARGET, 0)]
    if shared and not tied:
        words[1] = _size(arrays, f"{loss}/logits/W:0", 1)
    cross = f"mod/{MODULES['dec-enc']}-0/query_conv/W:0"
    layout = hp.multihead_attn_format
    one_matrix = cross not in arrays.names and counts[1] > 0 if layout is None else layout != "v1"
    config = TransformerConfig(
        encoder=_stack(arrays, hp, "enc", words[0], (heads,) * counts[0], gated),
        decoder=_stack(arrays, hp, "dec", words[1], (heads,) * counts[1], gated),
        start="zero",
        share_embeddings=shared and words[0] == words[1],
        tie_output=tied,
        output_bias=f"{loss}/logits/b:0" in arrays.names if hp.loss_bias is None else hp.loss_bias,
    )
    return Shape(config, one_matrix, shared)


def _stack(
    arrays: Arrays, hp: Hp, side: str, words: int, heads: tuple[int, ...], gated: tuple[str, ...]
) -> StackConfig:
    d = hp.hid_size or _size(arrays, SOURCE, 1)
    if (hp.emb_size or d) != d:
        raise ConfigError(f"emb_size {hp.emb_size} differs from hid_size {d}; the format has no projection for that")
    has_bias = "mod/emb_inp_bias:0" in arrays.names if hp.inp_emb_bias is None else hp.inp_emb_bias
    mixing = dict.fromkeys(hp.alive, "alive.v1") | dict.fromkeys(gated, "hard-concrete.v1")
    key, value, ffn, count = hp.key_size or d, hp.value_size or d, d, heads[0] if heads else 1
    if heads:  # widths of all heads' keys and of their values, and of the feed-forward layer
        value = hp.value_size or _size(arrays, f"mod/{side}_attn-0/out_conv/W:0", 0)
        key = hp.key_size or max((_size(arrays, f"mod/{side}_attn-0/mem_conv/W:0", 1) - value) // 2, 1)
        ffn = _size(arrays, f"mod/{side}_ffn-0/conv1/W:0", 1)
    if key % count or value % count:
        raise ConfigError(f"num_heads {count} does not divide key_size {key} and value_size {value}")
    return StackConfig(
        vocabulary=words,
        d_model=d,
        d_ffn=ffn,
        d_head=key // count,
        d_value=value // count if value != key else None,
        self_heads=heads,
        cross_heads=heads if side == "dec" else (),
        norm=NORMS[hp.res_steps],
        final_norm=f"mod/{side}_out_norm/scale:0" in arrays.names if hp.normalize_out is None else hp.normalize_out,
        norm_epsilon=1e-6,
        scale_embedding=hp.rescale_emb,
        embedding_bias=side == "enc" and has_bias,
        self_mixing=mixing.get(f"{side}-self"),
        cross_mixing=mixing.get("dec-enc") if side == "dec" else None,
        dropout=hp.res_dropout,
        attention_dropout=hp.attn_dropout,
        activation_dropout=hp.relu_dropout,
        context_dropout=hp.attn_value_dropout,
    )


def _layers(arrays: Arrays, side: str, expected: int | None) -> int:
    first = "mod/{}_attn-{}/mem_conv/W:0"
    count = 0
    while first.format(side, count) in arrays.names and count != expected:
        count += 1
    if expected is not None and count < expected:
        raise CheckpointError(
            f"{arrays.path} has no array {first.format(side, count)!r}, but the hyper-parameters say {expected} layers"
        )
    return count


def _heads(arrays: Arrays, hp: Hp, gated: tuple[str, ...]) -> int:
    if hp.num_heads is not None:
        return hp.num_heads
    if not gated:
        raise ConfigError(f"arrays without gates do not tell num_heads; add it to the {flag.hp} file")
    return _size(arrays, f"mod/{MODULES[gated[0]]}-0/gate/log_a:0", 1)


def _size(arrays: Arrays, name: str, axis: int) -> int:
    if name not in arrays.names:
        raise CheckpointError(f"{arrays.path} has no array {name!r}")
    shape = arrays.shape(name)
    if len(shape) <= axis or not 1 <= shape[axis] < 2**31:
        raise CheckpointError(f"{arrays.path}: array {name!r} has the shape {list(shape)}, which does not fit")
    return shape[axis]
