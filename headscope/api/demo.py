"""The demonstration: a pretrained BERT measured and pruned, relevance in the translation model that ships, one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from headscope.api.analysis import run_analysis
from headscope.assets import captions, demo_checkpoint, sample, trained
from headscope.config import AnalyzeConfig, EvaluateConfig
from headscope.errors import CheckpointError
from headscope.evaluation.quality import Evaluation
from headscope.evaluation.run import run_evaluation
from headscope.files.folders import Build
from headscope.files.output_checks import OutputKind
from headscope.files.writing import write_atomically
from headscope.progress import Progress, no_progress
from headscope.pruning.options.rank import RankConfig
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.removal.record import Removed
from headscope.pruning.removal.remove import REMOVAL, run_removal
from headscope.pruning.selection import CHOICE, Selection
from headscope.report.page.write import write_page
from headscope.results.study import Study
from headscope.results.study_files import STUDY
from headscope.version import VERSION

T = TypeVar("T")
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
EXPLAINED = 200  # sentences whose translations are explained: a backward pass for each of their tokens
MEASURE = "lrp"  # what heads of the translation model are ranked by
SHARE = 0.5  # of the heads that stay
ROUNDS = 2  # of timing


@dataclass(frozen=True)
class Part:
    """A model that was measured and pruned; `scores` are of texts that had no part in it, before and after."""

    analysis: Study
    choice: Selection
    removed: Removed
    scores: tuple[Evaluation, Evaluation] | None = None


@dataclass(frozen=True)
class Demonstration:
    """Results of all parts; without the package of the BERT there is none of it, and `missing` says what to do."""

    bert: Part | None
    translation: Part
    page: Path
    missing: str = ""

    @property
    def parts(self) -> list[Part]:
        """Those that there are, in their order."""
        return [part for part in (self.bert, self.translation) if part is not None]


def run_demonstration(out: Path, *, force: bool = False, progress: Progress = no_progress) -> Demonstration:
    """Measure and prune both models, and write the page about them.

    `out` gets, for `bert` and `translation` each, a run of `analyze`, NAME-ranking and NAME-pruned (the smaller
    checkpoint); `text`, and `page.html`. OutputError where `out` has results and `force` is not given.
    """
    with Build(out, DEMONSTRATION, force=force) as build:
        with build.writing() as temporary:
            demonstration = _run(temporary, out, progress)
        build.finish({"headscope": VERSION})
    return _moved(demonstration, temporary, out)


def _run(out: Path, final: Path, progress: Progress) -> Demonstration:
    text, missing, bert = _texts(out / "text"), "", None
    try:
        checkpoint = demo_checkpoint()
    except CheckpointError as error:
        missing = str(error)
    else:
        bert = _bert(checkpoint, out, text, progress)
    translation = _translation(out, text, progress)
    _move_in_files(out, final)
    runs = [
        folder
        for name, part in (("bert", bert), ("translation", translation))
        if part is not None
        for folder in (out / name, out / f"{name}-ranking", part.removed.path)
    ]
    return Demonstration(bert, translation, write_page(runs, out / "page.html"), missing)


def _bert(checkpoint: str, out: Path, text: dict[str, Path], progress: Progress) -> Part:
    """All heads on parsed sentences; half of them go by how well the others make up for them."""
    analysis = _analysed(
        AnalyzeConfig(checkpoint=checkpoint, out=out / "bert", parse=str(text["parsed.conllu"]), also=("explained",)),
        progress,
    )
    calibration: dict[str, Any] = {"source": text["calibration.en"], "valid_source": text["test.en"]}
    choice = run_ranking(
        RankConfig(checkpoint=checkpoint, out=out / "bert-ranking", by="obs", keep_fraction=SHARE, **calibration),
        progress=progress,
    )
    return Part(analysis, choice, _removed(checkpoint, out / "bert-pruned", choice, calibration))


def _translation(out: Path, text: dict[str, Path], progress: Progress) -> Part:
    """Relevance of all heads for translations; half of the encoder's go, the least relevant ones."""
    analysis = _analysed(
        AnalyzeConfig(
            checkpoint=trained(),
            out=out / "translation",
            source=captions("en"),
            target=captions("de"),
            parse=str(captions("conllu")),
            target_parse=captions("de.conllu"),
            analysis_options={"alignments": captions("align")},
            max_sentences=EXPLAINED,
            also=("lrp", "explained"),
        ),
        progress,
    )
    options: dict[str, Any] = {
        "by": MEASURE,
        "run": analysis.folder,
        "keep_fraction": SHARE,
        "sites": ("encoder-self",),
    }
    choice = run_ranking(RankConfig(checkpoint=trained(), out=out / "translation-ranking", **options))
    calibration: dict[str, Any] = {
        "source": text["learn.en"],
        "target": text["learn.de"],
        "valid_source": text["test.en"],
        "valid_target": text["test.de"],
    }
    removed = _removed(trained(), out / "translation-pruned", choice, calibration)
    before, after = (_scores(path, text, progress) for path in (trained(), str(removed.path)))
    return Part(analysis, choice, removed, (before, after))


