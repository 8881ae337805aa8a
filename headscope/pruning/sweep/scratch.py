"""The control of a sweep: what is left after pruning, trained from scratch (Voita et al. 2019, table 2).

A native Transformer with as many heads in every layer as the cell has kept, fresh weights and the checkpoint's own
vocabularies is trained by `headscope.training` as the recipe says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import torch

from headscope.config import plain_value
from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import read_record
from headscope.files.serialize import read_toml
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import HeadId, all_heads
from headscope.model.native.folding import unmixed
from headscope.model.native.shrink import shrink_transformer
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import TransformerConfig
from headscope.model.removal_plan import plan_removal
from headscope.pruning.sweep.bench import RUNS, Bench, PrunedModel
from headscope.pruning.sweep.config import Cell, SweepConfig
from headscope.pruning.sweep.files import read_cell
from headscope.registry import unknown
from headscope.training.config import TrainConfig, preset
from headscope.training.initial import INITIAL

NOT_THE_RECIPES = {
    *("out", "preset", "source", "target", "max_sentences", "tokenizer", "init", "dicts", "bpe", "seed", "device"),
    *("kind", "threads", "tensorboard"),
}
FREE = NOT_THE_RECIPES | {"valid_source", "valid_target"}  # files, which may move
LEFT = ("averaged", "best", "last")  # of a training run, the one to measure first


def trained_from_scratch(bench: Bench, cell: Cell) -> PrunedModel:
    """Train the control of a cell that is finished; goes on where a killed process had got to."""
    from headscope.training.trainer import train
    from headscope.training.variants.baseline import Baseline

    whole = transformer(bench.checkpoint)
    folder = bench.config.out / RUNS / cell.folder
    removed = removed_heads(bench, cell)
    assert cell.seed is not None
    fresh = folder / "fresh"
    options = TrainConfig(**recipe(bench.config, bench.checkpoint))
    torch.manual_seed(cell.seed)
    model = Transformer(shape_without(whole.model, removed))
    INITIAL[options.initial](model)
    made = TransformerCheckpoint(
        path=str(fresh),
        format="native",
        model=model,
        model_type=whole.model_type,
        digest="",
        source=whole.source,
        target=whole.target,
        search=whole.search,
    )
    NATIVE.save(made, fresh, force=True)
    run = folder / "scratch"
    options = replace(options, out=run, init=str(fresh), seed=cell.seed)
    outcome = train(options, Baseline(Baseline.Options()), resume=True)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    name = next(name for name in LEFT if (run / name).is_dir())
    trained = open_checkpoint(str(run / name), device=bench.config.device, dtype="float32")
    facts = {"updates": outcome.update, "checkpoint": name, "instead_of": [str(head) for head in removed]}
    return PrunedModel(trained, [], facts)


def removed_heads(bench: Bench, cell: Cell) -> list[HeadId]:
    """The heads that the cell itself, which must be finished, took out."""
    kept = {HeadId.parse(name) for name in read_cell(bench.config.out, cell.folder)["kept"]}
    return [head for head in all_heads(bench.gating.counts) if head not in kept]


def transformer(checkpoint: Checkpoint) -> TransformerCheckpoint:
    """The checkpoint, if its architecture can be trained here; CheckpointError otherwise."""
    if not checkpoint.is_native:
        raise CheckpointError(
            f"--from-scratch trains native Transformers; {checkpoint.path} is a {checkpoint.format} checkpoint: "
            "leave it out"
        )
    return cast(TransformerCheckpoint, checkpoint)


def shape_without(model: Transformer, removed: list[HeadId]) -> TransformerConfig:
    """The architecture of a model without some of its heads (and without mixings, as removal leaves it)."""
    if not removed:
        return unmixed(model.config)
    return shrink_transformer(model, plan_removal(model.attention_places(), removed)).config


def recipe(config: SweepConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Options of the training run: those of the recipe, the texts of the sweep.

    The validation text is the recipe's own, where it still lies there: what a sweep measures on must not choose
    the checkpoint. ConfigError where there is no recipe.
    """
    told = _found(config)
    values = typed({**preset(told.get("preset")), **told})
    values = {name: value for name, value in values.items() if name not in NOT_THE_RECIPES}
    texts = [values.get(name) for name in ("valid_source", "valid_target")]
    if not all(text is None or text.is_file() for text in texts):
        values |= {"valid_source": None, "valid_target": None}
    values |= {"source": config.source, "target": config.target, "max_sentences": config.max_sentences}
    kind: Literal["translation", "lm"] = "translation" if checkpoint.two_sided else "lm"
    made = TrainConfig(**values, kind=kind, init="fresh", device=config.device)
    return {each.name: getattr(made, each.name) for each in fields(made)}


def recipe_digest(config: SweepConfig, checkpoint: Checkpoint) -> str:
    """Of the options of a recipe, texts and the like aside: controls of one sweep are trained as long, and alike."""
    shaping = {name: plain_value(value) for name, value in recipe(config, checkpoint).items() if name not in FREE}
    return hashlib.sha1(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `headscope train` from TOML or JSON; ConfigError for unknown names and values of wrong types."""
    hints = get_type_hints(TrainConfig)
    if strange := sorted(set(values) - set(hints)):
        raise ConfigError(f"--recipe: {unknown('option', strange[0], sorted(hints))}")
    return {name: _typed(hints[name], value, name) for name, value in values.items()}


def _typed(hint: Any, value: Any, name: str) -> Any:
    parts = [part for part in get_args(hint) if part is not type(None)]
    kind = parts[0] if type(None) in get_args(hint) else hint
    if value is None and type(None) in get_args(hint):
        return None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_typed(get_args(kind)[0], part, name) for part in value)
    if kind is float and type(value) is int:
        return float(value)
    if (kind in (int, float, bool, str, Path) and type(value) is not kind) or get_origin(kind) is tuple:
        raise ConfigError(f"--recipe: {name} is {repr(value)[:40]}, which is of the wrong type")
    return value


def _found(config: SweepConfig) -> dict[str, Any]:
    if config.recipe is not None:
        if config.recipe.suffix == ".toml":
            return {name.replace("-", "_"): value for name, value in read_toml(config.recipe).items()}
        return _of_run(config.recipe)
    parent = Path(config.checkpoint).resolve().parent
    if (parent / "run.json").is_file():
        return _of_run(parent)
    raise ConfigError(
        "--from-scratch: how should it be trained? give --recipe RUN, a run of `headscope train`, or --recipe "
        "FILE.toml with its options"
    )


def _of_run(folder: Path) -> dict[str, Any]:
    record = read_record(folder / "run.json")
    if record.get("kind") != "training" or not isinstance(record.get("config"), dict):
        raise ConfigError(f"--recipe {folder} is no run of `headscope train`: it lacks a run.json of one")
    return dict(record["config"])
