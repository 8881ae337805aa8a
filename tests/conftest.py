"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: a second thread only waits


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data beside the repository, or where HEADSCOPE_SHARED says."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("HEADSCOPE_SHARED", root.parent / "shared"))
    if not folder.is_dir():
        pytest.skip("the shared data are not there; HEADSCOPE_SHARED names their folder")
    return folder
