"""How likely a model finds a corpus: Σ -log p and hits of every sentence, under one mask of heads or many.

Counted are all tokens that the model says after its inputs: for decoders (teacher-forced) every token of the
text and the one that closes it, except what a length limit cuts off; for encoders every token that is no
special one, each hidden in turn (pseudo-log-likelihood, Salazar et al. 2020) or in a random share of 15 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headscope.bootstrap import Array, GroupSums, Ratio
from headscope.data.batching import Long, Omissions
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import Batch, Encoded, side
from headscope.errors import DataError
from headscope.formats.base import IGNORED, Checkpoint
from headscope.heads import HeadId, Site
from headscope.model.gating import masked
from headscope.model.native.partial_forward import PartialForward
from headscope.model.native.transformer import Transformer
from headscope.model.threads import threads_for_pass

Hiding = Literal["each", "random"]
WINDOW = {"text": 2048, "hidden": 128}  # sentences held at a time; hiding each token makes many rows of one
SHARE = 0.15
PART = 512  # positions whose logits are copied at a time


class LabelledSentence(NamedTuple):
    """What goes through the model for (a part of) one sentence; `last` closes the sentence."""

    number: int
    source: Encoded
    target: Encoded | None
    labels: list[int]
    last: bool = True

    def length(self) -> int:
        """Positions that it takes in a batch."""
        return max(len(self.source.ids), len(self.target.ids) if self.target else 0)


@dataclass(frozen=True)
class Labelled:
    """A batch, and what must be predicted at each of its positions [b t]; `done` sentences end with it."""

    batch: Batch
    labels: Tensor
    done: int


@dataclass(frozen=True)
class LikelihoodOptions:
    """How a corpus is read: positions a batch, pieces a sentence, and what encoders hide."""

    tokens: int
    limit: int
    long: Long = "truncate"
    hiding: Hiding = "each"
    seed: int = 1


@dataclass
class Likelihood:
    """Sums over a corpus; `nll` and `right` have a cell for every mask, `count` and `first` are of sentences.

    `first` [sentence] is Σ -log p under the first mask, `counts` [sentence] its number of tokens.
    """

    nll: GroupSums = field(default_factory=GroupSums)
    right: GroupSums = field(default_factory=GroupSums)
    first: Array = field(default_factory=lambda: np.zeros(0))
    counts: Array = field(default_factory=lambda: np.zeros(0))
    losses: Omissions = field(default_factory=Omissions)
    sentences: int = 0
    complete: bool = True


def likelihood(
    checkpoint: Checkpoint,
    corpus: Corpus,
    reading: LikelihoodOptions,
    *,
    masks: Sequence[Sequence[HeadId]] = ((),),
    progress: Callable[[int], None] = lambda sentences: None,
) -> Likelihood:
    """Run the corpus once for all masks; what they have in common is computed once per batch.

    A KeyboardInterrupt ends the pass; the sums then cover what was done and say `complete=False`.
    """
    found = Likelihood(first=np.zeros(corpus.count), counts=np.zeros(corpus.count))
    try:
        with torch.inference_mode():
            for each in labelled(checkpoint, corpus, reading, found.losses):
                with threads_for_pass(checkpoint.model, each.batch.positions):
                    nll, right, count = _under_masks(checkpoint, each, masks)
                found.nll.add(each.batch.indices, Ratio(nll, count[:, None]))
                found.right.add(each.batch.indices, Ratio(right, count[:, None]))
                np.add.at(found.first, each.batch.indices.numpy(), nll[:, 0].numpy())
                np.add.at(found.counts, each.batch.indices.numpy(), count.numpy())
                found.sentences += each.done
                progress(each.done)
    except KeyboardInterrupt:
        if not found.sentences:
            raise
        found.complete = False
    return found


def _under_masks(
    checkpoint: Checkpoint, each: Labelled, masks: Sequence[Sequence[HeadId]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ -log p and hits [b mask], and counts [b].

    The encoder runs again only where its own heads are masked; layers below the masked heads do not run again.
    """
    batch, labels = each.batch.to(checkpoint.device), each.labels.to(checkpoint.device)
    columns = []
    reuse = PartialForward()
    with reuse.recorded():
        shared: Any = checkpoint.memory(batch)
        plain = token_sums(checkpoint.logits(batch, shared), labels) if () in map(tuple, masks) else None
    for heads in masks:
        if not heads and plain is not None:
            columns.append(plain)
            continue
        with masked(checkpoint.model, heads), reuse.starting(_first_layers(checkpoint.model, heads)):
            of_encoder = any(head.site is Site.ENCODER_SELF for head in heads)
            memory = checkpoint.memory(batch) if of_encoder else shared
            columns.append(token_sums(checkpoint.logits(batch, memory), labels))
    nll, right, count = (torch.stack(parts, dim=1) for parts in zip(*columns, strict=True))
    return nll, right, count[:, 0]


def _first_layers(model: nn.Module, heads: Sequence[HeadId]) -> dict[nn.Module, int]:
    """The stack of a native model that masks change first, and its lowest layer that they change."""
    if not isinstance(model, Transformer):
        return {}
    of_encoder = [head.layer for head in heads if head.site is Site.ENCODER_SELF]
    if of_encoder and model.encoder is not None:
        return {model.encoder: min(of_encoder)}
    return {model.decoder: min(head.layer for head in heads)} if heads else {}


