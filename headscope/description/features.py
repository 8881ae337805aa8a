"""Categorical features of pairs of a query and a key, in groups, and the sentence that describes a head.

The sentence gives the head's labels, the groups of features that explain it, and its highest-scored pairs of words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.data.offsets import Marks, display_subword
from headscope.description.tokens import Numbers, Pairs, Tokens
from headscope.heads import HeadId

if TYPE_CHECKING:
    import pandas as pd

NEAR, EDGES = 8, (8, 12, 18, 27, 40, 60, 90, 150, 300)
OFFSETS = 2 * (NEAR + len(EDGES)) + 1
FIRST_SPECIAL, LAST_SPECIAL, OTHER_SPECIAL, ITSELF = range(OFFSETS, OFFSETS + 4)
FREQUENT, BANDS = 300, (1, 2, 4, 8, 16, 32)
IDENTITIES = ("", "itself", "same word", "same token", "same lemma")

FEATURES: Mapping[str, tuple[int, ...]] = {
    "position": (0, 1),
    "token": (2,),
    "classes": (3, 4),
    "lexical": (),
    "syntax": (5,),
}
"""The features of each group, by number; `lexical` has pairs of tokens instead of features."""
GROUPS = tuple(FEATURES)
"""The groups of features, in the order in which they are added to a description."""


@dataclass(frozen=True)
class Inventory:
    """The categories of a sample: frequent tokens, bands of frequency for others, word classes by side, relations.

    `frequent` maps ids to categories, `counts` ids to their counts; `query_tags`, `key_tags` and `relations` number
    their names.
    """

    frequent: Mapping[int, int]
    counts: Mapping[int, int]
    query_tags: Mapping[str, int]
    key_tags: Mapping[str, int]
    relations: Mapping[str, int]

    @classmethod
    def of(cls, sentences: Sequence[tuple[Tokens, Tokens]]) -> Inventory:
        """The inventory of sentences, given the tokens of queries and of keys."""
        counts = Counter(number for _, keys in sentences for number in keys.ids[~keys.special].tolist())
        by_frequency = sorted(counts, key=lambda number: (-counts[number], number))[:FREQUENT]
        relations = (relation for _, keys in sentences for relation in keys.relation)
        return cls(
            {number: rank for rank, number in enumerate(by_frequency)},
            counts,
            _number_names(tag for queries, _ in sentences for tag in queries.tag),
            _number_names(tag for _, keys in sentences for tag in keys.tag),
            _number_names(relations),
        )

    def groups(self) -> tuple[str, ...]:
        """The groups to fit: syntax only if there are relations."""
        return tuple(group for group in GROUPS if group != "syntax" or any(self.relations))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of categories of every feature."""
        tags = len(self.query_tags) * len(self.key_tags)
        return OTHER_SPECIAL + 2, 2, FREQUENT + len(BANDS) + 2, tags, len(IDENTITIES), 2 * len(self.relations) + 3

    def features(self, pairs: Pairs) -> Numbers:
        """The categories [f n s] of pairs, numbered through over all features."""
        first: Numbers = (~pairs.key.special & (np.arange(len(pairs.key)) == 0))[None].astype(np.int64)
        parts = (
            _position(pairs),
            first,
            self._token(pairs),
            self._classes(pairs),
            _identity(pairs),
            self._relation(pairs),
        )
        starts = np.cumsum((0, *self.sizes[:-1]))
        shape = (len(pairs.at), len(pairs.key))
        return np.stack([np.broadcast_to(part, shape) + start for part, start in zip(parts, starts, strict=True)])

    def _token(self, pairs: Pairs) -> Numbers:
        special = FREQUENT + len(BANDS) + 1

        def category(number: int, is_special: bool) -> int:
            if is_special:
                return special
            rank = self.frequent.get(number)
            return FREQUENT + int(np.digitize(self.counts.get(number, 0), BANDS)) if rank is None else rank

        entries = zip(pairs.key.ids.tolist(), pairs.key.special.tolist(), strict=True)
        return np.array([category(*entry) for entry in entries])[None]

    def _classes(self, pairs: Pairs) -> Numbers:
        queries = np.array([self.query_tags[tag] for tag in pairs.query.tag[pairs.at]])
        keys = np.array([self.key_tags[tag] for tag in pairs.key.tag])
        return queries[:, None] * len(self.key_tags) + keys[None]

    def _relation(self, pairs: Pairs) -> Numbers:
        """The relation of each pair: 0 none, 1 siblings, then relations to the head, then relations to a dependent."""
        if not pairs.same_side:
            return np.zeros((1, 1), dtype=np.int64)
        names, count = self.relations, len(self.relations)
        numbers = np.array([names[relation] for relation in pairs.key.relation])
        query_words, word, other = pairs.q("word"), pairs.k("word"), pairs.k("parent")
        comparable = (query_words >= 0) & (word >= 0) & (query_words != word)
        sibling = comparable & (pairs.q("parent") == other) & (other >= 0)
        down = comparable & (other == query_words)
        up = comparable & (pairs.q("parent") == word)
        relations = np.where(sibling, 1, 0)
        relations = np.where(down, 2 + count + numbers[None], relations)
        return np.where(up, 2 + numbers[pairs.at][:, None], relations)


def _number_names(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted(set(names)))}


