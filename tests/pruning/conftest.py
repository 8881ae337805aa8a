"""Removals of these tests compare shorter translations than commands do."""

import pytest

from headscope.pruning.removal import verify


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "NEW_TOKENS", 5)
    monkeypatch.setattr(verify, "BEAM", 2)
