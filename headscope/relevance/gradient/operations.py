"""Classify every torch function that a model calls: linear, activation, norm, product, softmax; refuse others.

The model's parameters are frozen, so a tensor that requires a gradient depends on the input: it is a variable. A
product of two variables has a rule, any other product is linear. An unknown function of a variable is refused unless
all rule sets are plain gradients: no model is explained by rules that do not cover it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.errors import CheckpointError, flag
from headscope.model.attention import precise
from headscope.model.interface import tensors_in
from headscope.model.mixing.base import Queries
from headscope.model.mixing.experts import Experts, scale_context
from headscope.relevance.gradient.rules import (
    PLAIN,
    ActiveRules,
    Rules,
    tempered_softmax,
    with_epsilon,
    with_gradient,
    with_share,
)
from headscope.relevance.modules import NormParameters, activation_classes, names, norm_of_call, norms_of


def normalize(output: Tensor, x: Tensor, active: ActiveRules, *, norm: NormParameters) -> Tensor:
    """The norm's output for x, with a backward pass by the active rules: its gradient, or a constant deviation."""
    states = precise(x.detach())
    inverse: list[Tensor] = []  # computed at the first backward pass that needs it: plain gradients never do

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        if rules.norm == "gradient":
            return None
        if not inverse:
            inverse.append(norm.inverse(states).to(gradient.dtype))
        at_input = gradient * inverse[0]
        if norm.scale is not None:
            at_input *= norm.scale.to(gradient.dtype)
        return at_input.sub_(at_input.mean(dim=-1, keepdim=True)) if norm.centred else at_input

    return with_gradient(output, x, active, rule)


def activate(output: Tensor, x: Tensor, active: ActiveRules) -> Tensor:
    """An activation's output for x, with a backward pass by the active rules: its gradient, or the identity rule.

    The identity rule gives all relevance of y = f(x) to x: g · y / x, and 0 where x is 0. Achtibat et al. add 1e-10 to
    x instead, which changes other values too.
    """
    before, after = x.detach(), output.detach()

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        return None if rules.activation == "gradient" else (after / before).nan_to_num_(nan=0.0).mul_(gradient)

    return with_gradient(output, x, active, rule)


ModuleRule = Callable[[Tensor, Tensor, ActiveRules], Tensor]
"""A function of an operation's output and input, which returns the output with a backward pass by the active rules."""


def composite_modules(model: nn.Module) -> dict[nn.Module, ModuleRule]:
    """The rules of norms and activations that are modules, whose operations together have one rule."""
    classes = activation_classes()
    rules: dict[nn.Module, ModuleRule] = {
        module: activate for module in model.modules() if isinstance(module, classes) and is_zero_at_zero(module)
    }
    return rules | {module: partial(normalize, norm=norm) for module, norm in norms_of(model).items()}


@torch.no_grad()
def is_zero_at_zero(activation: nn.Module) -> bool:
    """Whether f(0) = 0, which the identity rule f(x)/x requires."""
    parameter = next(activation.parameters(), None)
    zero = torch.zeros(1) if parameter is None else parameter.new_zeros(1)
    return bool((activation(zero) == 0).all())


# Functions that are linear in one variable, or re-arrange it. `__get__` is .T, .mT, .data and the like.
LINEAR = names(
    """
    __get__ __getitem__ __setitem__ add __add__ __radd__ __iadd__ add_ sub subtract __sub__ __rsub__ sub_ rsub neg
    negative __neg__ positive view view_as reshape reshape_as transpose swapaxes swapdims permute movedim t
    contiguous cat concat concatenate stack hstack vstack split split_with_sizes chunk tensor_split unbind narrow
    select index_select take_along_dim gather index_add index_copy scatter scatter_add to type type_as float double
    half bfloat16 cpu cuda expand expand_as repeat repeat_interleave tile squeeze unsqueeze flatten unflatten ravel
    sum mean cumsum clone flip roll pad dropout where masked_fill masked_fill_ masked_select masked_scatter embedding
    diagonal unfold as_strided alias copy_ detach detach_ requires_grad_ register_hook tril triu
    """
)
PRODUCTS = names(
    "mul multiply __mul__ __rmul__ __imul__ mul_ matmul __matmul__ __rmatmul__ bmm mm einsum tensordot dot inner outer"
)
QUOTIENTS = names("div divide true_divide __truediv__ __rtruediv__ __itruediv__ div_")
MAPS = frozenset(["linear", "addmm", "baddbmm", "addbmm"])
ACTIVATIONS = names("gelu relu silu tanh elu leaky_relu selu celu mish hardswish relu6 softsign hardtanh tanhshrink")
SOFTMAX = frozenset(["softmax"])


