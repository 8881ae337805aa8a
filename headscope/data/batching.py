"""A corpus in batches, cut from windows of sentences sorted by length, each within one fold (number mod 8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from headscope.bootstrap import FOLDS
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import (
    IGNORED,
    SIDE_NAMES,
    UNCUT,
    Batch,
    Contrasts,
    Encoded,
    Encoder,
    SideName,
    UnknownSubwords,
    encode_side,
    groups,
    pad_rows,
    pad_side,
)
from headscope.data.labels import label_row
from headscope.data.parses import Aligned, align
from headscope.data.template import target_labels
from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError, DataError, flag

T = TypeVar("T")


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items in the same order; a thread makes the next one while the caller uses the last."""
    end, context = object(), copy_context()

    def next_item() -> Any:
        return context.run(next, items, end)

    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(next_item)
        while (item := future.result()) is not end:
            future = pool.submit(next_item)
            yield item


DEFAULT_LIMIT = 512  # subwords of a sentence
DEFAULT_TOKENS = 2048  # positions of a batch
WINDOW = 4096  # sentences that are sorted by length

Long = Literal["truncate", "refuse"]


@dataclass(frozen=True)
class BatchingOptions:
    """Token positions per batch, the longest sentence in subwords, and whether longer ones are cut or refused."""

    tokens: int = DEFAULT_TOKENS
    limit: int | None = None
    long: Long = "truncate"


def sentence_limit(checkpoint: Any, max_length: int | None = None) -> int:
    """The limit of a sentence in subwords; ConfigError where `--max-length` exceeds the positions of the model."""
    if max_length is not None and checkpoint.limit is not None and max_length > checkpoint.limit:
        raise ConfigError(f"{flag.max_length} {max_length} is more than the {checkpoint.limit} positions of the model")
    return max_length or min(DEFAULT_LIMIT, checkpoint.default_length or DEFAULT_LIMIT)


@dataclass
class Omissions:
    """Counts of sentences that were truncated or could not be aligned, and of unknown subwords.

    `misalignments` counts sentences by the reason why they do not align with their parse, `n_fused` relations that lie
    within a word unit.
    """

    n_truncated: int = 0
    misalignments: Counter[str] = field(default_factory=Counter)
    n_fused: int = 0
    unknown: UnknownSubwords = field(default_factory=UnknownSubwords)

    def to_json(self) -> dict[str, Any]:
        """The counts as run.json names them."""
        return {
            "truncated": self.n_truncated,
            "unknown_pieces": self.unknown.to_json(),
            "unaligned": dict(self.misalignments),
            "relations_within_a_word": self.n_fused,
        }


def batches(
    corpus: Corpus,
    encoder: Encoder,
    *,
    tokens: int,
    limit: int,
    long: Long = "truncate",
    omissions: Omissions | None = None,
    labels: bool = False,
    folds: int = FOLDS,
) -> Iterator[Batch]:
    """Batches of at most `tokens` positions a side, padding included; at least one sentence each.

    Sentences of more than `limit` subwords are cut and counted in `omissions`, or refused (`long`); prompts are always
    refused. With `labels` batches have the ids that a decoder should predict, or the corpus's own labels.
    """
    sentences, omissions = iter(corpus), omissions or Omissions()
    while window := list(islice(sentences, WINDOW)):
        encode = _encode_prompts if corpus.has_contrast else encode_window
        encodings = encode(window, encoder, limit=limit, long=long, name=corpus.name, omissions=omissions)
        if labels:
            encodings = add_labels(encodings, encoder, limit)
        for fold in range(folds):
            in_fold = sorted((e for e in encodings if e.sentence.number % folds == fold), key=EncodedSentence.length)
            for group in groups(in_fold, EncodedSentence.length, tokens):
                yield collate(group, fold, encoder, omissions)


class EncodedSentence(NamedTuple):
    """A sentence with its encoded sides, and the labels that the model should predict."""

    sentence: Sentence
    source: Encoded
    target: Encoded | None = None
    labels: list[int] | None = None
    corrupt: Encoded | None = None

    def length(self) -> int:
        """Positions in a batch."""
        return max(len(self.source.ids), len(self.target.ids) if self.target else 0)


