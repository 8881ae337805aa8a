"""Dependency parses by stanza, cached on disk; stanza is imported only if the cache lacks a text."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headscope.data.parses import Parse, Relation, Token, main_type
from headscope.errors import DataError, OutputError, flag, restate
from headscope.files.writing import replacing_file

PROCESSORS = ("tokenize", "pos", "lemma", "depparse")
BATCH = 64  # lines that are parsed at a time
LONGEST_TOKEN = 3000  # stanza's own limit, 300 characters, turns a long URL into <UNK>
LONGEST_LINE = 5000  # characters; the parser's memory is quadratic in the words, and a longer line fits no model
CACHE_FORMAT = f"4 {LONGEST_TOKEN} {LONGEST_LINE}"


def parse_with_stanza(
    lines: Iterable[str],
    *,
    lang: str = "en",
    resources: str | os.PathLike[str] | None = None,
    download: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Iterator[Parse]:
    """One parse per line, in order; the sentences of one line are merged into one parse.

    `resources` is the directory of a stanza download (default: STANZA_RESOURCES_DIR, else stanza's own). Parses are
    cached in `cache_dir` (default: headscope/parses in the user's cache) once all lines are parsed. A line of more than
    5,000 characters, or one whose tokens stanza does not locate, gives a parse without tokens, which cannot be aligned.
    DataError, before the first parse, if a model is missing or does not load.
    """
    lines = list(lines)
    home = resources or os.environ.get("STANZA_RESOURCES_DIR")
    if not home:
        with _quiet():
            from stanza.resources.common import DEFAULT_MODEL_DIR as home  # type: ignore[no-redef]
    directory = Path(str(home))
    listing = directory / "resources.json"  # lists the digests of all models
    if download and not listing.is_file():
        with _loading(lang, directory), _quiet():
            import stanza

            stanza.download(lang, model_dir=str(directory), processors=",".join(PROCESSORS), verbose=False)
    models = hashlib.sha256(listing.read_bytes()).hexdigest() if listing.is_file() else ""
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, version("stanza"), lang, models, lines]).encode())
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(cache_dir or user_cache / "headscope" / "parses") / f"{digest.hexdigest()}.jsonl"
    if cache.is_file():
        return _read_cache(cache, lines)
    return _caching(cache, _parses(_pipeline(lang, directory, download), lines))


def _loading(lang: str, directory: Path) -> AbstractContextManager[None]:
    problem = f"stanza cannot load its {lang!r} models from {directory} ({{why}})"
    advice = f"name the directory of a stanza download with {flag('stanza_dir', 'DIR')}, or fetch it with"
    return restate(DataError, f"{problem}; {advice} {flag.download}", Exception)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import stanza  # noqa: F401  (sets up its logger)
        import torch

        logger = logging.getLogger("stanza")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            logger.setLevel(level)


def _pipeline(lang: str, directory: Path, download: bool) -> Any:
    with _loading(lang, directory), _quiet():
        import stanza

        pipeline = stanza.Pipeline(
            lang,
            dir=str(directory),
            processors=",".join(PROCESSORS),
            download_method=stanza.DownloadMethod.REUSE_RESOURCES if download else None,
            use_gpu=False,
            logging_level="CRITICAL",
            tokenize_max_seqlen=LONGEST_TOKEN,
        )
        if lacking := [name for name in PROCESSORS if name not in pipeline.processors]:
            raise DataError(f"it has no {lacking[0]} model")
        return pipeline


def _parses(pipeline: Any, lines: Sequence[str]) -> Iterator[Parse]:
    for start in range(0, len(lines), BATCH):
        part = lines[start : start + BATCH]
        # an OSError of stanza's own: outside, it would pass for one of the cache, which parses go on without
        with (
            restate(DataError, f"stanza cannot parse the text ({{why}}); give {flag('parse', 'FILE.conllu')}", OSError),
            _quiet(),
        ):
            from stanza import Document

            documents = [Document([], text=line if len(line) <= LONGEST_LINE else "") for line in part]
            documents_read = pipeline.bulk_process(documents)
            parses = [_merged_parse(line, document) for line, document in zip(part, documents_read, strict=True)]
        yield from parses


def _merged_parse(line: str, document: Any) -> Parse:
    """All sentences of a document as one parse; without tokens if their offsets do not match the line."""
    tokens: list[Token] = []
    relations: list[Relation] = []
    for sentence in document.sentences:
        carrier: dict[int, int] = {}  # word id -> token
        for token in sentence.tokens:
            if not _has_valid_offsets(line, tokens[-1].end if tokens else 0, token):
                return Parse(line, (), ())
            carrier.update({word.id: len(tokens) for word in token.words})
            first = token.words[0]
            tokens.append(Token(token.start_char, token.end_char, first.upos or "", first.lemma or ""))
        for word in sentence.words:
            if word.head and carrier[word.head] != carrier[word.id]:
                relations.append(Relation(main_type(word.deprel), carrier[word.head], carrier[word.id]))
    return Parse(line, tuple(tokens), tuple(relations))


def _has_valid_offsets(line: str, after: int, token: Any) -> bool:
    start, end = token.start_char, token.end_char
    if start is None or end is None or not after <= start < end <= len(line):
        return False
    return token.text == "<UNK>" or "".join(token.text.split()) == "".join(line[start:end].split())


def _read_cache(path: Path, lines: Sequence[str]) -> Iterator[Parse]:
    damage = f"{path} is damaged; delete it, and the text is parsed again"
    with path.open(encoding="utf-8") as stream, restate(DataError, damage, TypeError, ValueError):
        for line, row in zip(lines, stream, strict=True):
            tokens, relations = json.loads(row)
            yield Parse(line, tuple(Token(*token) for token in tokens), tuple(Relation(*r) for r in relations))


def _caching(path: Path, parses: Iterator[Parse]) -> Iterator[Parse]:
    """The parses, unchanged, which are also written to a cache file; without one if the file cannot be written."""
    with suppress(OutputError), replacing_file(path) as temporary, temporary.open("w", encoding="utf-8") as rows:
        for parse in parses:
            yield parse
            tokens_and_relations = [list(map(astuple, parse.tokens)), list(map(astuple, parse.relations))]
            rows.write(json.dumps(tokens_and_relations, separators=(",", ":")) + "\n")
    yield from parses
