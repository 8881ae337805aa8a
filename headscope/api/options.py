"""Options as Python callers write them: checked by name and type, errors in Python's words.

The defaults, and what the values mean, are in the config classes (`headscope.config`); the `TypedDict`s here list the
options of a method that are passed on to one, for editors and type checkers.
"""

from __future__ import annotations

import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, Union, get_args, get_origin

from headscope.api.library_defaults import library_defaults
from headscope.config import AnalyzeOptions
from headscope.config.declarations import analysis_options
from headscope.config.inputs import BleuTokenizer
from headscope.errors import ConfigError, HeadscopeError, flags_are_kept
from headscope.files.serialize import types_of
from headscope.progress import Progress, bar, no_progress, reported
from headscope.registry import unknown

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
PathName = str | PathLike[str]
SHOWN = 60  # letters of a wrong value in a message
PLAIN: dict[Any, Any] = {"bool": bool, "int": int, "float": float, "str": str, "PathName": Path}
PLAIN |= {f"{name} | None": kind | None for name, kind in PLAIN.items()}
_COMMAND = re.compile(r"(`headscope [^`]*`)")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


class AnalysisOptions(TypedDict, total=False):
    """Options that the analyses of headscope declare, for editors and type checkers; their files say what they mean.

    Those of other analyses are taken all the same; with types only in `analysis_options`, a mapping.
    """

    relations: str
    min_instances: int
    granularity: Literal["token", "example", "batch"]
    rules: str
    target_token: Literal["top1", "reference", "contrastive"]
    steps: Literal["", "sum", "each"]
    ablate_with: Literal["zero", "mean", "resample"]
    shapley_samples: int
    ig_steps: int
    direction: Literal["noising", "denoising"]
    eap_steps: int
    vocabulary_directions: int
    vocabulary_tokens: str | Iterable[str]


class AnalyzeMore(AnalysisOptions, total=False):
    """Further options of `Model.analyze`; `headscope.config.AnalyzeOptions` says what they mean."""

    skip: str | Iterable[str]
    also: str | Iterable[str]
    faithfulness: bool
    faithfulness_steps: int
    faithfulness_seeds: int
    faithfulness_bleu: bool
    objective: str
    target_parse: PathName | None
    stanza_dir: PathName | None
    lang: str
    download: bool
    frequencies: PathName | None
    frequency_corpus: PathName | None
    queries: Literal["all", "first", "last"]
    keep_special: bool
    exclude_sinks: bool
    max_length: int | None
    long: Literal["truncate", "refuse"]
    max_sentences: int | None
    batch_tokens: int | None
    bootstrap: int
    seed: int
    detail: bool
    report: bool
    examples: int | None
    mhr_pickles: bool
    mhr_rows: Literal["corpus", "batch", "generate"]
    mhr_batch_size: int | None
    mhr_max_tokens: int | None
    attention: Literal["auto", "dense", "streamed"]
    analysis_options: Mapping[str, Any]


class ShrinkMore(TypedDict, total=False):
    """Further options of `Model.shrink`; `headscope.pruning.options.ShrinkConfig` says what they mean."""

    keep: int | None
    keep_fraction: float | None
    max_drop: str | None
    by: str
    allocate: Literal["global", "per-layer", "uniform", "per-group", "measured"] | None
    sites: str | Iterable[str]
    compensate: str
    feed_forward: bool
    calibration_sentences: int
    check: str | Iterable[str]
    metric: str
    bleu_tokenize: BleuTokenizer | None
    objective: str
    export: str | Iterable[str]
    max_sentences: int | None
    valid_sentences: int
    max_length: int | None
    batch_tokens: int | None
    seed: int


class FileMore(TypedDict, total=False):
    """Where on the model hub a folder goes, "user/name", and whether a new repository there is public."""

    push_to: str | None
    public: bool


class EvaluateMore(TypedDict, total=False):
    """Further options of `Model.evaluate`; `headscope.config.EvaluateOptions` says what they mean."""

    bleu_tokenize: BleuTokenizer | None
    hiding: Literal["each", "random"]
    expert: str | None
    beam: int | None
    lenpen: float | None
    max_len_a: float | None
    max_len_b: int | None
    max_length: int | None
    long: Literal["truncate", "refuse"]
    max_sentences: int | None
    batch_tokens: int | None
    bootstrap: int
    seed: int


def configured(cls: type[C], options: Mapping[str, Any], *, function: str) -> C:
    """A config class from the keyword options of a function.

    ConfigError for a name that is no option, with the nearest one, and for a value of the wrong type.
    """
    return cls(**_checked(options, _types(cls), function=function))


def analyze_options(options: Mapping[str, Any]) -> AnalyzeOptions:
    """The options of `analyze` from keywords, among which those of analyses may stand like all others."""
    shared = _types(AnalyzeOptions)
    declared = {name: option.type for name, option in analysis_options().items()}
    values = _checked(options, {**declared, **shared}, function="analyze")
    nested = _checked(values.pop("analysis_options", {}), declared, function="analyze")
    of_analyses = {name: values.pop(name) for name in list(values) if name not in shared}
    return AnalyzeOptions(**values, analysis_options={**nested, **of_analyses})


