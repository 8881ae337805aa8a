"""Tests that compare with the original programs do not pass silently in CI, and what ships of them is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.formats.pickles import read_tensors, read_torch
from tests.makers.cut_fixtures import CUTS
from tests.makers.shared import SHIPPED, shared_folder


def test_the_folder_is_named_or_beside_the_repository(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    assert shared_folder({"HEADSCOPE_SHARED": str(tmp_path / "named"), "CI": "1"}, tmp_path) == tmp_path / "named"
    assert shared_folder({"CI": "1"}, tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["CI", "HEADSCOPE_SHARED"])
def test_a_missing_folder_fails_in_ci_and_where_it_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="HEADSCOPE_SHARED"):
        shared_folder({name: str(tmp_path / "nothing")}, tmp_path / "nothing")


def test_elsewhere_such_tests_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception):
        shared_folder({}, tmp_path / "nothing")


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
