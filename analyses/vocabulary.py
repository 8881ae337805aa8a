"""Tokens that a head reads and writes: singular directions of its OV and QK circuits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from headscope.attribution.residual_stream import (
    NO_QUERY_KEY,
    HeadFactors,
    ResidualStream,
    constant,
    stream_of,
    why_no_stream,
)
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.offsets import bare, text_of
from headscope.description.tokens import TokenReader
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint

TOKENS = 10
EQUAL = 1e-3
"""Singular values that differ by less than this share are taken as equal, and their directions as one group."""
BETWEEN = " | "


@dataclass(frozen=True)
class VocabularyOptions:
    """Options of `vocabulary`."""

    vocabulary_directions: int = option(
        4, "Directions of each circuit that vocabulary puts into words.", metavar="N", minimum=1, maximum=1000
    )
    vocabulary_tokens: tuple[str, ...] = option(
        (), "Tokens of which vocabulary says what they look at, what looks at them, what is written.", metavar="LIST"
    )


@analysis
class HeadVocabulary(Analysis):
    """Singular directions of W_V W_O (what a head reads and writes) and W_Q W_Kᵀ, by their tokens.

    W_V W_O = Σ σ_i u_i v_iᵀ: tokens with the largest and smallest E u_i are read, those with the largest and smallest
    v_i W_U written; of W_Q W_Kᵀ they are queries and keys. A head that reads tokens of one end writes, or looks at,
    those of the same end. Scores are less their mean over the vocabulary. Gains of norms are folded in; biases and
    rotary positions are left out. Directions of equal singular values are one group (end ±). Pre-norm decoders only.

    `ov_rank`, `qk_rank`: exp H(σ/Σσ) (Roy & Vetterli 2007). `vocabulary-tokens` adds for named tokens what looks at
    them, what they look at, and what they raise. No text is read, so there is no interval.
    """

    name = "vocabulary"
    version = 2
    order = 144
    default = False
    passes = frozenset()
    summary = "what heads read and write in words: singular directions of OV and QK by their tokens"
    measures = (
        Measure("ov_rank", "effective rank of what it writes", range=(1, None)),
        Measure("qk_rank", "effective rank of where it looks", range=(1, None)),
    )
    Options = VocabularyOptions

    directions: list[dict[str, Any]]
    tokens: list[dict[str, Any]]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        self.directions, self.tokens = [], []
        words = _Unembedder(stream, TokenReader.of(checkpoint, "target"))
        named_tokens = [words.find(token) for token in self.options.vocabulary_tokens]
        for site_layer in stream.norms:
            heads = stream.factors(site_layer)
            circuit_ranks: dict[str, list[float]] = {}
            for head in range(len(heads.value)):
                about = {"site": site_layer[0].value, "layer": site_layer[1], "head": head}
                for circuit, svd in circuits(heads, head).items():
                    rows = words.directions(circuit, svd, self.options.vocabulary_directions)
                    self.directions += [about | row for row in rows]
                    circuit_ranks.setdefault(circuit, []).append(svd.rank)
                self.tokens += [about | row for token in named_tokens for row in words.relations(token, heads, head)]
            self.exact[site_layer] = {
                f"{circuit}_rank": torch.tensor(values, dtype=torch.float64)
                for circuit, values in circuit_ranks.items()
            }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        report.tables["vocabulary"] = pd.DataFrame(self.directions)
        if self.tokens:
            report.tables["vocabulary_tokens"] = pd.DataFrame(self.tokens)
        shared = sum(row["group"] > 1 and row["end"] == "±" for row in self.directions)
        if shared:
            report.remarks += [f"vocabulary: {shared} groups of directions have equal singular values: no single ones"]
        if "qk_rank" not in report.columns:
            report.remarks.append(f"vocabulary: what heads write alone, {NO_QUERY_KEY}")
        return report

    def signature(self) -> dict[str, str]:
        token_list = ",".join(self.options.vocabulary_tokens)
        return {"directions": str(self.options.vocabulary_directions), **({"tokens": token_list} if token_list else {})}


@dataclass(frozen=True)
class SingularDirections:
    """The SVD of a product A Bᵀ = Σ_i `sizes`[i] · `left`[:, i] · `right`[:, i]ᵀ: left and right [d k], sizes [k]."""

    left: Tensor
    sizes: Tensor
    right: Tensor

    @property
    def rank(self) -> float:
        """exp(entropy of σ/Σσ), the effective rank; NaN for a product of zeros."""
        sizes = self.sizes.double()
        return float(torch.special.entr(sizes / sizes.sum()).sum().exp())

    def groups(self, count: int) -> Iterator[slice]:
        """Groups of the first `count` directions by equal size, without those of size 0."""
        start = 0
        while start < min(count, len(self.sizes)) and self.sizes[start] > 0:
            close = self.sizes[start:] > (1 - EQUAL) * self.sizes[start]
            end = start + int(close.sum())
            yield slice(start, end)
            start = end


def decompose(first: Tensor, second: Tensor) -> SingularDirections:
    """The singular directions of first [d k] · second [d k]ᵀ by QR and a k × k SVD; sizes of rounding errors are 0."""
    (q1, r1), (q2, r2) = torch.linalg.qr(first), torch.linalg.qr(second)
    u, sizes, v = torch.linalg.svd(r1 @ r2.T)
    rounding = len(first) * torch.finfo(first.dtype).eps * float(first.norm() * second.norm())
    return SingularDirections(q1 @ u, sizes.masked_fill(sizes <= rounding, 0.0), q2 @ v.T)


def circuits(heads: HeadFactors, head: int) -> dict[str, SingularDirections]:
    """The OV and the QK circuit of a head; OV alone if its rows of the query or key projection cannot be found."""
    decompositions = {"ov": decompose(heads.value[head], heads.output[head].T)}
    if heads.query is not None and heads.key is not None:
        decompositions["qk"] = decompose(heads.query[head], heads.key[head])
    return decompositions


class _Unembedder:
    """Lists the tokens of a model's vocabulary that score highest for directions and for other tokens."""

    def __init__(self, stream: ResidualStream, reader: TokenReader) -> None:
        self.stream, self.reader = stream, reader
        table = constant(stream.embeddings)
        rows = min(len(table), len(stream.readout.weight))  # either may be padded
        self.plain = torch.tensor([number for number in reader.checkpoint.plain_ids(side="target") if number < rows])
        self.embeddings = table[self.plain.to(table.device)]  # [v d]

    def read(self, directions: Tensor) -> Tensor:
        """E u of directions [d n], less the mean over the vocabulary [v n]."""
        scores = self.embeddings @ directions
        return scores - scores.mean(dim=0)

    def logits(self, directions: Tensor) -> Tensor:
        """The logits of written directions [d n], less their mean [v n]."""
        scores = self.stream.unembed(directions.T, self.plain.to(directions.device)).T
        return scores - scores.mean(dim=0)

    def directions(self, circuit: str, svd: SingularDirections, count: int) -> Iterator[dict[str, Any]]:
        """Lines of vocabulary.csv: one for each end of a direction, or one for a group of directions."""
        total = float(svd.sizes.double().square().sum())
        for group in svd.groups(count):
            left_scores = self.read(svd.left[:, group])
            right = (self.logits if circuit == "ov" else self.read)(svd.right[:, group])
            size = group.stop - group.start
            ends = {"±": (left_scores.norm(dim=1), right.norm(dim=1))}
            if size == 1:
                ends = {"+": (left_scores[:, 0], right[:, 0]), "-": (-left_scores[:, 0], -right[:, 0])}
            for end, (first, second) in ends.items():
                yield {
                    "circuit": circuit,
                    "direction": group.start,
                    "group": size,
                    "size": float(svd.sizes[group].double().mean()),
                    "share": float(svd.sizes[group].double().square().sum()) / total,
                    "end": end,
                    "from": self.top(first),
                    "to": self.top(second),
                }

    def relations(self, token: int, heads: HeadFactors, head: int) -> Iterator[dict[str, Any]]:
        """Lines of vocabulary_tokens.csv for the token at a place in `plain`."""
        embedding, token_scores = self.embeddings[token], dict[str, Tensor]()
        if heads.query is not None and heads.key is not None:
            token_scores["looks at"] = self.read(heads.key[head] @ (embedding @ heads.query[head])[:, None])
            token_scores["is looked at by"] = self.read(heads.query[head] @ (embedding @ heads.key[head])[:, None])
        token_scores["raises"] = self.logits(((embedding @ heads.value[head]) @ heads.output[head])[:, None])
        for relation, scores in token_scores.items():
            name, tokens = self.reader.label(int(self.plain[token])), self.top(scores[:, 0])
            yield {"token": name, "relation": relation, "tokens": tokens}

    def top(self, scores: Tensor) -> str:
        """The tokens with the largest of the scores [v], the largest first."""
        best = scores.cpu().topk(min(TOKENS, len(scores))).indices
        return BETWEEN.join(self.reader.label(int(number)) for number in self.plain[best])

    def find(self, token: str) -> int:
        """The place in `plain` of a token, spelled as in tables or as text; ConfigError if there is none.

        Of several tokens one that begins a word is taken.
        """
        marks, names = self.reader.marks, [self.reader.subword(int(number)) for number in self.plain]
        spellings_by_row = [(bare(name, marks) or name, text_of(name, marks)) for name in names]
        matches = [index for index, spellings in enumerate(spellings_by_row) if token in spellings]
        starting = [index for index in matches if bare(names[index], marks) != names[index]] or matches
        if not starting:
            raise ConfigError(f"{flag('vocabulary_tokens', token)}: not in the vocabulary; name whole tokens")
        return starting[0]
