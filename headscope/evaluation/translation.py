"""Translation of a stream of lines, and the mode in which translations are compared with references.

Lines are translated in batches of limited tokens, within windows of lines, and stay in order. Texts are compared
detokenised, split into words by sacreBLEU, or already tokenised. BLEU counts words, so its tokenizer must know where
words end in the language: `13a` takes a Chinese sentence for one word, so that one wrong character gives a score of 0.
chrF counts characters and needs no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from headscope.config.commands import TranslateOptions, Translation
from headscope.data.batching import DEFAULT_TOKENS, BatchTrial, automatic_tokens
from headscope.data.encoded import Encoded, NothingReadError, UnknownSubwords, groups
from headscope.distributed import ALONE, Processes
from headscope.errors import CheckpointError, ConfigError, flag, reason_of
from headscope.files.reading import is_empty
from headscope.formats.base import Checkpoint

Mode = Literal["raw", "tokenised-lowercase"]
DEFAULT, BY_SPACES = "13a", ("13a", "intl", "none")
TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "wuu", "lzh"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"), "char"),
}
"""BLEU's tokenizer by language code, where `13a` is wrong: sacreBLEU's own choice, or characters if it has none."""


@dataclass(frozen=True)
class TextMode:
    """BLEU's tokenizer, and whether texts are compared `raw`: detokenised and with their case."""

    tokenize: str = DEFAULT
    raw: bool = True


RAW, TOKENISED = TextMode(), TextMode("none", raw=False)


def text_mode(checkpoint: Checkpoint, name: Mode = "raw", tokenize: str | None = None) -> tuple[TextMode, list[str]]:
    """The mode of comparison for the language that a checkpoint writes, and remarks on it.

    ConfigError for a `tokenize` that has no effect, or that sacreBLEU cannot load.
    """
    if name != "raw":
        if tokenize is not None:
            raise ConfigError(f"{flag.bleu_tokenize} is for detokenised text ({flag('text', 'raw')}); leave it out")
        return TOKENISED, []
    if tokenize is not None:
        if why := _why_missing(tokenize):
            raise ConfigError(f"{flag('bleu_tokenize', tokenize)}: {why}")
        return TextMode(tokenize), []
    language = re.split(r"[_-]", (checkpoint.writes or "").strip("<>|_").lower())[0]
    tokenizer = TOKENIZERS.get(language, DEFAULT)
    if (why := _why_missing(tokenizer)) is None:
        return TextMode(tokenizer), []
    return TextMode("char"), [
        f"BLEU counts characters (tok:char), and published numbers may count words (tok:{tokenizer}): {why}"
    ]


def _why_missing(tokenize: str) -> str | None:
    from sacrebleu.metrics.bleu import BLEU

    try:
        BLEU(tokenize=tokenize)
    except (RuntimeError, ImportError) as error:  # says what to install
        return reason_of(error)
    except OSError as error:
        return f"sacreBLEU fetches its model from the internet, and could not ({reason_of(error)})"
    return None


def text_remarks(references: Sequence[str], mode: TextMode) -> list[str]:
    """Remarks where references are not split into words as the mode assumes."""
    texts = [text.strip() for text in references if text.strip()]
    n_spaced = sum(text.endswith((" .", " ?", " !")) for text in texts)
    if mode.raw and n_spaced > len(texts) / 2:
        return [
            "the references look tokenised, so raw BLEU and chrF cannot be compared with published ones; give "
            f"detokenised text, or {flag('text', 'tokenised-lowercase')}"
        ]
    if mode.tokenize in BY_SPACES and sum(" " not in text for text in texts) > len(texts) / 2:
        return [
            f"most references have no spaces, and BLEU (tok:{mode.tokenize}) takes each for one word; give "
            f"{flag('bleu_tokenize', 'zh')}, ja-mecab, ko-mecab or char, or read chrF"
        ]
    return []


