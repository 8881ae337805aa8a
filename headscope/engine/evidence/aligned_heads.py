"""Alignment heads of decoder language models: the source word on which their largest weight lies, in filled templates.

Heads are labelled only if they follow the links also where source words are scrambled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Array, Ratio
from headscope.data.corpus import Pair, Sentence
from headscope.data.encoded import Side
from headscope.data.template import words_in_texts
from headscope.data.word_alignment import Links
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelTests, Rate, head_table
from headscope.engine.evidence.significance import p_values
from headscope.engine.heads.head_batch import HeadBatch, max_and_position
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, SiteLayer

RELATIONS = ("fed", "predicted", "successor")
BEST, TINY = 5, 1e-9  # heads whose weights are averaged


@dataclass(frozen=True)
class TemplateWords:
    """The words of one filled template, and the links between source and target words.

    `columns` [k] are the positions of source subwords, `words` [k] their source words, `last` [m] the last subword of
    each target word, `links` and `sure` [m n] the links. Each of `relations` has the query positions [q] of target
    words with a link, and tables [3 q n] of hits by source word: the links, the links rolled by one word, and 1
    everywhere if the word on the diagonal is linked.
    """

    columns: Tensor
    words: Tensor
    last: Tensor
    relations: dict[str, tuple[Tensor, Tensor]]
    links: Tensor
    sure: Tensor

    @classmethod
    def of(cls, pair: Pair, words: Sequence[Tensor], links: Links, device: torch.device) -> TemplateWords:
        """From `words`, the source word and target word [t] of every subword, and the links of the unscrambled line."""
        source, target = words
        n, m = int(source.max()) + 1, int(target.max()) + 1
        in_word, positions = target == torch.arange(m)[:, None], torch.arange(len(target))  # [m t], [t]
        first = torch.where(in_word, positions, len(target)).amin(dim=1)
        last = torch.where(in_word, positions, -1).amax(dim=1)
        pairs, sure = links.pairs, links.sure
        if pair.order:
            pairs = np.stack([np.argsort(pair.order)[pairs[:, 0]], pairs[:, 1]], axis=1)
        inside = (pairs < (n, m)).all(axis=1)  # not all where the text was cut
        tables = torch.zeros(2, m, n, dtype=torch.bool)
        for table, selection in zip(tables, (inside, inside & sure), strict=True):
            table[pairs[selection, 1], pairs[selection, 0]] = True
        following = torch.nn.functional.pad(tables[0], (1, 0))[:, :n]
        relations = {
            "fed": _relation(last, tables[0], device),
            "predicted": _relation(first - 1, tables[0], device),
            "successor": _relation(last, following, device),
        }
        columns = (source >= 0).nonzero()[:, 0]
        return cls(columns.to(device), source[columns].to(device), last.to(device), relations, tables[0], tables[1])


def _relation(queries: Tensor, links: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The entry of `TemplateWords.relations` for the query position of each target word [m] and links [m n]."""
    m, n = links.shape
    has_links = links.any(dim=1) & (queries >= 0)
    on_diagonal = links[torch.arange(m), diagonal(m, n)]
    tables = torch.stack([links, links.roll(1, dims=1), on_diagonal[:, None].expand(m, n)])
    return queries[has_links].to(device), tables[:, has_links].to(device)


def diagonal(m: int, n: int) -> Tensor:
    """The source word [m], of n, that lies as far along the source as each target word along the target."""
    return ((torch.arange(m) + 0.5) * n / max(m, 1)).long()


def template_words(
    sentences: Sequence[Sentence], side: Side, checkpoint: Checkpoint, links: Sequence[Links], device: torch.device
) -> list[TemplateWords]:
    """The words and links of filled templates on a device, from the encoded `side` on the CPU."""
    pairs = [sentence.pair for sentence in sentences if sentence.pair is not None]
    ids = [row[real].tolist() for row, real in zip(side.ids, side.real, strict=True)]
    spans = [
        checkpoint.spans(sentence.source, row, side="source") or [None] * len(row)
        for sentence, row in zip(sentences, ids, strict=True)
    ]
    words = [torch.from_numpy(of_side).split([len(row) for row in ids]) for of_side in words_in_texts(pairs, spans)]
    parts = zip(pairs, zip(*words, strict=True), links, strict=True)
    return [TemplateWords.of(*of_text, device) for of_text in parts]


