"""Hugging Face checkpoints: any architecture of transformers 5 that calls the attention interface.

The model is used as it is. transformers fills what a weights file lacks with fresh random numbers and
says so in a log line at most, so every missing, left-over and mismatched weight is checked here.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from headscope.bounds import MOST_LAYERS
from headscope.config import Companions
from headscope.data.encoded import Encoded
from headscope.data.syntax import piece_spans
from headscope.errors import CheckpointError, DataError
from headscope.files.reading import exists, is_file, read_json
from headscope.formats.base import FORMATS, CheckpointFormat, SideName, file_digest
from headscope.formats.huggingface.generation import Predicting
from headscope.formats.huggingface.selfcontained import is_narrowed, narrowed_class
from headscope.model.discovery import text_config
from headscope.model.interface import suppress_warnings

WEIGHTS = ("*.safetensors", "*.bin")
# Files that hold a vocabulary; without any, transformers 5 makes up a tokenizer that knows no word.
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
# Weights that a checkpoint may lack without any head being affected: the pooler is trained with a task.
_MAY_BE_MISSING = re.compile(r"(^|\.)pooler\.")
_LAYER = re.compile(r"\.\d+\.")


class HuggingFaceCheckpoint(Predicting):
    """A transformers model with its tokenizer (None where there is none; `without` says why)."""

    def __init__(
        self, *, path: str, model: nn.Module, tokenizer: Any, digest: str | None, without: str = "there is none"
    ) -> None:
        config: Any = model.config
        self.config = config
        super().__init__(path=path, format="huggingface", model=model, model_type=self.config.model_type, digest=digest)
        self.tokenizer = tokenizer
        self._without = without
        self._special = _special_ids(tokenizer) if tokenizer else frozenset()

    @property
    def two_sided(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def limit(self) -> int | None:
        if self._reads != "input_ids":
            return None
        text = text_config(self.config)
        limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
        known = [int(number) - self._first_position() for number in limits if number]
        known.append(getattr(self.tokenizer, "model_max_length", None) or 10**9)
        return min(known) if min(known) < 10**9 else None

    def _first_position(self) -> int:
        """How many positions are never used: RoBERTa and its like count from behind their padding id."""
        for name, part in self.model.named_modules():
            if "position" in name and isinstance(part, nn.Embedding) and part.padding_idx is not None:
                return part.padding_idx + 1
        return 0

    @property
    def vocabulary(self) -> int:
        return max(len(self._tokenizer()), int(text_config(self.config).vocab_size))

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        given = {"text": list(texts)} if side == "source" else {"text_target": list(texts)}
        tokenizer = self._tokenizer()
        whole = tokenizer(**given, verbose=False)["input_ids"]
        if any(len(ids) > limit for ids in whole):
            fitting = tokenizer(**given, truncation=True, max_length=limit, verbose=False)["input_ids"]
        else:
            fitting = whole
        size = int(text_config(self.config, target=side == "target").vocab_size)
        encoded = []
        for text, ids, full in zip(texts, fitting, whole, strict=True):
            if not ids:
                raise DataError(f"the tokenizer makes nothing of the line {text[:60]!r}")
            if max(ids) >= size:
                raise CheckpointError(
                    f"{self.path}: its tokenizer gives id {max(ids)}, and the model has {size} embeddings; "
                    "take the tokenizer that the model was trained with"
                )
            inputs = self._shifted(ids) if side == "target" else list(ids)
            special = [number in self._special for number in inputs]
            if side == "target":
                special[0] = True
            unknown = sum(pair == (tokenizer.unk_token_id, False) for pair in zip(inputs, special, strict=True))
            encoded.append(Encoded(inputs, special, len(full) - len(ids), unknown))
        return encoded

    def _shifted(self, labels: list[int]) -> list[int]:
        """The decoder's inputs: labels moved right by one, as the model itself does it."""
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        start = self.config.decoder_start_token_id
        if shift is not None and (start is not None or self.model_type == "mbart"):
            found: list[int] = shift(labels=torch.tensor([labels]))[0].tolist()
            return found
        if start is None:
            raise CheckpointError(f"{self.path} says no decoder_start_token_id; add it to config.json")
        return [start, *labels[:-1]]

    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:
        return piece_spans(self._tokenizer(), text, ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        found: list[str] = self._tokenizer().convert_ids_to_tokens(list(ids))
        return found

    def id_of(self, piece: str) -> int | None:
        found: int | None = self._tokenizer().get_vocab().get(piece)
        return found

    def plain_ids(self) -> list[int]:
        size = int(text_config(self.config).vocab_size)
        known = set(self._tokenizer().get_vocab().values()) if self.tokenizer else set(range(size))
        return sorted(number for number in known - self._special if number < size)

    def start_ids(self) -> list[int]:
        ids = self._tokenizer()("a")["input_ids"]
        first = next((place for place, number in enumerate(ids) if number not in self._special), 0)
        return list(ids[:first])

    def facts(self) -> dict[str, Any]:
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

    @property
    def _reads(self) -> str:
        """What the model's main input is called: text models read input_ids."""
        return str(getattr(self.model, "main_input_name", "input_ids"))

    def _tokenizer(self) -> Any:
        if self._reads != "input_ids":
            raise CheckpointError(
                f"{self.path} (model type {self.model_type!r}) takes {self._reads}, not text, so there is nothing to "
                "analyse a text with; `headscope show` and headscope.model.capture work on it"
            )
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path} has no tokenizer, so it cannot read text ({self._without}); "
                "put its tokenizer files beside the weights"
            )
        return self.tokenizer