class Operations(TorchFunctionMode):
    """Within this mode the torch functions that `model` calls get the autograd nodes that `rule_sets` (by name) need.

    `strict` has the names of rule sets other than plain gradients. `under_one_rule`: the functions being called are
    parts of one operation, which has a rule.
    """

    def __init__(self, model: nn.Module, active: ActiveRules, rule_sets: dict[str, Rules]) -> None:
        super().__init__()
        self.active = active
        self.modules = {id(part): name for name, part in model.named_modules()}
        self.strict = [name for name, rules in rule_sets.items() if rules != PLAIN]
        self.epsilon = any(rules.epsilon is not None for rules in rule_sets.values())
        self.constant_softmax = any(rules.weights == 0 for rules in rule_sets.values())
        self.tempered_softmax = any(rules.temperature != 1 for rules in rule_sets.values())
        self.under_one_rule = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "modified inplace" in str(error):  # torch forbids it for what autograd functions return
                self._refuse(f"{name}, in place")
            raise
        if (
            name in LINEAR
            or self.under_one_rule
            or not self.strict
            or not torch.is_grad_enabled()
            or not _depends(result)
        ):
            return result
        return self._apply_rule(name, result, args, kwargs)

    def with_module_rule(self, module: nn.Module, rule: ModuleRule) -> Callable[..., Tensor]:
        """The forward function of a module whose operations together have one `rule`."""
        forward = module.forward

        def apply_rule(x: Tensor, *extra: Any, **options: Any) -> Tensor:
            if extra or options:  # a norm with a gate: each of its operations has its own rule
                return forward(x, *extra, **options)
            outer = self.under_one_rule
            with self.one_rule():
                output: Tensor = forward(x)
            return rule(output, x, self.active) if _depends(output) and not outer else output

        return apply_rule

    def mixture(self, module: Experts) -> Callable[..., Tensor]:
        """The forward function of a mixture of experts; its factors are constants, except under plain gradients."""

        def mix(context: Tensor, queries: Queries) -> Tensor:
            with self.one_rule():
                factors = module.factors(queries)
                if factors is not None and _depends(factors):
                    factors = with_share(factors, self.active, lambda rules: 1.0 if rules == PLAIN else 0.0)
                return scale_context(context, factors)

        return mix

    @contextmanager
    def one_rule(self) -> Iterator[None]:
        """Within the block functions get no nodes, because together they have one rule."""
        outer, self.under_one_rule = self.under_one_rule, True
        try:
            yield
        finally:
            self.under_one_rule = outer

    def _apply_rule(self, name: str, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a function of variables, with a backward pass by the active rules; refuses other functions."""
        active = self.active
        variables = sum(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        if name in MAPS and variables == 1:
            return with_epsilon(result, active) if self.epsilon else result
        if name in PRODUCTS or name in QUOTIENTS:
            divisor = args[0 if name == "__rtruediv__" else -1] if name in QUOTIENTS else None
            if variables < 2 and not _depends(divisor):
                return result
            if variables == 2 and name in PRODUCTS and not name.endswith("_"):
                return with_share(result, active, lambda rules: rules.product)
        elif name in ACTIVATIONS:
            return activate(result, args[0] if args else kwargs["input"], active)
        elif name in SOFTMAX:
            return self._softmax(result, *args, **kwargs)
        elif name in ("layer_norm", "rms_norm"):
            norm_input = norm_of_call(name, args, kwargs)
            if norm_input is not None and not _depends(norm_input[1].scale):
                return normalize(result, norm_input[0], active, norm=norm_input[1])
        elif name == "softplus" and not (args[0] if args else kwargs["input"]).any():  # a constant gate (Laguna)
            return result.detach()
        self._refuse(name)
        return result

    def _softmax(self, result: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor:
        """The softmax with the gradient that each rule set needs: its own, that at a temperature, or zero."""
        scores, axis = input.detach(), -1 if dim is None else dim

        def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
            if rules.temperature == 1:
                return None
            tempered_gradient = tempered_softmax(gradient, scores, temperature=rules.temperature, dim=axis)
            return tempered_gradient.to(scores.dtype)

        if self.tempered_softmax:
            result = with_gradient(result, input, self.active, rule)
        if self.constant_softmax:
            result = with_share(result, self.active, lambda rules: rules.weights and 1.0)
        return result

    def _refuse(self, name: str) -> None:
        """Raise CheckpointError if a module of the model is the caller; code that uses its output may be."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and id(caller) in self.modules:
                location = self.modules[id(caller)] or "the model itself"
                raise CheckpointError(
                    f"{type(caller).__name__} ({location}) computes with {name!r}, for which "
                    f"{', '.join(self.strict)} lack a rule; {flag('rules', 'gradient')} may work"
                )
            frame = frame.f_back


def _depends(result: Any) -> bool:
    """Whether a result depends on the model's input."""
    return any(tensor.requires_grad for tensor in tensors_in(result))
