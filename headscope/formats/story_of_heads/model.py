"""Story-of-heads models: hyper-parameters tell the config, one table tells arrays and weights of the `Transformer`.

Hyper-parameters come from a file, else from the shapes of arrays. Three change every result and leave no trace in
arrays, so they are never guessed: `res_steps`, whose default differs between the original's classes, `rescale_emb`,
which every published recipe sets although its default is False, and `num_heads`, which only gates show. Dropouts,
search, and `alive_heads` have the original's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor

from headscope.config.option import BEAM, POWER, take_config
from headscope.errors import CheckpointError, ConfigError, flag, restate, shortlist
from headscope.files.archives import Arrays
from headscope.files.reading import read_object, read_toml
from headscope.heads import Site
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.nonfinite import refuse_damaged_file

SOURCE, TARGET = "mod/emb_inp/mat:0", "mod/emb_out/mat:0"
QKV = ("query", "key", "value")
NORMS: Mapping[str, Literal["pre", "post"]] = {"nlda": "pre", "ldan": "post"}
AttentionType = Literal["enc-self", "dec-self", "dec-enc"]
SITES = {"enc-self": Site.ENCODER_SELF, "dec-self": Site.DECODER_SELF, "dec-enc": Site.CROSS}
MODULES: Mapping[AttentionType, str] = {"enc-self": "enc_attn", "dec-self": "dec_attn", "dec-enc": "dec_enc_attn"}
UNKNOWN_HERE = ("dst_reverse", "dst_rand_offset", "force_bos", "attn_beta", "replace")
LOSS = "loss_xent_lm"
LOGITS = re.compile(r"(.+)/logits/[Wb]:0")
SLOT = re.compile(r"\w*(Adam|Adagrad|Adadelta|RMSProp|Momentum|Ftrl|Average)(_\d+)?")
COUNTER = re.compile(r"(.*/)?(global_step|batch_no|learning_rate_multiplier|beta[12]_power(_\d+)?):0")
GATES = re.compile(r"mod/(\w+)-\d+/gate/log_a:0")


@dataclass(frozen=True, kw_only=True)
class Hp:
    """Hyper-parameters of a file; None where the arrays decide. Names and defaults are the original's."""

    res_steps: Literal["nlda", "ldan"]
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
    concrete_heads: tuple[AttentionType, ...] | None = None
    alive_heads: Mapping[AttentionType, tuple[tuple[Literal[0, 1], ...], ...]] = field(default_factory=dict)


class Shape(NamedTuple):
    """The architecture, from the arrays and the hyper-parameters together.

    `has_one_matrix`: cross attention has one matrix for queries, keys and values. `shared`: source and target have one
    table of embeddings. `loss` is the scope of the output layer's arrays.
    """

    config: TransformerConfig
    has_one_matrix: bool
    shared: bool
    loss: str


NOT_IN_ARRAYS = {
    "res_steps": "'nlda' (norm before) or 'ldan' (norm after the sum)",
    "rescale_emb": "true (as published recipes) or false",
}


def read_hp(path: Path) -> tuple[Hp, dict[str, Any]]:
    """Checked hyper-parameters of a JSON or TOML file, and its whole content; ConfigError names a wrong one."""
    values = read_toml(path) if path.suffix == ".toml" else read_object(path, error=ConfigError)
    for name, choices in NOT_IN_ARRAYS.items():
        if values.get(name) is None:
            raise ConfigError(f"{path}: {name} is not said, and the arrays do not tell it; say {choices}")
    for name in UNKNOWN_HERE:
        if value := values.get(name):
            why = f"{name} = {str(value)[:20]} is not supported; set it to 0 to read the model without it"
            raise ConfigError(f"{path}: {why}")
    with restate(ConfigError, f"{path}: {{why}}"):
        hp = take_config(Hp, {name: value for name, value in values.items() if value is not None})
    gated = [*(hp.concrete_heads or ()), *hp.alive_heads]
    if len(gated) > len(set(gated)):
        raise ConfigError(f"{path}: concrete_heads and alive_heads name an attention type twice; it has gates once")
    return hp, values