class HuggingFaceFormat(CheckpointFormat):
    """A directory with config.json and safetensors or .bin weights, or a hub id."""

    name = "huggingface"
    summary = "a directory with config.json (with a model_type) and *.safetensors or *.bin, or a hub id"

    def recognise(self, path: Path) -> bool:
        if not is_file(path / "config.json"):
            return False
        try:
            config = read_json(path / "config.json")
        except DataError:
            return True  # not JSON: `load` says so
        return isinstance(config, dict) and "model_type" in config

    def recognise_name(self, name: str) -> bool:
        return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> HuggingFaceCheckpoint:
        options = {"trust_remote_code": False, "local_files_only": not _hub_answers(path)}
        with _quiet(path):
            config = AutoConfig.from_pretrained(path, **options)
            _check_depth(config)
            plain = _model_class(path, config)
            model, info = (narrowed_class(plain) if is_narrowed(config) else plain).from_pretrained(
                path,
                config=config,
                dtype=_dtype(dtype, config, device),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                **options,
            )
        _check_weights(path, info)
        tokenizer, without = _open_tokenizer(path, options)
        return HuggingFaceCheckpoint(
            path=path,
            model=model.to(device).eval(),
            tokenizer=tokenizer,
            digest=_digest(path),
            without=without,
        )


FORMATS.register("huggingface", HuggingFaceFormat(), where=__name__)


