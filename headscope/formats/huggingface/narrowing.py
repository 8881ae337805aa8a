"""A transformers model whose attention layers have fewer heads than its config says.

`config.narrowed` lists what differs from the plain class: shapes of parameters, a few whole numbers that the
attention code reads, and the layers that have no heads left. Only torch and transformers are needed, so a
copy of this file can lie beside the weights and be loaded with `trust_remote_code=True`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads")
SHARING = ("num_key_value_groups",)  # heads that share keys: more where key/value heads are merged
WIDTHS = ("all_head_size", "inner_dim", "split_size")
IF_READ = ("embed_dim",)  # widths that matter only where the attention's own code reads them
EMPTY = "no-heads"
ENTRIES = (
    *("shapes", "attributes", "configs", "added_biases", "zeros", "biases", "empty"),
    *("bias_heads", "lists", "selected"),
)
"""Entries of `config.narrowed`; each has values by the names of parts of the model, see `narrow`."""


class Constant(nn.Module):
    """Replaces a projection of a layer without heads: zeros at every position, or the bias of its output.

    Some classes of transformers initialise the weight and bias of parts known by name; here that has no effect.
    """

    def __init__(self, width: int, bias: Tensor | None) -> None:
        super().__init__()
        self.width = width
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """A new matrix at every access, for code that initialises weights."""
        return torch.empty(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The same vector at every position [… width], whatever x [… d] is."""
        zeros = x.new_zeros(*x.shape[:-1], self.width)
        return zeros + self.bias if isinstance(self.bias, nn.Parameter) else zeros


class SharedBias:
    """An attention layer of T5, whose position bias is made in the first layer for the heads of all layers.

    Attention to the encoder has no position bias (`bias_heads` None): it ignores zeros made in another layer's shape.
    """

    bias_heads: list[int] | None
    _full_bias: Any = None

    def compute_bias(self, *args: Any, **kwargs: Any) -> Tensor:
        """The position bias of this layer's heads [1 h t s]; the bias of all heads is kept for the layers above."""
        self._full_bias = super().compute_bias(*args, **kwargs)  # type: ignore[misc]
        return self._full_bias[:, self.bias_heads]

    def forward(self, hidden_states: Tensor, *args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
        """The plain layer with this layer's heads of `position_bias`; its outputs have the bias of all heads again."""
        layer_bias = None if position_bias is None or self.bias_heads is None else position_bias[:, self.bias_heads]
        outputs = super().forward(hidden_states, *args, position_bias=layer_bias, **kwargs)  # type: ignore[misc]
        full_bias = self._full_bias if position_bias is None else position_bias
        self._full_bias = None
        return (outputs[0], full_bias, *outputs[2:])


class SelectedUnits:
    """A norm over the states of all heads (OLMo 2), after which only some heads' states are read."""

    kept_units: list[int]

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [… h·k] over all heads, then only the units of the heads that stay [… n]."""
        normalised_x: Tensor = super().forward(x)  # type: ignore[misc]
        return normalised_x[..., self.kept_units]


def no_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention of a layer without heads: contexts [b t 1 k] of zeros, as of one head, and weights [b 0 t s]."""
    b, _, t, _ = query.shape
    return query.new_zeros(b, t, 1, value.shape[3]), query.new_zeros(b, 0, t, key.shape[2])


if EMPTY not in AttentionInterface():  # in headscope, which has one that can be tapped
    AttentionInterface.register(EMPTY, no_heads)


def narrow(model: Any, table: dict[str, Any] | None) -> None:
    """Give a freshly built model the sizes in `table`; its weights are to be loaded afterwards.

    `table` names parts as seen from the model without its task head: `shapes` of parameters, `attributes` of
    attention modules, of `configs` that they read, `zeros` and `biases` (projections of layers without heads),
    `empty` (those layers), `bias_heads` (T5), `added_biases` (projections that have a bias, which their class builds
    without), `selected` (units that are read after norms over all heads), `lists` (how many modules stay of lists that
    have one for each head). Parts that this class lacks are ignored; ValueError for a size that would grow.
    """
    base, main = model.base_model, getattr(model.base_model, "main_input_name", "input_ids")
    if main not in inspect.signature(type(base).forward).parameters:
        base = model  # as `headscope.model.discovery.base_of`, which cannot be read here
    modules, table = dict(base.named_modules()), table or {}

    def parts_named(entry: str) -> list[tuple[str, Any, Any]]:
        return [(name, modules[name], value) for name, value in table.get(entry, {}).items() if name in modules]

    for name, shape in table.get("shapes", {}).items():
        owner, _, parameter = name.rpartition(".")
        if owner in modules:
            _resize(modules[owner], parameter, tuple(shape))
    for _, module, values in parts_named("attributes"):
        for attribute, value in values.items():
            setattr(module, attribute, _check_value(module, attribute, value))
    for _, module, values in parts_named("configs"):
        sizes = {attribute: _check_value(module.config, attribute, value) for attribute, value in values.items()}
        module.config = _Config(module.config, sizes)
    for _, module, _ in parts_named("added_biases"):
        if module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    for name, module, width in parts_named("zeros"):
        _replace(base, name, Constant(_below(width, sum(module.weight.shape)), torch.empty(1)))
    for name, module, _ in parts_named("biases"):
        width = module.weight.shape[0 if isinstance(module, nn.Linear) else 1]
        _replace(base, name, Constant(width, module.bias))
    for _, module, _ in parts_named("empty"):
        module.config = _Config(module.config, {"_attn_implementation": EMPTY})
    for _, module, heads in parts_named("bias_heads"):
        module.bias_heads = None if heads is None else [int(head) for head in heads]
        _mix_in(module, SharedBias)
    for name, module, count in parts_named("lists"):
        _replace(base, name, module[: _below(count, len(module))])
    for _, module, units in parts_named("selected"):
        module.kept_units = torch.arange(len(module.weight), device="cpu")[units].tolist()
        _mix_in(module, SelectedUnits)


def _resize(module: Any, name: str, shape: tuple[int, ...]) -> None:
    old = module.get_parameter(name)
    for new, size in zip(shape, old.shape, strict=True):
        _below(new, size)
    setattr(module, name, nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad))
    if name == "weight":
        for attribute, value in _sizes_of_weight(module, shape).items():
            setattr(module, attribute, value)


