"""The card of a folder: names are text in it, whatever they are, and code stays code."""

import html
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import transformers
from markdown_it import MarkdownIt

from headscope.assets import sample
from headscope.export.gguf_export import write_gguf
from headscope.export.gguf_layers import LlamaDecoder
from headscope.formats.base import open_checkpoint
from headscope.formats.exports import Card
from tests.makers import decoders
from tests.makers.shared import Command

NAMES = (
    "<img src=x onerror=alert(1)>",
    "a`<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "a | b\n--- | ---\n<b>c</b> | d",
    "x\n\n# heading\n<br>",
    "my_model-v1.2 *beta* & co",
)


class TagParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text_in_the_card(name: str) -> None:
    opens = f'`AutoModel.from_pretrained("<folder>[0]")` of {name}'
    card = Card(
        title=f"{name}: 3 heads", command="convert", facts=(f"made of {name}", "a < b"), opens=(opens,), limits=()
    )
    page = TagParser()
    page.feed(MarkdownIt("commonmark").enable("table").render(card.text()))
    assert page.tags <= {"h1", "h2", "p", "ul", "li", "code"}
    plain = " ".join(html.unescape(page.text).split())
    assert 'AutoModel.from_pretrained("<folder>[0]")' in plain and "a < b" in plain
    if "`" not in name:
        assert plain.count(" ".join(name.split())) == 3


# GGUF files, opened: the same numbers as of the folder that transformers makes of them.


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    model = open_checkpoint(str(decoders.save_decoder(folder / "whole", tokenizer=decoders.byte_level())))
    write_gguf(LlamaDecoder(model), model.tokenizer, folder / "model.gguf")  # type: ignore[attr-defined]
    return folder / "model.gguf"


@pytest.mark.slow
def test_heads_are_those_of_the_folder_that_transformers_makes(file: Path, tmp_path: Path, command: Command) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(tmp_path / "folder")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path / "folder")
    tables = []
    for path in (file, tmp_path / "folder"):
        more = ("--source", sample("en"), "--max-sentences", 6, "--only", "confidence,entropy,sink", "--device", "cpu")
        status, _, err = command("analyze", path, *more, "--out", tmp_path / f"of-{path.name}")
        assert (status, "it/s" in err) == (0, False), err
        tables.append((tmp_path / f"of-{path.name}" / "heads.csv").read_bytes())
    assert tables[0] == tables[1]
    signature = json.loads((tmp_path / "of-model.gguf" / "run.json").read_text())["signature"]
    assert "ckpt:gguf-sha256=" in signature and "dtype:float32 of F32" in signature
