"""Digests of weights in the records of the folders that headscope writes: formats of others have no checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError
from headscope.files.output_checks import RECORDS
from headscope.files.reading import file_digest, read_record
from headscope.files.zips import is_zip, zip_damage

OPENED = ("model*.safetensors", "pytorch_model*.bin")
"""Weights as transformers reads them."""
ENTRY = "sha256"


def digests_of(folder: Path) -> dict[str, Any]:
    """The entry of a record with the digests of all weights below a folder; empty where there are none."""
    files = sorted(file for pattern in OPENED for file in folder.rglob(pattern))
    return {ENTRY: {file.relative_to(folder).as_posix(): file_digest([file]) for file in files}} if files else {}


def refuse_changed_weights(folder: Path) -> None:
    """CheckpointError where weights are not those that the record beside them, or above, has the digest of.

    Where there is no record, the members of zip files are compared with their checksums.
    """
    recorded = dict(_recorded(folder))
    for file in sorted(file for pattern in OPENED for file in folder.glob(pattern)):
        record, digest = recorded.get(file.name, (None, None))
        if record is not None and file_digest([file]) != digest:
            raise CheckpointError(
                f"{file} is damaged, or was changed after headscope wrote it; copy it again, or take the entry "
                f"`{ENTRY}` out of {record} if you changed it"
            )
        if record is None and is_zip(file) and (damage := zip_damage(file)):
            raise CheckpointError(f"{file} is truncated or broken ({damage}); fetch it again")


def _recorded(folder: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Names of weights of a folder with the record that has their digest, and the digest."""
    for home in (folder.parent, folder):
        for record in (home / name for name in RECORDS):
            digests = read_record(record).get(ENTRY)
            for name, digest in digests.items() if isinstance(digests, dict) else ():
                if isinstance(name, str) and (home / name).parent == folder:
                    yield Path(name).name, (record, digest)
