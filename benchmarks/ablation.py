"""What taking out every head in turn costs, as a share of the plain loop of full forward passes.

Run: python benchmarks/ablation.py SOURCE [--checkpoint DIR] [--sentences N] [--rounds N] [--tokens N] [--peers]

Both sides ask for every sentence's cosine distance to the intact vector, for the same batches, in the same process,
batch by batch in alternation; the best round of each batch counts, in CPU seconds. The plain loop is the cheapest
one that a user of BERT can write: a hook on each output projection that sets one head's columns to zero, on the
model's own eager attention. Ours is what the analysis `ablation` does for a batch, captum included. With --peers
captum, TransformerLens and nnsight, as far as they are installed, do the same beside these, on the first batch.
Limit: 0.55.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import ablation_peers
import torch
from torch import Tensor, nn

from headscope.assets import demo_checkpoint
from headscope.attribution.gatevector import ablation, explained_batch
from headscope.attribution.objectives.predictions import Representation
from headscope.data.batching import batches
from headscope.data.corpus import open_corpus
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.model.forward import mean_pooled
from headscope.model.interface import through_attend
from headscope.model.prefix_cache import LayerIndex, resumable_layers

LIMIT = 0.55
PEERS = {
    "captum": ablation_peers.captum_layers,
    "transformer_lens": ablation_peers.transformer_lens,
    "nnsight": ablation_peers.nnsight,
}


def ours(checkpoint: Checkpoint, layer_index: LayerIndex | None, batch: Batch) -> Tensor:
    """Damages [b N] by the analysis."""
    with torch.inference_mode(), explained_batch(checkpoint, Representation(), batch, layer_index=layer_index) as f:
        return ablation(f, f.gates)


def plain(checkpoint: Checkpoint, outputs: list[nn.Module], batch: Batch) -> Tensor:
    """Damages [b N] by a loop over all heads, each with a forward pass of the model's own eager attention."""
    site = checkpoint.attention_sites.order[0]
    damages = []
    with torch.inference_mode(), through_attend(checkpoint.model, implementation="eager"):
        intact = mean_pooled(checkpoint.states(batch), batch.source.real)
        for output in outputs:
            for head in range(site.heads):
                hook = output.register_forward_pre_hook(partial(_close, head * site.width, site.width))
                vectors = mean_pooled(checkpoint.states(batch), batch.source.real)
                hook.remove()
                damages.append(1 - torch.nn.functional.cosine_similarity(intact, vectors, dim=-1))
    return torch.stack(damages, dim=1)


def _close(first: int, width: int, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    contexts = inputs[0].clone()
    contexts[..., first : first + width] = 0
    return (contexts,)


def seconds(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """CPU seconds (of all threads) of `work`, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def compare(sides: dict[str, Callable[[Batch], Tensor]], batch: Batch, rounds: int) -> tuple[dict[str, float], float]:
    """The best CPU seconds of every side, and the largest difference of its numbers to the first side's."""
    best, difference = dict.fromkeys(sides, float("inf")), 0.0
    for _ in range(rounds):
        expected: Tensor | None = None
        for name, side in sides.items():
            duration, result = seconds(partial(side, batch))
            best[name] = min(best[name], duration)
            expected = result if expected is None else expected
            difference = max(difference, (result - expected).abs().max().item())
    return best, difference


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--sentences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(args.checkpoint or demo_checkpoint(), device="cpu")
    corpus = open_corpus(args.source, max_sentences=args.sentences)
    start, layer_index = time.process_time(), resumable_layers(checkpoint.model)
    assert layer_index is not None, "this model has no seats"
    print(f"finding the seats, once a run: {time.process_time() - start:.2f} s CPU")
    outputs = [layer_index.of[site.site, site.layer].output for site in checkpoint.attention_sites.order]
    batch_list = list(batches(corpus, checkpoint, tokens=args.tokens, limit=512))
    sides: dict[str, Callable[[Batch], Tensor]] = {"plain": partial(plain, checkpoint, outputs)}
    sides["ours"] = partial(ours, checkpoint, layer_index)
    if args.peers:
        batch_list = batch_list[:1]
        sides |= {name: make(checkpoint) for name, make in PEERS.items() if find_spec(name)}
    ours(checkpoint, layer_index, batch_list[0])  # captum is imported here
    totals, worst = dict.fromkeys(sides, 0.0), 0.0
    for batch in batch_list:
        best, difference = compare(sides, batch, args.rounds)
        totals = {name: total + best[name] for name, total in totals.items()}
        worst = max(worst, difference)
        shares = ", ".join(f"{name} {best[name]:.2f} s = {best[name] / best['plain']:.3f}" for name in sides)
        print(f"{tuple(batch.source.ids.shape)}: {shares}", flush=True)
    sentences = sum(len(batch.indices) for batch in batch_list)
    print(f"{checkpoint.model_type}, {sum(checkpoint.layout.values())} heads, {sentences} sentences", end=", ")
    print(f"torch {torch.__version__}; largest difference {worst:.1e}")
    print(f"ratio {totals['ours'] / totals['plain']:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
