"""Model inputs and outputs: running a batch, whole or in parts, comparing outputs, and refusing non-finite ones.

A pass with non-finite outputs is run a second time, to name the layer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.data.encoded import Batch
from headscope.distributed import upload
from headscope.errors import CheckpointError, HeadscopeError, NumericalError, flag
from headscope.heads import HeadId
from headscope.model.discovery import base_of
from headscope.model.interface import takes, through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.nonfinite import DEFERRED_CHECKS, WIDER, first_non_finite, is_finite
from headscope.model.taps import frozen_parameters, masked

SAME = 1e-3
"""The largest relative difference of logits between a text read in two parts and as a whole, if caching is exact."""


def cached_difference(intact: Any, smaller: nn.Module, heads: Iterable[HeadId], batch: ModelInputs) -> float | None:
    """The difference between a smaller model with a cache and the whole model with `heads` masked, on one sentence.

    Returns None for models without a cache, and for architectures whose cache does not give the same results.
    """
    single = first_sentence(batch)
    if not isinstance(smaller, Transformer) and not (generates(intact.model) and _continues(intact.model, single)):
        return None
    return max_abs_difference(outputs_in_parts(smaller, single), reference(intact, heads, single))


def outputs_in_parts(model: nn.Module, single: ModelInputs) -> Tensor:
    """Outputs [n V] of one sentence that is read in parts, with a cache of earlier positions."""
    if not isinstance(model, Transformer):
        with through_attend(model):
            return _in_halves(model, single)
    target = single.arguments["target"]
    with torch.no_grad():
        state = model.begin(single.arguments["source"] if model.encoder is not None else target[:, :1])
        return torch.cat([model.step(target[:, step], state) for step in range(target.shape[1])])


def generates(model: Any) -> bool:
    """Whether a transformers model generates text, for which it keeps a cache of keys and values."""
    return callable(getattr(model, "can_generate", None)) and bool(model.can_generate())


def first_sentence(batch: ModelInputs) -> ModelInputs:
    """The first sentence of a batch without its padding, which is on the right."""
    first = {name: values[:1] for name, values in batch.arguments.items()}
    if batch.real is None:
        return ModelInputs(first, None)
    arguments = {}
    for name, values in first.items():
        mask = name if "mask" in name else {"input_ids": "attention_mask"}.get(name, f"{name}_mask")
        mask = "decoder_attention_mask" if name == "decoder_input_ids" else mask
        arguments[name] = values[:, : int(first[mask].sum())] if mask in first else values
    return ModelInputs(arguments, batch.real[:1, : int(batch.real[:1].sum())])


def _continues(model: nn.Module, single: ModelInputs) -> bool:
    """Whether the architecture gives the same outputs for a text in two parts as for the whole text."""
    ids = [values for name, values in single.arguments.items() if name.endswith("input_ids")]
    if ids[-1].shape[1] < 2:
        return False
    with through_attend(model):
        try:
            parts = _in_halves(model, single)
        except Exception:  # it returns no cache (RecurrentGemma), or then takes only one token at a time
            return False
        return max_abs_difference(parts, outputs(model, single)) <= SAME


def _in_halves(model: Any, single: ModelInputs) -> Tensor:
    """Outputs [n V] of a transformers model that reads the first half of a text, then the rest."""
    source, more = dict(single.arguments), dict[str, Any]()
    name = "decoder_input_ids" if "decoder_input_ids" in source else "input_ids"
    ids = source.pop(name)
    source.pop("decoder_attention_mask", None)
    with torch.no_grad():
        if name == "decoder_input_ids":
            mask = {name: source[name] for name in ("attention_mask",) if name in source}
            more = {"encoder_outputs": model.get_encoder()(**source), **mask}
        half = max(ids.shape[1] // 2, 1)
        start, cache = with_cache(model, **{name: ids[:, :half]}, **more)
        if half == ids.shape[1]:
            return start.logits[0]
        second_half, _ = with_cache(model, cache, **{name: ids[:, half:]}, **more)
    return torch.cat([start.logits, second_half.logits], dim=1)[0]


CELLS = 2**23  # numbers that are compared at a time


@dataclass(frozen=True)
class ModelInputs:
    """The keyword arguments of a model for one batch; `real` [b t] marks the outputs of real tokens (None: all)."""

    arguments: dict[str, Tensor]
    real: Tensor | None

    def to(self, device: torch.device) -> ModelInputs:
        """The same on another device."""
        arguments = {name: upload(values, device) for name, values in self.arguments.items()}
        return ModelInputs(arguments, None if self.real is None else upload(self.real, device))

    def rows(self, order: Tensor) -> ModelInputs:
        """The sentences at the indices `order`, which may repeat."""
        arguments = {name: values.index_select(0, order.to(values.device)) for name, values in self.arguments.items()}
        return ModelInputs(
            arguments, None if self.real is None else self.real.index_select(0, order.to(self.real.device))
        )


def outputs(model: nn.Module, batch: ModelInputs) -> Tensor:
    """Run a model and return its logits, or final states without a head: [n V] at real positions, if there are any."""
    if type(model).__name__.endswith("ForMultipleChoice"):  # it takes several texts for one answer
        model = base_of(model)
    # transformers' cache has as many layers as the encoder of the config, also where a decoder alone has more (BART)
    options = {"use_cache": False} if takes(model, "use_cache") else {}
    with torch.no_grad():
        result: Any = model(**batch.arguments, **options)
    if not isinstance(result, Tensor):
        logits = getattr(result, "logits", None)
        result = result[0] if logits is None else logits
    return of_tokens(result, batch.real)


def of_tokens(result: Tensor, real: Tensor | None) -> Tensor:
    """Outputs [n V] at real positions; unchanged if they do not have the shape [b t V]."""
    if real is not None and result.ndim == 3 and result.shape[:2] == real.shape:
        return result[real.to(result.device)]
    return result


def cache_argument(model: nn.Module) -> str | None:
    """The name of a transformers model's argument for the cache of keys and values. Returns None if it has none.

    "cache" from transformers 5.24 on; "past_key_values" before, and in models with code of their own.
    """
    return next((name for name in ("cache", "past_key_values") if takes(model, name)), None)


def with_cache(model: nn.Module, cache: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """Outputs of a transformers model that continues from a cache (None: an empty one), and the new cache, if any."""
    cache_arguments = {} if cache is None else {cache_argument(model) or "past_key_values": cache}
    result: Any = model(**arguments, **cache_arguments, use_cache=True)
    return result, result.cache if hasattr(result, "cache") else getattr(result, "past_key_values", None)


def max_abs_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number (or 1, if that is larger)."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    differences, sizes = [], []
    for one, other in zip(actual.flatten().split(CELLS), expected.flatten().split(CELLS), strict=True):
        same = one == other  # -inf too, where a model masks what it must not say; NaN equals nothing
        differences.append((one - other).abs().masked_fill(same, 0.0).max())
        sizes.append(other.abs().masked_fill(other.isinf(), 0.0).max())
    share = float(torch.stack(differences).max() / torch.stack(sizes).max().clamp(min=1.0))
    return float("inf") if math.isnan(share) else share


@contextmanager
def double_precision(model: nn.Module) -> Iterator[None]:
    """Within the block a model is in double precision; its weights are restored exactly after it."""
    weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    types = [tensor.dtype for tensor in weights]
    try:
        for tensor in weights:
            _cast(tensor, torch.float64)
        yield
    finally:
        for tensor, dtype in zip(weights, types, strict=True):
            _cast(tensor, dtype)


LARGE = 1 << 19
"""Entries of a weight whose memory is returned at once when its type changes."""


def _cast(weight: Tensor, dtype: torch.dtype) -> None:
    """Change the type of a weight; freed weights would lie between the new ones, and a third of memory be lost."""
    weight.data = weight.data.to(dtype)
    if weight.numel() >= LARGE:
        return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps a quarter of it between tensors that are in use."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def rounds(model: nn.Module, batch: ModelInputs) -> bool:
    """Whether a model in double precision still computes parts in single precision (mixtures, state spaces, norms)."""
    with_gradients = frozen_parameters(model, trainable=True)
    with through_attend(model), with_gradients, torch.enable_grad(), suppress(_CastFound), _Casts():
        model(**batch.arguments)
        return False
    return True


class _CastFound(BaseException):
    """Ends the pass of a model whose code rounds; no architecture's own code may catch it."""


