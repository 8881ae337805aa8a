"""Where Voita's rules start: 1.0 at single outputs, or each neuron's share of a sentence vector's length."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.predictions import predicting
from headscope.data.encoded import IGNORED, Batch
from headscope.errors import ConfigError
from headscope.evaluation.states import mean_pooled
from headscope.formats.base import Checkpoint
from headscope.relevance.rulesets import Target, explained_quantity
from headscope.relevance.voita.rules import OutputUnits, rule_dtype


def quantity_of(checkpoint: Checkpoint, batch: Batch, target: Target) -> str:
    """What is explained: "top1" or "reference" of words, "classes", or "representation".

    ConfigError for a target that the rules or the checkpoint do not support.
    """
    if target not in ("top1", "reference"):
        raise ConfigError(
            f"target {target!r} does not go with voita, which starts from 1.0 at one output; choose top1 or "
            "reference, or a gradient-based rule set"
        )
    quantity = explained_quantity(checkpoint, has_target=batch.target is not None, target=target)
    if quantity == "reference" and checkpoint.decodes and batch.labels is None:
        raise ConfigError("the reference is to be explained, and the batch was read without labels")
    return "classes" if quantity == "top1" and checkpoint.predicts == "classes" else quantity


def model_output(checkpoint: Checkpoint, batch: Batch, quantity: str) -> Tensor:
    """One forward pass: logits [b t V], class scores [b classes] or final states [b t d]."""
    if quantity == "representation":
        return checkpoint.states(batch)
    return checkpoint.class_scores(batch) if quantity == "classes" else checkpoint.logits(batch)


def starting_relevance(checkpoint: Checkpoint, batch: Batch, output: Tensor, quantity: str) -> Tensor | OutputUnits:
    """The relevance that an output starts with."""
    if quantity == "representation":
        return projection_shares(output, (batch.source if batch.target is None else batch.target).real)
    if quantity == "classes":
        return torch.nn.functional.one_hot(output.argmax(dim=-1), output.shape[-1])[None].to(rule_dtype(output.dtype))
    side, counted = predicting(batch, decodes=checkpoint.decodes)
    classes = output.argmax(dim=-1)
    if quantity == "reference":
        classes = side.ids
        if checkpoint.decodes:
            assert batch.labels is not None
            classes, counted = batch.labels.clamp(min=0), counted & (batch.labels != IGNORED)
    return output_units(classes.to(output.device), counted.to(output.device), rule_dtype(output.dtype))


def output_units(classes: Tensor, counted: Tensor, dtype: torch.dtype) -> OutputUnits:
    """1.0 at unit `classes` [b t] of every counted position [b t]; position p is explained at p."""
    tokens = torch.arange(classes.shape[1], device=classes.device)[:, None].expand(-1, len(classes))
    return OutputUnits(tokens, torch.where(counted, classes, 0).T, counted.T.to(dtype))


def projection_shares(states: Tensor, real: Tensor) -> Tensor:
    """What each neuron [1 b t d] contributes to the projection of the mean state on its own direction."""
    states = states.to(rule_dtype(states.dtype))
    direction = torch.nn.functional.normalize(mean_pooled(states, real), dim=-1)  # [b d]
    weights = real.to(states.dtype) / real.sum(dim=-1, keepdim=True)  # [b t]
    return (states * direction[:, None] * weights[..., None])[None]