def count_hits(heads: HeadBatch, texts: Sequence[TemplateWords]) -> tuple[dict[str, Ratio], list[Tensor]]:
    """Hits [b h] of each relation: of links, of rolled links, their difference, and of the diagonal; and word weights.

    Word weights, one tensor [h m n] a text, go from fed target words to source words and sum to 1 over the source.
    """
    parts: list[list[Tensor]] = [[] for _ in texts]
    for block in heads.in_blocks():
        for row, text in enumerate(texts):
            parts[row].append(block.weights[row][:, :, text.columns])
    weights = [torch.cat(rows, dim=1) for rows in parts]  # [h t k] each
    ratios: dict[str, Ratio] = {}
    for name in RELATIONS:
        hits = torch.stack([*map(partial(_hits, name=name), weights, texts)])  # [b 3 h]
        count = torch.tensor([[float(len(text.relations[name][0]))] for text in texts])
        totals = {"aligned": hits[:, 0], "rolled": hits[:, 1], "lift": hits[:, 0] - hits[:, 1], "diagonal": hits[:, 2]}
        ratios |= {f"{kind}_{name}": Ratio(total, count) for kind, total in totals.items()}
    return ratios, [*map(_word_weights, weights, texts)]


def _hits(weights: Tensor, text: TemplateWords, name: str) -> Tensor:
    """The number of positions [3 h] at which each table of a relation has the word of the largest weight [h t k]."""
    queries, tables = text.relations[name]
    if not len(queries):
        return weights.new_zeros(len(tables), len(weights))
    words = text.words[max_and_position(weights[:, queries])[1]]  # [h q]
    return tables[:, torch.arange(len(queries), device=words.device), words].sum(dim=-1).to(weights.dtype)


def _word_weights(weights: Tensor, text: TemplateWords) -> Tensor:
    """Weights [h m n] between words from weights [h t k] on source subwords."""
    if not text.links.numel():  # the text was cut
        return weights.new_zeros(len(weights), 0, 0)
    is_in_word = torch.nn.functional.one_hot(text.words, text.links.shape[1]).to(weights.dtype)  # [k n]
    by_word = weights[:, text.last] @ is_in_word
    return by_word / by_word.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def joint_error_rates(
    weights: Mapping[int, Mapping[int, Tensor]], links: Mapping[int, tuple[Array, Array]], named_heads: Sequence[HeadId]
) -> pd.DataFrame:
    """Alignment error rates of the mean weights of several heads, and of the diagonal.

    Weights of a source word are divided by their mean over target words, so that words on which heads rest do not
    count (Whisper standardises them). `weights` are word weights [h m n] by text and layer, `links` the links and the
    sure links [m n] by text. The best heads of each half of the texts are measured on the other half.
    """
    first = next(iter(weights.values()))
    heads = [(layer, head) for layer in sorted(first) for head in range(len(first[layer]))]
    texts = {number: np.concatenate([of[layer] for layer in sorted(first)]) for number, of in weights.items()}
    halves = [[number for number in texts if number % 2 == parity] for parity in (0, 1)]

    def mean_argmax(chosen_heads: Sequence[int], numbers: Sequence[int]) -> dict[int, Array]:
        parts = {number: texts[number][list(chosen_heads)] for number in numbers}
        means = {number: part.mean(axis=1, keepdims=True).clip(min=TINY) for number, part in parts.items()}
        return {number: (part / means[number]).mean(axis=0).argmax(axis=-1) for number, part in parts.items()}

    def best(numbers: Sequence[int]) -> Sequence[int]:
        hits = sum(links[n][0][np.arange(texts[n].shape[1]), texts[n].argmax(axis=-1)].sum(axis=-1) for n in numbers)
        return np.argsort(-np.asarray(hits), kind="stable")[:BEST].tolist()

    candidates: dict[str, tuple[list[int], dict[int, Array]]] = {}
    if named_heads:
        own = [heads.index((head.layer, head.head)) for head in named_heads]
        candidates["named aligned:fed"] = own, mean_argmax(own, list(texts))
    if all(halves):
        held_out = mean_argmax(best(halves[0]), halves[1]) | mean_argmax(best(halves[1]), halves[0])
        candidates[f"best {BEST} of the other half"] = [], held_out
    candidates["diagonal"] = [], {number: diagonal(*text.shape[1:]).numpy() for number, text in texts.items()}
    rows = []
    for name, (chosen_heads, words) in candidates.items():
        which = " ".join(f"{heads[at][0]}.{heads[at][1]}" for at in chosen_heads)
        rows.append((name, which, error_rate(words, links), len(words)))
    return pd.DataFrame(rows, columns=["name", "which", "aer", "texts"])


