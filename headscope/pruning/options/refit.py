"""How output projections are refitted in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headscope.config.option import checked_value, option, types_of
from headscope.errors import ConfigError, python_errors
from headscope.registry import unknown

COMPENSATIONS = ("none", "mean", "least-squares")
AUTO = "auto"
"""The compensation that harms least, of several."""
ANCHORS = ("none", "mixed")
DAMPING, AUTO_DAMPING = 1e-4, 0.1
"""λ as a share of the mean of the diagonal of second moments: of what is asked for, and of what `auto` compares."""

OtherText = Any
"""A text besides that of a calibration: the path of a file, a list of sentences, or (source, target) of such two."""


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """How output projections are refitted: `method` is one of `COMPENSATIONS`, λ a share of the mean second moment.

    `damping` is that share. `add_bias`: an output projection without a bias gets one; else its refit is linear.
    `sequential`: module after module (see `sequential`), for least squares only; `feed_forward`: the outputs of
    feed-forward blocks too, block after block. `anchor` says whose moments are added
    to those of the calibration text (see `anchors`): one of `ANCHORS`, "" for none, or a text. `strength` is how far a
    projection goes from what it was, without the removed columns (0), to its refit (1).
    """

    method: str = "least-squares"
    damping: float = DAMPING
    add_bias: bool = False
    sequential: bool = False
    feed_forward: bool = False
    anchor: OtherText = ""
    strength: float = 1.0

    @property
    def name(self) -> str:
        """For signatures."""
        anchor = anchor_name(self.anchor)
        return "-".join([self.method, *in_turn(self), *([anchor] if anchor else []), *partly(self)])


@dataclass(frozen=True, kw_only=True)
class Refit:
    """How the heads that stay make up for those that go: `method` is "least-squares", "mean", "none" or "auto".

    `damping` is λ as a share of the mean second moment of the contexts; None is 1e-4, and 0.1 of "auto".
    `sentences` of the text are calibrated on.
    `sequential`: module after module, for the contexts and the residual stream of the model that is pruned so far.
    `feed_forward`: after that the outputs of feed-forward blocks are refitted too, block after block.
    `objective` is what held-out text is measured by (empty: what fits the model).
    `anchor` adds the moments of other text to those of the calibration text, so that a refit holds there too: "mixed"
    (random subwords, and the words of the calibration text in random order), "none", or a text of your own.
    `strength` is how far projections go to their refit: 0.5 is half the way from what they were.
    "auto" compares none, mean and least squares (`damping` 0.1; with and without "mixed"; the whole way and half of it)
    on held-out text and on a second text, and takes what harms least on the worse of the two. `check` is that second
    text (default: text of many kinds that ships, random subwords where the language is not known).
    Texts are a file's path, a list of sentences, a pair (source, target) of these, or `hs.Texts`.
    ConfigError for values of a wrong type, an unknown method, a negative damping, and options that a method lacks.
    """

    method: str = "least-squares"
    damping: float | None = option(None, minimum=0)
    sentences: int = option(1000, name="calibration_sentences", minimum=1)
    sequential: bool = False
    feed_forward: bool = False
    objective: str = ""
    anchor: OtherText = ""
    check: OtherText = ()
    strength: float = option(1.0, above=0, maximum=1)

    def __post_init__(self) -> None:
        with python_errors():
            self._check()

    def _check(self) -> None:
        for entry in fields(self):
            if entry.type != "OtherText":
                checked_value(entry, types_of(Refit)[entry.name], getattr(self, entry.name))
        if self.method not in (*COMPENSATIONS, AUTO):
            raise ConfigError(unknown("compensation", self.method, [*COMPENSATIONS, AUTO]))
        refits = {"--damping": self.damping is not None, "--feed-forward": self.feed_forward}
        refits |= {"--sequential": self.sequential, "--anchor": bool(self.anchor)}
        for name, is_set in refits.items():
            if is_set and self.method not in ("least-squares", AUTO):
                raise ConfigError(f"{name} is for --compensate least-squares, not {self.method}")
        if self.strength < 1 and (self.sequential or self.method == "none"):
            other = "--sequential makes up for all that went before" if self.sequential else "nothing is refitted"
            raise ConfigError(f"--strength {self.strength:g} is for refits of all modules at once; {other}")
        if self.check and self.method == "none":
            raise ConfigError(f"--check is what a refit is compared on; give --compensate {AUTO}")
        anchor_files(self.anchor)

    def options(self, *, add_bias: bool = False) -> RefitOptions:
        """How modules are refitted; "auto" compares least squares."""
        damping = AUTO_DAMPING if self.method == AUTO else DAMPING
        return RefitOptions(
            method="least-squares" if self.method == AUTO else self.method,
            damping=damping if self.damping is None else self.damping,
            add_bias=add_bias,
            sequential=self.sequential,
            feed_forward=self.feed_forward,
            anchor=self.anchor,
            strength=self.strength,
        )


NEEDS_TEXT = "measures contexts on text: give --source FILE, and --target for translation"


def check_texts(options: Refit, *, has_text: bool) -> None:
    """ConfigError where the text is missing that a calibration needs."""
    if not has_text and options.method != "none":
        raise ConfigError(f"--compensate {options.method} {NEEDS_TEXT}")


def check_damping(share: float) -> None:
    """ConfigError for a damping that is negative or not finite."""
    if not 0 <= share < math.inf:
        raise ConfigError(f"--damping {share:g}: a share of the mean second moment, at least 0 and finite")


def partly(options: RefitOptions | Refit, mark: str = "=") -> list[str]:
    """What signatures (and names, where a space is the `mark`) say of a refit that is taken in part."""
    return [f"strength{mark}{options.strength:g}"] * (options.strength < 1)


def in_turn(options: RefitOptions | Refit) -> list[str]:
    """What names say of a refit module after module."""
    return ["sequential"] * options.sequential + ["feed-forward"] * options.feed_forward


def as_text(words: Sequence[str]) -> OtherText:
    """What an option with commas says: one of `ANCHORS`, a file, or two files (source and target)."""
    return words[0] if len(words) == 1 else tuple(words)


def anchor_name(anchor: OtherText) -> str:
    """One of `ANCHORS`, "" for none, and for a text "text"."""
    if isinstance(anchor, str) and anchor in ANCHORS:
        return "" if anchor == "none" else anchor
    return "text" if anchor else ""


def anchor_files(anchor: OtherText) -> tuple[Any, ...]:
    """Source and target of a text, both as files or lists; () for what is named. ConfigError for an unknown name."""
    if isinstance(anchor, str) and anchor in ("", *ANCHORS):
        return ()
    files = sides(anchor, name="--anchor")
    if isinstance(anchor, str) and not Path(anchor).exists():
        raise ConfigError(
            f"--anchor: there is no file {anchor!r}, nor an anchor; choose {', '.join(ANCHORS)} or a file"
        )
    return files


def sides(text: OtherText, *, name: str) -> tuple[Any, ...]:
    """Source and target of a text, (): there is none; ConfigError for more than two."""
    if isinstance(text, (str, Path)):
        return (text,)
    if isinstance(text, tuple):
        if len(text) > 2:
            raise ConfigError(f"{name}: {len(text)} files; give one, or source and target: FILE,TARGET")
        return text
    return (text,) if text else ()
