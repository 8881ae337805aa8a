"""Pickles of the MHR fork (confidence, similarity, alphas), and those of headscope with the same nesting
(RUN/pickles/MEASURE.pkl), as studies that figures can draw.

`headscope.formats.pickles` reads them: numpy arrays and containers only, and nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from zipfile import is_zipfile

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.config.option import MAX_HEADS, MAX_LAYERS
from headscope.errors import DataError
from headscope.formats.pickles import array_of, read_pickle, rows_of
from headscope.heads import SITES
from headscope.results.study import Study
from headscope.results.study_files import FORK_NAMES
from headscope.results.study_tables import HEAD_COLUMNS, RunError

Array = NDArray[np.float64]
SiteLayer = tuple[str, int]
Read = Callable[[object], tuple[Array, int] | None]
"""Reads a module's entry: its numbers, and how many sentences they average (0: unknown); None for another kind."""
SITE_OF = {names: site.value for site, names in FORK_NAMES.items()}
OWN_MATRICES = re.compile("similarity_(.+)_matrices")
CHECKPOINTS = ("best", "last", "averaged", "model")  # names in the directories that `train` and `prune` write


def confidence_run(path: Path) -> Study:
    """The study of a confidence file of the fork: means of its batches, weighted by their numbers of sentences.

    Or of a pickle of headscope, with a vector a module, as a measure named like the file.
    """
    scores = _modules(path, "confidence scores", _scores)
    counts = [count for _, count in scores.values() if count]
    measure = "confidence" if counts or path.stem in (*HEAD_COLUMNS, "functions") else path.stem
    return fork_run(path, {module: values for module, (values, _) in scores.items()}, measure, note=_means_of(counts))


def confidence_rows(path: Path) -> dict[SiteLayer, Array]:
    """The scores of every batch [n h] by module; RunError for a file with means only."""
    kind = "rows of confidence scores"
    modules = _modules(path, kind, lambda value: None if (rows := _rows(value)) is None else (rows, 0))
    return {module: rows[:, :-1] for module, (rows, _) in modules.items()}


def similarity_run(path: Path) -> Study:
    """The study of a cosine or L2 file of the fork: the mean matrix of every module, without the fork's 1 + cosine.

    Or of headscope's similarity_MEASURE_matrices.pkl, with a matrix a module.
    """
    if match := OWN_MATRICES.fullmatch(path.stem):
        return fork_run(path, _matrices(path, "matrices between heads"), match[1], note=_means_of([]))
    modules = _modules(path, "cosines or distances between heads", _means)
    cosine = all(np.allclose(matrix.diagonal(), 2, atol=1e-3) for matrix, _ in modules.values())
    shifts = {module: matrix - cosine for module, (matrix, _) in modules.items()}
    note = _means_of([count for _, count in modules.values()])
    return fork_run(path, shifts, "cosine" if cosine else "l2", note=note)


def alphas_run(path: Path) -> Study:
    """The study of a file of alpha matrices."""
    return fork_run(path, _matrices(path, "alpha matrices"), "alpha")


def fork_run(
    path: Path,
    modules: Mapping[SiteLayer, Array],
    measure: str,
    *,
    note: str = "alphas",
    signature: str = "",
    model_type: str = "",
) -> Study:
    """The study of one measure: a vector [h] or a matrix [h h] for every module. Default signature: the file's name."""
    layout: dict[str, list[int]] = {}
    for (site, layer), values in modules.items():
        counts = layout.setdefault(site, [])
        counts += [0] * (layer + 1 - len(counts))
        counts[layer] = len(values)
    vectors = {module: values for module, values in modules.items() if values.ndim == 1}
    rows = [(*module, head, "", value) for module, values in vectors.items() for head, value in enumerate(values)]
    columns = [*HEAD_COLUMNS, "functions", *([measure] if vectors else [])]
    matrices = {f"{site}/{layer}/{measure}": values for (site, layer), values in modules.items() if values.ndim == 2}
    record = {
        "signature": signature or f"file:{path.name}|format:mhr",
        "layout": layout,
        "checkpoint": {"path": path.name, "model_type": model_type},
        "data": {"note": note},
    }
    return Study({"heads": pd.DataFrame(rows, columns=columns)}, record, arrays=matrices, folder=path)


def _means_of(counts: list[int]) -> str:
    """How many sentences the means of modules average: a note for the study."""
    if not counts:
        return "as the file has them"
    low, high = min(counts), max(counts)
    means = f"mean of {low}" if low == high else f"means of {low} to {high}"
    return f"{means} sentences or hypotheses, as the file has them"