def _sizes_of_weight(module: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"out_features": shape[0], "in_features": shape[1]}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": shape[0], "embedding_dim": shape[1]}
    if isinstance(module, nn.Conv1d) and module.groups == module.out_channels == module.in_channels:
        return dict.fromkeys(("groups", "out_channels", "in_channels"), shape[0])
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return {"normalized_shape": shape}
    return {"nx": shape[0], "nf": shape[1]} if hasattr(module, "nf") and len(shape) == 2 else {}


def _check_value(of: Any, attribute: str, value: Any) -> int:
    if attribute not in (*HEADS, *GROUPS, *SHARING, *WIDTHS, *IF_READ):
        raise ValueError(f"config.narrowed sets {attribute!r}, which is no size of an attention layer")
    shared = getattr(getattr(of, "config", None), "num_attention_heads", 1) if attribute in SHARING else 1
    return _below(value, max(getattr(of, attribute), shared, 1))


def _below(value: Any, maximum: int) -> int:
    if type(value) is not int or not 1 <= value <= maximum:
        raise ValueError(f"config.narrowed holds the size {value!r}; at most {maximum} fits here")
    return value


def _replace(base: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(base.get_submodule(parent), child, part)


def _mix_in(module: Any, part: type) -> None:
    if part is not SelectedUnits and not hasattr(type(module), "compute_bias"):
        raise ValueError("config.narrowed names a position bias of a layer that has none")
    if not isinstance(module, part):
        module.__class__ = type(type(module).__name__, (part, type(module)), {})


class _Config:
    """The config of one layer: the model's config with some values replaced."""

    def __init__(self, config: Any, values: dict[str, Any]) -> None:
        self.__dict__.update(_of=config, **values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_of" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_of"], name)


class Narrowed:
    """Put before a class of transformers: builds it, then narrows it as its config says."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        narrow(self, getattr(config, "narrowed", None))

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: transformers renames weights of older files for its own classes only, and the names here are theirs."""
        return False
