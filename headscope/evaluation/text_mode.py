"""How translations and references are compared: as they are, split into words by sacreBLEU, or already tokenised.

BLEU counts words, so its tokenizer must know where words end in the language: `13a` makes one word of a Chinese
sentence, and a translation that differs in one character scores 0. chrF counts characters and needs none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headscope.errors import ConfigError, reason_of
from headscope.formats.base import Checkpoint

Mode = Literal["raw", "tokenised-lowercase"]
DEFAULT, BY_SPACES = "13a", ("13a", "intl", "none")
INSTALLABLE = {"ja-mecab": ("char", "ja"), "ko-mecab": ("char", "ko")}
"""Tokenizers that sacreBLEU has only with an extra of its own, with what is taken instead."""
TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "wuu", "lzh"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"), "char"),
}
"""By the language's code, where `13a` is not right: sacreBLEU's own choices, and characters where it has none."""


@dataclass(frozen=True)
class TextMode:
    """Whether texts are compared as they are, and what splits them into words for BLEU."""

    name: Mode = "raw"
    tokenize: str = DEFAULT

    @property
    def raw(self) -> bool:
        """Whether texts are detokenised and their case counts."""
        return self.name == "raw"


RAW, TOKENISED = TextMode(), TextMode("tokenised-lowercase", "none")


def text_mode(checkpoint: Checkpoint, name: Mode = "raw", tokenize: str | None = None) -> tuple[TextMode, list[str]]:
    """How texts in the language that a checkpoint writes are compared, and what the user should know of that.

    ConfigError for a `tokenize` that is of no use, or that sacreBLEU cannot load.
    """
    if name != "raw":
        if tokenize is not None:
            raise ConfigError("--bleu-tokenize is about detokenised text, which --text raw compares; leave one out")
        return TOKENISED, []
    if tokenize is not None:
        if why := _why_missing(tokenize):
            raise ConfigError(f"--bleu-tokenize {tokenize}: {why}")
        return TextMode(name, tokenize), []
    language = re.split(r"[_-]", (checkpoint.writes or "").strip("<>|_").lower())[0]
    chosen = TOKENIZERS.get(language, DEFAULT)
    if chosen not in INSTALLABLE or not _why_missing(chosen):
        return TextMode(name, chosen), []
    other, extra = INSTALLABLE[chosen]
    return TextMode(name, other), [
        f"BLEU counts characters (tok:{other}), as sacreBLEU's {chosen} is not installed; pip install "
        f"'sacrebleu[{extra}]' for numbers that can be compared with published ones"
    ]


def _why_missing(tokenize: str) -> str | None:
    """Why sacreBLEU cannot load a tokenizer, and what to do. Returns None if it can."""
    from sacrebleu.metrics.bleu import BLEU

    try:
        BLEU(tokenize=tokenize)
    except (RuntimeError, ImportError) as error:
        extra = INSTALLABLE.get(tokenize, ("", ""))[1]
        return f"sacreBLEU lacks what it needs; pip install 'sacrebleu[{extra}]'" if extra else reason_of(error)
    except OSError as error:
        return f"sacreBLEU fetches its model from the internet, and could not ({reason_of(error)})"
    return None


def text_remarks(references: Sequence[str], mode: TextMode) -> list[str]:
    """Remarks where references are not split into words as the mode assumes."""
    texts = [text.strip() for text in references if text.strip()]
    spaced = sum(text.endswith((" .", " ?", " !")) for text in texts)
    if mode.raw and spaced > len(texts) / 2:
        return [
            "the references look tokenised, so raw BLEU and chrF cannot be compared with published ones; give "
            "detokenised text, or --text tokenised-lowercase"
        ]
    if mode.tokenize in BY_SPACES and sum(" " not in text for text in texts) > len(texts) / 2:
        return [
            f"most references have no spaces, and BLEU (tok:{mode.tokenize}) takes each for one word; give "
            "--bleu-tokenize zh, ja-mecab, ko-mecab or char, or read chrF"
        ]
    return []
