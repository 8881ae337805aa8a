"""Options of a run of analyses, those of the analyses beside the shared ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headscope.engine.base import RunOptions


def run_options(**options: Any) -> RunOptions:
    """RunOptions from all of them by name."""
    shared = {each.name for each in fields(RunOptions)}
    own = {name: value for name, value in options.items() if name not in shared}
    return RunOptions(**{name: value for name, value in options.items() if name in shared}, analysis_options=own)
