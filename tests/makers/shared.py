"""The checkpoints and numbers of the original programs that are too large to ship."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def shared_folder(environment: Mapping[str, str], beside: Path) -> Path:
    """Their folder; where it is missing, tests fail if CI or HEADSCOPE_SHARED is set, and are skipped elsewhere."""
    folder = Path(environment.get("HEADSCOPE_SHARED") or beside)
    if not folder.is_dir():
        missing = f"the checkpoints of the original programs are not in {folder}; HEADSCOPE_SHARED names their folder"
        if environment.get("HEADSCOPE_SHARED") or environment.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return folder
