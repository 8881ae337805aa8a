"""A transformers model with fewer heads: rows and columns cut out, the sizes that its code reads set right.

The sizes that attention code reads are a short list of names; `pruning.removal.verify` refuses what that misses.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError, flag
from headscope.formats.huggingface.head_parts import (
    GROUPS,
    SHARING,
    HeadParts,
    head_parts,
    renumber_heads,
    unknown_part,
)
from headscope.formats.huggingface.narrowing import narrow
from headscope.formats.huggingface.selfcontained import EMPTY, is_narrowed
from headscope.heads import Site
from headscope.model.discovery import AttentionSite, base_of, find_attention
from headscope.model.projections import Slices, has_added_bias, output_axis
from headscope.model.removal_plan import RemovalPlan, renumber_alignment

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size")
IF_READ = ("embed_dim",)  # widths that matter only where the attention's own code reads them
OF_CONFIG = ("num_attention_heads", "num_key_value_heads")
PER_HEAD = ("sinks",)  # parameters [h] of an attention module
BIAS = "relative_attention_bias"  # an embedding [buckets, h]


@dataclass
class Narrowing:
    """What `narrow` needs; `keep`: (axis, indices) of parameters that stay, `picked`: modules of lists that stay."""

    keep: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    picked: dict[str, list[int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    configs: dict[str, dict[str, int]] = field(default_factory=dict)
    zeros: dict[str, int] = field(default_factory=dict)
    biases: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    bias_heads: dict[str, list[int]] = field(default_factory=dict)
    unshared: list[str] = field(default_factory=list)
    selected: dict[str, list[int]] = field(default_factory=dict)
    added_biases: list[str] = field(default_factory=list)

    def table(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """As config.json holds it; `parameters` are the model's, before the cut."""
        shapes = {}
        for name, cuts in self.keep.items():
            shape = list(parameters[name].shape)
            for axis, indices in cuts:
                shape[axis] = len(indices)
            shapes[name] = shape
        names = [entry.name for entry in fields(self) if entry.name not in ("keep", "picked")]
        lists = {name: len(numbers) for name, numbers in self.picked.items()}
        return {"shapes": shapes, "lists": lists, **{name: getattr(self, name) for name in names}}


def shrink_model(model: nn.Module, removal: RemovalPlan) -> nn.Module:
    """A copy of a transformers model without the removed heads; `kept_heads` and `narrowed` of its config say which."""
    smaller = copy.deepcopy(model)
    narrowing = narrowing_of(model, removal)
    base, source = base_of(smaller), dict(base_of(model).named_parameters(remove_duplicate=False))
    table = narrowing.table(source)
    narrow(smaller, table, empty=EMPTY)
    with torch.no_grad():
        for name, cuts in narrowing.keep.items():
            values = source[name].detach()
            for axis, indices in cuts:
                values = values.index_select(axis, indices.to(values.device))
            base.get_parameter(name).copy_(values)
        for name, numbers in narrowing.picked.items():
            for place, number in enumerate(numbers):
                for parameter, values in base.get_submodule(f"{name}.{place}").named_parameters():
                    values.copy_(source[f"{name}.{number}.{parameter}"])
    whole: Any = smaller
    if len(source) > len(dict(base_of(model).named_parameters())):  # layers that are tied (Zamba2)
        whole.tie_weights()
    config: Any = whole.config
    config.kept_heads = renumber_heads(config.kept_heads if is_narrowed(config) else None, removal)
    config.narrowed = _merge_tables(getattr(config, "narrowed", None), table)
    renumber_alignment(whole, removal)
    return smaller.train(model.training)


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


def narrowing_of(model: nn.Module, removal: RemovalPlan) -> Narrowing:
    """What has to change in a model for a removal; nothing for layers that keep all their heads."""
    base = base_of(model)
    modules = dict(base.named_modules())
    parts, attention_sites = head_parts(model), find_attention(model)
    cutter = _Cutter(base, removal)
    module_names = {id(module): name for name, module in modules.items()}
    for identity, calls in attention_sites.calls.items():
        attention_site = calls[0]
        place = (attention_site.site, attention_site.layer)
        if len(removal.kept[place]) < attention_site.heads or place in removal.merged:
            cutter.cut(module_names[identity], attention_site, parts.get(place))
    _position_biases(cutter.narrowing, modules, module_names, attention_sites.calls, removal)
    cutter.narrowing.added_biases = [name for name, module in modules.items() if has_added_bias(module)]
    return cutter.narrowing


