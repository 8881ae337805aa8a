"""Transformer-Tiny on Multi30k, English to German, against the published BLEU of Wu et al. 2021 (text only).

    python benchmarks/train_tiny.py --data DIR --out DIR
    torchrun --nproc-per-node 2 benchmarks/train_tiny.py --data DIR --out DIR --threads 1

Text is made like Multi30k's own task-1 files: lower-cased, punctuation normalised and tokenised by Moses's
rules (sacremoses). One joint SentencePiece BPE vocabulary of 10,000 pieces. BLEU is sacreBLEU's of tokenised,
lower-cased text (pieces joined, nothing detokenised), beam 5, length power 1 (fairseq's default).

The recipe is that of the published command (README-baseline.md of Revisit-MMT): two GPUs with 4,096 tokens on each,
so an update is made of two batches; 8,000 updates, a validation after every epoch, an early end when ten in a row were
no better; the mean of the last ten epochs is tested. One process makes both batches, or two processes on two cores make
one each. The model begins as fairseq's do since 0.10. An interrupted command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headscope.bootstrap import Bootstrap
from headscope.config.commands import TranslateOptions
from headscope.distributed import process_group
from headscope.evaluation.quality import text_score
from headscope.evaluation.translation import TOKENISED, translate_lines
from headscope.files.reading import read_lines
from headscope.files.writing import write_json
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.prepare import normaliser
from headscope.training.trainer import train
from headscope.training.variants.widths import Baseline

PUBLISHED_BLEU = {"test_2016_flickr": 41.0, "test_2017_flickr": 33.4, "test_2017_mscoco": 29.9}
LOWEST_BLEU = 40.5


def main() -> None:
    """Train (or go on), translate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.en.gz, train.de.gz, val.en.gz, …")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-sentences", type=int, help="a slice of the training text, to try the script")
    parser.add_argument("--updates", type=int, default=PRESETS["tiny"]["updates"])
    args = parser.parse_args()
    with process_group() as processes:
        training = train(settings(args, processes.world), Baseline(Baseline.Options()), resume=True)
    if not processes.main:
        return
    if training.reason == "interrupted":
        sys.exit(f"stopped after update {training.update} in {training.folder}; the same command goes on from there")
    model = open_checkpoint(str(args.out / "averaged"), device=args.device)
    scores = {text: bleu(model, normalise_text(args, text)) for text in ("val", *PUBLISHED_BLEU)}
    result = {
        "published": PUBLISHED_BLEU,
        "bleu": scores,
        "reached": scores["test_2016_flickr"]["bleu"] >= LOWEST_BLEU,
        "updates": training.update,
        "ended by": training.reason,
        "parameters": training.parameters,
        "signature": training.signature,
    }
    write_json(args.out / "test.json", result)
    print(json.dumps(result, indent=2))


def settings(args: argparse.Namespace, world: int) -> TrainConfig:
    """The recipe: preset tiny, and Multi30k's text. Batches of an update are spread over the processes."""
    values: dict[str, Any] = {**PRESETS["tiny"], "updates": args.updates}
    values["accumulate"] = max(values["accumulate"] // world, 1)
    text = {
        f"{prefix}{side}": args.data / f"{split}.{language}.gz"
        for prefix, split in (("", "train"), ("valid_", "val"))
        for side, language in (("source", "en"), ("target", "de"))
    }
    return TrainConfig(
        out=args.out,
        normalise="moses-lowercase",
        max_sentences=args.max_sentences,
        precision="bf16",
        bleu_every=20,
        patience=10,
        seed=args.seed,
        threads=args.threads,
        device=args.device,
        save_every=100,
        **text,
        **values,
    )


def normalise_text(args: argparse.Namespace, text: str) -> tuple[list[str], list[str]]:
    """The English and the German lines of a text as the model was trained on them."""
    english, german = (
        list(map(normaliser("moses-lowercase", language), read_lines(args.data / f"{text}.{language}.gz")))
        for language in ("en", "de")
    )
    return english, german


def bleu(model: Checkpoint, sides: tuple[Sequence[str], Sequence[str]]) -> dict[str, Any]:
    """BLEU of a model's translations of a text, with its 95 % interval."""
    translations = translate_lines(model, sides[0], options=TranslateOptions(beam=5, lenpen=1.0), tokens=4096)
    hypotheses = [candidates[0].text for candidates in translations]
    bootstrap = Bootstrap(seed=1, replicates=1000)
    score = text_score("bleu", hypotheses, sides[1], text=TOKENISED, bootstrap=bootstrap)
    return {"bleu": score.value, "low": score.low, "high": score.high, "signature": score.signature}


if __name__ == "__main__":
    main()
