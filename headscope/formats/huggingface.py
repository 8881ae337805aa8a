"""Hugging Face checkpoints: any architecture of transformers 5 that calls the attention interface.

The model is used as it is. transformers fills what a weights file lacks with fresh random numbers and
says so in a log line at most, so every missing, left-over and mismatched weight is checked here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from headscope.data import Batch, Encoded
from headscope.errors import CheckpointError, DataError
from headscope.formats.base import FORMATS, Checkpoint, CheckpointFormat, SideName, file_digest
from headscope.model.places import base_of, walking
from headscope.syntax import piece_spans

WEIGHTS = ("*.safetensors", "*.bin")
# Weights that a checkpoint may lack without any head being affected: the pooler is trained with a task.
_MAY_BE_MISSING = re.compile(r"(^|\.)pooler\.")
_LAYER = re.compile(r"\.\d+\.")


class HuggingFaceCheckpoint(Checkpoint):
    """A transformers model with its tokenizer (None where the directory has none)."""

    def __init__(self, *, path: str, model: nn.Module, tokenizer: Any, digest: str) -> None:
        config: Any = model.config
        self.config = config
        super().__init__(path=path, format="huggingface", model=model, model_type=self.config.model_type, digest=digest)
        self.tokenizer = tokenizer
        self._special = _special_ids(tokenizer) if tokenizer else frozenset()

    @property
    def two_sided(self) -> bool:  # noqa: D102
        return bool(self.config.is_encoder_decoder)

    @property
    def limit(self) -> int | None:  # noqa: D102
        text = self.config.get_text_config(decoder=False)
        limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
        limits.append(getattr(self.tokenizer, "model_max_length", None))
        known = [int(number) for number in limits if number and number < 10**9]
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        offset = next((t.padding_idx + 1 for t in tables if t.padding_idx and t.num_embeddings in known), 0)
        return min(known) - offset if known else None

    @property
    def vocabulary(self) -> int:  # noqa: D102
        return max(int(self.config.get_text_config(decoder=False).vocab_size), len(self._tokenizer()))

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:  # noqa: D102
        given = {"text": list(texts)} if side == "source" else {"text_target": list(texts)}
        tokenizer = self._tokenizer()
        whole = tokenizer(**given, verbose=False)["input_ids"]
        if any(len(ids) > limit for ids in whole):
            fitting = tokenizer(**given, truncation=True, max_length=limit, verbose=False)["input_ids"]
        else:
            fitting = whole
        encoded = []
        for text, ids, full in zip(texts, fitting, whole, strict=True):
            if not ids:
                raise DataError(f"the tokenizer makes nothing of the line {text[:60]!r}")
            inputs = self._shifted(ids) if side == "target" else list(ids)
            special = [number in self._special for number in inputs]
            if side == "target":
                special[0] = True
            encoded.append(Encoded(inputs, special, len(full) - len(ids)))
        return encoded

    def _shifted(self, labels: list[int]) -> list[int]:
        """The decoder's inputs: labels moved right by one, as the model itself does it."""
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            found: list[int] = shift(labels=torch.tensor([labels]))[0].tolist()
            return found
        start = self.config.decoder_start_token_id
        if start is None:
            raise CheckpointError(f"{self.path} says no decoder_start_token_id; add it to config.json")
        return [start, *labels[:-1]]

    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:  # noqa: D102
        return piece_spans(self._tokenizer(), text, ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:  # noqa: D102
        found: list[str] = self._tokenizer().convert_ids_to_tokens(list(ids))
        return found

    def id_of(self, piece: str) -> int | None:  # noqa: D102
        found: int | None = self._tokenizer().get_vocab().get(piece)
        return found

    def plain_ids(self) -> list[int]:  # noqa: D102
        size = int(self.config.get_text_config(decoder=True).vocab_size)
        known = set(self._tokenizer().get_vocab().values()) if self.tokenizer else set(range(size))
        return sorted(number for number in known - self._special if number < size)

    def start_ids(self) -> list[int]:  # noqa: D102
        ids = self._tokenizer()("a")["input_ids"]
        first = next((place for place, number in enumerate(ids) if number not in self._special), 0)
        return list(ids[:first])

    def forward(self, batch: Batch) -> None:  # noqa: D102
        source = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
        if not self.two_sided:
            base_of(self.model)(**source, use_cache=False)
        elif batch.target is None:
            with walking(self.model):
                self.model.get_encoder()(**source)  # type: ignore[operator]
        else:
            target = {
                "decoder_input_ids": batch.target.ids,
                "decoder_attention_mask": batch.target.real.long(),
            }
            base_of(self.model)(**source, **target, use_cache=False)

    def facts(self) -> dict[str, Any]:  # noqa: D102
        tokenizer = None
        if self.tokenizer:
            tokenizer = {
                "class": type(self.tokenizer).__name__,
                "vocabulary": len(self.tokenizer),
                "special": sorted(self.tokenizer.convert_ids_to_tokens(sorted(self._special))),
            }
        return {
            "architecture": type(self.model).__name__,
            "model_type": self.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "limit": self.limit,
            "tokenizer": tokenizer,
        }

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path} has no tokenizer, so it cannot read text; put its tokenizer files beside the weights"
            )
        return self.tokenizer


