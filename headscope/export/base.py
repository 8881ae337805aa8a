"""Exports of a smaller checkpoint: a folder of its format, and files that engines are proved to run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headscope.config import declarations
from headscope.errors import CheckpointError, ConfigError, flag
from headscope.evaluation.model_inputs import InputTexts, prompts
from headscope.formats.base import FORMATS, Checkpoint, Export
from headscope.model.attention import is_half
from headscope.model.forward import max_abs_difference, outputs, with_cache
from headscope.model.interface import quiet_transformers
from headscope.registry import Registry

QUANTITY, OUTPUTS = "log-probabilities differ by", "outputs differ, as a share of the largest, by"
HALF, FULL = 5e-2, 1e-4
"""Largest difference as a share of the largest number (or of 1), in half precision and in float32.

In float32 engines sum in another order: 2e-7 to 1.4e-5 was measured on random models, 1.2e-5 on a language model of 30
trained layers, whose largest activations are thousands of times the others.
"""


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """A file for an engine, and its proof.

    `runtime` is the program that ran it, `difference` the largest difference of its outputs, `quantity` says of what,
    `limit` is the tolerance. `sizes` is what the file holds in words. `opens` and `limits` are lines of the card: what
    opens the file, and what does not.
    """

    export: str
    file: str
    runtime: str
    difference: float
    limit: float
    sizes: str
    opens: tuple[str, ...]
    quantity: str = QUANTITY
    limits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def proof(self) -> str:
        """One line: the difference, and who measured it."""
        measurement = f"{self.quantity} {self.difference:.1e} (tolerance {self.limit:.0e})"
        return f"{self.file} ({self.sizes}): {measurement}, run by {self.runtime}"


class EngineExport(declarations.EngineDeclaration, ABC):
    """One kind of file for one engine; its docstring says what it can hold, `summary` what it is for `--help`.

    `packages` are imported to write it, `install` is what pip installs for that. `quantizations` are other ways to
    store matrices. `endings` are those of its files. `allocation`: how heads must be spread over layers ("": in any
    way). All are literals, because help reads them without importing the file.
    """

    install: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    quantizations: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def check(self, checkpoint: Checkpoint) -> None:
        """ConfigError for a checkpoint that can never be written, whichever heads go."""

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        """Whether output projections may have a bias that the checkpoint's class builds without."""
        return True

    @abstractmethod
    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        """Write the file and run it on `data`; CheckpointError where it computes something else.

        `quantize` is how matrices are stored: "none" is as the checkpoint does, others are `quantizations`.
        """


ENGINES: Registry[EngineExport] = declarations.ENGINES


def engine(cls: type[EngineExport]) -> type[EngineExport]:
    """Register an engine under its `name`."""
    ENGINES.register(cls.name, cls(), where=cls.__module__)
    return cls


def engines_named(names: Iterable[str], quantize: str = "none") -> tuple[EngineExport, ...]:
    """The engines of these names; ConfigError where a package is not installed, or one has no such quantization."""
    engines = tuple(ENGINES.get(name) for name in names)
    for engine in engines:
        if missing := [name for name in engine.packages if importlib.util.find_spec(name) is None]:
            raise ConfigError(f'{engine.name} needs {", ".join(missing)}; install with pip install "{engine.install}"')
        if quantize not in ("none", *engine.quantizations):
            available = ", ".join(("none", *engine.quantizations))
            raise ConfigError(f"{flag.quantize} {quantize} is not for {engine.name}; available: {available}")
    if quantize != "none" and not engines:
        offers = [f"{name} ({', '.join(engine.quantizations)})" for name, engine in ENGINES if engine.quantizations]
        raise ConfigError(f"{flag.quantize} {quantize} is for exports that have it: {', '.join(offers)}")
    return engines


def check_difference(difference: float, limit: float, what: str, quantity: str = QUANTITY) -> float:
    """The limit; CheckpointError where an engine computes something else."""
    if not difference <= limit:
        raise CheckpointError(
            f"{what} computes something else than the model ({quantity} {difference:.1e}, tolerance {limit:.0e}); "
            "nothing was saved. Please report this with the output of `headscope show`"
        )
    return limit


def tolerance(dtype: torch.dtype, largest: float) -> float:
    """The tolerance for numbers as large as `largest`."""
    return (HALF if is_half(dtype) else FULL) * max(1.0, largest)


Step = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]
"""Of new ids [b t], a mask [b past+t] of all and a cache (None: of nothing) the logits [b t V] and the next cache."""
STEPS = 8


