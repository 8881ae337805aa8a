"""Arguments of the Python API: texts, refits and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from inspect import isfunction
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from headscope.config.option import TextLines, convert_value, option_name
from headscope.errors import ConfigError, DataError
from headscope.files.reading import Lines
from headscope.progress import Progress, bar, no_progress, report_to
from headscope.pruning.options.shared import Refit, anchor_name

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
PathName = str | PathLike[str]


def public_api(function: F) -> F:
    """The function with gradients enabled, even if the caller has disabled them (`no_grad`, `inference_mode`)."""
    return torch.inference_mode(False)(torch.enable_grad()(function))


def public_methods(cls: type[C]) -> type[C]:
    """The class, with `public_api` applied to its public methods and `__call__`."""
    for name, method in list(vars(cls).items()):
        if isfunction(method) and (not name.startswith("_") or name == "__call__"):
            setattr(cls, name, public_api(method))
    return cls


Report: TypeAlias = "bool | Callable[[str, int, int], object]"
"""True shows a bar; a function is called as `report(what, done, total)`."""


def progress_of(report: Report) -> Progress:
    """The `Progress` for the argument `progress`; ConfigError for a value of another type."""
    if callable(report):
        return report_to(report)
    if not isinstance(report, bool):
        raise ConfigError(f"progress={report!r} is not known; give True, False or a function of (what, done, total)")
    return bar if report else no_progress


Text: TypeAlias = "str | PathLike[str] | Iterable[str] | Iterable[tuple[str, str]] | tuple[Any, Any] | Texts"
"""A text: a file's path (one sentence a line, `.gz` too), a list of sentences or of pairs (sentence, translation), a
tuple (source, target) of two such texts, or `Texts`."""


@dataclass(frozen=True)
class Texts:
    """A text with its translation, second text and labels, for any argument that is a text: files or lists.

    source, target, second, labels: see `Model.analyze`; the source may be a list of pairs that holds the target, too.
    pairs: every line of the source is a pair of texts with a tab between, instead of `second`.
    """

    source: Any = None
    target: Any = None
    second: Any = None
    labels: Any = None
    pairs: bool = False


def text_options(text: Text | None, options: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """The options of a command for a text, named with a `prefix` (`valid_source`).

    Removes `target`, `second` and `labels`, which belong to the text, from a method's `options`.
    """
    text_parts = {name: options.pop(name, None) for name in ("target", "second", "labels")}
    if not isinstance(text, Texts):
        text = Texts(text, **text_parts)
    elif any(other is not None for other in text_parts.values()):
        raise ConfigError("Texts holds all that belongs to a text; leave out target, second and labels")
    source, target = source_and_target(text.source, text.target)
    lines = {"source": source, "target": target, "source2": text.second, "labels": text.labels}
    line_options = {f"{prefix}{name}": path_or_lines(value, name) for name, value in lines.items() if value is not None}
    return {**line_options, "pairs": text.pairs} if text.pairs else line_options


def source_and_target(text: Any, target: Any) -> tuple[Any, Any]:
    """The source and the target, which a tuple of two texts or a list of pairs holds together."""
    is_tuple = isinstance(text, tuple)
    if is_tuple and len(text) != 2:
        raise DataError(f"a tuple of {len(text)}: a tuple is a pair (source, target); sentences belong in a list")
    text = text if is_tuple or text is None else path_or_lines(text, "text")
    has_pairs = isinstance(text, list) and text and all(isinstance(entry, tuple) and len(entry) == 2 for entry in text)
    if not is_tuple and not has_pairs:
        return text, target
    if target is not None:
        kind = "a pair (source, target)" if is_tuple else "a list of pairs (sentence, translation)"
        raise DataError(f"{kind} has its target already; leave out target=")
    return text if is_tuple else ([source for source, _ in text], [translation for _, translation in text])


def path_or_lines(text: Any, name: str) -> Any:
    """The path of a text, or its lines as a file would have them; ConfigError or DataError for anything else."""
    if isinstance(text, str) and not os.path.exists(text):
        raise DataError(f"there is no file {text[:60]!r}; a sentence itself belongs in a list: [{text[:60]!r}]")
    lines = convert_value(name, TextLines, text)
    if isinstance(lines, Path) or name in ("text", "source", "target"):
        return lines
    return ["\t".join(map(str, entry)) if isinstance(entry, (tuple, list)) else str(entry) for entry in lines]


def refit_texts(options: dict[str, Any], refit: Refit | None) -> dict[str, tuple[Lines, ...]]:
    """The anchor and check texts of a refit; its other fields are added to `options`."""
    if refit is None:
        return {}
    if not isinstance(refit, Refit):
        raise ConfigError(f"refit is of type {type(refit).__name__}; give hs.Refit(method='least-squares')")
    names = ("method", "damping", "sentences", "sequential", "feed_forward", "objective", "strength")
    options |= {option_name(entry): getattr(refit, entry.name) for entry in fields(refit) if entry.name in names}
    texts = {"anchor": refit.anchor, "check": refit.check}
    if anchor_name(refit.anchor) != "text":
        options["anchor"] = texts.pop("anchor")
    pairs = {name: text[0] if len(text) == 1 else text for name, text in texts.items()}
    return {name: tuple(text_options(pair, {}).values()) for name, pair in pairs.items() if pair}
