"""Tests that compare with the original programs do not pass silently in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.makers.shared import shared_folder


def test_the_folder_is_named_or_beside_the_repository(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    assert shared_folder({"HEADSCOPE_SHARED": str(tmp_path / "named"), "CI": "1"}, tmp_path) == tmp_path / "named"
    assert shared_folder({"CI": "1"}, tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["CI", "HEADSCOPE_SHARED"])
def test_a_missing_folder_fails_in_ci_and_where_it_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="HEADSCOPE_SHARED names their folder"):
        shared_folder({name: str(tmp_path / "nothing")}, tmp_path / "nothing")


def test_elsewhere_such_tests_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="are not in"):
        shared_folder({}, tmp_path / "nothing")
