"""The rules of Voita et al. as their program computes them since June 2021 ("version C").

Every operation is one map y = f(x) of all its inputs: impacts z_ji = f(0)_j / N + J_ji x_i, normalised over i with
positive and negative impacts apart (alpha-beta, α = β = ½, both added) or together (eps mode), and the result
rescaled so that total absolute relevance is what it was. Activations hand relevance on unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.relevance.voita import attention as voita_attention
from headscope.relevance.voita import blocks as voita_blocks
from headscope.relevance.voita.blocks import CoreRule
from headscope.relevance.voita.trace import Core
from headscope.relevance.voita.trace_functions import NormDetail
from headscope.relevance.voita.trace_walk import CoreRelevance, Units, WalkRules

MODES = ("alpha-beta", "eps")


@dataclass(frozen=True, kw_only=True)
class VoitaSettings:
    """Settings of the rules; the defaults are those of the program.

    - `version` "2021": the program as it is; "2019": as first published; "paper": the rule in the paper's
      appendix A. `mode`, `attention_constant`, `alpha`, `beta`, `epsilon` and `norm_jacobian` belong to "2021".
    - `attention_constant`: weights of attention are constants, so that relevance goes to values only.
    - `norm_jacobian` "published" leaves the epsilon of a layer norm out of one factor, as the program does;
      "exact" keeps it.
    """

    version: Literal["2021", "2019", "paper"] = "2021"
    mode: Literal["alpha-beta", "eps"] = "alpha-beta"
    attention_constant: bool = False
    alpha: float = 0.5
    beta: float = 0.5
    epsilon: float = 1e-5
    norm_jacobian: Literal["published", "exact"] = "published"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("version", ("2021", "2019", "paper")),
            ("mode", MODES),
            ("norm_jacobian", ("published", "exact")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"voita {name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if not self.epsilon > 0:
            raise ConfigError(f"voita epsilon is {self.epsilon}; it must be more than 0")
        others = [each for each in fields(self) if each.name != "version"]
        if self.version != "2021" and any(getattr(self, each.name) != each.default for each in others):
            raise ConfigError(
                f"version {self.version!r} of voita has no settings; mode, attention_constant, alpha, beta, epsilon "
                "and norm_jacobian belong to version '2021'"
            )

    @property
    def signed(self) -> bool:
        """Whether relevance can be negative."""
        return self.version == "paper" or (self.version == "2021" and self.mode == "eps")


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def absolute(relevance: Tensor, sentences: int) -> Tensor:
    """Σ|relevance| of every explained position and sentence: [p b] of [p …]."""
    return relevance.abs().reshape(len(relevance), sentences, -1).sum(dim=-1)


def scaled(relevance: Tensor, factor: Tensor) -> Tensor:
    """Relevance [p …] times a factor [p b] per sentence."""
    p, b = factor.shape
    return (relevance.reshape(p, b, -1) * factor[..., None]).view(relevance.shape)


def ratio(wanted: Tensor, found: Tensor) -> Tensor:
    """wanted / found without a stabiliser, and 1 where there is nothing to scale."""
    return torch.where(found > 0, wanted / found.clamp(min=torch.finfo(found.dtype).tiny), 1)


class ProgramRules(WalkRules):
    """Version C for `sentences` sentences; totals are per sentence, as if each went through the program alone.

    `block` is the number of bytes that an intermediate of an attention may take.
    """

    def __init__(self, settings: VoitaSettings, *, sentences: int, dtype: torch.dtype, block: int) -> None:
        self.settings, self.sentences, self.dtype, self.block = settings, sentences, dtype, block
        signed = settings.mode == "eps"
        self.core = CoreRule(settings.alpha, settings.beta, settings.epsilon, signed)

    def rescaled(self, reference: Tensor, *parts: Tensor) -> list[Tensor]:
        """Parts scaled together to the total of the reference, per sentence."""
        found = sum(absolute(part, self.sentences) for part in parts) + self.settings.epsilon
        factor = absolute(reference, self.sentences) / found
        return [scaled(part, factor) for part in parts]

    def _by_token(self, reference: Tensor, *parts: Tensor) -> list[Tensor]:
        """The same per token [p … d]."""
        found = sum(part.abs().sum(dim=-1, keepdim=True) for part in parts) + self.settings.epsilon
        factor = reference.abs().sum(dim=-1, keepdim=True) / found
        return [part * factor for part in parts]

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given, states = relevance.flatten(1, -2), x.to(self.dtype).flatten(0, -2)
        weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        found = voita_blocks.linear_rule(given, states, weight, bias, self.core)
        (found,) = self._by_token(given, found)
        return self.rescaled(relevance, found.view(len(relevance), *x.shape))[0]

    def unit(self, start: Units, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        p, b = start.values.shape
        batch = torch.arange(b, device=x.device).expand(p, b)
        impact = weight[start.classes].to(self.dtype) * x[batch, start.tokens].to(self.dtype)  # [p b i]
        if bias is not None:
            impact += bias[start.classes].to(self.dtype)[..., None] / x.shape[-1]
        given = start.values[..., None]
        (row,) = self._by_token(given, voita_blocks.transition(impact, self.core) * given)
        found = row.new_zeros(p, *x.shape)
        found[torch.arange(p, device=x.device)[:, None], batch, start.tokens] = row
        return self.rescaled(given, found)[0]

    def norm(self, relevance: Tensor, x: Tensor, norm: NormDetail) -> Tensor:
        given, states = relevance.flatten(1, -2), x.to(self.dtype).flatten(0, -2)
        its = voita_blocks.moments(
            states,
            centred=norm.centred,
            epsilon=norm.epsilon,
            published=self.settings.norm_jacobian == "published",
        )
        scale = states.new_ones(states.shape[-1]) if norm.scale is None else norm.scale.to(self.dtype)
        bias = None if norm.bias is None else norm.bias.to(self.dtype)
        found = voita_blocks.norm(given, states, its, scale, bias, self.core)
        (found,) = self._by_token(given, found)
        return self.rescaled(relevance, found.view_as(relevance))[0]

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        impact = torch.stack([a.to(self.dtype), b.to(self.dtype)], dim=-1)
        left, right = voita_blocks.transition(impact, self.core).unbind(dim=-1)
        parts = self._by_token(relevance, relevance * left, relevance * right)
        first, second = (self.rescaled(part, part)[0] for part in parts)
        return first, second

    def product(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both factors have the impact a·b: J_a a = J_b b."""
        impact = (a * b).to(self.dtype)
        both = voita_blocks.transition(torch.stack([impact, impact], dim=-1), self.core)[..., 0] * relevance
        first, second = self._by_token(relevance, both, both)
        return first, second

    def mix(self, relevance: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
        """The core rule on every column, with bias 0, so that z factors; then per sentence."""
        matrix, x = matrix.to(self.dtype), x.to(self.dtype)
        up, down = matrix.clamp(min=0), matrix.clamp(max=0)
        x_up, x_down = x.clamp(min=0), x.clamp(max=0)
        plus, minus = up @ x_up + down @ x_down, up @ x_down + down @ x_up
        if self.core.signed:
            part = relevance / voita_blocks.stabilised(plus + minus, self.core.epsilon)
            return self.rescaled(relevance, x * (matrix.mT @ part))[0]
        first = relevance * (self.core.alpha / (plus + self.core.epsilon))
        second = relevance * (self.core.beta / (minus - self.core.epsilon))
        found = x_up * (up.mT @ first + down.mT @ second) + x_down * (down.mT @ first + up.mT @ second)
        return self.rescaled(relevance, found)[0]

    def attention(self, relevance: Tensor, core: Core) -> CoreRelevance:
        """The core rule per head, rescaled per head, then all heads together."""
        call = core.call
        h, groups = call.query.shape[1], call.key.shape[1]
        its = voita_attention.attention_inputs(call, self.dtype)
        given = relevance.flatten(1, 2)  # [p n t c]
        constant = self.settings.attention_constant
        found = voita_attention.through(given, its, self.core, constant=constant, block=self.block)
        parts = [part for part in found if part is not None]
        size = sum(part.abs().sum(dim=(-1, -2), keepdim=True) for part in parts) + self.settings.epsilon
        factor = given.abs().sum(dim=(-1, -2), keepdim=True) / size  # [p n 1 1]
        parts = [voita_attention.by_head(part * factor, h) for part in parts]
        parts = self.rescaled(relevance, *parts)
        sums = [part.sum(dim=(-1, -2)) for part in parts]  # [p b h]
        value_share, qk_share = sums[-1], sum(sums[:-1], torch.zeros_like(sums[-1]))
        value = self._grouped(parts[-1], groups)
        if constant:
            return CoreRelevance(None, None, value, value_share, qk_share)
        return CoreRelevance(parts[0], self._grouped(parts[1], groups), value, value_share, qk_share)

    def _grouped(self, relevance: Tensor, groups: int) -> Tensor:
        """What the query heads of a group give to their common keys or values: [p b h s k] to [p b g s k]."""
        if relevance.shape[2] == groups:
            return relevance
        return self.gather(list(voita_attention.by_group(relevance, groups).unbind(dim=3)))

    def gather(self, parts: list[Tensor]) -> Tensor:
        """The sum, scaled so that absolute totals are kept where signs cancel."""
        total = torch.stack(parts).sum(dim=0)
        wanted = sum((absolute(part, self.sentences) for part in parts), torch.zeros((), dtype=total.dtype))
        return scaled(total, ratio(wanted, absolute(total, self.sentences)))

    def joint(self, total: Tensor, own: Tensor, memory: Tensor) -> Tensor:
        """A cross attention's sublayer hands on, to its own side and to the memory, what came in."""
        return ratio(total, absolute(own, self.sentences) + absolute(memory, self.sentences))
