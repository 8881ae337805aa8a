"""The demonstration on the model that ships: analysis, learned choice of heads, removal, BLEU before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headscope.api.analysis import Finished, run_analysis
from headscope.assets import captions, sample, trained
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.engine.run_files import ANALYSIS
from headscope.evaluation.quality import Evaluation, run_evaluation
from headscope.files.folders import Build
from headscope.files.output_kind import OutputKind
from headscope.files.writing import write_atomically
from headscope.progress import Progress, no_progress
from headscope.pruning.learning.learn import LearnConfig, run_learning
from headscope.pruning.learning.subset import SubsetOptions
from headscope.pruning.removal.remove import REMOVAL, RemoveConfig, Removed, run_removal
from headscope.pruning.selection import CHOICE, Selection
from headscope.version import VERSION

DEMONSTRATION = OutputKind(
    "demonstration",
    "run of `headscope demo`",
    "demo.json",
    (*ANALYSIS.within("analysis"), *CHOICE.within("gates"), *REMOVAL.within("pruned"), "text/*.en", "text/*.de"),
)
LEARN = 140  # captions that gates are learned from; the others are translated
KEEP = 12  # of the 24 heads of encoder self attention, where Voita et al. 2019 prune the most
UPDATES = 200
TOKENS = 1024  # per update: twice as many take twice as long and do not improve the choice


@dataclass(frozen=True)
class Demonstration:
    """Results of all steps; `before` and `after` are scores of captions that were not used for learning."""

    analysis: Finished
    choice: Selection
    removed: Removed
    before: Evaluation
    after: Evaluation
    figures: tuple[Path, ...]


def run_demonstration(out: Path, *, force: bool = False, progress: Progress = no_progress) -> Demonstration:
    """Analyse the model on the sample corpus, learn which heads to keep, remove the others, evaluate before and after.

    `out` has the folders `analysis` (relevance, functions, figures), `gates`, `pruned` (the smaller checkpoint) and
    `text`. OutputError where `out` has results and `force` is not given.
    """
    with Build(out, DEMONSTRATION, force=force) as build:
        with build.writing() as temporary:
            demonstration = _run(temporary, progress)
        build.finish({"headscope": VERSION})
    return _moved(demonstration, temporary, out)


def _run(out: Path, progress: Progress) -> Demonstration:
    text = _split(out / "text")
    analysis = run_analysis(
        AnalyzeConfig(
            checkpoint=trained(),
            out=out / "analysis",
            source=sample("en"),
            target=sample("de"),
            parse=str(sample("conllu")),
            also=("lrp",),
        ),
        progress=progress,
    )
    if not analysis.study.complete:
        raise KeyboardInterrupt
    choice = run_learning(
        LearnConfig(
            checkpoint=trained(),
            out=out / "gates",
            source=text["learn.en"],
            target=text["learn.de"],
            valid_source=text["test.en"],
            valid_target=text["test.de"],
            method=SubsetOptions(keep=KEEP),
            sites=("encoder-self",),
            freeze="model",
            updates=UPDATES,
            batch_tokens=TOKENS,
        ),
        progress=progress,
    )
    removed = run_removal(
        RemoveConfig(
            checkpoint=trained(),
            out=out / "pruned",
            heads=",".join(map(str, choice.removed)),
            source=text["test.en"],
            target=text["test.de"],
        )
    )
    before, after = (_scores(path, text, progress) for path in (trained(), str(out / "pruned")))
    return Demonstration(analysis, choice, removed, before, after, tuple(analysis.figures))


def _moved(demonstration: Demonstration, temporary: Path, out: Path) -> Demonstration:
    """A copy with paths below `out` instead of `temporary`."""

    def at(path: Path) -> Path:
        return out / path.relative_to(temporary)

    figures = tuple(map(at, demonstration.figures))
    return replace(
        demonstration,
        analysis=replace(demonstration.analysis, folder=at(demonstration.analysis.folder), figures=list(figures)),
        choice=replace(demonstration.choice, folder=at(demonstration.choice.folder)),
        removed=replace(demonstration.removed, path=at(demonstration.removed.path)),
        figures=figures,
    )


def _split(folder: Path) -> dict[str, Path]:
    """Write the captions in two parts, one to learn from and one to translate."""
    paths = {}
    for kind in ("en", "de"):
        lines = captions(kind).read_text(encoding="utf-8").splitlines()
        for name, part in (("learn", lines[:LEARN]), ("test", lines[LEARN:])):
            paths[f"{name}.{kind}"] = _written(folder / f"{name}.{kind}", part)
    return paths


def _written(path: Path, lines: Sequence[str]) -> Path:
    text = "\n".join(lines) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _scores(checkpoint: str, text: dict[str, Path], progress: Progress) -> Evaluation:
    config = EvaluateConfig(
        checkpoint=checkpoint, source=text["test.en"], target=text["test.de"], metrics=("bleu", "perplexity")
    )
    evaluation = run_evaluation(config, progress=progress)
    if not evaluation.complete:
        raise KeyboardInterrupt
    return evaluation
