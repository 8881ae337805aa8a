"""The demonstration: a pretrained BERT measured and pruned, relevance in the translation model that ships, one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headscope.assets import captions, demo_checkpoint, sample, trained_model
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.engine.study import run_analysis
from headscope.errors import CheckpointError
from headscope.evaluation.quality import Evaluation
from headscope.evaluation.run import run_evaluation
from headscope.files.folders import Build
from headscope.files.output_checks import OutputKind
from headscope.files.writing import write_atomically
from headscope.progress import Progress, no_progress
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.removal.remove import REMOVAL, run_removal
from headscope.pruning.selection import CHOICE
from headscope.report.page.write import write_page
from headscope.results.ranking import Ranking
from headscope.results.removal import Removal
from headscope.results.study import Study
from headscope.results.study_files import STUDY
from headscope.version import VERSION

DEMONSTRATION = OutputKind(
    "demonstration",
    "run of `headscope demo`",
    "demo.json",
    (
        *(*STUDY.in_folder("bert"), *CHOICE.in_folder("bert-ranking"), *REMOVAL.in_folder("bert-pruned")),
        *STUDY.in_folder("translation"),
        *CHOICE.in_folder("translation-ranking"),
        *REMOVAL.in_folder("translation-pruned"),
        *("text/*.en", "text/*.de", "text/*.conllu", "page.html"),
    ),
)
LEARN = 140  # captions that weights are refitted on; the others are for measuring
EXPLAINED = 48  # sentences whose translations are explained: a backward pass for each of their tokens
FITS = {"explained_rows": 450, "explained_steps": 8}  # enough to see what explains a head, in a fifth of the time
MEASURE = "lrp"  # what heads of the translation model are ranked by
SHARE = 0.5  # of the heads that stay
ROUNDS = 2  # of timing


@dataclass(frozen=True)
class Part:
    """A model that was measured and pruned."""

    analysis: Study
    removal: Removal

    @classmethod
    def open(cls, out: Path, name: str) -> Part:
        """The part called `name` in the folder of a demonstration."""
        return cls(Study.open(out / name), Removal.open(out / f"{name}-pruned"))


@dataclass(frozen=True)
class Demonstration:
    """Results of all parts; without the package of the BERT there is none of it, and `missing` says what to do.

    `scores` are of the translation model, before and after, on text that had no part in pruning it.
    """

    bert: Part | None
    translation: Part
    scores: tuple[Evaluation, Evaluation]
    page: Path
    missing: str

    @property
    def parts(self) -> list[Part]:
        """The BERT, where its package is installed, and the translation model."""
        return [part for part in (self.bert, self.translation) if part is not None]


def run_demonstration(out: Path, *, force: bool = False, progress: Progress = no_progress) -> Demonstration:
    """Measure and prune both models, and write the page about them.

    `out` gets, for `bert` and `translation` each, a run of `analyze`, NAME-ranking and NAME-pruned (the smaller
    checkpoint); `text`, and `page.html`. OutputError where `out` has results and `force` is not given.
    """
    with Build(out, DEMONSTRATION, force=force) as build:
        with build.writing() as temporary:
            missing, scores = _run(temporary, out, progress)
        build.finish({"headscope": VERSION})
    bert = None if missing else Part.open(out, "bert")
    return Demonstration(bert, Part.open(out, "translation"), scores, out / "page.html", missing)


def _run(out: Path, final: Path, progress: Progress) -> tuple[str, tuple[Evaluation, Evaluation]]:
    """Why there is no BERT ("" where there is one), and scores of the translation model before and after."""
    text, missing, names = _write_texts(out / "text"), "", ["translation"]
    try:
        checkpoint = demo_checkpoint()
    except CheckpointError as error:
        missing = str(error)
    else:
        _prune_bert(checkpoint, out, text, progress)
        names.insert(0, "bert")
    scores = _prune_translation(out, text, progress)
    _move_in_files(out, final)
    write_page([out / f"{name}{kind}" for name in names for kind in ("", "-ranking", "-pruned")], out / "page.html")
    return missing, scores


def _prune_bert(checkpoint: str, out: Path, text: dict[str, Path], progress: Progress) -> None:
    """All heads on parsed sentences; half of them go by how well the others make up for them."""
    _analyze(
        AnalyzeConfig(
            checkpoint=checkpoint,
            out=out / "bert",
            parse=str(text["parsed.conllu"]),
            also=("explained",),
            analysis_options=FITS,
        ),
        progress,
    )
    calibration: dict[str, Any] = {"source": text["calibration.en"], "valid_source": text["test.en"]}
    choice = run_ranking(
        RankConfig(checkpoint=checkpoint, out=out / "bert-ranking", by="obs", keep_fraction=SHARE, **calibration),
        progress=progress,
    )
    _remove(checkpoint, out / "bert-pruned", choice, calibration)


def _prune_translation(out: Path, text: dict[str, Path], progress: Progress) -> tuple[Evaluation, Evaluation]:
    """Relevance of all heads for translations; half of the encoder's go. Scores before and after."""
    analysis = _analyze(
        AnalyzeConfig(
            checkpoint=trained_model(),
            out=out / "translation",
            source=captions("en"),
            target=captions("de"),
            parse=str(captions("conllu")),
            target_parse=captions("de.conllu"),
            analysis_options={"alignments": captions("align"), **FITS},
            max_sentences=EXPLAINED,
            also=("lrp", "explained"),
        ),
        progress,
    )
    folder, run = out / "translation-ranking", analysis.folder
    choice = run_ranking(
        RankConfig(
            checkpoint=trained_model(), out=folder, by=MEASURE, run=run, keep_fraction=SHARE, sites=("encoder-self",)
        )
    )
    calibration = {"source": text["learn.en"], "target": text["learn.de"]}
    calibration |= {"valid_source": text["test.en"], "valid_target": text["test.de"]}
    removal = _remove(trained_model(), out / "translation-pruned", choice, calibration)
    before, after = (_evaluate(path, text, progress) for path in (trained_model(), str(removal.path)))
    return before, after


