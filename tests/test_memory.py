"""Freed memory stays with the process, unless the user has said otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from headscope.memory import reuse_freed_memory
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
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    done = subprocess.run([sys.executable, "-c", code], env=plain | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_pages_are_not_asked_for_again() -> None:
    with_it, without = (int(ran(FAULTS.format(reuse=reuse))) for reuse in (True, False))
    assert with_it < 100 < without / 10, (with_it, without)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_is_left_alone(name: str) -> None:
    code = "from headscope.memory import reuse_freed_memory; print(reuse_freed_memory())"
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert ran(code, **{name: value}) == "False"
