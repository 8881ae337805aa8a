"""The plain Transformer; wide heads, as wide as the model; narrow heads, which read a slice of it (Bloem 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from headscope.config import NoOptions, option
from headscope.training.variant import Variant, variant

if TYPE_CHECKING:
    from headscope.model.native.transformer_config import StackConfig, TransformerConfig


@variant
class Baseline(Variant):
    """The plain Transformer of the options, trained with cross entropy alone."""

    name = "baseline"
    summary = "The plain Transformer."


@dataclass(frozen=True)
class WideOptions(NoOptions):
    """Options of `wide`; `narrow` has the same options with other defaults."""

    d_head: int | None = option(
        None, "Width of a head's queries, keys and values; default: the model's.", minimum=1, maximum=2**18, common=True
    )
    head_input: Literal["full", "slice"] = option(
        "full", "full: every head reads the whole input; slice: its own part of it.", common=True
    )
    shared_qkv: bool = option(
        False, "With slice: one small matrix each for queries, keys and values of all heads.", needs="head_input=slice"
    )
    qkv_bias: bool = option(True, "Biases of queries, keys and values.")


@variant
class Wide(Variant):
    """Every head reads the whole input and is as wide as the model: 4·h·d² weights and d biases of the output."""

    name = "wide"
    summary = "Heads as wide as the model."
    Options = WideOptions
    decides = ("how wide heads are",)

    def shape(self, config: TransformerConfig) -> TransformerConfig:
        return config.with_stacks(partial(reshape_stack, options=self.options))


def reshape_stack(stack: StackConfig, options: WideOptions) -> StackConfig:
    """The stack with heads by the options; the default width is that of a head's slice, or the model's."""
    is_sliced = options.head_input == "slice"
    width = stack.d_model // max(stack.most_heads, 1) if is_sliced else stack.d_model
    return replace(
        stack,
        d_head=options.d_head or width,
        d_value=None,
        head_input=options.head_input,
        slices=None,
        shared_qkv=options.shared_qkv,
        qkv_bias=options.qkv_bias,
    )


@dataclass(frozen=True)
class NarrowOptions(WideOptions):
    """Options of `narrow`."""

    d_head: int | None = option(
        None, "Width of a head's queries, keys and values; default: its slice's.", minimum=1, maximum=2**18, common=True
    )
    head_input: Literal["full", "slice"] = option(
        "slice", "slice: every head reads its own part of the input; full: all of it.", common=True
    )


@variant
class Narrow(Variant):
    """Every head reads its own of h slices of the input: 3·d²/h + d² weights and d biases of the output.

    With `shared_qkv` all heads share the same small matrices: 3·(d/h)² + d² weights and d biases of the output.
    """

    name = "narrow"
    summary = "Heads that read a slice of the input each."
    Options = NarrowOptions
    decides = Wide.decides
    shape = Wide.shape
