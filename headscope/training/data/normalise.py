"""Text as Multi30k's task-1 files have it: punctuation normalised, lower-cased, split into tokens by Moses's rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from headscope.errors import ConfigError
from headscope.training.config import Normalise


def normaliser(method: Normalise, language: str) -> Callable[[str], str]:
    """What is done to every line before it is split into subwords; "lowercase" is done by the tokenizer itself.

    "moses": Moses's punctuation normalisation, then its tokenizer (without escapes for XML), by sacremoses;
    "moses-lowercase" lower-cases first, as Multi30k's task-1 text is made (lowercase, normalise, tokenise).
    """
    if not method.startswith("moses"):
        return lambda text: text
    low = method == "moses-lowercase"
    split = _moses(language)
    return lambda text: split(text.lower() if low else text)


@lru_cache(maxsize=4)
def _moses(language: str) -> Callable[[str], str]:
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ModuleNotFoundError:
        raise ConfigError("--normalise moses needs sacremoses: pip install 'headscope[train]'") from None
    marks, tokens = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)

    def split(text: str) -> str:
        tokenised: str = tokens.tokenize(marks.normalize(text), return_str=True, escape=False)
        return tokenised

    return split
