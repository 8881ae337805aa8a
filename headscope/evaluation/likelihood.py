"""The likelihood of a corpus under a model: Σ -log p and correct predictions by sentence, under one head mask or many.

For classifiers it is the likelihood of the corpus's labels. For other models all predicted tokens count: for decoders
(teacher-forced) every token of the text and the end-of-sentence token, up to the length limit; for encoders every token
that is not special, each masked in turn (pseudo-log-likelihood, Salazar et al. 2020) or a random share of 15 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Array, GroupSums, Ratio
from headscope.data.batching import (
    DEFAULT_TOKENS,
    TRIAL_SENTENCES,
    BatchTrial,
    EncodedSentence,
    Long,
    Omissions,
    batches,
    collate,
    encode_window,
)
from headscope.data.corpus import Corpus
from headscope.data.encoded import IGNORED, Batch, groups
from headscope.distributed import ALONE, Processes, fetch, upload, widest
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.attention import precise
from headscope.model.prefix_cache import SharedLayers
from headscope.model.taps import masked

Hiding = Literal["each", "random"]
WINDOW = 128  # sentences in memory at a time: with each token hidden in turn a sentence has many rows
SHARE = 0.15  # of the tokens that is hidden at random
POSITIONS, CELLS = 512, 2**22  # most positions, and most logits, that are copied at a time: 16 MiB
LOGITS = 2**25  # most logits of a batch of default size: 128 MiB in single precision


@dataclass(frozen=True)
class LabelledBatch:
    """A batch, the label of each of its positions [b t], and the number of sentences that end in it.

    `shares` [b] is the share that each row is of its sentence.
    """

    batch: Batch
    labels: Tensor
    n_sentences: int
    shares: Array


@dataclass(frozen=True)
class LikelihoodOptions:
    """Positions per batch, subwords per sentence (`limit`, `long`), and which tokens are hidden from encoders."""

    tokens: int
    limit: int
    long: Long = "truncate"
    hiding: Hiding = "each"
    seed: int = 1


@dataclass
class CorpusSums:
    """Sums of one pass over a corpus: the number of `sentences`, the omissions, and whether it was completed."""

    omissions: Omissions = field(default_factory=Omissions)
    sentences: int = 0
    complete: bool = True

    def add(self, other: CorpusSums) -> None:
        """Add the sums of another process over the same text."""
        for name, theirs in vars(other).items():
            sums = getattr(self, name)
            if isinstance(sums, GroupSums):
                sums.merge(theirs)
            elif name == "complete":
                self.complete = sums and theirs
            elif name != "omissions":
                setattr(self, name, sums + theirs)


S = TypeVar("S", bound=CorpusSums)
B = TypeVar("B")


def read_corpus(
    sums: S,
    parts: Iterable[B],
    read: Callable[[B], None],
    size: Callable[[B], int],
    progress: Callable[[int], None],
    processes: Processes,
) -> S:
    """Read batches (`parts`) and return the sums of all processes, each of which reads its share.

    `read` adds a batch to `sums`, `size` is its number of sentences. A KeyboardInterrupt ends the pass; the sums then
    cover the batches before it and have `complete=False`.
    """
    try:
        with torch.inference_mode():
            for number, part in enumerate(parts):
                if processes.owns(number):
                    read(part)
                    sums.sentences += size(part)
                progress(size(part))
    except KeyboardInterrupt:
        sums.complete = False
    sums, *other_sums = processes.all(sums)
    for other in other_sums:
        sums.add(other)
    if not (sums.complete or sums.sentences):
        raise KeyboardInterrupt
    return sums


@dataclass
class Likelihood(CorpusSums):
    """Sums over a corpus: `nll` (Σ -log p) and `right` (correct predictions) by sentence and mask.

    `classes` has counts by sentence, mask and label of a classifier: right, predicted and true (see `token_sums`).
    `first` [sentence] is Σ -log p under the first mask, `counts` [sentence] the number of tokens, `shares` [sentence]
    the part of the sentence that was read, 1 for all of it.
    """

    nll: GroupSums = field(default_factory=GroupSums)
    right: GroupSums = field(default_factory=GroupSums)
    classes: GroupSums = field(default_factory=GroupSums)
    first: Array = field(default_factory=lambda: np.zeros(0))
    counts: Array = field(default_factory=lambda: np.zeros(0))
    shares: Array = field(default_factory=lambda: np.zeros(0))


def likelihood(
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: LikelihoodOptions,
    *,
    masks: Sequence[Sequence[HeadId]] = ((),),
    progress: Callable[[int], None] = lambda sentences: None,
    processes: Processes = ALONE,
) -> Likelihood:
    """Score a corpus in one pass for all masks; computations that masks share run once a batch.

    See `read_corpus` for several `processes` and for interruptions.
    """
    first, counts, shares = np.zeros((3, corpus.count))
    layers = SharedLayers.of(checkpoint.model) if len(masks) > 1 else None
    sums = Likelihood(first=first, counts=counts, shares=shares)

    def read(part: LabelledBatch) -> None:
        indices = part.batch.indices
        nll, right, count, classes = score_under_masks(checkpoint, part, masks, layers)
        sums.nll.add(indices, Ratio(nll, count[:, None]))
        sums.right.add(indices, Ratio(right, count[:, None]))
        if checkpoint.label_names:
            sums.classes.add(indices, Ratio(classes, count[:, None]))
        for total, values in ((first, nll[:, 0].numpy()), (counts, count.numpy()), (shares, part.shares)):
            np.add.at(total, indices.numpy(), values)

    parts = labelled_batches(checkpoint, corpus, options, sums.omissions)
    return read_corpus(sums, parts, read, lambda part: part.n_sentences, progress, processes)


def default_positions(checkpoint: Checkpoint, *, backward: bool = False) -> int:
    """The default number of positions of a batch: 2,048, or fewer for a vocabulary of more than 16,384 words.

    With a `backward` pass fewer for more than half as many words.
    """
    words = max(checkpoint.vocabularies) if checkpoint.predicts == "words" else 1
    return max(1, min(DEFAULT_TOKENS, LOGITS // words // (1 + backward)))


def make_trial(checkpoint: Checkpoint, corpus: Corpus, options: LikelihoodOptions) -> BatchTrial | None:
    """The trial for `automatic_tokens`: passes over the longest of the first sentences."""
    device = checkpoint.device
    probes = batches(corpus.first(TRIAL_SENTENCES), checkpoint, tokens=options.tokens, limit=options.limit)
    longest = max(probes, key=lambda batch: batch.longest, default=None)

    def run(batch: Batch) -> None:
        with torch.inference_mode():
            on_device = batch.to(device)
            if checkpoint.predicts == "nothing":
                checkpoint.states(on_device)
            else:
                checkpoint.logits(on_device, checkpoint.memory(on_device))

    return None if longest is None else BatchTrial.of(longest, run)


def score_under_masks(
    checkpoint: Checkpoint, part: LabelledBatch, masks: Sequence[Sequence[HeadId]], layers: SharedLayers | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ -log p and hits [b mask], counts [b], and the counts of labels [b mask label 3], under each mask.

    The encoder runs again only if its own heads are masked; layers below the masked heads do not run again.
    """
    batch, labels = part.batch.to(checkpoint.device), part.labels
    columns, names = [], len(checkpoint.label_names)
    if layers is not None:
        layers.outputs.clear()

    def pass_below(heads: Sequence[HeadId]) -> AbstractContextManager[None]:
        return nullcontext() if layers is None else layers.passing(0, {(head.site, head.layer) for head in heads})

    with pass_below(()):
        shared_memory: Any = checkpoint.memory(batch)
    for heads in masks:
        with masked(checkpoint.model, heads), pass_below(heads):
            of_encoder = any(head.site is Site.ENCODER_SELF for head in heads)
            memory = checkpoint.memory(batch) if of_encoder else shared_memory
            logits = checkpoint.logits(batch, memory)
            columns.append(token_sums(logits, labels, names))
    sums = fetch([torch.stack(parts, dim=1) for parts in zip(*columns, strict=True)])  # the host waits once a batch
    nll, right, count, classes = (part.double() for part in sums)
    return nll, right, count[:, 0], classes


