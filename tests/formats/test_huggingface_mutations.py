"""Hundreds of damaged Hugging Face directories: each opens, or is refused in one line; nothing else happens.

safetensors carries no checksum, so a flipped bit inside a weight is a different weight that nothing can
notice; whatever else is damaged must not end in a traceback, a hang or a full memory.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from headscope.errors import HeadscopeError
from headscope.formats.base import open_checkpoint
from tests.contracts.architectures import BY_NAME, build
from tests.oracles.mutations import mutated

pytestmark = pytest.mark.slow

FILES = {"model.safetensors": 60, "config.json": 60, "pytorch_model.bin": 30}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    model = build(BY_NAME["bert"])
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_open_or_are_refused_in_one_line(whole: Path, tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    data = (whole / name).read_bytes()
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
    refused = 0
    for _ in range(FILES[name]):
        (folder / name).write_bytes(mutated(data, rng.choice(["flipped", "head", "bytes", "truncated"]), rng))
        began = time.process_time()
        try:
            open_checkpoint(str(folder), device="cpu").layout  # noqa: B018
        except HeadscopeError as error:
            refused += 1
            assert "\n" not in " ".join(str(error).split()) and len(str(error)) < 2000
        assert time.process_time() - began < 20
    assert refused > FILES[name] / 10