def _check_depth(config: Any) -> None:
    """Refuse a config of absurdly many layers, which would be built before any weight is looked at."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"):
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise CheckpointError(f"config.json says {name} {layers}; at most {MOST_LAYERS} are believed")


def _hub_answers(path: str) -> bool:
    """Whether to ask the hub: transformers itself would try an absent network for half a minute."""
    if exists(path):
        return False
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(path, timeout=10)
    except HfHubHTTPError:
        return True  # it answers that there is no such model: transformers says so
    except Exception:  # no network, whatever the client raises then
        return False
    return True


def _model_class(path: str, config: Any) -> Any:
    """The class that config.json names (with its task head), or the plain model where it names none."""
    named = config.architectures or [None]
    known: Any = getattr(transformers, str(named[0]), None) if isinstance(named, list) else None
    if known is None:
        return AutoModel
    if not (inspect.isclass(known) and issubclass(known, PreTrainedModel)):
        raise CheckpointError(f"{path}: config.json names the architecture {named[0]}, which is no model")
    return known


def _dtype(asked: str, config: Any, device: str) -> torch.dtype:
    """`auto` is what the checkpoint stores, but float32 on a CPU, where half precision is slow and coarse."""
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if device == "cpu" else stored


def _check_weights(path: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights do not fill the model that its config describes."""
    if mismatched := sorted(_mismatch(entry) for entry in info["mismatched_keys"]):
        raise CheckpointError(_disagree(path, "of another size than config.json says", mismatched))
    missing = sorted(key for key in info["missing_keys"] if not _MAY_BE_MISSING.search(key))
    if missing:
        raise CheckpointError(_disagree(path, "missing", missing))
    if extra := sorted(key for key in info["unexpected_keys"] if _LAYER.search(f".{key}.")):
        raise CheckpointError(_disagree(path, "left over (does config.json say fewer layers?)", extra))


def _mismatch(entry: Any) -> str:
    """`name (5×7, config.json: 5×11)` of transformers' (name, size in the file, size in the model)."""
    if not (isinstance(entry, tuple) and len(entry) == 3):
        return str(entry)
    name, *sizes = entry
    there, wanted = ("×".join(map(str, size)) for size in sizes)
    return f"{name} ({there}, config.json: {wanted})"


def _disagree(path: str, how: str, keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{path}: weights are {how}: {', '.join(keys[:3])}{more}; config.json and the weights file must agree"


def _open_tokenizer(path: str, options: dict[str, bool]) -> tuple[Any, str]:
    """The tokenizer, or None and the reason."""
    try:
        with _quiet(path):
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except CheckpointError as error:
        found = _has_vocabulary(path)
        return None, str(error).removeprefix(f"{path} ") if found else "it has no vocabulary file"
    if type(tokenizer).vocab_files_names and not _has_vocabulary(path):
        return None, "it has no vocabulary file"
    return tokenizer, ""


def _has_vocabulary(path: str) -> bool:
    folder = _folder(path)
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def _folder(path: str) -> Path:
    """The directory of a checkpoint: itself, or where the hub's files are kept."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    from transformers.utils import cached_file

    return Path(cached_file(path, "config.json", local_files_only=True)).parent


def _digest(path: str) -> str:
    folder = _folder(path)
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

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with suppress_warnings(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch, of foreign pickles
            yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {_one_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    """What is wrong and what to do, for what transformers and torch raise at broken checkpoints."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text or "custom code" in text:
        return "it needs program code of its own, which headscope never runs; take a model type of transformers"
    if unknown := re.search(r"model type `(.*?)` but Transformers does not recognize", text):
        return f"model type {unknown[1]!r} is unknown to transformers {transformers.__version__}"
    if foreign := re.search(r"GLOBAL (\S+)", text):
        return (
            f"its weights file holds a Python object ({foreign[1]}), and headscope runs nothing that a "
            "checkpoint brings; save the weights as safetensors"
        )
    if "Safetensor" in type(error).__name__ or _while_unpickling(error):
        return f"its weights file is truncated or broken ({text.rpartition('error: ')[2][:100]}); fetch it again"
    if "no file named" in text:
        return "there is no weights file; put model.safetensors or pytorch_model.bin beside config.json"
    if isinstance(error, OSError) and "connect" in text.lower():
        return "it is no local directory, and the model hub cannot be reached; check the path or the connection"
    if isinstance(error, json.JSONDecodeError):
        return f"one of its json files is broken ({text})"
    if isinstance(error, AttributeError):
        return f"its config.json does not fit the architecture that it names ({text})"
    if isinstance(error, KeyError):
        return f"its json files hold or lack the entry {text}, which transformers cannot go on with"
    return text if len(text) <= 300 else text[:300] + "…"


def _while_unpickling(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parts[-2:] == ("torch", "serialization.py") for frame in frames)
