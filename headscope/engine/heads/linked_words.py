"""Words of target positions and source keys in one batch, and how often a head looks from one to a linked other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.corpus import Sentence
from headscope.data.encoded import Side, SideName
from headscope.data.word_alignment import Ints, words_of_subwords
from headscope.distributed import upload
from headscope.engine.heads.sentence_links import SentenceLinks
from headscope.formats.base import POSITION, Checkpoint

AHEAD = {"predicted": 1, "fed": 0, "next": 2}
"""By relation, the offset from a decoder position to the token whose word the head may look at."""
REACH = 64  # the baseline tries fixed offsets of up to ±REACH
POSSIBLE, SURE, SHUFFLED = 1, 2, 4
"""Bits of a pair of words: it is a link, a sure link, a link borrowed from another sentence."""


def mark_distinct(numbers: Tensor) -> Tensor:
    """A mask of the sorted numbers [… t] with one entry for each distinct number that is at least 0."""
    sorted_numbers = numbers.sort(dim=-1).values
    first = torch.ones_like(sorted_numbers, dtype=torch.bool)
    first[..., 1:] = sorted_numbers[..., 1:] != sorted_numbers[..., :-1]
    return first & (sorted_numbers >= 0)


class RelationPositions(NamedTuple):
    """The target positions of one relation in a batch.

    `offset_hits` and `diagonal_hits` [b t]: the key at the fixed offset, or on the diagonal, is linked. `counted`
    [b t 2] is 1 for positions whose word has a link, and for the hard ones among them, where neither key is linked.
    `sure_links` [b] counts the sure links of all words that some position is about.
    """

    offset_hits: Tensor
    diagonal_hits: Tensor
    counted: Tensor
    sure_links: Tensor


class LinkedWords:
    """Words and links of one batch, built once for all layers.

    `source_word` [b s] is the number of each key's word, `about[relation]` [b t] that of the target word that a
    position is about; −1 is no word. `kinds` [b m n] has the bits of every pair of a target and a source word; its
    last row and column stand for −1 and have no links. A pair's number is its index in the flat [m·n]. `host`: the two
    sides on the CPU.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        keys: Tensor,
        sentences: Sequence[Sentence],
        checkpoint: Checkpoint,
        links: SentenceLinks,
        *,
        host: tuple[Side, Side] | None = None,
    ) -> None:
        self.is_counted, self.n_unlocated = False, 0
        self.positions_of: dict[str, RelationPositions] = {}
        target = sides[1]
        self.counted_keys, self.tokens, device = keys, target.real & ~target.special, keys.device
        on_host = host or sides
        texts = ([sentence.source for sentence in sentences], [sentence.target or "" for sentence in sentences])
        of_source, ends = self._words(on_host[0], texts[0], checkpoint, "source")  # [b s], [b s 2]
        if links.positions is not None:
            recording = on_host[0].real & ~on_host[0].special
            of_source = torch.arange(recording.shape[1]).where(recording, -1).numpy()
        of_target, _ = self._words(on_host[1], texts[1], checkpoint, "target")  # [b t]
        self.n_sources, self.n_targets = int(of_source.max()) + 2, int(of_target.max()) + 2
        self.row = torch.arange(len(sentences), device=device)
        self.source_word, target_word = (upload(torch.from_numpy(words), device) for words in (of_source, of_target))
        self.ends = upload(ends, device)
        self.source_words = mark_distinct(self.source_word).sum(-1).float()  # [b]
        is_query = target.real & keys.any(-1, keepdim=True)  # [b t]
        self.about = {}
        for name, ahead in AHEAD.items():
            shifted_words = torch.nn.functional.pad(target_word, (0, ahead), value=-1)[:, ahead:]
            self.about[name] = torch.where(is_query, shifted_words, -1)
        if links.has_links:
            self._link(links, sentences, (of_source, of_target))

    def _words(self, side: Side, texts: Sequence[str], checkpoint: Checkpoint, name: SideName) -> tuple[Ints, Tensor]:
        """The word [b n] of every subword; whether it is final punctuation, and whether it follows the text [b n 2]."""
        ids, real = side.ids.numpy(), side.real.numpy()
        spans = [checkpoint.spans(text, ids[row][real[row]].tolist(), side=name) for row, text in enumerate(texts)]
        self.n_unlocated += sum(span is None for span in spans)
        is_located = real & np.array([span is not None for span in spans])[:, None]
        words, ends = np.full(ids.shape, -1, dtype=np.int64), np.zeros((*ids.shape, 2), dtype=np.float32)
        words[is_located], ends[is_located] = words_of_subwords(texts, [span or [] for span in spans])
        return words, torch.from_numpy(ends)

    def _link(self, links: SentenceLinks, sentences: Sequence[Sentence], words: tuple[Ints, Ints]) -> None:
        batch_links, b = links.of(sentences), len(sentences)
        kinds = np.zeros((b, self.n_targets, self.n_sources), dtype=np.uint8)
        present = [np.zeros((b, size), dtype=bool) for size in (self.n_sources, self.n_targets)]
        for is_present, of_side in zip(present, words, strict=True):
            is_present[np.arange(b)[:, None], of_side] = True
            is_present[:, -1] = False  # the column of −1, no word
        for kind, pairs in (
            (POSSIBLE, [of_line.pairs for of_line in batch_links]),
            (SURE, [of_line.pairs[of_line.sure] for of_line in batch_links]),
            (SHUFFLED, links.of_others(sentences)),
        ):
            row, (source, target) = np.repeat(np.arange(b), [*map(len, pairs)]), np.concatenate(pairs).T
            inside = present[0][row, np.minimum(source, self.n_sources - 1)]
            inside &= present[1][row, np.minimum(target, self.n_targets - 1)]
            kinds[row[inside], target[inside], source[inside]] |= kind
        self.kinds = upload(torch.from_numpy(kinds), self.source_word.device)
        self.possible = self.kinds & POSSIBLE > 0
        self.has_link = self.possible.any(dim=-1)  # [b m]: target words that have a link

    def pairs(self, about: Tensor, words: Tensor) -> Tensor:
        """Numbers of the pairs of target words [b t] and source words [b … t], −1 where one is missing."""
        about = about.view(len(about), *[1] * (words.ndim - 2), -1)
        return torch.where((about >= 0) & (words >= 0), about * self.n_sources + words, -1)

    def kinds_of(self, pairs: Tensor) -> Tensor:
        """The kinds of pairs [b …]."""
        return self.kinds.flatten(1)[self.row.view(-1, *[1] * (pairs.ndim - 1)), pairs]

    def lag(self, argmax: Tensor) -> Ratio:
        """Mean seconds by which the argmax [b h t] lies behind the first position of the predicted word."""
        about = self.about["predicted"]
        words = self.row[:, None], about
        begin, is_counted = self.possible.byte().argmax(dim=-1)[words], self.has_link[words]
        behind = argmax - begin[:, None]
        return Ratio((behind * is_counted[:, None]).sum(-1) * POSITION, is_counted.sum(-1, keepdim=True).float())

    def relation(self, name: str, words: Tensor, offset: int) -> dict[str, Ratio]:
        """Hits of one relation for the argmax's words [b h t], and the sizes that its error rate is made of.

        These are |A|, |A∩S|, |A∩P| and |S|: A are the distinct pairs of the argmax, S the sure links, P all links.
        """
        positions, pairs = self.positions(name, offset), self.pairs(self.about[name], words)
        sorted_pairs = pairs.sort(dim=-1).values
        is_first, kinds = mark_distinct(sorted_pairs), self.kinds_of(sorted_pairs)
        in_sets = torch.stack([is_first, is_first & (kinds & SURE > 0), is_first & (kinds & POSSIBLE > 0)], dim=-1)
        ratios = {f"links_{name}": Ratio(in_sets.sum(2).float(), positions.sure_links[:, None, None])}  # [b h 3]
        kinds = self.kinds_of(pairs)
        hits = torch.stack([kinds & POSSIBLE, kinds & SHUFFLED]) > 0  # [2 b h t]
        hits_by_kind = hits.float() @ positions.counted  # [2 b h 2]
        for number, part in enumerate(("", "hard_")):
            count = positions.counted[..., number].sum(-1)[:, None]
            for kind, hit in zip(("aligned", "shuffled"), hits_by_kind[..., number], strict=True):
                ratios[f"{part}{kind}_{name}"] = Ratio(hit, count)
        return ratios

    def positions(self, name: str, offset: int) -> RelationPositions:
        """The positions of a relation, and the hits of its baselines: a fixed offset and the diagonal."""
        if name not in self.positions_of:
            keys = torch.arange(self.tokens.shape[1], device=self.tokens.device) + offset
            keys = torch.where((keys >= 0) & (keys < self.source_word.shape[1]), keys, -1).expand(len(self.row), -1)
            offset_hits, diagonal_hits = self._hits(name, keys), self._hits(name, self._diagonal(name))
            about, n_sure = self.about[name], (self.kinds & SURE > 0).sum(dim=-1)  # [b t], [b m]
            has_link = self.has_link[self.row[:, None], about]
            counted = torch.stack([has_link, has_link & ~offset_hits & ~diagonal_hits], dim=-1).float()
            is_reached = torch.zeros_like(n_sure).scatter(1, about % self.n_targets, 1)  # [b m]
            sure_links = (n_sure * is_reached).sum(dim=-1).float()
            self.positions_of[name] = RelationPositions(offset_hits, diagonal_hits, counted, sure_links)
        return self.positions_of[name]

    def _hits(self, name: str, keys: Tensor) -> Tensor:
        """Whether each position's word is linked to the word of its key [b t]; −1 is no key."""
        key_words = torch.where(self.counted_keys, self.source_word, -1)
        words = key_words.gather(1, keys.clamp(min=0)).masked_fill(keys < 0, -1)
        return self.kinds_of(self.pairs(self.about[name], words)) & POSSIBLE > 0

    def _diagonal(self, name: str) -> Tensor:
        """The counted key [b t] as far along the source as the position's token is along the target."""
        t, ahead = self.tokens.shape[1], AHEAD[name]
        rank = torch.nn.functional.pad(self.tokens.cumsum(-1) - 1, (0, ahead))[:, ahead : ahead + t]
        share = (rank + 0.5) / self.tokens.sum(-1, keepdim=True).clamp(min=1)
        n_keys = self.counted_keys.sum(-1, keepdim=True)
        key_rank = (share * n_keys).floor().clamp(min=0).long()  # among the counted keys
        ends = self.counted_keys.cumsum(-1)  # [b s]
        return torch.searchsorted(ends, key_rank + 1).clamp(max=ends.shape[1] - 1)

    def best_offsets(self) -> dict[str, int]:
        """By relation, the offset within ±`REACH` that hits a link at most positions; of ties the smallest one."""
        t, s = self.tokens.shape[1], self.source_word.shape[1]
        words = torch.where(self.counted_keys, self.source_word, -1)
        words = torch.nn.functional.pad(words, (REACH, REACH + t), value=-1)
        about = torch.cat(tuple(self.about.values()), dim=1)  # [b r·t]
        offsets = [offset for offset in sorted(range(-REACH, REACH + 1), key=abs) if -t < offset < s]
        shifted_words = (words[:, REACH + offset :][:, :t].repeat(1, len(self.about)) for offset in offsets)
        hits = (self.kinds_of(self.pairs(about, source)) & POSSIBLE > 0 for source in shifted_words)
        n_hits = torch.stack([hit.view(len(hit), -1, t).sum(dim=(0, 2)) for hit in hits])  # [offset relation]
        best = n_hits.cpu().numpy().argmax(axis=0).tolist()  # numpy takes the first of ties
        return {name: offsets[number] for name, number in zip(self.about, best, strict=True)}

    def baselines(self, name: str, offset: int) -> dict[str, Ratio]:
        """Baselines of a fixed offset, the diagonal and even weight [b 3], the last also at hard positions [b 1]."""
        positions = self.positions(name, offset)
        count = positions.counted.sum(1)  # [b 2]
        even = self._even(self.about[name], positions.counted)  # [b 2]
        baseline_hits = torch.stack(
            [positions.offset_hits.sum(-1), positions.diagonal_hits.sum(-1), even[:, 0]], dim=-1
        )
        return {
            f"others_{name}": Ratio(baseline_hits, count[:, :1]),
            f"hard_even_{name}": Ratio(even[:, 1:], count[:, 1:]),
        }

    def _even(self, about: Tensor, counted: Tensor) -> Tensor:
        """The share of counted keys that are linked, summed over the positions that `counted` [b t 2] marks: [b 2]."""
        n_subwords = torch.zeros(len(about), self.n_sources, device=about.device)  # of each source word
        n_subwords.scatter_add_(1, self.source_word % self.n_sources, self.counted_keys.float())
        linked_keys = (self.possible.float() @ n_subwords[..., None])[..., 0]  # [b m]
        of_position = linked_keys.gather(1, about % self.n_targets)[:, None]  # [b 1 t]
        return (of_position @ counted)[:, 0] / self.counted_keys.sum(-1, keepdim=True).clamp(min=1)
