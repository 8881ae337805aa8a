"""Exports of a smaller checkpoint: a folder of its format, and files for inference engines, which are run to verify."""

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
from headscope.evaluation.model_inputs import InputTexts, cut_prompts
from headscope.formats.base import FORMATS, Checkpoint, Export
from headscope.model.attention import is_half
from headscope.model.forward import max_abs_difference, outputs, with_cache
from headscope.model.interface import quiet_transformers
from headscope.registry import Registry

QUANTITY, OUTPUTS = "log-probabilities differ by", "outputs differ, as a share of the largest, by"
HALF_TOLERANCE, FLOAT32_TOLERANCE = 5e-2, 1e-4
"""Largest difference as a share of the largest number (or of 1), in half precision and in float32.

Engines sum in another order. In float32 random models differed by 2e-7 to 1.4e-5, and a trained language model of 30
layers, whose largest activations are thousands of times the others, by 1.2e-5.
"""


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """A file for an engine, and how it was verified.

    `runtime` is the program that ran it, `difference` the largest difference of its outputs, in the words of
    `quantity`, `limit` the tolerance. `sizes` describes the model in the file. `opens` and `limits` are lines of the
    model card: what opens the file, and what it cannot do.
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
        """A line with the difference and the program that ran the file."""
        measurement = f"{self.quantity} {self.difference:.1e} (tolerance {self.limit:.0e})"
        return f"{self.file} ({self.sizes}): {measurement}, run by {self.runtime}"


class EngineExport(declarations.EngineDeclaration, ABC):
    """One kind of file for one engine; its docstring says which models it can hold, `summary` is for `--help`.

    `packages` are imported to write it; `install` is the argument of `pip install` that gives them. `quantizations` are
    other ways to store matrices. `endings` are suffixes of its files. `allocation` is how heads must be spread over
    layers ("": in any way). All are literals, because help reads them without importing the file.
    """

    install: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    quantizations: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError for a checkpoint that cannot be written, whichever heads are removed."""

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        """Whether output projections may get a bias that the checkpoint's class does not have."""
        return True

    @abstractmethod
    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        """Write the file and run it on `data`; CheckpointError where it computes something else.

        `quantize` is how matrices are stored: "none", as in the checkpoint, or one of `quantizations`.
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
    """The limit, if the difference is within it; CheckpointError otherwise."""
    if not difference <= limit:
        raise CheckpointError(
            f"{what} computes something else than the model ({quantity} {difference:.1e}, tolerance {limit:.0e}); "
            "nothing was saved. Please report this with the output of `headscope show`"
        )
    return limit


def tolerance(dtype: torch.dtype, largest: float) -> float:
    """The tolerance for numbers as large as `largest`."""
    return (HALF_TOLERANCE if is_half(dtype) else FLOAT32_TOLERANCE) * max(1.0, largest)


Step = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]
"""Logits [b t V] and the next cache, from new ids [b t], a mask [b past+t] and a cache (None: empty)."""
STEPS = 8


def greedy_difference(
    step: Step,
    start: Tensor,
    model: Any,
    name: str = "input_ids",
    *,
    runtime: str,
    steps: int = STEPS,
    **arguments: Tensor,
) -> tuple[float, str]:
    """The difference between an engine's greedy `steps` through its cache and one pass of the model, and a note.

    The steps follow `start` [b t], which is the argument `name` of the model; it gets the other `arguments` too.
    """
    ids, rows, cache, new = start, list[Tensor](), None, start
    for _ in range(steps):
        logits, cache = step(new, torch.ones_like(ids), cache)
        rows.append(logits[:, -1].cpu())
        new = rows[-1].argmax(-1, keepdim=True).to(ids)
        ids = torch.cat([ids, new], dim=1)
    inputs = {key: values.to(model.device) for key, values in {**arguments, name: ids[:, :-1]}.items()}
    with torch.no_grad():
        expected_logits = model(**inputs, use_cache=False).logits.cpu()[:, start.shape[1] - 1 :]  # [b n V]
    same = int((expected_logits.argmax(-1) == ids[:, start.shape[1] :].cpu()).sum())
    note = f"greedy tokens through the cache: {same} of {steps * len(start)} are the same in {runtime}"
    return max_abs_difference(torch.stack(rows, dim=1), expected_logits), note


PROMPT, LONG_STEPS = 8, 32


def verify_folder(checkpoint: Checkpoint, copy: Any, data: InputTexts, *, n_padding: int) -> dict[str, Any]:
    """Fields of the `EngineFile` of a folder that transformers opens as `copy`, with `n_padding` heads of zeros.

    The copy is compared with the checkpoint on whole texts, and along greedy tokens through its cache; CheckpointError
    where it computes something else.
    """
    copy = copy.to(checkpoint.device).eval()

    def step(new: Tensor, _: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            result, next_cache = with_cache(copy, cache, input_ids=new)
        return result.logits, next_cache

    starts = cut_prompts(data, PROMPT)
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
    """The export of that name, or the default; with `pad` the one that fills layers up with heads of zeros.

    ConfigError where the checkpoint's format does not have it.
    """
    exports = {export.name: export for export in FORMATS.get(checkpoint.format).exports}
    padding = [other for other, export in exports.items() if export.padded is not None]
    if pad and (not padding or name not in (None, *padding)):
        scope = f"{flag.export} {' or '.join(padding)}" if padding else "Hugging Face checkpoints"
        raise ConfigError(f"{flag.pad} is for {scope}; leave out one of them")
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
    """The kind of folder that `--export` names, restricted to what all its engines can hold.

    The default for merged key/value heads is a plain class. ConfigError where an engine cannot hold the checkpoint.
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
"""Projections of a layer: llama.cpp's name of the part, and the attribute in transformers."""


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer of transformers, with its number of query heads, of key/value groups, and their width."""

    module: Any
    heads: int
    groups: int
    width: int

    @property
    def biases(self) -> frozenset[str]:
        """The parts that have a bias; of a layer without heads, only the output projection's may be left."""
        blocks = ((self.module.self_attn, PARTS), (self.module.mlp, FEED_FORWARD))
        owners = {part: getattr(block, name) for block, parts in blocks for part, name in parts.items()}
        return frozenset(
            part for part, owner in owners.items() if isinstance(getattr(owner, "bias", None), nn.Parameter)
        )

    @property
    def padded(self) -> DecoderLayer:
        """The layer, with one head of zeros if it has none, so that there is a place for its bias."""
        return self if self.heads else DecoderLayer(self.module, 1, 1, self.width)

    def attention(self, part: str) -> tuple[Tensor, Tensor | None]:
        """Weight [out in] and bias of a part; zeros for the one head of a layer that has none."""
        owner = getattr(self.module.self_attn, PARTS[part])
        if isinstance(owner, nn.Linear):
            return owner.weight.detach(), None if owner.bias is None else owner.bias.detach()
        norm = self.module.input_layernorm.weight  # [d]
        shape = (len(norm), self.width) if part == "attn_output" else (self.width, len(norm))
        bias = owner.bias.detach() if isinstance(getattr(owner, "bias", None), nn.Parameter) else None
        return norm.new_zeros(shape).detach(), bias

    def pad_heads(self, part: str, *, groups: int, shared: int) -> Tensor:
        """The weight [out in] of a part, padded with zeros to a number of groups of `shared` query heads each."""
        weight, _ = self.attention(part)
        rows = weight.T.contiguous() if part == "attn_output" else weight
        queries = part in ("attn_q", "attn_output")
        heads = rows.view(max(self.groups, 1), -1, self.width, rows.shape[1])  # [g h/g k d]
        padded = heads.new_zeros(groups, shared if queries else 1, *heads.shape[2:])
        padded[: heads.shape[0], : heads.shape[1]] = heads
        flat = padded.flatten(0, 2)  # [h·k d] or [g·k d]
        return flat.T.contiguous() if part == "attn_output" else flat


