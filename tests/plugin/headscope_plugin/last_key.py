"""An analysis with an option, two columns and a figure: mean weight on the last keys that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.engine.base import Analysis, HeadBatch, analysis


@dataclass(frozen=True)
class LastKeyOptions:
    """How many keys are the last ones."""

    last_keys: int = option(1, "Keys at the end of a sentence for `last_key`.", metavar="N", minimum=1, maximum=9)


@dataclass(frozen=True)
class BarOptions:
    """Options of the figure."""

    color: str = option("tab:blue", "Colour of the bars.")


def bars(run: Any, figure: Any, options: BarOptions) -> None:
    """A bar for every head."""
    figure.add_subplot().bar(range(len(run.heads)), run.heads[run.require("last_key")], color=options.color)


@analysis
class LastKey(Analysis):
    """Mean over queries of the weight on the last keys of the sentence that are no special tokens."""

    name = "last_key"
    summary = "mean weight on the last words"
    reads = "rows"
    order = 300
    default = False
    Options = LastKeyOptions
    signature_entry = "last:{last_keys}"
    measures = (Measure("last_key", "weight on the end", unit="share", range=(0, 1), cmap="magma", overview=9),)
    functions = (HeadFunction("ending", "◐", "e", "#117733", "ending: looks at the end"),)
    figures = (AnalysisFigure("last_key", "Bars of the weight on the last keys.", bars, Options=BarOptions),)

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        later = heads.keys.flip(-1).cumsum(dim=-1).flip(-1)  # [b s], 1 at the last key that counts
        last = heads.keys & (later <= self.options.last_keys)
        columns = last[:, :, None].to(heads.context.dtype)  # [b s 1]
        return {"last_key": heads.over_queries(heads.weight_on(columns)[..., 0])}
