"""Translate a stream of lines: order kept, memory bounded by a window of lines, batches cut by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from headscope.errors import CheckpointError, DataError
from headscope.formats.base import Checkpoint, TranslateOptions, Translation
from headscope.unknown_pieces import UnknownPieces

WINDOW = 512
NOTHING = [Translation("", 0.0)]


def decoded_lines(lines: Iterable[bytes], *, name: str = "stdin") -> Iterator[str]:
    """Lines of UTF-8 text, split at line feeds only; DataError names the first that is something else."""
    for number, raw in enumerate(lines, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: byte {error.start + 1} is not UTF-8; convert the text first (iconv -t utf-8)"
            ) from None


def translate_lines(
    checkpoint: Checkpoint,
    lines: Iterable[str],
    *,
    options: TranslateOptions,
    tokens: int,
    window: int = WINDOW,
    cut: Callable[[int], None] = lambda line: None,
    unknown: UnknownPieces | None = None,
    progress: Callable[[int], None] = lambda sentences: None,
) -> Iterator[list[Translation]]:
    """The translations of each line, best first, in the order of the lines; an empty line stays empty.

    A batch has at most `tokens` source positions, padding included. `cut` is told the number (from 1) of
    every line that is longer than the model's limit and was cut off there; pieces are counted in `unknown`.
    CheckpointError for a model that cannot translate.
    """
    if not checkpoint.two_sided:
        raise CheckpointError(
            f"{checkpoint.path} ({checkpoint.model_type}) has no encoder with a decoder, so it cannot translate"
        )
    checkpoint.search_facts(options)  # refuses what this checkpoint cannot be asked for, before any text is read
    rest = iter(lines)
    before = 0
    counts = UnknownPieces() if unknown is None else unknown
    while texts := list(islice(rest, window)):
        found: dict[int, list[Translation]] = {}
        for group in _groups(checkpoint, texts, tokens, lambda n, first=before: cut(first + n + 1), counts):  # type: ignore[misc]
            translated = checkpoint.translations([texts[n] for n in group], options)
            found.update(zip(group, translated, strict=True))
            progress(len(group))
        before += len(texts)
        yield from (found.get(n, NOTHING) for n in range(len(texts)))


def _groups(
    checkpoint: Checkpoint, texts: Sequence[str], tokens: int, cut: Callable[[int], None], unknown: UnknownPieces
) -> Iterator[list[int]]:
    """Numbers of the lines that are not empty, by length, in groups that fill a batch."""
    numbers = [n for n, text in enumerate(texts) if text.strip()]
    if not numbers:
        return
    encoded = checkpoint.encode([texts[n] for n in numbers], side="source", limit=checkpoint.limit or 10**9)
    unknown.add("source", encoded)
    for number, each in zip(numbers, encoded, strict=True):
        if each.cut:
            cut(number)
    lengths = {number: len(each.ids) for number, each in zip(numbers, encoded, strict=True)}
    group: list[int] = []
    for number in sorted(numbers, key=lambda n: lengths[n]):
        if group and lengths[number] * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group
