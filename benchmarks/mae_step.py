"""What an update of MAE costs, in updates of the baseline, by kind of step: CPU time of one thread, kinds in turns.

    python benchmarks/mae_step.py [rounds]

Forward and backward of models of the study of variants (3 + 3 layers of width 128, 8 heads), without the optimizer,
which both have. `uniform` is an F step without gates, F and G are MAE's two steps; an update costs F + G / 5.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack

import torch

from headscope.model.discovery import eval_mode
from headscope.model.mixing.experts import expert_mode, experts_of
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.taps import frozen_parameters
from headscope.training.variants.mae import GATE, Mae, MaeOptions

WIDTH, HEADS, LAYERS, WORDS, SENTENCES, LENGTH = 128, 8, 3, 2000, 60, 16
KINDS = {"baseline": None, "uniform": MaeOptions(uniform=True), "F": MaeOptions(), "G": MaeOptions()}


def build_model(options: MaeOptions | None) -> Transformer:
    """A fresh model; its gates are drawn apart."""
    shape = {"vocabulary": WORDS, "d_model": WIDTH, "d_ffn": 2 * WIDTH, "d_head": WIDTH // HEADS, "dropout": 0.1}
    heads = (HEADS,) * LAYERS
    encoder = StackConfig(**shape, self_heads=heads)  # type: ignore[arg-type]
    decoder = StackConfig(**shape, self_heads=heads, cross_heads=heads)  # type: ignore[arg-type]
    config = TransformerConfig(decoder=decoder, encoder=encoder)
    model = Transformer(config if options is None else Mae(options).shape(config))
    for mixture in experts_of(model):
        if mixture.gate is not None:
            torch.nn.init.xavier_uniform_(mixture.gate.outer.weight)
    return model.train()


def seconds(model: Transformer, kind: str, ids: torch.Tensor) -> float:
    """CPU time of the forward and backward pass of a step."""
    gates = [parameter for name, parameter in model.named_parameters() if GATE in name]
    start = time.process_time()
    with ExitStack() as stack:
        if kind == "G":
            stack.enter_context(frozen_parameters(model))
            stack.enter_context(eval_mode(model))
            for gate in gates:
                gate.requires_grad_()
            for mixture in experts_of(model):
                mixture.train()
        elif kind in ("F", "uniform"):
            stack.enter_context(expert_mode(experts_of(model), "sampled"))
        logits = model(ids, ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    duration = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return duration


def main() -> None:
    """Print the ratio of every kind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(4, WORDS, (SENTENCES, LENGTH))
    models = {kind: build_model(options) for kind, options in KINDS.items()}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60):
        for kind, model in models.items():
            times[kind].append(seconds(model, kind, ids))
    ratio = {kind: statistics.median(runs) / statistics.median(times["baseline"]) for kind, runs in times.items()}
    print("  ".join(f"{kind} {value:.3f}" for kind, value in ratio.items()), f" MAE {ratio['F'] + ratio['G'] / 5:.3f}")


if __name__ == "__main__":
    main()
