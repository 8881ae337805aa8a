"""The files of a study: `run.json`, `heads.csv`, a table an analysis, arrays, pickles, detail, figures, the page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.config.declarations import import_target
from headscope.errors import OutputError
from headscope.files.folders import Build
from headscope.files.output_checks import OutputKind, inputs_of
from headscope.files.tables import EXAMPLES, SIMILARITY, as_arrays, write_arrays, write_csv, write_pickle
from headscope.files.writing import hold_signals, write_atomically, write_json
from headscope.heads import SITES, Site, SiteLayer

if TYPE_CHECKING:
    from headscope.results.study import Study

Array = NDArray[np.float64]

PAGE = "report.html"
EXPORT_FILES = ("retrieval/*.json", "streaming/*.tsv", "streaming/*.json")
"""Files that analyses write for other programs (`AnalysisReport.files`)."""
STUDY = OutputKind(
    "analysis",
    "run of `headscope analyze`",
    "run.json",
    ("*.csv", SIMILARITY, EXAMPLES, PAGE, "pickles/*.pkl", "detail/*.npz", "figures/*.png", *EXPORT_FILES),
)
FORK_NAMES = {
    Site.ENCODER_SELF: ("encoder", "self_attn"),
    Site.DECODER_SELF: ("decoder", "self_attn"),
    Site.CROSS: ("decoder", "enc_attn"),
}
"""The stack and the kind of attention that pickles of the MHR fork name for each site."""


def write_study(study: Study, folder: Path, *, figures: bool, report: bool, force: bool) -> Path:
    """Write a study to a folder of its own, which is returned (see `Study.save`)."""
    inputs = inputs_of({**study.record["options"], "checkpoint": str(study.record["checkpoint"]["path"])})
    with Build(folder, STUDY, inputs=inputs, force=force) as build:
        return build_study(study, build, figures=figures, report=report)


def build_study(study: Study, build: Build, *, figures: bool, report: bool) -> Path:
    """Write a study into a folder that is being built; an interrupted study replaces no earlier run.

    If drawing a figure or the page raises an error, the numbers are kept; errors of writing keep nothing.
    """
    began, seconds = time.monotonic(), study.record["seconds"]
    with build.writing() as temporary, suppress(KeyboardInterrupt), hold_signals():
        write_tables(temporary, study)

    def finish() -> Path:
        study.record["seconds"] = round(seconds + time.monotonic() - began, 3)
        study.folder = build.finish(study.record, partial=not study.complete)
        return study.folder

    with build.writing() as temporary:
        try:
            with optional_step(study, "figures"):
                if figures:
                    import_target("headscope.report.registry:draw_standard")(temporary)
            with optional_step(study, "report"):
                if report:
                    write_page = import_target("headscope.report.page.write:write_page")
                    write_page([temporary], temporary / PAGE, names=[build.out.resolve().name])
        except (OutputError, OSError):
            raise
        except Exception:
            finish()
            raise
    return finish()


@contextmanager
def optional_step(study: Study, name: str, *, is_requested: bool = False) -> Iterator[bool]:
    """Within the block runs a last step; Ctrl-C ends it, and the record then lists `name` as left out.

    The value says whether to run it: a requested step is left out, too, where the study itself was interrupted.
    """
    if is_requested and not study.complete:
        study.interrupt(name)
    try:
        yield is_requested and study.complete
    except KeyboardInterrupt:
        study.interrupt(name)


def write_tables(folder: Path, study: Study) -> None:
    """Write everything but the figures and the page."""
    for name, frame in study.tables.items():
        write_csv(folder / f"{name}.csv", frame)
    if study.arrays:
        write_arrays(folder / SIMILARITY, study.arrays)
    if study.examples:
        write_arrays(folder / EXAMPLES, as_arrays(study.examples))
    pickles = {f"{measure}.pkl": value for measure, value in nested_measures(study).items()}
    for name, value in {**pickles, **study.pickles}.items():
        write_pickle(folder / "pickles" / name, value)
    for measure, arrays in study.detail.items():
        write_arrays(folder / "detail" / f"{measure}.npz", arrays)
    for name, text in study.files.items():
        write_atomically(folder / name, text)
    write_json(folder / "run.json", study.record)


def nested_measures(study: Study) -> dict[str, Any]:
    """Every numeric measure, and every similarity matrix, in the nesting of the MHR fork's pickles.

    `{"encoder": [{"self_attn": [h]}], "decoder": [{"self_attn": [h], "enc_attn": [h]}]}` of plain numpy
    arrays, a list entry a layer.
    """
    numeric = [name for name in study.heads.columns if pd.api.types.is_float_dtype(study.heads[name])]
    measures = [name for name in numeric if not name.endswith(("_low", "_high"))]
    layers: Any = study.heads.groupby(["site", "layer"], sort=False)[measures]
    site_layers = [((Site(site), int(layer)), columns) for (site, layer), columns in layers]
    pickles = {
        name: nest({site_layer: columns[name].to_numpy(float) for site_layer, columns in site_layers})
        for name in measures
    }
    kinds: dict[str, dict[SiteLayer, Array]] = {}
    for key, array in study.arrays.items():
        site, layer, kind = key.split("/")
        if not kind.endswith(("_low", "_high")):
            kinds.setdefault(kind, {})[Site(site), int(layer)] = array
    return pickles | {f"similarity_{kind}_matrices": nest(kinds[kind]) for kind in sorted(kinds)}


def nest(attention_sites: Mapping[SiteLayer, Array]) -> dict[str, list[dict[str, Array]]]:
    """Arrays by (site, layer) in the MHR nesting; cross attention is called `enc_attn` there."""
    stacks: dict[str, list[dict[str, Array]]] = {"encoder": [], "decoder": []}
    for (site, layer), array in sorted(attention_sites.items(), key=lambda entry: SITES.index(entry[0][0])):
        stack, kind = FORK_NAMES[site]
        stacks[stack] += [{} for _ in range(len(stacks[stack]), layer + 1)]
        stacks[stack][layer][kind] = array
    return stacks
