"""What is said of a path that is no checkpoint: which formats there are, or what headscope has written there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headscope.errors import CheckpointError, shortlist
from headscope.files.output_checks import RECORDS
from headscope.files.reading import read_record

ENGINES = {".gguf": "llama.cpp", ".onnx": "onnxruntime", ".tflite": "LiteRT", ".mlpackage": "Core ML"}
"""Files that programs run, by how their names end."""
STATE = "state.pt"
"""What a run goes on from: a file of torch, as checkpoints of fairseq are."""


class Format(Protocol):
    """What is asked of a format here."""

    summary: ClassVar[str]

    def recognise(self, path: Path) -> bool:
        """Whether the file or directory is of this format."""


def no_checkpoint(path: Path, formats: Mapping[str, Format]) -> CheckpointError:
    """The error for a path that none of the formats recognises."""
    for name in RECORDS:
        record = read_record(path / name)
        if isinstance(kind := record.get("kind"), str):
            return CheckpointError(
                f"{path} holds results of headscope ({kind}, {name}), and is no checkpoint; "
                f"{_instead(record, _inside(path, formats))}"
            )
    if path.suffix in ENGINES:
        return CheckpointError(
            f"{path} is for {ENGINES[path.suffix]}, which runs models; give the checkpoint that it was made of"
        )
    listed = "; ".join(f"{name}: {each.summary}" for name, each in formats.items())
    return CheckpointError(f"{path} is no checkpoint that headscope knows ({listed})")


def _inside(folder: Path, formats: Mapping[str, Format]) -> list[Path]:
    """The checkpoints that lie in a folder of results: folders, and files of formats that have one, in those too."""

    def recognised(path: Path) -> bool:
        return path.name != STATE and any(each.recognise(path) for each in formats.values())

    found = []
    for entry in sorted(folder.iterdir()):
        if recognised(entry):
            found.append(entry)
        elif entry.is_dir():
            found += filter(recognised, sorted(entry.iterdir()))
    return found


def _instead(record: Mapping[str, Any], inside: list[Path]) -> str:
    """What to give in the place of results: a checkpoint among them, or the one that they are about."""
    if inside:
        return f"give one that lies in it: {shortlist([str(folder) for folder in inside])}"
    source = record.get("checkpoint", record.get("source"))
    about = source.get("path") if isinstance(source, Mapping) else source
    return f"give the one that they are about, {about}" if isinstance(about, str) else "give a checkpoint"
