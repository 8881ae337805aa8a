"""The passes over a text that metrics need: one of each kind for all metrics and, but for translations, all masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headscope.bootstrap import Array
from headscope.data.batching import Omissions
from headscope.data.encoded import UnknownSubwords
from headscope.errors import DataError
from headscope.evaluation.likelihood import Likelihood, likelihood
from headscope.evaluation.metrics.base import TextMode, Translations, reference_texts
from headscope.evaluation.opened import OpenedEvaluation
from headscope.evaluation.states import StateComparison, compare_states
from headscope.evaluation.translation import translate_lines
from headscope.heads import HeadId
from headscope.model.gating import masked
from headscope.progress import Progress


@dataclass
class MeasuredMetrics:
    """The sums of every metric by group of sentences and mask [g mask c], and what they were made of.

    `hypotheses` are the translations under the first mask. An interrupted pass is not `complete`, and passes that were
    to follow are missing.
    """

    sums: dict[str, Array] = field(default_factory=dict)
    scored: Likelihood | None = None
    compared: StateComparison | None = None
    hypotheses: Sequence[str] = ()
    complete: bool = True

    @property
    def done(self) -> int | None:
        """How many sentences all passes have done; None where there was none but translating."""
        return min((read.sentences for read in (self.scored, self.compared) if read is not None), default=None)


def measure(
    opened: OpenedEvaluation, masks: Sequence[Sequence[HeadId]], progress: Progress, *, step: str = ""
) -> MeasuredMetrics:
    """What the metrics of an evaluation are made of under each mask; `step` is what the progress of all passes is of.

    A KeyboardInterrupt ends the passes, what was done before stays; it is raised where nothing was.
    """
    found = MeasuredMetrics()
    if metrics := opened.asked("likelihood"):
        with progress(step or "scoring", opened.corpus.count) as report:
            found.scored = likelihood(
                opened.checkpoint,
                opened.corpus,
                opened.likelihood_options,
                masks=masks,
                progress=report,
                processes=opened.processes,
            )
        opened.unknown, found.complete = found.scored.losses.unknown, found.scored.complete
        found.sums |= {metric.name: metric.sums(found.scored) for metric in metrics}
    if found.complete and (of_states := opened.asked("states")):
        with progress(step or "comparing", opened.corpus.count) as report:
            found.compared = compare_states(
                opened.checkpoint,
                opened.corpus,
                opened.likelihood_options,
                intact=opened.intact,
                masks=masks,
                progress=report,
                processes=opened.processes,
            )
        opened.unknown, found.complete = found.compared.losses.unknown, found.compared.complete
        found.sums |= {metric.name: metric.sums(found.compared) for metric in of_states}
    if found.complete and opened.asked("translations"):
        try:
            with progress(step or "translating", opened.corpus.count * len(masks)) as report:
                _translate(opened, masks, found, report)
        except KeyboardInterrupt:
            if not found.sums:
                raise
            found.complete = False
            names = ", ".join(metric.title for metric in opened.asked("translations"))
            opened.remarks.append(f"translating was interrupted, so there is no {names}")
    read = found.scored or found.compared
    losses = Omissions() if read is None else read.losses
    if losses.truncated:
        opened.remarks.append(f"cut off at the length limit: {losses.truncated} sentences (--max-length, --long)")
    opened.remarks += opened.unknown.remarks(opened.checkpoint)
    return found


def _translate(
    opened: OpenedEvaluation, masks: Sequence[Sequence[HeadId]], found: MeasuredMetrics, report: Callable[[int], None]
) -> None:
    """Add the metrics of translations under each mask; nothing where that is interrupted."""
    references, metrics = reference_texts(opened.checkpoint, opened.corpus), opened.asked("translations")
    opened.remarks += tokenised_remark(references, opened.config.text)
    sums: dict[str, list[Array]] = {metric.name: [] for metric in metrics}
    for heads in masks:
        with masked(opened.checkpoint.model, heads):
            hypotheses = translate_corpus(opened, report)
        found.hypotheses = found.hypotheses or hypotheses
        for metric in metrics:
            sums[metric.name].append(metric.sums(Translations(hypotheses, references, opened.config.text)))
    found.sums |= {name: np.concatenate(parts, axis=1) for name, parts in sums.items()}


def translate_corpus(opened: OpenedEvaluation, step: Callable[[int], None]) -> list[str]:
    """The best translation of every source line, as the model and its masks are now."""
    lines, unknown = (sentence.source for sentence in opened.corpus), UnknownSubwords()
    cut: list[int] = []
    translations = translate_lines(
        opened.checkpoint,
        lines,
        options=opened.translate_options,
        tokens=opened.config.batch_tokens,
        cut=cut.append,
        unknown=unknown,
        progress=step,
        processes=opened.processes,
    )
    texts = [candidates[0].text for candidates in translations]
    opened.unknown = opened.unknown or unknown  # what the likelihood counted has the target too
    if cut:
        _report_truncated(opened, cut)
    return texts


def _report_truncated(opened: OpenedEvaluation, lines: Sequence[int]) -> None:
    """A remark that lines (by number from 1) were translated from their first pieces, or DataError, as is asked."""
    limit = opened.checkpoint.reads(opened.translate_options.longest)
    if opened.config.long == "refuse":
        raise DataError(
            f"{opened.corpus.name}:{min(lines)}: more than {limit} pieces to translate; shorten the line, raise "
            "--max-length, or take --long truncate"
        )
    remark = f"translated from their first {limit} pieces: {len(lines)} sentences (--max-length, --long)"
    opened.remarks += [remark] if remark not in opened.remarks else []


def tokenised_remark(references: Sequence[str], mode: TextMode) -> list[str]:
    """A remark where "raw" is asked of references that look tokenised."""
    spaced = sum(text.endswith((" .", " ?", " !")) for text in references)
    if mode == "raw" and spaced > len(references) / 2:
        return [
            "the references look tokenised, so raw BLEU and chrF cannot be compared with published ones; give "
            "detokenised text, or --text tokenised-lowercase"
        ]
    return []