def _analyze(config: AnalyzeConfig, progress: Progress) -> Study:
    study = run_analysis(replace(config, page_examples=6, figures=False), progress=progress)
    if not study.complete:
        raise KeyboardInterrupt
    return study


def _remove(checkpoint: str, out: Path, choice: Ranking, calibration: dict[str, Any]) -> Removal:
    """The heads that were chosen cut out, and what is left of the output projections refitted."""
    heads = ",".join(map(str, choice.removed))
    options = {"compensate": "least-squares", "rounds": ROUNDS, **calibration}
    return run_removal(RemoveConfig(checkpoint=checkpoint, out=out, heads=heads, **options))


def _evaluate(checkpoint: str, text: dict[str, Path], progress: Progress) -> Evaluation:
    config = EvaluateConfig(
        checkpoint=checkpoint, source=text["test.en"], target=text["test.de"], metrics=("bleu", "perplexity")
    )
    evaluation = run_evaluation(config, progress=progress)
    if not evaluation.complete:
        raise KeyboardInterrupt
    return evaluation


def _write_texts(folder: Path) -> dict[str, Path]:
    """Captions in two parts, to refit on and to measure on; what the BERT reads has the sample corpus before them."""
    paths = {}
    for kind in ("en", "de"):
        lines = captions(kind).read_text(encoding="utf-8").splitlines()
        for name, part in (("learn", lines[:LEARN]), ("test", lines[LEARN:])):
            paths[f"{name}.{kind}"] = _write_lines(folder / f"{name}.{kind}", part)
    learnt = captions("en").read_text(encoding="utf-8").splitlines()[:LEARN]
    sample_lines = sample("en").read_text(encoding="utf-8").splitlines()
    paths["calibration.en"] = _write_lines(folder / "calibration.en", [*sample_lines, *learnt])
    parses = [path.read_text(encoding="utf-8").strip("\n") + "\n" for path in (sample("conllu"), captions("conllu"))]
    paths["parsed.conllu"] = _write_lines(folder / "parsed.conllu", parses)
    return paths


def _write_lines(path: Path, lines: Sequence[str]) -> Path:
    text = "\n".join(lines) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _move_in_files(folder: Path, new: Path) -> None:
    """Records name texts by their paths: those that they have when all is in its place."""
    for path in sorted(folder.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        if str(folder) in text:
            path.write_text(text.replace(str(folder), str(new)), encoding="utf-8")
