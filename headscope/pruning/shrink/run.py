"""From a checkpoint and a text to a folder with a smaller, measured one: what `headscope prune shrink` does.

Rank, allocate, refit, choose the size, remove, verify, evaluate on two texts, write. The ranking and every size that is
measured are kept in OUT/sizes, as a sweep keeps its cells, so a run that was interrupted goes on; the folder is then
built beside its place and swapped in.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headscope.config.option import changed, flag, identity
from headscope.errors import ConfigError
from headscope.evaluation.before_after import quality_change
from headscope.files.folders import Build, replacing_folder, workplace
from headscope.files.hub import hub_target
from headscope.files.output_checks import OutputKind, check_folder, check_inputs, inputs_of
from headscope.files.reading import read_record
from headscope.formats.exports import MODEL_FILES
from headscope.model.removal_plan import plan_removal
from headscope.progress import Progress, no_progress
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.options.shrink import ShrinkConfig
from headscope.pruning.ranking.scoring import moments_of
from headscope.pruning.removal.record import Removed, Shrunk, pushed
from headscope.pruning.removal.remove import RECORD, REMOVAL, Destination, shrink, write_shrunk
from headscope.pruning.shrink.opened import Opened, open_shrink
from headscope.pruning.shrink.sizes import chosen_heads, rank
from headscope.pruning.sweep.sweep import RECORD as SWEEP_RECORD
from headscope.pruning.sweep.sweep import SWEEP, difference, write_conclusion, write_record

SIZES, PAGE = "sizes", "page.html"
SMALL = ("keep", "fraction", "max_drop")
SHRINK = OutputKind(
    REMOVAL.name,
    "run of `headscope prune shrink`",
    RECORD,
    (*MODEL_FILES, PAGE, *SWEEP.in_folder(SIZES)),
    unfinished=SWEEP.in_folder(SIZES),
)
"""A removal with the sizes that were tried, and a page."""


def run_shrink(
    config: ShrinkConfig, *, draw: Callable[[Path, str], object] | None = None, progress: Progress = no_progress
) -> Removed:
    """Make the model of a checkpoint smaller and write it to `config.out`, or go on with what an interrupted run left.

    `draw` makes files of the complete folder, given it and the name that it will have. HeadscopeError for whatever the
    user can fix.
    """
    target, began = hub_target(config.hub_name, public=config.hub_public), time.monotonic()
    inputs, to, begun = inputs_of(config), Destination.of(config, "prune shrink"), None
    for folder in [replacing_folder(config.out)] if config.force else [config.out, replacing_folder(config.out)]:
        if begun is None and (folder / SIZES / SWEEP_RECORD).is_file() and not (folder / RECORD).is_file():
            begun = folder  # of an interrupted run
    if begun is None:
        check_folder(config.out, SHRINK, inputs=inputs, force=config.force)
    check_inputs(config.out, inputs)
    opened = open_shrink(config, config.out / SIZES)
    if begun is not None and (why := _difference(begun / SIZES, opened)):
        raise ConfigError(f"{why}; give the same, another --out, or --force to begin anew")
    with workplace(config.out, SHRINK, inputs=inputs, force=config.force, resume=begun) as place:
        sizes = place.path / SIZES
        opened.put_sizes(sizes)
        write_record(opened.sizes, shrink=_identity(config))
        done = small_model(opened, progress=progress)

        def add(folder: Path) -> None:
            """The sizes that were tried and the page, beside the model."""
            if config.searches:
                shutil.copytree(sizes, folder / SIZES)
                opened.put_sizes(folder / SIZES)
                write_conclusion(opened.sizes)
            if draw is not None:
                draw(folder, config.out.resolve().name)

        with Build(config.out, SHRINK, inputs=inputs, force=True) as build:
            removed = write_shrunk(done, to, build, whole=opened.checkpoint, add=add, began=began)
        if place.path.resolve() != config.out.resolve():
            place.discard()
    return pushed(removed, target)


def small_model(opened: Opened, *, progress: Progress = no_progress) -> Shrunk:
    """The smaller model in memory, with its quality on both texts. ConfigError where no size is as good."""
    rank(opened.sizes, progress=progress)
    scoring, refit = opened.sizes.scoring, opened.config.refit
    bench = RefitBench(
        opened.checkpoint,
        opened.text,
        refit,
        add_bias=opened.export.adds_bias,
        batching=scoring.batching,
        seed=opened.config.seed,
        moments=None if refit.method == "none" else moments_of(scoring),  # which the ranking has collected
    )
    opened.sizes.refit = lambda gone: bench.compensated(list(gone)).checkpoint
    heads, checkpoint = chosen_heads(opened, progress=progress), opened.checkpoint
    with progress("removing heads", 2) as step:
        done = shrink(
            checkpoint,
            plan_removal(checkpoint.attention_sites, heads, whole_groups=opened.export.whole_groups),
            export=opened.export,
            data=opened.compared,
            text=opened.text,
            bench=bench,
            asked=opened.asked,
        )
        step(1)
        if opened.second is not None:
            done = replace(done, elsewhere=quality_change(checkpoint, done.checkpoint, opened.second))
        step(1)
    return done


def _identity(config: ShrinkConfig) -> dict[str, Any]:
    """The options that shape what is measured of a size; how small the model gets may be said anew."""
    return {name: value for name, value in identity(config).items() if name not in SMALL}


def _difference(folder: Path, opened: Opened) -> str:
    """In what an interrupted run differs from this one; empty: in nothing."""
    options, now = read_record(folder / SWEEP_RECORD).get("shrink"), _identity(opened.config)
    if not isinstance(options, dict):
        return f"{folder / SWEEP_RECORD} cannot be read"
    if others := changed(now, options, ShrinkConfig):
        name = others[0]
        return f"the run in {folder.parent} was begun with {flag(name)} {options.get(name)}, now {now[name]}"
    return (difference(folder, opened.sizes) or "").partition(";")[0]
