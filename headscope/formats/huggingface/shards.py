"""The weights files that an index names: those of its own folder, and nothing else of the machine.

An index (`model.safetensors.index.json`) comes with a checkpoint, from whoever made it, and transformers opens whatever
path it says.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from headscope.errors import CheckpointError
from headscope.files.reading import read_object

INDEX = "*.index.json"


def check_shards(folder: Path) -> None:
    """CheckpointError where an index of a folder is malformed, or names a file that lies elsewhere.

    Files of the hub's cache are links from `snapshots/REVISION` to `blobs` beside `snapshots`; others may be links
    within the folder alone.
    """
    for index in sorted(folder.glob(INDEX)):
        shards = read_object(index, error=CheckpointError).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index} has no weight_map of names of files; fetch the checkpoint again")
        for name in sorted(set(shards.values())):
            if not _is_inside(folder, name):
                raise CheckpointError(
                    f"{index} names {name[:100]!r}, which lies outside its folder; the weights of a checkpoint have "
                    "to be files of its own folder: copy them there, or fetch the checkpoint again"
                )


def _is_inside(folder: Path, name: str) -> bool:
    paths = PurePosixPath(name), PureWindowsPath(name)
    if "\0" in name or any(path.is_absolute() or path.drive or ".." in path.parts for path in paths):
        return False
    home, file = folder.resolve(), (folder / name).resolve()
    of_cache = home.parent.name == "snapshots" and file.parent == home.parent.parent / "blobs"
    return file.is_relative_to(home) or of_cache