class HuggingFaceFormat(CheckpointFormat):
    """A directory with config.json and safetensors or .bin weights, or a hub id."""

    name = "huggingface"
    summary = "a directory with config.json (with a model_type) and *.safetensors or *.bin, or a hub id"

    def recognise(self, path: Path) -> bool:  # noqa: D102
        try:
            return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False

    def recognise_name(self, name: str) -> bool:  # noqa: D102
        return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None

    def load(self, path: str, *, device: str, dtype: str) -> HuggingFaceCheckpoint:  # noqa: D102
        with _quiet(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            model, info = _model_class(config).from_pretrained(
                path,
                config=config,
                dtype=_dtype(dtype, config, device),
                output_loading_info=True,
                trust_remote_code=False,
            )
        _check_weights(path, info)
        return HuggingFaceCheckpoint(
            path=path, model=model.to(device).eval(), tokenizer=_open_tokenizer(path), digest=_digest(path)
        )


FORMATS.register("huggingface", HuggingFaceFormat(), where=__name__)


def _model_class(config: Any) -> Any:
    """The class that config.json names (with its task head), or the plain model where it names none."""
    named = (config.architectures or [None])[0]
    return getattr(transformers, named, AutoModel) if named else AutoModel


def _dtype(asked: str, config: Any, device: str) -> torch.dtype:
    """`auto` is what the checkpoint stores, but float32 on a CPU, where half precision is slow and coarse."""
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if device == "cpu" else stored


def _check_weights(path: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights do not fill the model that its config describes."""
    if mismatched := sorted(
        str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]
    ):
        raise CheckpointError(_disagree(path, "of another size than config.json says", mismatched))
    missing = sorted(key for key in info["missing_keys"] if not _MAY_BE_MISSING.search(key))
    if missing:
        raise CheckpointError(_disagree(path, "missing", missing))
    if extra := sorted(key for key in info["unexpected_keys"] if _LAYER.search(f".{key}.")):
        raise CheckpointError(_disagree(path, "left over (does config.json say fewer layers?)", extra))


def _disagree(path: str, how: str, keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{path}: weights are {how}: {', '.join(keys[:3])}{more}; config.json and the weights file must agree"


def _open_tokenizer(path: str) -> Any:
    try:
        with _quiet(path):
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except CheckpointError:
        return None


def _digest(path: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(cached_file(path, "config.json")).parent
    files = [folder / "config.json"]
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return file_digest([*files, *found])
    return file_digest(files)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for no text: start, end, padding, separators; the unknown piece does stand for text."""
    special = set(tokenizer.all_special_ids)
    names = ("bos", "eos", "sep", "cls", "pad", "mask")
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    unknown = tokenizer.unk_token_id
    return frozenset(special if unknown in others else special - {unknown})


@contextmanager
def _quiet(path: str) -> Iterator[None]:
    """Keep transformers' log lines and progress bars away; turn what it raises into one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {_one_line(error)}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    if "Safetensor" in type(error).__name__ or "PytorchStreamReader" in str(error):
        return f"its weights file is truncated or broken ({error})"
    if isinstance(error, OSError) and "connect" in str(error).lower():
        return "it is no local directory, and the model hub cannot be reached"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
