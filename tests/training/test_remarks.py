"""What a variant could not do in a run is told: before it begins, where the plan says so, and when it has ended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.heads import HeadId
from headscope.training.config import TrainingPosition
from headscope.training.swaps import Swap, swap_heads
from headscope.training.variants.mixing import LinearMixing, matrices_of
from tests.oracles import lessons, mhr
from tests.oracles.swaps import differing, schedule, state

LATE = {1: ["cross.0.0 cross.1.0"], 7: [f"cross.0.{head} cross.1.{head}" for head in range(3)]}
NEVER = {"dynamic": ("hard",), "compat": "fork", "dynamic_end": (9,), "dynamic_max_switches": (0,)}
BRIEF = {"dynamic": ("hard",), "dynamic_start": (3,), "dynamic_end": (2,)}
UPDATES = {"max_epochs": None, "updates": 3}  # within the first epoch, which nothing says before


@pytest.mark.slow
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
        ("swap", {"dynamic": ("hard",)}, {}, "no heads of cross are swapped in 1 epochs", "no heads of cross"),
        ("swap", {"dynamic": ("hard",)}, {"max_epochs": 2}, None, None),
        ("swap", NEVER, {"max_epochs": 2}, None, "no heads of cross are swapped in 2 epochs"),
        ("swap", BRIEF, {"max_epochs": 4}, None, "no heads of cross are swapped in 4 epochs (--dynamic-start"),
        ("swap", {"dynamic": ("soft", "none", "none")}, {"max_epochs": 2}, None, "no heads of"),
        ("mae+swap", {"dynamic": ("hard",)}, {}, "the gates are not trained", "no heads of cross are swapped"),
        ("swap", {"swap_schedule": LATE}, UPDATES, None, "3 of 4 scheduled swaps do not happen"),
    ],
)
def test_a_variant_that_did_nothing_says_so(
    name: str, options: dict[str, Any], shared: dict[str, Any], before: str | None, after: str | None, tmp_path: Path
) -> None:
    if "swap_schedule" in options:
        options = options | {"swap_schedule": schedule(tmp_path / "late.json", options["swap_schedule"])}
    messages: list[str] = []
    shared = {"precision": "float32", "log_every": 1000, "max_epochs": 1} | shared
    outcome = lessons.run_variant(tmp_path, name, options, remark=messages.append, **shared)
    for remarks, expected in ((messages, before), (outcome.remarks, after)):
        assert bool(remarks) is (expected is not None)
        assert expected is None or any(expected in text for text in remarks), remarks
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["result"]["remarks"] == list(outcome.remarks)


# Variants in one run: losses and groups, and swaps of heads that are mixed.


FORK: dict[str, Any] = {"compat": "fork", "gamma": 40.0, "start_after": 0.0, "weight": 0.1}


def test_losses_are_added(tmp_path: Path) -> None:
    """With the fork's constants: growth loss and cosine loss beside the summed loss of the same batch."""
    sums = {}
    for name, keys in (("mixing", ("gamma", "start_after")), ("disagreement", ("weight",)), ("both", tuple(FORK))):
        folder = tmp_path / name
        options = {key: FORK[key] for key in ("compat", *keys)}
        names = "disagreement+mixing" if name == "both" else name
        options |= {"radius": 0.5} if "gamma" in options else {}
        run = lessons.begin(folder, names, shared={"dropout": 0.0}, **options)
        for part in getattr(run.variant, "parts", [run.variant]):
            if isinstance(part, LinearMixing):
                part.sentences = 1  # the fork's first batch of all is outside its window
        lessons.variant(run).before_update(run, run.position)
        run.model.train()
        sums[name] = run.variant.step(run, lessons.next_batch(run), run.gradients).loss
    run = lessons.begin(tmp_path / "plain", "baseline", shared={"dropout": 0.0})
    plain = run.gradients(lessons.next_batch(run)).loss
    assert sums["mixing"] - plain == pytest.approx(40 * 0.5 * 5)  # radius for each of 5 matrices
    assert sums["disagreement"] - plain > 0.1
    assert sums["both"] - plain == pytest.approx(sums["mixing"] + sums["disagreement"] - 2 * plain, rel=1e-12)


@pytest.mark.parametrize("compat", ["none", "fork"])
def test_what_a_swap_does_to_matrices(compat: str, tmp_path: Path) -> None:
    """Ours leaves them to their layers; the fork exchanges whole ones for heads 0, and no part of them for others."""
    for pair, exchanges in (((0, 0, 1, 0), compat == "fork"), ((0, 1, 1, 1), False)):
        path = schedule(tmp_path / f"{pair[1]}.json", {2: ["cross.{}.{} cross.{}.{}".format(*pair)]})
        run = lessons.begin(tmp_path / f"{pair[1]}", "mixing+swap", swap_schedule=path, gamma=40.0, compat=compat)
        with torch.no_grad():
            for number, alpha in enumerate(alpha for group in matrices_of(run.model).values() for alpha in group):
                alpha.add_(number + 1)
        before = lessons.weights(run)
        lessons.variant(run).before_epoch(run, TrainingPosition(epoch=2))
        after = lessons.weights(run)
        mixing_keys = {key for key in differing(before, after) if "mixing" in key}
        keys = [f"decoder.layers.{n}.cross_attention.mixing.alpha" for n in (0, 1)]
        assert mixing_keys == (set(keys) if exchanges else set())
        if exchanges:
            assert torch.equal(after[keys[0]], before[keys[1]]) and torch.equal(after[keys[1]], before[keys[0]])
        assert any("cross_attention.query" in key for key in differing(before, after))


def test_with_its_output_slice_a_swap_within_a_layer_changes_no_logits_of_a_mixing_model() -> None:
    model = mhr.small().model
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(4, 9, (2, 5), generator=generator) for _ in range(2))
    before, weights = model(source, target), state(model)
    layer = next(at for at in model.declared_attention().layout.items() if at[1] > 1)[0]
    swap = Swap(HeadId(*layer, 0), HeadId(*layer, 1))
    swap_heads(model, [swap], output=True)
    torch.testing.assert_close(model(source, target), before, rtol=0, atol=1e-12)
    assert any("alpha" in key for key in differing(weights, state(model)))
    swap_heads(model, [swap], output=True)
    assert not differing(weights, state(model))
    swap_heads(model, [swap])
    assert not any("alpha" in key for key in differing(weights, state(model)))
