"""Successor heads: looking at Monday they raise the logit of Tuesday (Gould et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from headscope.attribution.residual_stream import SiteLayer, read_states, stream_of, why_no_stream
from headscope.bootstrap import Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, LabelRule, analysis, head_ids
from headscope.engine.evidence.labels import Rate
from headscope.errors import DataError, flag
from headscope.files.reading import read_text
from headscope.formats.base import Checkpoint

WORDS = ["sequence", "token", "id", "next_token", "next_id"]
SPELLINGS = ("Ġ{}", "▁{}", "{}</w>", "{}")  # of a word as a token of its own, by kinds of vocabularies
SEQUENCES = {
    "numbers": " ".join(map(str, range(1, 201))),
    "number words": "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty",
    "ordinals": "first second third fourth fifth sixth seventh eighth ninth tenth",
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Monday",
    "short days": "Mon Tue Wed Thu Fri Sat Sun Mon",
    "months": "January February March April May June July August September October November December January",
    "short months": "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec Jan",
    "letters": "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
}


@dataclass(frozen=True)
class SuccessorOptions(LabelOptions):
    """Options of `successor`."""

    sequences: Path | None = option(
        None,
        "Ordered words for successor, a sequence a line, instead of English ones.",
        metavar="FILE",
    )


@analysis
class Successor(Analysis):
    """Share of ordered words for which a head that looks at one raises the next most (Gould et al. 2023).

    Logits are E' W_V W_O W_U as for `copy_suppression`. Orders: numbers, number words, ordinals, days, months, short
    forms, letters, or those of `sequences`. Words count that are one token, as is their next; logits compete among
    the words of all orders. Pre-norm decoders only.

    Label `successor`: at least 0.5, with words as units.
    """

    name = "successor"
    order = 142
    default = False
    passes = frozenset()
    summary = "share of ordered words (days, numbers) for which a head raises the next one most"
    measures = (Measure("successor", "words whose successor it raises most", range=(0, 1)),)
    functions = (HeadFunction("successor", "➚", "S", "#bb5566", "raises the next one in an order", order=14),)
    Options = SuccessorOptions
    hits: dict[SiteLayer, Tensor]
    words: pd.DataFrame

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        self.words, self.hits = ordered_tokens(checkpoint, read_sequences(self.options.sequences)), {}
        ids, following = (torch.tensor(self.words[name].to_numpy(dtype=int)) for name in ("id", "next_id"))
        if not len(ids):
            for place in stream.site_layers:
                unknown = torch.full([checkpoint.layout[place]], torch.nan, dtype=torch.float64)
                self.exact[place] = {self.name: unknown}
            return
        every = torch.cat([ids, following]).unique()
        for site_layer, states in read_states(stream, ids).items():
            heads = stream.factors(site_layer)
            head_output = states @ heads.value @ heads.output  # [h n d], but for a factor: 1/σ of the layer's norm
            logits = stream.unembed(head_output, every.to(head_output.device))  # [h n c]
            highest = every[logits.argmax(dim=-1).cpu()]  # [h n]
            writes = stream.reaches_logits(head_output, logits).cpu()
            self.hits[site_layer] = ((highest == following) & writes).T.double()

    def rules(self) -> Sequence[LabelRule]:
        return [LabelRule(self.name, self.name, 0.5, rate=Rate("of the words of these orders"))] if self.hits else []

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        statistics = {(self.name, *place): Ratio(hits, torch.ones(len(hits), 1)) for place, hits in self.hits.items()}
        report = super().report(aggregates.over_units(statistics))
        names = self.words["sequence"].to_numpy()
        by_sequence = [
            (
                *(head.site.value, head.layer, head.head, name),
                *(int((names == name).sum()), float(hits[names == name, head.head].mean())),
            )
            for site_layer, hits in self.hits.items()
            for head in head_ids(site_layer, hits.shape[1])
            for name in dict.fromkeys(names)
        ]
        columns = ["site", "layer", "head", "sequence", "words", "share"]
        report.tables = {"successor": pd.DataFrame(by_sequence, columns=columns), "successor_words": self.words}
        if not len(self.words):
            report.remarks.append(f"successor: no two words of an order are tokens of the model; give {flag.sequences}")
        return report

    def signature(self) -> dict[str, str]:
        sequences = self.options.sequences
        return {"orders": "english" if sequences is None else sequences.name, **super().signature()}


def read_sequences(path: Path | None) -> dict[str, list[str]]:
    """The orders of a file, a sequence of words a line, or the English ones; DataError for a line of one word."""
    if path is None:
        return {name: words.split() for name, words in SEQUENCES.items()}
    lines = [line.split() for line in read_text(path, error=DataError).splitlines() if line.strip()]
    if short := [line for line in lines if len(line) < 2]:
        raise DataError(f"{path}: {short[0][0]!r} stands alone; write a sequence of words a line")
    return {f"{line[0]} … {line[-1]}": line for line in lines}


def ordered_tokens(checkpoint: Checkpoint, sequences: dict[str, list[str]]) -> pd.DataFrame:
    """Words of each sequence that are one token and so is the next one, in the spelling that most of them have."""
    rows, plain = [], checkpoint.plain_ids(side="target")
    ids = dict(zip(checkpoint.subwords(plain, side="target"), plain, strict=True))
    for name, words in sequences.items():
        spellings = [[spelling.format(word) for word in words] for spelling in SPELLINGS]
        tokens = max(spellings, key=lambda spelled: sum(token in ids for token in spelled))
        for token, following in pairwise(tokens):
            if token in ids and following in ids:
                rows.append((name, token, ids[token], following, ids[following]))
    return pd.DataFrame(rows, columns=WORDS).drop_duplicates("id")
