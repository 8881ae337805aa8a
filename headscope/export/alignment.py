"""`analyze --write-alignment`: write the cross heads that align into a model's settings, where engines read them.

CTranslate2's `return_attention` averages the first `alignment_heads` heads of `alignment_layer`. It cannot name others,
so the heads of that layer are reordered, which changes no output. Its file model.bin (version 6) is a list of named
arrays (python/ctranslate2/specs/model_spec.py, `_serialize`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.errors import CheckpointError, ConfigError, flag
from headscope.files.reading import read_bytes, read_object
from headscope.files.writing import write_atomically, write_json
from headscope.formats.base import open_checkpoint
from headscope.heads import HeadId, Layout, Site
from headscope.model.interface import quiet_transformers

WEIGHTS, CONFIG = "model.bin", "config.json"
ORDER = "decoder/headscope_alignment"
"""An array of model.bin that CTranslate2 does not read: a layer, and the checkpoint's numbers of its heads in order."""
VERSION, SPEC = 6, "TransformerSpec"
TYPES = ("float32", "int8", "int16", "int32", "float16", "uint16")
"""numpy types by CTranslate2's numbers; bfloat16 is copied as uint16."""
FUSED_MATRICES = {0: 1, 1: 2}
"""Matrices in each input projection of cross attention by its number: the query, and keys with values."""


@dataclass
class ModelFile:
    """The arrays of a model.bin by name, with their types; names that stand for one array share it."""

    revision: int
    arrays: dict[str, tuple[int, NDArray[Any]]]

    @property
    def layout(self) -> Layout:
        """Number of cross heads of every layer."""
        layers = 0
        while f"decoder/layer_{layers}/attention/linear_0/weight" in self.arrays:
            layers += 1
        return dict.fromkeys(((Site.CROSS, layer) for layer in range(layers)), int(self.arrays["decoder/num_heads"][1]))


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2."""
    return os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / CONFIG)


def read_model(folder: Path, *, spec: str = SPEC) -> ModelFile:
    """The arrays of a model of the kind `spec`; CheckpointError where the folder holds another kind."""
    data, offset = read_bytes(folder / WEIGHTS, error=CheckpointError, limit=(folder / WEIGHTS).stat().st_size), 0

    def take(form: str) -> Any:
        nonlocal offset
        (value,) = struct.unpack_from(form, data, offset)
        offset += struct.calcsize(form)
        return value

    def text() -> str:
        return str(take(f"{take('<H')}s")[:-1].decode())

    try:
        if take("<I") != VERSION or text() != spec:
            raise CheckpointError(f"{folder} is not a translation model of CTranslate2 (model.bin, version {VERSION})")
        model = ModelFile(take("<I"), {})
        for _ in range(take("<I")):
            name = text()
            shape = [take("<I") for _ in range(take("B"))]
            kind, size = take("B"), take("<I")
            values = np.frombuffer(data, TYPES[kind], count=size // np.dtype(TYPES[kind]).itemsize, offset=offset)
            model.arrays[name] = kind, values.reshape(shape)
            offset += size
        for _ in range(take("<I")):
            alias = text()
            model.arrays[alias] = model.arrays[text()]
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is truncated or broken; write the folder again") from error
    return model


def write_model(model: ModelFile, path: Path) -> None:
    """Write a model.bin."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    names: dict[int, list[str]] = {}
    for name in sorted(model.arrays):
        names.setdefault(id(model.arrays[name][1]), []).append(name)
    parts = [struct.pack("<I", VERSION), text(SPEC), struct.pack("<II", model.revision, len(names))]
    for name, *_ in names.values():
        kind, values = model.arrays[name]
        shape = b"".join(struct.pack("<I", size) for size in values.shape)
        parts += [text(name), struct.pack("B", values.ndim), shape, struct.pack("<BI", kind, values.nbytes)]
        parts.append(values.tobytes())
    aliases = [text(alias) + text(name) for name, *aliases_of_name in names.values() for alias in aliases_of_name]
    path.write_bytes(b"".join([*parts, struct.pack("<I", len(aliases)), *aliases]))


def align(folder: Path, heads: Sequence[HeadId]) -> list[HeadId]:
    """Make `return_attention` the mean over those `heads` that are in the layer of the first one; returns these.

    Heads have the checkpoint's numbers, even if the file was reordered before: model.bin stores its order.
    """
    model = read_model(folder)
    count = model.layout[Site.CROSS, heads[0].layer]
    if ORDER in model.arrays:
        layer, *old_order = model.arrays[ORDER][1].tolist()
        _reorder(model, layer, np.argsort(old_order).tolist())
    layer_heads = [head for head in heads if head.layer == heads[0].layer]
    first = [head.head for head in layer_heads]
    order = [*first, *(number for number in range(count) if number not in first)]
    _reorder(model, heads[0].layer, order)
    entries = {
        "decoder/alignment_layer": heads[0].layer,
        "decoder/alignment_heads": len(layer_heads),
        ORDER: [heads[0].layer, *order],
    }
    for name, value in entries.items():
        model.arrays[name] = TYPES.index("int16"), np.array(value, dtype=np.int16)
    write_atomically(folder / WEIGHTS, lambda path: write_model(model, path))
    return layer_heads


