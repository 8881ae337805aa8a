"""How a model without some heads is built and written: one `Export` for each kind of folder.

Checkpoints of the native Transformer (native, fairseq, MHR) keep their format, whose files hold a number of
heads for every layer; story-of-heads files cannot, and become native ones. Hugging Face classes have one
number for all layers, so their folders are self-contained, plain where that fits, or masked.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from headscope.config import Companions
from headscope.errors import CheckpointError, ConfigError
from headscope.files.writing import write_failure
from headscope.formats.base import Checkpoint
from headscope.formats.fairseq.checkpoint import FAIRSEQ, FairseqCheckpoint
from headscope.formats.fairseq.keys import Origin
from headscope.formats.huggingface.from_native import quiet_transformers
from headscope.formats.huggingface.selfcontained import is_narrowed, write_code
from headscope.formats.huggingface.shrink import shrink_model, zeroed_model
from headscope.formats.native import NATIVE
from headscope.formats.story_of_heads.checkpoint import StoryCheckpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.shrink import shrink_transformer, zeroed_transformer
from headscope.model.removal_plan import RemovalPlan

Family = Literal["huggingface", "transformer"]
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WIDTHS = ("d_kv", "head_dim")
COUNTS = ("num_heads", "num_attention_heads")


@dataclass(frozen=True)
class ExportedFiles:
    """What was written: the file or directory to open, its format, and what the user should know."""

    path: Path
    format: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """Build a checkpoint without heads, and write it into an empty directory.

    `whole_groups`: whether key/value groups must go as a whole. Building and writing raise HeadscopeError where
    the export cannot hold the model.
    """

    name: str
    family: Family
    build: Callable[[Checkpoint, RemovalPlan], Checkpoint]
    write: Callable[[Checkpoint, Path, Companions], ExportedFiles]
    whole_groups: bool = True


def family_of(checkpoint: Checkpoint) -> Family:
    """Which exports a checkpoint can have."""
    return "transformer" if isinstance(checkpoint, TransformerCheckpoint) else "huggingface"


def choose_export(name: str | None, checkpoint: Checkpoint) -> Export:
    """The export of that name, or the default; ConfigError where there is none for this checkpoint."""
    family = family_of(checkpoint)
    fitting = {each.name: each for each in EXPORTS if each.family == family}
    if name is None:
        return next(iter(fitting.values()))
    if name not in fitting:
        allowed = ", ".join([*fitting, "onnx"])
        hint = "" if family == "huggingface" else "; it keeps its own format, `headscope convert` makes others of it"
        raise ConfigError(f"--export {name} is not for a {checkpoint.format} checkpoint, which has {allowed}{hint}")
    return fitting[name]


def as_export(checkpoint: Checkpoint, built: Export, removal: RemovalPlan, name: str) -> tuple[Checkpoint, Export]:
    """A shrunk checkpoint, which was `built` for one export, for another one; ConfigError where that cannot be."""
    export = choose_export(name, checkpoint)
    if export.name == built.name:
        return checkpoint, export
    if (built.name, export.name) != ("self-contained", "native"):
        raise ConfigError(
            f"the heads were removed for export={built.name!r}, which cannot become {name!r}; "
            f"say remove(..., export={name!r})"
        )
    made: Checkpoint = with_model(checkpoint, copy.deepcopy(checkpoint.model))
    return in_plain_class(made, removal), export


def with_model(checkpoint: Checkpoint, model: nn.Module) -> Any:
    """The same checkpoint around another model, which is in memory only."""
    made: Any = copy.copy(checkpoint)
    made._digest = None
    made.look_again()
    made.model = model
    if hasattr(made, "config"):
        made.config = made.model.config
    return made


# The native Transformer and its formats.


def _shrunk_transformer(checkpoint: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    assert isinstance(checkpoint, TransformerCheckpoint)
    return _unmixed(checkpoint, with_model(checkpoint, shrink_transformer(checkpoint.model, removal)))


def _zeroed_transformer(checkpoint: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    assert isinstance(checkpoint, TransformerCheckpoint)
    return _unmixed(checkpoint, with_model(checkpoint, zeroed_transformer(checkpoint.model, removal)))


def _unmixed(old: TransformerCheckpoint, made: Any) -> TransformerCheckpoint:
    """Without what a fairseq file says about mixings that are folded now."""
    if isinstance(old, FairseqCheckpoint):
        made.was_mixed = any("alphas" in key for key in old.origin.keys)
        keys = tuple(key for key in old.origin.keys if "alphas" not in key)
        made.origin = Origin(keys, {key: each for key, each in old.origin.dropped.items() if "alphas" not in key})
    found: TransformerCheckpoint = made
    return found


def _write_transformer(checkpoint: Checkpoint, folder: Path, companions: Companions) -> ExportedFiles:
    assert isinstance(checkpoint, TransformerCheckpoint)
    if isinstance(checkpoint, FairseqCheckpoint):
        path = folder / Path(checkpoint.path).name
        FAIRSEQ.save(checkpoint, path)
        for found in _dictionaries(checkpoint, companions):
            shutil.copyfile(found, folder / found.name)
        return ExportedFiles(path, "fairseq", _fairseq_notes(checkpoint))
    NATIVE.write(checkpoint, folder)
    if isinstance(checkpoint, StoryCheckpoint):
        return ExportedFiles(
            folder, "native", ("story-of-heads files hold one number of heads, so this is a native one",)
        )
    return ExportedFiles(folder, "native")


def _fairseq_notes(checkpoint: FairseqCheckpoint) -> tuple[str, ...]:
    """What fairseq and its fork make of a file."""
    notes = []
    if getattr(checkpoint, "was_mixed", False):
        notes.append("the matrices that mix heads are folded into the output projections: no longer a file of the fork")
    stacks = [each for each in (checkpoint.model.config.encoder, checkpoint.model.config.decoder) if each is not None]
    full = {each.d_model // each.d_head for each in stacks}
    if set(checkpoint.layout.values()) - full:
        notes.append("fairseq itself has no layers with fewer heads than its options say: open it with headscope")
    return tuple(notes)


def _dictionaries(checkpoint: FairseqCheckpoint, companions: Companions) -> list[Path]:
    """The dictionaries that were read with a fairseq file."""
    here = Path(checkpoint.path).parent
    data = Path(str(checkpoint.options.get("data") or ".").split(":")[0])
    folders = [companions.dicts] if companions.dicts else [here, here / data.name, data]
    languages = [checkpoint.options.get(f"{side}_lang") for side in ("source", "target")]
    names = dict.fromkeys(f"dict.{each}.txt" if each else "dict.txt" for each in languages)
    found = [next((path for folder in folders if (path := folder / name).is_file()), None) for name in names]
    return [path for path in found if path is not None]


# Hugging Face.


def _shrunk_huggingface(checkpoint: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    made: Checkpoint = with_model(checkpoint, shrink_model(checkpoint.model, removal))
    return made


def _zeroed_huggingface(checkpoint: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    if is_narrowed(checkpoint.model.config):
        raise ConfigError(f"{checkpoint.path} has fewer heads than its class; --export masked takes the whole model")
    made: Checkpoint = with_model(checkpoint, zeroed_model(checkpoint.model, removal))
    return made


def _plain_huggingface(checkpoint: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    return in_plain_class(_shrunk_huggingface(checkpoint, removal), removal)


def in_plain_class(shrunk: Checkpoint, removal: RemovalPlan) -> Checkpoint:
    """A shrunk checkpoint whose config says so in the class's own words; ConfigError where it has none.

    The config of the model that is given is changed.
    """
    kind, counts = shrunk.model_type, set(removal.layout.values())
    config: Any = shrunk.model.config
    width = next((name for name in WIDTHS if getattr(config, name, None) and name in config.to_dict()), None)
    number = next((name for name in COUNTS if hasattr(config, name)), None)
    if len(counts) != 1 or 0 in counts:
        raise ConfigError(
            f"--export native: class {type(shrunk.model).__name__} has one number of heads for all layers, and "
            "they differ here; remove as many everywhere, or take self-contained"
        )
    if width is None or number is None:
        raise ConfigError(
            f"--export native: a config of type {kind!r} cannot say how wide a head is, so its heads would get "
            "wider as they get fewer; take self-contained"
        )
    if config.narrowed["bias_heads"]:
        raise ConfigError(
            "--export native: the layers share one position bias, so the plain class needs the same heads removed "
            "from every layer; do that, or take self-contained"
        )
    del config.narrowed, config.kept_heads
    try:
        setattr(config, number, counts.pop())
        if getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = len(next(iter(removal.groups.values())))
        type(config).from_dict(config.to_dict())
    except Exception as error:  # whatever the config's own checks raise
        detail = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"--export native: the plain class refuses such a config ({detail}); take self-contained"
        ) from None
    return shrunk


def _write_huggingface(checkpoint: Checkpoint, folder: Path, companions: Companions) -> ExportedFiles:
    """Weights in the type that the source stores them in, config, tokenizer; the modelling file where needed."""
    model: Any = with_stored_dtype(checkpoint)
    config = model.config
    narrowed = is_narrowed(config)
    if narrowed:
        config.auto_map = write_code(folder, config, model)
    elif hasattr(config, "auto_map"):
        del config.auto_map
    with quiet_transformers():
        try:
            model.save_pretrained(folder)
        except Exception as error:  # whatever transformers may raise
            if write_failure(error):
                raise
            raise CheckpointError(f"it cannot be saved: {' '.join(str(error).split())[:200]}") from error
        tokenizer = getattr(checkpoint, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (there := Path(checkpoint.path) / name).is_file():
            shutil.copyfile(there, folder / name)
    _drop_auto_map_of_others(folder)
    note = "opens with AutoModel….from_pretrained(folder, trust_remote_code=True), without headscope"
    return ExportedFiles(folder, "huggingface", (note,) if narrowed else ())


def with_stored_dtype(checkpoint: Checkpoint) -> nn.Module:
    """The model in the type that its checkpoint stores, where it was widened to compute with it."""
    stored = _stored_dtype(checkpoint.path)
    if stored is None or torch.promote_types(stored, checkpoint.dtype) != checkpoint.dtype:
        return checkpoint.model
    if stored == checkpoint.dtype:
        return checkpoint.model
    return copy.deepcopy(checkpoint.model).to(stored)


def _stored_dtype(path: str) -> torch.dtype | None:
    """The one type of all weights of a local folder, what config.json says elsewhere; None where there are several."""
    from transformers import AutoConfig

    if files := list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []:
        found = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                found |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        return STORED.get(found.pop()) if len(found) == 1 else None
    try:
        with quiet_transformers():
            said = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).dtype
    except (OSError, ValueError):
        return None
    return said if isinstance(said, torch.dtype) else None


def _drop_auto_map_of_others(folder: Path) -> None:
    """A tokenizer's own remote code does not come along, so nothing may refer to it."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("auto_map", None) is not None:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_OWN = Export("same", "transformer", _shrunk_transformer, _write_transformer)
_PLAIN = Export("self-contained", "huggingface", _shrunk_huggingface, _write_huggingface)
EXPORTS = (
    _OWN,
    replace(_OWN, name="masked", build=_zeroed_transformer, whole_groups=False),
    _PLAIN,
    replace(_PLAIN, name="native", build=_plain_huggingface),
    replace(_PLAIN, name="masked", build=_zeroed_huggingface, whole_groups=False),
)
