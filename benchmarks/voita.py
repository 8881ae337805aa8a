"""What `voita` costs, as a ratio to one forward pass per explained target position, in one run.

    python benchmarks/voita.py [--layers 6] [--width 512] [--heads 8] [--ffn 2048] [--tokens 25] [--vocabulary 8000]

A random 6+6-layer model with biases reads one sentence of 25 tokens on each side; all 25 target positions are
explained. Forward passes and explanations alternate, and CPU time of the process is compared, so that what else the
machine does falls on both alike. The claim is at most 8 forward passes per position.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.relevance.voita.explain import relevance_of_pass
from headscope.relevance.voita.rules import OutputUnits, VoitaSettings


def build(options: argparse.Namespace) -> Transformer:
    """A pre-norm encoder–decoder with random weights and random biases everywhere."""
    torch.manual_seed(1)
    heads = (options.heads,) * options.layers
    stack = {
        "vocabulary": options.vocabulary,
        "d_model": options.width,
        "d_ffn": options.ffn,
        "d_head": options.width // options.heads,
        "self_heads": heads,
        "norm": "pre",
        "final_norm": True,
    }
    config = TransformerConfig(encoder=StackConfig(**stack), decoder=StackConfig(**stack, cross_heads=heads))
    model = Transformer(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 6, "width": 512, "heads": 8, "ffn": 2048, "tokens": 25, "vocabulary": 8000, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--settings", default="{}", help="JSON of VoitaSettings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options)
    n = options.tokens
    ids = torch.randint(4, options.vocabulary, (2, 1, n))
    settings = VoitaSettings(**json.loads(options.settings))

    def forward() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(ids[0], ids[1])
        return logits

    def start(logits: torch.Tensor) -> OutputUnits:
        classes = logits.argmax(dim=-1)
        return OutputUnits(torch.arange(n)[:, None], classes.T, torch.ones(n, 1))

    def voita() -> None:
        relevance_of_pass(model, lambda: model(ids[0], ids[1]), start, settings=settings)

    forward()
    voita()
    ratios, forwards = [], []
    for _ in range(options.rounds):
        before = [cpu_seconds(forward) for _ in range(5)]
        total = cpu_seconds(voita)
        single = statistics.median([*before, *(cpu_seconds(forward) for _ in range(5))])
        forwards.append(single)
        ratios.append(total / single / n)
    result = {"forward_seconds": statistics.median(forwards), "forwards_per_position": statistics.median(ratios)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
