"""Checkpoints of story-of-heads (Voita et al. 2019): an .npz of arrays, hyper-parameters, vocabulary pickles.

- Hyper-parameters come from `--hp FILE` (default: hp.json or hp.toml beside it), then from the arrays.
- Trained gates stay gates: `log_a` is the mixing "hard-concrete.v1" with its noiseless value, unless the
  hyper-parameters name other `concrete_heads`.
- Arrays that belong to no part of the model are an error; the original program ignores them and computes another model.
- Vocabularies are `src.voc` and `dst.voc`, or `src.voc.txt` and `dst.voc.txt` with a token a line.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.config import Companions
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import CheckpointError, ConfigError, DataError, flag, restate
from headscope.files.archives import Arrays, first_member, zip_damage
from headscope.files.reading import file_digest, read_bytes, read_text
from headscope.files.writing import write_atomically
from headscope.formats.base import FORMATS, CheckpointFormat, SavedFiles
from headscope.formats.native import NATIVE
from headscope.formats.pickles import StubType, read_pickle
from headscope.formats.story_of_heads.model import LOSS, SOURCE, Shape, array_rules, read_arrays, read_hp, shape_of
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, build_transformer
from headscope.model.native.beams import STORY_SEARCH

BEGIN, END, UNKNOWN = "_BOS_", "_EOS_", "_UNK_"
VOC = ("lib.task.seq2seq.voc", "Voc")
SIDES = {"source": "src", "target": "dst"}


class StoryCheckpoint(TransformerCheckpoint):
    """A native Transformer with the hyper-parameters of its file, so that it can be saved in the same format."""

    hp: Mapping[str, Any]
    shape: Shape


class StoryOfHeadsFormat(CheckpointFormat[StoryCheckpoint]):
    """An .npz file with arrays named `mod/…:0`."""

    name = "story_of_heads"
    summary = "an .npz with arrays mod/…:0, as story-of-heads writes them"
    takes = frozenset({"dicts", "hp", "bpe"})

    def recognise(self, path: Path) -> bool:
        if not path.is_file():
            return False
        first = first_member(path)
        if first.endswith(":0.npy") and first.startswith(("mod/", f"{LOSS}/")):
            return True
        try:
            return first.endswith(".npy") and SOURCE in Arrays(path).names
        except CheckpointError:
            return False

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> StoryCheckpoint:
        file = Path(path)
        if damage := zip_damage(file):
            raise CheckpointError(f"{path} is truncated or broken ({damage}); copy it again")
        hp_file = companions.hp or next(
            filter(Path.is_file, (file.parent / name for name in ("hp.json", "hp.toml"))), None
        )
        if hp_file is None:
            names = "res_steps, num_heads and rescale_emb, which arrays do not tell"
            raise ConfigError(f"{path} needs hyper-parameters: give {flag.hp} FILE (JSON, TOML) with {names}")
        hp, settings = read_hp(hp_file)
        arrays = Arrays(file)
        with restate(CheckpointError, f"{path} with {hp_file.name}: {{why}}"):
            shape = shape_of(arrays, hp)
            model = build_transformer(path, shape.config, read_arrays(arrays, hp, shape))
        file_types = {key: tensor.dtype for key, tensor in model.state_dict().items()}
        model = model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype))
        folder = companions.dicts or file.parent
        checkpoint = StoryCheckpoint(
            path=path,
            format=self.name,
            model=model.to(device),
            model_type="transformer",
            digest=file_digest([file, hp_file]),
            source=_vocabulary(folder, "src", companions.bpe, shape),
            target=_vocabulary(folder, "dst", companions.bpe, shape),
            search=replace(STORY_SEARCH, beam=hp.beam_size, power=hp.len_alpha, spread=hp.beam_spread),
            file_types=file_types,
        )
        checkpoint.hp, checkpoint.shape = settings, shape
        files = (folder / f"{name}{ending}" for name in SIDES.values() for ending in (".voc", ".voc.txt"))
        checkpoint.read_files = (hp_file, *(file for file in files if file.is_file()))
        return checkpoint

    def write(self, checkpoint: StoryCheckpoint, folder: Path) -> SavedFiles:
        """Write an .npz of the same name, hp.json and vocabularies; a native checkpoint for models they cannot hold."""
        if reason := _unfit(checkpoint):
            return replace(NATIVE.write(checkpoint, folder), notes=(reason,))
        path = folder / Path(checkpoint.path).name
        state = {key: tensor.detach().float().cpu() for key, tensor in checkpoint.model.state_dict().items()}
        arrays = {row.array: row.pack(state).contiguous().numpy() for row in array_rules(checkpoint.shape)}
        np.savez(buffer := io.BytesIO(), **arrays)  # type: ignore[arg-type]
        content = {
            path: buffer.getvalue(),
            folder / "hp.json": (json.dumps(dict(checkpoint.hp), indent=1) + "\n").encode(),
        }
        for name, short in SIDES.items():
            vocabulary: Vocabulary | None = getattr(checkpoint, name)
            if vocabulary is not None:
                content[folder / f"{short}.voc"] = _pickle_vocabulary(vocabulary)
        for file, data in content.items():
            write_atomically(file, data)
        return SavedFiles(path, self.name)


STORY = StoryOfHeadsFormat()
FORMATS.register("story_of_heads", STORY, where=__name__)


def _vocabulary(folder: Path, name: str, bpe: Path | None, shape: Shape) -> Vocabulary | None:
    stack = shape.config.encoder if name == "src" else shape.config.decoder
    size = stack.vocabulary if stack else 0
    file, text = folder / f"{name}.voc", folder / f"{name}.voc.txt"
    if file.is_file():
        vocabulary = read_pickle(file, {".".join(VOC)})
        state = vocabulary.state if isinstance(vocabulary, StubType) else None
        ids = state[0] if isinstance(state, tuple) and len(state) == 1 else state
        plain = isinstance(ids, dict) and all(type(key) is str and type(value) is int for key, value in ids.items())
        if not plain or not isinstance(ids, dict) or min(ids.values(), default=0) < 0:
            raise DataError(f"{file} holds no vocabulary of story-of-heads, a dictionary of tokens and ids")
    elif (file := text).is_file():
        ids = {subword: number for number, subword in enumerate(read_text(file).removesuffix("\n").split("\n"))}
    else:
        return None
    largest = max(ids.values(), default=0)
    if largest >= size or (largest + 1 < size and not shape.shared):
        sizes = f"{min(largest, 2**40) + 1} tokens, the embeddings {size}"
        raise CheckpointError(f"{file} has {sizes}; this vocabulary belongs to another checkpoint")
    subwords = [f"_UNUSED_{number}_" for number in range(size)]
    for subword, number in ids.items():
        subwords[number] = subword
    subwords[:3] = BEGIN, END, UNKNOWN
    codes = None
    if bpe is not None:
        bpe_file = bpe / f"{name}.bpe" if bpe.is_dir() else bpe
        codes = read_bytes(bpe_file, name=f"{flag.bpe} {bpe_file} (a file, or a directory with {name}.bpe)")
    return Vocabulary(tuple(subwords), Splitter("backtick", codes), start=0, end=1, unknown=2)


def _unfit(checkpoint: StoryCheckpoint) -> str | None:
    """The reason why story-of-heads' files cannot hold a model; None if they can."""
    shape, model = checkpoint.shape, checkpoint.model
    if model.config != shape.config:
        return "story-of-heads files hold one number of heads, so this is a native one"
    if shape.shared and not shape.config.share_embeddings:
        state = model.state_dict()
        source, target = (state[f"{side}.embeddings.tokens.weight"] for side in ("encoder", "decoder"))
        if not torch.equal(source[: len(target)], target):
            return "its source and target share one table of embeddings, and training made them differ: a native one"
    return None


def _pickle_vocabulary(vocabulary: Vocabulary) -> bytes:
    """A pickle that the original program opens: its class `Voc`, with a tuple of one dictionary as the state."""
    ids = {
        subword: number
        for number, subword in enumerate(vocabulary.subwords)
        if number != 2 and subword != f"_UNUSED_{number}_"
    }
    table = pickle.dumps((ids,), protocol=2)[2:-1]  # without header and end
    module, name = (part.encode() for part in VOC)
    return b"\x80\x02c" + module + b"\n" + name + b"\n)\x81" + table + b"b."
