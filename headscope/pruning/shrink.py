"""From a checkpoint and a text to a folder with a smaller, measured one: what `headscope prune shrink` does.

Rank, allocate, refit, choose the size, remove, verify, evaluate on two texts, write. One text serves to rank heads and
to refit projections, a second to choose between refits, a third to measure the result and its loss; it is measured on
a text of another kind too.

The size is given, or it is the smallest of a fixed sequence that is still as good. Sizes are measured from the largest
down, until the first that is not established to be as good: in this order no verdict needs a correction for the others
(`headscope.evaluation.non_inferiority`).

The sizes are cells of a sweep by one ranking. OUT/sizes keeps the ranking and the measured cells in the files of
`headscope prune sweep`, so an interrupted run resumes. The folder is then built beside its place and swapped in.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headscope.attribution.objectives.base import OBJECTIVES, choose_objective
from headscope.config.declarations import import_target
from headscope.config.option import changed_options, identity
from headscope.data.corpus import Corpus, open_text
from headscope.engine.base import RunOptions
from headscope.errors import ConfigError, HeadscopeError, flag
from headscope.evaluation.before_after import QualityTask, judge_loss, make_quality_task
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.evaluation.non_inferiority import FEWEST, OPEN, NonInferiority, format_bound, take_established, why_open
from headscope.export.base import export_for
from headscope.files.folders import Build, replacing_folder, workplace
from headscope.files.output_checks import OutputKind, check_folder, check_inputs, contents, inputs_of
from headscope.files.reading import read_record
from headscope.files.writing import write_json
from headscope.formats.base import Checkpoint, Export
from headscope.formats.exports import MODEL_FILES
from headscope.heads import HeadId
from headscope.model.forward import return_freed_memory
from headscope.model.removal_plan import plan_removal
from headscope.model.stored_weights import written_type
from headscope.progress import Progress, no_progress
from headscope.pruning.closed_form.anchors import second_text
from headscope.pruning.closed_form.bench import RefitBench, rounded_copy
from headscope.pruning.closed_form.compensate import CalibrationText, split_text
from headscope.pruning.options.removal import ShrinkConfig
from headscope.pruning.options.shared import AUTO, other_text
from headscope.pruning.ranking.criterion import moments_of
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import check_targets, push_removal, remove_planned, write_shrunk
from headscope.pruning.removal.verify import compare
from headscope.pruning.removal.whole_layers import measure_whole_layers
from headscope.pruning.selection import open_selection
from headscope.pruning.sweep.cells import CELLS, SCORES, SWEEP, UNPRUNED, Cell, Record, read_cells, write_cell
from headscope.pruning.sweep.cells import RECORD as SWEEP_RECORD
from headscope.pruning.sweep.methods import SweepContext, removed_heads, run_cell
from headscope.pruning.sweep.sweep import difference, sweep_record, write_conclusion
from headscope.results.removal import RECORD, Removal
from headscope.signature import count_of

COMPARED_LINES = 16
"""Lines of the text on which the smaller model is compared with the masked one."""


@dataclass(frozen=True)
class OpenedShrink:
    """An open checkpoint with its texts and the metrics on them.

    `text` serves to rank heads, to refit, and to choose between refits. `question` measures on text that nothing was
    fitted to or chosen by, `second` on a text of another kind (None: no metric applies to it). `comparison_texts` are
    sentences on which the smaller model must equal the masked one, `sizes` the sweep over the sizes that may be tried.
    """

    config: ShrinkConfig
    text: CalibrationText
    question: QualityTask
    second: QualityTask | None
    comparison_texts: InputTexts
    export: Export
    sizes: SweepContext


def open_shrink(config: ShrinkConfig, folder: Path, *, checkpoint: Checkpoint | None = None) -> OpenedShrink:
    """Open the checkpoint (unless it is given) and the texts, and choose the metric; cells will lie in `folder`.

    ConfigError where no metric, criterion or export fits.
    """
    held_out = config.valid_text
    valid = None if held_out is None else open_text(held_out, max_sentences=config.valid_sentences)
    # refuse a text that is too short before the model is opened
    divide_text(open_text(config, max_sentences=config.max_sentences), valid, config)
    selection = open_selection(
        config.sizes(folder, by=config.by or "obs", metric=""), trains=False, checkpoint=checkpoint
    )
    checkpoint, corpus, export = selection.checkpoint, selection.corpus, export_for(config.export, selection.checkpoint)
    assert corpus is not None, "the config requires text"
    if export.holds is not None and not export.holds(checkpoint):
        raise ConfigError(
            f"{flag.export} {export.name}: a config of type {checkpoint.model_type!r} has no width of heads, so its "
            "heads would get wider as they get fewer; take self-contained"
        )
    text, validation = divide_text(corpus, None if held_out is None else selection.valid, config)
    tokenize = config.bleu_tokenize
    task = make_quality_task(checkpoint, validation, metric=config.metric, margin=config.margin, bleu_tokenize=tokenize)
    objective = OBJECTIVES.get(choose_objective(config.objective, checkpoint, **corpus.comes_with))
    default = "obs" if objective.compares else "obs-task"
    by = config.by or ("fisher" if config.allocation == "measured" else default)
    sizes = SweepContext(
        config.sizes(folder, by=by, metric=task.metric.name),
        replace(selection, corpus=text.calibration, valid=validation),
    )
    if not config.searches and sizes.cells[-1].keep == sizes.gating.heads:
        share = config.keep_fraction
        size_given = f"{flag.keep} {config.keep}" if share is None else f"{flag.keep_fraction} {share:g}"
        raise ConfigError(f"{size_given} are all {sizes.gating.heads} heads there are; nothing would be removed")
    return OpenedShrink(
        config=config,
        text=text,
        question=task,
        second=_second_task(checkpoint, text.calibration, config, task),
        comparison_texts=read_input_texts(checkpoint, config.source, config.target, sentences=COMPARED_LINES),
        export=export,
        sizes=sizes,
    )


def divide_text(corpus: Corpus, valid: Corpus | None, config: ShrinkConfig) -> tuple[CalibrationText, Corpus]:
    """The calibration text, and the text to measure results on (`valid`, else the last fifth) with lines from 0."""
    if valid is None:
        n_calibration = corpus.count - min(config.valid_sentences, corpus.count // 5)
        corpus, valid = corpus.first(n_calibration), corpus.after(n_calibration)
    validation = replace(valid, read=lambda: (line._replace(number=n) for n, line in enumerate(valid.read())))
    chosen_by = None if config.compensate == AUTO else validation
    text = split_text(corpus, chosen_by, sentences=config.calibration_sentences)
    if config.searches and validation.count < FEWEST:
        raise ConfigError(
            f"{count_of(validation.count, 'sentence')} to judge on ({validation.name}), and of fewer than {FEWEST} no "
            f"size is established to be as good; give more text ({flag.valid_source}), or {flag.keep} N"
        )
    return text, validation


def _second_task(checkpoint: Checkpoint, corpus: Corpus, config: ShrinkConfig, task: QualityTask) -> QualityTask | None:
    """The same metric on a second text if it applies there, else the default one; None if no metric applies.

    On random subwords, which cannot be predicted, only hidden states are compared.
    """
    second, is_predictable = second_text(checkpoint, corpus, other_text("check", config.check), seed=config.seed)
    for metric in (task.metric.name, "") if is_predictable else ("cosine",):
        try:
            tokenize = config.bleu_tokenize if metric == "bleu" else None
            return make_quality_task(checkpoint, second, metric=metric, margin=str(task.margin), bleu_tokenize=tokenize)
        except ConfigError:
            continue
    return None


def choose_heads(
    setup: OpenedShrink, whole_cell: Cell, size_cells: Sequence[Cell], *, progress: Progress = no_progress
) -> list[HeadId]:
    """The heads to remove: the requested number, else those of the smallest size that is as good."""
    context, records, all_verdicts = setup.sizes, list[Record](), list[NonInferiority]()
    if not setup.config.searches:
        return removed_heads(context, size_cells[0])
    folder = context.config.out
    earlier_cells = read_cells(folder)
    with progress("measuring the unpruned model", 1) as step:
        baseline = _measure_cell(context, whole_cell, earlier_cells)
        step(1)

    def verdicts() -> Iterator[NonInferiority]:
        for number, cell in enumerate(size_cells, start=1):
            context.cells = [whole_cell, *size_cells[:number]]  # a measured allocation goes only as far as this size
            context.scores(cell, progress=progress)
            with progress(f"measuring with {cell.keep} of {context.gating.heads} heads", 1) as step:
                records.append(_measure_cell(context, cell, earlier_cells))
                step(1)
            intact, sums = (np.array(record["sums"]) for record in (baseline, records[-1]))
            all_verdicts.append(judge_loss(METRICS.get(context.metric), [sums], intact, context.config.tolerance))
            yield all_verdicts[-1]

    n_passed = len(list(take_established(verdicts())))
    if not n_passed:
        verdict, text = all_verdicts[0], count_of(setup.question.data.corpus.count, "sentence")
        limits = {"worse_limit": verdict.worse_limit, "margin": verdict.margin, "detectable": verdict.detectable}
        why = f"; {why_open(**limits, text=text)}" if verdict.verdict == OPEN else ""
        raise ConfigError(
            f"not even with {len(records[0]['kept'])} of {context.gating.heads} heads the loss of "
            f"{METRICS.get(context.metric).title} is established to be within {setup.config.margin}: "
            f"{format_bound(verdict.worse, verdict.worse_limit)}{why}; give more text to judge on "
            f"({flag.valid_source}), a wider {flag.max_drop}, or {flag.keep} N"
        )
    kept = set(records[n_passed - 1]["kept"])
    return [head for head in context.gating.remaining_heads([]) if str(head) not in kept]


def _measure_cell(context: SweepContext, cell: Cell, earlier_cells: Mapping[str, Record]) -> Record:
    """The record of a cell: of an interrupted run, or measured and written."""
    with flag.spelling(margin="max_drop"):
        record = earlier_cells.get(cell.name)
        if record is None:
            record = run_cell(context, cell)
            write_cell(context.config.out, cell, record)
        elif cell.method == UNPRUNED:
            context.why_no_baseline(np.array(record["sums"]))
    return record


SIZES, PAGE = "sizes", "page.html"
SHRINK = OutputKind(
    "shrink",
    "run of `headscope prune shrink`",
    RECORD,
    (*MODEL_FILES, PAGE, *SWEEP.in_folder(SIZES)),
    partial=SWEEP.in_folder(SIZES),
)
"""The folder of a removal with the sizes that were tried, and a page."""


def run_shrink(config: ShrinkConfig, *, progress: Progress = no_progress) -> Removal:
    """Make the model of a checkpoint smaller and write it to `config.out`; resumes an interrupted run."""
    check_targets(config)
    began = time.monotonic()
    inputs, earlier_run = inputs_of(config), None
    replaces = config.force or not contents(config.out, SHRINK)
    folder = replacing_folder(config.out) if replaces else config.out
    if (folder / SIZES / SWEEP_RECORD).is_file() and not (folder / RECORD).is_file():
        earlier_run = folder  # of an interrupted run
    if earlier_run is None:
        check_folder(config.out, SHRINK, inputs=inputs, force=config.force)
    check_inputs(config.out, inputs)
    setup = open_shrink(config, config.out / SIZES)
    if earlier_run is not None and (why := _difference(earlier_run / SIZES, setup)):
        if not config.force:
            raise ConfigError(f"{why}; give the same, another {flag.out}, or {flag.force} to begin anew")
        earlier_run = None
    with workplace(config.out, SHRINK, inputs=inputs, force=config.force, resume=earlier_run) as workspace:
        sizes = workspace.path / SIZES
        setup.sizes.config = replace(setup.sizes.config, out=sizes)
        sizes.mkdir(exist_ok=True)
        write_json(sizes / SWEEP_RECORD, SWEEP.describe(sweep_record(setup.sizes) | {"shrink": identity(config)}))
        try:
            shrunk = small_model(setup, progress=progress)
        except HeadscopeError as error:
            has_results = any((sizes / name).is_dir() for name in (SCORES, CELLS))
            advice = f"; {sizes} keeps what was ranked and measured, and the same command goes on from there"
            raise type(error)(f"{error}{advice if has_results else ''}") from None

        def add(folder: Path) -> None:
            """Write the tried sizes and the page beside the model."""
            if config.searches:
                shutil.copytree(sizes, folder / SIZES)
                setup.sizes.config = replace(setup.sizes.config, out=folder / SIZES)
                write_conclusion(setup.sizes, sweep_record(setup.sizes))
            import_target("headscope.report.page.write:write_removal_page")(folder, config.out.resolve().name)

        with Build(config.out, SHRINK, inputs=inputs, force=True) as build:
            removal = write_shrunk(shrunk, config, build, whole=setup.sizes.checkpoint, add=add, began=began)
        if workspace.path.resolve() != config.out.resolve():
            workspace.discard()
    return push_removal(removal, config)


def small_model(setup: OpenedShrink, *, progress: Progress = no_progress) -> Shrunk:
    """The smaller model in memory, verified, and measured on both texts, as are models without whole layers.

    ConfigError where no size is as good.
    """
    config, context, checkpoint = setup.config, setup.sizes, setup.sizes.checkpoint
    smaller = [cell for cell in context.cells if cell.keep != context.gating.heads]
    whole_cell, *size_cells = sorted(smaller, key=lambda cell: -math.inf if cell.keep is None else -cell.keep)
    _check_removal(setup, size_cells[-1])
    context.cells = [whole_cell, size_cells[0]]
    scoring = replace(context.scoring, options=RunOptions(seed=config.seed, objective=config.objective))
    searches, refit = config.allocation == "measured", config.refit
    with progress("reading the text", 1) as step:
        reads = searches or refit.method != "none"
        moments = {"": moments_of(scoring, gradients=searches)} if reads else {}
        step(1)
    return_freed_memory()
    bench = RefitBench(
        checkpoint,
        setup.text,
        replace(refit, add_bias=setup.export.adds_bias),
        batching=scoring.batching,
        seed=config.seed,
        moments=moments,
    )
    if refit.method == AUTO:  # otherwise the bench's held-out text is the one that the result is measured on
        context.scoring = replace(scoring, bench=bench)
    context.scores(size_cells[0], progress=progress)
    context.refit = lambda heads_off: _as_written(bench.compensation(list(heads_off)).checkpoint)
    heads = choose_heads(setup, whole_cell, size_cells, progress=progress)
    context.forget()
    plan = plan_removal(checkpoint.attention_sites, heads, whole_groups=setup.export.whole_groups)
    data = setup.comparison_texts
    with progress("removing heads", 1) as step:
        shrunk = remove_planned(checkpoint, plan, setup.export, data, bench, setup.question, setup.second)
        step(1)
    with progress("comparing with whole layers", 1) as step:
        n_parameters = sum(weights.numel() for weights in shrunk.checkpoint.model.parameters())
        n_removed, tasks = shrunk.before.parameters - n_parameters, [setup.question, setup.second]
        layers = measure_whole_layers(
            checkpoint, setup.text.calibration, n_removed, list(filter(None, tasks)), data.feeds[-1]
        )
        step(1)
    return replace(shrunk, layers=layers)


def _check_removal(setup: OpenedShrink, smallest: Cell) -> None:
    """Try the smallest size before ranking, without the last heads of each layer; refuse a model that cannot lose them.

    CheckpointError where the smaller model computes something else, ConfigError where heads cannot be removed.
    """
    context, checkpoint = setup.sizes, setup.sizes.checkpoint
    scores = {
        head: -head.head / checkpoint.layout[head.site, head.layer] for head in context.gating.remaining_heads([])
    }
    heads = removed_heads(context, smallest, scores)
    plan = plan_removal(checkpoint.attention_sites, heads, whole_groups=setup.export.whole_groups)
    compare(checkpoint, setup.export.build(checkpoint, plan), heads, setup.comparison_texts.first())
    return_freed_memory()


def _as_written(refitted_checkpoint: Checkpoint) -> Checkpoint:
    """A copy of a refitted checkpoint rounded as its files will be; itself where nothing is rounded."""
    names = refitted_checkpoint.model.named_parameters()
    if all(written_type(name, weight, refitted_checkpoint.stored_dtype) == weight.dtype for name, weight in names):
        return refitted_checkpoint
    return rounded_copy(refitted_checkpoint)  # a copy: the bench reuses the unrounded one for the final removal


def _difference(folder: Path, setup: OpenedShrink) -> str:
    """A line on how an interrupted run differs from this one; "" where it does not."""
    earlier_record, now = read_record(folder / SWEEP_RECORD), identity(setup.config)
    options = earlier_record.get("shrink")
    if not isinstance(options, dict):
        return f"{folder / SWEEP_RECORD} cannot be read"
    if changes := changed_options(now, options):
        name = changes[0]
        return f"the run in {folder.parent} was begun with {flag(name)} {options.get(name)}, now {now[name]}"
    return (difference(folder, sweep_record(setup.sizes), earlier_record) or "").partition(";")[0]
