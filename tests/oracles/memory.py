"""Inputs of API tests: captions as lists, options of quick analyses, transformers models in memory."""

import copy
from typing import Any
from unittest.mock import patch

import headscope as hs
from headscope.report.page.write import gather
from tests.oracles import speakers, tiny

N = 13
SOURCES, TARGETS = (
    hs.assets.captions(language).read_text(encoding="utf-8").splitlines()[:N] for language in ("en", "de")
)
CHEAP: dict[str, Any] = {"only": ("confidence", "positional", "similarity"), "bootstrap": 17}


def build_model(kind: str) -> tuple[Any, Any]:
    """A random transformers model of its own, and a tokenizer."""
    checkpoint: Any = speakers.checkpoint(kind)
    return copy.deepcopy(checkpoint.model), checkpoint.tokenizer


def load_model(kind: str) -> hs.Model:
    """The two as the API opens them."""
    model, tokenizer = build_model(kind)
    return hs.load(model, tokenizer=tokenizer)


def sentences() -> list[str]:
    """Sentences of words that the tokenizer knows."""
    words = tiny.PIECES[5:]
    return [" ".join(words[(3 * i + j) % len(words)] for j in range(3 + i)) for i in range(5)]


def assert_reopens(result: Any) -> None:
    """A result in memory says what its folder says, and the page shows the same answers."""
    answers = result.answers()
    assert answers and type(result).open(result.folder).answers() == answers
    with patch("headscope.report.page.write.draw", return_value=[]):
        page_answers = [answer for block in gather([result.folder]).blocks for answer in block.answers]
    assert all(answer in page_answers for answer in answers)
