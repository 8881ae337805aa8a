"""What learning gates costs beside plain fine-tuning, per update.

Run: python benchmarks/learning_gates.py CKPT SOURCE [TARGET] [--rounds N] [--keep K] [--threads N]

Plain fine-tuning of a Hugging Face model is what its users write: the model's own attention (SDPA), cross-entropy,
clipping, fused Adam; of a native Transformer the same loop without gates. All sides take the same batches in the
same process, in alternation; the median of the ratios of CPU seconds counts. Limit: 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headscope.data.corpus import open_corpus
from headscope.data.encoded import IGNORED
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.model.native.transformer import Transformer
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.examples import LabelLoss, TrainingExamples
from headscope.pruning.learning.finetuning import ADAM_EPSILON, BETAS, Recipe, Tuner, trained_parameters
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.learning.learners.l0 import L0, L0Options
from headscope.pruning.learning.learners.subset import Subset, SubsetOptions
from headscope.training.prepare import Numbers

LIMIT = 1.1
RECIPE = Recipe(updates=10_000, lr=1e-6, tokens=2048)


def plain(checkpoint: Checkpoint, data: TrainingExamples, parameters: list[nn.Parameter]) -> Callable[[Numbers], None]:
    """An update without headscope's attention, where the model has its own."""
    model: Any = checkpoint.model
    adam = torch.optim.Adam(parameters, lr=RECIPE.lr, betas=BETAS, eps=ADAM_EPSILON, fused=True)
    smoothing = 0.1 if checkpoint.needs_target else 0.0

    def update(numbers: Numbers) -> None:
        batch = data.batch(numbers, seed=1, epoch=1).to(checkpoint.device)
        adam.zero_grad(set_to_none=True)
        if isinstance(model, Transformer):
            loss, _, tokens = LabelLoss(smoothing).of(checkpoint, batch)
        else:
            inputs = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
            if batch.target is not None:
                inputs |= {"decoder_input_ids": batch.target.ids, "decoder_attention_mask": batch.target.real.long()}
            assert batch.labels is not None
            mask = batch.labels != IGNORED
            logits, labels = model(**inputs).logits[mask], batch.labels[mask]
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
            tokens = len(labels)
        (loss / max(tokens, 1)).backward()
        nn.utils.clip_grad_norm_(parameters, RECIPE.clip)
        adam.step()

    return update


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.checkpoint, device="cpu", dtype="float32")
    data = TrainingExamples(checkpoint, open_corpus(args.source, target=args.target, max_sentences=2000), limit=512)
    parameters, gates = trained_parameters(checkpoint, "none"), GateLayout(checkpoint.attention_sites)
    noise = torch.Generator().manual_seed(1)
    keep = args.keep or gates.heads // 3
    learners: dict[str, GateLearner] = {
        "l0": L0(gates, L0Options(strength=0.01), updates=10_000, generator=noise),
        "subset": Subset(gates, SubsetOptions(keep=keep), updates=10_000, generator=noise),
    }
    loss = LabelLoss(0.1 if checkpoint.needs_target else 0.0)
    tuners = {
        name: Tuner(checkpoint, data, RECIPE, parameters, learner, loss=loss) for name, learner in learners.items()
    }
    bare, groups = plain(checkpoint, data, parameters), data.plan(tokens=RECIPE.tokens, order=(1, 1))
    ratios: dict[str, list[float]] = {name: [] for name in tuners}
    for number in range(args.rounds):
        numbers = groups[number % len(groups)]
        checkpoint.model.train()
        base = seconds(lambda: bare(numbers))  # noqa: B023
        checkpoint.model.eval()
        for name, tuner in tuners.items():
            with tuner._training():
                ratios[name].append(seconds(lambda: tuner._step(numbers)) / base)  # noqa: B023
    for name, samples in ratios.items():
        value = statistics.median(samples)
        verdict = "ok" if value <= LIMIT else f"over the limit of {LIMIT}"
        print(f"{name}: {value:.3f} × plain fine-tuning per update ({base:.3f} s, {len(samples)} rounds): {verdict}")


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
