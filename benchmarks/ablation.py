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
    """Damages [b N] as the analysis finds them."""
    with torch.inference_mode(), explained_batch(checkpoint, Representation(), batch, layer_index=layer_index) as its:
        return ablation(its, its.gates)


def plain(checkpoint: Checkpoint, outputs: list[nn.Module], batch: Batch) -> Tensor:
    """The loop over all heads [b N], each with a whole forward pass of the model's own eager attention."""
    place = checkpoint.attention_sites.order[0]
    damages = []
    with torch.inference_mode(), through_attend(checkpoint.model, implementation="eager"):
        intact = mean_pooled(checkpoint.states(batch), batch.source.real)
        for output in outputs:
            for head in range(place.heads):
                hook = output.register_forward_pre_hook(partial(_close, head * place.width, place.width))
                found = mean_pooled(checkpoint.states(batch), batch.source.real)
                hook.remove()
                damages.append(1 - torch.nn.functional.cosine_similarity(intact, found, dim=-1))
    return torch.stack(damages, dim=1)


def _close(first: int, width: int, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    joined = inputs[0].clone()
    joined[..., first : first + width] = 0
    return (joined,)


def seconds(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """CPU seconds (of all threads) that `work` takes, and what it finds."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def compare(sides: dict[str, Callable[[Batch], Tensor]], batch: Batch, rounds: int) -> tuple[dict[str, float], float]:
    """The best CPU seconds of every side, and the largest difference of its numbers to the first side's."""
    best, difference = dict.fromkeys(sides, float("inf")), 0.0
    for _ in range(rounds):
        expected: Tensor | None = None
        for name, side in sides.items():
            spent, found = seconds(partial(side, batch))
            best[name] = min(best[name], spent)
            expected = found if expected is None else expected
            difference = max(difference, (found - expected).abs().max().item())
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(given.checkpoint or demo_checkpoint(), device="cpu")
    corpus = open_corpus(given.source, max_sentences=given.sentences)
    spent, found = time.process_time(), resumable_layers(checkpoint.model)
    assert found is not None, "this model has no seats"
    print(f"finding the seats, once a run: {time.process_time() - spent:.2f} s CPU")
    outputs = [found.of[place.site, place.layer].output for place in checkpoint.attention_sites.order]
    read = list(batches(corpus, checkpoint, tokens=given.tokens, limit=512))
    sides: dict[str, Callable[[Batch], Tensor]] = {"plain": partial(plain, checkpoint, outputs)}
    sides["ours"] = partial(ours, checkpoint, found)
    if given.peers:
        read = read[:1]
        sides |= {name: make(checkpoint) for name, make in PEERS.items() if find_spec(name)}
    ours(checkpoint, found, read[0])  # captum is imported here
    totals, worst = dict.fromkeys(sides, 0.0), 0.0
    for batch in read:
        best, difference = compare(sides, batch, given.rounds)
        totals = {name: total + best[name] for name, total in totals.items()}
        worst = max(worst, difference)
        shares = ", ".join(f"{name} {best[name]:.2f} s = {best[name] / best['plain']:.3f}" for name in sides)
        print(f"{tuple(batch.source.ids.shape)}: {shares}", flush=True)
    sentences = sum(len(batch.indices) for batch in read)
    print(f"{checkpoint.model_type}, {sum(checkpoint.layout.values())} heads, {sentences} sentences", end=", ")
    print(f"torch {torch.__version__}; largest difference {worst:.1e}")
    print(f"ratio {totals['ours'] / totals['plain']:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