def _reorder(model: ModelFile, layer: int, order: Sequence[int]) -> None:
    """Reorder the cross heads of a layer: rows of W_Q, W_K, W_V, columns of W_O."""
    prefix = f"decoder/layer_{layer}/attention/linear_"
    for number, matrices in FUSED_MATRICES.items():
        for part in ("weight", "weight_scale", "bias"):
            kind, values = model.arrays.get(f"{prefix}{number}/{part}", (0, np.zeros(())))
            if values.ndim:  # a scale may be one number for all rows
                heads = values.reshape(matrices, len(order), -1)[:, order]
                model.arrays[f"{prefix}{number}/{part}"] = kind, heads.reshape(values.shape)
    kind, output = model.arrays[f"{prefix}2/weight"]  # [d h·k]
    heads = output.reshape(len(output), len(order), -1)[:, order]
    model.arrays[f"{prefix}2/weight"] = kind, heads.reshape(output.shape)


SETTINGS = "generation_config.json"
LABEL, SHARE, SCORE = "aligned:predicted", "aligned_predicted", "alignment_score"


def check_alignment_model(folder: Path, layout: Layout) -> None:
    """Raise ConfigError where a folder cannot store alignment heads, or has other heads than those measured."""
    if is_ctranslate2(folder):
        folder_layout = read_model(folder).layout
    elif os.path.isfile(folder / "config.json"):
        folder_layout = open_checkpoint(str(folder), format="huggingface", device="cpu").layout
    else:
        raise ConfigError(
            f"{flag.write_alignment} {folder}: not a model that stores them; give one of transformers or CTranslate2"
        )
    counts = [{key: n for key, n in counts_of.items() if key[0] is Site.CROSS} for counts_of in (layout, folder_layout)]
    if not counts[0] or counts[0] != counts[1]:
        raise ConfigError(
            f"{flag.write_alignment} {folder}: its layers have other cross heads than the model that is measured"
        )


def aligning_heads(heads: pd.DataFrame, max_heads: int, *, speech: bool) -> tuple[list[HeadId], str]:
    """The cross heads that align in the table of a run, at most `max_heads`, best first; and the column they are by.

    These are heads labelled as aligned with the predicted word. If there are none, those of the highest
    `alignment_score`, which needs no links. In `speech` models such heads time words worse than all heads of the upper
    half of the layers (OpenAI's default, benchmarks/known_roles.csv), so these are returned, with "" as the column.
    """
    cross = heads[heads["site"] == Site.CROSS.value]
    candidates, by = cross[[LABEL in str(labels).split(";") for labels in cross["functions"]]], SHARE
    if candidates.empty and speech:
        candidates, by = cross[cross["layer"] >= (cross["layer"].max() + 1) // 2], ""
    elif candidates.empty:
        candidates, by = cross, SCORE
    if by:
        candidates = candidates.sort_values(by, ascending=False, kind="stable").head(max_heads)
    return [HeadId(Site.CROSS, int(row["layer"]), int(row["head"])) for _, row in candidates.iterrows()], by


def write_measured(folder: Path, table: pd.DataFrame, max_heads: int, *, force: bool) -> str:
    """Write the `aligning_heads` of a run's table; returns a line that says which, where, and by what measure.

    Without a measure, heads that a folder of transformers names already stay, unless `force`.
    """
    speech = not is_ctranslate2(folder)  # transformers has alignment heads of Whisper
    heads, by = aligning_heads(table, max_heads, speech=speech)
    best = table[SHARE].max() if SHARE in table else float("nan")
    lacks = f"give {flag('word_times', 'FILE.csv')}" if best != best else f"the largest {SHARE} is {best:.2f}"
    why = f"best by {by}" if by else f"all of the upper half: no head is labelled {LABEL}, {lacks}"
    if speech and not by and not force and _settings(folder).get("alignment_heads"):
        return f"{folder / SETTINGS} keeps its alignment_heads; {flag.force} names {why}"
    return f"{write_alignment(folder, heads)} ({why})"


def write_alignment(folder: Path, heads: Sequence[HeadId]) -> str:
    """Write heads, the best first, into the settings of a model; returns a line that says which, and where."""
    if is_ctranslate2(folder):
        heads_written = align(folder, heads)
        where = f"{folder}: return_attention is the mean over"
    else:
        heads_written = sorted(heads)
        write_json(
            folder / SETTINGS, {**_settings(folder), "alignment_heads": [[at.layer, at.head] for at in heads_written]}
        )
        where = f"{folder / SETTINGS}: alignment_heads are"
    return f"{where} {', '.join(map(str, heads_written))}"


def _settings(folder: Path) -> dict[str, object]:
    """The generation settings of a model, from its config.json if it has no file for them.

    Without `_from_model_config`: transformers discards other entries of settings with that mark.
    """
    if os.path.isfile(folder / SETTINGS):
        settings = read_object(folder / SETTINGS, error=CheckpointError)
    else:
        import transformers

        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        settings = transformers.GenerationConfig.from_model_config(config).to_diff_dict()
    return {name: value for name, value in settings.items() if not name.startswith("_")}