def token_sums(logits: Tensor, labels: Tensor, names: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ -log p of labels [b t], the number of correct predictions and the number of labels: [b] each, in float64.

    And the counts [b name 3] of `names` class labels: right, predicted and true. Results are on the device of the
    logits, in its widest type. Labels are best on the CPU, so that finding their positions does not wait for a device.
    """
    device = logits.device
    sums = torch.zeros(3, len(labels), dtype=widest(device), device=device)
    classes = sums.new_zeros(len(labels), names, 3)
    rows = max(1, min(POSITIONS, CELLS // logits.shape[-1]))
    for part in torch.split((labels != IGNORED).nonzero(), rows):
        target = upload(labels[part[:, 0], part[:, 1]], device)  # [n]
        row, position = upload(part, device).unbind(dim=1)
        scores = precise(logits[row, position])  # [n V]
        nll = scores.logsumexp(dim=-1) - scores.gather(1, target[:, None])[:, 0]
        prediction = scores.argmax(dim=-1)
        right = (prediction == target).to(sums.dtype)
        one = torch.ones_like(right)
        sums.index_add_(1, row, torch.stack([nll.to(sums.dtype), right, one]))
        class_counts = ((target, right), (prediction, one), (target, one)) if names else ()
        for column, (class_ids, values) in enumerate(class_counts):
            classes[..., column].index_put_((row, class_ids), values, accumulate=True)
    return sums[0], sums[1], sums[2], classes


def hides_tokens(checkpoint: Checkpoint) -> bool:
    """Whether the model predicts hidden tokens: an encoder alone with a language-model head."""
    sites = {attention_site.site for attention_site in checkpoint.attention_sites.order}
    return checkpoint.predicts == "words" and not checkpoint.two_sided and Site.ENCODER_SELF in sites


def labelled_batches(
    checkpoint: Checkpoint, corpus: Corpus, options: LikelihoodOptions, omissions: Omissions
) -> Iterator[LabelledBatch]:
    """The corpus in batches of at most `options.tokens` positions a side, sorted by length within windows."""
    if hides_tokens(checkpoint) and not checkpoint.label_names:
        yield from _batches_with_hidden_tokens(checkpoint, corpus, options, omissions)
        return
    reading: dict[str, Any] = {"tokens": options.tokens, "limit": options.limit, "long": options.long}
    for batch in batches(corpus, checkpoint, **reading, omissions=omissions, labels=True, folds=1):
        assert batch.labels is not None
        size = len(batch.indices)
        yield LabelledBatch(replace(batch, labels=None), batch.labels, size, np.ones(size))


def _batches_with_hidden_tokens(
    checkpoint: Checkpoint, corpus: Corpus, options: LikelihoodOptions, omissions: Omissions
) -> Iterator[LabelledBatch]:
    """Batches of an encoder: each token of a sentence hidden in a row of its own, or a random share in one row."""
    mask, sentences, limit = checkpoint.mask_id(), iter(corpus), options.limit
    while window := list(islice(sentences, WINDOW)):
        # each row with its share of the sentence, and whether it is the sentence's last
        rows: list[tuple[EncodedSentence, float, bool]] = []
        for entry in encode_window(
            window, checkpoint, limit=limit, long=options.long, name=corpus.name, omissions=omissions
        ):
            hideable = [position for position, special in enumerate(entry.source.special) if not special]
            hidden_sets = [[position] for position in hideable] or [[]]
            if options.hiding == "random":
                hidden_sets = [choose_hidden(hideable, entry.sentence.number, seed=options.seed)]
            for hidden in hidden_sets:
                ids = [mask if position in hidden else id_ for position, id_ in enumerate(entry.source.ids)]
                labels = [id_ if position in hidden else IGNORED for position, id_ in enumerate(entry.source.ids)]
                row = entry._replace(source=entry.source._replace(ids=ids), labels=labels)
                rows.append((row, 1 / len(hidden_sets), hidden is hidden_sets[-1]))
        rows.sort(key=lambda row: row[0].length())
        for group in groups(rows, lambda row: row[0].length(), options.tokens):
            entries, shares, is_last = zip(*group, strict=True)
            batch = collate([*entries], 0, checkpoint, omissions)
            assert batch.labels is not None
            yield LabelledBatch(replace(batch, labels=None), batch.labels, sum(is_last), np.array(shares))


def choose_hidden(positions: Sequence[int], number: int, *, seed: int) -> list[int]:
    """15 % of `positions` of sentence `number`, at least one of them (Devlin et al. 2019, §3.1)."""
    order = np.random.default_rng([seed, number]).permutation(np.asarray(positions, dtype=int))
    return order[: max(1, round(SHARE * len(positions)))].tolist()
