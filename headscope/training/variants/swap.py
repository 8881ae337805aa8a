"""Swap heads between layers during training (Azov & Landau, MHR: "rotation")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headscope.config import NoOptions, option
from headscope.errors import ConfigError, flag, flags, raise_first, restate
from headscope.heads import SITES, HeadId, Site
from headscope.training.config import TrainingPosition
from headscope.training.variant import Variant, per_site, variant

if TYPE_CHECKING:
    from headscope.training.config import TrainConfig
    from headscope.training.head_scores import Phase, Scores, SwapTiming
    from headscope.training.run_state import TrainingRun
    from headscope.training.swaps import Swap

WAYS = ("none", "hard", "soft", "random", "local")
COUNTS = ("dynamic_frequency", "dynamic_rest", "dynamic_max_switches")


@dataclass(frozen=True)
class SwapOptions(NoOptions):
    """Options of `swap`; the dynamic ones take one value, or three for encoder-self, decoder-self, cross."""

    swap_schedule: Path | None = option(
        None, "Swaps by epoch: JSON as the MHR program reads it.", metavar="FILE", common=True
    )
    dynamic: tuple[str, ...] = option(
        ("none",), "Swaps by score: hard, soft, random, local or none; one, or three for the sites.", common=True
    )
    score: Literal["confidence", "uniqueness", "base", "advanced", "pairwise"] = option(
        "confidence", "What ranks heads: confidence, uniqueness; or base, advanced, pairwise of MHR.", common=True
    )
    dynamic_start: tuple[int, ...] = option((2,), "First epoch that may begin swapped, from 2.")
    dynamic_end: tuple[int, ...] = option((), "Last such epoch; default: no end (with --compat fork 0: never).")
    dynamic_frequency: tuple[int, ...] = option((1,), "Epochs that a swap stays before it is undone.")
    dynamic_rest: tuple[int, ...] = option((1,), "Epochs without a swap after that.")
    dynamic_max_switches: tuple[int, ...] = option((1,), "Heads that change places: k of the ways above.")
    swap_output: bool = option(
        False, "Slices of the output projection change places too, within a layer also those of a mixing matrix."
    )
    swap_moments: bool = option(False, "Adam's moments of the heads change places too.")
    compat: Literal["none", "fork"] = option(
        "none", "fork: the constants and quirks of the published program.", common=True
    )

    def __post_init__(self) -> None:
        clean = self.compat == "none"
        for name, minimum in (("dynamic", None), ("dynamic_end", 0), ("dynamic_start", 2), *((n, 1) for n in COUNTS)):
            values = getattr(self, name)
            if values or name != "dynamic_end":
                per_site(flag(name), values)
            if minimum is not None and any(value < (minimum if clean else 0) for value in values):
                reason = ": scores exist after the first epoch" if name == "dynamic_start" else ""
                raise ConfigError(f"{flag(name)} must be at least {minimum if clean else 0}{reason}")
        if unknown := [way for way in self.dynamic if way not in WAYS]:
            raise ConfigError(f"{flag.dynamic} {unknown[0]!r} is not known; choose from {', '.join(WAYS)}")
        if not clean and (self.swap_output or self.swap_moments):
            raise ConfigError(f"{flags('swap_output', 'swap_moments')} are not the fork's; take {flag.compat} none")

    @property
    def ways(self) -> dict[Site, str]:
        """How each site chooses heads to swap by score; without sites that do not."""
        return {site: way for site, way in per_site(flag.dynamic, self.dynamic).items() if way != "none"}

    def timing(self, site: Site) -> SwapTiming:
        """When a site swaps; the fork's default end is 0, which means never."""
        from headscope.training.head_scores import SwapTiming

        start, frequency, pause = (
            per_site("", values)[site] for values in (self.dynamic_start, self.dynamic_frequency, self.dynamic_rest)
        )
        ends: Sequence[int | None] = self.dynamic_end or ((0,) if self.compat == "fork" else (None,))
        return SwapTiming(start, per_site(flag.dynamic_end, ends)[site], frequency, pause)


