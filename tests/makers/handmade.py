"""Heads made by hand: sentences with trees, and weights that follow a rule exactly."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headscope.description.sample import SampleBlocks, SampledRows, SiteSample, make_blocks
from headscope.description.tokens import Pairs, Tokens

Rule = Callable[[Tokens, int], dict[int, float]]
"""Weights on keys by position, of the query at a position; what is missing to 1 goes to the first token."""
TAGS = ("NOUN", "VERB", "DET", "ADJ", "PUNCT")
START, END = 101, 102


def sentence(draw: np.random.Generator, *, min_words: int = 5, max_words: int = 13) -> Tokens:
    """A start, words, an end; each word but the root depends on another one."""
    n = int(draw.integers(min_words, max_words))
    words = draw.integers(0, 29, size=n)
    ids = np.array([START, *words, END])
    order = draw.permutation(n)
    parent, relation = np.full(n, -1), draw.choice(["nsubj", "obj", "det"], size=n).astype(object)
    for rank in range(1, n):
        parent[order[rank]] = order[draw.integers(rank)]
    relation[order[0]] = ""
    ends = np.array([True, *[False] * n, True])
    return Tokens(
        ids,
        ends,
        np.array(["[S]", *(f"w{word}" for word in words), "[E]"], dtype=object),
        ~ends,
        np.array([-1, *range(n), -1]),
        np.array(["special", *(TAGS[word % 5] for word in words), "special"], dtype=object),
        np.array(["", *(f"w{word}" for word in words), ""], dtype=object),
        np.array([-1, *parent, -1]),
        np.array(["", *relation, ""], dtype=object),
        np.zeros(n + 2, dtype=np.int64),
        True,
    )


def sample(rules: Sequence[Rule], *, sentences: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> SiteSample:
    """Every word of so many sentences as a query, a head for each rule, all in layer 0."""
    draw, result = np.random.default_rng(seed), SiteSample()
    for number in range(sentences):
        tokens = sentence(draw)
        positions = np.flatnonzero(~tokens.special)
        weights = torch.zeros(len(positions), len(tokens), len(rules), dtype=dtype)
        for head, rule in enumerate(rules):
            for row, position in enumerate(positions.tolist()):
                key_weights = rule(tokens, position)
                for key, weight in key_weights.items():
                    weights[row, key, head] += weight
                weights[row, 0, head] += 1 - sum(key_weights.values())
        result.tokens[number] = Pairs(tokens, tokens, positions)
        result.add(0, number, SampledRows(weights, torch.ones(len(positions), len(tokens), dtype=torch.bool)))
    return result


def build_blocks(site_sample: SiteSample, *, width: int = 17, exclude_sinks: bool = False) -> SampleBlocks:
    """Blocks of a sample, with embeddings that are drawn."""
    table = torch.nn.functional.normalize(torch.randn(103, width, generator=torch.Generator().manual_seed(1)), dim=1)

    def embeddings(ids: np.ndarray) -> Tensor:
        return table[torch.from_numpy(ids)]

    return make_blocks(site_sample, [0], (embeddings, embeddings), exclude_sinks=exclude_sinks)


def before(tokens: Tokens, position: int) -> dict[int, float]:
    return {position - 1: 1.0}


def sink(tokens: Tokens, position: int) -> dict[int, float]:
    """All on the first token but what a softmax cannot put to nothing."""
    return dict.fromkeys(range(1, len(tokens)), 1e-20)


def mixture(tokens: Tokens, position: int) -> dict[int, float]:
    return {position - 1: 0.6}


def subject(tokens: Tokens, position: int) -> dict[int, float]:
    """All weight on the word's subjects, where it has any."""
    is_subject = (tokens.parent == tokens.word[position]) & (tokens.relation == "nsubj")
    keys = np.flatnonzero(is_subject)
    return {int(key): 1 / len(keys) for key in keys}


def same_token(tokens: Tokens, position: int) -> dict[int, float]:
    """All weight on other occurrences of the token, where there are any."""
    keys = [key for key in np.flatnonzero(tokens.ids == tokens.ids[position]).tolist() if key != position]
    return {key: 1 / len(keys) for key in keys}


def parent(tokens: Tokens, position: int) -> dict[int, float]:
    """All weight on the word that the word depends on."""
    keys = np.flatnonzero(tokens.word == tokens.parent[position])
    return {int(keys[0]): 1.0} if tokens.parent[position] >= 0 else {}


def even(tokens: Tokens, position: int) -> dict[int, float]:
    return dict.fromkeys(range(len(tokens)), 1 / len(tokens))
