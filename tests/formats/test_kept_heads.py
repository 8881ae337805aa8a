"""`kept_heads` of a folder that `prune remove` wrote: the numbers that its heads had at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headscope.config import Companions
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


def test_heads_are_counted_as_the_first_checkpoint_did(folder: Path) -> None:
    checkpoint: Any = open_checkpoint(str(folder))
    smaller = checkpoint.without_heads(plan_removal(checkpoint.attention_sites, [HeadId(Site.DECODER_SELF, 0, 1)]))
    assert smaller.config.kept_heads == {"decoder-self": {"0": [3, 5], "1": [0, 1, 2, 3, 4, 5]}}
