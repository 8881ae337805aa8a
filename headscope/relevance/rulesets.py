"""The contract of a rule set, the relevance that it gives, and the registry. A new rule set is a new file here.

The relevance of a head is read at its context: the sum over its neurons before the output projection (Voita et al.
2019, appendix A; Achtibat et al. 2024). It is normalised over the heads of the layer for each explained quantity, and
averaged over these (`Relevance.normalize`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from headscope.attribution.objectives.base import predicting
from headscope.data.encoded import IGNORED, Batch
from headscope.errors import ConfigError, flag
from headscope.heads import SiteLayer
from headscope.registry import Registry

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint


@dataclass(frozen=True)
class Relevance:
    """The relevance of the heads of one (site, layer); `p` is the explained position, or 1 if their sum is explained.

    - `raw` [p b h]: signed sums over query positions and k.
    - `absolute` [p b h]: sums of the absolute values of the neurons.
    - `by_query` [p b h t]: signed sums over k.
    - `value_share`, `qk_share` [p b h]: the parts of `raw` that go on to values, and to queries and keys; None where a
      rule set does not separate them. They need not add up to `raw`: the softmax absorbs some (Achtibat et al. 2024),
      and plain gradients count some twice.
    """

    raw: Tensor
    absolute: Tensor
    by_query: Tensor
    value_share: Tensor | None = None
    qk_share: Tensor | None = None

    def normalize(self) -> Tensor:
        """|raw| divided by its sum over the heads of the layer [p b h]; NaN where all are zero.

        The paper divides signed sums by their total, which is the same for positive relevance (the alpha-beta rule of
        Voita et al.). In the other rule sets signed sums can cancel to a total near zero; absolute values say how much
        a head matters, not in which direction.
        """
        size = self.raw.abs()
        return size / size.sum(dim=-1, keepdim=True)


def join_relevance(parts: list[Relevance]) -> Relevance:
    """The relevance of several parts with different explained positions, concatenated along `p`."""

    def concatenate(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if any(tensor is None for tensor in tensors) else torch.cat(tensors)

    return Relevance(*(concatenate(field.name) for field in fields(Relevance)))


Target = Literal["top1", "reference", "contrastive"]
Steps = Literal["sum", "each"]


@dataclass(frozen=True)
class Explanation:
    """The relevance at every (site, layer) for one batch.

    `counts` [p b] is the number of predictions of sentence b that are explained at p: one or none, or, where `p` has
    size 1, all of them together. `values` [p b] are the explained values.
    """

    relevance: dict[SiteLayer, Relevance]
    counts: Tensor
    values: Tensor


def explained_quantity(checkpoint: Checkpoint, *, has_target: bool, target: Target) -> str:
    """The quantity to explain: the target, or "representation" for models that predict nothing.

    ConfigError for a target that the model or the text does not have.
    """
    if checkpoint.predicts == "nothing" or (checkpoint.two_sided and not has_target):
        if target != "top1":
            raise ConfigError(
                f"{flag('target_token', target)} is about predicted tokens, and there are none here; leave it out: "
                "the mean-pooled final state is explained"
            )
        return "representation"
    if checkpoint.label_names and target == "reference":
        raise ConfigError(f"{flag('target_token', 'reference')}: the text says no class; choose top1 or contrastive")
    return target


def explained_output(checkpoint: Checkpoint, batch: Batch, target: Target) -> tuple[Tensor, str]:
    """The output of one pass (logits [b t V], class scores [b V] or states [b t d]) and the quantity to explain."""
    quantity = explained_quantity(checkpoint, has_target=batch.target is not None, target=target)
    if quantity == "reference" and checkpoint.decodes and batch.labels is None:
        raise ConfigError("the target is the reference, and the batch was read without labels; read it with labels")
    if quantity == "representation":
        return checkpoint.states(batch), quantity
    logits = checkpoint.logits(batch)
    return logits[:, 0] if checkpoint.predicts == "classes" else logits, quantity


def explained_units(checkpoint: Checkpoint, batch: Batch, logits: Tensor, quantity: str) -> tuple[Tensor, Tensor]:
    """The ids whose logits [b p V] are explained, and a mask of explained positions: [b p] each."""
    likeliest = logits.detach().argmax(dim=-1)
    if checkpoint.predicts == "classes":
        return likeliest, torch.ones_like(likeliest, dtype=torch.bool)
    side, is_explained = predicting(batch, decodes=checkpoint.decodes)
    if quantity != "reference":
        return likeliest, is_explained
    if not checkpoint.decodes:
        return side.ids, is_explained
    assert batch.labels is not None
    return batch.labels.clamp(min=0), is_explained & (batch.labels != IGNORED)


class RuleSet(ABC):
    """Propagation rules from an output back to every head.

    `linear`: the relevance of a sum is the sum of relevances, so one backward pass can explain all positions of a text.
    `steps` is the default: one pass for the "sum" of positions, or for "each".
    """

    name: str
    summary: str
    linear: ClassVar[bool] = True
    steps: ClassVar[Steps] = "sum"

    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        """Why the rule set does not apply to a checkpoint, None if it does."""
        return None

    @abstractmethod
    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """The relevance of heads for the target, at each position or for their sum."""


RULE_SETS: Registry[RuleSet] = Registry("rule set", package="headscope.relevance", group="headscope.rule_sets")
register = RULE_SETS.add