def encode_window(
    window: list[Sentence], encoder: Encoder, *, limit: int, long: Long, name: str, omissions: Omissions
) -> list[EncodedSentence]:
    """Encode the sentences of a text `name`, cut or refuse too long ones, and count cut lines and unknown subwords."""
    sides: list[Sequence[Encoded]] = []
    for side in SIDE_NAMES if window[0].target is not None else SIDE_NAMES[:1]:
        sides.append(encode_side(window, encoder, side, limit=limit))
        omissions.unknown.add(side, sides[-1])
    ready = [EncodedSentence(sentence, *encodings) for sentence, *encodings in zip(window, *sides, strict=True)]
    for entry in ready:
        cut = max(entry.source.cut, entry.target.cut if entry.target else 0)
        if cut and long == "refuse":
            location = name if entry.source.cut else f"the target of {name}"
            raise DataError(
                f"{location}:{entry.sentence.number + 1}: {limit + cut} subwords, the limit is {limit}; shorten the "
                f"line, raise {flag.max_length}, or take {flag('long', 'truncate')}"
            )
        omissions.n_truncated += bool(cut)
    return ready


def _encode_prompts(
    window: list[Sentence], encoder: Encoder, *, limit: int, long: Long, name: str, omissions: Omissions
) -> list[EncodedSentence]:
    """Encode prompts and their corrupt versions; a decoder beside an encoder has read its text up to the answer."""
    ready = encode_window(window, encoder, limit=UNCUT, long=long, name=name, omissions=omissions)
    texts = [sentence.contrast.corrupt for sentence in window if sentence.contrast is not None]
    prompts = []
    for entry, corrupt in zip(ready, encoder.encode(texts, side="source", limit=UNCUT), strict=True):
        contrast = entry.sentence.contrast
        assert contrast is not None
        target = None if entry.target is None else entry.target.first(contrast.position + 1)
        sides = entry.source.first(contrast.length), target
        longest = max(len(side.ids) for side in sides if side is not None)
        if longest > limit:
            raise DataError(
                f"{name}:{entry.sentence.number + 1}: {longest} subwords, the limit is {limit}, and prompts are not "
                f"cut; shorten the line or raise {flag.max_length}"
            )
        prompts.append(EncodedSentence(entry.sentence, *sides, corrupt=corrupt.first(contrast.length)))
    return prompts


def add_labels(ready: list[EncodedSentence], encoder: Encoder, limit: int) -> list[EncodedSentence]:
    """Add the ids that a decoder should predict after each of its inputs, or the labels of the corpus."""
    if ready[0].sentence.labels is not None:
        return [entry._replace(labels=label_row(entry.sentence, entry.source, encoder)) for entry in ready]
    texts = [entry.sentence.source if entry.target is None else entry.sentence.target or "" for entry in ready]
    rows = encoder.labels(texts, limit=limit if ready[0].corrupt is None else UNCUT)
    return [entry._replace(labels=_labels_of(entry, row, encoder)) for entry, row in zip(ready, rows, strict=True)]


def _labels_of(entry: EncodedSentence, row: list[int], encoder: Encoder) -> list[int]:
    """The labels of one sentence: all ids of the text; of a prompt those up to the answer; of a template its target."""
    sentence = entry.sentence
    if sentence.contrast is not None:
        row = [*row[: sentence.contrast.position], sentence.contrast.answer]
    if sentence.pair is not None:
        spans = encoder.spans(sentence.source, entry.source.ids, side="source")
        row = target_labels(sentence.pair, spans, row)
    return row


def collate(group: list[EncodedSentence], fold: int, encoder: Encoder, omissions: Omissions) -> Batch:
    """Pad and stack encoded sentences to a batch."""
    sources = [entry.source for entry in group]
    targets = [entry.target for entry in group if entry.target] or encoder.decoder_inputs(sources)
    labels = [entry.labels for entry in group if entry.labels is not None]
    return Batch(
        indices=torch.tensor([entry.sentence.number for entry in group]),
        fold=fold,
        source=pad_side(sources, tuple(_align(group, "source", encoder, omissions))),
        target=pad_side(targets, tuple(_align(group, "target", encoder, omissions))) if targets else None,
        labels=pad_rows(labels, IGNORED) if labels else None,
        contrasts=_contrasts(group),
        sentences=tuple(entry.sentence for entry in group),
    )


