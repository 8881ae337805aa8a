"""Options of a run of analyses, those of the analyses beside the shared ones."""

from dataclasses import fields
from typing import Any

from headscope.data.encoded import CountedTokens
from headscope.engine.base import RunOptions

COUNTED = {each.name for each in fields(CountedTokens)}
SHARED = {each.name for each in fields(RunOptions)}


def run_options(**options: Any) -> RunOptions:
    """RunOptions from all of them by name."""
    counted = CountedTokens(**{name: value for name, value in options.items() if name in COUNTED})
    own = {name: value for name, value in options.items() if name not in SHARED | COUNTED}
    shared = {name: value for name, value in options.items() if name in SHARED}
    return RunOptions(**{"token_filter": counted, **shared}, analysis_options=own)