def shape_of(arrays: Arrays, hp: Hp) -> Shape:
    """The architecture of a model; CheckpointError names an array that is missing."""
    if SOURCE not in arrays.names:
        raise CheckpointError(f"{arrays.path} has no array {SOURCE!r}, which every model of this format has")
    enc, dec = _layers(arrays, hp, "enc"), _layers(arrays, hp, "dec")
    if (gated := hp.concrete_heads) is None:  # attention types with trained gates: those that have arrays
        with_gates = (name for name, module in MODULES.items() if f"mod/{module}-0/gate/log_a:0" in arrays.names)
        gated = tuple(
            name for name in with_gates if (enc if name == "enc-self" else dec) and name not in hp.alive_heads
        )
    if hp.num_heads is None and not gated:
        raise ConfigError(f"arrays without gates do not tell num_heads; add it to the {flag.hp} file")
    heads = hp.num_heads or _size(arrays, f"mod/{MODULES[gated[0]]}-0/gate/log_a:0", 1)
    scopes = sorted(match[1] for name in arrays.names if (match := LOGITS.fullmatch(name)))
    own_loss = scopes[0] if scopes and LOSS not in scopes else LOSS
    loss = own_loss if hp.loss_name is None else hp.loss_name
    shared = TARGET not in arrays.names if hp.share_emb is None else hp.share_emb
    tied = f"{loss}/logits/W:0" not in arrays.names if hp.dwwt is None else hp.dwwt
    words = [_size(arrays, SOURCE, 0), _size(arrays, SOURCE if shared else TARGET, 0)]
    if shared and not tied:
        words[1] = _size(arrays, f"{loss}/logits/W:0", 1)
    cross, layout = f"mod/{MODULES['dec-enc']}-0/query_conv/W:0", hp.multihead_attn_format
    one_matrix = cross not in arrays.names and dec > 0 if layout is None else layout != "v1"
    config = TransformerConfig(
        encoder=_stack(arrays, hp, "enc", words[0], (heads,) * enc, gated),
        decoder=_stack(arrays, hp, "dec", words[1], (heads,) * dec, gated),
        start="zero",
        share_embeddings=shared and words[0] == words[1],
        tie_output=tied,
        output_bias=f"{loss}/logits/b:0" in arrays.names if hp.loss_bias is None else hp.loss_bias,
    )
    return Shape(config, one_matrix, shared, loss)


def _layers(arrays: Arrays, hp: Hp, side: str) -> int:
    expected, first = getattr(hp, f"num_layers_{side}") or hp.num_layers, "mod/{}_attn-{}/mem_conv/W:0"
    count = 0
    while first.format(side, count) in arrays.names and count != expected:
        count += 1
    if expected is not None and count < expected:
        name = first.format(side, count)
        raise CheckpointError(f"{arrays.path} has no array {name!r}; the hyper-parameters say {expected} layers")
    return count


def _stack(
    arrays: Arrays, hp: Hp, side: str, words: int, heads: tuple[int, ...], gated: Collection[str]
) -> StackConfig:
    d = hp.hid_size or _size(arrays, SOURCE, 1)
    if (hp.emb_size or d) != d:
        raise ConfigError(f"emb_size {hp.emb_size} differs from hid_size {d}; the format has no projection for that")
    has_bias = "mod/emb_inp_bias:0" in arrays.names if hp.inp_emb_bias is None else hp.inp_emb_bias
    mixing = dict.fromkeys(hp.alive_heads, "alive.v1") | dict.fromkeys(gated, "hard-concrete.v1")
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


def _size(arrays: Arrays, name: str, axis: int) -> int:
    shape = arrays[name].shape if name in arrays.names else ()
    if len(shape) <= axis or not 1 <= shape[axis] < 2**31:
        why = f"has the shape {list(shape)}, which does not fit" if shape else "is missing"
        raise CheckpointError(f"{arrays.path}: array {name!r} {why}")
    return shape[axis]


