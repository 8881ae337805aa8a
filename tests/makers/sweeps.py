"""A small model with texts that it translates, sweeps of it, and what `evaluate` says of a model."""

import random
from pathlib import Path
from typing import Any

from headscope.config.commands import EvaluateConfig, TranslateOptions
from headscope.config.option import make_config
from headscope.evaluation.run import run_evaluation
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.pruning.options.choice import SweepConfig, learners
from tests.makers.shared import write_lines


def letters(count: int, alphabet: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(alphabet, k=rng.randint(2, 7))) for _ in range(count)]


def make_words(folder: Path, checkpoint: TransformerCheckpoint) -> dict[str, Any]:
    NATIVE.save(checkpoint, folder / "model")
    sources = letters(17, "abcdefghijklmnopqr", 5)
    translations = [best[0].text or "a" for best in checkpoint.translations(sources, TranslateOptions(beam=3))]
    translations[::5] = letters(len(translations[::5]), "abcdefg", 6)
    return {
        "checkpoint": str(folder / "model"),
        "source": write_lines(folder / "train.src", letters(23, "abcdefghijklmnopqr", 1)),
        "target": write_lines(folder / "train.tgt", letters(23, "abcdefghijklmn", 2)),
        "valid_source": write_lines(folder / "valid.src", sources),
        "valid_target": write_lines(folder / "valid.tgt", translations),
    }


def config(words: dict[str, Any], out: Path, **options: Any) -> SweepConfig:
    quick: dict[str, Any] = {"methods": ("random",), "keep": (3,), "seeds": 1, "batch_tokens": 61, "bootstrap": 50}
    quick |= {"updates": 3} if {*quick["methods"], *options.get("methods", ())} & set(learners()) else {}
    translates = words.get("target") and options.get("metric", "bleu") in ("bleu", "chrf")
    text = {"text": "tokenised-lowercase"} if translates else {}
    return make_config(SweepConfig, {**words, "out": out, **text, **quick, **options})


def scores(checkpoint: Path | str, **options: Any) -> dict[str, float]:
    """The metrics of `headscope evaluate`, by name."""
    config = EvaluateConfig(**{"checkpoint": str(checkpoint), "bootstrap": 10, **options})
    return {score.metric: score.value for score in run_evaluation(config).scores}


def validate(words: dict[str, Any], **options: Any) -> dict[str, float]:
    """Metrics on the text that a sweep measures on."""
    texts: dict[str, Any] = {"source": words["valid_source"], "target": words.get("valid_target")}
    return scores(words["checkpoint"], **texts, bootstrap=2, **options)
