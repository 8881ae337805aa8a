"""The intact model that states are compared with: one that is named, or the one that a smaller model was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from headscope.config import CheckpointOptions, EvaluateConfig
from headscope.data.corpus import Corpus
from headscope.errors import ConfigError, HeadscopeError
from headscope.files.hub import is_cached
from headscope.files.reading import exists, read_record
from headscope.formats.base import Checkpoint, detect_format, open_configured

RECORD = "pruning.json"
COMPANIONS = ("dicts", "hp", "bpe")
COMPARED = 16  # lines that both models must split into the same subwords


@dataclass(frozen=True)
class Intact:
    """A model to compare states with, None where there is none, and what the user should know of it."""

    checkpoint: Checkpoint | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Against:
    """How the intact model is found, once it is needed; `named` says that the user asked for this one."""

    find: Callable[[], Intact] = Intact
    named: bool = False


NO_OTHER = Against()


def against_option(config: EvaluateConfig) -> Against:
    """The checkpoint of `--against`; without it the one that the record beside the checkpoint names."""
    if config.against is None:
        return Against(partial(recorded, config))
    return Against(partial(named, config.against, config), named=True)


def named(path: str, options: CheckpointOptions) -> Intact:
    """A checkpoint that runs where `options` say, with those companions of theirs that its format has a use for."""
    takes = detect_format(path).takes
    useless: dict[str, Any] = dict.fromkeys(name for name in COMPANIONS if name not in takes)
    return Intact(open_configured(replace(options, checkpoint=path, format=None, **useless)))


def recorded(options: CheckpointOptions) -> Intact:
    """What the `pruning.json` of a removal says that the checkpoint was made of; nothing for any other checkpoint."""
    path = Path(options.checkpoint)
    if not exists(path):
        return Intact()
    folder = path if path.is_dir() else path.parent
    record = read_record(folder / RECORD)
    output, source = record.get("output"), record.get("source")
    is_its = isinstance(output, Mapping) and output.get("file") in (".", path.name)
    if record.get("kind") != "removal" or not is_its or not isinstance(source, Mapping):
        return Intact()
    return made_of(source, options, beside=folder.resolve().parent)


def made_of(source: Mapping[str, Any], options: CheckpointOptions, *, beside: Path | None = None) -> Intact:
    """The checkpoint that a record's `source` names, if it is there and has the digest that it had.

    Looked for where it was, and where a folder that was moved as a whole has it: under the end of its path, `beside`
    the smaller one.
    """
    path, why = str(source.get("path")), "is not there"
    companions: dict[str, Any] = {name: Path(source[name]) if source.get(name) else None for name in COMPANIONS}
    for place in _places(path, beside):
        try:
            opened = open_configured(replace(options, checkpoint=place, format=source.get("format"), **companions))
        except HeadscopeError:
            why = "cannot be opened"
            continue
        if opened.digest == source.get("digest"):
            return Intact(opened, (f"states are compared with those of {place}, which {RECORD} names",))
        why = "has changed since (another digest)"
    return Intact(None, (f"{RECORD} names {path} as the intact model, which {why}; --against CKPT names another",))


def _places(path: str, beside: Path | None) -> Iterator[str]:
    """Where a checkpoint may be: its path, or its name on the hub where that was fetched before."""
    if exists(path) or is_cached(path):
        yield path
    if beside is not None:
        parts = Path(path).parts
        for count in range(1, min(len(parts), 3) + 1):
            if exists(place := beside.joinpath(*parts[-count:])) and str(place) != path:
                yield str(place)


def check_comparable(checkpoint: Checkpoint, intact: Checkpoint, corpus: Corpus, *, limit: int) -> None:
    """ConfigError where states of two models on a text are not of the same tokens."""
    pair = f"{checkpoint.path} and the intact model {intact.path}"
    if checkpoint.two_sided is not intact.two_sided:
        raise ConfigError(f"{pair} cannot be compared: one has an encoder and a decoder, the other has not")
    lines = list(islice(corpus, COMPARED))
    texts = {"source": [line.source for line in lines]}
    if checkpoint.two_sided and corpus.has_target:
        texts["target"] = [line.target or "" for line in lines]
    for side, sentences in texts.items():
        split, other = (
            [line.ids for line in each.encode(sentences, side=side, limit=limit)]  # type: ignore[arg-type]
            for each in (checkpoint, intact)
        )
        if split != other:
            raise ConfigError(f"{pair} cannot be compared: they split text into other subwords; give --against CKPT")