@dataclass(frozen=True)
class ArrayRule:
    """An array of the file and the native weights that it joins along their first axis, then transposes or reshapes."""

    array: str
    weights: tuple[str, ...]
    transposes: bool = False
    view: tuple[int, ...] = ()

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """The array that joins the weights of `state`."""
        matrix = torch.cat([state[name] for name in self.weights])
        matrix = matrix.view(self.view) if self.view else matrix
        return matrix.T if self.transposes else matrix

    def unpack(self, array: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that an array joins, in the sizes that they have in `shapes`."""
        matrix = array.T if self.transposes else array.flatten() if self.view else array
        parts = torch.split(matrix, [len(shapes[name]) for name in self.weights])
        return {name: part.contiguous() for name, part in zip(self.weights, parts, strict=True)}


def array_rules(shape: Shape) -> Iterator[ArrayRule]:
    """The rules for all arrays of a model."""
    config, table = shape.config, "decoder.embeddings.tokens.weight"
    assert config.encoder is not None
    yield ArrayRule(SOURCE, (table if config.share_embeddings else "encoder.embeddings.tokens.weight",))
    if not shape.shared:
        yield ArrayRule(TARGET, (table,))
    if config.encoder.embedding_bias:
        yield ArrayRule("mod/emb_inp_bias:0", ("encoder.embeddings.bias",), view=(1, 1, -1))
    for name, stack in config.sides.items():
        side = name[:3]
        sites = {f"{side}_attn": ("self_attention", True, stack.self_mixing)}
        sites |= (
            {MODULES["dec-enc"]: ("cross_attention", shape.has_one_matrix, stack.cross_mixing)} if side == "dec" else {}
        )
        for i in range(stack.layers):
            layer = f"{name}.layers.{i}"
            for array, (weight, one_matrix, mixing) in sites.items():
                yield from _attention(f"mod/{array}-{i}", f"{layer}.{weight}", one_matrix, mixing == "hard-concrete.v1")
            for array, part in (("conv1", "inner"), ("conv2", "outer")):
                yield from _linear(f"mod/{side}_ffn-{i}/{array}", f"{layer}.ffn.{part}")
            yield from _norm(f"mod/{side}_ffn-{i}/layer_norm", f"{layer}.ffn_norm")
        if stack.final_norm:
            yield from _norm(f"mod/{side}_out_norm", f"{name}.norm")
    if not config.tie_output:
        yield ArrayRule(f"{shape.loss}/logits/W:0", ("output.weight",), transposes=True)
    if config.output_bias:
        yield ArrayRule(f"{shape.loss}/logits/b:0", ("output.bias",))


def _attention(array: str, weight: str, one_matrix: bool, gated: bool) -> Iterator[ArrayRule]:
    if not one_matrix:
        yield from _linear(f"{array}/query_conv", f"{weight}.query")
    yield from _linear(f"{array}/mem_conv", *(f"{weight}.{part}" for part in (QKV if one_matrix else QKV[1:])))
    yield from _linear(f"{array}/out_conv", f"{weight}.output")
    yield from _norm(f"{array}/layer_norm", f"{weight}_norm")
    if gated:
        yield ArrayRule(f"{array}/gate/log_a:0", (f"{weight}.mixing.log_a",), view=(1, -1, 1, 1))


def _linear(array: str, *modules: str) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/W:0", tuple(f"{module}.weight" for module in modules), transposes=True)
    yield ArrayRule(f"{array}/b:0", tuple(f"{module}.bias" for module in modules))


def _norm(array: str, weight: str) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/scale:0", (f"{weight}.weight",))
    yield ArrayRule(f"{array}/bias:0", (f"{weight}.bias",))


def is_unread(name: str, weights: Collection[str], hp: Hp) -> bool:
    """Whether no result depends on an array: a counter of steps, an optimizer's (`…/<weight>/Adam:0`), an unused gate.

    Gates are unused in attention types that `concrete_heads` does not name or `alive_heads` does.
    """
    scope, _, slot = name.removesuffix(":0").rpartition("/")
    ends = tuple(f"/{weight.removesuffix(':0')}" for weight in weights)
    if COUNTER.fullmatch(name) or (SLOT.fullmatch(slot) and f"/{scope}".endswith(ends)):
        return True
    match, concrete = GATES.fullmatch(name), MODULES if hp.concrete_heads is None else hp.concrete_heads
    sites = [site for site, module in MODULES.items() if match and module == match[1]]
    return any(site in hp.alive_heads or site not in concrete for site in sites)


def read_arrays(arrays: Arrays, hp: Hp, shape: Shape) -> dict[str, Tensor]:
    """The weights of a model under native names; CheckpointError names missing, unknown and wrongly sized arrays."""
    with torch.device("meta"):
        expected_model = Transformer(shape.config)
    expected, table = expected_model.state_dict(), list(array_rules(shape))
    weights = {row.array for row in table}
    if unread := [name for name in sorted(arrays.names - weights) if not is_unread(name, weights, hp)]:
        raise CheckpointError(
            f"{arrays.path}: the model that the hyper-parameters describe has no place for the arrays "
            f"{shortlist([name[:80] for name in unread])}; correct the {flag.hp} file (num_layers, say)"
        )
    if missing := [row.array for row in table if row.array not in arrays.names]:
        raise CheckpointError(f"{arrays.path} lacks arrays of the model: {shortlist(missing)}")
    state: dict[str, Tensor] = {}
    for row in table:
        array, expected_shape = torch.from_numpy(arrays[row.array].copy()), row.pack(expected).shape
        refuse_damaged_file(arrays.path, {row.array: array})
        if array.shape != expected_shape:
            shapes = f"{list(array.shape)}, and the hyper-parameters say {list(expected_shape)}"
            raise CheckpointError(f"{arrays.path}: array {row.array} has the shape {shapes}")
        state |= row.unpack(array.float(), expected)
    if shape.shared and not shape.config.share_embeddings:
        words = shape.config.decoder.vocabulary  # the first rows of the common table
        state["decoder.embeddings.tokens.weight"] = state["encoder.embeddings.tokens.weight"][:words].clone()
    modules = [*expected_model.attention_modules()]
    for name, masks in hp.alive_heads.items():
        layers = {key: module.heads for site, _, key, module in modules if site is SITES[name]}
        if [len(mask) for mask in masks] != [*layers.values()]:
            raise ConfigError(f"alive_heads of {name} must be {len(layers)} lists of num_heads numbers")
        for key, mask in zip(layers, masks, strict=True):
            state[f"{key}.mixing.alive"] = torch.tensor(mask, dtype=torch.float32)
    return state
