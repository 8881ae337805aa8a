"""What the study of variants trains and claims to decide: recipe, arms, claims. PLAN.md says why, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headscope.training.config import PRESETS

TEST = "test_2016_flickr"
SWAPS = "swaps.json"
SEEDS = 5
GRID_SEED, GRID_EPOCHS = 100, 8
RATES = (0.003, 0.006)
LOW = 0.0015  # tried for two arms
SENTENCES, EPOCHS = 10_000, 20
RECIPE: Mapping[str, Any] = {
    "preset": "small",
    "normalise": "lowercase",
    "vocab_size": 4000,
    "max_tokens": 1024,
    "initial": "fairseq",
    "schedule": "cosine",
    "warmup": 500,
    "precision": "float32",
    "bleu_every": 0,
    "save_every": 500,
    "max_sentences": SENTENCES,
    "max_epochs": EPOCHS,
}
FORK_SWAPS, FORK_EPOCHS = (3, 7, 9, 11), 50  # the published program's example: before which epochs, of how many


@dataclass(frozen=True)
class Effect:
    """Evidence that an arm has its effect: a column of runs.csv that must be at least, or at most, so."""

    column: str
    bound: float
    is_minimum: bool = True

    @property
    def demand(self) -> str:
        """The bound in words."""
        return f"at {'least' if self.is_minimum else 'most'} {self.bound:g}"

    def holds(self, value: float) -> bool:
        """Whether a run reaches the bound."""
        return value >= self.bound if self.is_minimum else value <= self.bound


@dataclass(frozen=True)
class Arm:
    """A variant with its options and learning rate, on how many seeds it is trained, and which rates were tried.

    Without rates of its own an arm has another one's, as PLAN.md says. `recipe` is what it has instead of RECIPE's.
    """

    name: str
    title: str
    variant: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = SEEDS
    effects: tuple[Effect, ...] = ()
    rates: tuple[float, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What to type for the same training, without the shared options."""
        words = []
        for name, value in {"lr": self.lr, **self.recipe, **self.options}.items():
            flag, text = name.replace("_", "-"), ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append((f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag} {text}")
        return " ".join(["headscope train", self.variant, *words])


MIXING_EFFECT = Effect("off_diagonal", 0.01)
GATE_EFFECTS = (Effect("gate_entropy", 2.0, is_minimum=False), Effect("gate_change", 0.02))
ARMS = (
    Arm("baseline", "baseline", "baseline", 0.003, rates=(LOW, *RATES)),
    Arm("baseline-rate", "baseline at the next rate", "baseline", 0.006),
    Arm(
        "mixing-free",
        "mixing without growth loss",
        "mixing",
        0.003,
        {"gamma": 0.0},
        effects=(MIXING_EFFECT,),
        rates=(LOW, *RATES),
    ),
    Arm(
        "mixing-free-rate",
        "mixing without growth loss at the next rate",
        "mixing",
        0.006,
        {"gamma": 0.0},
        effects=(MIXING_EFFECT,),
    ),
    Arm("mixing", "MHR mixing, growth loss 0.01", "mixing", 0.003, effects=(MIXING_EFFECT,), rates=RATES),
    Arm(
        "swap",
        "MHR swaps by the fork's schedule",
        "swap",
        0.003,
        {"swap_schedule": Path(SWAPS)},
        effects=(Effect("swaps", 32),),
    ),
    Arm("mae", "MAE-7", "mae", 0.003, effects=(*GATE_EFFECTS, Effect("gate_steps", 1)), rates=RATES),
    Arm("mae-uniform", "Uni-MAE-7", "mae", 0.003, {"uniform": True}, rates=RATES),
    Arm("mae-nobcd", "NoBCD", "mae", 0.003, {"bcd": False}, effects=GATE_EFFECTS, rates=RATES),
    Arm("wide-low", "wide attention, heads of width 128", "wide", 0.0005, seeds=2),
    Arm("wide-high", "wide attention at twice the rate", "wide", 0.001, seeds=2),
)

DROPOUTS = (0.2, 0.3)  # instead of 0.1
REGIME_ARMS = (
    *(
        arm
        for dropout in DROPOUTS
        for arm in (
            Arm(
                f"baseline-{dropout:g}",
                f"baseline, dropout {dropout:g}",
                "baseline",
                0.003,
                rates=(0.003,),
                recipe={"dropout": dropout},
            ),
            Arm(
                f"mae-uniform-{dropout:g}",
                f"Uni-MAE-7, dropout {dropout:g}",
                "mae",
                0.003,
                {"uniform": True},
                recipe={"dropout": dropout},
            ),
        )
    ),
    Arm(
        "swap-soft",
        "MHR soft swaps, by confidence",
        "swap",
        0.003,
        {"dynamic": ("soft",), "dynamic_max_switches": (4,), "dynamic_end": (EPOCHS,)},
    ),
)
"""The arms of PLAN-regimes.md that are run; only their losses are looked at."""


def swap_schedule(epochs: int = EPOCHS) -> dict[str, list[dict[str, Any]]]:
    """The fork's example, scaled to a run of so many epochs and to a decoder of three layers.

    Theirs exchanges all heads of cross attention of layers 1 and 5 of 6 before epochs 3, 7, 9 and 11 of 50: four times,
    so that heads end where they began, in the first quarter of the run. Here they are those of the first and the last
    layer; an epoch is rounded up, and is later where the one before has it already.
    """
    preset = PRESETS["small"]
    module = {"layer_module": "encoder_attn", "transformer_module": "decoder"}
    ends = {"s": "0", "d": str(preset["decoder_layers"] - 1)}
    pairs = [
        {
            f"{end}_{name}": value
            for end, layer in ends.items()
            for name, value in ({"layer": layer, "head": head} | module).items()
        }
        for head in range(preset["heads"])
    ]
    schedule: list[int] = []
    for epoch in FORK_SWAPS:
        earliest = schedule[-1] + 1 if schedule else 2
        schedule.append(max(-(-epoch * epochs // FORK_EPOCHS), earliest))
    return {str(epoch): pairs for epoch in schedule}


@dataclass(frozen=True)
class Claim:
    """That a column of an arm is more (`sign` 1) or less (-1) than of another arm, or than a number.

    `family` names the claims that are corrected together; "loss" are the primary ones. `published_value` is the
    difference that the source prints, in the column's unit, `source` where.
    """

    text: str
    family: Literal["loss", "bleu", "heads", "cost", "regime"]
    column: str
    arm: str
    against: str | float
    sign: int
    published_value: float | None
    source: str


MHR, MAE = "Azov & Landau, IWSLT14 de-en", "Peng et al. 2020, IWSLT14 de-en"
BETTER = (  # arm, than which, published BLEU of both, source
    ("mixing", "baseline", (35.04, 34.51), MHR),
    ("swap", "baseline", (34.74, 34.51), MHR),
    ("swap-soft", "baseline", (34.76, 34.51), MHR),
    ("mae", "baseline", (35.5, 34.6), MAE),
    ("mae-uniform", "baseline", (34.9, 34.6), MAE),
    ("mae", "mae-uniform", (35.5, 34.9), MAE),
    ("mae", "mae-nobcd", (35.5, 34.8), MAE),
)
OURS = (("mixing-free", "baseline"), ("mixing-free-rate", "baseline-rate"), ("baseline-rate", "baseline"))
CONFIDENCE = "Azov & Landau, figure 5; its two maps seem to be of different measures"
MATRICES = "Azov & Landau, figure of the matrices"
CLAIMS = (
    *(
        Claim(
            f"{arm} has a lower validation loss than {other}",
            "loss",
            "valid_nll",
            arm,
            other,
            -1,
            None,
            f"{source}, as BLEU",
        )
        for arm, other, _, source in BETTER
    ),
    *(
        Claim(
            f"{arm} has a lower validation loss than {other}", "loss", "valid_nll", arm, other, -1, None, "asked here"
        )
        for arm, other in OURS
    ),
    *(
        Claim(
            f"{arm} has a higher BLEU than {other}",
            "bleu",
            "bleu",
            arm,
            other,
            1,
            round(arm_bleu - other_bleu, 2),
            f"{source}: {arm_bleu}, {other_bleu}",
        )
        for arm, other, (arm_bleu, other_bleu), source in BETTER
    ),
    Claim(
        "mixing balances the confidence of decoder self-attention (deviation over heads is less)",
        "heads",
        "confidence_spread.decoder-self",
        "mixing",
        "baseline",
        -1,
        None,
        CONFIDENCE,
    ),
    Claim(
        "swaps balance the confidence of cross attention (deviation over heads is less)",
        "heads",
        "confidence_spread.cross",
        "swap",
        "baseline",
        -1,
        None,
        CONFIDENCE,
    ),
    Claim(
        "with the growth loss matrices mix more than without (share of weight off the diagonal)",
        "heads",
        "off_diagonal",
        "mixing",
        "mixing-free",
        1,
        None,
        MATRICES,
    ),
    Claim(
        "with the growth loss they become skew-symmetric off the diagonal (share of squares; 0.5 is chance)",
        "heads",
        "off_diagonal_skew",
        "mixing",
        0.5,
        1,
        None,
        MATRICES,
    ),
    Claim(
        "encoder gates of MAE decide more than those of NoBCD (entropy is less)",
        "heads",
        "gate_entropy",
        "mae",
        "mae-nobcd",
        -1,
        round(1.91 - 2.02, 2),
        "Peng et al. 2020, WMT14 en-de: 1.91, 2.02 nats of 2.08",
    ),
    Claim(
        "MAE takes at most 1.2 times the baseline's time a step",
        "cost",
        "cost_ratio",
        "mae",
        1.2,
        -1,
        None,
        "Peng et al. 2020: about 1.2",
    ),
)

ON_ALL = " on the full text"  # what an arm's name ends in there
ON_GPU = f"{ON_ALL}, GPU"
CONTROL = "baseline-0.2"  # of the better dropout by regimes/grid.csv
REGIME_CLAIMS = tuple(
    Claim(f"{arm} has a lower validation loss than {other}", "regime", "valid_nll", arm, other, -1, None, number)
    for number, arm, other in (
        ("1", CONTROL, "baseline"),
        ("2a", "mae-uniform-0.2", CONTROL),
        ("2b", "mae-uniform", CONTROL),
        ("3", "mae", CONTROL),
        ("4", "mixing", CONTROL),
        ("5", f"mae-uniform{ON_ALL}", f"baseline{ON_ALL}"),
        ("6", f"mae{ON_ALL}", f"baseline{ON_ALL}"),
        ("7", f"mixing{ON_ALL}", f"baseline{ON_ALL}"),
        ("8", f"swap{ON_GPU}", f"baseline{ON_GPU}"),
        ("9", "swap-soft", "baseline"),
    )
)
"""Those of PLAN-regimes.md that its runs are about; `source` is their number there."""
