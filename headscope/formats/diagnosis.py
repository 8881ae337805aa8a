"""Why a path cannot be opened, by the first bytes of files, names and neighbours; nothing is executed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError, shortlist
from headscope.files.digests import OPENED
from headscope.files.output_checks import RECORDS
from headscope.files.reading import LFS_POINTER, is_lfs_pointer, no_path, read_record
from headscope.files.zips import first_member
from headscope.formats.pickles import is_torch_file

ENGINES = {".onnx": "onnxruntime"}  # files that programs run, by how their names end
STATE = "state.pt"  # what a run goes on from: a file of torch, as checkpoints of fairseq are
HEAD = 1 << 20  # bytes of a file that are looked at; torch.save writes the names of entries and classes first
CONFIG, ADAPTER = "config.json", "adapter_config.json"
CONFIGS = (CONFIG, ADAPTER, "config.toml")
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Files that hold a vocabulary; without any, transformers 5 makes up a tokenizer that knows no word."""
ENCODER = "0_Transformer"  # the folder of the model in one of sentence-transformers
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.ckpt", "*.index", "*.gguf", "*.npz")
"""Weights under whatever name."""
PROGRAM = "give a checkpoint of transformers or fairseq"
FIRST_BYTES: tuple[tuple[re.Pattern[bytes], str, str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), what, advice)
    for pattern, what, advice in (
        (rb"$", "is empty", "copy it again"),
        (re.escape(LFS_POINTER), "is a Git LFS pointer and not the file itself", "run `git lfs pull` in its folder"),
        (rb"\s*<(!doctype|!DOCTYPE|html|HTML)", "is a web page", "download the file itself"),
        (rb"\x89HDF", "holds weights of Keras or TensorFlow", PROGRAM),
        (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!|.{257}ustar", "is an archive", "unpack it"),
        (rb".{8}\{.*\"data_offsets\"", "holds weights alone", f"give a folder with {CONFIG} beside them"),
    )
)
TORCH_PROGRAMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("OpenNMT-py", ("vocab", "opt", "generator")),
    ("Joey NMT", ("model_state", "best_ckpt_iteration")),
    ("PyTorch Lightning", ("pytorch-lightning_version",)),
    ("OpenAI's Whisper", ("dims", "model_state_dict")),
    ("DeepSpeed", ("ds_version",)),
    ("transformers as a whole Python object", ("transformers.models.",)),
)
"""Programs that write files of torch, by entries or, with a point, packages that their pickles name."""
ADVICE = {
    "DeepSpeed": "make ordinary weights of it with zero_to_fp32.py, which lies beside it",
    "PyTorch Lightning": "save the model inside it with save_pretrained",
    "OpenAI's Whisper": "give the model that transformers has of it, such as openai/whisper-base",
    "transformers as a whole Python object": "save it with save_pretrained in place of torch.save",
}
FOREIGN = {
    "flax_model*.msgpack": ("Flax", "from_flax=True"),
    "tf_model*.h5": ("TensorFlow", "from_tf=True"),
    "*.ckpt*.index": ("TensorFlow", "from_tf=True"),
}
"""Weights that transformers 5 does not read, and the argument with which transformers 4 does."""


Formats = Iterable[tuple[str, Any]]  # checkpoint formats by name, with their `summary` and `recognise`


def no_checkpoint(path: Path, formats: Formats) -> CheckpointError:
    """The error for a path that none of the formats recognises."""
    if not os.path.exists(path):
        return CheckpointError(f"{no_path(path, 'file or directory')}, and it does not look like a hub id (owner/name)")
    listed = "; ".join(f"{name}: {each.summary}" for name, each in formats)
    return CheckpointError(
        _results(path, formats) or diagnose(path, formats) or f"{path} is no checkpoint that headscope knows ({listed})"
    )


def diagnose(path: Path, formats: Formats) -> str | None:
    """Why a file or folder cannot be opened and what to give, in one line. None where nothing explains it."""
    try:
        home = path / ENCODER if (path / ENCODER).is_dir() else path
        return next((cause for sniff in SNIFFERS if (cause := sniff(home, formats))), None)
    except OSError:
        return None


@contextmanager
def explained(path: Path, formats: Formats) -> Iterator[None]:
    """Within the block a CheckpointError about a path says its cause instead, where one is found."""
    try:
        yield
    except CheckpointError as error:
        if cause := diagnose(path, formats):
            raise CheckpointError(cause) from error
        raise


# Files


def _file_of_folder(path: Path, formats: Formats) -> str | None:
    if path.is_file() and not is_lfs_pointer(path) and any(each.recognise(path.parent) for _, each in formats):
        return f"{path} is a file of a checkpoint; give its folder, {path.parent}"
    return None


def _first_bytes(path: Path, formats: Formats) -> str | None:
    if path.suffix in ENGINES:
        return f"{path} is for {ENGINES[path.suffix]}, which runs models; give the checkpoint that it was made of"
    if not path.is_file():
        return None
    head = _head(path)
    return next((f"{path} {what}; {advice}" for pattern, what, advice in FIRST_BYTES if pattern.match(head)), None)


