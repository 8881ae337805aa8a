"""Freed memory stays with the process, unless the user has said otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from headscope.model.allocator import KERNELS as KEPT
from headscope.model.allocator import keep_few_kernels

FAULTS = """
import resource, torch
from headscope.model.allocator import reuse_freed_memory
if {reuse}:
    assert reuse_freed_memory() and reuse_freed_memory()
x = torch.ones(2**20)
def work():
    for _ in range(20):
        (x + 1).mul(2).add(x)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_pages_are_not_asked_for_again() -> None:
    with_it = int(ran(FAULTS.format(reuse=True)))
    for _ in range(12):  # where the heap happens to lie badly, glibc cannot hand back its end
        without = int(ran(FAULTS.format(reuse=False)))
        if without:
            break
    assert with_it < 100 < without / 10, (with_it, without)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_is_left_alone(name: str) -> None:
    code = "from headscope.model.allocator import reuse_freed_memory; print(reuse_freed_memory())"
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert ran(code, **{name: value}) == "False"


KERNELS = """
import ctypes, torch
if {few}:
    from headscope.model.allocator import keep_few_kernels
    keep_few_kernels()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used g h".split()]
libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info
torch.nn.functional.gelu(torch.ones(1, 1))
before = libc.mallinfo2().used
for n in range(2, 302):
    torch.nn.functional.gelu(torch.ones(n, 64))
print(max(0, libc.mallinfo2().used - before) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is looked at by a function of glibc")
def test_kernels_of_shapes_that_are_gone_are_not_kept() -> None:
    with_it, without = (int(ran(KERNELS.format(few=few))) for few in (True, False))  # KiB after 300 shapes
    if without < 500:
        pytest.skip(f"this torch keeps {without} KiB for 300 shapes: its GELU is not oneDNN's")
    assert with_it < without / 10, (with_it, without)


def test_the_number_of_kernels_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "77")
    keep_few_kernels()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "77"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    keep_few_kernels()
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == KEPT
