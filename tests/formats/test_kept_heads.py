"""`kept_heads` of a folder that `prune remove` wrote: compared with the weights when it is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headscope.config import Companions
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint, write_checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import plan_removal
from tests.contracts.architectures import BY_NAME, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Llama with 3 heads of 6 in one layer, 6 in the others."""
    model = build(BY_NAME["llama"])
    checkpoint = HuggingFaceCheckpoint(path="llama", model=model, tokenizer=None, digest=None)
    group = [HeadId(Site.DECODER_SELF, 0, head) for head in range(3)]
    shrunk = checkpoint.without_heads(plan_removal(checkpoint.attention_sites, group))
    written = tmp_path_factory.mktemp("kept")
    write_checkpoint(shrunk, written, Companions())
    return written


DAMAGED_NUMBERS: tuple[Any, ...] = (
    [9, 9, 9],
    [3, 4, 4],
    [-1, 4, 5],
    [3, 4],
    [3, 4, 5, 0],
    [3, 4, "5"],
    [0, True, 3],
)
DAMAGED_NUMBERS += ([3, 4, 5.0], [3, 4, None], [3, 4, [5]], None, "345", 3, {"a": 3})
KEPT = {"decoder-self": {"0": [3, 4, 5], "1": [0, 1, 2, 3, 4, 5]}}
DAMAGED: list[Any] = [
    *({"decoder-self": {**KEPT["decoder-self"], "0": numbers}} for numbers in DAMAGED_NUMBERS),
    {"decoder-self": {"0": [3, 4, 5]}},
    {"decoder-self": {**KEPT["decoder-self"], "7": [0]}},
    {"decoder-self": {**KEPT["decoder-self"], "x": [0]}},
    *({"encoder-self": KEPT["decoder-self"]}, {"0": [9, 9, 9]}, {"decoder-self": [[3, 4, 5]]}, {}, [], "x", 3, None),
]


@pytest.mark.parametrize("kept", DAMAGED, ids=repr)
def test_damaged_numbers_of_heads_are_one_line(folder: Path, tmp_path: Path, kept: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["kept_heads"] == KEPT
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config | {"kept_heads": kept}))
    with pytest.raises(CheckpointError, match=r"kept_heads.*config\.json") as refused:
        open_checkpoint(str(tmp_path / "damaged"))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400 + len(str(tmp_path))


def test_heads_are_counted_as_the_first_checkpoint_did(folder: Path) -> None:
    checkpoint: Any = open_checkpoint(str(folder))
    smaller = checkpoint.without_heads(plan_removal(checkpoint.attention_sites, [HeadId(Site.DECODER_SELF, 0, 1)]))
    assert smaller.config.kept_heads == {"decoder-self": {"0": [3, 5], "1": [0, 1, 2, 3, 4, 5]}}
