"""Open the checkpoint and texts of a command that chooses heads, and write the choice.

The folder is built beside its place and swapped in when complete.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.attribution.objectives.base import warn_without_target
from headscope.config import COMPANIONS
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.encoded import count_unknown
from headscope.data.labels import with_labels
from headscope.errors import CheckpointError, ConfigError, DataError, HeadscopeError, OutputError, flag
from headscope.export.base import engines_named, export_for, split_export
from headscope.files.folders import Build
from headscope.files.output_checks import OutputKind
from headscope.files.tables import write_csv
from headscope.formats.base import FORMATS, Checkpoint, SavedFiles, open_configured, write_checkpoint
from headscope.formats.exports import MODEL_FILES
from headscope.heads import HeadId, select_heads
from headscope.model.removal_plan import alignment_heads
from headscope.pruning.gate_layout import GateLayout, unit_remarks
from headscope.pruning.options.shared import HeadChoice, PruningOptions, SelectionConfig
from headscope.results.ranking import Ranking
from headscope.signature import Signature, signature_of
from headscope.version import VERSION

ALIGNMENT = "alignment"
SAMPLED = 512  # sentences in which unknown subwords are counted
RECORD, STATE, MODEL, PRUNED = "pruning.json", "state.pt", "model", "pruned"
CHOICE = OutputKind(
    "choice",
    "run of `headscope prune rank`, `l0` or `subset`",
    RECORD,
    (
        *("removed.txt", "kept.txt", "ranking.csv", "gates.csv", STATE),
        *(f"{folder}/{name}" for folder in (MODEL, PRUNED) for name in MODEL_FILES),
    ),
    partial=(STATE,),
)
"""The folder of a choice of heads, by any command."""


def choice_by(command: str) -> OutputKind:
    """The folder of a choice by one command, which that command's --force may replace."""
    return replace(CHOICE, name=f"{CHOICE.name} by {command}", title=f"run of `headscope prune {command}`")


@dataclass
class OpenedSelection:
    """A checkpoint, its gates, and its texts with labels (None: not given); `limit` is in positions of a sentence."""

    checkpoint: Checkpoint
    gating: GateLayout
    corpus: Corpus | None
    valid: Corpus | None
    limit: int
    began: float
    remarks: list[str] = field(default_factory=list)


def open_selection(config: PruningOptions, *, trains: bool, checkpoint: Checkpoint | None = None) -> OpenedSelection:
    """Open the checkpoint (unless it is given) and the texts of a config; with `trains`, in float32 by default."""
    began = time.monotonic()
    corpus = open_text(config, max_sentences=config.max_sentences) if config.has_text else None
    valid, held_out, limit = None, config.valid_text, config.valid_sentences
    if held_out is not None:
        valid = open_text(held_out, max_sentences=limit)
    elif config.has_text:
        valid = open_text(config, max_sentences=min(limit, config.max_sentences or limit))
    dtype = "float32" if trains and config.dtype == "auto" else config.dtype
    if trains and dtype in ("float16", "bfloat16"):
        raise ConfigError(f"{flag.dtype} {dtype}: small updates are lost in it; learn in float32 (the default)")
    checkpoint = checkpoint or open_configured(config, dtype=dtype)
    if corpus is not None:
        corpus = with_labels(checkpoint, corpus, config.labels)
        if not config.objective:
            warn_without_target(checkpoint, has_target=corpus.has_target)
    if valid is not None:
        labels, option = (config.labels, flag.labels) if held_out is None else (held_out.labels, flag.valid_labels)
        valid = with_labels(checkpoint, valid, labels, option=option)
    limit = sentence_limit(checkpoint, config.max_length)
    remarks = []
    with suppress(CheckpointError, DataError):  # raised again where text is needed
        if corpus is not None:
            remarks += count_unknown(checkpoint, corpus, limit=limit, sentences=SAMPLED).remarks(checkpoint)
    if held_out is None and trains:
        remarks.append(
            f"warning: measured on the text that it learnt from; give {flag.valid_source} for text it has not seen"
        )
    if isinstance(config, SelectionConfig) and config.remove:  # refuse an impossible export before hours of learning
        engines_named(split_export(config.export)[1])
        export_for(config.export, checkpoint)
    gating = gates_for(checkpoint, config, whole_groups=getattr(config, "allocate", "") != "per-group")
    return OpenedSelection(checkpoint, gating, corpus, valid, limit, began, remarks + unit_remarks(gating))


def gates_for(checkpoint: Checkpoint, config: HeadChoice, *, whole_groups: bool) -> GateLayout:
    """The gates of the `sites` of a config, without heads to `protect`; ConfigError where none is left.

    The word `alignment` in `protect` stands for the heads that the model's generation settings name.
    """
    names = [name.strip() for name in (config.protect or "").split(",")]
    protect = set[HeadId]()
    if ALIGNMENT in names:
        protect.update(alignment_heads(checkpoint.model))
        if not protect:
            problem = f"{flag.protect} {ALIGNMENT}: {checkpoint.path} names no alignment heads"
            raise ConfigError(f"{problem}; `headscope analyze --write-alignment` writes them")
    if head_list := ",".join(name for name in names if name not in ("", ALIGNMENT)):
        protect.update(select_heads(head_list, checkpoint.layout))
    return GateLayout(checkpoint.attention_sites, sites=config.sites, protect=protect, whole_groups=whole_groups)


