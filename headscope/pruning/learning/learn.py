"""From options to gates that have learnt: what `headscope prune l0`, `subset` and those of other learners do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from headscope.config.option import changed, flag, flag_of, identity
from headscope.data.batching import DEFAULT_TOKENS
from headscope.data.corpus import Corpus
from headscope.distributed import ALONE, Processes
from headscope.errors import CheckpointError, ConfigError
from headscope.files.folders import Build, Workplace, clear_killed, replacing_folder, to_resume, workplace
from headscope.files.output_checks import contents, inputs_of
from headscope.files.writing import save_torch, write_atomically
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.stored_weights import round_weights, rounding_note
from headscope.progress import Progress, no_progress
from headscope.pruning.learning.examples import (
    LabelLoss,
    PruningLoss,
    TrainingExamples,
    training_examples,
    training_loss,
)
from headscope.pruning.learning.finetuning import Recipe, Tuner, default_freeze, mean_loss, trained_parameters
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.options.learn import LearnConfig
from headscope.pruning.options.shared import Freeze, PruningOptions
from headscope.pruning.selection import (
    STATE,
    Selection,
    choice_by,
    open_selection,
    selection_signature,
    write_selection,
)
from headscope.training.files.checkpoints import load_record, restoring

POINTS = 50  # of the trajectory


def run_learning(config: LearnConfig, *, progress: Progress = no_progress, processes: Processes = ALONE) -> Selection:
    """Learn gates on a checkpoint, decide which heads stay, and write `config.out`.

    Several `processes` share the sentences of every batch; all get the result, and the first writes.

    HeadscopeError for whatever the user can fix, ConfigError where `config.resume` finds a complete run. The input is
    only read. On a CPU the same options, seed and number of threads give the same result, bit for bit.
    """
    with ExitStack() as stack:
        workspace = processes.on_main(lambda: stack.enter_context(_workplace(config)))
        choice, checkpoint = _learnt(config, workspace.path, progress if processes.main else no_progress, processes)
        if processes.main:
            with Build(config.out, choice_by(config.learner.name), inputs=inputs_of(config), force=True) as build:
                write_selection(choice, checkpoint, config, build)
            if workspace.path != config.out:
                workspace.discard()
    return choice


@contextmanager
def _workplace(config: LearnConfig) -> Iterator[Workplace]:
    """Where the run is made; ConfigError where it is complete."""
    if config.resume and finished(config):
        raise ConfigError(f"the run in {config.out} is complete; nothing is left to resume (--force learns anew)")
    kind = choice_by(config.learner.name)
    resumed = to_resume(config.out, kind) if config.resume else None
    with workplace(config.out, kind, inputs=inputs_of(config), force=config.force, resume=resumed) as workspace:
        yield workspace


def finished(config: LearnConfig) -> Mapping[str, Any]:
    """The record of a complete run in a directory that no other run is about to replace; empty where there is none.

    What a killed process left there without having begun is removed. ConfigError where it was of other options.
    """
    out, kind = config.out, choice_by(config.learner.name)
    run = contents(out, kind)
    if resumable(out) or run.kind != kind.name:
        return {}
    clear_killed(out, kind)
    free = {"out", "resume", "force", "save_every", "device"}
    settings = {name: value for name, value in config.settings().items() if name not in free}
    _check_same(config, settings, run.record.get("options") or settings)
    return run.record


def _check_same(config: LearnConfig, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """ConfigError where the run that is to go on was begun with other options."""
    now, before = ({**options, **options.get("method", {}), "method": None} for options in (now, before))
    if others := changed(now, before):
        flags = {entry.name: flag_of(entry) for entry in fields(config.method)} | {"name": "method"}
        other = min(others, key=lambda name: name != "name")
        raise ConfigError(
            f"--resume: the run in {config.out} was begun with another {flags.get(other) or flag(other)} "
            f"({before.get(other)}, now {now[other]}); give the same options, or another --out"
        )


def resumable(out: Path) -> bool:
    """Whether a run of a directory, or one that will replace it, has left a state to go on from."""
    return any((folder / STATE).is_file() for folder in (out, replacing_folder(out)))


def _learnt(
    config: LearnConfig, folder: Path, progress: Progress, processes: Processes
) -> tuple[Selection, Checkpoint]:
    """The result of learning, whose state lies in `folder`."""
    began = time.monotonic()
    state = read_gate_state(folder) if config.resume else None
    opened = open_selection(config, trains=True)
    checkpoint, gates = opened.checkpoint, opened.gating
    generator = torch.Generator().manual_seed(config.seed)  # of the gates' noise
    learner: GateLearner = config.learner(gates, config.method, updates=config.updates, generator=generator)
    freeze = config.freeze or default_freeze(checkpoint, {site for site, _ in gates.counts})
    parameters = trained_parameters(checkpoint, freeze)
    gate_lr = learner.gate_lr if config.gate_lr is None else config.gate_lr
    recipe = recipe_of(config, checkpoint, updates=config.updates, gate_lr=gate_lr)
    assert opened.corpus is not None and opened.valid is not None
    loss = loss_of(config, checkpoint, opened.corpus)
    data, valid = (
        training_examples(checkpoint, text, limit=opened.limit, supervised=loss.supervised)
        for text in (opened.corpus, opened.valid)
    )
    torch.manual_seed(config.seed + processes.rank)  # dropout
    tuner = Tuner(checkpoint, data, recipe, parameters, learner, loss=loss, processes=processes)
    trace: list[dict[str, Any]] = []
    nll = {"before": _measured(tuner, config, valid, gates=None)}
    if state is not None:
        nll, trace = restore_gate_state(tuner, state, config)
    with progress("learning", recipe.updates) as step:
        step(tuner.update)
        _learn(tuner, config, folder, trace, nll, step)
    rounded = _finish(tuner, config, valid, nll, progress)
    entries = {"freeze": freeze, "updates": str(recipe.updates), "lr": f"{recipe.lr:g}+{recipe.gate_lr:g}"}
    entries |= {"objective": config.objective} if config.objective else {}
    choice = Selection(
        folder=config.out,
        method=learner.name,
        gating=gates,
        removed=gates.closed(learner.decide()),
        ranking=_ranking(learner),
        facts={"learning": _facts(config, learner, freeze, recipe, loss, data)},
        quality=nll,
        quantity=loss.quantity,
        title=loss.title,
        signature=selection_signature(learner.name, opened, config, **learner.signature(), **entries),
        source={"path": config.checkpoint, "format": checkpoint.format, "digest": checkpoint.digest},
        remarks=[*opened.remarks, *learner.remarks(), *rounded],
        gates=pd.DataFrame(trace),
        model=bool(parameters),
        seconds=time.monotonic() - began,
    )
    return choice, checkpoint


def _finish(
    tuner: Tuner, config: LearnConfig, valid: TrainingExamples, nll: dict[str, float], progress: Progress
) -> list[str]:
    """Measure with the gates as they are and with the decision; train on with the decision where that is wanted.

    Weights that are final are rounded as they are written before they are measured, and what is returned says so.
    """
    learner, recipe = tuner.learner, tuner.recipe
    model, types = tuner.checkpoint.model, set[torch.dtype]()
    tunes = bool(config.tune_updates and tuner.parameters)
    if not tunes:
        types = round_weights(model, tuner.checkpoint.written_in)
    assert learner is not None
    gates, decision = learner.gating, learner.decide()

    def measured(values: Tensor) -> float:
        return _measured(tuner, config, valid, gates=gates.spread(values))

    nll["gated"], nll["masked"] = measured(learner.gates()), measured(decision.double())
    if tunes:
        tune(tuner, replace(recipe, updates=config.tune_updates), gates.closed(decision), progress)
        types = round_weights(model, tuner.checkpoint.written_in)
        nll["tuned"] = measured(decision.double())
    return [rounding_note(types)] if types else []


def _measured(
    tuner: Tuner, config: LearnConfig, valid: TrainingExamples, *, gates: Mapping[tuple[Site, int], Tensor] | None
) -> float:
    return mean_loss(
        tuner.checkpoint,
        valid,
        tokens=tuner.recipe.tokens,
        seed=config.seed,
        gates=gates,
        loss=tuner.loss,
        processes=tuner.processes,
    )


def tune(tuner: Tuner, recipe: Recipe, closed: Sequence[HeadId], progress: Progress) -> None:
    """Train on with some heads closed and no gates."""
    further = Tuner(
        tuner.checkpoint,
        tuner.data,
        recipe,
        tuner.parameters,
        closed_heads=closed,
        loss=tuner.loss,
        processes=tuner.processes,
    )
    with progress("tuning", recipe.updates) as step:
        further.run(lambda update, loss: step(1))


def recipe_of(
    config: PruningOptions, checkpoint: Checkpoint, *, updates: int, gate_lr: float = Recipe.gate_lr
) -> Recipe:
    """The recipe that options mean for a checkpoint."""
    default_lr = 3e-5 if checkpoint.format == "huggingface" else 3e-4
    return Recipe(
        updates=updates,
        lr=default_lr if config.lr is None else config.lr,
        gate_lr=gate_lr,
        schedule=config.schedule,
        warmup=config.warmup,
        smoothing=config.label_smoothing,
        clip=config.clip,
        tokens=config.batch_tokens or DEFAULT_TOKENS,
        seed=config.seed,
    )


def loss_of(config: PruningOptions, checkpoint: Checkpoint, corpus: Corpus) -> PruningLoss:
    """What the options say is learnt by, with a teacher of its own where it needs one."""
    smoothing = config.label_smoothing
    return training_loss(
        checkpoint, corpus, objective=config.objective, smoothing=smoothing, learns=True, seed=config.seed
    )


def _learn(
    tuner: Tuner,
    config: LearnConfig,
    folder: Path,
    trace: list[dict[str, Any]],
    nll: dict[str, float],
    step: Callable[[int], None],
) -> None:
    learner, interval = tuner.learner, config.log_every or max(config.updates // POINTS, 1)
    assert learner is not None
    if tuner.update == 0:
        trace += gate_rows(learner, 0)

    def after(update: int, loss: float) -> None:
        if update % interval == 0 or update == config.updates:
            trace.extend(gate_rows(learner, update))
        if config.save_every and update % config.save_every == 0 and update < config.updates:
            save_gate_state(tuner, config, folder, trace, nll)
        step(1)

    tuner.run(after)


def gate_rows(learner: GateLearner, update: int) -> list[dict[str, Any]]:
    """Rows of gates.csv: what every gated head has after an update."""
    gates, opened, values = learner.gates().tolist(), learner.open_probability().tolist(), learner.trace()
    common = {"lambda": float("nan"), "temperature": float("nan")} | values
    return [
        {"update": update, "site": head.site.value, "layer": head.layer, "head": head.head, "gate": gate, "open": p}
        | common
        for unit, gate, p in zip(learner.gating.units, gates, opened, strict=True)
        for head in unit
    ]


def _ranking(learner: GateLearner) -> pd.DataFrame:
    weights = learner.weights.detach()
    order, gates = torch.argsort(weights, descending=True, stable=True).tolist(), learner.gates().tolist()
    more = {"gate": gates, "open": learner.open_probability().tolist()}
    return learner.gating.ranking(order, score=weights.tolist(), kept=learner.decide(), **more)


def _facts(
    config: LearnConfig, learner: GateLearner, freeze: Freeze, recipe: Recipe, loss: PruningLoss, data: TrainingExamples
) -> dict[str, Any]:
    return {
        **learner.facts(),
        "freeze": freeze,
        "updates": recipe.updates,
        "tune_updates": config.tune_updates,
        "lr": recipe.lr,
        "gate_lr": recipe.gate_lr,
        "learnt_by": loss.title,
        "label_smoothing": loss.smoothing if isinstance(loss, LabelLoss) else None,
        "sentences": len(data),
        "truncated": data.truncated,
        "threads": torch.get_num_threads(),
    }


# Going on after a kill: what a run saves as it goes, and how it is taken up again.


VERSION, ANEW = 2, "learn anew with --force"
AFTERWARDS = {"tune_updates"}  # which may change within a run: it follows what is saved


def save_gate_state(
    tuner: Tuner, config: LearnConfig, folder: Path, trace: list[dict[str, Any]], nll: dict[str, float]
) -> None:
    """Write DIR/state.pt; every process calls this, and the first writes."""
    content = {"version": VERSION, "settings": _fixed(config), "trace": trace, "nll": nll, "tuner": tuner.state()}
    content["digests"] = [tuner.checkpoint.digest, tuner.data.digest]
    if tuner.processes.main:
        write_atomically(folder / STATE, lambda path: save_torch(content, path))


def read_gate_state(folder: Path) -> dict[str, Any] | None:
    """What a run that was killed has saved; None where there is nothing. CheckpointError for a broken file."""
    if not (folder / STATE).is_file():
        return None
    state = load_record(folder / STATE, advice=ANEW)
    if state.get("version") != VERSION:
        raise CheckpointError(f"{folder / STATE} is of another version of headscope; learn anew with --force")
    return state


def restore_gate_state(
    tuner: Tuner, state: Mapping[str, Any], config: LearnConfig
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Bring a fresh run to where the state was saved; what was measured before, and the trajectory so far."""
    out = config.out
    with restoring(out / STATE, advice=ANEW):
        saved = dict(state["settings"])
    _check_same(config, _fixed(config), saved)
    if state.get("digests") != [tuner.checkpoint.digest, tuner.data.digest]:
        raise ConfigError(f"--resume: the run in {out} was begun with another checkpoint or text; give the same")
    with restoring(out / STATE, advice=ANEW):
        tuner.restore(state["tuner"])
        return dict(state["nll"]), [dict(row) for row in state["trace"]]


def _fixed(config: LearnConfig) -> dict[str, Any]:
    """Options that must not change within a run; texts and companions are known by their digests."""
    options = identity(config) | {"method": config.settings()["method"]}
    return {name: value for name, value in options.items() if name not in AFTERWARDS}
