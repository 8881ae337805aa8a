"""Key/value groups that share the mean of their projections (grouped-query attention; Ainslie et al. 2023, §2.1)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.formats.huggingface.head_parts import HeadParts, head_parts, unknown_part
from headscope.formats.huggingface.shrink import GROUPS, SHARING
from headscope.heads import Site
from headscope.model.discovery import attention_kind, find_attention
from headscope.model.projections import output_axis
from headscope.model.removal_plan import RemovalPlan

Member = tuple[Tensor, int, Tensor]
"""A parameter, an axis of it, and indices along that which get the mean of those of other members."""


def pooled_model(model: nn.Module, plan: RemovalPlan) -> nn.Module:
    """A copy of the same size in which every group has the mean key and value projection of its set.

    The mean is of weights and biases before rotary positions and norms; other weights are shared with the model.
    ConfigError for classes whose heads have keys of their own, and where the rows of a group cannot be told.
    """
    _refuse_ungrouped(model, plan)
    means = _means(model, plan)
    changed = {id(parameter) for members in means for parameter, _, _ in members}
    tensors = (*model.parameters(), *model.buffers())
    copies: dict[int, Any] = {id(values): values for values in tensors if id(values) not in changed}
    pooled = copy.deepcopy(model, copies)
    for members in means:
        _pool([(copies[id(parameter)], axis, rows.to(parameter.device)) for parameter, axis, rows in members])
    return pooled


def _means(model: nn.Module, plan: RemovalPlan) -> list[list[Member]]:
    owners = {
        id(weight): (module, name)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    parts, means = head_parts(model), list[list[Member]]()
    for (site, layer), sets in plan.merged.items():
        of_layer = parts.get((site, layer))
        if of_layer is None or of_layer.unknown:
            raise unknown_part(of_layer, site, layer)
        _check(of_layer, plan, (site, layer))
        for slices in (part for side in (of_layer.key, of_layer.value) for part in (*side.rows, *side.entries)):
            owner, name = owners[id(slices.weight)]
            of_outputs = name == "weight" and slices.axis == output_axis(owner)
            bias = getattr(owner, "bias", None) if of_outputs else None
            for members in sets:
                units = [slices.units[group] for group in members]
                means.append([(slices.weight, slices.axis, rows) for rows in units])
                if isinstance(bias, nn.Parameter):
                    means.append([(bias, 0, rows) for rows in units])
        for side in (of_layer.key, of_layer.value):
            for members in sets if side.own else ():
                for alike in zip(*(side.own[group] for group in members), strict=True):
                    means.append([(parameter, 0, torch.arange(len(parameter))) for parameter in alike])
    return means


def _check(parts: HeadParts, plan: RemovalPlan, place: tuple[Site, int]) -> None:
    """ConfigError where groups are more than rows of projections, or other layers would merge them otherwise."""
    named = f"{place[0]}.{place[1]}"
    if parts.key.selected is not None or parts.value.selected is not None:
        raise ConfigError(f"--merge-kv: a norm over all heads makes the keys or values of {named}, so none has a mean")
    if any(plan.merged.get(reader) != plan.merged[place] for reader in parts.readers):
        others = ", ".join(f"{site}.{layer}" for site, layer in parts.readers)
        raise ConfigError(
            f"--merge-kv: the keys and values of {named} are those of {others} too; give one number, and no "
            "--merge-by or --allocate measured"
        )


@torch.no_grad()
def _pool(members: Sequence[Member]) -> None:
    """Put the mean of all members, in float64, in the place of each."""
    mean = torch.stack([values.index_select(axis, rows).double() for values, axis, rows in members]).mean(dim=0)
    for values, axis, rows in members:
        values.index_copy_(axis, rows, mean.to(values.dtype))


def _refuse_ungrouped(model: nn.Module, plan: RemovalPlan) -> None:
    for site in find_attention(model).order:
        module = model.get_submodule(site.name)
        grouped = any(hasattr(module, name) for name in (*GROUPS, *SHARING))
        if (site.site, site.layer) in plan.merged and not grouped:
            raise ConfigError(
                f"--merge-kv: in model type {attention_kind(model)!r} every head has keys and values of its own, and "
                "its class has no place for fewer; models with num_key_value_heads in their config have"
            )
