"""Why a path cannot be opened, from the first bytes of files, their names and neighbours; which weights do not fit.

Nothing is executed. transformers fills weights that a file lacks with random numbers, so missing, left-over and
mismatched weights are refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from torch import nn

from headscope.errors import CheckpointError, shortlist
from headscope.files.output_checks import RECORDS
from headscope.files.reading import LFS_POINTER, is_lfs_pointer, no_path, read_record
from headscope.formats.pickles import is_torch_file

STATE = "state.pt"  # a training run resumes from it; a file of torch.save, as checkpoints of fairseq are
CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
"""Patterns of the files of weights that transformers reads."""
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Files that hold a vocabulary; without any, transformers 5 makes up a tokenizer that knows no word."""
ENCODER = "0_Transformer"  # in a folder of sentence-transformers, the folder of the model
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.ckpt", "*.index", "*.gguf", "*.npz")
FIRST_BYTES: tuple[tuple[bytes, str], ...] = (
    (rb"$", "is empty; copy it again"),
    (re.escape(LFS_POINTER), "is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder"),
    (rb"\s*<(!doctype|!DOCTYPE|html|HTML)", "is a web page; download the file itself"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!|.{257}ustar", "is an archive; unpack it"),
    (rb".{8}\{.*\"data_offsets\"", f"holds weights alone; give a folder with {CONFIG} beside them"),
    (rb"[^\0]+\Z", f"is a text; give a checkpoint (a folder with {CONFIG} and weights, a .pt file of fairseq)"),
)
Formats = Iterable[tuple[str, Any]]  # checkpoint formats by name, with their `summary` and `recognise`


def no_checkpoint(path: Path, formats: Formats) -> CheckpointError:
    """The error for a path that none of the formats recognises."""
    if not os.path.exists(path):
        return CheckpointError(f"{no_path(path, 'file or directory')}, and it does not look like a hub id (owner/name)")
    for name in RECORDS:
        if isinstance(kind := read_record(path / name).get("kind"), str):
            inside = [str(inner) for inner in _checkpoints(path, formats)]
            instead = f"one that lies in it: {shortlist(inside)}" if inside else "the checkpoint that they are about"
            return CheckpointError(
                f"{path} holds results of headscope ({kind}, {name}), and is no checkpoint; give {instead}"
            )
    return CheckpointError(
        diagnose(path, formats)
        or f"{path} is no checkpoint that headscope knows; give a folder with {CONFIG} and weights, or another of "
        "those that `headscope list formats` describes"
    )


def diagnose(path: Path, formats: Formats) -> str | None:
    """One line on why a file or folder cannot be opened and what to give instead; None if no reason is found."""
    try:
        home = path / ENCODER if (path / ENCODER).is_dir() else path
        return (_diagnose_folder if home.is_dir() else _diagnose_file)(home, formats) if home.exists() else None
    except OSError:
        return None


def _diagnose_file(path: Path, formats: Formats) -> str | None:
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.startswith(LFS_POINTER) and any(opener.recognise(path.parent) for _, opener in formats):
        return f"{path} is a file of a checkpoint; give its folder, {path.parent}"
    if path.suffix in {".json", ".toml", ".py", ".gguf"}:
        return None
    return next((f"{path} {what}" for pattern, what in FIRST_BYTES if re.match(pattern, head, re.DOTALL)), None)


def _diagnose_folder(path: Path, formats: Formats) -> str | None:
    weights = _matching(path, WEIGHT_FILES)
    read = [CONFIG, *_matching(path, VOCABULARIES), *(weights or _matching(path, WEIGHTS))]
    if pointers := sorted(name for name in read if is_lfs_pointer(path / name)):
        return f"{path}: {shortlist(pointers)} is a Git LFS pointer; run `git lfs pull` in its folder"
    if weights:
        if _matching(path, (CONFIG, ADAPTER, "config.toml")):
            return None
        return f"{path} holds weights ({shortlist(weights)}) without {CONFIG}; put that of its architecture there"
    if inner_paths := [str(inner) for inner in _checkpoints(path, formats)]:
        return f"{path} holds no weights itself; give a checkpoint that lies in it: {shortlist(inner_paths)}"
    if names := _matching(path, WEIGHTS):
        return (
            f"{path} holds weights of another program or an adapter ({shortlist(names)}); give a folder with {CONFIG} "
            "and model.safetensors or pytorch_model.bin, or a file of fairseq"
        )
    return None


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _checkpoints(folder: Path, formats: Formats) -> list[Path]:
    """The checkpoints in a folder and its folders, the largest number first, without a Trainer's optimizer.pt."""

    def is_recognised(path: Path) -> bool:
        if path.name == STATE or not any(opener.recognise(path) for _, opener in formats):
            return False
        return not is_torch_file(path) or is_torch_file(path, "args") or is_torch_file(path, "cfg")

    def number(path: Path) -> int:
        digits = re.search(r"(\d{1,18})$", path.stem)
        return int(digits[1]) if digits else -1

    checkpoints = list[Path]()
    for entry in sorted(folder.iterdir(), key=number, reverse=True):
        inner = sorted(entry.iterdir(), key=number, reverse=True) if entry.is_dir() else []
        checkpoints += [entry] if is_recognised(entry) else filter(is_recognised, inner)
    return checkpoints


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch puts into names where it wraps layers of a model: compiled, sharded, or recomputed."""
# Weights that a checkpoint may lack without any head being affected: the pooler is trained with a task.
_MAY_BE_MISSING = re.compile(r"(^|\.)pooler\.")
_LAYER = re.compile(r"\.\d+\.")
_ADAPTED = re.compile(
    r"\.(lora_[a-zA-Z_]+|base_layer|modules_to_save|original_module|ia3_l|hada_\w+|lokr_\w+|oft_\w+)\b"
)
"""Names that PEFT puts into a model."""
_CONSTANT = re.compile(r"\.(masked_bias|inv_freq|position_ids)$")
"""What earlier releases of transformers saved besides weights: masks, frequencies and positions."""


def common_prefix(info: Mapping[str, Any], model: nn.Module) -> tuple[str, dict[str, str]]:
    """The prefix of left-over weights without which they would be the missing ones, and patterns that remove it."""
    names, exact = list(info["unexpected_keys"]), {*model.state_dict()}
    if not names or not info["missing_keys"]:
        return "", {}
    wrappers = [wrapper for wrapper in WRAPPERS if any(wrapper in name for name in names)]
    bare = names
    for wrapper in wrappers:
        bare = [name.replace(wrapper, "") for name in bare]
    inner = f"{getattr(model, 'base_model_prefix', '')}."  # the prefix of the model inside its task head
    spellings = {spelling for name in exact for spelling in (name, inner + name, name.removeprefix(inner))}
    columns = zip(*(name.split(".")[:-1] for name in bare), strict=False)  # up to the shortest name
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]

    def count_fits(prefix: str) -> tuple[int, int]:
        names = [name.removeprefix(prefix) for name in bare]
        return sum(name in spellings for name in names), sum(name in exact for name in names)

    # the shortest of the prefixes that fit equally well
    best = max(["", *accumulate(f"{part}." for part in shared)], key=count_fits)
    if not count_fits(best)[0] or not (best or wrappers):
        return "", {}
    renamings = {re.escape(wrapper): "" for wrapper in wrappers} | ({f"^{re.escape(best)}": ""} if best else {})
    suffix = bare[0].removeprefix(best)
    is_whole = names[0].endswith(suffix)
    return names[0].removesuffix(suffix) if is_whole else ", ".join(filter(None, [*wrappers, best])), renamings


def forget_renamings(model: nn.Module, renamings: Mapping[str, str]) -> None:
    """Make `save_pretrained` write the model's own names: transformers would restore the names in the files."""
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [
        conversion for conversion in conversions if not {*conversion._original_source_patterns} & {*renamings}
    ]  # type: ignore[assignment]


def check_weights(path: str, info: dict[str, Any], absent: frozenset[str], model: Any) -> None:
    """Refuse a checkpoint whose weights are not all those of the model that its config describes, except `absent`."""
    left_over = sorted(key for key in info["unexpected_keys"] if not _CONSTANT.search(f".{key}"))
    missing = sorted(key for key in {*info["missing_keys"]} - absent if not _MAY_BE_MISSING.search(key))
    extra = [key for key in left_over if _LAYER.search(f".{key}.")]
    if (missing or extra) and (adapter_keys := [key for key in left_over if _ADAPTED.search(key)]):
        raise CheckpointError(
            f"{path} holds weights of a model with an adapter (PEFT: {shortlist(adapter_keys)}); merge it in Python "
            "with merge_and_unload() and save the result with save_pretrained"
        )
    sizes = sorted((name, *map(size_text, shapes)) for name, *shapes in info["mismatched_keys"])
    remainder = f" (the files have {shortlist(left_over)} instead)" if left_over else ""
    problems = {
        "of another size than config.json says": [f"{name} ({own}, config.json: {its})" for name, own, its in sizes],
        f"missing{remainder}": missing,
        f"left over, {type(model).__name__} has no such parts (does config.json say fewer layers?)": extra,
    }
    refuse_weights(path, problems, "; config.json and the weights must agree")


def refuse_weights(path: str, problems: Mapping[str, Sequence[str]], advice: str = "") -> None:
    """CheckpointError for the first problem that some weights have."""
    for problem, names in problems.items():
        if names:
            raise CheckpointError(f"{path}: weights are {problem}: {shortlist(names)}{advice}")


def size_text(size: Iterable[int]) -> str:
    """The size of a weight in words."""
    return "×".join(map(str, size)) or "one number"
