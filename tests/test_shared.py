"""Tests that compare with the original programs do not pass silently in CI, and what ships of them is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.formats.pickles import read_tensors, read_torch
from scripts.cut_fixtures import CUTS
from tests.makers.shared import SHIPPED


@pytest.mark.parametrize("name", CUTS)
def test_what_ships_is_cut_out_of_the_whole(name: str, shared: Path, tmp_path: Path) -> None:
    CUTS[name](shared / "oracles" / name, tmp_path / name)
    files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {path.relative_to(SHIPPED) for path in (SHIPPED / name).rglob("*") if path.is_file()}
    for file in files:
        np.testing.assert_equal(content(SHIPPED / file), content(tmp_path / file), err_msg=str(file))


def content(path: Path) -> Any:
    """What a file holds, however the installed versions of zlib and torch pack it."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".pt":
        read = read_torch(path)
        arrays = {key: tensor.numpy() for key, tensor in read_tensors(path, read["model"]).items()}
        return {"args": vars(read["args"]), **arrays}
    return path.read_bytes()