WINDOW = 512  # lines that are read at a time
LOGITS = 1 << 30  # bytes of the logits of all hypotheses in one step of a search
NOTHING = [Translation("", 0.0)]


def shared_lines(lines: Iterable[str], processes: Processes, *, window: int) -> Iterator[str]:
    """The lines that the first process reads, sent to every process a window at a time."""
    reading = iter(lines)
    while texts := processes.on_main(lambda: list(islice(reading, window))):
        yield from texts


def translate_lines(
    checkpoint: Checkpoint,
    lines: Iterable[str],
    *,
    options: TranslateOptions,
    tokens: int | None,
    window: int = WINDOW,
    unknown: UnknownSubwords | None = None,
    progress: Callable[[int], None] = lambda sentences: None,
    processes: Processes = ALONE,
) -> Iterator[list[Translation]]:
    """The translations of each line, best first, in the order of the lines; an empty line stays empty.

    A batch has at most `tokens` source positions, padding included, and no more hypotheses than fit `LOGITS` bytes;
    None: as many as an accelerator's memory allows, by a trial of the longest of the first lines. `unknown` counts
    subwords, and lines cut to `checkpoint.source_length`. Several `processes`, all given the same lines, share the
    batches of a window, and each gets every translation.
    CheckpointError for a model that cannot translate.
    """
    if not checkpoint.two_sided:
        raise CheckpointError(
            f"{checkpoint.path} ({checkpoint.model_type}) has no encoder with a decoder, so it cannot translate"
        )
    facts = checkpoint.search_facts(options)  # raises before any text is read
    limit = checkpoint.source_length(options.max_length)
    max_lines = max(1, LOGITS // (4 * checkpoint.vocabularies[1] * int(facts["beam"])))
    remaining = iter(lines)
    before = 0
    counts = UnknownSubwords() if unknown is None else unknown
    while texts := list(islice(remaining, window)):
        translations: dict[int, list[Translation]] = {}
        numbers = [n for n, text in enumerate(texts) if not is_empty(text)]
        encodings: dict[int, Encoded] = {}
        while numbers and not encodings:
            try:
                lines_read = checkpoint.encode([texts[n] for n in numbers], side="source", limit=limit)
                encodings = dict(zip(numbers, lines_read, strict=True))
            except NothingReadError as error:
                counts.nothing.append(before + numbers.pop(error.index) + 1)
        counts.add("source", list(encodings.values()))
        counts.cut += [before + number + 1 for number, line in encodings.items() if line.cut]
        by_length = sorted(encodings.items(), key=lambda entry: len(entry[1].ids))
        lengths = {number: len(line.ids) for number, line in by_length}
        if tokens is None:
            tokens = _choose_tokens(checkpoint, texts, lengths, options, max_lines, processes)
        for turn, group in enumerate(groups(lengths, lengths.__getitem__, tokens, max_items=max_lines)):
            if processes.owns(turn):
                hypotheses = checkpoint.translations([texts[n] for n in group], options)
                translations.update(zip(group, hypotheses, strict=True))
            progress(len(group))
        translations = {number: best for part in processes.all(translations) for number, best in part.items()}
        before += len(texts)
        yield from (translations.get(n, NOTHING) for n in range(len(texts)))


def _choose_tokens(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    lengths: Mapping[int, int],
    options: TranslateOptions,
    max_lines: int,
    processes: Processes,
) -> int:
    """The positions of a batch that the memory allows, by a trial of the batch of the longest lines."""
    *_, longest = [[], *groups(lengths, lengths.__getitem__, DEFAULT_TOKENS, max_items=max_lines)]
    size = max((lengths[number] for number in longest), default=1)
    lines = [texts[number] for number in longest]
    trial = BatchTrial(lambda times: checkpoint.translations(lines * times, options), size * len(lines), size)
    limit = checkpoint.source_length(options.max_length)
    tokens, _ = automatic_tokens(checkpoint.device, lambda: trial if lines else None, limit=limit, processes=processes)
    return tokens
