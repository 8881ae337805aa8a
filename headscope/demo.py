"""The demonstration: a pretrained BERT measured and pruned, relevance in the translation model that ships, one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from headscope.assets import captions, demo_checkpoint, sample, trained_model
from headscope.config.analyze import AnalyzeConfig
from headscope.config.commands import EvaluateConfig
from headscope.engine.study import run_analysis
from headscope.errors import CheckpointError, OutputError, shortlist
from headscope.evaluation.quality import Evaluation
from headscope.evaluation.run import run_evaluation
from headscope.files.writing import write_atomically
from headscope.progress import Progress, no_progress
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.removal.remove import run_removal
from headscope.report.page.write import write_page
from headscope.report.styles import check_path
from headscope.results.ranking import Ranking
from headscope.results.removal import Removal
from headscope.results.study import Study

LEARN = 140  # captions that weights are refitted on; the others are for measuring
EXPLAINED = 48  # sentences whose translations are explained: a backward pass for each of their tokens
FITS = {"explained_rows": 450, "explained_steps": 8}  # enough to see what explains a head, in a fifth of the time
WRITES = {
    "text",
    "page.html",
    *(f"{name}{kind}" for name in ("bert", "translation") for kind in ("", "-ranking", "-pruned")),
}
MEASURE = "lrp"  # what heads of the translation model are ranked by
SHARE = 0.5  # of the heads that stay
ROUNDS = 2  # of timing


class Demonstration(NamedTuple):
    """What each model ("bert", "translation") is found to do, and the model without half of its heads.

    Without the package of the BERT there is none of it, and `missing` says what to do. `scores` are of the translation
    model, before and after, on text that had no part in pruning it.
    """

    parts: Mapping[str, tuple[Study, Removal]]
    scores: tuple[Evaluation, Evaluation]
    page: Path
    missing: str


def run_demonstration(out: Path, *, force: bool = False, progress: Progress = no_progress) -> Demonstration:
    """Measure and prune both models, and write the page about them.

    `out` gets, for `bert` and `translation` each, a run of `analyze`, NAME-ranking and NAME-pruned (the smaller
    checkpoint); `text`, and `page.html`. OutputError where `out` has results and `force` is not given.
    """
    foreign = {path.name for path in out.iterdir()} - WRITES if out.is_dir() else {out.name} if out.exists() else set()
    if foreign:
        raise OutputError(
            f"{out} is, or holds, what no demonstration wrote: {shortlist(sorted(foreign))}; choose another folder"
        )
    page = check_path(out / "page.html", page=True, force=force)
    text, missing, parts = _write_texts(out / "text"), "", dict[str, tuple[Study, Removal]]()
    try:
        checkpoint = demo_checkpoint()
    except CheckpointError as error:
        missing = str(error)
    else:
        parts["bert"] = _prune_bert(checkpoint, out, text, force, progress)
    parts["translation"], scores = _prune_translation(out, text, force, progress)
    write_page([out / f"{name}{kind}" for name in parts for kind in ("", "-ranking", "-pruned")], page)
    return Demonstration(parts, scores, page, missing)


def _prune_bert(
    checkpoint: str, out: Path, text: dict[str, Path], force: bool, progress: Progress
) -> tuple[Study, Removal]:
    """All heads on parsed sentences; half of them go by how well the others make up for them."""
    its: dict[str, Any] = {"checkpoint": checkpoint, "force": force}
    parse = str(text["parsed.conllu"])
    config = AnalyzeConfig(out=out / "bert", parse=parse, also=("explained",), analysis_options=FITS, **its)
    analysis = _analyze(config, progress)
    calibration: dict[str, Any] = {"source": text["calibration.en"], "valid_source": text["test.en"]}
    ranking = RankConfig(out=out / "bert-ranking", by="obs", keep_fraction=SHARE, **its, **calibration)
    choice = run_ranking(ranking, progress=progress)
    return analysis, _remove(out / "bert-pruned", choice, its | calibration)


def _prune_translation(
    out: Path, text: dict[str, Path], force: bool, progress: Progress
) -> tuple[tuple[Study, Removal], tuple[Evaluation, Evaluation]]:
    """Relevance of all heads for translations; half of the encoder's go. Scores before and after."""
    its: dict[str, Any] = {"checkpoint": trained_model(), "force": force}
    config = AnalyzeConfig(
        out=out / "translation",
        source=captions("en"),
        target=captions("de"),
        parse=str(captions("conllu")),
        target_parse=captions("de.conllu"),
        analysis_options={"alignments": captions("align"), **FITS},
        max_sentences=EXPLAINED,
        also=("lrp", "explained"),
        **its,
    )
    analysis, folder = _analyze(config, progress), out / "translation-ranking"
    own: dict[str, Any] = {"by": MEASURE, "run": analysis.folder, "keep_fraction": SHARE, "sites": ("encoder-self",)}
    choice = run_ranking(RankConfig(out=folder, **own, **its))
    calibration = {"source": text["learn.en"], "target": text["learn.de"]}
    calibration |= {"valid_source": text["test.en"], "valid_target": text["test.de"]}
    removal = _remove(out / "translation-pruned", choice, its | calibration)
    before, after = (_evaluate(path, text, progress) for path in (trained_model(), str(removal.path)))
    return (analysis, removal), (before, after)


def _analyze(config: AnalyzeConfig, progress: Progress) -> Study:
    study = run_analysis(replace(config, page_examples=6, figures=False), progress=progress)
    if not study.complete:
        raise KeyboardInterrupt
    return study


def _remove(out: Path, choice: Ranking, options: Mapping[str, Any]) -> Removal:
    """The heads that were chosen cut out, and what is left of the output projections refitted."""
    heads = ",".join(map(str, choice.removed))
    return run_removal(RemoveConfig(out=out, heads=heads, compensate="least-squares", rounds=ROUNDS, **options))


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
