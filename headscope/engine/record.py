"""The record of a study: signatures, checkpoint, text, options, versions; what `run.json` holds."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headscope.data.corpus import Corpus
from headscope.description.tokens import TokenReader
from headscope.formats.base import Checkpoint
from headscope.results.study import Study
from headscope.signature import Signature, signature_of
from headscope.version import VERSION

LIBRARIES = ("torch", "transformers", "numpy", "stanza", "captum")


def complete_record(
    study: Study, checkpoint: Checkpoint, corpus: Corpus, settings: Mapping[str, Any], command: Sequence[str]
) -> None:
    """Describe in a study how its numbers came about, while checkpoint and corpus are as they were measured."""
    entries: Mapping[str, Mapping[str, str]] = study.record["signatures"]
    common, signature = _signatures(study, checkpoint, corpus, settings)
    study.record = {
        "headscope": VERSION,
        "complete": study.complete,
        "signature": str(signature),
        "signatures": {name: str(common.with_entries(**own)) for name, own in entries.items()},
        "command": list(command),
        "checkpoint": {
            "path": str(Path(checkpoint.path).resolve()) if Path(checkpoint.path).exists() else checkpoint.path,
            "format": checkpoint.format,
            "digest": checkpoint.digest,
            "model_type": checkpoint.model_type,
            **({"marks": TokenReader.of(checkpoint, "target").marks} if "examples" in study.tables else {}),
        },
        "layout": study.record["layout"],
        "objective": study.record["objective"],
        "sampled": study.record["sampled"],
        "data": {
            "source": settings.get("source"),
            "target": settings.get("target"),
            "source2": settings.get("source2"),
            "pairs": settings.get("pairs", False),
            "labels": settings.get("labels"),
            "clean": settings.get("clean"),
            "corrupt": settings.get("corrupt"),
            "answer": settings.get("answer"),
            "parse": settings["parse"],
            "target_parse": settings.get("target_parse"),
            "digest": corpus.digest,
            "in_corpus": corpus.count,
            **study.record["data"],
        },
        "left_out": study.record["left_out"],
        "remarks": study.remarks,
        "options": dict(settings),
        "seed": settings["seed"],
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "device": str(checkpoint.device),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "seconds": round(study.record["seconds"], 3),
    }


def _signatures(
    study: Study, checkpoint: Checkpoint, corpus: Corpus, settings: Mapping[str, Any]
) -> tuple[Signature, Signature]:
    count = f"{study.sentences}" if study.complete else f"{study.sentences} of {corpus.count} (interrupted)"
    common = signature_of(
        {
            "eos": "incl" if settings["keep_special"] else "excl",
            **({"first": "excl"} if settings["exclude_sinks"] else {}),
            **({"queries": settings["queries"]} if settings["queries"] != "all" else {}),
            "unit": "piece",
            "len": f"{settings['limit']}-{settings['long']}",
        },
        data=(corpus.digest, count),
        checkpoint=checkpoint,
        off={name: settings[name] for name in ("mask", "gates") if settings.get(name)},
        transformers=True,
        replicates=settings["bootstrap"],
        seed=settings["seed"],
    )
    own_settings = {
        key: value
        for settings in study.record["signatures"].values()
        for key, value in settings.items()
        if key != "m" and value
    }
    return common, common.with_entries(m="+".join(study.record["signatures"]), **own_settings)
