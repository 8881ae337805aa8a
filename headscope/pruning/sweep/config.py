"""The options of a sweep, and the cells that it is made of: a method, a size and a seed each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from headscope.bounds import check_numbers
from headscope.config import check_choices
from headscope.errors import ConfigError
from headscope.evaluation.before_after import MARGIN
from headscope.evaluation.non_inferiority import Margin
from headscope.pruning.closed_form.compensate import RefitOptions
from headscope.pruning.learning.gate_layout import GateLayout
from headscope.pruning.ranking.config import ALLOCATIONS
from headscope.pruning.ranking.criterion import Criterion, Direction, End, criterion_named, rankable_names
from headscope.pruning.ranking.ranking import check_keep
from headscope.pruning.ranking.uniform import uniform_keep
from headscope.pruning.selection import COMPANIONS, TEXTS, PruningOptions
from headscope.registry import unknown

LEARNT = ("l0", "subset")
DRAWN = ("random", "shapley")  # criteria that follow from the seed; the others are the same for every seed
UNPRUNED = "unpruned"


@dataclass(frozen=True, kw_only=True)
class SweepConfig(PruningOptions):
    """The options of `headscope prune sweep`.

    `methods` are l0, subset and what `prune rank` ranks by; NAME:lowest or NAME:highest says which end of NAME stays.
    Sizes are `keep` (heads of the chosen sites that stay), `fractions` of them, or for l0 alone `lambdas`. `seeds` are
    `seed`, `seed` + 1, …; rankings that do not depend on a seed run once, unless `tune_updates` train the model
    further. `metric` is what every cell is measured by (empty: what fits the model). `from_scratch` trains what l0
    and subset leave anew, as `recipe` says (a run of `headscope train` or a TOML file; default: the run that the
    checkpoint lies in). `functions` is a run of `analyze` that labels heads. `margin` is how much worse a model may be
    to count as as good: 0.25, in the metric's unit, or 1% (the default) of the unpruned model's value. `compensate`
    refits the output projections where a ranking took heads out, before any tuning, and `allocate` says how many heads
    each layer loses by a ranking (see `RankConfig` for both). The other options are those of `prune l0`, `subset` and
    `rank`.
    """

    methods: tuple[str, ...] = ("l0", "subset", "random", "magnitude", "confidence", "gradient", "lrp")
    keep: tuple[int, ...] = ()
    fractions: tuple[float, ...] = ()
    lambdas: tuple[float, ...] = ()
    strength_as: Literal["paper", "code"] = "paper"
    start: Literal["glorot", "open"] = "glorot"
    seeds: int = 3
    metric: str = ""
    score_sentences: int = 500
    allocate: str = "global"
    compensate: str = "none"
    sequential: bool = False
    updates: int = 1000
    gate_lr: float | None = None
    from_scratch: bool = False
    recipe: Path | None = None
    functions: Path | None = None
    text: Literal["raw", "tokenised-lowercase"] = "raw"
    beam: int | None = None
    hiding: Literal["each", "random"] = "each"
    bootstrap: int = 1000
    margin: str | None = None
    jobs: int = 1
    keep_models: bool = False

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, flags={"lambdas": "--lambda"})
        if not self.methods:
            raise ConfigError("--methods is empty; name some of l0, subset and the criteria of `prune rank`")
        for name in ("methods", "keep", "fractions", "lambdas"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"--{name.replace('lambdas', 'lambda')} holds the same entry twice")
        for name, least in (("seeds", 1), ("jobs", 1), ("bootstrap", 2), ("updates", 1), ("tune_updates", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {least}")
        _ = self.tolerance
        _ = self.refit
        if self.allocate not in ALLOCATIONS:
            raise ConfigError(unknown("allocation", self.allocate, list(ALLOCATIONS)))
        ranks = bool(set(self.methods) - set(LEARNT))
        if self.allocate != "global" and not ranks:
            raise ConfigError(f"--allocate {self.allocate} is for rankings; --methods names none")
        for option, value, needs_text in (
            ("--compensate", self.compensate, self.compensate != "none"),
            ("--allocate", self.allocate, self.allocate == "measured"),
        ):
            if needs_text and not (ranks and self.has_text):
                raise ConfigError(f"{option} {value} is for rankings, and needs text: give --source FILE")
        self._check_sizes()
        self._check_texts()

    @property
    def refit(self) -> RefitOptions:
        """How output projections are refitted where a ranking took heads out."""
        return RefitOptions(method=self.compensate, sequential=self.sequential)

    @property
    def allocation(self) -> str:
        """How scores are ranked: those that were measured say themselves how many heads a layer keeps."""
        return "global" if self.allocate == "measured" else self.allocate

    @property
    def tolerance(self) -> Margin:
        """The margin of verdicts."""
        return Margin.parse(MARGIN if self.margin is None else self.margin)

    def _check_sizes(self) -> None:
        for share in self.fractions:
            if not 0 <= share <= 1:
                raise ConfigError(f"--fractions {share:g}: the share that stays is from 0 to 1")
        for strength in self.lambdas:
            if not 0 <= strength < math.inf:
                raise ConfigError(f"--lambda {strength:g}: it must not be negative; 0 is no penalty")
        if self.lambdas and "l0" not in self.methods:
            raise ConfigError("--lambda is for l0, which --methods does not name")
        if not (self.keep or self.fractions) and not (self.lambdas and self.methods == ("l0",)):
            raise ConfigError("no sizes: give --keep 4,8,16 (heads that stay) or --fractions 0.25,0.5")
        if self.from_scratch and not set(self.methods) & set(LEARNT):
            raise ConfigError("--from-scratch trains what l0 and subset leave; --methods names neither")
        if self.recipe is not None and not self.from_scratch:
            raise ConfigError("--recipe is for --from-scratch; give that too")

    def _check_texts(self) -> None:
        trains = self.tune_updates or set(self.methods) & set(LEARNT)
        if trains and not self.has_text:
            raise ConfigError("no text to learn from: give --source FILE, and --target FILE for translation")
        if not self.has_text and self.valid_text is None:
            raise ConfigError("no text to measure on: give --valid-source FILE, or --source FILE")
        for name, other in (("target", "source"), ("valid_target", "valid_source")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --{other.replace('_', '-')}, line by line")

    @property
    def trains(self) -> bool:
        """Whether any cell changes weights."""
        return bool(self.tune_updates or set(self.methods) & set(LEARNT))

    def for_cell(self, folder: Path, seed: int, *, force: bool = True) -> dict[str, Any]:
        """The options that a config of `prune l0`, `subset` or `rank` shares with this one, for the run of a cell."""
        shared = {field.name: getattr(self, field.name) for field in fields(PruningOptions)}
        return {**shared, "out": folder, "seed": seed, "force": force}


GRID = {"methods", "keep", "fractions", "lambdas", "seeds"}
FREE = {"out", "checkpoint", "jobs", "keep_models", "functions", "margin", "bootstrap", "force", "device"}
PATHS = {*TEXTS, *COMPANIONS, "recipe"}


def config_identity(config: SweepConfig) -> dict[str, Any]:
    """The options that shape a cell's numbers: they must not change while cells are added to a directory.

    Texts and checkpoint are known by their digests instead; methods, sizes and seeds may be added.
    """
    return {name: value for name, value in config.settings().items() if name not in GRID | FREE | PATHS}


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


def cells_of(config: SweepConfig, gating: GateLayout) -> list[Cell]:
    """All cells of a sweep, the unpruned model first, controls last.

    ConfigError for unknown methods and for sizes that the gated sites cannot have.
    """
    for method in (name for name in config.methods if name not in LEARNT):
        criterion_of(method)
    sizes = _sizes(config, gating)
    cells = [Cell(UNPRUNED)]
    for method in config.methods:
        seeds: Sequence[int] = range(config.seed, config.seed + config.seeds)
        if method not in LEARNT and not is_drawn(method) and not config.tune_updates:
            seeds = [config.seed]
        sized = [Cell(method, keep=keep) for keep in sizes]
        if method == "l0" and config.lambdas:
            sized = [Cell(method, strength=strength) for strength in config.lambdas]
        cells += [replace(cell, seed=seed) for cell in sized for seed in seeds]
    if config.from_scratch:
        cells += [replace(cell, control=True) for cell in cells if cell.method in LEARNT]
    return cells


def criterion_of(method: str) -> tuple[Criterion, Direction]:
    """The criterion of a method that ranks, and which end of it stays: NAME, NAME:lowest or NAME:highest."""
    name, colon, end = method.partition(":")
    ends: dict[str, End] = {"lowest": "lowest", "highest": "highest"}
    if name not in rankable_names() or (colon and end not in ends):
        raise ConfigError(unknown("method", method, sorted([*LEARNT, *_accepted()])))
    criterion = criterion_named(name)
    if not end and not criterion.keep:
        raise ConfigError(
            f"--methods {name} has no agreed direction: write {name}:lowest if heads with low values stay, "
            f"{name}:highest if those with high ones do"
        )
    return criterion, criterion.direction(ends.get(end))


def _accepted() -> Iterator[str]:
    """The methods that rank, with a direction where they need one."""
    for name in rankable_names():
        yield from [name] if criterion_named(name).keep else [f"{name}:lowest", f"{name}:highest"]


def is_drawn(method: str) -> bool:
    """Whether a ranking follows from the seed."""
    return method.partition(":")[0] in DRAWN


def _sizes(config: SweepConfig, gating: GateLayout) -> list[int]:
    """Heads to keep, smallest first; fractions are rounded to what groups and protected heads allow."""
    sizes = set(config.keep)
    for keep in config.keep:
        check_keep(gating, keep, config.allocate)
    if config.allocate == "uniform":
        return sorted(sizes | {uniform_keep(gating, share) for share in config.fractions})
    size, least = int(gating.sizes[0]), len(gating.protected)
    for share in config.fractions:
        sizes.add(max(least, least + size * round((share * gating.heads - least) / size)))
    for keep in sizes - set(config.keep):
        gating.kept_units(keep)
    return sorted(sizes)
