"""How output projections are refitted in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from headscope.errors import ConfigError
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
    `sequential`: module after module (see `sequential`), for least squares only; `feed_forward`: then the outputs of
    feed-forward blocks too. `anchor` says whose moments are added
    to those of the calibration text (see `anchors`): one of `ANCHORS`, "" for none, or a text. `strength` is how far a
    projection goes from what it was, without the removed columns (0), to its refit (1). ConfigError for a method that
    there is not.
    """

    method: str = "least-squares"
    damping: float = DAMPING
    add_bias: bool = False
    sequential: bool = False
    feed_forward: bool = False
    anchor: OtherText = ""
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_damping(self.damping)
        check_strength(self)
        if self.method == AUTO:
            raise ConfigError(f"--compensate {AUTO} is for prune remove; choose {', '.join(COMPENSATIONS)} here")
        if self.method not in COMPENSATIONS:
            raise ConfigError(unknown("compensation", self.method, list(COMPENSATIONS)))
        anchor_files(self.anchor)
        check_feed_forward(self)
        for name, is_given in (("--sequential", self.sequential), ("--anchor", bool(self.anchor))):
            if is_given and self.method != "least-squares":
                raise ConfigError(f"{name} is for --compensate least-squares, not {self.method}")

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
    `sequential`: module after module, for the contexts and the residual stream of the model that is pruned so far;
    with `feed_forward` the outputs of feed-forward blocks are refitted too, which makes up for most, and takes longest.
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
    damping: float | None = None
    sentences: int = 1000
    sequential: bool = False
    feed_forward: bool = False
    objective: str = ""
    anchor: OtherText = ""
    check: OtherText = ()
    strength: float = 1.0

    def __post_init__(self) -> None:
        for name, (kind, words) in _KINDS.items():
            value = getattr(self, name)
            if name == "damping" and value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ConfigError(f"{name}={value!r:.60} is of the wrong type; give {words}")
        check_feed_forward(self)
        check_strength(self)
        check_refit(
            self.method,
            damping=self.damping,
            sentences=self.sentences,
            sequential=self.sequential,
            anchor=self.anchor,
            check=self.check,
        )

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


_KINDS: dict[str, tuple[type, str]] = {
    "method": (str, "a string"),
    "damping": (Real, "a number"),
    "sentences": (Integral, "a whole number"),
    "sequential": (bool, "True or False"),
    "feed_forward": (bool, "True or False"),
    "objective": (str, "a string"),
    "strength": (Real, "a number"),
}


def check_refit(
    method: str,
    *,
    damping: float | None,
    sentences: int,
    sequential: bool,
    anchor: OtherText = "",
    check: OtherText = (),
    names: tuple[str, ...] = ("method", "damping", "sentences", "sequential", "anchor", "check"),
) -> None:
    """ConfigError for options of a removal's refit that are out of bounds or do not fit `method`.

    `names` are what the caller has for method, damping, sentences, sequential, anchor and check.
    """
    if method != AUTO and method not in COMPENSATIONS:
        raise ConfigError(unknown("compensation", method, [*COMPENSATIONS, AUTO]))
    if damping is not None:
        check_damping(damping, name=names[1])
    if sentences < 1:
        raise ConfigError(f"{names[2]} {sentences}: at least 1 is needed")
    refits = method in ("least-squares", AUTO)
    for name, is_set in ((names[1], damping is not None), (names[3], sequential), (names[4], bool(anchor))):
        if is_set and not refits:
            raise ConfigError(f"{name} is for {names[0]} least-squares, not {method}")
    if check and method == "none":
        raise ConfigError(f"{names[5]} is what a refit is compared on; give {names[0]} {AUTO}")
    anchor_files(anchor, name=names[4])


def check_texts(options: Refit, *, has_text: bool) -> None:
    """ConfigError where the text is missing that a calibration needs."""
    if not has_text and options.method != "none":
        what = f"--compensate {options.method}"
        raise ConfigError(f"{what} measures contexts on text: give --source FILE, and --target for translation")


def check_damping(share: float, *, name: str = "--damping") -> None:
    """ConfigError for a damping that is negative or not finite."""
    if not 0 <= share < math.inf:
        raise ConfigError(f"{name} {share:g}: a share of the mean second moment, at least 0 and finite")


def check_feed_forward(options: RefitOptions | Refit) -> None:
    """ConfigError where feed-forward blocks are to be refitted and modules are not refitted one after the other."""
    if options.feed_forward and not options.sequential:
        raise ConfigError("feed_forward refits module after module; give sequential=True too")


def check_strength(options: RefitOptions | Refit) -> None:
    """ConfigError for a strength that is none, and where one in part does not apply."""
    if not 0 < options.strength <= 1:
        raise ConfigError(f"--strength {options.strength:g}: more than 0 and at most 1, which is the whole refit")
    if options.strength < 1 and (options.sequential or options.method == "none"):
        other = "--sequential makes up for all that went before" if options.sequential else "nothing is refitted"
        raise ConfigError(f"--strength {options.strength:g} is for refits of all modules at once; {other}")


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


def anchor_files(anchor: OtherText, *, name: str = "--anchor") -> tuple[Any, ...]:
    """Source and target of a text, both as files or lists; () for what is named. ConfigError for an unknown name."""
    if isinstance(anchor, str) and anchor in ("", *ANCHORS):
        return ()
    files = sides(anchor, name=name)
    if isinstance(anchor, str) and not Path(anchor).exists():
        raise ConfigError(f"{name}: there is no file {anchor!r}, nor an anchor; choose {', '.join(ANCHORS)} or a file")
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