def ranking_of(
    setup: OpenedSelection,
    config: PruningOptions,
    removed: Sequence[HeadId],
    tables: Mapping[str, pd.DataFrame],
    *,
    method: str,
    entries: Mapping[str, str],
    facts: Mapping[str, Any],
    quality: Mapping[str, float] | None = None,
    loss: Any = None,
    has_trained: bool = False,
    remarks: Sequence[str] = (),
    folder: Path | None = None,
    lowest: Callable[[int, str], list[HeadId]] | None = None,
) -> Ranking:
    """The result of choosing heads by a `method`; `quality` has values of the `loss`.

    `entries` are the method's part of the signature, `facts` further entries of the record. `lowest(n, allocation)`
    gives the n heads to remove first.
    """
    gating, checkpoint = setup.gating, setup.checkpoint
    kept = gating.remaining_heads(removed)
    n_kept = Counter(head.site.value for head in kept)
    record = {
        "headscope": VERSION,
        "method": method,
        "source": {"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest},
        "signature": str(selection_signature(method, setup, config, **entries)),
        "heads": gating.heads,
        "kept": len(kept),
        "kept_per_site": {site: {"kept": n_kept[site], "of": total} for site, total in gating.per_site().items()},
        "protected": [str(head) for head in gating.protected_heads],
        "removed": [str(head) for head in removed],
        "model": MODEL if has_trained else None,
        "removed_to": None,
        ("nll" if loss is None else loss.quantity): dict(quality or {}),
        "title": "" if loss is None else loss.title,
        **facts,
        "remarks": [*setup.remarks, *remarks],
        "seconds": round(time.monotonic() - setup.began, 3),
    }
    return Ranking(record, tables, kept, folder or config.out, lowest=lowest)


def write_selection(choice: Ranking, checkpoint: Checkpoint, config: SelectionConfig, build: Build) -> None:
    """Write the folder of a choice, with `--remove` also the smaller checkpoint.

    If the latter is refused, the choice is written without it before the error is raised.
    """
    problem: HeadscopeError | None = None
    with build.writing() as temporary:
        for name, heads in (("removed.txt", choice.removed), ("kept.txt", choice.kept)):
            (temporary / name).write_text("".join(f"{head}\n" for head in heads), encoding="utf-8")
        for name, table in choice.tables.items():
            write_csv(temporary / f"{name}.csv", table, number="%.7g" if name == "gates" else None)
        trained_files = None
        if choice.record["model"]:  # the trained model with all its heads, in its own format
            (temporary / MODEL).mkdir()
            trained_files = write_checkpoint(checkpoint, temporary / MODEL)
        if config.remove and choice.removed:
            try:
                smaller = choice.folder / _remove(temporary, trained_files, config).relative_to(temporary)
                choice.record["removed_to"] = str(smaller)
            except OutputError:
                raise
            except HeadscopeError as error:
                problem = error
    build.finish(choice.record | {"options": config.settings()})
    if problem is not None:
        raise problem


def _remove(folder: Path, trained_files: SavedFiles | None, config: SelectionConfig) -> Path:
    """Run `prune remove` on the trained model, or on the checkpoint, for the folder's removed.txt; returns its path."""
    from headscope.pruning.options.removal import RemoveConfig
    from headscope.pruning.removal.remove import run_removal

    names = ["dtype", "export"]
    if trained_files is None:
        names += ["format", *COMPANIONS]
    elif "bpe" in FORMATS.get(trained_files.format).takes:  # other formats store the merges that split their text
        names += ["bpe"]
    smaller = run_removal(
        RemoveConfig(
            checkpoint=config.checkpoint if trained_files is None else str(trained_files.path),
            out=folder / PRUNED,
            heads=str(folder / "removed.txt"),
            device="cpu" if config.device_map else config.device,  # heads are cut from a model on one device
            **{name: getattr(config, name) for name in names},
        )
    )
    return smaller.path


def selection_signature(method: str, setup: OpenedSelection, config: PruningOptions, **entries: str) -> Signature:
    """The signature of a choice of heads; `entries` are the method's part."""
    checkpoint, corpus = setup.checkpoint, setup.corpus
    sites = "+".join(dict.fromkeys(site.value for site, _ in setup.gating.counts))
    data = None if corpus is None else (corpus.digest, corpus.count)
    settings = {"m": f"prune.{method}", **entries, "sites": sites}
    return signature_of(settings, data=data, checkpoint=checkpoint, seed=config.seed)