def _position(pairs: Pairs) -> Numbers:
    """The offset in steps that grow with the distance; for special keys the place: first, last, other, the query."""
    offset = pairs.key_position - pairs.position
    size = np.abs(offset)
    step = np.where(size <= NEAR, size, NEAR + np.digitize(size, EDGES, right=True))
    middle = NEAR + len(EDGES)
    category = middle + np.sign(offset) * step
    special = pairs.key.special
    kinds = np.full(len(special), OTHER_SPECIAL)
    kinds[-1:] = LAST_SPECIAL
    kinds[:1] = FIRST_SPECIAL
    category = np.where(special[None], kinds[None], category)
    return np.where(special[None] & (offset == 0) & pairs.same_side, ITSELF, category)


def _identity(pairs: Pairs) -> Numbers:
    """The first of `IDENTITIES` that holds between a key and the query, neither being special."""
    plain = ~pairs.q("special") & ~pairs.k("special")
    lemma = pairs.q("lemma") == pairs.k("lemma")
    identity = np.where(plain & lemma & (pairs.q("lemma") != ""), 4, 0)
    if not pairs.same_side:
        return np.where(plain & (pairs.q("text") == pairs.k("text")), 3, identity)
    identity = np.where(plain & (pairs.q("ids") == pairs.k("ids")), 3, identity)
    identity = np.where(plain & (pairs.q("word") == pairs.k("word")) & (pairs.k("word") >= 0), 2, identity)
    return np.where(plain & (pairs.position == pairs.key_position), 1, identity)


GROUP_WORDS = {
    "position": "position",
    "token": "the key token",
    "classes": "classes of words",
    "lexical": "pairs of words",
    "syntax": "syntax",
}
"""The groups of a description in words."""
UNEXPLAINED = "only the sentence"
"""The leading explanation of a head if all groups together explain less than half."""
MIN_SHARE, MAX_PAIRS = 0.05, 3
"""Groups that add a smaller share are not named; the most pairs of words that are named."""


def describe_head(phrases: Sequence[str], row: Mapping[Any, Any], pairs: Sequence[tuple[str, str]]) -> str:
    """The sentence from a head's labels in words, its shares (a row of heads.csv) and pairs of a query and a key.

    Empty if there is nothing to say.
    """
    parts = [*phrases]
    shares, beyond = leading_shares(row), row.get("beyond_sinks", float("nan"))
    if shares:
        condition = "" if math.isnan(beyond) else f"beyond sinks ({beyond:.2f} of the weight) "
        parts.append(
            f"{condition}explained by " + ", ".join(f"{_in_words(group, row)} {share:.2f}" for group, share in shares)
        )
    if row.get("explained", float("nan")) < 0.5:
        parts.append(f"{min(1 - row['explained'], 1):.2f} only the sentence says")
    if pairs and any(group == "lexical" for group, _ in shares):
        parts.append("highest: " + ", ".join(f"“{query}” → “{key}”" for query, key in pairs[:MAX_PAIRS]))
    return "; ".join(parts)


def leading_shares(row: Mapping[Any, Any]) -> list[tuple[str, float]]:
    """The groups that add at least `MIN_SHARE` to the explanation of a head, with their shares, largest first."""
    shares = [(group, float(row.get(f"explained_{group}", 0.0))) for group in GROUPS]
    return sorted((part for part in shares if part[1] >= MIN_SHARE), key=lambda part: -part[1])


def leading_explanation(row: Mapping[Any, Any]) -> str:
    """The group that explains most of a head, in words; `UNEXPLAINED` below half in all, "" without shares."""
    explained = row.get("explained", float("nan"))
    if math.isnan(explained):
        return ""
    group = leading_group(row)
    return _in_words(group, row) if group else UNEXPLAINED


def _in_words(group: str, row: Mapping[Any, Any]) -> str:
    """A group in words: position includes first and special tokens, unless sinks were excluded."""
    includes_sinks = group == "position" and math.isnan(row.get("beyond_sinks", float("nan")))
    return "position and sinks" if includes_sinks else GROUP_WORDS[group]


def leading_group(row: Mapping[Any, Any]) -> str:
    """The group that explains most of a head; "" if all together explain less than half, or without shares."""
    leading = leading_shares(row) if row.get("explained", float("nan")) >= 0.5 else []
    return leading[0][0] if leading else ""


def describe_heads(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame], marks: Marks = "") -> list[str]:
    """A sentence for every row of heads.csv, from the tables `labels` and `token_pairs`.

    Of labels of a head with the same words only the first counts, in the order of the analyses: text comes before
    random tokens. `marks` are the vocabulary's marks of words.
    """
    phrases: dict[HeadId, dict[str, str]] = {}
    pairs: dict[HeadId, list[tuple[str, str]]] = {}
    for row in tables["labels"].to_dict("records") if "labels" in tables else ():
        if row["given"]:
            phrase = row["description"]
            phrases.setdefault(HeadId.of_row(row), {}).setdefault(phrase.partition(":")[0], phrase)
    for row in tables["token_pairs"].to_dict("records") if "token_pairs" in tables else ():
        if row["kind"] == "lexical":
            pairs.setdefault(HeadId.of_row(row), []).append(
                (display_subword(row["query"], marks), display_subword(row["key"], marks))
            )
    head_rows = ((HeadId.of_row(row), row) for row in heads.to_dict("records"))
    return [describe_head([*phrases.get(head, {}).values()], row, pairs.get(head, [])) for head, row in head_rows]
