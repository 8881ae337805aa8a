"""GGUF files of llama.cpp, which transformers dequantises into the class that they were made from."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import AbstractContextManager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from headscope.config import Companions
from headscope.errors import CheckpointError
from headscope.files.reading import file_digest
from headscope.formats.base import FORMATS
from headscope.formats.huggingface.format import FolderFormat

if TYPE_CHECKING:
    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

MAGIC = b"GGUF"


class GgufFormat(FolderFormat):
    """A GGUF file; it is written as a Hugging Face folder, or with `--export gguf` as a GGUF file again."""

    name = "gguf"
    summary = "a *.gguf file of a language model that transformers can dequantise (needs the package gguf)"

    def recognise(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                return file.read(4) == MAGIC
        except OSError:
            return False

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> HuggingFaceCheckpoint:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
        from headscope.formats.huggingface.opening import loading, ready

        file = Path(path)
        file_type, single_read = read_once(file)
        with loading(path), single_read, redirect_stderr(io.StringIO()):  # a progress bar that nothing else silences
            where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
            compute_dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=compute_dtype, **where)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        model.hf_quantizer = None  # the weights are plain now, and saved as such
        vars(model.config).pop("quantization_config", None)
        checkpoint = HuggingFaceCheckpoint(
            path=path, model=ready(model, device), tokenizer=tokenizer, digest=file_digest([file])
        )
        checkpoint.format, checkpoint.quantization = self.name, file_type
        return checkpoint


def read_once(path: Path) -> tuple[str, AbstractContextManager[Any]]:
    """The type of most weights of a GGUF file, such as Q4_K, and a context in which transformers uses this one parse.

    It would parse the file three times, and index all names for every module. CheckpointError for a broken file.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path} is a GGUF file, which needs the package gguf: pip install gguf") from None

    class Reader(gguf.GGUFReader):
        """A reader whose `data` is a plain array: slices of a memmap run Python code, and there are a million."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    try:
        reader, sizes = Reader(path), Counter[str]()
        for tensor in reader.tensors:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    except Exception as error:  # whatever the reader raises at a cut or damaged file
        why = type(error).__name__
        raise CheckpointError(f"{path} is a truncated or broken GGUF file ({why}); fetch it again") from None
    if not sizes:
        raise CheckpointError(f"{path} holds no weights; give the GGUF file of a model")
    names = cache(gguf.get_tensor_name_map)
    single_read = patch.multiple(gguf, GGUFReader=lambda _: reader, get_tensor_name_map=names)
    return sizes.most_common(1)[0][0], single_read


FORMATS.register("gguf", GgufFormat(), where=__name__)
