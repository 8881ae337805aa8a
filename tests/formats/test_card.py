"""The card of a folder: names are text in it, whatever they are, and code stays code."""

from __future__ import annotations

import html
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from headscope.formats.exports import Card

NAMES = (
    "<img src=x onerror=alert(1)>",
    "a`<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "a | b\n--- | ---\n<b>c</b> | d",
    "x\n\n# heading\n<br>",
    "my_model-v1.2 *beta* & co",
)


class Tags(HTMLParser):
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
    shown = Tags()
    shown.feed(MarkdownIt("commonmark").enable("table").render(card.text()))
    assert shown.tags <= {"h1", "h2", "p", "ul", "li", "code"}
    plain = " ".join(html.unescape(shown.text).split())
    assert 'AutoModel.from_pretrained("<folder>[0]")' in plain and "a < b" in plain
    if "`" not in name:
        assert plain.count(" ".join(name.split())) == 3
