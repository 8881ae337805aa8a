"""Heads that raise the logit of the token they attend to (Elhage et al. 2021), lower it, or raise its successor's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.special import ndtr
from torch import Tensor

from headscope.attribution.residual_stream import HeadFactors, ResidualStream, read_states, stream_of, why_no_stream
from headscope.bootstrap import Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Analysis, analysis
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelRule, LabelTests, Rate, head_table
from headscope.errors import DataError, flag
from headscope.files.reading import read_text
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer

LOWEST = 10  # a token is suppressed if its logit is among so many lowest ones
ROWS, CELLS = 64, 2**26  # tokens whose logits are computed at a time, and numbers of a chunk of W_O W_U


class _OfTokens(Analysis):
    default = False
    passes = frozenset()

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)


@dataclass(frozen=True)
class CopySuppressionOptions(LabelOptions):
    """Options of `copy_suppression`."""

    copy_suppression_tokens: int = option(
        1000, "Tokens of the vocabulary that copy suppression is measured on.", metavar="N", minimum=1
    )


@analysis
class CopySuppression(_OfTokens):
    """Share of tokens whose own logit is among the ten lowest that the head writes (McDougall et al. 2023).

    Logits are E' W_V W_O W_U, gains of norms folded in, biases left out; E' are embeddings after the first layer's
    feed-forward network, its heads off. Measured on `copy-suppression-tokens` drawn tokens; `copy_suppression_chance`
    is ten over the size of the vocabulary. Pre-norm decoders only. Whether the head attends to a token that is about to
    be predicted is not measured.

    Label `copy-suppression`: at least 0.5 and twice chance, with tokens as units.
    """

    name = "copy_suppression"
    version = 2
    order = 143
    sampled = True
    summary = "share of tokens whose own logit a head lowers most of all where it looks at them"
    measures = (
        Measure("copy_suppression", "tokens whose logit it lowers most", range=(0, 1)),
        Measure("copy_suppression_chance", "the same by chance", range=(0, 1)),
    )
    functions = (
        HeadFunction("copy-suppression", "⊖", "x", "#aa4466", "lowers the logit of what it attends to", order=15),
    )
    Options = CopySuppressionOptions
    rules = (
        LabelRule(
            *("copy-suppression", "copy_suppression", 0.5),
            chance="copy_suppression_chance",
            rate=Rate("of sampled tokens are among the ten it lowers most"),
        ),
    )
    signature_entry = "tokens:{copy_suppression_tokens}"

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        plain = torch.tensor(checkpoint.plain_ids(side="target"))
        order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(self.run.seed))
        ids = plain[order[: self.options.copy_suppression_tokens]].sort().values
        for site_layer, states in read_states(stream, ids).items():
            is_lowest = suppressed_tokens(stream, site_layer, states, ids.to(states.device)).T.cpu().double()  # [n h]
            chance = torch.full_like(is_lowest, LOWEST / len(stream.readout.weight))
            for name, values in ((self.name, is_lowest), ("copy_suppression_chance", chance)):
                self.units[(name, *site_layer)] = Ratio(values, torch.ones(len(values), 1))


def suppressed_tokens(stream: ResidualStream, site_layer: SiteLayer, states: Tensor, ids: Tensor) -> Tensor:
    """Whether each head's output for tokens [n], with states [n d], gives them one of the ten lowest logits: [h n].

    Of tied logits the token's own counts as lowest; a head whose output no logit depends on suppresses nothing. Heads
    and tokens are processed in chunks whose logits fit in memory.
    """
    heads, parts = stream.factors(site_layer), []
    contexts = states @ heads.value  # [h n k]
    size = max(1, CELLS // (contexts.shape[-1] * len(stream.readout.weight)))
    for part, output in zip(contexts.split(size), heads.output.split(size), strict=True):
        table, is_lowest = stream.unembed(output), []  # [h k V]
        for context, own_ids in zip(part.split(ROWS, dim=1), ids.split(ROWS), strict=True):
            logits = context @ table  # [h n V]
            own_logits = logits.gather(-1, own_ids[None, :, None].expand(len(part), -1, 1))
            is_reachable = stream.reaches_logits(context @ output, logits)
            is_lowest.append(((logits < own_logits).sum(dim=-1) < LOWEST) & is_reachable)
        parts.append(torch.cat(is_lowest, dim=1))
    return torch.cat(parts)


THRESHOLD = 0.5


@analysis
class Copying(_OfTokens):
    """Re Σλ / Σ|λ| over the eigenvalues λ of the OV circuit W_E W_V W_O W_U (Elhage et al. 2021).

    1: attending to a token raises its own logit; −1: lowers it. Gains of norms and their subtraction of the mean are
    folded in, biases left out. Pre-norm decoders only; layers between embedding and head are ignored. `copying_chance`
    is the score's standard deviation if W_V is turned at random: ‖W_V W_O W_U W_E‖ / (√d Σ|λ|).

    Label `copying`: at least 0.5, and further above 0 than chance allows. Exact: low = high = value.
    """

    name = "copying"
    order = 140
    summary = "eigenvalues of the OV circuit: does a head raise the logit of what it attends to"
    measures = (
        Measure("copying", "copying score", range=(-1, 1), signed=True),
        Measure("copying_chance", "spread of copying by chance", range=(0, None)),
    )
    functions = (
        HeadFunction("copying", "◎", "c", "#332288", "copying: raises the logit of what it attends to", order=8),
    )

    table: dict[SiteLayer, dict[str, Tensor]]

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        product = stream.vocabulary_product()
        self.table = {site_layer: copying_scores(stream.factors(site_layer), product) for site_layer in stream.norms}
        for site_layer, numbers in self.table.items():
            self.exact[site_layer] = {name: numbers.pop(name) for name in ("copying", "copying_chance")}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = super().report(aggregates), LabelTests(min_instances=0)
        rate = Rate("as a copying score, 1 at most", "its spread by chance")
        for site_layer, score in report.columns["copying"].items():
            chance = report.columns["copying_chance"][site_layer].value
            about: dict[str, Any] = {"threshold": THRESHOLD, "counts": None, "baseline": chance, "rate": rate}
            tests.add(site_layer, "copying", "copying", score, ndtr(-score.value / chance), **about)
        tests.conclude(report)
        report.tables["copying"] = head_table(self.table)
        return report


def copying_scores(heads: HeadFactors, product: Tensor) -> dict[str, Tensor]:
    """Re Σλ / Σ|λ| of a layer's OV circuits, its spread by chance, and the columns of copying.csv, [h] each.

    `product` is W_U W_E. NaN for heads whose circuit is only rounding error: no logit depends on their output.
    """
    reads = heads.output @ product.to(heads.output.device)  # [h k d]
    circuits = (reads @ heads.value).cpu().double()  # [h k k]
    gram = heads.value.transpose(1, 2) @ heads.value  # [h k k]
    squares = torch.einsum("hij,hjd,hid->h", gram, reads, reads).cpu().double()  # ‖W_V W_O W_U W_E‖²
    eigenvalues = torch.linalg.eigvals(circuits)
    sizes = [factor.flatten(1).norm(dim=1).cpu() for factor in (heads.output, heads.value)]
    rounding = len(product) * torch.finfo(product.dtype).eps * (sizes[0] * product.norm().cpu() * sizes[1]).double()
    real, absolute = eigenvalues.real, eigenvalues.abs().sum(dim=-1)
    size = absolute.masked_fill(absolute <= rounding, torch.nan)
    return {
        "copying": real.sum(dim=-1) / size,
        "copying_chance": (squares / len(product)).clamp(min=0).sqrt() / size,
        "trace": real.sum(dim=-1),
        "absolute": absolute,
        "positive_share": (real > 0).double().mean(dim=-1),
    }


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
        None, "Ordered words for successor, a sequence a line, instead of English ones.", metavar="FILE"
    )


@analysis
class Successor(_OfTokens):
    """Share of ordered words for which a head that looks at one raises the next most (Gould et al. 2023).

    Logits are E' W_V W_O W_U as for `copy_suppression`. Orders: numbers, number words, ordinals, days, months, short
    forms, letters, or those of `sequences`. Words count that are one token, as is their next; logits compete among
    the words of all orders. Pre-norm decoders only.

    Label `successor`: at least 0.5, with words as units.
    """

    name = "successor"
    order = 142
    summary = "share of ordered words (days, numbers) for which a head raises the next one most"
    measures = (Measure("successor", "words whose successor it raises most", range=(0, 1)),)
    functions = (HeadFunction("successor", "➚", "S", "#bb5566", "raises the next one in an order", order=14),)
    Options = SuccessorOptions
    rules = (LabelRule("successor", "successor", 0.5, rate=Rate("of the words of these orders")),)
    words: pd.DataFrame

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        self.words = ordered_tokens(checkpoint, read_sequences(self.options.sequences))
        ids, following = (torch.tensor(self.words[name].to_numpy(dtype=int)) for name in ("id", "next_id"))
        if not len(ids):
            for site_layer in stream.norms:
                unknown = torch.full([checkpoint.layout[site_layer]], torch.nan, dtype=torch.float64)
                self.exact[site_layer] = {self.name: unknown}
            return
        every = torch.cat([ids, following]).unique()
        for site_layer, states in read_states(stream, ids).items():
            heads = stream.factors(site_layer)
            head_output = states @ heads.value @ heads.output  # [h n d], but for a factor: 1/σ of the layer's norm
            logits = stream.unembed(head_output, every.to(head_output.device))  # [h n c]
            highest = every[logits.argmax(dim=-1).cpu()]  # [h n]
            writes = stream.reaches_logits(head_output, logits).cpu()
            hits = ((highest == following) & writes).T.double()  # [n h]
            self.units[(self.name, *site_layer)] = Ratio(hits, torch.ones(len(hits), 1))

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        names = self.words["sequence"].to_numpy()
        rows = []
        for (_, site, layer), hits in self.units.items():
            for head, name in product(range(hits.total.shape[1]), dict.fromkeys(names)):
                share = float(hits.total[names == name, head].mean())
                rows.append((site.value, layer, head, name, int((names == name).sum()), share))
        columns = ["site", "layer", "head", "sequence", "words", "share"]
        report.tables = {"successor": pd.DataFrame(rows, columns=columns), "successor_words": self.words}
        if not len(self.words):
            report.remarks.append(f"successor: no two words of an order are tokens of the model; give {flag.sequences}")
        return report

    def signature(self) -> dict[str, str]:
        sequences = self.options.sequences
        return {"orders": "english" if sequences is None else sequences.name, **super().signature()}


def read_sequences(path: Path | None) -> dict[str, list[str]]:
    """The sequences of a file, one of words a line, or the English ones; DataError for a line of one word."""
    if path is None:
        return {name: words.split() for name, words in SEQUENCES.items()}
    lines = [line.split() for line in read_text(path, error=DataError).splitlines() if line.strip()]
    if short := [line for line in lines if len(line) < 2]:
        raise DataError(f"{path}: {short[0][0]!r} stands alone; write a sequence of words a line")
    return {f"{line[0]} … {line[-1]}": line for line in lines}


def ordered_tokens(checkpoint: Checkpoint, sequences: dict[str, list[str]]) -> pd.DataFrame:
    """Words of each sequence that are one token, as is their next one, in the spelling that most words have."""
    rows, plain = [], checkpoint.plain_ids(side="target")
    ids = dict(zip(checkpoint.subwords(plain, side="target"), plain, strict=True))
    for name, words in sequences.items():
        spellings = [[spelling.format(word) for word in words] for spelling in SPELLINGS]
        tokens = max(spellings, key=lambda spell: sum(token in ids for token in spell))
        for token, following in pairwise(tokens):
            if token in ids and following in ids:
                rows.append((name, token, ids[token], following, ids[following]))
    return pd.DataFrame(rows, columns=WORDS).drop_duplicates("id")
