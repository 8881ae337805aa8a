"""The demonstration: a pretrained BERT measured and pruned, relevance in the translation model that ships, one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    calibration: dict[str, Any] = {"source": text["calibration.en"], "valid_source": text["test.en"]}
    measures: dict[str, Any]
    try:
        its: dict[str, Any] = {"checkpoint": demo_checkpoint(), "force": force}
    except CheckpointError as error:
        missing = str(error)
    else:
        measures = {"parse": str(text["parsed.conllu"]), "also": ("explained",), "analysis_options": FITS}
        parts["bert"] = _prune(its, out / "bert", measures, {"by": "obs", **calibration}, calibration, progress)
    its = {"checkpoint": trained_model(), "force": force}
    measures = {
        "source": captions("en"),
        "target": captions("de"),
        "parse": str(captions("conllu")),
        "target_parse": captions("de.conllu"),
        "analysis_options": {"alignments": captions("align"), **FITS},
        "max_sentences": EXPLAINED,
        "also": ("lrp", "explained"),
    }
    folder = out / "translation"
    calibration = {"source": text["learn.en"], "target": text["learn.de"]}
    calibration |= {"valid_source": text["test.en"], "valid_target": text["test.de"]}
    ranking = {"by": MEASURE, "run": folder, "sites": ("encoder-self",)}
    parts["translation"] = _prune(its, folder, measures, ranking, calibration, progress)
    models = (trained_model(), str(parts["translation"][1].path))
    before, after = (_evaluate(checkpoint, text, progress) for checkpoint in models)
    write_page([out / f"{name}{kind}" for name in parts for kind in ("", "-ranking", "-pruned")], page)
    return Demonstration(parts, (before, after), page, missing)


def _prune(
    its: Mapping[str, Any],
    folder: Path,
    measures: Mapping[str, Any],
    ranking: Mapping[str, Any],
    calibration: Mapping[str, Any],
    progress: Progress,
) -> tuple[Study, Removal]:
    """All heads measured; half of them ranked out and cut out, and what is left of the output projections refitted."""
    config = AnalyzeConfig(out=folder, page_examples=6, figures=False, **its, **measures)
    study = run_analysis(config, progress=progress)
    if not study.complete:
        raise KeyboardInterrupt
    sibling = folder.with_name
    choice_config = RankConfig(out=sibling(f"{folder.name}-ranking"), keep_fraction=SHARE, **its, **ranking)
    heads = ",".join(map(str, run_ranking(choice_config, progress=progress).removed))
    options = {"heads": heads, "compensate": "least-squares", "rounds": ROUNDS, **its, **calibration}
    return study, run_removal(RemoveConfig(out=sibling(f"{folder.name}-pruned"), **options))


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
