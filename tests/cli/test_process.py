"""What a command says to OpenMP and oneDNN before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from headscope.cli import main

NAMES = (*main.WAITING, "OMP_WAIT_POLICY", "KMP_LIBRARY")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "3"}])
def test_threads_of_a_command_soon_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        main, "app", lambda: seen.append({name: os.environ[name] for name in NAMES if name in os.environ})
    )
    main.run()
    assert seen == [own or main.WAITING]


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
