"""Train a model with only the remaining heads from scratch (Voita et al. 2019, table 2).

It is a native Transformer with the pruned model's number of heads in every layer, new weights and the checkpoint's
vocabularies, trained by a recipe: the options of a run of `headscope train`, or a TOML file of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from headscope.config import plain_options
from headscope.config.option import make_config
from headscope.errors import CheckpointError, ConfigError, flag, restate
from headscope.files.reading import read_record, read_toml
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import HeadId
from headscope.model.native.transformer import Transformer, shrink_transformer, without_mixing
from headscope.model.native.transformer_config import TransformerConfig
from headscope.model.removal_plan import plan_removal
from headscope.training.architecture import INITIAL
from headscope.training.config import TrainConfig, default_of, preset
from headscope.training.trainer import train
from headscope.training.variants.widths import Baseline

NON_RECIPE_OPTIONS = {
    *("out", "preset", "source", "target", "max_sentences", "tokenizer", "init", "dicts", "bpe", "seed", "device"),
    *("kind", "threads", "tensorboard"),
    *("d_model", "d_ffn", "heads", "norm", "activation", "positions", "decoder_layers", "vocab_size"),  # the model's
}
ARCHITECTURE_OPTIONS = {"encoder_layers", "tie_output", "vocabulary", "tokenizer_kind"}  # digests have their defaults
NON_DIGEST_OPTIONS = NON_RECIPE_OPTIONS | {"valid_source", "valid_target"}  # files, which may move
VALIDATION_OPTIONS = {"valid_source", "valid_target", "best_by", "patience", "bleu_sentences"}
FRESH, RUN = "fresh", "scratch"  # folders of the model before training, and of the run


class Retrained(NamedTuple):
    """A model trained from scratch, the number of its updates, and the name of its checkpoint in the run."""

    checkpoint: Checkpoint
    updates: int
    name: str


def train_from_scratch(
    intact: TransformerCheckpoint, heads_gone: Sequence[HeadId], options: TrainConfig, folder: Path
) -> Retrained:
    """Train the architecture of `intact` without `heads_gone`, in `folder`; resumes the run of a killed process.

    New weights and the order of data depend on `options.seed`. KeyboardInterrupt where the run was interrupted.
    """
    torch.manual_seed(options.seed)
    model = Transformer(config_without(intact.model, heads_gone))
    INITIAL[options.initial](model)
    fresh = TransformerCheckpoint(
        path=str(folder / FRESH),
        format="native",
        model=model,
        model_type=intact.model_type,
        digest="",
        source=intact.source,
        target=intact.target,
        search=intact.search,
    )
    NATIVE.save(fresh, folder / FRESH, force=True)
    run = folder / RUN
    options_here = replace(options, out=run, init=str(folder / FRESH), initial=default_of(options, "initial"))
    outcome = train(options_here, Baseline(Baseline.Options()), resume=True)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    name = next(name for name in ("averaged", "best", "last") if (run / name).is_dir())
    checkpoint = open_checkpoint(str(run / name), device=options.device, dtype="float32")
    return Retrained(checkpoint, outcome.update, name)


def native_only(checkpoint: Checkpoint) -> TransformerCheckpoint:
    """The checkpoint, if it is a native Transformer, which can be trained; CheckpointError otherwise."""
    if not checkpoint.is_native:
        raise CheckpointError(
            f"{flag.from_scratch} trains native Transformers, {checkpoint.path} is {checkpoint.format}; leave it out"
        )
    return cast(TransformerCheckpoint, checkpoint)


def config_without(model: Transformer, heads_gone: Sequence[HeadId]) -> TransformerConfig:
    """The architecture of a model without some of its heads, and without mixings."""
    if not heads_gone:
        return without_mixing(model.config)
    return shrink_transformer(model, plan_removal(model.declared_attention(), heads_gone)).config


def read_recipe(recipe: Path | None, *, checkpoint: str, two_sided: bool, **others: Any) -> TrainConfig:
    """The options of a training run by a recipe (None: of the run that `checkpoint` lies in), with `others` set.

    The validation text is the recipe's, if it still exists: the text on which models are compared must not choose the
    checkpoint. ConfigError where there is no recipe, and for options that `headscope train` does not have.
    """
    recipe_options = _read_options(recipe, checkpoint)
    values = {**preset(recipe_options.get("preset")), **recipe_options}
    left_out = NON_RECIPE_OPTIONS | ARCHITECTURE_OPTIONS
    texts = [values.get(name) for name in ("valid_source", "valid_target")]
    if not all(text is None or Path(text).is_file() for text in texts):
        left_out = left_out | VALIDATION_OPTIONS
    values = {name: value for name, value in values.items() if name not in left_out}
    with restate(ConfigError, flag.recipe + ": {why}"):
        return make_config(
            TrainConfig, {**values, **others, "kind": "translation" if two_sided else "lm", "init": FRESH}
        )


def recipe_digest(options: TrainConfig) -> str:
    """The digest of the options of a recipe that decide how a model is trained, without texts and folders."""
    digested = {name: value for name, value in plain_options(options).items() if name not in NON_DIGEST_OPTIONS}
    return hashlib.sha1(json.dumps(digested, sort_keys=True).encode()).hexdigest()


def _read_options(recipe: Path | None, checkpoint: str) -> dict[str, Any]:
    """The options of a recipe as its file has them."""
    if recipe is not None and recipe.suffix == ".toml":
        return {name.replace("-", "_"): value for name, value in read_toml(recipe).items()}
    run = recipe or Path(checkpoint).resolve().parent
    record = read_record(run / "run.json")
    if record.get("kind") == "training" and isinstance(record.get("config"), dict):
        return dict(record["config"])
    raise ConfigError(
        f"{flag.recipe}: {run} is not a run of `headscope train`; give one, or FILE.toml with its options"
    )