class _Cutter:
    def __init__(self, base: nn.Module, removal: RemovalPlan) -> None:
        self.narrowing = Narrowing()
        self.removal = removal
        self.modules = dict(base.named_modules(remove_duplicate=False))
        self.names: dict[int, list[str]] = {}  # several where layers are tied
        for name, parameter in base.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def cut(self, name: str, attention_site: AttentionSite, parts: HeadParts | None) -> None:
        site, layer = attention_site.site, attention_site.layer
        heads_kept, groups = self.removal.kept[site, layer], self.removal.groups[site, layer]
        if parts is None or parts.unknown:
            raise unknown_part(parts, site, layer)
        assert parts.output is not None
        if heads_kept:
            self._check_readers(attention_site, parts)
            self._cut_units(parts, heads_kept, groups, reorder=(site, layer) in self.removal.merged)
        else:
            self._empty_head(name, parts, parts.output)
        module = self.modules[name]
        for parameter in PER_HEAD:
            if isinstance(getattr(module, parameter, None), nn.Parameter):
                self.narrowing.keep[f"{name}.{parameter}"] = [(0, torch.tensor(heads_kept or (0,)))]
        counts = max(len(heads_kept), 1), max(len(groups), 1)
        self.narrowing.attributes[name] = _attributes(module, attention_site, *counts)
        read = {
            name: count for name, count in zip(OF_CONFIG, counts, strict=True) if f"self.config.{name}" in _code(module)
        }
        if read:
            self.narrowing.configs[name] = read

    def _check_readers(self, attention_site: AttentionSite, parts: HeadParts) -> None:
        place = attention_site.site, attention_site.layer
        groups = self.removal.groups[place]
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
                f"whole groups of {place[0]}.{place[1]} cannot be removed, because their keys and values {why}; remove "
                f"as many heads of each group, or all heads of the layer ({flag.export} masked takes any)"
            )

    def _cut_units(
        self, parts: HeadParts, heads_kept: tuple[int, ...], groups: tuple[int, ...], *, reorder: bool
    ) -> None:
        """Keep all rows (of W_Q, W_K, W_V and their biases) and columns (of W_O) but those of units that go.

        `reorder`: those that stay are put in the first places, in the order of `heads_kept` and `groups`.
        """
        assert parts.output is not None
        staying = parts.staying(heads_kept, groups)
        of_units = [(slices, stays) for side, stays in staying for slices in (*side.rows, *side.entries)]
        sources: dict[str, tuple[int, Tensor]] = {}  # by parameter: axis, and which index comes to stand in each place
        for slices, stays in (*of_units, (parts.output, heads_kept)):
            for name in self.names[id(slices.weight)]:
                _, source = sources.setdefault(name, (slices.axis, torch.arange(self._size(name, slices.axis))))
                places = range(len(stays)) if reorder else stays
                for place, unit in zip(places, stays, strict=True):
                    source[slices.units[place].cpu()] = slices.units[unit].cpu()
                for place in {*range(len(slices.units))} - {*places}:
                    source[slices.units[place].cpu()] = -1
        for name, (axis, source) in sources.items():
            self._keep(name, axis, source[source >= 0].tolist())
        for side, stays in staying:
            if side.own:
                self._pick(side.own, stays)
            if side.norm_weights is not None:  # behind a norm over all units those that stay are selected
                for owner in self._owners(side.norm_weights.weight):
                    units = torch.cat([side.norm_weights.units[unit] for unit in stays]).tolist()
                    self.narrowing.selected[owner] = units

    def _keep(self, name: str, axis: int, rows: list[int]) -> None:
        if rows == list(range(self._size(name, axis))):
            return  # all of them: a norm that heads share is also that of a single key/value head
        owner, _, parameter = name.rpartition(".")
        module, remaining = self.modules[owner], torch.tensor(rows)
        self.narrowing.keep[name] = [(axis, remaining)]
        of_outputs = axis == output_axis(module)
        if parameter == "weight" and of_outputs and isinstance(getattr(module, "bias", None), nn.Parameter):
            self.narrowing.keep[f"{owner}.bias"] = [(0, remaining)]

    def _size(self, name: str, axis: int) -> int:
        owner, _, parameter = name.rpartition(".")
        return int(self.modules[owner].get_parameter(parameter).shape[axis])

    def _pick(self, own: tuple[tuple[Tensor, ...], ...], stays: tuple[int, ...]) -> None:
        numbers = [
            dict(self._list_place(name) for weight in weights for name in self.names[id(weight)]) for weights in own
        ]
        for name in numbers[0]:
            entries = [of_unit.get(name) for of_unit in numbers]
            self.narrowing.picked[name] = [number for unit in stays if (number := entries[unit]) is not None]

    def _list_place(self, name: str) -> tuple[str, int]:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            owner = ".".join(parts[:end])
            if isinstance(self.modules.get(owner), nn.ModuleList):
                return owner, int(parts[end])
        raise ConfigError(f"{name} is one head's own, in no list of all heads'; {flag.export} masked takes any")

    def _empty_head(self, name: str, parts: HeadParts, output: Slices) -> None:
        """Zeros for one stand-in head instead of its states; keys and values stay where others need them."""
        if len(self.names[id(output.weight)]) > 1:
            raise ConfigError(
                f"{name} has the same weights as other layers, and not all heads of such can be removed; leave one, or "
                f"take {flag.export} masked"
            )
        needed_parts = ("key", "value") if parts.makes_mask or parts.readers else ()  # by others
        rows: dict[str, set[int]] = {}
        for side in (side for name, side in parts.sides.items() if name not in needed_parts):
            for slices in side.rows:
                for owner in self._owners(slices.weight):
                    rows.setdefault(owner, set()).update(slices.units[0].tolist())
            for slices in side.entries:
                for parameter in self.names[id(slices.weight)]:
                    self._keep(parameter, slices.axis, slices.units[0].tolist())
            if side.own:
                self._pick(side.own, (0,))
            if side.norm_weights is not None:
                for weight in (side.norm_weights.weight, *side.whole):
                    rows |= {owner: set(side.norm_weights.units[0].tolist()) for owner in self._owners(weight)}
        self.narrowing.zeros |= {owner: len(indices) for owner, indices in rows.items()}
        self.narrowing.biases += self._owners(output.weight)
        self.narrowing.empty.append(name)

    def _owners(self, weight: Tensor) -> list[str]:
        return [name.rpartition(".")[0] for name in self.names[id(weight)]]