def token_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ -log p of labels, how often they are the likeliest, and how many there are: [b] each, in float64."""
    sums = torch.zeros(3, len(labels), dtype=torch.float64)
    for part in torch.split((labels != IGNORED).nonzero(), PART):
        row, place = part.unbind(dim=1)
        scores, wanted = logits[row, place], labels[row, place]  # [n V], [n]
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        nll = scores.logsumexp(dim=-1) - scores.gather(1, wanted[:, None])[:, 0]
        right = scores.argmax(dim=-1) == wanted
        for total, values in zip(sums, (nll, right, torch.ones_like(right)), strict=True):
            total.index_add_(0, row.cpu(), values.cpu().double())
    return sums[0], sums[1], sums[2]


def labelled(
    checkpoint: Checkpoint, corpus: Corpus, reading: LikelihoodOptions, losses: Omissions
) -> Iterator[Labelled]:
    """The corpus in batches of at most `reading.tokens` positions a side, sorted by length within windows."""
    hides = not checkpoint.two_sided and any(
        place.site is Site.ENCODER_SELF for place in checkpoint.attention_sites.order
    )
    sentences = iter(corpus)
    while window := list(islice(sentences, WINDOW["hidden" if hides else "text"])):
        rows = (_hidden if hides else _texts)(checkpoint, window, reading, losses)
        _count_cut(rows, corpus, reading, losses)
        group: list[LabelledSentence] = []
        for row in sorted(rows, key=LabelledSentence.length):
            if group and row.length() * (len(group) + 1) > reading.tokens:
                yield _collate(group)
                group = []
            group.append(row)
        yield _collate(group)


def _texts(
    checkpoint: Checkpoint, window: list[Sentence], reading: LikelihoodOptions, losses: Omissions
) -> list[LabelledSentence]:
    said = [sentence.source if sentence.target is None else sentence.target for sentence in window]
    sources = checkpoint.encode([each.source for each in window], side="source", limit=reading.limit)
    losses.unknown.add("source", sources)
    targets: Sequence[Encoded | None] = [None] * len(window)
    if checkpoint.two_sided:
        translations = checkpoint.encode(said, side="target", limit=reading.limit)
        losses.unknown.add("target", translations)
        targets = translations
    labels = checkpoint.labels(said, limit=reading.limit)
    columns = zip(window, sources, targets, labels, strict=True)
    return [LabelledSentence(sentence.number, source, target, wanted) for sentence, source, target, wanted in columns]


def _hidden(
    checkpoint: Checkpoint, window: list[Sentence], reading: LikelihoodOptions, losses: Omissions
) -> list[LabelledSentence]:
    """Sentences with one token hidden in each row, or one row each with a random share of its tokens hidden."""
    mask = checkpoint.mask_id()
    rows: list[LabelledSentence] = []
    encoded = checkpoint.encode([each.source for each in window], side="source", limit=reading.limit)
    losses.unknown.add("source", encoded)
    for sentence, source in zip(window, encoded, strict=True):
        plain = [place for place, special in enumerate(source.special) if not special]
        groups = [[place] for place in plain] or [[]]
        if reading.hiding == "random":
            groups = [hidden_at_random(plain, sentence.number, seed=reading.seed)]
        for hidden in groups:
            ids = [mask if place in hidden else own for place, own in enumerate(source.ids)]
            labels = [own if place in hidden else IGNORED for place, own in enumerate(source.ids)]
            rows.append(LabelledSentence(sentence.number, source._replace(ids=ids), None, labels, hidden is groups[-1]))
    return rows


def hidden_at_random(plain: Sequence[int], number: int, *, seed: int) -> list[int]:
    """15 % of the positions `plain` of sentence `number`, at least one of them (Devlin et al. 2019, §3.1)."""
    chance = np.random.default_rng([seed, number])
    found: list[int] = chance.permutation(np.asarray(plain, dtype=int))[: max(1, round(SHARE * len(plain)))].tolist()
    return found


def _count_cut(rows: list[LabelledSentence], corpus: Corpus, reading: LikelihoodOptions, losses: Omissions) -> None:
    for row in rows:
        cut = max(row.source.cut, row.target.cut if row.target else 0)
        if cut and reading.long == "refuse":
            where = corpus.name if row.source.cut else f"the target of {corpus.name}"
            raise DataError(
                f"{where}:{row.number + 1}: {reading.limit + cut} pieces, the limit is {reading.limit}; "
                "shorten the line, raise --max-length, or take --long truncate"
            )
        losses.truncated += bool(cut) and row.last


def _collate(group: list[LabelledSentence]) -> Labelled:
    targets = [row.target for row in group if row.target is not None]
    longest = max(len(row.labels) for row in group)
    batch = Batch(
        indices=torch.tensor([row.number for row in group]),
        fold=0,
        source=side([row.source for row in group]),
        target=side(targets) if targets else None,
    )
    labels = torch.tensor([row.labels + [IGNORED] * (longest - len(row.labels)) for row in group])
    return Labelled(batch, labels, sum(row.last for row in group))
