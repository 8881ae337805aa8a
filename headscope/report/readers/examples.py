"""The sentences whose attention a run keeps (`analyze --examples`), read back from its `examples.npz`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headscope.errors import CheckpointError
from headscope.files.examples import Bytes, Example
from headscope.formats.story_of_heads.npz import Arrays
from headscope.report.readers.run import AnalysisRun, RunError
from headscope.report.readers.study_run import StudyRun

FILE = "examples.npz"


def load_examples(run: AnalysisRun) -> Sequence[Example]:
    """The sentences in order, none where the run kept none; RunError for a broken file."""
    if isinstance(run, StudyRun):
        return run.examples
    path = run.path / FILE
    if not path.is_file():
        return []
    try:
        arrays = Arrays(path, kind="u").read()
        index = json.loads(arrays["index"].tobytes().decode("utf-8"))
        examples = [_example(arrays, place, entry, run) for place, entry in enumerate(index)]
    except CheckpointError as broken:
        raise RunError(f"run {run.name}: {FILE} cannot be read ({' '.join(str(broken).split())[:160]})") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as broken:
        reason = " ".join(str(broken).split())[:160] or type(broken).__name__
        raise RunError(f"run {run.name}: {FILE} is no file of examples ({reason}); analyse again") from None
    return examples


def _example(arrays: Mapping[str, Bytes], place: int, entry: Mapping[str, Any], run: AnalysisRun) -> Example:
    texts = {side: str(entry["texts"][side]) for side in ("source", "target") if side in entry["texts"]}
    subwords = {side: [str(subword) for subword in entry["subwords"][side]] for side in entry["subwords"]}
    weights = {}
    for site, counts in run.layout.items():
        name = f"{place}/{site}"
        if name in arrays:
            weights[site] = arrays[name]
            shape = tuple(len(subwords[side]) for side in sides_of(site, subwords))
            if weights[site].shape != (sum(counts), *shape):
                raise ValueError(f"{name} has shape {weights[site].shape}, not {(sum(counts), *shape)}")
    return Example(int(entry["number"]), texts, subwords, weights)


def sides_of(site: str, subwords: Mapping[str, Any]) -> tuple[str, str]:
    """The sides of queries and keys of a site."""
    text = "target" if "target" in subwords else "source"
    return ("source" if site == "encoder-self" else text, text if site == "decoder-self" else "source")