def _other_program(path: Path, formats: Formats) -> str | None:
    if not path.is_file() or not (head := _head(path)).startswith((b"PK\x03\x04", b"\x80")):
        return None
    if re.search(rb"\.(lora_[AB]|lora_embedding_[AB]|base_layer)\.", head):
        return f"{path} holds weights of an adapter (PEFT); merge it in Python with merge_and_unload() and give that"
    program = next((name for name, marks in TORCH_PROGRAMS if all(_names(head, mark) for mark in marks)), None)
    if program is None and first_member(path).startswith(("special:", "decoder_", "encoder_", "Wemb")):
        program = "Marian"
    return program and f"{path} was written by {program}, which headscope does not read; {ADVICE.get(program, PROGRAM)}"


def _names(head: bytes, mark: str) -> bool:
    """Whether a pickle has a text, or a class of a package whose name ends with a point."""
    if mark.endswith("."):
        return re.search(rb"[\nc\x8c].?" + re.escape(mark.encode()), head, re.DOTALL) is not None
    return b"X" + len(mark).to_bytes(4, "little") + mark.encode() in head


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


# Folders


def _pointers(path: Path, formats: Formats) -> str | None:
    """Files of a folder that is cloned without Git LFS."""
    names = _matching(path, (CONFIG, *VOCABULARIES, *(OPENED if _matching(path, OPENED) else WEIGHTS)))
    if pointers := [name for name in names if is_lfs_pointer(path / name)]:
        return f"{path}: {shortlist(pointers)} is a Git LFS pointer; run `git lfs pull` in its folder"
    return None


def _inside(path: Path, formats: Formats) -> str | None:
    """A folder of checkpoints, such as a Trainer's `checkpoint-500`."""
    if not path.is_dir() or _matching(path, OPENED):
        return None
    if found := [str(each) for each in _checkpoints(path, formats)]:
        return f"{path} holds no weights itself; give a checkpoint that lies in it: {shortlist(found)}"
    return None


def _other_weights(path: Path, formats: Formats) -> str | None:
    """Weights of other programs, or under other names, in a folder without any that are read."""
    if not path.is_dir() or _matching(path, OPENED):
        return None
    for pattern, (program, argument) in FOREIGN.items():
        if names := _matching(path, (pattern,)):
            return (
                f"{path} holds weights of {program} alone ({names[0]}); with transformers 4, save them anew: "
                f"AutoModel.from_pretrained({str(path)!r}, {argument}).save_pretrained(DIR)"
            )
    if names := _matching(path, ("adapter_model.*",)):
        return f"{path} holds no model but an adapter of one ({names[0]}), and no {ADAPTER}; merge it into its model"
    if (path / "model.bin").is_file():
        return f"{path} is for CTranslate2, which runs models; give the checkpoint that it was made of"
    if names := _matching(path, WEIGHTS):
        return (
            f"{path} holds weights under names that are not read ({shortlist(names)}); give a folder with {CONFIG} "
            "and model.safetensors or pytorch_model.bin, or a file of fairseq"
        )
    return None


def _without_config(path: Path, formats: Formats) -> str | None:
    if path.is_dir() and not _matching(path, CONFIGS) and (names := _matching(path, OPENED)):
        return f"{path} holds weights ({shortlist(names)}) without {CONFIG}; put that of its architecture beside them"
    return None


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _checkpoints(folder: Path, formats: Formats) -> list[Path]:
    """The checkpoints in a folder and its folders, the largest number first; no optimizer.pt of a Trainer."""

    def recognised(path: Path) -> bool:
        if path.name == STATE or not any(each.recognise(path) for _, each in formats):
            return False
        head = _head(path) if is_torch_file(path) else b""
        return not head or (_names(head, "model") and (_names(head, "args") or _names(head, "cfg")))

    def number(path: Path) -> int:
        digits = re.search(r"(\d{1,18})$", path.stem)
        return int(digits[1]) if digits else -1

    entries = sorted(folder.iterdir(), key=number, reverse=True)
    below = {entry: sorted(entry.iterdir(), key=number, reverse=True) if entry.is_dir() else [] for entry in entries}
    return [
        path for entry, inner in below.items() for path in ([entry] if recognised(entry) else filter(recognised, inner))
    ]


def _text(path: Path, formats: Formats) -> str | None:
    if not path.is_file() or b"\0" in _head(path)[:4096] or path.suffix in {".json", ".toml", ".py", ".gguf"}:
        return None
    return f"{path} is a text; give a checkpoint (a folder with {CONFIG} and weights, a .pt file of fairseq)"


SNIFFERS: tuple[Callable[[Path, Formats], str | None], ...] = (
    *(_file_of_folder, _first_bytes, _other_program),
    *(_pointers, _inside, _other_weights, _without_config, _text),
)
"""Every cause that is looked for, in this order."""


# What headscope has written


def _results(path: Path, formats: Formats) -> str | None:
    for name in RECORDS:
        record = read_record(path / name)
        if isinstance(kind := record.get("kind"), str):
            inside = [str(inner) for inner in _checkpoints(path, formats)]
            instead = f"one that lies in it: {shortlist(inside)}" if inside else "the checkpoint that they are about"
            return f"{path} holds results of headscope ({kind}, {name}), and is no checkpoint; give {instead}"
    return None
