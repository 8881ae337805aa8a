"""The files of an analysis run: `run.json`, `heads.csv`, a table per analysis, arrays, pickles, detail."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.bootstrap import Array
from headscope.data.corpus import Corpus
from headscope.description.tokens import TokenReader
from headscope.engine.conclusion import AnalysisResult
from headscope.files.output_checks import OutputKind
from headscope.files.tables import Example, as_arrays, write_arrays, write_csv, write_pickle
from headscope.files.writing import write_atomically, write_json
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, Site, counts_of
from headscope.signature import Signature, signature_of
from headscope.version import VERSION

PAGE = "report.html"
EXPORTED = ("retrieval/*.json", "streaming/*.tsv", "streaming/*.json")
"""Files that analyses write for other programs (`AnalysisReport.files`)."""
ANALYSIS = OutputKind(
    "analysis",
    "run of `headscope analyze`",
    "run.json",
    ("*.csv", "similarity.npz", "examples.npz", PAGE, "pickles/*.pkl", "detail/*.npz", "figures/*.png", *EXPORTED),
)
LIBRARIES = ("torch", "transformers", "numpy", "stanza", "captum")
_LOCATION = {Site.ENCODER_SELF: ("encoder", "self_attn"), Site.DECODER_SELF: ("decoder", "self_attn")}


@dataclass(frozen=True)
class RunDescription:
    """How the numbers of a run came about: the signature of all of them, and what `run.json` says."""

    signature: Signature
    record: Mapping[str, Any]


def describe_run(
    study: AnalysisResult, checkpoint: Checkpoint, corpus: Corpus, settings: Mapping[str, Any], command: Sequence[str]
) -> RunDescription:
    """Describe a study while the checkpoint and the corpus are as they were measured."""
    common, signature = _signatures(study, checkpoint, corpus, settings)
    layout = {site.value: counts for site in SITES if (counts := counts_of(checkpoint.layout, site))}
    record = {
        "headscope": VERSION,
        "complete": study.complete,
        "signature": str(signature),
        "signatures": {name: str(common.having(**study.signatures[name])) for name in study.signatures},
        "command": list(command),
        "checkpoint": {
            "path": str(Path(checkpoint.path).resolve()) if Path(checkpoint.path).exists() else checkpoint.path,
            "format": checkpoint.format,
            "digest": checkpoint.digest,
            "model_type": checkpoint.model_type,
            **({"marks": TokenReader.of(checkpoint, "target").marks} if "examples" in study.tables else {}),
        },
        "layout": layout,
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
            "sentences": study.sentences,
            "in_corpus": corpus.count,
            "truncated": study.losses.truncated,
            "unknown_pieces": study.losses.unknown.to_json(),
            "unaligned": dict(study.losses.unaligned),
            "relations_within_a_word": study.losses.fused,
        },
        "left_out": [asdict(omission) for omission in study.left_out],
        "remarks": study.remarks,
        "options": dict(settings),
        "seed": settings["seed"],
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "device": str(checkpoint.device),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "seconds": round(study.seconds, 3),
    }
    return RunDescription(signature, record)


def _signatures(
    study: AnalysisResult, checkpoint: Checkpoint, corpus: Corpus, settings: Mapping[str, Any]
) -> tuple[Signature, Signature]:
    """What all analyses of a run share, and that with the settings of each."""
    count = f"{study.sentences}" if study.complete else f"{study.sentences} of {corpus.count} (interrupted)"
    common = signature_of(
        {
            "eos": "incl" if settings["keep_special"] else "excl",
            **({"first": "excl"} if settings["exclude_sinks"] else {}),
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
        key: value for settings in study.signatures.values() for key, value in settings.items() if key != "m" and value
    }
    return common, common.having(m="+".join(study.signatures), **own_settings)


def write_run(
    folder: Path,
    study: AnalysisResult,
    description: RunDescription,
    pickles: Mapping[str, Any] | None = None,
    examples: Sequence[Example] = (),
) -> None:
    """Write everything but the figures and the page, with the record of the run.

    `pickles` are further files for the folder of that name (see `headscope.engine.fork.pickles`).
    """
    nested_files = {f"{measure}.pkl": value for measure, value in nested_measures(study).items()}
    for name, frame in {"heads": study.heads, **study.tables}.items():
        write_csv(folder / f"{name}.csv", frame)
    if study.arrays:
        write_arrays(folder / "similarity.npz", study.arrays)
    if examples:
        write_arrays(folder / "examples.npz", as_arrays(examples))
    for name, value in {**nested_files, **(pickles or {})}.items():
        write_pickle(folder / "pickles" / name, value)
    for measure, arrays in study.detail.items():
        write_arrays(folder / "detail" / f"{measure}.npz", arrays)
    for name, text in study.files.items():
        write_atomically(folder / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    write_json(folder / "run.json", description.record)


def nested_measures(study: AnalysisResult) -> dict[str, Any]:
    """Every numeric measure, and every similarity matrix, in the nesting of the MHR fork's pickles.

    `{"encoder": [{"self_attn": [h]}], "decoder": [{"self_attn": [h], "enc_attn": [h]}]}` of plain numpy
    arrays, a list entry a layer.
    """
    numeric = [name for name in study.heads.columns if pd.api.types.is_float_dtype(study.heads[name])]
    measures = [name for name in numeric if not name.endswith(("_low", "_high"))]
    pickles = {
        name: nested({attention_site: column for attention_site, column in _by_place(study.heads, name)})
        for name in measures
    }
    kinds = {key.rsplit("/", 1)[1] for key in study.arrays if not key.endswith(("_low", "_high"))}
    for kind in sorted(kinds):
        attention_sites = {}
        for key, array in study.arrays.items():
            site, layer, measure = key.split("/")
            if measure == kind:
                attention_sites[Site(site), int(layer)] = array
        pickles[f"similarity_{kind}_matrices"] = nested(attention_sites)
    return pickles


def _by_place(heads: pd.DataFrame, name: str) -> list[tuple[tuple[Site, int], Array]]:
    grouped: Any = heads.groupby(["site", "layer"], sort=False)[name]
    return [((Site(site), int(layer)), np.array(column, dtype=float)) for (site, layer), column in grouped]


def nested(attention_sites: Mapping[tuple[Site, int], Array]) -> dict[str, list[dict[str, Array]]]:
    """Arrays by (site, layer) in the MHR nesting; cross attention is called `enc_attn` there."""
    stacks: dict[str, list[dict[str, Array]]] = {"encoder": [], "decoder": []}
    for site in SITES:
        stack, kind = _LOCATION.get(site, ("decoder", "enc_attn"))
        layers = {layer: array for (array_site, layer), array in attention_sites.items() if array_site is site}
        for layer in range(max(layers, default=-1) + 1):
            while len(stacks[stack]) <= layer:
                stacks[stack].append({})
            if layer in layers:
                stacks[stack][layer][kind] = layers[layer]
    return stacks
