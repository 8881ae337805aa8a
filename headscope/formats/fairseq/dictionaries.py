"""Dictionaries of fairseq: the file of each side, where it lies, and the vocabulary that it makes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headscope.config import Companions
from headscope.data.encoded import SideName
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import CheckpointError, ConfigError, DataError
from headscope.files.reading import read_bytes, read_text, similar_file
from headscope.formats.fairseq.config import Settings, added_subwords, around_texts
from headscope.formats.fairseq.from_native import SPECIAL
from headscope.model.native.transformer_config import TransformerConfig

START, PAD, END, UNKNOWN = range(4)
OVERWRITE = " #fairseq:overwrite"
LANGUAGE = re.compile(r"[\w-]{1,32}")


@dataclass(frozen=True)
class Dictionaries:
    """The vocabulary of each side that was found, its file, and the sentence about each one that was not."""

    vocabularies: Mapping[SideName, Vocabulary] = field(default_factory=dict)
    missing: Mapping[SideName, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def find_dictionaries(settings: Settings, config: TransformerConfig, companions: Companions) -> Dictionaries:
    """The dictionary of each side: in --dicts, beside the checkpoint, or in the folder it was trained from."""
    vocabularies: dict[SideName, Vocabulary] = {}
    missing: dict[SideName, str] = {}
    sides: tuple[SideName, ...] = ("target",) if config.encoder is None else ("source", "target")
    codes = None if companions.bpe is None else read_bytes(companions.bpe, name=f"--bpe {companions.bpe}")
    files = list[Path]()
    for side in sides:
        stack = config.encoder if side == "source" and config.encoder else config.decoder
        name = _file_name(settings, side, lm=config.encoder is None)
        folders = _folders(settings, companions)
        path = next((folder / name for folder in folders if (folder / name).is_file()), None) if name else None
        if path is None:
            missing[side] = _missing(name, side, folders)
        else:
            start = START if config.encoder is None and settings.on("add_bos_token") else END
            added = added_subwords(settings, _listing(settings, path.parent))
            own = read_dictionary(path, stack.vocabulary, codes, owner=settings.path, start=start, added=added)
            around = around_texts(settings, side)
            if lacking := [name for names in around.values() for name in names if own.id_of(name) is None]:
                missing[side] = (
                    f"its task {settings.text('task')} puts {lacking[0]} around {side} texts, which {path.name} does "
                    "not list; --src-lang and --tgt-lang name other languages"
                )
            else:
                vocabularies[side] = _with_marks(own, around, added)
            files.append(path)
    if companions.dicts is not None and missing:
        raise CheckpointError(f"{settings.path}: {next(iter(missing.values()))}")
    return Dictionaries(vocabularies, missing, tuple(dict.fromkeys(files)))


def _file_name(settings: Settings, side: SideName, *, lm: bool) -> str | None:
    if lm:
        return "dict.txt"
    language = settings.text(f"{side}_lang")
    return f"dict.{language}.txt" if language is not None and LANGUAGE.fullmatch(language) else None


def _folders(settings: Settings, companions: Companions) -> list[Path]:
    folder, data = Path(settings.path).parent, (settings.text("data") or "").split(":")[0]
    if companions.dicts is not None:
        return [companions.dicts]
    usable = data and data.isprintable() and len(data) <= 4096
    return [folder, folder / Path(data).name, Path(data)] if usable else [folder]


def _missing(name: str | None, side: SideName, folders: list[Path]) -> str:
    if name is None:
        option = "--src-lang" if side == "source" else "--tgt-lang"
        return f"it does not say its {side}_lang, so the name of its {side} dictionary is unknown; give {option}"
    similar = similar_file(folders[0] / name)
    return f"there is no {side} dictionary {name} in {folders[0]}{similar}; give its folder with --dicts"


def _listing(settings: Settings, folder: Path) -> str | None:
    """The file of languages that the options name, beside the dictionaries. Returns None if there is none."""
    name = Path(settings.text("lang_dict") or "").name
    return read_text(folder / name, name=str(folder / name)) if name and (folder / name).is_file() else None


def _with_marks(own: Vocabulary, around: Mapping[str, tuple[str, ...]], added: tuple[str, ...]) -> Vocabulary:
    """A vocabulary with what a task puts around texts; neither that nor other languages are text."""
    ids: dict[str, Any] = {name: tuple(map(own.subwords.index, names)) for name, names in around.items()}
    special = own.special | set().union(*ids.values()) | {own.subwords.index(name) for name in added}
    return replace(own, special=special, **ids | ({"start": ids["start"][0]} if "start" in ids else {}))


def read_dictionary(
    path: Path, size: int, codes: bytes | None, *, owner: str, start: int = END, added: tuple[str, ...] = ()
) -> Vocabulary:
    """A dict.*.txt: `subword count` a line behind four special ids, then `added` ones, `size` in all."""
    lines = read_text(path, name=f"the dictionary {path}").split("\n")
    subwords, id_of = list(SPECIAL), {subword: number for number, subword in enumerate(SPECIAL)}
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        text = line.rstrip()
        subword, _, count = text.removesuffix(OVERWRITE).rpartition(" ")
        if not subword or not re.fullmatch(r"-?\d+", count):
            raise DataError(
                f"line {number} of the dictionary {path} is {line[:40]!r}; it must be a subword and a count"
            )
        if subword in id_of:
            if not text.endswith(OVERWRITE):
                raise DataError(f"line {number} of the dictionary {path} repeats {subword[:40]!r}")
            subwords[id_of[subword]] += "#overwritten"  # the later id is meant wherever the subword is written
        id_of[subword] = len(subwords)
        subwords.append(subword)
    subwords += [subword for subword in added if subword not in id_of]
    if len(subwords) != size:
        raise CheckpointError(
            f"{owner}: the dictionary {path} has {len(subwords)} subwords, special ones included, and the model's "
            f"embeddings {size}; this dictionary belongs to another checkpoint"
        )
    splitter = _splitter(codes, subwords)
    return Vocabulary(
        tuple(subwords), splitter, start=start, end=END, unknown=UNKNOWN, pad=PAD, special=frozenset({START})
    )


def _splitter(codes: bytes | None, subwords: list[str]) -> Splitter:
    """How text is split: a SentencePiece model is no text, subword-nmt's codes are; else by the subwords' looks."""
    if codes is None:
        return Splitter("bpe" if any(subword.endswith("@@") for subword in subwords) else "words")
    try:
        codes.decode("utf-8")
        text = not codes.startswith(b"\n") and b"\0" not in codes
    except UnicodeDecodeError:
        text = False
    try:
        return Splitter("bpe" if text else "sentencepiece", codes)
    except ConfigError as error:
        raise DataError(str(error)) from None
