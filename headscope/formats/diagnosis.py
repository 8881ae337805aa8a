"""Why a path cannot be opened, by the first bytes of files, names and neighbours, and which weights do not fit.

Nothing is executed. transformers fills what a file lacks with random numbers, so missing, left-over and mismatched
weights are refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from torch import nn

from headscope.errors import CheckpointError, shortlist
from headscope.files.archives import first_member
from headscope.files.output_checks import RECORDS
from headscope.files.reading import LFS_POINTER, is_lfs_pointer, no_path, read_record
from headscope.formats.pickles import is_torch_file

STATE = "state.pt"  # what a run goes on from: a file of torch, as checkpoints of fairseq are
HEAD = 1 << 20  # bytes of a file that are looked at; torch.save writes the names of entries and classes first
CONFIG, ADAPTER = "config.json", "adapter_config.json"
OPENED = ("model*.safetensors", "pytorch_model*.bin")
"""Weights as transformers reads them."""
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Files that hold a vocabulary; without any, transformers 5 makes up a tokenizer that knows no word."""
ENCODER = "0_Transformer"  # the folder of the model in one of sentence-transformers
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.ckpt", "*.index", "*.gguf", "*.npz")
PROGRAM = "give a checkpoint of transformers or fairseq"
FIRST_BYTES: tuple[tuple[bytes, str], ...] = (
    (rb"$", "is empty; copy it again"),
    (re.escape(LFS_POINTER), "is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder"),
    (rb"\s*<(!doctype|!DOCTYPE|html|HTML)", "is a web page; download the file itself"),
    (rb"\x89HDF", f"holds weights of Keras or TensorFlow; {PROGRAM}"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!|.{257}ustar", "is an archive; unpack it"),
    (rb".{8}\{.*\"data_offsets\"", f"holds weights alone; give a folder with {CONFIG} beside them"),
)
TORCH_PROGRAMS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("OpenNMT-py", ("vocab", "opt", "generator"), PROGRAM),
    ("Joey NMT", ("model_state", "best_ckpt_iteration"), PROGRAM),
    ("PyTorch Lightning", ("pytorch-lightning_version",), "save the model inside it with save_pretrained"),
    ("OpenAI's Whisper", ("dims", "model_state_dict"), "give the model of transformers, such as openai/whisper-base"),
    ("DeepSpeed", ("ds_version",), "make ordinary weights of it with zero_to_fp32.py, which lies beside it"),
)
"""Programs that write files of torch, by the entries of these, and what to do with them."""
FOLDERS: tuple[tuple[str, str], ...] = (
    ("flax_model*.msgpack", "weights of Flax alone ({}); save them anew with transformers 4 and from_flax=True"),
    ("tf_model*.h5", "weights of TensorFlow alone ({}); save them anew with transformers 4 and from_tf=True"),
    ("*.ckpt*.index", "weights of TensorFlow alone ({}); save them anew with transformers 4 and from_tf=True"),
    ("adapter_model.*", f"no model but an adapter of one ({{}}), and no {ADAPTER}; merge it into its model"),
    ("model.bin", "a model for CTranslate2 ({}), which runs it; give the checkpoint that it was made of"),
)
"""Files of folders without weights that are read, and what such a folder holds."""

Formats = Iterable[tuple[str, Any]]  # checkpoint formats by name, with their `summary` and `recognise`


def no_checkpoint(path: Path, formats: Formats) -> CheckpointError:
    """The error for a path that none of the formats recognises."""
    if not os.path.exists(path):
        return CheckpointError(f"{no_path(path, 'file or directory')}, and it does not look like a hub id (owner/name)")
    return CheckpointError(
        _results(path, formats)
        or diagnose(path, formats)
        or f"{path} is no checkpoint that headscope knows; give a folder with {CONFIG} and weights, or another of "
        "those that `headscope list formats` describes"
    )


def diagnose(path: Path, formats: Formats) -> str | None:
    """Why a file or folder cannot be opened and what to give, in one line. None where nothing explains it."""
    try:
        home = path / ENCODER if (path / ENCODER).is_dir() else path
        sniff = _of_folder if home.is_dir() else _of_file
        return next(filter(None, sniff(home, formats)), None) if home.exists() else None
    except OSError:
        return None


@contextmanager
def explain_failure(path: Path, formats: Formats) -> Iterator[None]:
    """Within the block a CheckpointError about a path says its cause instead, where one is found."""
    try:
        yield
    except CheckpointError as error:
        if cause := diagnose(path, formats):
            raise CheckpointError(cause) from error
        raise


def _of_file(path: Path, formats: Formats) -> Iterator[str | None]:
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not is_lfs_pointer(path) and any(opener.recognise(path.parent) for _, opener in formats):
        yield f"{path} is a file of a checkpoint; give its folder, {path.parent}"
    if path.suffix == ".onnx":
        yield f"{path} is for onnxruntime, which runs models; give the checkpoint that it was made of"
    yield from (f"{path} {what}" for pattern, what in FIRST_BYTES if re.match(pattern, head, re.DOTALL))
    if head.startswith((b"PK\x03\x04", b"\x80")):
        if re.search(rb"\.(lora_[AB]|lora_embedding_[AB]|base_layer)\.", head):
            yield f"{path} holds weights of an adapter (PEFT); merge it in Python with merge_and_unload() and give that"
        if b"transformers.models." in head:
            yield f"{path} is a whole Python object; save the model with save_pretrained in place of torch.save"
        programs = [(name, advice) for name, marks, advice in TORCH_PROGRAMS if _has_entries(head, *marks)]
        if first_member(path).startswith(("special:", "decoder_", "encoder_", "Wemb")):
            programs.append(("Marian", PROGRAM))
        yield from (f"{path} was written by {name}, which is not read; {advice}" for name, advice in programs)
    if b"\0" not in head[:4096] and path.suffix not in {".json", ".toml", ".py", ".gguf"}:
        yield f"{path} is a text; give a checkpoint (a folder with {CONFIG} and weights, a .pt file of fairseq)"


