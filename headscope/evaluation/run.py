"""`headscope evaluate`: open a checkpoint and a text, measure, write the table that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headscope.config import EvaluateConfig
from headscope.distributed import ALONE, Processes
from headscope.evaluation.each_head import EachHead, score_each_head
from headscope.evaluation.opened import OpenedEvaluation, open_all
from headscope.evaluation.quality import Evaluation, score_corpus
from headscope.files.folders import check_writable, write_beside
from headscope.files.output_checks import Input, check_file, inputs_of
from headscope.files.tables import shielded
from headscope.model.discovery import eval_mode
from headscope.progress import Progress, no_progress

R = TypeVar("R", bound=Evaluation | EachHead)


def run_evaluation(
    config: EvaluateConfig,
    *,
    opened: OpenedEvaluation | None = None,
    progress: Progress = no_progress,
    processes: Processes = ALONE,
) -> Evaluation:
    """Open everything that is not `opened`, measure, and write `config.per_sentence`.

    Several `processes` share the text; all get the scores, and the first writes. HeadscopeError for whatever the user
    can fix. Interrupted by Ctrl-C while references are scored, it gives what was done (`complete` is then false).
    """
    return _measure(config, config.per_sentence, score_corpus, opened, progress, processes)


def run_each_head(
    config: EvaluateConfig,
    *,
    opened: OpenedEvaluation | None = None,
    progress: Progress = no_progress,
    processes: Processes = ALONE,
) -> EachHead:
    """As `run_evaluation`, with each head masked (see `score_each_head`); writes `config.out`."""
    return _measure(config, config.out, score_each_head, opened, progress, processes)


def _measure(
    config: EvaluateConfig,
    out: Path | None,
    measure: Callable[..., R],
    opened: OpenedEvaluation | None,
    progress: Progress,
    processes: Processes,
) -> R:
    """OutputError before anything is measured where `out` must not or cannot be written."""
    inputs = inputs_of(config)
    if out is not None:
        check_file(out, inputs=inputs, force=config.force)
        check_writable(out)
    opened = replace(opened or open_all(config), processes=processes)
    intact = opened.intact or opened.checkpoint
    if out is not None:
        inputs += [Input(Path(intact.path), checkpoint=True)] if opened.intact else []
        inputs += [Input(path) for path in opened.checkpoint.read_files]
        check_file(out, inputs=inputs, force=config.force)
    with eval_mode(opened.checkpoint.model), eval_mode(intact.model):
        result = measure(opened, progress=progress if processes.main else no_progress)
    if out is not None and processes.main:
        frame = shielded(result.table if isinstance(result, EachHead) else result.sentences)
        kept: dict[str, bool] = {"force": config.force, "complete": result.complete}
        result.remarks += filter(None, [write_beside(out, lambda path: frame.to_csv(path, index=False), **kept)])
    return result
