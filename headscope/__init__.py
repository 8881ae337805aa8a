"""headscope: analysis and pruning of the attention heads of trained Transformers.

`import headscope as hs`, then `hs.load`; heavy modules are imported on first use of a name of the API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headscope.version import VERSION

if TYPE_CHECKING:
    from headscope import assets as assets
    from headscope.api.arguments import Texts as Texts
    from headscope.api.commands import analyze as analyze
    from headscope.api.commands import evaluate as evaluate
    from headscope.api.commands import load as load
    from headscope.api.commands import plot as plot
    from headscope.api.commands import prune as prune
    from headscope.api.commands import train as train
    from headscope.api.model import Model as Model
    from headscope.api.model import SmallModel as SmallModel
    from headscope.config.analyze import AnalyzeConfig as AnalyzeConfig
    from headscope.config.commands import EvaluateConfig as EvaluateConfig
    from headscope.errors import HeadscopeError as HeadscopeError
    from headscope.heads import HeadId as HeadId
    from headscope.heads import Site as Site
    from headscope.pruning.options.choice import LearnConfig as LearnConfig
    from headscope.pruning.options.choice import RankConfig as RankConfig
    from headscope.pruning.options.choice import SweepConfig as SweepConfig
    from headscope.pruning.options.removal import RemoveConfig as RemoveConfig
    from headscope.pruning.options.removal import ShrinkConfig as ShrinkConfig
    from headscope.pruning.options.shared import Refit as Refit
    from headscope.results.ranking import Ranking as Ranking
    from headscope.results.removal import Removal as Removal
    from headscope.results.study import Study as Study
    from headscope.results.sweep import Sweep as Sweep
    from headscope.results.training import Training as Training
    from headscope.training.config import TrainConfig as TrainConfig

__version__ = VERSION

_MODULES = {
    **{"HeadId": "heads", "HeadscopeError": "errors", "Site": "heads"},
    "AnalyzeConfig": "config.analyze",
    "EvaluateConfig": "config.commands",
    **dict.fromkeys(("LearnConfig", "RankConfig"), "pruning.options.choice"),
    "Refit": "pruning.options.shared",
    **dict.fromkeys(("RemoveConfig", "ShrinkConfig"), "pruning.options.removal"),
    "SweepConfig": "pruning.options.choice",
    "TrainConfig": "training.config",
    **dict.fromkeys(("analyze", "evaluate", "load", "plot", "prune", "train"), "api.commands"),
    **dict.fromkeys(("Model", "SmallModel"), "api.model"),
    **{name: f"results.{name.lower()}" for name in ("Ranking", "Removal", "Study", "Sweep", "Training")},
    "Texts": "api.arguments",
}
__all__ = ["__version__", "assets", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name == "assets":
        return import_module("headscope.assets")
    if name not in _MODULES:
        raise AttributeError(f"module 'headscope' has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"headscope.{_MODULES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    """The names of the API, without modules that were imported meanwhile."""
    return sorted(__all__)
