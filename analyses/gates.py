"""Values of a model's own head gates: learnt constants (Voita et al. 2019, §5), and gates that depend on the input.

Input-dependent gates are those of Qwen3-Next and its like (Qiu et al. 2025, "Gated Attention").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite, base_of, eval_mode, probe_inputs
from headscope.model.interface import watch_modules
from headscope.model.mixing.base import mixings_of, open_probability
from headscope.model.taps import observing

SHUT = 0.1  # a gate below counts as closed
NEAR = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative tolerance by dtype; half precision: 0.02


@analysis
class InputGates(Analysis):
    """Gates σ(x W_G) by which some models multiply each head's context, query by query (Qiu et al. 2025).

    `head_gate`: mean over queries and channels; `head_gate_closed`: share below 0.1; `head_gate_spread`: standard
    deviation over queries. Found by comparing what the output projection reads with the contexts. Other analyses look
    at contexts before these gates.
    """

    name = "head_gates"
    reads = "contexts"
    order = 302
    default = False
    afterwards = True
    summary = "values of the input-dependent gates on heads' contexts (Qwen3-Next and its like)"
    measures = (
        Measure("head_gate", "mean gate", range=(0, 1), keep="highest", why="the model's own gates close them most"),
        Measure("head_gate_closed", "share of gates below 0.1", range=(0, 1)),
        Measure("head_gate_spread", "spread of the mean gate over queries", range=(0, None)),
    )

    sources: dict[SiteLayer, GateSource]
    values: dict[SiteLayer, Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return None if find_gates(checkpoint) else "is for models whose heads have gates that depend on the input"

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.sources, self.values = find_gates(checkpoint), {}

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        modules = {site_layer: source.module for site_layer, source in self.sources.items()}
        with watch_modules(modules, lambda site_layer, _, output: self.values.update({site_layer: output.detach()})):
            yield

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        source = self.sources.get((heads.site, heads.layer))
        if source is None:
            return {}
        gates = source.gates(self.values[heads.site, heads.layer]).to(heads.context.dtype)  # [b h t c]
        mean = gates.mean(dim=-1)  # [b h t]
        first, second = heads.over_queries(mean), heads.over_queries(mean.square())
        return {
            "head_gate": first,
            "head_gate_closed": heads.over_queries((gates < SHUT).to(mean.dtype).mean(dim=-1)),
            "moments": Ratio(torch.stack([first.total, second.total], dim=-1), first.count[..., None]),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        report.columns["head_gate_spread"] = aggregates.function("moments", _deviation)
        return report


@dataclass(frozen=True)
class GateSource:
    """The projection that computes a layer's gates before σ, and the layout of gates in its output [b t n].

    `layout`: "channels" (n = h·k), "heads" (n = h), or "beside" the queries: the last k of every head's 2k channels.
    """

    module: nn.Module
    heads: int
    layout: str

    def gates(self, output: Tensor) -> Tensor:
        """Gates [b h t c] of c channels, one where all channels of a head share it."""
        by_head = output.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [b h t c]
        return torch.sigmoid(by_head[..., by_head.shape[-1] // 2 :] if self.layout == "beside" else by_head)


def find_gates(checkpoint: Checkpoint) -> dict[SiteLayer, GateSource]:
    """The sources of gates, by (site, layer), found by a probe."""
    model = checkpoint.model
    if checkpoint.is_native or checkpoint.two_sided:
        return {}
    contexts: dict[SiteLayer, Tensor] = {}
    activations: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(attention_site: AttentionSite, call: AttentionCall) -> None:
        contexts[attention_site.site_layer] = call.context.detach()

    def see(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            activations[module] = (inputs[0].detach(), output.detach())

    names = {part.site_layer: part.name for part in checkpoint.attention_sites.order}
    parts = {site_layer: list(model.get_submodule(name).modules()) for site_layer, name in names.items()}
    linear = {module for modules in parts.values() for module in modules if isinstance(module, nn.Linear)}
    with watch_modules(linear, see), eval_mode(model), torch.no_grad(), observing(model, keep):
        base_of(model)(**probe_inputs(model))
    sources = {site_layer: _source(parts[site_layer], activations, context) for site_layer, context in contexts.items()}
    return {site_layer: source for site_layer, source in sources.items() if source is not None}


def _source(
    modules: list[nn.Module], projections: dict[nn.Module, tuple[Tensor, Tensor]], context: Tensor
) -> GateSource | None:
    """The source of a layer's gates, if the context [1 h t k] times σ of a projection is the input of another one.

    `projections` has the input and output of every linear module.
    """
    _, h, t, k = context.shape
    own_states = {module: states for module, states in projections.items() if module in modules}
    read = [inputs for inputs, _ in own_states.values() if inputs.numel() == context.numel()]
    for module, (_, output) in own_states.items():
        layout = {h * k: "channels", h: "heads", 2 * h * k: "beside"}.get(output.shape[-1])
        if layout is not None and output.numel() == t * output.shape[-1]:
            source = GateSource(module, h, layout)
            gated = (context * source.gates(output.view(1, t, -1))).transpose(1, 2).flatten()
            near = NEAR.get(gated.dtype, 0.02) * gated.norm()
            if any((inputs.flatten() - gated).norm() <= near for inputs in read):
                return source
    return None


def _deviation(total: Tensor, count: Tensor) -> Tensor:
    """Standard deviations [… h] from sums of values and of squares [… h 2]."""
    mean, square = (total / count).unbind(dim=-1)
    return (square - mean.square()).clamp(min=0).sqrt()


KEEP_REASON = "the model's own gates close them most"


@analysis
class Gates(Analysis):
    """Gates of models that were trained with them: `gate` is the factor on a context at test time.

    `gate_log_a` is the parameter, `gate_open` P(gate ≠ 0), `gate_one` P(gate = 1), at temperature 0.33 and stretch
    (−0.1, 1.1). Fixed 0/1 gates have no parameter. Exact: low = high = value.
    """

    name = "gates"
    order = 131
    summary = "a model's own head gates: value, log_a and the probability of being open"
    measures = (
        Measure("gate", "gate at test time", range=(0, 1), keep="highest", why=KEEP_REASON),
        Measure("gate_log_a", "gate parameter log a", signed=True, keep="highest", why=KEEP_REASON),
        Measure("gate_open", "probability of an open gate", range=(0, 1), keep="highest", why=KEEP_REASON),
        Measure("gate_one", "probability of a gate of 1", range=(0, 1), keep="highest", why=KEEP_REASON),
    )
    passes = frozenset()

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        has_gates = any(mixing.gates() is not None for *_, mixing in mixings_of(checkpoint.model))
        return None if has_gates else "is for models with head gates; this one has none"

    def inspect(self, checkpoint: Checkpoint) -> None:
        for site, layer, mixing in mixings_of(checkpoint.model):
            if (gates := mixing.gates()) is not None:
                self.exact[site, layer] = gate_numbers(gates, mixing.log_a)


def gate_numbers(values: Tensor, logits: Tensor | None) -> dict[str, Tensor]:
    """Every column of one layer, [h] each, of gates [h] and their parameters [h], if they have any."""
    value = values.detach().double()
    log_a = torch.full_like(value, torch.nan) if logits is None else logits.detach().double()
    return {
        "gate": value,
        "gate_log_a": log_a,
        "gate_open": open_probability(log_a),
        "gate_one": open_probability(log_a, fully=True),
    }