def padded_model(cls: Any, config: Any, like: Any, weights: Mapping[str, Tensor]) -> Any:
    """A model of a class of transformers with these weights, and with type, device, generation settings of `like`."""
    with quiet_transformers():
        model = cls._from_config(config, dtype=like.dtype)
    model.load_state_dict(weights)
    model.generation_config = like.generation_config
    return model.to(like.device).eval()


def padded_attention(layers: Sequence[DecoderLayer], groups: Sequence[int], shared: Sequence[int]) -> dict[str, Tensor]:
    """The projections of all layers by name; layer i is padded to `groups[i]` groups (0: none) of `shared[i]` heads."""
    return {
        f"model.layers.{number}.self_attn.{name}.weight": layer.pad_heads(part, groups=count, shared=heads)
        for number, (layer, count, heads) in enumerate(zip(layers, groups, shared, strict=True))
        for part, name in PARTS.items()
        if count
    }


def decoder_layer(module: Any) -> DecoderLayer:
    """The layer of a module, its heads counted from its weights."""
    attention, width = module.self_attn, int(module.self_attn.head_dim)
    if not isinstance(attention.q_proj, nn.Linear):  # the module of a layer without heads has no projections
        return DecoderLayer(module, 0, 0, width)
    heads, groups = (len(part.weight) // width for part in (attention.q_proj, attention.k_proj))
    return DecoderLayer(module, heads, groups, width)
