"""Transformer-Tiny on Multi30k, English to German, against the published BLEU of Wu et al. 2021 (text only).

    python benchmarks/train_tiny.py --data DIR --out DIR

Text is made like Multi30k's own task-1 files: lower-cased, punctuation normalised and tokenised by Moses's
rules (sacremoses). One joint SentencePiece BPE vocabulary of 10,000 pieces. BLEU is sacreBLEU's of tokenised,
lower-cased text (pieces joined, nothing detokenised), beam 5. The training goes on where an earlier one with the
same --out was stopped, however it was stopped; once it is done the test sets are translated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headscope.data import read_lines
from headscope.evaluate import text_scores
from headscope.formats.base import TranslateOptions, open_checkpoint
from headscope.results import write_json
from headscope.training.config import PRESETS, TrainConfig
from headscope.training.engine import train
from headscope.training.normalise import normaliser
from headscope.training.variants.baseline import Baseline
from headscope.translate import translate_lines

PUBLISHED = {"test_2016_flickr": 41.0, "test_2017_flickr": 33.4, "test_2017_mscoco": 29.9}
LEAST = 40.5


def main() -> None:
    """Train (or go on), translate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.en.gz, train.de.gz, val.en.gz, …")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-sentences", type=int, help="a slice of the training text, to try the script")
    parser.add_argument("--max-updates", type=int, default=PRESETS["tiny"]["max_updates"])
    asked = parser.parse_args()
    found = train(settings(asked), Baseline(Baseline.Options()), resume=True)
    if found.reason == "interrupted":
        sys.exit(f"stopped after update {found.update}; the same command goes on from there")
    scores = test(asked, found.folder / "averaged")
    result = {"published": PUBLISHED, "bleu": scores, "updates": found.update, "seconds": found.seconds}
    result |= {"parameters": found.parameters, "signature": found.signature, "reached": reached(scores)}
    write_json(asked.out / "test.json", result)
    print(json.dumps(result, indent=2))


def settings(asked: argparse.Namespace) -> TrainConfig:
    """The recipe: preset tiny, and Multi30k's text."""
    values: dict[str, Any] = {**PRESETS["tiny"], "max_updates": asked.max_updates}
    text = {
        f"{prefix}{side}": asked.data / f"{split}.{language}.gz"
        for prefix, split in (("", "train"), ("valid_", "val"))
        for side, language in (("source", "en"), ("target", "de"))
    }
    return TrainConfig(
        out=asked.out,
        normalise="moses-lowercase",
        max_sentences=asked.max_sentences,
        bleu_every=5,
        seed=asked.seed,
        threads=asked.threads,
        device=asked.device,
        save_every=100,
        **text,
        **values,
    )


def test(asked: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """BLEU of the test sets by the averaged model."""
    model = open_checkpoint(str(checkpoint), device=asked.device)
    found = {}
    for name in PUBLISHED:
        sides = {}
        for language in ("en", "de"):
            lines = read_lines(asked.data / f"{name}.{language}.gz")
            sides[language] = list(map(normaliser("moses-lowercase", language), lines))
        translated = translate_lines(model, sides["en"], options=TranslateOptions(beam=5), tokens=4096)
        hypotheses = [each[0].text for each in translated]
        (score,) = text_scores(hypotheses, sides["de"], ["bleu"], mode="tokenised-lowercase", replicates=1000)
        found[name] = {"bleu": score.value, "low": score.low, "high": score.high, "signature": score.signature}
    return found


def reached(scores: dict[str, Any]) -> bool:
    """Whether the published number of test_2016_flickr is reached, within half a point."""
    return bool(scores["test_2016_flickr"]["bleu"] >= LEAST)


if __name__ == "__main__":
    main()