def _attributes(module: Any, attention_site: AttentionSite, heads: int, groups: int) -> dict[str, int]:
    widths = (*WIDTHS, *(name for name in IF_READ if f"self.{name}" in _code(module)))
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


def _code(module: nn.Module) -> str:
    try:
        return inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return ""


def _position_biases(
    narrowing: Narrowing,
    modules: Mapping[str, nn.Module],
    module_names: Mapping[int, str],
    calls: Mapping[int, tuple[AttentionSite, ...]],
    removal: RemovalPlan,
) -> None:
    """Columns of relative position biases: a layer's own, or those of its stack's first layer (T5)."""
    for site in Site:
        layers = {
            module_names[key]: removal.kept[site, sites[0].layer]
            for key, sites in calls.items()
            if sites[0].site is site
        }
        owners = [name for name in layers if isinstance(getattr(modules[name], BIAS, None), nn.Embedding)]
        has_changes = any(name in narrowing.attributes for name in layers)
        has_biases = any(hasattr(modules[name], "compute_bias") for name in layers)
        if not (has_changes and has_biases):
            continue
        if not owners:
            calls_of = {name: inspect.signature(inspect.unwrap(type(modules[name]).forward)) for name in layers}
            narrowing.unshared += [name for name, call in calls_of.items() if "position_bias" in call.parameters]
        elif len(owners) == len(layers):
            for name in owners:
                narrowing.keep[f"{name}.{BIAS}.weight"] = [(1, torch.tensor(layers[name] or (0,)))]
        else:
            _shared_bias(narrowing, modules, layers, owners[0])


def _shared_bias(
    narrowing: Narrowing, modules: Mapping[str, Any], layers: Mapping[str, tuple[int, ...]], owner: str
) -> None:
    before = {name: getattr(modules[name], "bias_heads", None) for name in layers}
    if any(heads is not None for heads in before.values()):  # pruned once before: the table stays as it is
        for name, heads_kept in layers.items():
            columns = before[name]
            assert columns is not None
            narrowing.bias_heads[name] = [columns[head] for head in heads_kept]
        return
    union = sorted({head for heads_kept in layers.values() for head in heads_kept}) or [0]
    narrowing.keep[f"{owner}.{BIAS}.weight"] = [(1, torch.tensor(union))]
    if any(list(heads_kept) != union for heads_kept in layers.values()):
        for name, heads_kept in layers.items():
            narrowing.bias_heads[name] = [union.index(head) for head in heads_kept]


def _merge_tables(before: Mapping[str, Any] | None, table: Mapping[str, Any]) -> dict[str, Any]:
    old = before or {}
    table_now: dict[str, Any] = {}
    for name, new in table.items():
        earlier = old.get(name, type(new)())
        table_now[name] = {**earlier, **new} if isinstance(new, dict) else list(dict.fromkeys([*earlier, *new]))
    zero_names = set(table_now["zeros"]) | set(table_now["biases"])
    table_now["shapes"] = {
        name: shape for name, shape in table_now["shapes"].items() if name.rpartition(".")[0] not in zero_names
    }
    return table_now