def greedy_difference(
    step: Step, start: Tensor, model: Any, name: str = "input_ids", *, runtime: str, steps: int = STEPS, **read: Tensor
) -> tuple[float, str]:
    """The difference between an engine's greedy `steps` through its cache and one pass of the model, and a line on it.

    They follow `start` [b t], which the model takes by `name`, and what else it is to `read`.
    """
    ids, rows, cache, new = start, list[Tensor](), None, start
    for _ in range(steps):
        logits, cache = step(new, torch.ones_like(ids), cache)
        rows.append(logits[:, -1].cpu())
        new = rows[-1].argmax(-1, keepdim=True).to(ids)
        ids = torch.cat([ids, new], dim=1)
    inputs = {key: values.to(model.device) for key, values in {**read, name: ids[:, :-1]}.items()}
    with torch.no_grad():
        expected_logits = model(**inputs, use_cache=False).logits.cpu()[:, start.shape[1] - 1 :]  # [b n V]
    same = int((expected_logits.argmax(-1) == ids[:, start.shape[1] :].cpu()).sum())
    note = f"greedy tokens through the cache: {same} of {steps * len(start)} are the same in {runtime}"
    return max_abs_difference(torch.stack(rows, dim=1), expected_logits), note


PROMPT, LONG_STEPS = 8, 32


