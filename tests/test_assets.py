"""The files that ship with the package: what the demonstration expects of the captions."""

from __future__ import annotations

import unicodedata
from importlib import resources

from headscope.assets import captions
from headscope.data.parses import read_conllu

FOLDER = resources.files("headscope.assets")


def lines(name: str) -> list[str]:
    text = (FOLDER / name).read_bytes().decode("utf-8")
    assert text.endswith("\n") and "\r" not in text
    return text[:-1].split("\n")


def test_the_parses_of_the_captions_are_of_their_lines() -> None:
    parses = read_conllu(captions("conllu"))
    assert [parse.text for parse in parses] == lines("captions.en")


def test_captions_are_240_distinct_pairs_of_one_sentence() -> None:
    english, german = lines("captions.en"), lines("captions.de")
    assert len(english) == len(german) == 240
    for side in (english, german):
        assert len({line.casefold() for line in side}) == len(side)
        for line in side:
            assert line == " ".join(line.split()) == unicodedata.normalize("NFC", line)
            assert 6 <= len(line.split()) <= 16, line
            assert line[0].isupper() and line[-1] == "." and line.count(".") == 1, line
    for source, target in zip(english, german, strict=True):
        assert 0.5 < len(source.split()) / len(target.split()) < 2, (source, target)