def _modules(path: Path, kind: str, read: Read) -> dict[SiteLayer, tuple[Array, int]]:
    """What `read` returns for the entry of every module; RunError for a file with another structure."""
    content, modules = read_pickle(path), {}
    for stack, layers in content.items() if isinstance(content, dict) else ():
        for layer, entries in enumerate(layers[:MAX_LAYERS] if isinstance(layers, list) else ()):
            for name, value in entries.items() if isinstance(entries, dict) else ():
                if (stack, name) not in SITE_OF or value == []:  # layers left out
                    continue
                if (entry := read(value)) is None:
                    raise RunError(f"{path} holds no {kind} in {stack} layer {layer} {name}; is it another file?")
                modules[SITE_OF[stack, name], layer] = entry
    if not modules:
        raise RunError(f'{path} is no pickle of the MHR fork: it holds no {{"encoder": [{{"self_attn": …}}], …}}')
    return {module: modules[module] for site in SITES for module in sorted(modules) if module[0] == site.value}


def _scores(value: object) -> tuple[Array, int] | None:
    table = array_of(value)
    if table is not None and table.ndim == 1 and 1 <= len(table) <= MAX_HEADS and table.dtype.kind == "f":
        return table.astype(float), 0
    if (rows := _rows(value)) is None:
        return None
    scores: Array = np.average(rows[:, :-1], axis=0, weights=rows[:, -1])
    return scores, int(rows[:, -1].sum())


def _rows(value: object) -> Array | None:
    """Rows [n h+1] of scores and the number of sentences of a batch."""
    table = array_of(value)
    if table is None or table.ndim != 2 or not len(table) or not 2 <= table.shape[1] <= MAX_HEADS:
        return None
    sizes = table[:, -1]
    whole = np.isfinite(sizes).all() and (sizes >= 1).all() and (sizes == sizes.round()).all()
    return table.astype(float) if whole else None


def _means(value: object) -> tuple[Array, int] | None:
    """The mean matrix over all sentences, from a vector for every batch: b matrices [h h], then b."""
    total, count = np.zeros((0, 0)), 0
    for row in rows_of(value) or ():
        size = row[-1] if row.ndim == 1 and len(row) > 1 and row.dtype.kind == "f" else np.nan
        if not (np.isfinite(size) and size >= 1 and size == round(float(size))):
            return None
        heads = round(((len(row) - 1) / float(size)) ** 0.5)
        if heads * heads * int(size) != len(row) - 1 or (count and len(total) != heads):
            return None
        sums = row[:-1].astype(float).reshape(-1, heads, heads).sum(axis=0)
        total, count = (total + sums if count else sums), count + int(size)
    return (total / count, count) if count else None


def _matrices(path: Path, kind: str) -> dict[SiteLayer, Array]:
    return {module: matrix for module, (matrix, _) in _modules(path, kind, _square).items()}


def _square(value: object) -> tuple[Array, int] | None:
    matrix = array_of(value)
    if matrix is None or matrix.ndim != 2 or not 1 <= matrix.shape[0] == matrix.shape[1] <= MAX_HEADS:
        return None
    return matrix.astype(float), 1


def format_of(path: Path) -> str | None:
    """The checkpoint format of a file or directory, by its headers; None if it is no checkpoint."""
    from headscope.formats.base import FORMATS

    return next((name for name, form in FORMATS if form.recognise(path)), None) if path.exists() else None


def read_run(
    path: Path,
    *,
    from_pickle: Callable[[Path], Study] | None = None,
    from_checkpoint: Callable[[Path], Study] | None = None,
) -> Study:
    """The study in a directory, in a pickle (by `from_pickle`), or in a checkpoint (by `from_checkpoint`).

    RunError for a checkpoint that nothing reads, which says how to measure it; DataError for broken pickles.
    """
    try:
        if from_pickle is not None and path.is_file() and not is_zipfile(path):  # zips may be large: no pickles
            return from_pickle(path)
        return Study.open(path)
    except (RunError, DataError) as error:
        if format := format_of(path):
            if from_checkpoint is not None:
                return from_checkpoint(path)
            measure = f"measure it first, `headscope analyze {path} --source TEXT --out RUN`, and name RUN"
            raise RunError(f"{path} is a checkpoint ({format}); {measure}") from None
        if inside := next((path / name for name in CHECKPOINTS if format_of(path / name)), None):
            raise RunError(f"{error}; it holds a checkpoint: {inside}") from None
        raise


def checkpoint_alphas(path: Path) -> Study:
    """The study of a checkpoint's alpha matrices; RunError if it has none."""
    from headscope.engine.mhr_fork import fork_alphas
    from headscope.formats.base import open_checkpoint

    checkpoint = open_checkpoint(str(path), device="cpu")
    matrices = {(site.value, layer): alpha for (site, layer), alpha in fork_alphas(checkpoint).items()}
    if not matrices:
        what = f"{path} ({checkpoint.format}, {checkpoint.model_type})"
        raise RunError(f"{what} has no alpha matrices; models of the MHR fork and `headscope train mixing` have some")
    signature = f"ckpt:{checkpoint.format}-sha256={checkpoint.digest[:12]}"
    return fork_run(path, matrices, "alpha", signature=signature, model_type=checkpoint.model_type)
