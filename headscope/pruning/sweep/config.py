"""The options of a sweep, and the cells that it is made of: a method, a size and a seed each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headscope.errors import ConfigError
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.learn import learners
from headscope.pruning.options.rank import End
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.ranking.criterion import Criterion, Direction, criterion_named, rankable_names
from headscope.pruning.ranking.ranking import check_keep, nearest_keep
from headscope.registry import unknown

UNPRUNED = "unpruned"


@dataclass(frozen=True)
class Cell:
    """One entry of the table: `keep` heads or λ, by a method, with a seed; `control`: the same trained from scratch."""

    method: str
    keep: int | None = None
    strength: float | None = None
    seed: int | None = None
    control: bool = False

    @property
    def size(self) -> str:
        """How much stays, or the λ, in words."""
        if self.keep is None and self.strength is None:
            return ""
        return f"keep {self.keep}" if self.strength is None else f"lambda {self.strength:g}"

    @property
    def name(self) -> str:
        """The name of its files."""
        parts = [self.method, self.size.replace(" ", ""), "" if self.seed is None else f"seed{self.seed}"]
        return "-".join(filter(None, [*parts, "from-scratch" if self.control else ""])).replace(":", "-")

    @property
    def folder(self) -> str:
        """The name of the directory of its run; the control's is within."""
        return replace(self, control=False).name


def cells_of(config: SweepConfig, gating: GateLayout, is_drawn: Callable[[str], bool]) -> list[Cell]:
    """All cells of a sweep, the unpruned model first, controls last; rankings that are not drawn have one seed.

    ConfigError for sizes that the gated sites cannot have.
    """
    sizes = sorted({*config.keep, *(nearest_keep(gating, share, config.allocate) for share in config.keep_fraction)})
    for keep in sizes:
        check_keep(gating, keep, config.allocate)
    cells = [Cell(UNPRUNED)]
    for method in config.methods:
        seeds: Sequence[int] = range(config.seed, config.seed + config.seeds)
        if method not in config.learnt and not is_drawn(method) and not config.tune_updates:
            seeds = [config.seed]
        sized = [Cell(method, keep=keep) for keep in sizes]
        if method in config.priced and config.lambdas:
            sized = [Cell(method, strength=strength) for strength in config.lambdas]
        cells += [replace(cell, seed=seed) for cell in sized for seed in seeds]
    if config.from_scratch:
        cells += [replace(cell, control=True) for cell in cells if cell.method in config.learnt]
    return cells


def criterion_of(method: str) -> tuple[Criterion, Direction]:
    """The criterion of a method that ranks, and which end of it stays: NAME, NAME:lowest or NAME:highest."""
    name, colon, end = method.partition(":")
    ends: dict[str, End] = {"lowest": "lowest", "highest": "highest"}
    if name not in rankable_names() or (colon and end not in ends):
        known = [*learners()]
        for other in rankable_names():
            known += [other] if criterion_named(other).keep else [f"{other}:lowest", f"{other}:highest"]
        raise ConfigError(unknown("method", method, sorted(known)))
    criterion = criterion_named(name)
    if not end and not criterion.keep:
        raise ConfigError(
            f"{name} has no agreed direction: write {name}:lowest if heads with low values stay, "
            f"{name}:highest if those with high ones do"
        )
    return criterion, criterion.direction(ends.get(end))
