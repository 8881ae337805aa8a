"""Transformer-Tiny on Multi30k, English to German, against the published BLEU of Wu et al. 2021 (text only).

    python benchmarks/train_tiny.py --data DIR --out DIR

Text is made like Multi30k's own task-1 files: lower-cased, punctuation normalised and tokenised by Moses's
rules (sacremoses). One joint SentencePiece BPE vocabulary of 10,000 pieces. BLEU is sacreBLEU's of tokenised,
lower-cased text (pieces joined, nothing detokenised), beam 5.

The published command (README-baseline.md of Revisit-MMT) runs on two GPUs with 4,096 tokens on each, so an update is
made of two batches; it validates after every epoch and stops when ten in a row were no better. Here one process makes
both batches, or two processes on two cores make one each:

    torchrun --nproc-per-node 2 benchmarks/train_tiny.py --data DIR --out DIR --threads 1

The model begins as fairseq's do since 0.10. The published recipe ends after 8,000 updates with half of its peak rate.
From the mean of its last ten epochs two trainings go on, 1,000 updates in which the rate falls to 0 (`ANNEALING`),
each with a data order of its own; their weights' mean is a fourth model. The model and the power of the length in the
score of a translation (`POWERS`; fairseq's default is 1) are chosen by BLEU of the validation text; every model is
tested with the power chosen for it and with 1. Trainings go on where an earlier command with the same --out was
stopped, however it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headscope.data import read_lines
from headscope.evaluate import text_scores
from headscope.formats.base import Checkpoint, TranslateOptions, open_checkpoint
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.processes import together
from headscope.results import write_json
from headscope.training.checkpoints import average
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.engine import Outcome, train
from headscope.training.normalise import normaliser
from headscope.training.variants.baseline import Baseline
from headscope.translate import translate_lines

ANNEALING: Mapping[str, Any] = {
    "max_updates": 1000,
    "schedule": "cosine",
    "lr": 0.0015,
    "warmup": 100,
    "precision": "bf16",
    "average": 1,
    "patience": None,
}
ANNEALINGS = 2
POWERS = (1.0, 1.4, 1.8)
PUBLISHED = {"test_2016_flickr": 41.0, "test_2017_flickr": 33.4, "test_2017_mscoco": 29.9}
LEAST = 40.5


def main() -> None:
    """Train (or go on), anneal, translate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.en.gz, train.de.gz, val.en.gz, …")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-sentences", type=int, help="a slice of the training text, to try the script")
    parser.add_argument("--max-updates", type=int, default=PRESETS["tiny"]["max_updates"])
    asked = parser.parse_args()
    start, *ends = asked.out / "averaged", *(asked.out / f"annealed-{n}" for n in range(1, 1 + ANNEALINGS))
    with together() as processes:
        first = trained(settings(asked, processes.world))
        again = replace(settings(asked, processes.world), init=str(start), **annealing(asked))
        later = [trained(replace(again, seed=asked.seed - 1 + n, out=end)) for n, end in enumerate(ends, start=1)]
    if not processes.main:
        return
    models = {"published recipe": start, **{end.name: end / "last" for end in ends}}
    models["mean of the annealed"] = mean([end / "last" for end in ends], asked.out / "mean")
    found = {name: tested(asked, model) for name, model in models.items()}
    chosen = max(found, key=lambda name: found[name]["validation"][str(found[name]["power"])])
    result = {
        "published": PUBLISHED,
        "chosen": chosen,
        "bleu": found[chosen]["test"],
        "models": found,
        "updates": [each.update for each in (first, *later)],
        "parameters": first.parameters,
        "signatures": [each.signature for each in (first, *later)],
        "reached": found[chosen]["test"]["test_2016_flickr"]["bleu"] >= LEAST,
    }
    write_json(asked.out / "test.json", result)
    print(json.dumps(result, indent=2))


def tested(asked: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """BLEU of the validation text by the power of the length, the best of these, and BLEU of the test sets with it."""
    model = open_checkpoint(str(checkpoint), device=asked.device)
    sides = {text: normalised(asked, text) for text in ("val", *PUBLISHED)}
    validation = {power: bleu(model, sides["val"], power)["bleu"] for power in POWERS}
    power = max(validation, key=lambda power: validation[power])
    plain = {name: bleu(model, sides[name], 1.0) for name in PUBLISHED}
    return {
        "validation": {str(power): value for power, value in validation.items()},
        "power": power,
        "test": plain if power == 1 else {name: bleu(model, sides[name], power) for name in PUBLISHED},
        "test with power 1": plain,
    }


def mean(checkpoints: Sequence[Path], out: Path) -> Path:
    """Write the mean of several models' weights (Wortsman et al. 2022, uniform soup)."""
    opened = [open_checkpoint(str(path), device="cpu") for path in checkpoints]
    first = opened[0]
    assert isinstance(first, TransformerCheckpoint)
    states = [each.model.state_dict() for each in opened]
    first.model.load_state_dict(average(states))
    NATIVE.save(first, out, force=True)
    return out


def trained(config: TrainConfig) -> Outcome:
    """Train to the end; ends the program where it is stopped."""
    found = train(config, Baseline(Baseline.Options()), resume=True)
    if found.reason == "interrupted":
        sys.exit(f"stopped after update {found.update} in {config.out}; the same command goes on from there")
    return found


def annealing(asked: argparse.Namespace) -> dict[str, Any]:
    """What is different in the second training; as much shorter as the first one was asked to be."""
    share = asked.max_updates / PRESETS["tiny"]["max_updates"]
    updates, warmup = (max(1, round(ANNEALING[name] * share)) for name in ("max_updates", "warmup"))
    return {**ANNEALING, "max_updates": updates, "warmup": warmup}


def settings(asked: argparse.Namespace, world: int) -> TrainConfig:
    """The recipe: preset tiny, and Multi30k's text. Batches of an update are spread over the processes."""
    values: dict[str, Any] = {**PRESETS["tiny"], "max_updates": asked.max_updates}
    values["accumulate"] = max(values["accumulate"] // world, 1)
    text = {
        f"{prefix}{side}": asked.data / f"{split}.{language}.gz"
        for prefix, split in (("", "train"), ("valid_", "val"))
        for side, language in (("source", "en"), ("target", "de"))
    }
    return TrainConfig(
        out=asked.out,
        normalise="moses-lowercase",
        max_sentences=asked.max_sentences,
        precision="bf16",
        bleu_every=20,
        patience=10,
        seed=asked.seed,
        threads=asked.threads,
        device=asked.device,
        save_every=100,
        **text,
        **values,
    )


def normalised(asked: argparse.Namespace, text: str) -> tuple[list[str], list[str]]:
    """The English and the German lines of a text as the model was trained on them."""
    english, german = (
        list(map(normaliser("moses-lowercase", language), read_lines(asked.data / f"{text}.{language}.gz")))
        for language in ("en", "de")
    )
    return english, german


def bleu(model: Checkpoint, sides: tuple[Sequence[str], Sequence[str]], power: float) -> dict[str, Any]:
    """BLEU of a model's translations of a text, with its 95 % interval."""
    translated = translate_lines(model, sides[0], options=TranslateOptions(beam=5, power=power), tokens=4096)
    hypotheses = [each[0].text for each in translated]
    (score,) = text_scores(hypotheses, sides[1], ["bleu"], mode="tokenised-lowercase", replicates=1000)
    return {"bleu": score.value, "low": score.low, "high": score.high, "signature": score.signature}


if __name__ == "__main__":
    main()
