"""The options of `headscope prune l0` and `headscope prune subset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headscope.config.inputs import OUTPUT
from headscope.config.option import check_options, option
from headscope.errors import ConfigError, check_one_given
from headscope.pruning.options.shared import HEADS, LEARNING, SelectionConfig


@dataclass(frozen=True, kw_only=True)
class Prices:
    """λ of `prune l0`: none, one, or one for each of several runs."""

    strengths: tuple[float, ...] = option(
        (), "Price of an open head; several: one run each.", name="lambda", metavar="L[,L…]", panel=HEADS
    )


@dataclass(frozen=True, kw_only=True)
class L0Options:
    """`strength` is λ, by the convention `strength_as`; or `keep` heads are wanted, and λ is searched.

    "paper": loss + λ · Σ over all heads of P(g ≠ 0) (Voita et al. 2019, §5.1). "code": loss + λ · mean over gated
    attention modules of the sum over their heads, as the story-of-heads program's `concrete_coef`. The loss is the
    mean over target tokens, in nats. With M gated modules λ_paper = λ_code / M.
    """

    method: ClassVar[str] = "l0"

    strength: float | None = None
    strength_as: Literal["paper", "code"] = option(
        "paper",
        "paper: loss + λ · sum over heads of P(open); code: loss + λ · mean over attention modules of it (the "
        "story-of-heads program's concrete_coef).",
        name="lambda-as",
        panel=HEADS,
    )
    keep: int | None = option(None, "Heads that stay, of those sites.", metavar="N", panel=HEADS)
    start: Literal["glorot", "open"] = option(
        "glorot", "Gates at the start: random, as the program's, about half of them half closed; or open.", panel=HEADS
    )
    temperature: float = option(0.33, "Of the gates' noise.", panel=HEADS)

    def __post_init__(self) -> None:
        check_options(self)
        check_one_given({"--lambda L (or a list)": self.strength, "--keep N to have it searched": self.keep})
        if self.strength is not None and not 0 <= self.strength < float("inf"):
            raise ConfigError(f"--lambda {self.strength:g}: it must not be negative; 0 is no penalty")
        if not self.temperature > 0:
            raise ConfigError(f"--temperature {self.temperature:g} must be more than 0")


@dataclass(frozen=True, kw_only=True)
class SubsetOptions:
    """`keep` heads; the temperature falls geometrically from `first` to `last` in `cooldown` updates.

    With `straight_through` the forward pass takes the exact top-K without noise, the backward pass the identity, and
    there is no temperature.
    """

    method: ClassVar[str] = "subset"

    keep: int = option(help="Heads that stay, of those sites.", metavar="K", panel=HEADS)
    first: float = option(0.1, "Of the soft choice at the start.", name="temperature", panel=HEADS)
    last: float = option(1e-8, "And at the end.", name="end-temperature", panel=HEADS)
    cooldown: int | None = option(
        None, "Updates in which it falls; default: two thirds of all, as in the paper.", panel=HEADS, minimum=1
    )
    straight_through: bool = option(False, "Exact top-K forward, identity backward; no temperature.", panel=HEADS)

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.last <= self.first:
            raise ConfigError(
                f"--temperature {self.first:g} --end-temperature {self.last:g}: both must be more than 0, "
                "and the end not above the start"
            )


@dataclass(frozen=True, kw_only=True)
class LearnConfig(SelectionConfig):
    """How gates are learnt, and how the model learns with them; `method` has the options of the gates."""

    method: L0Options | SubsetOptions
    updates: int = option(1000, "Updates of learning.", panel=LEARNING, minimum=1)
    gate_lr: float | None = option(None, "Adam's rate for the gates; default: 0.1 (l0), 0.2 (subset).", panel=LEARNING)
    log_every: int | None = option(
        None, "Updates between points of gates.csv; default: 50 points.", panel=LEARNING, minimum=1
    )
    save_every: int = option(
        500,
        "Updates between states that --resume goes on from; 0: none.",
        panel=LEARNING,
        minimum=0,
        identity=False,
    )
    resume: bool = option(False, "Go on with the run in DIR that was killed, exactly.", panel=OUTPUT, identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_text:
            raise ConfigError("no text to learn from: give --source FILE, and --target FILE for translation")
        if self.resume and self.force:
            raise ConfigError("--resume goes on with the run that is there, --force replaces it; give one of them")

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = super().settings()
        values["method"] = vars(self.method) | {"name": self.method.method}
        return values
