"""Train a model by the options of `headscope train`, and write its folder."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from headscope.config import plain_options
from headscope.config.option import identity, plain_config
from headscope.distributed import Processes, pick_device, process_group
from headscope.errors import ConfigError, HeadscopeError, flag
from headscope.evaluation.translation import text_remarks
from headscope.files.tables import read_csv
from headscope.files.writing import ending_signals, handling, received_signals, write_json
from headscope.model.stored_weights import parameters_by_part
from headscope.progress import Progress as ProgressDisplay
from headscope.progress import no_progress
from headscope.results.training import AXES, Training
from headscope.signature import signature_of
from headscope.training.architecture import build_model, open_init
from headscope.training.checkpoints import (
    METRICS,
    TRAINING,
    Progress,
    check_settings,
    checkpoint,
    load_state,
    read_state,
    training_folder,
)
from headscope.training.config import TrainConfig, TrainingPosition, remarks_on
from headscope.training.prepare import prepare, write_vocabularies
from headscope.training.run_state import TrainingLoss, TrainingRun
from headscope.training.train_loop import History, Loop, bleu_mode
from headscope.training.variant import Variant
from headscope.version import VERSION


def train(
    config: TrainConfig,
    variant: Variant,
    *,
    resume: bool = False,
    force: bool = False,
    progress: ProgressDisplay = no_progress,
    remark: Callable[[str], None] = lambda text: None,
    command: Sequence[str] = (),
) -> Training:
    """Train a variant in `config.out`. `resume` continues the run there, or begins one where there is none.

    Under torchrun every process calls this (several trainings: within `processes.together`). OutputError where the
    folder is not empty and neither `resume` nor `force` is given; TrainingError where the loss is NaN or infinite;
    the other errors are about options, text and checkpoints.
    """
    with (
        process_group() as processes,
        _stoppable() as is_interrupted,
        training_folder(config, variant.options, processes, resume=resume, force=force) as workspace,
    ):
        state = read_state(workspace.path, "settings", "model", "progress")
        working = replace(config, out=workspace.path)
        result = _train(working, variant, processes, state, progress, remark, is_interrupted, command)
        if result.reason == "interrupted":
            return result
        if processes.main:
            workspace.finish()
        return replace(result, folder=config.out)


def _train(
    config: TrainConfig,
    variant: Variant,
    processes: Processes,
    state: Mapping[str, Any] | None,
    display: ProgressDisplay,
    remark: Callable[[str], None],
    is_interrupted: Callable[[], bool],
    command: Sequence[str],
) -> Training:
    start_time = time.time()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    options = plain_options(variant.options)
    variant_settings = {f"{variant.name}.{name}": value for name, value in identity(variant.options).items()}
    settings = {**plain_options(config), "variant": variant.name, **variant_settings}
    if state is not None:
        check_settings(state, settings, config.out)
    run = make_run(config, variant, processes)
    variant = run.variant
    progress = Progress() if state is None else load_state(run, state)
    history = None
    record = _initial_record(run, options, command)
    if processes.main:
        history = History(config.out, update=run.position.update, tensorboard=config.tensorboard)
        write_json(config.out / "run.json", TRAINING.describe(record | {"status": "running"}))
        write_vocabularies(config, run.data)
    begun_at = run.position.update
    loop = Loop(run, progress, settings, history, display, is_interrupted)
    remarks = run.data.unknown.warnings(checkpoint(run))
    if config.bleu_every and run.data.valid_texts is not None:
        remarks += text_remarks(run.data.valid_texts[1], bleu_mode(config))
    if loop.end_reason() is None:
        remarks += [*remarks_on(config), *variant.remarks(run, has_ended=False)]
    for text in remarks if processes.main else ():
        remark(text)
    with _record_status(config.out, record, history):
        reason = loop.train()
    lines = config.out / METRICS
    has_lines = history is not None and lines.is_file()
    result = Training(
        record=record,
        metrics=read_csv(lines, columns=AXES) if has_lines else pd.DataFrame(),
        folder=config.out,
        reason=reason,
        epoch=run.position.last_epoch,
        update=run.position.update,
        best=None if run.data.valid is None or progress.best is None else abs(progress.best),
        **{name: getattr(progress, name) for name in ("best_update", "nll", "bleu", "seconds")},
        parameters=record["parameters"]["total"],
        signature=record["signature"],
        remarks=() if reason == "interrupted" else tuple(variant.remarks(run, has_ended=True)),
        begun_at=begun_at,
    )
    if history is not None:
        status = "interrupted" if reason == "interrupted" else "done"
        record |= {"status": status, "result": result.outcome, "ended": time.time() - start_time}
        write_json(config.out / "run.json", TRAINING.describe(record))
    return result


@contextmanager
def _record_status(folder: Path, record: Mapping[str, Any], history: History | None) -> Iterator[None]:
    """Write into run.json that the block was interrupted or failed, and why; close the history after it."""
    try:
        yield
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        message = str(error) if isinstance(error, HeadscopeError) else f"{type(error).__name__}: {error}"
        if history is not None:
            ending = {"status": "interrupted"} if is_interrupt else {"status": "failed", "error": message}
            with suppress(OSError, HeadscopeError):  # the first error matters more than one in writing it
                write_json(folder / "run.json", TRAINING.describe({**record, **ending}))
        raise
    finally:
        if history is not None:
            history.close()


def make_run(config: TrainConfig, variant: Variant, processes: Processes | None = None) -> TrainingRun:
    """A run that has not begun, with data, model and optimizer; calls `variant.prepare`."""
    processes = processes or Processes()
    variant.check(config)
    if config.save_confidence != "none":
        from headscope.training.head_scores import with_confidence

        variant = with_confidence(variant, config.save_confidence)
    name = pick_device(config.device)
    device = torch.device(name)
    if config.precision == "fp16" and name == "cpu":
        raise ConfigError(f"{flag.precision} fp16 needs a GPU; on a CPU take float32 or bf16")
    if device.type == "cuda" and processes.world > 1:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(config.seed)
    init = open_init(config)
    vocabularies = None if init is None or init.target is None else (init.source, init.target)
    data = prepare(config, vocabularies, processes)
    torch.manual_seed(config.seed)
    model = build_model(config, variant, init, data.source, data.target)
    model = model.to(device, torch.float64 if config.precision == "float64" else torch.float32)
    model.tie()
    run = TrainingRun(
        config=config,
        variant=variant,
        model=model,
        criterion=nn.Identity(),
        optimizer=_optimizer(config, variant.groups(model), device),
        scaler=torch.amp.GradScaler(device.type, enabled=config.precision == "fp16"),
        device=device,
        processes=processes,
        data=data,
        generator=torch.Generator().manual_seed(config.seed),
        position=TrainingPosition(updates_planned=config.updates, epochs_planned=config.epochs),
    )
    run.criterion = _criterion(run, variant)
    torch.manual_seed(config.seed + 1 + processes.rank)  # dropout
    variant.prepare(run)
    return run


def _criterion(run: TrainingRun, variant: Variant) -> nn.Module:
    config = run.config
    criterion = TrainingLoss(run.model, smoothing=config.label_smoothing)
    criterion.extra = lambda batch: variant.extra_loss(run, batch)
    if config.compile:
        criterion.sums = torch.compiler.disable(criterion.sums)  # type: ignore[method-assign]
        criterion.compile(dynamic=True)
    if run.processes.world == 1:
        return criterion
    devices = [run.device] if run.device.type == "cuda" else None
    leaves_unused = variant.name != "baseline"  # the other variants may use only some parameters in a forward pass
    return nn.parallel.DistributedDataParallel(criterion, device_ids=devices, find_unused_parameters=leaves_unused)


def _optimizer(config: TrainConfig, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
    decays = config.weight_decay or any("weight_decay" in group for group in groups)
    return (torch.optim.AdamW if decays else torch.optim.Adam)(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP ask to stop after the current update; a second one stops at once."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def request_stop(number: int, _: object) -> None:
        received_signals.append(number)
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    with handling(request_stop, ending_signals()):
        yield lambda: bool(signals)


def _initial_record(run: TrainingRun, options: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The entries of run.json that are known before training."""
    config, data = run.config, run.data
    libraries = ("torch", "numpy", "sentencepiece", "sacrebleu")
    signature = signature_of(
        {
            "m": f"train.{run.variant.name}",
            **{name: str(value) for name, value in options.items() if value is not None},
            "data": f"sha256={data.digest[:12]},n={len(data.train)}",
            "batch": f"{config.max_tokens}x{config.accumulate}x{run.processes.world}",
            "lr": f"{config.schedule}-{config.lr:g}-{config.warmup}",
            "precision": config.precision,
            "device": run.device.type,
        },
        seed=config.seed,
    )
    return {
        "signature": str(signature),
        "variant": run.variant.name,
        "command": list(command),
        "config": plain_options(config),
        "options": dict(options),
        "model": plain_config(run.model.config),
        "parameters": parameters_by_part(run.model),
        "planned": {"updates": run.position.updates_planned, "epochs": run.position.epochs_planned},
        "data": {
            "digest": data.digest,
            "sentences": len(data.train),
            "dropped": data.n_dropped,
            "validation": 0 if data.valid is None else len(data.valid),
            "vocabulary": len(data.target),
            "unknown_pieces": data.unknown.to_json(),
        },
        "versions": {name: importlib.metadata.version(name) for name in libraries}
        | {"headscope": VERSION, "python": sys.version.split()[0]},
        "processes": run.processes.world,
        "device": str(run.device),
        "threads": torch.get_num_threads(),
    }
