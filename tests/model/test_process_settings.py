"""Settings of the process: on in the commands unless the user has set them, off for library users."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import headscope as hs
from headscope.cli import main
from headscope.model.process_settings import KERNELS as KEPT
from headscope.model.process_settings import keep_few_kernels, may_change_process, process_settings

FAULTS = """
import resource, torch
from headscope.model.process_settings import keep_freed_memory, process_settings
x = torch.ones(2**20)
def work():
    for _ in range(20):
        (x + 1).mul(2).add(x)
def faults():
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert not keep_freed_memory()
without = max(faults() for _ in range(3))
with process_settings():
    assert keep_freed_memory() and keep_freed_memory()
print(min(faults() for _ in range(3)), without)
"""


def ran(code: str, **more: str) -> str:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_", "ONEDNN_"))
    }
    done = subprocess.run([sys.executable, "-c", code], env=plain | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_pages_are_not_asked_for_again() -> None:
    """In one process, before and after the setting."""
    with_it, without = 10**9, 0
    for _ in range(12):  # now and then the heap lies so that pages are new once, or its end is not handed back
        one, other = map(int, ran(FAULTS).split())
        with_it, without = min(with_it, one), max(without, other)
        if with_it < 100 and without:
            break
    assert with_it < 100 < without / 10, (with_it, without)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_is_left_alone(name: str) -> None:
    code = """from headscope.model.process_settings import keep_freed_memory, process_settings
with process_settings():
    print(keep_freed_memory())"""
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert ran(code, **{name: value}) == "False"


KERNELS = """
import ctypes, os, torch
from headscope.model.process_settings import keep_few_kernels, process_settings
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used g h".split()]
libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info
def kept():
    torch.nn.functional.gelu(torch.ones(1, 1))
    before = libc.mallinfo2().used
    for n in range(2, 302):
        torch.nn.functional.gelu(torch.ones(n, 64))
    return max(0, libc.mallinfo2().used - before) // 1024
if not (child := os.fork()):
    with process_settings():
        keep_few_kernels()
    print(kept(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(kept())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is looked at by a function of glibc")
def test_kernels_of_shapes_that_are_gone_are_not_kept() -> None:
    """In a process, and in one that was forked from it before it had any kernel."""
    with_it, without = map(int, ran(KERNELS).split())  # KiB after 300 shapes
    if without < 500:
        pytest.skip(f"this torch keeps {without} KiB for 300 shapes: its GELU is not oneDNN's")
    assert with_it < without / 10, (with_it, without)


def test_the_number_of_kernels_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "77")
    with process_settings():
        keep_few_kernels()
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "77"
        monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
        keep_few_kernels()
        assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == KEPT


def test_commands_change_the_process_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    seen: list[bool] = []
    monkeypatch.setattr(main, "app", lambda: seen.append(may_change_process()))
    main.run()
    keep_few_kernels()
    assert seen == [True] and not may_change_process()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "3"}])
def test_threads_of_a_command_soon_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    names = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        main, "app", lambda: seen.append({name: os.environ[name] for name in names if name in os.environ})
    )
    main.run()
    assert seen == [own or {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}]
    assert {name: os.environ[name] for name in names if name in os.environ} == own


@pytest.mark.slow
def test_the_way_of_waiting_is_set_before_torch_is_imported(python: Callable[..., str]) -> None:
    """OpenMP shows what it has read when it is loaded, which is when torch is."""
    code = """import os, sys
os.environ.update(OMP_DISPLAY_ENV="verbose")
from headscope.cli import main
main.app = lambda: __import__("torch")
assert "torch" not in sys.modules
os.dup2(1, 2)
main.run()
"""
    assert "GOMP_SPINCOUNT = '1000'" in python("-c", code)


@pytest.mark.slow
def test_the_api_leaves_the_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocator, environment and torch's threads: before, after, and in every pass of every method."""
    importlib.import_module("transformers.modeling_utils")  # which opens a library itself
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail(f"{name} was opened"))
    environment, before, seen = dict(os.environ), torch.get_num_threads(), set[int]()
    torch.set_num_threads(3)
    try:
        model = hs.load(hs.assets.trained(), device="cpu")
        hook = model.model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
        pairs = [("a man sings .", "ein mann singt ."), ("two dogs play .", "zwei hunde spielen .")]
        model.analyze(pairs, only=["confidence", "gradient", "ablation"], bootstrap=2)
        model.evaluate(pairs, metrics="perplexity", bootstrap=2)
        model.rank(by="taylor", text=pairs)
        model.translate(["a man sings ."], beam=1)
        model.remove(["encoder-self.0.0"], text=pairs)
        hook.remove()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {3}
    added = set(os.environ) - set(environment)
    assert not [name for name in added if name.startswith(("MALLOC_", "ONEDNN_", "OMP_"))]
