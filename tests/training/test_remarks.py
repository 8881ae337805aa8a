"""What a variant could not do in a run is told: before it begins, where the plan says so, and when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headscope.results.training import Training
from headscope.training.train_loop import Listener
from headscope.training.trainer import train
from headscope.training.variant import find_variant
from tests.oracles import lessons

pytestmark = pytest.mark.slow

LATE = '[[swap]]\nepoch = 1\nfirst = "cross.0.0"\nsecond = "cross.1.0"\n' + (
    '[[swap]]\nepoch = 7\nfirst = "cross.0.*"\nsecond = "cross.1.*"\n'
)


class Heard(Listener):
    """Keeps what is remarked."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def remarked(self, text: str) -> None:
        self.texts.append(text)


def run(
    folder: Path, name: str, options: dict[str, Any], *, resume: bool = False, **shared: Any
) -> tuple[Training, list[str]]:
    """How a run ended, and what was said before it began."""
    cls, heard = find_variant(name), Heard()
    config = lessons.config(folder, **{"precision": "float32", "log_every": 1000, "max_epochs": 1} | shared)
    return train(config, cls(cls.Options(**options)), resume=resume, listener=heard), heard.texts


UPDATES = {"max_epochs": None, "updates": 3}  # within the first epoch, which nothing says before


@pytest.mark.parametrize(
    ("name", "options", "shared", "before", "after"),
    [
        ("mae", {}, {}, "the gates are not trained: their first step is in epoch 5", "ends after epoch 1"),
        ("mae", {"gate_every": 2}, UPDATES, None, "first step is in epoch 2 (--gate-every), and the run ends after"),
        ("mae", {"gate_every": 1}, {}, None, None),
        ("mae", {"bcd": False}, {}, None, None),
        ("mae", {"uniform": True}, {}, None, None),
        ("mixing", {"start_after": 1.0}, {}, "before --start-after opens them", "the matrices are not"),
        ("mixing", {"start_after": 0.95}, {}, None, "before --start-after opens them"),
        ("mixing", {"start_after": 0.5}, {}, None, None),
        ("mixing", {"ratios": (0.0,)}, {}, "--ratios are 0", "--ratios are 0"),
        ("mixing", {"compat": "fork", "gamma": 4.0}, {}, "before --start-after opens them", "opens them"),
        ("mixing", {"compat": "fork", "gamma": 4.0}, UPDATES, None, "before --start-after opens them"),
        ("mixing", {"compat": "fork", "gamma": 4.0, "start_after": 0.0}, {}, None, None),
        ("disagreement", {"weight": 0.0}, {}, "--weight 0 adds nothing", "--weight 0 adds nothing"),
        ("disagreement", {}, {"heads": 1}, "no attention module of --sites has two heads", "has no gradient"),
        ("disagreement", {}, {}, None, None),
        ("swap", {"dynamic": ("hard",)}, {}, "no heads of cross in 1 epochs", "no heads of cross"),
        ("swap", {"dynamic": ("hard",)}, {"max_epochs": 2}, None, None),
        (
            "swap",
            {"dynamic": ("hard",), "compat": "fork", "dynamic_end": (9,), "dynamic_max_switches": (0,)},
            {"max_epochs": 2},
            None,
            "--dynamic changes no heads of cross in 2 epochs",
        ),
        (
            "swap",
            {"dynamic": ("hard",), "dynamic_start": (3,), "dynamic_end": (2,)},
            {"max_epochs": 4},
            None,
            "--dynamic changes no heads of cross in 4 epochs; see --dynamic-start",
        ),
        ("swap", {"dynamic": ("soft", "none", "none")}, {"max_epochs": 2}, None, "changes no heads of"),
        ("mae+swap", {"dynamic": ("hard",)}, {}, "the gates are not trained", "--dynamic changes no heads of cross"),
        ("swap", {"swap_schedule": "late.toml"}, UPDATES, None, "3 of 4 scheduled swaps do not come"),
    ],
)
def test_a_variant_that_did_nothing_says_so(
    name: str, options: dict[str, Any], shared: dict[str, Any], before: str | None, after: str | None, tmp_path: Path
) -> None:
    (tmp_path / "late.toml").write_text(LATE)
    if "swap_schedule" in options:
        options = options | {"swap_schedule": tmp_path / "late.toml"}
    found, heard = run(tmp_path, name, options, **shared)
    for said, expected in ((heard, before), (found.remarks, after)):
        assert bool(said) is (expected is not None)
        assert expected is None or any(expected in text for text in said), said
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["result"]["remarks"] == list(found.remarks)
