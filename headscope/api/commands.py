"""`load`, which opens a model, and a function per command: `analyze`, `evaluate`, `prune`, `train`, `plot`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from torch import cuda, nn
from torch.random import fork_rng

from headscope.api.model import Model
from headscope.api.options import PathName, Report, TrainingReport, progress_of, public_api
from headscope.api.plot import plot as plot
from headscope.config import CheckpointOptions
from headscope.config.option import configured
from headscope.errors import ConfigError
from headscope.formats.base import open_configured
from headscope.model.interface import is_pretrained
from headscope.model.nonfinite import refuse_damaged_model
from headscope.model.stored_weights import is_packing
from headscope.registry import unknown

if TYPE_CHECKING:
    from headscope.api.texts import Text
    from headscope.evaluation.quality import Evaluation
    from headscope.results.ranking import Ranking
    from headscope.results.removal import Removal
    from headscope.results.study import Study
    from headscope.results.sweep import Sweep
    from headscope.results.training import Training

F = TypeVar("F", bound=Callable[..., Any])


@public_api
def load(
    source: PathName | nn.Module | Model,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    format: str | None = None,
    dicts: PathName | None = None,
    hp: PathName | None = None,
    bpe: PathName | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    task: Literal["transcribe", "translate"] | None = None,
) -> Model:
    """Open a model.

    source: a checkpoint of any format (a file, a directory or a hub id), or a transformers model that is already in
        memory. The latter is used as it is: every call leaves its weights, device, mode (train or eval), hooks and
        attention implementation as they were.
    tokenizer: of a model in memory; without it the model can be captured and gated, not read text.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps". A model in memory stays where it is.
    dtype: "auto" (as stored, float32 on a CPU), "float32", "float64", "bfloat16", "float16".
    device_map: "auto" spreads a Hugging Face model over GPUs, the CPU's memory and the disk, or a JSON file says which
        module goes where ("cuda:0", "cpu", "disk"); needs accelerate (`pip install 'headscope[large]'`).
    format: the checkpoint's format; default: found from its content.
    dicts, hp, bpe: files that belong to a fairseq or story-of-heads checkpoint (dictionaries, hyper-parameters, codes
        that split text); default: dictionaries beside the checkpoint, text already split.
    src_lang, tgt_lang: languages that a model of many reads and writes, as its tokenizer or dictionary calls them
        (NLLB: "eng_Latn"), or that a Whisper hears and writes ("en"); default: what its files say.
    task: what a Whisper writes, a transcript or an English translation.

    CheckpointError where there is no such checkpoint or it is broken, ConfigError for options that do not fit.
    """
    if isinstance(source, Model):
        return source
    needs = {"dicts": dicts, "hp": hp, "bpe": bpe, "src_lang": src_lang, "tgt_lang": tgt_lang, "task": task}
    given = {"device": device, "dtype": dtype, "device_map": device_map, "format": format, **needs}
    if isinstance(source, (str, PathLike)):
        if tokenizer is not None:
            raise ConfigError("tokenizer= is for a model in memory; a checkpoint has its own")
        config = configured(CheckpointOptions, {"checkpoint": source, **given}, what="load")
        return Model(open_configured(config), companions=config.companions)
    if useless := [name for name, value in given.items() if value not in (None, "auto")]:
        raise ConfigError(f"{useless[0]}= is for checkpoints on disk; a model in memory is used as it is")
    return _in_memory(source, tokenizer)


def _in_memory(source: nn.Module, tokenizer: Any) -> Model:
    """A model that its owner holds; ConfigError for one that cannot be used as it is."""
    if not is_pretrained(source):
        raise ConfigError(
            f"source: a {type(source).__name__} cannot be loaded; give a checkpoint's path, a hub id, or a "
            "transformers model (the model itself, not what wraps it)"
        )
    if any(tensor.is_inference() for tensor in chain(source.parameters(), source.buffers())):
        raise ConfigError(
            "this model was loaded in torch.inference_mode(), and no gradient goes through such weights and buffers; "
            "load it outside of that block"
        )
    offloads = any(hasattr(part, "_hf_hook") for part in source.modules())  # accelerate's, with the weights elsewhere
    if empty := [] if offloads else [name for name, weight in source.named_parameters() if weight.is_meta]:
        raise ConfigError(
            f"{len(empty)} weights of this model are on the meta device, without values ({empty[0]}); load it outside "
            'of torch.device("meta") and init_empty_weights(), or give its path'
        )
    if tokenizer is not None and not hasattr(tokenizer, "all_special_ids"):
        raise ConfigError(
            f"tokenizer: a {type(tokenizer).__name__} is no tokenizer of transformers; give what "
            "AutoTokenizer.from_pretrained returns"
        )
    if is_packing(source):
        raise ConfigError(
            "bitsandbytes packs the 4-bit weights of this model for the CPU, and no gradient goes through them then; "
            "load it by its path"
        )
    from headscope.formats.huggingface.checkpoint import InMemoryCheckpoint

    checkpoint = InMemoryCheckpoint(source, tokenizer)
    refuse_damaged_model(checkpoint.path, source)
    return Model(checkpoint)


Source: TypeAlias = "PathName | nn.Module | Model"
"""What `load` opens."""


def documented_by(method: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function of a model with the documentation and the parameters of the model's method."""

    def decorate(function: F) -> F:
        first, *_ = inspect.signature(function).parameters.values()
        _, *others = inspect.signature(method).parameters.values()
        described: Any = function
        described.__doc__, described.__signature__ = method.__doc__, inspect.Signature([first, *others])
        return function

    return decorate


