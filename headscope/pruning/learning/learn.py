"""From options to learnt gates: what `headscope prune l0`, `subset` and other learners do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from headscope.config.option import changed_options, identity, option_name
from headscope.data.batching import DEFAULT_TOKENS
from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError, flag
from headscope.files.folders import Build, Workplace, replacing_folder, to_resume, workplace
from headscope.files.output_checks import contents, inputs_of
from headscope.files.writing import save_torch, write_atomically
from headscope.formats.base import Checkpoint
from headscope.model.stored_weights import round_weights, rounding_note
from headscope.progress import Progress, no_progress
from headscope.pruning.learning.examples import LabelLoss, TrainingExamples, training_loss
from headscope.pruning.learning.finetuning import Recipe, Tuner, default_freeze, mean_loss, trained_parameters
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.options.choice import LearnConfig
from headscope.pruning.options.shared import PruningOptions
from headscope.pruning.selection import STATE, choice_by, open_selection, ranking_of, write_selection
from headscope.results.ranking import Ranking
from headscope.training.checkpoints import read_state

POINTS = 50  # of the gates' trajectory


def run_learning(config: LearnConfig, *, progress: Progress = no_progress, processes: Processes = ALONE) -> Ranking:
    """Learn gates on a checkpoint, decide which heads stay, and write `config.out`.

    Several `processes` share the sentences of every batch; all get the result, and the main one writes. On a CPU the
    same options, seed and number of threads give the same result, bit for bit.
    """
    return learn_gates(config, progress=progress, processes=processes)[0]


def learn_gates(
    config: LearnConfig, *, progress: Progress = no_progress, processes: Processes = ALONE
) -> tuple[Ranking, Checkpoint]:
    """`run_learning` that also returns the trained checkpoint."""
    kind, inputs = choice_by(config.learner.name), inputs_of(config)

    def begin() -> Workplace:
        if config.resume and finished_record(config):
            raise ConfigError(
                f"the run in {config.out} is complete; nothing is left to resume ({flag.force} learns anew)"
            )
        resume_folder = to_resume(config.out, kind) if config.resume else None
        return stack.enter_context(workplace(config.out, kind, inputs=inputs, force=config.force, resume=resume_folder))

    with ExitStack() as stack:
        workspace = processes.on_main(begin)
        choice, checkpoint = _choose(config, workspace.path, progress if processes.main else no_progress, processes)
        if processes.main:
            with Build(config.out, kind, inputs=inputs, force=True) as build:
                write_selection(choice, checkpoint, config, build)
            if workspace.path != config.out:
                workspace.discard()
    return choice, checkpoint


def finished_record(config: LearnConfig) -> Mapping[str, Any]:
    """The record of a complete run in the folder; empty where there is none or a run to replace it has begun."""
    run = contents(config.out, kind := choice_by(config.learner.name))
    return {} if resumable(config.out) or run.kind != kind.name else run.record


def resumable(out: Path) -> bool:
    """Whether a run in the folder, or one begun to replace it, has left a state to resume from."""
    return any((folder / STATE).is_file() for folder in (out, replacing_folder(out)))


@dataclass
class GateRun:
    """A run that learns gates in its folder; `measure` gives the loss on held-out text under gates [n].

    `trace` is the trajectory of gates, `quality` the losses measured so far.
    """

    config: LearnConfig
    folder: Path
    tuner: Tuner
    learner: GateLearner
    measure: Callable[[Tensor], float]
    quality: dict[str, float] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)

    def learn(self, progress: Progress) -> None:
        """Make all remaining updates, record gates on the way, and save states as the options say."""
        config, tuner = self.config, self.tuner
        interval = config.log_every or max(config.updates // POINTS, 1)
        if tuner.update == 0:
            self.record_gates(0)
        with progress("learning", config.updates) as step:
            step(tuner.update)

            def after_update(update: int, loss: float) -> None:
                if update % interval == 0 or update == config.updates:
                    self.record_gates(update)
                if config.save_every and update % config.save_every == 0 and update < config.updates:
                    self.save()
                step(1)

            tuner.run(after_update)

    def decide(self, progress: Progress) -> list[str]:
        """Measure the model with learnt gates and with decided heads; tune it with the latter if the options say so.

        Final weights are rounded as they will be written before they are measured; a remark says so.
        """
        tuner, learner = self.tuner, self.learner
        model, written_type = tuner.checkpoint.model, tuner.checkpoint.stored_dtype
        tunes, decision = bool(self.config.tune_updates and tuner.parameters), learner.decide()
        types = set() if tunes else round_weights(model, written_type)
        self.quality |= {"gated": self.measure(learner.gates()), "masked": self.measure(decision.double())}
        if tunes:
            recipe = replace(tuner.recipe, updates=self.config.tune_updates)
            heads_off = learner.gating.closed_heads(decision)
            tune(replace(tuner, recipe=recipe, learner=None, closed_heads=heads_off), progress)
            types = round_weights(model, written_type)
            self.quality["tuned"] = self.measure(decision.double())
        return [rounding_note(types)] if types else []

    def save(self) -> None:
        """Write DIR/state.pt; every process calls this, and the main one writes."""
        tuner = self.tuner
        content = {"settings": _fixed_options(self.config), "trace": self.trace, "nll": self.quality}
        content |= {"tuner": tuner.state(), "digests": [tuner.checkpoint.digest, tuner.data.digest]}
        if tuner.processes.main:
            write_atomically(self.folder / STATE, lambda path: save_torch(content, path))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; ConfigError for other options, texts or checkpoints."""
        out, tuner, now, before = self.config.out, self.tuner, _fixed_options(self.config), state["settings"]
        if changes := changed_options(now, before):
            changed = "method" if "method" in changes else changes[0]
            raise ConfigError(
                f"{flag.resume}: the run in {out} was begun with another {flag(changed)} ({before.get(changed)}, now "
                f"{now[changed]}); give the same options, or another {flag.out}"
            )
        if state.get("digests") != [tuner.checkpoint.digest, tuner.data.digest]:
            raise ConfigError(f"{flag.resume}: the run in {out} has another checkpoint or text; give the same")
        tuner.restore(state["tuner"])
        self.quality, self.trace = dict(state["nll"]), [dict(point) for point in state["trace"]]

    def record_gates(self, update: int) -> None:
        """Add the gates after `update` updates to the trajectory."""
        learner, values = self.learner, {"lambda": float("nan"), "temperature": float("nan")}
        gates = {"gate": learner.gates().tolist(), "open": learner.open_probability().tolist()}
        self.trace.append({"update": update, **gates, **values, **learner.trace()})

    def tables(self) -> dict[str, pd.DataFrame]:
        """The heads, the best first, and the trajectory of gates: ranking.csv and gates.csv."""
        learner, weights = self.learner, self.learner.weights.detach()
        order = torch.argsort(weights, descending=True, stable=True).tolist()
        columns = {"gate": learner.gates(), "open": learner.open_probability()}
        trajectory = pd.concat([learner.gating.table(**point) for point in self.trace])
        return {
            "ranking": learner.gating.ranking(order, score=weights, stays_open=learner.decide(), **columns),
            "gates": trajectory[["update", *trajectory.columns.drop("update")]],
        }