def _types(cls: type[Any]) -> dict[str, Any]:
    hints = types_of(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _checked(options: Mapping[str, Any], types: Mapping[str, Any], *, function: str) -> dict[str, Any]:
    for name in options:
        if name not in types:
            raise ConfigError(unknown(f"option of {function}", name, sorted(types)))
    return {name: checked_value(name, types[name], value) for name, value in options.items()}


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """A value as its field's type has it: paths and lists of names may be given as strings."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds:
        fitting = _fitting(kind, value)
        if fitting is not None:
            return fitting
    expected = " or ".join(map(_words, kinds))
    raise wrong_type(name, value, expected)


def wrong_type(name: str, value: object, expected: str) -> ConfigError:
    """The error for an argument of a wrong type, in one short line whatever the value prints as."""
    return ConfigError(f"{name}={shown(value)} is of the wrong type; give {expected}")


def shown(value: object) -> str:
    """A value in a message, short and in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _fitting(kind: Any, value: Any) -> Any:
    """The value as one type, None where it is of another."""
    if get_origin(kind) is tuple:
        entries = value.split(",") if isinstance(value, str) else value
        if isinstance(entries, Mapping) or not isinstance(entries, Iterable):
            return None
        stripped = [entry.strip() if isinstance(entry, str) else entry for entry in entries]
        fitting = [_fitting(get_args(kind)[0], entry) for entry in stripped if entry != ""]
        return None if any(entry is None for entry in fitting) else tuple(fitting)
    if kind is Path:
        return Path(value) if isinstance(value, (str, PathLike)) else None
    if get_origin(kind) is Mapping:
        return value if isinstance(value, Mapping) else None
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) else None  # the config says which words there are
    if kind is float and not isinstance(value, bool) and isinstance(value, Real):
        return float(value)
    if kind is int and not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    if kind is str and isinstance(value, PathLike):
        return str(value)
    if kind is Any:
        return value
    plain = kind in (bool, int, float, str)
    return value if type(value) is kind or (not plain and isinstance(value, kind)) else None


def _words(kind: Any) -> str:
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return words.get(kind, "a string")


@contextmanager
def python_errors() -> Iterator[None]:
    """Errors within the block name options as Python writes them (`max_length`), in commands as `--max-length`."""
    try:
        yield
    except HeadscopeError as error:
        if flags_are_kept():
            raise
        error.args = (python_words(str(error)),)
        raise


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """The function, within `python_errors` and `library_defaults`; its arguments of plain types are checked first."""
    hints = inspect.get_annotations(function)  # as they are written: names of types
    names = list(inspect.signature(function).parameters)
    plain = {name: PLAIN[hints[name]] for name in names if hints.get(name) in PLAIN}
    words = {name: str(hints.get(name)) for name in names if str(hints.get(name)).startswith("Literal[")}
    plain |= {name: str | None if hint.endswith("| None") else str for name, hint in words.items()}

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with python_errors():
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            for name in plain.keys() & arguments.keys():
                checked_value(name, plain[name], arguments[name])
            with library_defaults():
                return function(*args, **kwargs)

    return wrapped


def python_words(text: str) -> str:
    """A message with options as keywords: `--max-length 9` becomes `max_length 9`, and `--source` is `text`.

    Commands, `headscope …` within such quotes, stay as they are typed.
    """
    parts = _COMMAND.split(text)
    parts[::2] = [
        _FLAG.sub(lambda match: {"source": "text"}.get(match[1], match[1].replace("-", "_")), part)
        for part in parts[::2]
    ]
    return "".join(parts)


Report: TypeAlias = "bool | Callable[[str, int, int], object]"
"""True shows a bar; a function is called as `report(what, done, total)`."""


def progress_of(report: Report) -> Progress:
    """The `Progress` for a `progress` argument; ConfigError for another type."""
    if callable(report):
        return reported(report)
    if not isinstance(report, bool):
        raise ConfigError(f"progress={report!r} is not known; give True, False or a function of (what, done, total)")
    return bar if report else no_progress


class TrainingReport:
    """A training listener that reports progress in updates; a context manager."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._stack = progress, ExitStack()
        self._step: Callable[[int], None] | None = None
        self._done = 0

    def __enter__(self) -> TrainingReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def updated(self, run: Any, sums: Any) -> None:
        """After every update."""
        position = run.position
        if self._step is None:
            totals = [position.updates_planned] if position.updates_planned else []
            if position.epochs_planned and position.updates_per_epoch:
                totals.append(position.epochs_planned * position.updates_per_epoch)
            self._step = self._stack.enter_context(self._progress("training", min(totals, default=0)))
        self._step(position.update - self._done)
        self._done = position.update

    def validated(self, run: Any, validation: Any, *, best: bool) -> None:
        """Called after every validation; progress does not change."""

    def remarked(self, text: str) -> None:
        """A remark of the training becomes a Python warning."""
        warnings.warn(python_words(text), stacklevel=2)
