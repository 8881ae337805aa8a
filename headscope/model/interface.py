"""The attention interface of models: making transformers models compute with `attend`, hooks, and facts of configs.

Native models call `attend` themselves. Those of transformers call it within `through_attend`, by the implementation of
`headscope.model.transformers_attention`, which is imported with the first of them.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from headscope.errors import CheckpointError
from headscope.model.attention import IMPLEMENTATION, holding

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D


def is_pretrained(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether a model is one of transformers."""
    return _is(model, "transformers.modeling_utils", "PreTrainedModel")


def is_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer: torch's, or transformers' Conv1D, whose weight is transposed."""
    return isinstance(module, nn.Linear) or _is(module, "transformers.pytorch_utils", "Conv1D")


def _is(instance: object, module: str, name: str) -> bool:
    imported_module = sys.modules.get(module)
    return imported_module is not None and isinstance(instance, getattr(imported_module, name))


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the forward function of a model has an argument of this name."""
    return argument in inspect.signature(type(model).forward).parameters


MAX_NESTED = 3


def tensors_in(values: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in inputs or outputs of a module: in tuples, lists and mappings, down to three levels."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list, Mapping)) and depth < MAX_NESTED:
        for entry in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(entry, depth + 1)


@contextmanager
def watch_modules(
    modules: Mapping[Any, nn.Module] | Iterable[nn.Module], see: Callable[[Any, Any, Any], Any]
) -> Iterator[None]:
    """Within the block `see(key, inputs, output)` is called after every module runs; the key may be the module itself.

    A result other than None replaces the output.
    """
    module_pairs = modules.items() if isinstance(modules, Mapping) else [(module, module) for module in modules]
    with ExitStack() as stack:
        for key, module in module_pairs:
            stack.enter_context(module.register_forward_hook(lambda _, *passed, key=key: see(key, *passed)))
        yield


NOT_TEXT = re.compile(r"vision|visual|image|audio|speech")
POSITIONS = re.compile(r"(?!.*relative).*position|wpe$")


def position_limit(model: nn.Module) -> int | None:
    """The number of positions in the model's smallest table of positions.

    Returns None if there is no such table: positions are relative, rotary, or computed for any number of tokens.
    """
    limits: list[int] = []
    for path, module in model.named_modules():
        if NOT_TEXT.search(path):
            continue
        tables = [
            part
            for name, part in module.named_children()
            if POSITIONS.match(name)
            and "Embedding" in type(part).__name__
            and getattr(getattr(part, "weight", None), "ndim", 0) == 2
            and not hasattr(part, "make_weight")  # whose rows grow
        ]
        for table in tables:
            padding = getattr(table, "padding_idx", None)  # RoBERTa and similar models count positions from after it
            first = getattr(table, "offset", 0 if padding is None else padding + 1)
            limits.append(len(cast(Tensor, table.weight)) - first)
        buffers = dict(module.named_buffers(recurse=False)) | vars(module)  # CTRL's table is no buffer
        limits += [len(rows) for name in ("embed_positions", "pos_encoding") if (rows := buffers.get(name)) is not None]
        limits += [buffers["position_ids"].shape[-1]] if tables and "position_ids" in buffers else []
    return min(limits, default=None)


_INSIDE: ContextVar[Mapping[int, str]] = ContextVar("headscope_implementations", default=MappingProxyType({}))


@contextmanager
def through_attend(model: nn.Module, *, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Within the block a transformers model computes attention with `attend`; its implementation is restored after.

    A native model calls `attend` anyway and is not changed. A nested block does not list the model's modules again,
    which would take noticeable time for a small batch.
    """
    if not is_pretrained(model):
        yield
        return
    import headscope.model.transformers_attention  # noqa: F401  # registers IMPLEMENTATION

    inside = _INSIDE.get()
    if inside.get(id(model)) == implementation == model.config._attn_implementation:
        yield
        return
    before = _implementations(model)
    try:
        if any(name != implementation for _, name in before):
            model.set_attn_implementation(implementation)
        with holding(_INSIDE, {**inside, id(model): implementation}):
            yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _implementations(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Every config object in the model, at any depth, with its attention implementation."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [part.config for part in model.modules() if is_pretrained(part)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [(config, config._attn_implementation) for config in configs.values()]


def why_no_call(config: Any, kind: str) -> str:
    """Why a model made no attention call: its `layer_types` have none, or its code bypasses the interface."""
    kinds = list(dict.fromkeys(getattr(getattr(config, "text_config", config), "layer_types", None) or ()))
    if kinds and not any("attention" in name and name != "linear_attention" for name in map(str, kinds)):
        return (
            f"model type {kind!r} has no layer of softmax attention here: all its layers are {' or '.join(kinds)} "
            "(layer_types in its config), so there are no heads to see or gate"
        )
    return (
        f"model type {kind!r} computes attention, if any, in its own code and never calls the attention "
        "interface of transformers 5; headscope cannot see or gate its heads"
    )


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Within the block transformers and its libraries log nothing, such as warnings about the implementation.

    Handlers are changed instead of levels, because a changed level clears the caches of all loggers of the process.
    """
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "accelerate", "bitsandbytes")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block transformers logs nothing and shows no progress bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with suppress_warnings():
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


_ABSENT = object()


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block the modules run the given forward functions."""

    def restore(module: nn.Module, before: object) -> None:
        if before is _ABSENT:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before

    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(restore, module, module.__dict__.get("forward", _ABSENT))
            module.__dict__["forward"] = forward
        yield


def text_config(config: Any, *, target: bool = False) -> Any:
    """The part of a config with the vocabulary of a text: all of it, or one side of a wrapper (BERT2BERT).

    CheckpointError if there is no vocabulary.
    """
    side = getattr(config, "decoder" if target else "encoder", None)
    for part in (side, config, getattr(config, "text_config", None)):
        if getattr(part, "vocab_size", None):
            return part
    raise CheckpointError(f"model type {config.model_type!r} has no vocabulary; text models are supported")


def vocabulary_size(config: Any, *, target: bool = False) -> int:
    """The number of embeddings of a side; Marian and FSMT may have different numbers on both."""
    text = text_config(config, target=target)
    names = ("decoder_vocab_size", "tgt_vocab_size") if target else ("src_vocab_size",)
    sizes = [getattr(text, name, None) for name in (*names, "vocab_size")]
    return next(int(size) for size in sizes if size)


# Whisper-like models: a fixed number of frames of sound, which convolutions halve to positions of the encoder.


def reads_sound(model: nn.Module) -> bool:
    """Whether an encoder reads features of sound [b bins frames] of one fixed length, and a decoder writes text."""
    config: Any = getattr(model, "config", None)
    sizes = all(isinstance(getattr(config, name, None), int) for name in ("num_mel_bins", "max_source_positions"))
    return sizes and getattr(model, "main_input_name", "") == "input_features" and bool(config.is_encoder_decoder)


def features_shape(config: Any) -> tuple[int, int, int]:
    """Shape [1 bins frames] of the features of one recording: two frames for each position of the encoder."""
    return 1, config.num_mel_bins, 2 * config.max_source_positions
