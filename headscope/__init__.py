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
    from headscope.pruning.options.removal import RemoveConfig as RemoveConfig
    from headscope.pruning.options.removal import ShrinkConfig as ShrinkConfig
    from headscope.pruning.options.shared import Refit as Refit
    from headscope.pruning.options.sweep import SweepConfig as SweepConfig
    from headscope.results.ranking import Ranking as Ranking
    from headscope.results.removal import Removal as Removal
    from headscope.results.study import Study as Study
    from headscope.results.sweep import Sweep as Sweep
    from headscope.results.training import Training as Training
    from headscope.training.config import TrainConfig as TrainConfig

__version__ = VERSION

_LIGHT = {"HeadId": "heads", "HeadscopeError": "errors", "Site": "heads"}
_CONFIGS = {
    "AnalyzeConfig": "config.analyze",
    "EvaluateConfig": "config.commands",
    "LearnConfig": "pruning.options.choice",
    "RankConfig": "pruning.options.choice",
    "Refit": "pruning.options.shared",
    "RemoveConfig": "pruning.options.removal",
    "ShrinkConfig": "pruning.options.removal",
    "SweepConfig": "pruning.options.sweep",
    "TrainConfig": "training.config",
}
_HEAVY = {
    **dict.fromkeys(("analyze", "evaluate", "load", "plot", "prune", "train"), "api.commands"),
    **dict.fromkeys(("Model", "SmallModel"), "api.model"),
    "Ranking": "results.ranking",
    "Removal": "results.removal",
    "Study": "results.study",
    "Sweep": "results.sweep",
    "Training": "results.training",
    "Texts": "api.arguments",
}
__all__ = ["__version__", "assets", *sorted({**_LIGHT, **_CONFIGS, **_HEAVY})]


def __getattr__(name: str) -> Any:
    if name == "assets":
        return import_module("headscope.assets")
    for table in (_LIGHT, _CONFIGS, _HEAVY):
        if name in table:  # all of them at once: a module of the same name is no longer in the way then
            globals().update(
                {public: getattr(import_module(f"headscope.{file}"), public) for public, file in table.items()}
            )
            return globals()[name]
    raise AttributeError(f"module 'headscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the API, without modules that were imported meanwhile."""
    return sorted(__all__)
