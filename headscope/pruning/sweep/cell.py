"""One cell of a sweep: which heads go by its method, and how the model is without them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import torch

from headscope.config import Companions
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId
from headscope.model.gating import masked
from headscope.pruning.learning.l0 import L0Options
from headscope.pruning.learning.learn import LearnConfig, run_learning
from headscope.pruning.learning.subset import SubsetOptions
from headscope.pruning.ranking.rank_run import RankConfig, run_ranking
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.selection import MODEL, STATE, Selection
from headscope.pruning.sweep.bench import RUNS, Bench, PrunedModel
from headscope.pruning.sweep.config import LEARNT, UNPRUNED, Cell
from headscope.pruning.sweep.quality import score_sentences
from headscope.pruning.sweep.scratch import trained_from_scratch


def run_cell(bench: Bench, cell: Cell) -> dict[str, Any]:
    """The record of a cell: heads that stay and the sums that its numbers are made of, as plain JSON values."""
    began = time.monotonic()
    pruned = _maker(bench, cell)(bench, cell)
    with masked(pruned.checkpoint.model, pruned.removed):
        scores = score_sentences(pruned.checkpoint, bench.metric, bench.data)
    removed = pruned.removed if not cell.control else [HeadId.parse(name) for name in pruned.facts["instead_of"]]
    kept = bench.kept(removed)
    if not bench.config.keep_models:
        for name in ("scratch",) if cell.control else (MODEL,):
            shutil.rmtree(bench.config.out / RUNS / cell.folder / name, ignore_errors=True)
    return {
        "cell": vars(cell),
        "kept": [str(head) for head in kept],
        "metric": scores.metric,
        "sums": scores.sums.tolist(),
        "loss": scores.loss.sum(axis=0).tolist(),
        "facts": {name: value for name, value in pruned.facts.items() if name != "instead_of"},
        "threads": torch.get_num_threads(),
        "device": bench.checkpoint.device.type,
        "seconds": round(time.monotonic() - began, 3),
    }


def _maker(bench: Bench, cell: Cell) -> Callable[[Bench, Cell], PrunedModel]:
    if cell.control:
        return trained_from_scratch
    if cell.method == UNPRUNED:
        return _unpruned
    if cell.method in LEARNT:
        return _learnt
    return _tuned if bench.config.tune_updates else _ranked


def _unpruned(bench: Bench, cell: Cell) -> PrunedModel:
    return PrunedModel(bench.checkpoint, [])


def _ranked(bench: Bench, cell: Cell) -> PrunedModel:
    """The heads with the lowest scores masked, and nothing else changed."""
    assert cell.keep is not None
    scores = bench.scores(cell.method, bench.seed_of(cell))
    found = rank_heads(bench.gating, cell.keep, lambda gone: scores)
    return PrunedModel(bench.checkpoint, bench.gating.closed(found.kept))


def _tuned(bench: Bench, cell: Cell) -> PrunedModel:
    """The same with the model trained on."""
    config, folder = bench.config, bench.config.out / RUNS / cell.folder
    assert cell.seed is not None
    seed = bench.seed_of(cell)
    bench.scores(cell.method, seed)
    by = str(bench.scores_path(cell.method, seed))
    settings = config.for_cell(folder, cell.seed)
    choice = run_ranking(RankConfig(**settings, by=by, column="score", keep=cell.keep))
    return PrunedModel(_changed(bench, choice), choice.removed, {"nll": choice.nll})


def _learnt(bench: Bench, cell: Cell) -> PrunedModel:
    """Gates learnt and decided; goes on where a killed process had got to."""
    config, folder = bench.config, bench.config.out / RUNS / cell.folder
    assert cell.seed is not None
    method: L0Options | SubsetOptions
    if cell.method == "l0":
        how = {"strength_as": config.strength_as, "start": config.start}
        method = L0Options(strength=cell.strength, keep=cell.keep, **how)  # type: ignore[arg-type]
    else:
        assert cell.keep is not None
        method = SubsetOptions(keep=cell.keep)
    begun = (folder / STATE).is_file()
    settings = config.for_cell(folder, cell.seed, force=not begun)
    choice = run_learning(
        LearnConfig(**settings, method=method, updates=config.updates, gate_lr=config.gate_lr, resume=begun)
    )
    known = ("lambda_paper", "lambda_code", "heads_with_log_a_above_0", "freeze", "lr")
    facts = {name: value for name, value in choice.facts["learning"].items() if name in known}
    return PrunedModel(_changed(bench, choice), choice.removed, {"nll": choice.nll, **facts})


def _changed(bench: Bench, choice: Selection) -> Checkpoint:
    """The checkpoint as a choice left it: read from what it wrote, or the one at hand where nothing was trained."""
    if not choice.model:
        return bench.checkpoint
    config, folder = bench.config, choice.folder / MODEL
    files = sorted(folder.glob("*.pt"))
    is_file = bench.checkpoint.format == "fairseq" and len(files) == 1
    companions = Companions(bpe=config.bpe) if is_file else None
    return open_checkpoint(
        str(files[0] if is_file else folder), device=config.device, dtype="float32" if config.dtype == "auto"
        else config.dtype, companions=companions
    )  # fmt: skip