@variant
class SwapHeads(Variant):
    """Swap the query, key and value projections of two heads, between epochs.

    A schedule's swaps happen before the first update of their epoch. Dynamic ones are decided after an epoch's
    validation, by scores on the validation text, and undone some epochs later (`headscope.training.head_scores`).
    `compat` "fork" follows the published program in widths, layer names, mixing matrices and pairings
    (`headscope.training.swaps`); unlike the program, it resumes exactly.

    In a model that mixes heads (`mixing+swap`) the matrices stay, as the output projection does: a head then uses the
    other's row and column. The published program, by an oversight, swaps whole matrices when heads 0 are swapped;
    `compat` "fork" does too.
    """

    name = "swap"
    summary = "Heads change places between layers, by schedule or by score (MHR)."
    Options = SwapOptions

    schedule: Mapping[int, Sequence[Swap]]
    phases: dict[Site, Phase]
    n_scheduled = 0

    def check(self, config: TrainConfig) -> None:
        ways, validation = self.options.ways, flags("valid_source", "valid_target")
        problems = {
            f"no heads to swap; give {flag.swap_schedule} FILE or {flag.dynamic} WAY": (
                self.options.swap_schedule is None and not ways
            ),
            f"{flag.dynamic} ranks on validation text; give {validation}": ways and config.valid_source is None,
        }
        raise_first(ConfigError, problems)

    def prepare(self, run: TrainingRun) -> None:
        from headscope.training.head_scores import Phase
        from headscope.training.swaps import check_fork_width, check_separate

        options = self.options
        check_separate(*(module for *_, module in run.model.attention_modules()))
        if options.compat == "fork":
            check_fork_width(run.model)
        self.schedule = {} if options.swap_schedule is None else self._read_schedule(run, options.swap_schedule)
        sites = {site for site, _ in run.model.declared_attention().layout}
        for site, way in options.ways.items():
            if len(options.dynamic) == len(SITES) and site not in sites:
                raise ConfigError(f"{flag.dynamic} {way} for {site}, which this model does not have; give none there")
        self.phases = {site: Phase() for site in options.ways if site in sites}

    def _read_schedule(self, run: TrainingRun, path: Path) -> Mapping[int, Sequence[Swap]]:
        """The schedule of a file, checked against the model and the length of the run."""
        from headscope.training.swaps import fork_parts, read_schedule

        like_fork, last = self.options.compat == "fork", run.config.epochs
        schedule = read_schedule(path, None if like_fork else run.model.declared_attention().layout)
        for epoch, swaps in schedule.items() if like_fork else ():
            with restate(ConfigError, f"{path}: epoch {epoch}: {{why}}"):
                for swap in swaps:
                    fork_parts(run.model, swap)
        late = [epoch for epoch in schedule if last is not None and epoch > last]
        if late and not like_fork:
            raise ConfigError(f"{path}: swaps in epoch {min(late)}, and the run ends after {last} ({flag.max_epochs})")
        return schedule

    def before_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        if swaps_due := self.schedule.get(position.epoch):
            self._swap(run, swaps_due)
            self.n_scheduled += len(swaps_due)

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        from headscope.training.head_scores import decide

        scores: Mapping[Site, Scores] | None = None
        for site, old_phase in self.phases.items():
            action, phase = decide(old_phase, position.epoch + 1, self.options.timing(site))
            swaps: Sequence[Swap] = ()
            if action == "undo":
                swaps = old_phase.pending if self.options.compat == "fork" else old_phase.pending[::-1]
            elif action == "swap":
                if scores is None:
                    scores = run.processes.broadcast(self._scores(run) if run.processes.main else None)
                swaps = self._choose(run, site, scores)
                phase = replace(phase, pending=tuple(swaps))
            self._swap(run, swaps)
            self.phases[site] = replace(phase, n_swapped=old_phase.n_swapped + len(swaps))

    def _swap(self, run: TrainingRun, swaps: Sequence[Swap]) -> None:
        from headscope.training.swaps import swap_heads, swap_heads_like_fork

        if self.options.compat == "fork":
            swap_heads_like_fork(run.model, swaps)
            return
        moments = run.optimizer if self.options.swap_moments else None
        swap_heads(run.model, swaps, output=self.options.swap_output, optimizer=moments)

    def _scores(self, run: TrainingRun) -> Mapping[Site, Scores]:
        """The scores of heads on the validation text."""
        from headscope.training.head_scores import head_scores

        run.model.eval()
        with run.autocast():
            return head_scores(run.model, run.validation(), score=self.options.score)

    def _choose(self, run: TrainingRun, site: Site, scores: Mapping[Site, Scores]) -> list[Swap]:
        from headscope.training.head_scores import FORK_SELECTIONS, SELECTIONS, SwapScores

        ways = FORK_SELECTIONS if self.options.compat == "fork" else SELECTIONS
        encoder = run.model.config.encoder
        depth = (run.model.config.decoder if encoder is None else encoder).layers
        max_switches = per_site(flag.dynamic_max_switches, self.options.dynamic_max_switches)[site]
        return ways[self.options.ways[site]](SwapScores(site, scores[site], max_switches, run.generator, depth))

    def remarks(self, run: TrainingRun, *, has_ended: bool) -> list[str]:
        """Remarks on scheduled swaps whose epoch does not come, and on sites that never train with swapped heads."""
        last = run.position.last_epoch if has_ended else run.config.epochs
        if last is None:
            return []
        remarks, total = list[str](), sum(map(len, self.schedule.values()))
        if n_missed := sum(len(swaps) for epoch, swaps in self.schedule.items() if epoch > last):
            why = f"they are for epochs after {last}, where the run ends"
            remarks.append(f"{n_missed} of {total} scheduled swaps do not happen: {why}")
        for site, phase in self.phases.items():
            n_unused = len(phase.pending) if phase.last > last else 0  # made after the last update
            if phase.n_swapped == n_unused and (has_ended or self.options.timing(site).start > last):
                when = flags("dynamic_start", "dynamic_end")
                remarks.append(f"no heads of {site} are swapped in {last} epochs ({when})")
        return remarks

    def history(self, run: TrainingRun) -> dict[str, float]:
        """The number of scheduled swaps so far; by site, of swaps by score (undone: counted twice) and active ones."""
        values = {"swaps.schedule": float(self.n_scheduled)} if self.schedule else {}
        for site, phase in self.phases.items():
            values[f"swaps.{site}"] = float(phase.n_swapped)
            values[f"swapped.{site}"] = float(len(phase.pending))
        return values

    def state_dict(self) -> Mapping[str, Any]:
        phases = {
            site.value: {
                "pending": [[str(swap.first), str(swap.second)] for swap in phase.pending],
                "last": phase.last,
                "swapped": phase.n_swapped,
            }
            for site, phase in self.phases.items()
        }
        return {"scheduled": self.n_scheduled, "phases": phases}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        from headscope.training.head_scores import Phase
        from headscope.training.swaps import Swap

        self.n_scheduled = state["scheduled"]
        for name, site_state in state["phases"].items():
            pending = tuple(Swap(*map(HeadId.parse, pair)) for pair in site_state["pending"])
            self.phases[Site(name)] = Phase(pending, site_state["last"], site_state["swapped"])