@documented_by(Model.analyze)
def analyze(model: Source, text: Text | None = None, **options: Any) -> Study:
    """Measure every head of what `load` opens: `Model.analyze`."""
    return load(model).analyze(text, **options)


@documented_by(Model.evaluate)
def evaluate(model: Source, text: Text | None = None, **options: Any) -> Evaluation:
    """Score what `load` opens on a text: `Model.evaluate`."""
    return load(model).evaluate(text, **options)


@overload
def prune(
    checkpoint: PathName, method: Literal["rank", "l0", "subset"], *, out: PathName, **options: Any
) -> Ranking: ...
@overload
def prune(checkpoint: PathName, method: Literal["sweep"], *, out: PathName, **options: Any) -> Sweep: ...
@overload
def prune(checkpoint: PathName, method: Literal["shrink", "remove"], *, out: PathName, **options: Any) -> Removal: ...
@public_api
@fork_rng(range(cuda.device_count()))
def prune(
    checkpoint: str | PathLike[str],
    method: str,
    *,
    out: PathName,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Ranking | Sweep | Removal:
    """Choose heads to remove, by a ranking or by learned gates, and write the choice: `headscope prune METHOD`.

    checkpoint: a path or a hub id.
    method: "rank" (`by=`, `keep=` or `keep_fraction=`), "l0" (`strength=` or `keep=`), "subset" (`keep=`) or a learner
        of another package; "sweep", which compares `methods=` at several sizes (`keep=` or `keep_fraction=`); or
        "shrink", which goes the whole way to a smaller model (`keep=`, `keep_fraction=` or `max_drop=`).
    out: the folder to write; it must be empty unless `force` is given.
    options: those of the command, with underscores: `source=` and `target=` (files), `sites=`, `protect=`, `updates=`,
        `remove=True`, …; see `RankConfig`, `LearnConfig`, `SweepConfig` and `ShrinkConfig` in
        `headscope.pruning.options`, and the files in `headscope.pruning.learning.learners`.

    The result is a `Ranking`, whose `removed` and `kept` are the heads; of a sweep a `Sweep`, with its `table`, of
    "shrink" and "remove" a `Removal`, which says where the smaller model is (`path`), and its `quality`.
    ConfigError for unknown options.
    """
    from headscope.pruning.learning.learn import run_learning
    from headscope.pruning.options.choice import LEARNERS, LearnConfig, RankConfig
    from headscope.pruning.options.removal import RemoveConfig, ShrinkConfig
    from headscope.pruning.options.sweep import SweepConfig
    from headscope.pruning.ranking.rank_run import run_ranking
    from headscope.pruning.removal.remove import run_removal
    from headscope.pruning.shrink import run_shrink
    from headscope.pruning.sweep.sweep import run_sweep

    if not isinstance(checkpoint, (str, PathLike)):
        raise ConfigError(
            "prune takes a checkpoint's path, as it writes checkpoints; a loaded model has rank and remove"
        )
    runs: dict[str, tuple[type[Any], Callable[..., Any]]] = {
        "rank": (RankConfig, run_ranking),
        "sweep": (SweepConfig, run_sweep),
        "shrink": (ShrinkConfig, run_shrink),
        "remove": (RemoveConfig, lambda config, progress: run_removal(config)),
    }
    if method not in (ways := [*runs, *LEARNERS.names()]):
        raise ConfigError(unknown("way to prune", method, ways))
    values, what = {**options, "checkpoint": checkpoint, "out": out, "force": force}, f"prune {method}"
    cls, run = runs.get(method, (LearnConfig, run_learning))
    if method not in runs:
        own = LEARNERS.get(method).Options
        of_method = {entry.name: values.pop(entry.name) for entry in fields(own) if entry.name in values}
        values["method"] = configured(own, of_method, what=what)
    return run(configured(cls, values, what=what), progress=progress_of(progress))  # type: ignore[no-any-return]


@public_api
@fork_rng(range(cuda.device_count()))
def train(
    variant: str = "baseline",
    *,
    out: PathName,
    resume: bool = False,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Training:
    """Train a Transformer, plain or in one of the variants, and write it to `out`: `headscope train VARIANT`.

    variant: "baseline", "wide", "mixing", "swap", "mae", …, or several, "mixing+swap".
    out: the folder to write; `resume` continues the run in it, whose options are the defaults, `force`
        replaces it.
    options: those of the command, with underscores: `source=`, `target=`, `valid_source=`, `preset="tiny"`, and the
        variant's own; see `headscope.training.config.TrainConfig` and the files in `headscope.training.variants`.

    ConfigError for unknown options, TrainingError where the loss is NaN or infinite.
    """
    from headscope.training.checkpoints import with_defaults
    from headscope.training.config import TrainConfig
    from headscope.training.trainer import train as run_training
    from headscope.training.variant import find_variant

    cls, what = find_variant(str(variant)), f"train {variant}"
    values = with_defaults({**options, "out": out}, cls.name, resume=resume)
    own = {entry.name: values.pop(entry.name) for entry in fields(cls.Options) if entry.name in values}
    config = configured(TrainConfig, values, what=what, others=own)
    variant_options = cls(configured(cls.Options, own, what=what))
    with TrainingReport(progress_of(progress)) as listener:
        more: Any = {"listener": listener, "command": ("headscope.train", variant)}
        return run_training(config, variant_options, resume=resume, force=force, **more)
