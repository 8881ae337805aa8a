"""Classes of transformers, grown out of fairseq, that native models become: what each can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headscope.errors import CheckpointError
from headscope.formats.fairseq.from_native import unusual_parts
from headscope.model.native.layers import DEFAULT_LENGTH
from headscope.model.native.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Ids:
    """The special ids that a Hugging Face config wants."""

    start: int
    end: int
    pad: int
    begin: int


@dataclass(frozen=True)
class Target:
    """A class and what it demands; `prefix` replaces the name of each stack in its keys.

    `folds_scale`: √d goes into its table, and out of the last norm where the table is the output matrix too.
    """

    name: str
    prefix: Mapping[str, str]
    output: str
    norm: tuple[str, ...]
    positions: tuple[str, ...]
    embedding_norm: bool = False
    shared: str | None = None
    bias: bool = False
    one_vocabulary: bool = False
    final_norm: str = "layer_norm"
    folds_scale: bool = False

    @property
    def config(self) -> str:
        """Name of the config class."""
        return self.name.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM") + "Config"


_SIDES = {"encoder": "model.encoder", "decoder": "model.decoder"}
_ONE: dict[str, Any] = dict(prefix=_SIDES, output="lm_head.weight", shared="model.shared.weight", one_vocabulary=True)
_BART: dict[str, Any] = _ONE | dict(positions=("learned", "sinusoidal"), embedding_norm=True, bias=True)
_SINUSOIDS = ("sinusoidal",)
TARGETS = (
    Target("FSMTForConditionalGeneration", _SIDES, "model.decoder.output_projection.weight", ("post",), _SINUSOIDS),
    Target("M2M100ForConditionalGeneration", **_ONE, norm=("pre",), positions=_SINUSOIDS),
    Target("BartForConditionalGeneration", **_BART, norm=("post",)),
    Target("MBartForConditionalGeneration", **_BART, norm=("pre",)),
    Target(
        "OPTForCausalLM",
        {"decoder": "model.decoder"},
        "lm_head.weight",
        norm=("pre", "post"),
        positions=("learned", "sinusoidal", "none"),
        final_norm="final_layer_norm",
        folds_scale=True,
    ),
)


def choose_architecture(config: TransformerConfig, ids: Ids) -> Target:
    """The class that expresses a model; CheckpointError that says why none does."""
    if reasons := _never(config):
        raise CheckpointError(f"no class of transformers expresses this model: {'; '.join(reasons)}")
    sided = [target for target in TARGETS if ("encoder" in target.prefix) == (config.encoder is not None)]
    reasons_of = {target.name: _reasons(target, config, ids) for target in sided}
    for target in sided:
        if not reasons_of[target.name]:
            return target
    explained = "; ".join(f"{name} not, because {' and '.join(phrases)}" for name, phrases in reasons_of.items())
    raise CheckpointError(f"no class of transformers expresses this model: {explained}")


def _never(config: TransformerConfig) -> list[str]:
    stacks = config.stacks
    reasons = unusual_parts(config) | {
        "its output has a projection before it (d_output)": config.d_output is not None,
        "its embeddings have another width (d_embedding)": any(s.d_embedding not in (None, s.d_model) for s in stacks),
        "its layers have different numbers of heads": any(len({*s.self_heads, *s.cross_heads}) > 1 for s in stacks),
    }
    for name in ("d_model", "norm", "activation", "positions", "position_offset", "scale_embedding", "embedding_norm"):
        reasons[f"its encoder and decoder differ in {name}"] = len({getattr(s, name) for s in stacks}) > 1
    if stacks[-1].positions == "learned":
        reasons["its encoder and decoder differ in max_positions"] = len({s.max_positions for s in stacks}) > 1
    return [reason for reason, holds in reasons.items() if holds]


def _reasons(target: Target, config: TransformerConfig, ids: Ids) -> list[str]:
    decoder = config.decoder
    size = None if config.encoder is None else config.encoder.vocabulary
    final = {stack.final_norm for stack in config.stacks}
    reasons = {
        f"its norm is {decoder.norm}": decoder.norm not in target.norm,
        "it has no norm after each stack": decoder.norm == "pre" and final != {True},
        "it has a norm after a stack": decoder.norm == "post" and final != {False},
        f"embedding_norm is {decoder.embedding_norm}": decoder.embedding_norm != target.embedding_norm,
        f"its positions are {decoder.positions}": decoder.positions not in target.positions,
        "it has no layers": target.folds_scale and not decoder.layers,
        "its output has a bias": config.output_bias and not target.bias,
        f"positions begin at {decoder.position_offset} and the padding id is {ids.pad}": (
            "learned" not in target.positions and decoder.position_offset != ids.pad + 1
        ),
        "its source vocabulary is the larger one": (
            target.one_vocabulary and size is not None and size > decoder.vocabulary
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def table_ends(name: str, config: TransformerConfig) -> int | None:
    """How many positions a class has whose table cannot grow, where the model itself has no limit; else None."""
    target = next(target for target in TARGETS if target.name == name)
    unlimited = config.decoder.positions != "learned" and config.decoder.max_positions is None
    return DEFAULT_LENGTH if "learned" in target.positions and unlimited else None