def _contrasts(group: list[EncodedSentence]) -> Contrasts | None:
    corrupt = [entry.corrupt for entry in group if entry.corrupt is not None]
    contrasts = [entry.sentence.contrast for entry in group if entry.sentence.contrast is not None]
    if not corrupt:
        return None
    rows = [(c.position, c.answer, IGNORED if c.wrong is None else c.wrong, c.longer) for c in contrasts]
    positions, answers, wrong, longer = torch.tensor(rows).unbind(dim=1)
    return Contrasts(pad_side(corrupt), positions, answers, wrong, longer.bool())


def _align(
    group: list[EncodedSentence], side: SideName, encoder: Encoder, omissions: Omissions
) -> Iterator[Aligned | None]:
    """The word units of every parsed sentence; None for one that does not align, whose reason is counted."""
    for entry in group:
        parse = entry.sentence.parse if side == "source" else entry.sentence.target_parse
        encoding = entry.source if side == "source" else entry.target
        if parse is None or encoding is None:
            continue
        spans = encoder.spans(parse.text, encoding.ids, side=side)
        aligned = "pieces cannot be located in the text" if spans is None else align(parse, spans)
        if encoding.cut:
            aligned = "cut off at the length limit"
        if isinstance(aligned, str):
            omissions.misalignments[aligned] += 1
        else:
            omissions.n_fused += aligned.n_fused
        yield None if isinstance(aligned, str) else aligned


TRIAL_SENTENCES = 512  # a trial takes the longest of so many sentences
MAX_TOKENS = 2**17  # positions beyond which a larger batch is not faster
SHARE = 0.6  # of the free memory that batches may take; later texts may need more than those of the trial
MEMORY = ("mem_get_info", "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")
"""The functions of torch's module of a device, such as torch.cuda, that measure memory."""


@dataclass(frozen=True)
class BatchTrial:
    """Trial work: `run(n)` runs a batch of `positions`, repeated n times; its longest sentence has `longest`."""

    run: Callable[[int], object]
    positions: int
    longest: int

    @classmethod
    def of(cls, batch: Batch, run: Callable[[Batch], object]) -> BatchTrial:
        """The trial that runs a batch whose rows are repeated."""
        numbers = torch.arange(len(batch.indices))
        return cls(lambda times: run(batch.rows(numbers.repeat(times))), batch.positions, batch.longest)


def automatic_tokens(
    device: torch.device,
    trial: Callable[[], BatchTrial | None],
    *,
    limit: int,
    default: int = DEFAULT_TOKENS,
    processes: Processes = ALONE,
) -> tuple[int, str]:
    """The number of positions of a batch, measured by a trial on an accelerator, and remarks; `default` on a CPU.

    Several processes take the number that the smallest device allows.
    """
    if device.type == "cpu":
        return default, ""
    memory = getattr(torch, device.type, None)
    if not all(hasattr(memory, name) for name in MEMORY):
        return default, (
            f"{flag.batch_tokens} auto: {device.type} does not say how much memory is free, so batches have "
            f"{default:,} positions; give a number where more fit"
        )
    batch_trial = trial()
    tokens = default if batch_trial is None else fitting_tokens(batch_trial, memory, device, limit=limit)
    return min(processes.all(tokens)), ""


def fitting_tokens(trial: BatchTrial, memory: Any, device: torch.device, *, limit: int) -> int:
    """The positions of a batch that fit in memory, a multiple of 2,048; sentences have at most `limit` subwords."""

    def peak(times: int) -> int:
        """The peak bytes of tensors beyond those allocated before."""
        before: int = memory.memory_allocated(device)
        memory.reset_peak_memory_stats(device)
        trial.run(times)
        return int(memory.max_memory_allocated(device)) - before

    try:
        trial.run(1)  # allocates what is made once and stays
        single, double = peak(1), peak(2)
    except torch.OutOfMemoryError:
        return DEFAULT_TOKENS
    bytes_per_position = max(1.0, (double - single) / trial.positions)
    fixed = max(0.0, single - bytes_per_position * trial.positions)
    free_bytes = memory.mem_get_info(device)[0] + memory.memory_reserved(device) - memory.memory_allocated(device)
    fitting = (SHARE * free_bytes - fixed) / (bytes_per_position * max(1.0, limit / trial.longest))
    return max(DEFAULT_TOKENS, min(int(fitting), MAX_TOKENS) // DEFAULT_TOKENS * DEFAULT_TOKENS)
