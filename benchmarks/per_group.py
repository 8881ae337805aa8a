"""What it costs that every group of a layer keeps as many query heads: `--allocate per-group` against free choice.

Run: python benchmarks/per_group.py --data DIR --out FILE.csv [--seeds N] [--updates N]

DIR has Multi30k. A small Qwen3 (4 layers of 8 query heads in 2 groups, which learns 20,000 captions) loses a quarter,
half and three quarters of its heads by `obs-task`, ranked and refitted on 400 captions: any heads ("free", which only a
mask holds), one of every group of a layer at a time ("per-group"), or whole groups ("groups"). A row for every seed,
choice, number of heads kept and refit: nats a piece of 300 other captions.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from closed_form_pruning import lines, refit_model, scoring_context
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import headscope as hs
from headscope.data.corpus import open_corpus
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.ranking.criterion import criterion_named
from headscope.pruning.ranking.ranking import rank_heads

CHOICES = {"free": ("global", False), "per-group": ("per-group", False), "groups": ("global", True)}
"""By choice: the allocation, and whether groups go whole."""
SHARES, REFITS = (0.75, 0.5, 0.25), ("none", "least-squares")
LEARNT, CALIBRATION, TESTS, PIECES, BATCH, START, END = 20_000, 400, 300, 2_000, 64, "<s>", "</s>"


def tokenizer_of(captions: list[str]) -> Any:
    """BPE over bytes."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    letters, special = pre_tokenizers.ByteLevel.alphabet(), [START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    pieces.train_from_iterator(captions, trainer)
    pieces.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token=START, eos_token=END, pad_token=END)


def train_model(captions: list[str], tokenizer: Any, *, seed: int, updates: int) -> Checkpoint:
    """A Qwen3 trained on captions."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 3e-3, total_steps=updates)
    for _ in range(updates):
        sample = [captions[number] + END for number in torch.randint(len(captions), (BATCH,)).tolist()]
        batch = tokenizer(sample, padding=True, truncation=True, max_length=48, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        adam.zero_grad()
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        rate.step()
    return hs.load(model.eval(), tokenizer=tokenizer).checkpoint


def rows(checkpoint: Checkpoint, calibration: Any, test: Any, *, seed: int) -> list[dict[str, Any]]:
    """Every choice, number of heads kept and refit of one model."""
    context, meter = scoring_context(checkpoint, calibration, seed=seed), DamageMeter(checkpoint, test)
    intact = meter.measure(checkpoint.model).value
    results: list[dict[str, Any]] = [{"seed": seed, "choice": "intact", "kept": 32, "refit": "none", "nats": intact}]
    for choice, (allocation, whole_groups) in CHOICES.items():
        layout = GateLayout(checkpoint.attention_sites, whole_groups=whole_groups)
        if choice != "per-group":
            layout.groups = {}
        scores = criterion_named("obs-task").scores(replace(context, whole_groups=whole_groups))
        for share in SHARES:
            kept = round(share * layout.heads)
            ranking = rank_heads(layout, kept, lambda _, by=scores: by, allocation=allocation)  # type: ignore[misc]
            removed = layout.closed_heads(ranking.stays_open)
            for refit in REFITS:
                nats = meter.measure(refit_model(refit, context, removed)).value
                results.append({"seed": seed, "choice": choice, "kept": kept, "refit": refit, "nats": nats})
                print(results[-1], flush=True)
    return results


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=500)
    args = parser.parse_args()
    captions = lines(args.data / "train.en.gz")
    learnt, held_out = captions[:LEARNT], captions[LEARNT:]
    calibration, test = open_corpus(held_out[:CALIBRATION]), open_corpus(held_out[CALIBRATION : CALIBRATION + TESTS])
    tokenizer, results = tokenizer_of(learnt), []
    for seed in range(1, args.seeds + 1):
        checkpoint = train_model(learnt, tokenizer, seed=seed, updates=args.updates)
        results += rows(checkpoint, calibration, test, seed=seed)
    table = pd.DataFrame(results)
    table.to_csv(args.out, index=False)
    print(table.groupby(["kept", "refit", "choice"])["nats"].agg(["mean", "std"]).to_string())


if __name__ == "__main__":
    main()
