"""A transformers model with fewer heads: rows and columns are cut out, and the sizes that its code reads are changed.

The sizes that attention code reads are a short list of names; `pruning.removal.verify` catches other ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError, flag
from headscope.formats.huggingface.narrowing import ENTRIES, GROUPS, HEADS, IF_READ, SHARING, WIDTHS, narrow
from headscope.formats.huggingface.selfcontained import is_narrowed
from headscope.heads import Site, SiteLayer
from headscope.model.discovery import AttentionSite, attention_kind, base_of, find_attention
from headscope.model.head_parts import HeadParts, head_parts, unknown_part
from headscope.model.interface import is_linear
from headscope.model.projections import Slices, has_added_bias
from headscope.model.removal_plan import RemovalPlan, renumber_alignment
from headscope.model.stored_weights import copy_sharing_weights

OF_CONFIG = ("num_attention_heads", "num_key_value_heads")
PER_HEAD = ("sinks",)  # parameters [h] of an attention module
BIAS = "relative_attention_bias"  # an embedding [buckets, h]


def shrink_model(model: nn.Module, removal: RemovalPlan) -> nn.Module:
    """A copy of a transformers model without removed heads; `kept_heads` and `narrowed` of its config record them.

    Weights that stay whole share their memory with the model's: to train the copy, copy it first.
    """
    intact: Any = copy_sharing_weights(model)
    cuts = _Cuts(model, removal)
    narrow(intact, cuts.table)
    base = base_of(intact)
    with torch.no_grad():
        for name, (axis, indices) in cuts.keep.items():
            values = cuts.parameters[name]
            base.get_parameter(name).copy_(values.index_select(axis, indices.to(values.device)))
        for name, numbers in cuts.list_entries.items():
            for position, number in enumerate(numbers):
                for parameter, values in base.get_submodule(f"{name}.{position}").named_parameters():
                    values.data = cuts.parameters[f"{name}.{number}.{parameter}"]
    if len(cuts.parameters) > len(cuts.names):  # layers that are tied (Zamba2)
        intact.tie_weights()
    config = intact.config
    old_numbers = config.kept_heads if is_narrowed(config) else {}  # the original numbers, if it was pruned before
    kept_heads: dict[str, dict[str, list[int]]] = {}
    for (site, layer), heads in removal.kept.items():
        old = old_numbers.get(site.value, {}).get(str(layer))
        kept_heads.setdefault(site.value, {})[str(layer)] = [head if old is None else old[head] for head in heads]
    before = getattr(config, "narrowed", None) or {}
    config.kept_heads = kept_heads
    config.narrowed = {entry: {**before.get(entry, {}), **new} for entry, new in cuts.table.items()}
    renumber_alignment(intact, removal)
    result: nn.Module = intact.train(model.training)
    return result


def zeroed_model(model: nn.Module, removal: RemovalPlan) -> nn.Module:
    """A copy of the same size whose removed heads have zeros in their columns of the output projection."""
    copy_with_zeros = copy.deepcopy(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = head_parts(model)
    with torch.no_grad():
        for head in removal.removed:
            head_part = parts.get((head.site, head.layer))
            if head_part is None or head_part.output is None:
                raise unknown_part(head_part, head.site, head.layer)
            output = head_part.output
            weight = copy_with_zeros.get_parameter(names[id(output.weight)])
            weight.index_fill_(output.axis, output.units[head.head].to(weight.device), 0.0)
    return copy_with_zeros


Member = tuple[Tensor, int, Tensor]
"""A parameter, one of its axes, and indices along that axis; all members of a list get their mean."""


def pooled_model(model: nn.Module, plan: RemovalPlan) -> nn.Module:
    """A copy of the same size in which merged key/value groups share the mean of their key and value projections.

    The mean is of weights and biases before rotary positions and norms; other weights are shared with the model.
    ConfigError for classes in which every head has its own keys, and if the rows of a group cannot be identified.
    """
    for site in find_attention(model).order:
        module = model.get_submodule(site.name)
        has_groups = any(hasattr(module, name) for name in (*GROUPS, *SHARING))
        if (site.site, site.layer) in plan.merged and not has_groups:
            raise ConfigError(
                f"{flag.merge_kv}: in model type {attention_kind(model)!r} every head has its own keys and values, and "
                "its class has no place for fewer; models with num_key_value_heads in their config have"
            )
    means = _means(model, plan)
    changed_ids = {id(parameter) for members in means for parameter, _, _ in members}
    tensors = (*model.parameters(), *model.buffers())
    copies: dict[int, Any] = {id(values): values for values in tensors if id(values) not in changed_ids}
    copy_with_means = copy.deepcopy(model, copies)
    with torch.no_grad():
        for members in means:  # their mean, in float64, in the place of each
            group_rows = [(copies[id(parameter)], axis, rows.to(parameter.device)) for parameter, axis, rows in members]
            mean = torch.stack([part.index_select(axis, rows).double() for part, axis, rows in group_rows]).mean(dim=0)
            for part, axis, rows in group_rows:
                part.index_copy_(axis, rows, mean.to(part.dtype))
    return copy_with_means


def _means(model: nn.Module, plan: RemovalPlan) -> list[list[Member]]:
    linear = filter(is_linear, model.modules())
    biases = {id(part.weight): part.bias for part in linear if isinstance(part.bias, nn.Parameter)}
    parts, means = head_parts(model), list[list[Member]]()
    for (site, layer), sets in plan.merged.items():
        of_layer = parts.get((site, layer))
        if of_layer is None or of_layer.unknown:
            raise unknown_part(of_layer, site, layer)
        _check(of_layer, plan, (site, layer))
        sides = [of_layer.sides[name] for name in ("key", "value")]
        for slices in (part for side in sides for part in (*side.rows, *side.entries)):
            for members in sets:
                units = [slices.units[group] for group in members]
                means.append([(slices.weight, slices.axis, rows) for rows in units])
                if (bias := biases.get(id(slices.weight))) is not None:
                    means.append([(bias, 0, rows) for rows in units])
        for side in sides:
            for members in sets if side.own else ():
                for alike in zip(*(side.own[group] for group in members), strict=True):
                    means.append([(parameter, 0, torch.arange(len(parameter))) for parameter in alike])
    return means


def _check(parts: HeadParts, plan: RemovalPlan, site_layer: SiteLayer) -> None:
    """ConfigError if a norm spans all groups, or if other layers share the keys and would merge them differently."""
    layer_name = f"{site_layer[0]}.{site_layer[1]}"
    if any(parts.sides[name].norm_weights is not None for name in ("key", "value")):
        raise ConfigError(f"{flag.merge_kv}: a norm over all heads is in the keys or values of {layer_name}")
    if any(plan.merged.get(reader) != plan.merged[site_layer] for reader in parts.readers):
        reader_names = ", ".join(f"{site}.{layer}" for site, layer in parts.readers)
        advice = f"give one number, and no {flag.merge_by} or {flag.allocate} measured"
        raise ConfigError(f"{flag.merge_kv}: keys and values of {layer_name} are those of {reader_names} too; {advice}")


class _Cuts:
    """The changes that a removal makes to a model; none for layers that keep all their heads.

    `table` is for `narrow`; `keep` has, by parameter, an axis and the indices that stay, `list_entries`, by list of
    modules, the entries that stay.
    """

    def __init__(self, model: nn.Module, removal: RemovalPlan) -> None:
        base = base_of(model)
        self.removal = removal
        self.table: dict[str, dict[str, Any]] = {entry: {} for entry in ENTRIES}
        self.keep: dict[str, tuple[int, Tensor]] = {}
        self.list_entries: dict[str, list[int]] = {}
        self.modules: dict[str, Any] = dict(base.named_modules(remove_duplicate=False))
        self.parameters = {name: own.detach() for name, own in base.named_parameters(remove_duplicate=False)}
        self.names: dict[int, list[str]] = {}  # several where layers are tied
        for name, parameter in base.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        parts, calls = head_parts(model), find_attention(model).calls
        sites = {name: calls[id(module)] for name, module in base.named_modules() if id(module) in calls}
        for name, (attention_site, *_) in sites.items():
            site_layer = attention_site.site_layer
            if len(removal.kept[site_layer]) < attention_site.heads or site_layer in removal.merged:
                self._cut(name, attention_site, parts.get(site_layer))
        for site in Site:
            self._cut_position_bias(
                {name: removal.kept[first.site_layer] for name, (first, *_) in sites.items() if first.site is site}
            )
        biased_names = [name for name, module in base.named_modules() if has_added_bias(module)]
        self.table["added_biases"] = dict.fromkeys(biased_names, True)

    def _cut(self, name: str, attention_site: AttentionSite, parts: HeadParts | None) -> None:
        site, layer = attention_site.site_layer
        heads_kept, groups = self.removal.kept[site, layer], self.removal.groups[site, layer]
        if parts is None or parts.output is None or parts.unknown:
            raise unknown_part(parts, site, layer)
        if heads_kept:
            self._check_readers(attention_site, parts)
            self._cut_units(parts, heads_kept, groups, reorder=(site, layer) in self.removal.merged)
        else:
            self._empty_layer(name, parts, parts.output)
        module = self.modules[name]
        for parameter in PER_HEAD:
            if isinstance(getattr(module, parameter, None), nn.Parameter):
                self._keep(f"{name}.{parameter}", 0, list(heads_kept or (0,)))
        counts = max(len(heads_kept), 1), max(len(groups), 1)
        self.table["attributes"][name] = _attributes(module, attention_site, *counts)
        code = _code(type(module).forward)
        read = {name: count for name, count in zip(OF_CONFIG, counts, strict=True) if f"self.config.{name}" in code}
        if read:
            self.table["configs"][name] = read

    def _check_readers(self, attention_site: AttentionSite, parts: HeadParts) -> None:
        groups = self.removal.groups[attention_site.site_layer]
        if len(groups) == attention_site.groups:
            return
        readers = [f"{site}.{layer}" for site, layer in parts.readers if self.removal.groups[site, layer] != groups]
        if readers or parts.makes_mask:
            why = (
                "make the attention mask of its other heads"
                if parts.makes_mask
                else f"are those of {', '.join(readers)} too"
            )
            raise ConfigError(
                f"whole groups of {attention_site.site}.{attention_site.layer} cannot be removed, because their keys "
                f"and values {why}; remove as many heads of each group, or all heads of the layer ({flag.export} "
                "masked takes any)"
            )

    def _cut_units(
        self, parts: HeadParts, heads_kept: tuple[int, ...], groups: tuple[int, ...], *, reorder: bool
    ) -> None:
        """Remove rows of W_Q, W_K, W_V and their biases, and columns of W_O, of all units that are not kept.

        `reorder`: kept units are moved to the first positions, in the order of `heads_kept` and `groups`.
        """
        assert parts.output is not None
        staying = [(side, groups if name in ("key", "value") else heads_kept) for name, side in parts.sides.items()]
        of_units = [(slices, stays) for side, stays in staying for slices in (*side.rows, *side.entries)]
        # by parameter: an axis, and for each position on it the old index of what comes there (−1: nothing)
        sources: dict[str, tuple[int, Tensor]] = {}
        for slices, stays in (*of_units, (parts.output, heads_kept)):
            for name in self.names[id(slices.weight)]:
                size = self.parameters[name].shape[slices.axis]
                _, source = sources.setdefault(name, (slices.axis, torch.arange(size)))
                positions = range(len(stays)) if reorder else stays
                for position, unit in zip(positions, stays, strict=True):
                    source[slices.units[position].cpu()] = slices.units[unit].cpu()
                for position in {*range(len(slices.units))} - {*positions}:
                    source[slices.units[position].cpu()] = -1
        for name, (axis, source) in sources.items():
            self._keep(name, axis, source[source >= 0].tolist())
        for side, stays in staying:
            if side.own:
                self._pick(side.own, stays)
            if side.norm_weights is not None:  # behind a norm over all units those that stay are selected
                units = torch.cat([side.norm_weights.units[unit] for unit in stays]).tolist()
                self.table["selected"] |= dict.fromkeys(self._owners(side.norm_weights.weight), units)

    def _keep(self, name: str, axis: int, rows: list[int]) -> None:
        """Keep only `rows` of an axis of a parameter, and of the bias that belongs to a weight's output rows."""
        shape = list(self.parameters[name].shape)
        if rows == list(range(shape[axis])):
            return  # nothing is removed, such as from a norm that all heads share
        owner, _, parameter = name.rpartition(".")
        module = self.modules[owner]
        self.keep[name] = axis, torch.tensor(rows)
        self.table["shapes"][name] = [*shape[:axis], len(rows), *shape[axis + 1 :]]
        of_outputs = parameter == "weight" and axis == (0 if isinstance(module, nn.Linear) else 1)
        if of_outputs and isinstance(getattr(module, "bias", None), nn.Parameter):
            self._keep(f"{owner}.bias", 0, rows)

    def _pick(self, sets: tuple[tuple[Tensor, ...], ...], stays: tuple[int, ...]) -> None:
        """Keep the modules of the kept units, in every list that has one for each unit."""
        numbers = [
            dict(self._list_place(name) for weight in weights for name in self.names[id(weight)]) for weights in sets
        ]
        for name in numbers[0]:
            entries = [of_unit.get(name) for of_unit in numbers]
            self.list_entries[name] = [number for unit in stays if (number := entries[unit]) is not None]
            self.table["lists"][name] = len(self.list_entries[name])

    def _list_place(self, name: str) -> tuple[str, int]:
        """The innermost list of modules around a parameter, and the number of its entry there."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            owner = ".".join(parts[:end])
            if isinstance(self.modules.get(owner), nn.ModuleList):
                return owner, int(parts[end])
        raise ConfigError(f"{name} is one head's own, in no list of all heads'; {flag.export} masked takes any")

    def _empty_layer(self, name: str, parts: HeadParts, output: Slices) -> None:
        """Replace the states of a layer without heads by zeros for one head; keys and values that others need stay."""
        if len(self.names[id(output.weight)]) > 1:
            advice = f"leave one head, or take {flag.export} masked"
            raise ConfigError(f"{name} has the same weights as other layers, so not all its heads can go; {advice}")
        needed_parts = ("key", "value") if parts.makes_mask or parts.readers else ()  # by others
        rows: dict[str, set[int]] = {}
        for side in (side for name, side in parts.sides.items() if name not in needed_parts):
            zero_rows = [(slices.weight, slices) for slices in side.rows]
            if side.norm_weights is not None:
                zero_rows += [(weight, side.norm_weights) for weight in (side.norm_weights.weight, *side.whole)]
            for weight, slices in zero_rows:
                for owner in self._owners(weight):
                    rows.setdefault(owner, set()).update(slices.units[0].tolist())
            for slices in side.entries:
                for parameter in self.names[id(slices.weight)]:
                    self._keep(parameter, slices.axis, slices.units[0].tolist())
            if side.own:
                self._pick(side.own, (0,))
        self.table["zeros"] |= {owner: len(indices) for owner, indices in rows.items()}
        self.table["biases"] |= dict.fromkeys(self._owners(output.weight), True)
        self.table["empty"][name] = True

    def _owners(self, weight: Tensor) -> list[str]:
        return [name.rpartition(".")[0] for name in self.names[id(weight)]]

    def _cut_position_bias(self, layers: Mapping[str, tuple[int, ...]]) -> None:
        """Remove columns of relative position biases: each layer's own, or those of the first layer for all (T5)."""
        has_biases = any(hasattr(self.modules[name], "compute_bias") for name in layers)
        if not (has_biases and any(name in self.table["attributes"] for name in layers)):
            return
        owners = [name for name in layers if isinstance(getattr(self.modules[name], BIAS, None), nn.Embedding)]
        if len(owners) == len(layers):
            for name in owners:
                self._keep(f"{name}.{BIAS}.weight", 1, list(layers[name] or (0,)))
        elif owners:
            self._cut_shared_bias(layers, owners[0])
        else:
            forwards = {name: inspect.unwrap(type(self.modules[name]).forward) for name in layers}
            reading = [name for name in layers if "position_bias" in inspect.signature(forwards[name]).parameters]
            self.table["bias_heads"] |= dict.fromkeys(reading)

    def _cut_shared_bias(self, layers: Mapping[str, tuple[int, ...]], owner: str) -> None:
        """Keep the columns of one position bias that any layer needs, and note each layer's columns if they differ."""
        before = {name: getattr(self.modules[name], "bias_heads", None) for name in layers}
        if any(heads is not None for heads in before.values()):  # pruned once before: the table stays as it is
            for name, heads_kept in layers.items():
                columns = before[name]
                assert columns is not None
                self.table["bias_heads"][name] = [columns[head] for head in heads_kept]
            return
        union = sorted({head for heads_kept in layers.values() for head in heads_kept}) or [0]
        self._keep(f"{owner}.{BIAS}.weight", 1, union)
        if any(list(heads_kept) != union for heads_kept in layers.values()):
            for name, heads_kept in layers.items():
                self.table["bias_heads"][name] = [union.index(head) for head in heads_kept]


def _attributes(module: Any, attention_site: AttentionSite, heads: int, groups: int) -> dict[str, int]:
    widths = (*WIDTHS, *(name for name in IF_READ if f"self.{name}" in _code(type(module).forward)))
    before = {
        HEADS: attention_site.heads,
        GROUPS: attention_site.groups,
        SHARING: attention_site.heads // attention_site.groups,
        widths: attention_site.heads * attention_site.width,
    }
    after = {HEADS: heads, GROUPS: groups, SHARING: heads // groups, widths: heads * attention_site.width}
    return {
        name: after[names]
        for names, value in before.items()
        for name in names
        if type(getattr(module, name, None)) is int and getattr(module, name) == value
    }


@cache
def _code(function: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(function))
