"""Removals as the command makes them, without measured times and on few sentences."""

from pathlib import Path
from typing import Any

from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from headscope.results.removal import Removal


def remove_heads(checkpoint: Path | str, out: Path, heads: str | None = None, **options: Any) -> Removal:
    quick: dict[str, Any] = {"heads": heads, "rounds": 0, "max_sentences": 8, **options}
    return run_removal(RemoveConfig(checkpoint=str(checkpoint), out=out, **quick))
