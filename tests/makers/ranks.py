"""Processes as torchrun starts them, forked from a server that has imported once what takes seconds to import."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from torch import distributed

from tests.makers.modules import ROOT

PRELOADED = ["headscope.engine.study", "headscope.training.trainer", "headscope.formats.huggingface.opening"]
HANGS = 900  # seconds


def fork_server() -> ForkServerContext:
    """Starts processes that have torch, transformers and headscope in memory and have not computed anything."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*PRELOADED, "torch._dynamo"])  # which optimizers import
    return server


def ranks(folder: Path, arguments: Sequence[object], *, world: int) -> list[tuple[int, str, str]]:
    """Run `python ARGUMENTS` in a group of `world` processes: of each its exit status, stdout and stderr.

    The arguments are `-m MODULE …` or `FILE …`; what the processes print goes through files in `folder`.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store outlives the processes, as torchrun's
    }
    return run_all(folder, arguments, [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)])


def run_all(
    folder: Path, arguments: Sequence[object], environments: Sequence[dict[str, str]]
) -> list[tuple[int, str, str]]:
    """Run `python ARGUMENTS` once in each environment, all at the same time."""
    folder.mkdir()
    server, words = fork_server(), [str(word) for word in arguments]
    processes = [
        server.Process(target=_run, args=(str(folder / str(rank)), words, environment))
        for rank, environment in enumerate(environments)
    ]
    for process in processes:
        process.start()
    results = []
    for rank, process in enumerate(processes):
        process.join(HANGS)
        assert process.exitcode is not None, "a process hangs"
        out, err = ((folder / f"{rank}.{name}").read_text(encoding="utf-8") for name in ("out", "err"))
        results.append((process.exitcode, out, err))
    return results


def _run(path: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Redirect output to files, then run the program that the arguments name."""
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        file = os.open(f"{path}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, {"out": 1, "err": 2}[name])
    os.environ.update(environment)
    os.chdir(ROOT)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
