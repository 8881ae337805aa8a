"""What a model is made smaller with: the texts, each for one purpose, and what is decided before anything is measured.

Heads are ranked and projections refitted on one text; how they are refitted is chosen on a second; how good the result
is, and whether that is a loss, is measured on a third, and on a text of another kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headscope.attribution.objectives.base import OBJECTIVES, choose_objective
from headscope.data.corpus import Corpus
from headscope.data.lines import Lines
from headscope.errors import ConfigError
from headscope.evaluation.before_after import Question, question
from headscope.evaluation.non_inferiority import FEWEST
from headscope.formats.base import Checkpoint, Export
from headscope.pruning.closed_form.anchors import second_text
from headscope.pruning.closed_form.calibration import CalibrationText, split_text
from headscope.pruning.model_inputs import InputTexts, texts
from headscope.pruning.options.refit import AUTO, as_text
from headscope.pruning.options.shrink import ShrinkConfig
from headscope.pruning.removal.export import export_for
from headscope.pruning.selection import OpenedSelection, open_selection
from headscope.pruning.sweep.cells import SweepContext

COMPARED = 32
"""Lines of the text on which the smaller model is compared with the masked one."""


@dataclass(frozen=True)
class Opened:
    """An open checkpoint with its texts: `text` to rank and refit on, and to choose refits by; what is `asked` of both.

    `asked` is on text that nothing was fitted to or chosen by, `second` on a text of another kind (None: there is no
    metric for it). `compared` are the sentences on which the smaller model must equal the masked one, `sizes` the cells
    of the sizes that may be tried.
    """

    config: ShrinkConfig
    text: CalibrationText
    asked: Question
    second: Question | None
    compared: InputTexts
    export: Export
    sizes: SweepContext

    @property
    def checkpoint(self) -> Checkpoint:
        """The intact model."""
        return self.sizes.checkpoint

    def put_sizes(self, folder: Path) -> None:
        """Go on with the cells in this folder."""
        self.sizes.config = replace(self.sizes.config, out=folder)
        folder.mkdir(parents=True, exist_ok=True)


def open_shrink(config: ShrinkConfig, folder: Path) -> Opened:
    """Open what the options of the command name; cells are to lie in `folder`."""
    opened = open_selection(config.sizes(folder, by=config.by or "obs", metric=""), trains=False)
    valid = opened.valid if config.valid_text is not None else None
    return opened_with(config, folder, opened, valid, (config.source, config.target))


def opened_with(
    config: ShrinkConfig,
    folder: Path,
    opened: OpenedSelection,
    valid: Corpus | None,
    lines: tuple[Lines | None, Lines | None],
) -> Opened:
    """Divide the text of an open checkpoint and decide by what it is ranked and measured.

    `lines` are those of the text, to compare on. ConfigError where no metric, criterion or export fits.
    """
    checkpoint, corpus, export = opened.checkpoint, opened.corpus, export_for(config.export, opened.checkpoint)
    assert corpus is not None, "the config refuses this"
    if export.holds is not None and not export.holds(checkpoint):
        raise ConfigError(
            f"--export {export.name}: a config of type {checkpoint.model_type!r} cannot say how wide a head is, so its "
            "heads would get wider as they get fewer; take self-contained"
        )
    corpus, judged = divided(corpus, valid, judged=config.valid_sentences)
    chosen_by = None if config.compensate == AUTO else judged
    text = split_text(corpus, chosen_by, sentences=config.calibration_sentences)
    if config.searches and judged.count < FEWEST:
        raise ConfigError(
            f"{judged.count} sentences to judge on ({judged.name}), and of fewer than {FEWEST} no size is established "
            "to be as good; give more text (--valid-source), or say how small: --keep N or --fraction F"
        )
    asked = question(checkpoint, judged, metric=config.metric, margin=config.margin)
    objective = OBJECTIVES.get(choose_objective(config.objective, checkpoint, **corpus.comes_with))
    by = config.by or ("obs" if objective.compares else "obs-task")  # about what the model predicts, where it does
    sizes = SweepContext(
        config.sizes(folder, by=by, metric=asked.metric), replace(opened, corpus=text.calibration, valid=judged)
    )
    if not config.searches and sizes.cells[-1].keep == sizes.gating.heads:
        raise ConfigError(f"--keep {sizes.gating.heads} are all heads there are; nothing would be removed")
    return Opened(
        config=config,
        text=text,
        asked=asked,
        second=_asked_elsewhere(checkpoint, text.calibration, config, asked),
        compared=texts(checkpoint, *lines, sentences=COMPARED),
        export=export,
        sizes=sizes,
    )


def divided(corpus: Corpus, valid: Corpus | None, *, judged: int) -> tuple[Corpus, Corpus]:
    """A text to choose and calibrate on, and what results are judged on, its lines numbered from 0.

    That is `valid`, else the last fifth of the corpus, at most `judged` lines.
    """
    if valid is None:
        rest = corpus.count - min(judged, corpus.count // 5)
        corpus, valid = corpus.first(rest), corpus.after(rest)
    numbered = replace(valid, read=lambda: (line._replace(number=n) for n, line in enumerate(valid.read())))
    return corpus, numbered


def _asked_elsewhere(checkpoint: Checkpoint, corpus: Corpus, config: ShrinkConfig, asked: Question) -> Question | None:
    """The same metric on a second text, where that can be, else the one that fits.

    Of random subwords, which nothing can be foretold of, only states are compared; None where these cannot be.
    """
    second, foretold = second_text(checkpoint, corpus, as_text(config.check) if config.check else (), seed=config.seed)
    for metric in (asked.metric, "") if foretold else ("cosine",):
        try:
            return question(checkpoint, second, metric=metric, margin=str(asked.margin))
        except ConfigError:
            continue
    return None