def folder_proof(checkpoint: Checkpoint, copy: Any, data: InputTexts, *, n_padding: int) -> dict[str, Any]:
    """The `EngineFile` of a folder that transformers opens as `copy`, with `n_padding` heads of zeros.

    It is held against the checkpoint that it was made of on texts at once, and along greedy tokens through its cache.
    """
    copy = copy.to(checkpoint.device).eval()

    def step(new: Tensor, _: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            result, after = with_cache(copy, cache, input_ids=new)
        return result.logits, after

    starts = prompts(data, PROMPT)
    ids = torch.tensor([start[: min(map(len, starts))] for start in starts], device=checkpoint.device)
    steps = min(LONG_STEPS, (checkpoint.limit or LONG_STEPS + PROMPT) - ids.shape[1])
    difference, note = greedy_difference(step, ids, checkpoint.model, runtime="transformers", steps=steps)
    for batch in data.feeds:
        expected_logits = outputs(checkpoint.model, batch)
        difference = max(difference, max_abs_difference(outputs(copy, batch), expected_logits))
    return {
        "runtime": f"transformers {importlib.metadata.version('transformers')}",
        "difference": difference,
        "quantity": OUTPUTS,
        "limit": check_difference(difference, tolerance(checkpoint.dtype, 1.0), "transformers", OUTPUTS),
        "notes": (note, *([f"filled up with {n_padding} heads of zeros"] if n_padding else [])),
    }


def choose_export(name: str | None, checkpoint: Checkpoint, *, pad: bool = False) -> Export:
    """The export of that name, or the default; ConfigError where the checkpoint's format has none such.

    With `pad` the one that fills layers up with heads of zeros.
    """
    exports = {export.name: export for export in FORMATS.get(checkpoint.format).exports}
    padding = [other for other, export in exports.items() if export.padded is not None]
    if pad and (not padding or name not in (None, *padding)):
        taker = f"{flag.export} {' or '.join(padding)}" if padding else "Hugging Face checkpoints"
        raise ConfigError(f"{flag.pad} is for {taker}; leave out the one or the other")
    if name is not None and name not in exports:
        available = ", ".join([*exports, *ENGINES.names()])
        hint = "; it keeps its own format, `headscope convert` makes others of it" if checkpoint.is_native else ""
        raise ConfigError(f"{flag.export} {name} does not fit {checkpoint.format} checkpoints; take {available}{hint}")
    export = exports[name or next(iter(padding if pad else exports))]
    if pad and export.padded is not None:
        return replace(export, build=export.padded, whole_groups=False, refine=None)
    return export


def split_export(names: Iterable[str]) -> tuple[str | None, tuple[str, ...]]:
    """The kind of folder (None: the default) and the engines of `--export`, each once."""
    names_once = tuple(dict.fromkeys(names))
    kinds = [name for name in names_once if name not in ENGINES.names()]
    if len(kinds) > 1:
        engines = " and ".join(ENGINES.names())
        raise ConfigError(f"{flag.export} {','.join(names_once)}: one kind of folder at a time, and {engines} besides")
    return (kinds[0] if kinds else None), tuple(name for name in names_once if name not in kinds)


def export_for(names: Iterable[str], checkpoint: Checkpoint, *, merges: bool = False, pad: bool = False) -> Export:
    """The kind of folder, as far as all engines can follow it; ConfigError where one never can.

    The default for merged key/value heads is a plain class.
    """
    kind, engines = split_export(names)
    if kind is None and merges and any(export.name == "native" for export in FORMATS.get(checkpoint.format).exports):
        kind = "native"
    export, engines_chosen = choose_export(kind, checkpoint, pad=pad), [ENGINES.get(name) for name in engines]
    for engine in engines_chosen:
        engine.check(checkpoint)
    return replace(
        export, adds_bias=export.adds_bias and all(engine.adds_bias(checkpoint) for engine in engines_chosen)
    )


PARTS = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
FEED_FORWARD = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
"""The projections of a layer by the names that llama.cpp gives them."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: kept query heads and key/value groups, and the module they come from."""

    module: Any
    heads: int
    groups: int
    width: int

    @property
    def biases(self) -> frozenset[str]:
        """The parts that have a bias; what stands in for a projection of a layer without heads keeps none."""
        blocks = ((self.module.self_attn, PARTS), (self.module.mlp, FEED_FORWARD))
        owners = {part: getattr(block, name) for block, parts in blocks for part, name in parts.items()}
        return frozenset(part for part, own in owners.items() if isinstance(getattr(own, "bias", None), nn.Parameter))

    @property
    def padded(self) -> DecoderLayer:
        """The same layer with one head of zeros where it has none: a place for its bias."""
        return self if self.heads else DecoderLayer(self.module, 1, 1, self.width)

    def attention(self, part: str) -> tuple[Tensor, Tensor | None]:
        """Weight [out in] and bias of a part; zeros for the one head of a layer that has none."""
        owner = getattr(self.module.self_attn, PARTS[part])
        if isinstance(owner, nn.Linear):
            return owner.weight.detach(), None if owner.bias is None else owner.bias.detach()
        like = self.module.input_layernorm.weight
        shape = (len(like), self.width) if part == "attn_output" else (self.width, len(like))
        bias = owner.bias.detach() if isinstance(getattr(owner, "bias", None), nn.Parameter) else None
        return like.new_zeros(shape).detach(), bias

    def pad_heads(self, part: str, *, groups: int, shared: int) -> Tensor:
        """The weight [out in] of a part, padded with zeros to a number of groups of `shared` query heads each."""
        weight, _ = self.attention(part)
        rows = weight.T.contiguous() if part == "attn_output" else weight
        queries = part in ("attn_q", "attn_output")
        own = rows.view(max(self.groups, 1), -1, self.width, rows.shape[1])  # [g h/g k d]
        whole = own.new_zeros(groups, shared if queries else 1, *own.shape[2:])
        whole[: own.shape[0], : own.shape[1]] = own
        flat = whole.flatten(0, 2)  # [h·k d] or [g·k d]
        return flat.T.contiguous() if part == "attn_output" else flat


def padded_model(cls: Any, config: Any, like: Any, weights: Mapping[str, Tensor]) -> Any:
    """A model of a class of transformers with these weights, and all else as a model that it is `like`."""
    with quiet_transformers():
        model = cls._from_config(config, dtype=like.dtype)
    model.load_state_dict(weights)
    model.generation_config = like.generation_config
    return model.to(like.device).eval()


def padded_attention(layers: Sequence[DecoderLayer], groups: Sequence[int], shared: Sequence[int]) -> dict[str, Tensor]:
    """The projections of all layers by name, padded to a number of groups with a number of query heads (0: none)."""
    return {
        f"model.layers.{number}.self_attn.{name}.weight": layer.pad_heads(part, groups=count, shared=heads)
        for number, (layer, count, heads) in enumerate(zip(layers, groups, shared, strict=True))
        for part, name in PARTS.items()
        if count
    }


def decoder_layer(module: Any) -> DecoderLayer:
    """A layer with the heads that its weights have."""
    attention, width = module.self_attn, int(module.self_attn.head_dim)
    if not isinstance(attention.q_proj, nn.Linear):  # a stand-in of a layer without heads
        return DecoderLayer(module, 0, 0, width)
    heads, groups = (len(part.weight) // width for part in (attention.q_proj, attention.k_proj))
    return DecoderLayer(module, heads, groups, width)
