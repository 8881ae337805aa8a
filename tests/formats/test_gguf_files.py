"""GGUF files, opened: the same numbers as of the folder that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from headscope.assets import sample
from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.pruning.engines.gguf_layers import LlamaDecoder
from headscope.pruning.engines.gguf_writer import write_gguf
from tests.makers import decoders

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    whole = open_checkpoint(str(decoders.saved(folder / "whole", tokenizer=decoders.byte_level())))
    write_gguf(LlamaDecoder(whole), whole.tokenizer, folder / "model.gguf")  # type: ignore[attr-defined]
    return folder / "model.gguf"


@pytest.mark.slow
def test_heads_are_those_of_the_folder_that_transformers_makes(file: Path, tmp_path: Path, command: Command) -> None:
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    made.hf_quantizer = None
    vars(made.config).pop("quantization_config", None)
    made.save_pretrained(tmp_path / "folder")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path / "folder")
    tables = []
    for path in (file, tmp_path / "folder"):
        more = ("--source", sample("en"), "--max-sentences", 6, "--only", "confidence,entropy,sink", "--device", "cpu")
        status, _, err = command("analyze", path, *more, "--out", tmp_path / f"of-{path.name}")
        assert (status, "it/s" in err) == (0, False), err
        tables.append((tmp_path / f"of-{path.name}" / "heads.csv").read_bytes())
    assert tables[0] == tables[1]
    signature = json.loads((tmp_path / "of-model.gguf" / "run.json").read_text())["signature"]
    assert "ckpt:gguf-sha256=" in signature and "dtype:float32 of F32" in signature


@pytest.mark.parametrize("cut", [100, 5000])
def test_a_cut_file_is_refused_in_one_line(file: Path, tmp_path: Path, cut: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="truncated or broken GGUF") as caught:
        open_checkpoint(str(tmp_path / "cut.gguf"))
    assert "\n" not in str(caught.value)
