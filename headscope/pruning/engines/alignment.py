"""`analyze --write-alignment`: name the cross heads that align in the settings of a model, where engines read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import transformers

from headscope.errors import CheckpointError, ConfigError
from headscope.files.reading import read_object
from headscope.files.writing import write_json
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.native_models.from_native import quiet_transformers
from headscope.heads import HeadId, Layout, Site
from headscope.pruning.engines.ctranslate2.alignment import align, is_ctranslate2, read_model

SETTINGS = "generation_config.json"
LABEL = "aligned:predicted"


def check_alignment_model(folder: Path, layout: Layout) -> None:
    """ConfigError where a folder has no place for alignment heads, or other heads than the checkpoint measured."""
    if is_ctranslate2(folder):
        there = read_model(folder).layout
    elif os.path.isfile(folder / "config.json"):
        there = open_checkpoint(str(folder), format="huggingface", device="cpu").layout
    else:
        raise ConfigError(
            f"--write-alignment {folder}: a folder of transformers or of CTranslate2 has a place for them; take "
            "`convert --to huggingface`, or --to ctranslate2, and give what that writes"
        )
    counts = [{key: n for key, n in each.items() if key[0] is Site.CROSS} for each in (layout, there)]
    if not counts[0] or counts[0] != counts[1]:
        raise ConfigError(
            f"--write-alignment {folder}: its layers have other cross heads than those of the model that is measured"
        )


def aligning_heads(heads: pd.DataFrame, most: int) -> tuple[list[HeadId], str]:
    """Of the cross heads in the table of a run at most so many, best first, and the measure that says so.

    Those labelled as looking at the word that is predicted, by `aligned_predicted`; where none is, all by
    `alignment_score`, which needs no links.
    """
    cross = heads[heads["site"] == Site.CROSS.value]
    labelled = cross[[LABEL in str(labels).split(";") for labels in cross["functions"]]]
    chosen, by = (labelled, "aligned_predicted") if len(labelled) else (cross, "alignment_score")
    best = chosen.sort_values(by, ascending=False, kind="stable").head(most)
    return [HeadId(Site.CROSS, int(row["layer"]), int(row["head"])) for _, row in best.iterrows()], by


def write_alignment(folder: Path, heads: Sequence[HeadId]) -> str:
    """Name these heads in the settings of a model, the best first; one line saying which, and where."""
    if is_ctranslate2(folder):
        named = align(folder, heads)
        where = f"{folder}: return_attention is the mean over"
    else:
        named = sorted(heads)
        write_json(folder / SETTINGS, {**_settings(folder), "alignment_heads": [[at.layer, at.head] for at in named]})
        where = f"{folder / SETTINGS}: alignment_heads are"
    return f"{where} {', '.join(map(str, named))}"


def _settings(folder: Path) -> dict[str, object]:
    """The generation settings of a model, from its config.json where it has no file for them.

    Without the mark of settings that were taken from config.json: transformers drops other entries of such.
    """
    if os.path.isfile(folder / SETTINGS):
        settings = read_object(folder / SETTINGS, error=CheckpointError)
    else:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        settings = transformers.GenerationConfig.from_model_config(config).to_diff_dict()
    return {name: value for name, value in settings.items() if not name.startswith("_")}
