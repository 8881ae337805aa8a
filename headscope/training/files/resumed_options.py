"""The options of a training run that is there already, which a run that goes on takes where none are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headscope.errors import ConfigError, DataError
from headscope.files.reading import exists, read_object


def resumed_options(folder: Path, variant: str) -> dict[str, Any]:
    """The options of the run in a folder, nothing where there is none; ConfigError where it is of another variant."""
    from headscope.files.folders import to_resume
    from headscope.training.files.outputs import TRAINING

    path = to_resume(folder, TRAINING) / "run.json"
    if not exists(path):
        return {}
    try:
        about = read_object(path)
        options: dict[str, Any] = {**about["config"], **about["options"]}
        options.pop("out")
        if not isinstance(options.get("preset"), str | None):
            raise TypeError("preset")
    except (DataError, KeyError, TypeError):
        raise ConfigError(f"--resume: {folder / 'run.json'} is not of a training run; choose another --out") from None
    if about.get("variant") != variant:
        raise ConfigError(f"--resume: the run in {folder} is of variant {about.get('variant')!r}, not {variant!r}")
    return options
