"""Log-linear models of attention: p(k|q) ∝ exp(Σ_f θ_f[φ_f(q, k)] + (E[q] U)·(E[k] V)), fitted to weights.

Axes: b sentences of a block, n sampled queries of each, s keys, h heads, f features, r rank, p embedding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

HISTORY, SHRINK, ARMIJO = 8, 0.3, 1e-4  # steps that L-BFGS keeps, factor of a rejected step, sufficient decrease

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Parameters [d h] → losses [h] to minimise, their gradient [d h], and watched losses [h] (early stopping)."""


@dataclass
class _Memory:
    """The memory of L-BFGS: the last steps and changes of the gradient [d h]; a pair without curvature has weight 0."""

    scale: Tensor
    pairs: deque[tuple[Tensor, Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    gamma: Tensor | None = None

    def add(self, step: Tensor, change: Tensor, was_accepted: Tensor) -> None:
        curvature = (step * change).sum(dim=0)  # [h]
        usable = was_accepted & (curvature > 1e-12)
        weight = torch.where(usable, 1 / curvature.clamp(min=1e-12), 0.0)
        self.pairs.append((step, change, weight))
        size = (change * change * self.scale).sum(dim=0)
        gamma = torch.ones_like(size) if self.gamma is None else self.gamma
        self.gamma = torch.where(usable, curvature / size.clamp(min=1e-12), gamma)

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian times the gradient [d h] (Nocedal & Wright 2006, algorithm 7.4)."""
        q, alphas = gradient.clone(), []
        for step, change, weight in reversed(self.pairs):
            alphas.append(weight * (step * q).sum(dim=0))
            q.sub_(change * alphas[-1])
        q.mul_(self.scale if self.gamma is None else self.scale * self.gamma)
        for (step, change, weight), alpha in zip(self.pairs, reversed(alphas), strict=True):
            q.add_(step * (alpha - weight * (change * q).sum(dim=0)))
        return q.neg_()


def minimise(evaluate: Evaluate, start: Tensor, *, scale: Tensor, steps: int) -> Tensor:
    """Minimise by L-BFGS; return the parameters [d h] with the least watched losses of all steps.

    Every column is a problem of its own: if its step does not lower the loss enough (Armijo), it tries a shorter one
    next while the other columns go on, so that each iteration costs one evaluation. `scale` [d 1] is a first guess of
    the inverse Hessian's diagonal. The start counts as a step, so no watched loss ends above its first value.
    """
    at = start
    loss, gradient, watched_loss = evaluate(at)
    best, least_loss = at.clone(), watched_loss
    memory, length = _Memory(scale), torch.ones_like(loss)
    direction = memory.direction(gradient)
    slope = (gradient * direction).sum(dim=0)
    for _ in range(steps):
        trial = at + direction * length
        new_loss, new_gradient, new_watched = evaluate(trial)
        is_accepted = new_loss <= loss + ARMIJO * length * slope  # [h]; not where a loss is NaN
        step, change = torch.where(is_accepted, trial - at, 0.0), torch.where(is_accepted, new_gradient - gradient, 0.0)
        at, gradient = torch.where(is_accepted, trial, at), torch.where(is_accepted, new_gradient, gradient)
        loss = torch.where(is_accepted, new_loss, loss)
        better = is_accepted & (new_watched < least_loss)
        best, least_loss = torch.where(better, at, best), torch.where(better, new_watched, least_loss)
        memory.add(step, change, is_accepted)
        direction = torch.where(is_accepted, memory.direction(gradient), direction)
        slope = (gradient * direction).sum(dim=0)
        uphill = slope >= 0
        direction = torch.where(uphill, -gradient * scale, direction)
        slope = torch.where(uphill, (gradient * direction).sum(dim=0), slope)
        length = torch.where(is_accepted, 1.0, length * SHRINK)
    return best


FAR_BELOW = -1e9
RIDGE = 1e-4
PAIR_RIDGES = (1e-4, 1e-5)
"""Ridges of pairs of words, tried one after the other; the watched sentences decide where to stop."""
RANK, STEPS = 16, 25  # rank of pairs of words, steps of a fit
PAIR_SCALE = 30.0  # a first guess of the inverse Hessian of U and V


PIECE, MIN_ROWS = 2**19, 16
"""Weights that a computation takes at a time, and the fewest rows of a sentence that it takes."""

Tables = tuple[Tensor, Tensor]
"""A row for each token as a query [v …] and as a key [v …], such as static embeddings [v p]."""


@dataclass(frozen=True)
class Block:
    """Sampled rows of some sentences of about the same length.

    `weights` [b n s h]. `visible` [b n s], all False in padding rows. `features` [f b n s]: numbers of categories,
    which are distinct over all features. `queries` [b n] and `keys` [b s]: rows of the tables of embeddings. `mass`
    [b n 1] or [b n h]: the sum of each row's weights, by which the row counts: 1, less where some keys are left out, 0
    in padding rows. `sentences` [b]: their numbers in the corpus.
    """

    weights: Tensor
    visible: Tensor
    features: Tensor
    queries: Tensor
    keys: Tensor
    mass: Tensor
    sentences: Tensor

    @property
    def even(self) -> Tensor:
        """The entropy of even weights, summed over the rows of each sentence [b 1] or [b h]."""
        return (self.visible.sum(-1).clamp(min=1).to(self.weights.dtype).log()[..., None] * self.mass).sum(1)

    @property
    def entropy(self) -> Tensor:
        """The entropies of the rows of each sentence, summed [b h]."""
        terms, total = (torch.special.xlogy(part, part) for part in (self.weights, self.mass))
        return total.sum(dim=1) - terms.sum(dim=(1, 2))

    def pieces(self) -> Iterator[tuple[slice, Block]]:
        """Pieces of the block, small enough for the cache of a processor, each with its slice of sentences."""
        b, n, s, h = self.weights.shape
        lines, rows = max(1, PIECE // (n * s * h)), max(MIN_ROWS, PIECE // (s * h))
        for line, row in product(range(0, b, lines), range(0, n, rows)):
            yield slice(line, line + lines), self.part(slice(line, line + lines), slice(row, row + rows))

    def part(self, lines: slice | Tensor, rows: slice = slice(None)) -> Block:
        """Some rows of some sentences."""
        cut = {name: getattr(self, name)[lines, rows] for name in ("weights", "visible", "queries", "mass")}
        return Block(
            **cut, features=self.features[:, lines, rows], keys=self.keys[lines], sentences=self.sentences[lines]
        )


@dataclass(frozen=True)
class Description:
    """Parameters of all heads: `theta` [c h] by category, and `pairs`: U [p h r], V [q h r]; None without pairs."""

    theta: Tensor
    pairs: tuple[Tensor, Tensor] | None = None

    def project(self, tables: Tables) -> Tables | None:
        """E U and E V [v h r] of all tokens, from the embeddings of queries and of keys; None without pairs."""
        if self.pairs is None:
            return None
        first, second = (
            (table @ part.flatten(1)).view(-1, *part.shape[1:]) for table, part in zip(tables, self.pairs, strict=True)
        )
        return first, second

    def log_probabilities(self, block: Block, features: Sequence[int], token_vectors: Tables | None) -> Tensor:
        """ln p [b n s h] from some features and from pairs (`token_vectors`); hidden keys have a very low one."""
        logits = torch.zeros((), dtype=self.theta.dtype, device=self.theta.device)
        for feature in features:
            logits = logits + torch.nn.functional.embedding(block.features[feature], self.theta)
        if token_vectors is not None:
            queries, keys = _of_block(block, token_vectors)
            logits = logits + (queries @ keys.transpose(-1, -2)).permute(0, 2, 3, 1)  # [b h n s]
        return logits.masked_fill(~block.visible[..., None], FAR_BELOW).log_softmax(dim=2)

    def cross_entropy(self, block: Block, features: Sequence[int], token_vectors: Tables | None) -> Tensor:
        """−Σ w ln p over the rows of each sentence [b h]."""
        return -(block.weights * self.log_probabilities(block, features, token_vectors)).sum(dim=(1, 2))

    def flat(self) -> Tensor:
        """All parameters as [d h]."""
        parts = [] if self.pairs is None else [part.permute(0, 2, 1).flatten(0, 1) for part in self.pairs]
        return torch.cat([self.theta, *parts])

    def like(self, flat: Tensor) -> Description:
        """A description of the same shape from `flat` parameters."""
        theta, pair_parameters = flat.split([len(self.theta), len(flat) - len(self.theta)])
        if self.pairs is None:
            return Description(theta)
        heads, rank = self.pairs[0].shape[1:]
        parts = pair_parameters.split(
            [len(part) * rank for part in self.pairs]
        )  # widths of queries and keys may differ
        first, second = (part.view(-1, rank, heads).permute(0, 2, 1) for part in parts)
        return Description(theta, (first, second))


def _of_block(block: Block, token_vectors: Tables) -> tuple[Tensor, Tensor]:
    """E[q] U [b h n r] and E[k] V [b h s r]."""
    queries, keys = token_vectors[0][block.queries], token_vectors[1][block.keys]
    return queries.transpose(1, 2), keys.transpose(1, 2)


@dataclass(frozen=True)
class FitData:
    """Blocks to fit to, with the `features` to use; `rows` [b] mark the sentences of each block that are fitted.

    The other sentences are watched. `tables` are the embeddings of query and key tokens.
    """

    blocks: Sequence[Block]
    features: Sequence[int]
    rows: Sequence[Tensor]
    tables: Tables

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        return zip(self.blocks, self.rows, strict=True)

    @property
    def count(self) -> Tensor:
        """The total mass of the fitted rows [1] or [h], at least 1."""
        return (
            torch.stack([block.mass[is_chosen].sum(dim=(0, 1)) for block, is_chosen in self]).sum(dim=0).clamp(min=1.0)
        )


def loss_and_gradient(description: Description, data: FitData) -> tuple[Tensor, Tensor, Tensor]:
    """Σ −w ln p of the fitted rows [h], its gradient [d h], and Σ −w ln p of the watched rows [h]."""
    of_theta, token_vectors = torch.zeros_like(description.theta), description.project(data.tables)
    of_tokens = None if token_vectors is None else [torch.zeros_like(part) for part in token_vectors]  # [v h r]
    loss = torch.zeros(description.theta.shape[1], dtype=of_theta.dtype, device=of_theta.device)
    watched_loss = loss.clone()
    pieces = ((piece, is_chosen[lines]) for block, is_chosen in data for lines, piece in block.pieces())
    for block, is_chosen in pieces:
        logs = description.log_probabilities(block, data.features, token_vectors)
        losses = -(block.weights * logs).sum(dim=(1, 2))  # [b h]
        loss += (losses * is_chosen[:, None]).sum(dim=0)
        watched_loss += (losses * ~is_chosen[:, None]).sum(dim=0)
        error = logs.exp_().mul_(block.mass[:, :, None]).sub_(block.weights)  # [b n s h]
        error *= is_chosen[:, None, None, None]
        flat = error.flatten(0, 2)
        for feature in data.features:
            of_theta.index_add_(0, block.features[feature].flatten(), flat)
        if token_vectors is not None and of_tokens is not None:
            queries, keys = _of_block(block, token_vectors)
            by_head = error.permute(0, 3, 1, 2)  # [b h n s]
            changes = (by_head @ keys, by_head.transpose(-1, -2) @ queries)  # [b h n r], [b h s r]
            for sums, tokens, change in zip(of_tokens, (block.queries, block.keys), changes, strict=True):
                sums.index_add_(0, tokens.flatten(), change.transpose(1, 2).flatten(0, 1))
    if of_tokens is None:
        return loss, of_theta, watched_loss
    first, second = (
        (table.T @ part.flatten(1)).view(-1, *part.shape[1:])
        for table, part in zip(data.tables, of_tokens, strict=True)
    )
    return loss, Description(of_theta, (first, second)).flat(), watched_loss


def fit_description(
    start: Description, data: FitData, *, steps: int = STEPS, pair_ridge: float = PAIR_RIDGES[0]
) -> Description:
    """Minimise the mean cross-entropy of the fitted rows plus a ridge, with early stopping by the watched rows.

    Without watched rows the step with the least loss is kept.
    """
    number, flat = data.count, start.flat()
    watching = any(bool((~is_chosen).any()) for is_chosen in data.rows)
    penalty = torch.full_like(flat[:, :1], pair_ridge)
    penalty[: len(start.theta)] = RIDGE

    def evaluate(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, gradient, watched_loss = loss_and_gradient(start.like(parameters), data)
        ridge = 0.5 * (penalty * parameters.square()).sum(dim=0)
        value = loss / number + ridge
        return value, gradient / number + penalty * parameters, watched_loss if watching else value

    scale = torch.full_like(penalty, PAIR_SCALE)
    scale[: len(start.theta)] = 1 / (_even_mass(start.theta, data) + 1e-2)
    return start.like(minimise(evaluate, flat, scale=scale, steps=steps))


def _even_mass(theta: Tensor, data: FitData) -> Tensor:
    """The even weight on keys of each category [c 1], a mean over the fitted rows."""
    mass, number = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device), 0.0
    for block, is_chosen in data:
        even = block.visible / block.visible.sum(-1, keepdim=True).clamp(min=1) * is_chosen[:, None, None]
        number += float(block.visible[is_chosen].any(dim=-1).sum())
        for feature in data.features:
            mass.index_add_(0, block.features[feature].flatten(), even.flatten().to(mass.dtype))
    return mass[:, None] / max(number, 1.0)


def with_pairs(description: Description, data: FitData, *, rank: int = RANK) -> Description:
    """A description with a part for pairs of tokens, started in the direction of steepest descent.

    U and V are the leading singular vectors of the gradient with respect to U Vᵀ at zero. No random numbers are drawn,
    so two heads with the same weights get the same description.
    """
    heads, (queries, keys) = description.theta.shape[1], data.tables
    onto = torch.zeros(len(queries), heads, keys.shape[1], dtype=description.theta.dtype, device=queries.device)
    for block, is_chosen in data:
        even = description.log_probabilities(block, data.features, None).exp_().mul_(block.mass[:, :, None])
        error = (block.weights - even) * is_chosen[:, None, None, None]
        expected_keys = error.transpose(-1, -2) @ keys[block.keys][:, None]  # [b n h s] [b 1 s p]
        onto.index_add_(0, block.queries.flatten(), expected_keys.flatten(0, 1))
    slope = torch.einsum("vp,vhq->hpq", queries, onto) / data.count[:, None, None]
    left, size, right = torch.linalg.svd(slope, full_matrices=False)
    rank = min(rank, size.shape[1])
    size = (size[:, :rank] / size[:, :1].clamp(min=1e-12)).sqrt()[:, None]  # [h 1 r]
    first, second = left[..., :rank] * size, right[:, :rank].transpose(-1, -2) * size  # [h p r]
    return Description(description.theta, (first.transpose(0, 1), second.transpose(0, 1)))
