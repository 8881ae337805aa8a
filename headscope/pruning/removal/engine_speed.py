"""How fast engines run what was written for them, intact against pruned: `prune remove --time-engines`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import Checkpoint
from headscope.pruning.engines.base import EngineExport, EngineFile, EngineOptions
from headscope.pruning.model_inputs import InputTexts
from headscope.pruning.removal.savings import Timing, measure_timing


def engine_timing(
    engine: EngineExport,
    written: tuple[EngineFile, Path],
    *,
    models: tuple[Checkpoint, Checkpoint],
    data: InputTexts,
    options: EngineOptions,
    rounds: int,
) -> Timing:
    """Times in one engine of the intact and the pruned of two `models`, in turns, on the same text.

    `written` is the file of the pruned one and its folder; the intact one is exported into a temporary folder. Tokens
    written are as many for both. ConfigError or CheckpointError where the engine has no run to be timed, or does not
    take the intact model.
    """
    (file, folder), (whole, small) = written, models
    with TemporaryDirectory() as temporary, ExitStack() as open_files:
        after = open_files.enter_context(engine.running(file, small, data, folder))
        intact = engine.write(whole, data, Path(temporary), options)
        before = open_files.enter_context(engine.running(intact, whole, data, Path(temporary)))
        tokens = before.work(), after.work()
        if (before.what, tokens[0]) != (after.what, tokens[1]):
            raise CheckpointError(
                f"{file.runtime} does not run both alike ({before.what}, {tokens[0]} tokens; {after.what}, {tokens[1]})"
            )
        timing = measure_timing(f"{file.runtime}: {after.what}", after.sentences, before.work, after.work, rounds)
    return replace(timing, tokens=tokens[0])


def timed_engines(
    engines: Sequence[EngineExport],
    files: Sequence[EngineFile],
    folder: Path,
    *,
    models: tuple[Checkpoint, Checkpoint],
    data: InputTexts,
    options: EngineOptions,
    rounds: int,
) -> tuple[list[Timing], list[str]]:
    """Times in all engines that have a run to be timed, and why others were left out."""
    times, left_out = [], []
    for engine, file in zip(engines, files, strict=True):
        try:
            times.append(
                engine_timing(engine, (file, folder), models=models, data=data, options=options, rounds=rounds)
            )
        except (ConfigError, CheckpointError) as error:
            left_out.append(f"{engine.name} was not timed: {error}")
    return times, left_out