def error_rate(argmax_words: Mapping[int, Array], links: Mapping[int, tuple[Array, Array]]) -> float:
    """Alignment error rate (Och & Ney 2003) of texts, given one source word for each target word [m]."""
    hits = sizes = 0
    for number, words in argmax_words.items():
        n_linked, sure = (table[np.arange(len(words)), words].sum() for table in links[number])
        hits += int(n_linked + sure)
        sizes += len(words) + int(links[number][1].sum())
    return 1 - hits / sizes if sizes else float("nan")


RUNS = ("", "_scrambled")
STATISTICS = ("aligned_{}", "lift_{}", "lift_{}_scrambled")  # of a relation
LIFT = 0.2
"""The least share beyond rolled links of a labelled head, with sources in order and scrambled."""


def template_report(aggregates: Aggregates, tests: LabelTests) -> AnalysisReport:
    """Columns, labels and the table of heads on filled templates; without scrambled texts there are no labels."""
    names = [statistic.format(name) for name in RELATIONS for statistic in STATISTICS]
    report = AnalysisReport(columns={name: aggregates.column(name) for name in names if aggregates.site_layers(name)})
    tables = []
    for name in RELATIONS:
        rows = {}
        for site_layer in aggregates.site_layers(f"aligned_{name}_scrambled"):
            share, lift, scrambled_lift = (aggregates.ratio(of.format(name), *site_layer) for of in STATISTICS)
            rolled_share = aggregates.ratio(f"rolled_{name}", *site_layer).value
            on_diagonal = aggregates.ratio(f"diagonal_{name}", *site_layer).value
            counts = aggregates.by_sentence(f"aligned_{name}", site_layer)[1]
            tests.add(
                site_layer,
                f"aligned_{name}",
                f"aligned:{name}",
                share,
                np.max([_lift_p(aggregates, name, run, site_layer) for run in RUNS], axis=0),
                threshold=np.where(np.minimum(lift.value, scrambled_lift.value) >= LIFT, rolled_share, np.inf),
                counts=counts,
                baseline=rolled_share,
                rate=Rate("of the linked words", "by links of the word before"),
            )
            rows[site_layer] = {
                **{"relation": name, "positions": int(counts.sum()), "share": share, "lift": lift},
                **{"lift_scrambled": scrambled_lift, "baseline_rolled": rolled_share, "baseline_diagonal": on_diagonal},
            }
        tables.append(head_table(rows))
    tests.conclude(report)
    report.tables["alignment"] = pd.concat(tables, ignore_index=True)
    return report


def _lift_p(aggregates: Aggregates, name: str, run: str, site_layer: SiteLayer) -> Array:
    """One-sided p of a lift being at most half of the required one."""
    hits, counts = aggregates.by_sentence(f"aligned_{name}{run}", site_layer)
    rolled_hits, _ = aggregates.by_sentence(f"rolled_{name}{run}", site_layer)
    return p_values(hits, rolled_hits, counts, threshold=LIFT / 2, may_divide=True)