def _analysed(config: AnalyzeConfig, progress: Progress) -> Study:
    study = run_analysis(replace(config, examples=6), progress=progress)
    if not study.complete:
        raise KeyboardInterrupt
    return study


def _removed(checkpoint: str, out: Path, choice: Selection, calibration: dict[str, Any]) -> Removed:
    """The heads that were chosen cut out, and what is left of the output projections refitted."""
    heads = ",".join(map(str, choice.removed))
    options = {"compensate": "least-squares", "rounds": ROUNDS, **calibration}
    return run_removal(RemoveConfig(checkpoint=checkpoint, out=out, heads=heads, **options))


def _scores(checkpoint: str, text: dict[str, Path], progress: Progress) -> Evaluation:
    config = EvaluateConfig(
        checkpoint=checkpoint, source=text["test.en"], target=text["test.de"], metrics=("bleu", "perplexity")
    )
    evaluation = run_evaluation(config, progress=progress)
    if not evaluation.complete:
        raise KeyboardInterrupt
    return evaluation


def _texts(folder: Path) -> dict[str, Path]:
    """Captions in two parts, to refit on and to measure on; what the BERT reads has the sample corpus before them."""
    paths = {}
    for kind in ("en", "de"):
        lines = captions(kind).read_text(encoding="utf-8").splitlines()
        for name, part in (("learn", lines[:LEARN]), ("test", lines[LEARN:])):
            paths[f"{name}.{kind}"] = _written(folder / f"{name}.{kind}", part)
    learnt = captions("en").read_text(encoding="utf-8").splitlines()[:LEARN]
    known = sample("en").read_text(encoding="utf-8").splitlines()
    paths["calibration.en"] = _written(folder / "calibration.en", [*known, *learnt])
    parses = [path.read_text(encoding="utf-8").strip("\n") + "\n" for path in (sample("conllu"), captions("conllu"))]
    paths["parsed.conllu"] = _written(folder / "parsed.conllu", parses)
    return paths


def _written(path: Path, lines: Sequence[str]) -> Path:
    text = "\n".join(lines) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _moved(value: T, old: Path, new: Path) -> T:
    """A copy of results with paths below `new` instead of `old`, in names and messages too."""
    moved: Any = value
    if isinstance(value, (str, Path)):
        moved = type(value)(str(value).replace(str(old), str(new)))
    elif is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _moved(getattr(value, field.name), old, new) for field in fields(value) if field.init}
        moved = replace(value, **changed)
    elif isinstance(value, dict):
        moved = {key: _moved(entry, old, new) for key, entry in value.items()}
    elif type(value) in (list, tuple):
        moved = type(value)(_moved(entry, old, new) for entry in value)  # type: ignore[attr-defined, call-arg]
    result: T = moved
    return result


def _move_in_files(folder: Path, new: Path) -> None:
    """Records name texts by their paths: those that they have when all is in its place."""
    for path in sorted(folder.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        if str(folder) in text:
            path.write_text(text.replace(str(folder), str(new)), encoding="utf-8")
