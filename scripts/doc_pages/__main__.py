"""Writes what the code says into the pages of `docs/`: `python -m scripts.doc_pages`."""

from scripts.doc_pages.write import render_pages

for page, text in render_pages().items():
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