def _choose(config: LearnConfig, folder: Path, progress: Progress, processes: Processes) -> tuple[Ranking, Checkpoint]:
    """Learn gates in `folder`, and decide which heads stay; returns that and the trained checkpoint."""
    state = read_state(folder, "settings", "tuner", "trace", "nll", "digests") if config.resume else None
    setup = open_selection(config, trains=True)
    checkpoint, gates = setup.checkpoint, setup.gating
    generator = torch.Generator().manual_seed(config.seed)  # of the gates' noise
    learner: GateLearner = config.learner(gates, config.method, updates=config.updates, generator=generator)
    freeze = config.freeze or default_freeze(checkpoint, {site for site, _ in gates.counts})
    parameters = trained_parameters(checkpoint, freeze)
    gate_lr = learner.gate_lr if config.gate_lr is None else config.gate_lr
    recipe = recipe_of(config, checkpoint, updates=config.updates, gate_lr=gate_lr)
    assert setup.corpus is not None and setup.valid is not None
    options: dict[str, Any] = {"objective": config.objective, "smoothing": config.label_smoothing}
    loss = training_loss(checkpoint, setup.corpus, **options, learns=True, seed=config.seed)
    data, valid = (
        TrainingExamples(checkpoint, text, limit=setup.limit, with_labels=loss.needs_labels)
        for text in (setup.corpus, setup.valid)
    )
    torch.manual_seed(config.seed + processes.rank)  # dropout
    tuner = Tuner(checkpoint, data, recipe, parameters, learner, loss=loss, processes=processes)

    def measure(values: Tensor) -> float:
        options = {"tokens": recipe.tokens, "seed": recipe.seed}
        return mean_loss(checkpoint, valid, **options, gates=gates.spread(values), loss=loss, processes=processes)

    run = GateRun(config, folder, tuner, learner, measure)
    run.quality["before"] = measure(torch.ones(len(gates.units)))
    if state is not None:
        run.restore(state)
    run.learn(progress)
    rounding_remarks = run.decide(progress)
    entries = {"freeze": freeze, "updates": str(recipe.updates), "lr": f"{recipe.lr:g}+{recipe.gate_lr:g}"}
    entries |= {"objective": config.objective} if config.objective else {}
    facts = {
        **learner.facts(),
        **{"freeze": freeze, "updates": recipe.updates, "tune_updates": config.tune_updates},
        **{"lr": recipe.lr, "gate_lr": recipe.gate_lr, "learnt_by": loss.title},
        "label_smoothing": loss.smoothing if isinstance(loss, LabelLoss) else None,
        **{"sentences": len(data), "truncated": data.n_truncated, "threads": torch.get_num_threads()},
    }
    choice = ranking_of(
        setup,
        config,
        gates.closed_heads(learner.decide()),
        run.tables(),
        method=learner.name,
        entries={**learner.signature(), **entries},
        facts={"learning": facts},
        quality=run.quality,
        loss=loss,
        has_trained=bool(parameters),
        remarks=[*learner.remarks(), *rounding_remarks],
    )
    return choice, checkpoint


def tune(tuner: Tuner, progress: Progress) -> None:
    """Train a model with closed heads."""
    with progress("tuning", tuner.recipe.updates) as step:
        tuner.run(lambda update, loss: step(1))


def recipe_of(
    config: PruningOptions, checkpoint: Checkpoint, *, updates: int, gate_lr: float = Recipe.gate_lr
) -> Recipe:
    """The recipe for a checkpoint by the options, with defaults for its format."""
    default_lr = 3e-5 if checkpoint.format == "huggingface" else 3e-4
    lr, tokens = default_lr if config.lr is None else config.lr, config.batch_tokens or DEFAULT_TOKENS
    options = {name: getattr(config, name) for name in ("schedule", "warmup", "clip", "seed")}
    return Recipe(updates=updates, lr=lr, gate_lr=gate_lr, tokens=tokens, **options)


def _fixed_options(config: LearnConfig) -> dict[str, Any]:
    """Options that must not change on resume; tuning, which follows the last state, may."""
    options = {name: value for name, value in identity(config).items() if name != "tune_updates"}
    learner_options = {option_name(entry): getattr(config.method, entry.name) for entry in fields(config.method)}
    return options | learner_options | {"method": config.learner.name}
