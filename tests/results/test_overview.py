"""What `show` says of a checkpoint fits a screen, most asked first, and `--verbose` has the rest."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import headscope as hs
from headscope.results.overview import Overview
from tests.makers import decoders

Command = Callable[..., tuple[int, str, str]]


def test_a_screen_has_it(command: Command) -> None:
    status, shown, _ = command("show", hs.assets.trained())
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 40 and lines[0].startswith("en-de: 72 heads, Transformer")
    assert "attention is 39 % of the parameters: half of the heads save 20 % at most" in shown
    assert [shlex.split(line.partition(":  ")[2])[:2] for line in lines[-3:]] == [
        *(["headscope", "analyze"], ["headscope", "analyze"], ["headscope", "prune"]),
    ]
    assert "accuracy" in shown and "needs" not in shown
    assert "mean largest attention weight" in command("show", hs.assets.trained(), "--verbose")[1]


def test_cache_and_attention_of_a_decoder_are_counted(tmp_path: Path) -> None:
    folder = decoders.saved(tmp_path / "model", tokenizer=decoders.byte_level(), num_key_value_heads=2)
    model = hs.load(folder)
    record = model.overview()
    site = record["sites"][0]
    own = sum(groups * width for groups, width in zip(site["groups"], site["width"], strict=True))
    assert record["cache"] == {"own": 4 * 2 * own, "cross": 0}
    sentences = [answer.sentence for answer in Overview(record).answers() if answer.question == "Key/value cache"]
    assert sentences == [f"{record['cache']['own']:,} bytes a token; half of the key/value heads save half of it"]


def test_what_is_peculiar_is_said() -> None:
    record = hs.load(hs.assets.trained()).overview()
    record["sites"][0] |= {"numbers": [1, 3, 5], "windows": [{"tokens": 512, "layers": [1, 3]}], "shared": [[3, 5]]}
    record["mixing"] = [{"site": "cross", "mixing": "linear", "summary": "an alpha matrix", "layers": [0]}]
    said = {answer.question: answer.sentence for answer in Overview(record).answers()}
    assert said["Layers with attention"] == "encoder-self: 1 3 5" and said["Sliding window"].endswith("layers 1 3")
    assert said["Shared weights"].startswith("encoder-self: layers 3 5;") and said["Mixing"].startswith(
        "linear: at cross"
    )
