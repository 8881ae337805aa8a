"""Gates learnt anew for each of several λ: one directory each, and one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError
from headscope.files.folders import Workplace, replacing_folder, to_resume, workplace
from headscope.files.output_checks import OutputKind, contents, inputs_of
from headscope.files.tables import write_csv
from headscope.progress import Progress, no_progress
from headscope.pruning.learning.examples import QUANTITIES
from headscope.pruning.learning.learn import finished, resumable, run_learning
from headscope.pruning.options.learn import LearnConfig, check_prices
from headscope.pruning.selection import CHOICE
from headscope.results.answer import Answer
from headscope.results.choices import price_answers
from headscope.version import VERSION

RECORD, TABLE = "lambdas.json", "sweep.csv"
_RUNS = CHOICE.in_folder("lambda-*")
LAMBDAS = OutputKind(
    "lambdas", "run of `headscope prune` with several --lambda", RECORD, (TABLE, *_RUNS), unfinished=(TABLE, *_RUNS)
)


@dataclass(frozen=True)
class LambdaSweep:
    """What every λ gave: `table` has lambda, kept, kept per site, and the nll of masked and tuned models.

    `records` are what the pruning.json of each says, by its directory.
    """

    config: LearnConfig
    records: Mapping[Path, Mapping[str, Any]]
    table: pd.DataFrame

    @property
    def signature(self) -> str:
        """Everything that the numbers depend on, of all runs."""
        return "\n".join(str(record["signature"]) for record in self.records.values())

    def answers(self) -> list[Answer]:
        """How many heads stay at each price, and what that costs."""
        rows: list[Any] = self.table.to_dict("records")
        return price_answers(rows, self.config.out.resolve().name)

    def to_json(self) -> dict[str, Any]:
        """The records of all runs, and the answers."""
        runs = [{"out": str(folder), **record} for folder, record in self.records.items()]
        return {"record": {"runs": runs}, "answers": [answer.to_json() for answer in self.answers()]}


def run_lambdas(
    config: LearnConfig, strengths: Sequence[float], *, progress: Progress = no_progress, processes: Processes = ALONE
) -> LambdaSweep:
    """Learn gates for every λ of `strengths`, each from the checkpoint, into OUT/lambda-λ; and OUT/sweep.csv.

    With `config.resume` those that are complete stay, and one that has saved a state goes on from it. Several
    `processes` learn together as in `run_learning`. ConfigError for a λ that is negative or there twice, before
    anything is learnt.
    """
    if not hasattr(config.method, "strength"):
        raise ConfigError(f"a list of --lambda is for what prices open heads; {config.learner.name} does not")
    check_prices(strengths)
    methods = [replace(config.method, strength=strength, keep=None) for strength in strengths]
    records: dict[Path, Mapping[str, Any]] = {}
    with ExitStack() as stack:
        workspace = processes.on_main(lambda: stack.enter_context(_workplace(config)))
        for method in methods:
            name = f"lambda-{method.strength:g}"
            run = replace(config, method=method, out=workspace.path / name, force=False)
            records[config.out / name] = _record(run, progress, processes)
        rows = [_row(record, strength) for record, strength in zip(records.values(), strengths, strict=True)]
        table = pd.DataFrame(rows)
        if processes.main:
            write_csv(workspace.path / TABLE, table)
            workspace.seal({"headscope": VERSION, "lambdas": list(strengths)})
            workspace.finish()
            records = {folder: contents(folder, CHOICE).record for folder in records}
    return LambdaSweep(config, records, table)


def _workplace(config: LearnConfig) -> AbstractContextManager[Workplace]:
    """Where the runs are made."""
    resumed = to_resume(config.out, LAMBDAS) if config.resume else None
    return workplace(config.out, LAMBDAS, inputs=inputs_of(config), force=config.force, resume=resumed)


def lambdas_left(out: Path) -> bool:
    """Whether runs of some λ are there that `resume` would keep."""
    return any(True for folder in (out, replacing_folder(out)) for _ in folder.glob("lambda-*/*"))


def lambdas_complete(out: Path) -> bool:
    """Whether there is the run of every λ, and the table."""
    return contents(to_resume(out, LAMBDAS), LAMBDAS).kind == LAMBDAS.name


def _record(config: LearnConfig, progress: Progress, processes: Processes) -> Mapping[str, Any]:
    """Learn for one λ, unless that has been done; ConfigError where it was done with other options."""
    record, resume = processes.on_main(lambda: (finished(config), resumable(config.out)))
    if not record:
        run_learning(replace(config, resume=resume), progress=progress, processes=processes)
        return processes.on_main(lambda: contents(config.out, CHOICE).record)
    return record


def _row(record: Mapping[str, Any], strength: float) -> dict[str, float | int | str]:
    quality = {f"{name}_{when}": value for name in QUANTITIES for when, value in record.get(name, {}).items()}
    per_site = {f"kept_{site}": counts["kept"] for site, counts in record["kept_per_site"].items()}
    return {"lambda": strength, "kept": record["kept"], **per_site, **quality}