def _has_entries(head: bytes, *names: str) -> bool:
    return all(b"X" + len(name).to_bytes(4, "little") + name.encode() in head for name in names)


def _of_folder(path: Path, formats: Formats) -> Iterator[str | None]:
    weights = _matching(path, OPENED)
    read = [CONFIG, *_matching(path, VOCABULARIES), *(weights or _matching(path, WEIGHTS))]
    if pointers := sorted(name for name in read if (path / name).is_file() and is_lfs_pointer(path / name)):
        yield f"{path}: {shortlist(pointers)} is a Git LFS pointer; run `git lfs pull` in its folder"
    if weights:
        if not _matching(path, (CONFIG, ADAPTER, "config.toml")):
            yield f"{path} holds weights ({shortlist(weights)}) without {CONFIG}; put that of its architecture there"
        return
    if inner_paths := [str(inner) for inner in _checkpoints(path, formats)]:
        yield f"{path} holds no weights itself; give a checkpoint that lies in it: {shortlist(inner_paths)}"
    for pattern, what in FOLDERS:
        yield from (f"{path} holds {what.format(name)}" for name in _matching(path, (pattern,)))
    if names := _matching(path, WEIGHTS):
        yield (
            f"{path} holds weights under names that are not read ({shortlist(names)}); give a folder with {CONFIG} "
            "and model.safetensors or pytorch_model.bin, or a file of fairseq"
        )


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _checkpoints(folder: Path, formats: Formats) -> list[Path]:
    """The checkpoints in a folder and its folders, the largest number first; no optimizer.pt of a Trainer."""

    def is_recognised(path: Path) -> bool:
        if path.name == STATE or not any(opener.recognise(path) for _, opener in formats):
            return False
        if not is_torch_file(path):
            return True
        with path.open("rb") as file:
            head = file.read(HEAD)
        return _has_entries(head, "model") and (_has_entries(head, "args") or _has_entries(head, "cfg"))

    def number(path: Path) -> int:
        digits = re.search(r"(\d{1,18})$", path.stem)
        return int(digits[1]) if digits else -1

    entries = sorted(folder.iterdir(), key=number, reverse=True)
    below = {entry: sorted(entry.iterdir(), key=number, reverse=True) if entry.is_dir() else [] for entry in entries}
    return [
        path
        for entry, inner in below.items()
        for path in ([entry] if is_recognised(entry) else filter(is_recognised, inner))
    ]


def _results(path: Path, formats: Formats) -> str | None:
    """What headscope has written in a folder that is no checkpoint."""
    for name in RECORDS:
        if isinstance(kind := read_record(path / name).get("kind"), str):
            inside = [str(inner) for inner in _checkpoints(path, formats)]
            instead = f"one that lies in it: {shortlist(inside)}" if inside else "the checkpoint that they are about"
            return f"{path} holds results of headscope ({kind}, {name}), and is no checkpoint; give {instead}"
    return None


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch puts within names too, where it wraps the layers of a model: compiled, sharded, or recomputed."""
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
    """The prefix of all weights that were left over where others are missing, and patterns that take it off."""
    names = list(info["unexpected_keys"])
    if not names or not info["missing_keys"]:
        return "", {}
    bare = names
    for wrapper in WRAPPERS:
        bare = [name.replace(wrapper, "") for name in bare]
    exact = {*model.state_dict()}
    expected = _names_of(model)
    columns = zip(*(name.split(".")[:-1] for name in bare), strict=False)  # up to the shortest name
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    prefixes = ["", *accumulate(f"{part}." for part in shared)]

    def fitting(prefix: str) -> tuple[int, int]:
        names = [name.removeprefix(prefix) for name in bare]
        return sum(name in expected for name in names), sum(name in exact for name in names)

    best = max(prefixes, key=fitting)  # the shortest of those that fit as well
    wrappers = [wrapper for wrapper in WRAPPERS if any(wrapper in name for name in names)]
    if not fitting(best)[0] or not (best or wrappers):
        return "", {}
    renamings = {re.escape(wrapper): "" for wrapper in wrappers} | ({f"^{re.escape(best)}": ""} if best else {})
    suffix = bare[0].removeprefix(best)
    shared_prefix = (
        names[0].removesuffix(suffix) if names[0].endswith(suffix) else ", ".join([*wrappers, *filter(None, [best])])
    )
    return shared_prefix, renamings


def _names_of(model: nn.Module) -> set[str]:
    """Names of a model's weights, with and without the prefix of the model inside its task head."""
    head_prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names: Iterable[str] = model.state_dict()
    return {spelling for name in names for spelling in (name, head_prefix + name, name.removeprefix(head_prefix))}


def forget_renamings(model: nn.Module, renamings: Mapping[str, str]) -> None:
    """Let `save_pretrained` write the names of the model: transformers would restore those of the files."""
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [
        conversion for conversion in conversions if not {*conversion._original_source_patterns} & {*renamings}
    ]  # type: ignore[assignment]


def check_weights(path: str, info: dict[str, Any], absent: frozenset[str], model: Any) -> None:
    """Refuse a checkpoint whose weights do not fill the model that its config describes, but for those `absent`."""
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