class _Casts(TorchFunctionMode):
    """Raises `_CastFound` where a function makes single precision of double precision that depends on the weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            for argument in args:
                if isinstance(argument, Tensor) and argument.dtype == torch.float64 and argument.requires_grad:
                    raise _CastFound
        return result


# Non-finite outputs.


C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


def finite(method: Callable[Concatenate[C, Batch, P], R]) -> Callable[Concatenate[C, Batch, P], R]:
    """Decorator for methods of a `Checkpoint` that run the model: NumericalError if the result is not finite.

    Values at padding are ignored, and logits may be -inf for tokens that a model must not predict.
    """

    @wraps(method)
    def check_result(self: C, batch: Batch, /, *args: P.args, **kwargs: P.kwargs) -> R:
        run = partial(method, self, batch, *args, **kwargs)

        def check(result: R) -> R:
            values = _output(result)
            if not (values is None or is_finite(values) or is_finite(batch.at_tokens(values), masked=True)):
                refuse_overflow(self, run, batch)
            return result

        checks = DEFERRED_CHECKS.get()
        if checks is None:
            return check(run())
        result = run()
        if (values := _output(result)) is not None:
            checks.add(values, lambda: check(run()), masked=True)
        return result

    return check_result


def _output(result: Any) -> Tensor | None:
    values = result if isinstance(result, Tensor) else getattr(result, "last_hidden_state", None)
    return values if isinstance(values, Tensor) else None


def refuse_overflow(checkpoint: Any, run: Callable[[], object], batch: Batch | None = None) -> NoReturn:
    """Repeat a failed pass `run`, and raise a NumericalError that names the layer with the first non-finite output."""
    select_tokens = (lambda values: values) if batch is None else batch.at_tokens
    with through_attend(checkpoint.model):
        location = first_non_finite(checkpoint.model, run, select_tokens=select_tokens)
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    half = WIDER.get(checkpoint.dtype)
    hint = f"its weights are out of proportion for {dtype}" + (f"; take {flag.dtype} {half}" if half else "")
    raise NumericalError(f"{checkpoint.path}: NaN or infinite numbers arise at {location or 'the output'}; {hint}")


@contextmanager
def running_narrowed(model_type: str) -> Iterator[None]:
    """Within the block errors of a model's code become a CheckpointError: it does not run with fewer heads."""
    try:
        yield
    except HeadscopeError:
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:160] or type(error).__name__
        raise CheckpointError(
            f"heads of model type {model_type!r} cannot be removed: its code does not run with fewer ({detail}); "
            f"{flag.export} masked may do"
        ) from error


def reference(checkpoint: Any, heads: Iterable[HeadId], batch: ModelInputs) -> Tensor:
    """Outputs of the whole model with `heads` masked; NumericalError if they are not finite."""
    with masked(checkpoint.model, heads):
        logits = outputs(checkpoint.model, batch)
        if not is_finite(logits, masked=True):
            refuse_overflow(checkpoint, lambda: outputs(checkpoint.model, batch))
        return logits


Pool: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From final states [b t d] and which positions are real [b t] to one vector each [b d]."""


def mean_pooled(states: Tensor, real: Tensor) -> Tensor:
    """Mean of states [b t d] over real positions [b t]: [b d]."""
    weights = real.to(states.dtype)
    return (weights[:, None] @ states)[:, 0] / weights.sum(dim=-1, keepdim=True)
