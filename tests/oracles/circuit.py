"""A model whose circuit is written down: a previous-token head feeds an induction head, and nothing else does anything.

Attention only (the feed-forward layers write zeros), two layers of two heads. The stream has orthonormal codes,
orthogonal to the vector of ones (so that norms subtract nothing): one for every token, for every token as "the one
before", and for every position. Head 0.0 looks at the position before and writes its token as "the one before"; head
1.0 looks for its own token among those and writes the token that stands there. The other two look at everything alike
and write noise.
"""

import torch
from torch import Tensor

from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from tests.makers import wrappers

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
WORDS = tuple(f"w{number}" for number in range(25))
PIECES = SPECIAL + WORDS  # 29
POSITIONS = 61
D = 1 + 2 * len(PIECES) + POSITIONS
SHARP, LOUD, NOISE = 40.0, 4.0, 0.05
PREVIOUS, INDUCTION = (0, 0), (1, 0)


def codes(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal rows, orthogonal to ones: tokens [V d], tokens before [V d], positions [P d]."""
    torch.manual_seed(seed)
    start = torch.cat([torch.ones(D, 1), torch.randn(D, D - 1)], dim=1).double()
    basis = torch.linalg.qr(start).Q.T[1:]
    return basis[: len(PIECES)], basis[len(PIECES) : 2 * len(PIECES)], basis[2 * len(PIECES) :]


def model(*, orders: bool = False) -> Transformer:
    """The circuit as a native Transformer in float64.

    With `orders` the other two heads do something too: 0.1 writes the negative of the token it looks at, 1.1 the next
    one of the vocabulary.
    """
    stack = StackConfig(
        vocabulary=len(PIECES),
        d_model=D,
        d_ffn=1,
        d_head=POSITIONS,
        norm="pre",
        final_norm=True,
        norm_epsilon=1e-12,
        positions="learned",
        max_positions=POSITIONS,
        scale_embedding=False,
        self_heads=(2, 2),
    )
    transformer = Transformer(TransformerConfig(decoder=stack, tie_output=True)).double().eval()
    tokens, before, positions = codes()
    sigmas = [(2 / D) ** 0.5, (3 / D) ** 0.5]  # of states that are the sum of two or three codes
    state = {name: torch.zeros_like(value) for name, value in transformer.state_dict().items()}
    for name in state:
        if name.endswith("norm.weight"):
            state[name].fill_(1.0)
    state["decoder.embeddings.tokens.weight"] = state["output.weight"] = tokens
    state["decoder.embeddings.positions.weight"] = positions
    noise = torch.randn(2, 2, POSITIONS, D).double() * NOISE / D**0.5
    size = SHARP * POSITIONS**0.5
    for layer, (query, key, value, output) in enumerate(
        [(positions[1:], positions[:-1], tokens, before), (tokens, before, tokens, LOUD * tokens)]
    ):
        name = f"decoder.layers.{layer}.self_attention"
        for part, rows, scale in (("query", query, size), ("key", key, 1.0), ("value", value, 1.0)):
            state[f"{name}.{part}.weight"][: len(rows)] = rows * sigmas[layer] * scale
        state[f"{name}.output.weight"][:, : len(output)] = output.T
        state[f"{name}.value.weight"][POSITIONS:] = noise[layer, 0]
        state[f"{name}.output.weight"][:, POSITIONS:] = noise[layer, 1].T
        if orders:
            last = slice(POSITIONS, POSITIONS + len(PIECES))
            state[f"{name}.value.weight"][last] += tokens
            state[f"{name}.output.weight"][:, last] += (tokens.roll(-1, 0) if layer else -tokens).T
    transformer.load_state_dict(state)
    return transformer


def checkpoint(*, orders: bool = False) -> TransformerCheckpoint:
    """The model with a vocabulary of words."""
    words = Vocabulary(PIECES, Splitter("words"), start=0, end=2, unknown=3, pad=1, special=frozenset({0, 1, 2}))
    return wrappers.native(model(orders=orders), target=words)
