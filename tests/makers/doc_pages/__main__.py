"""Writes what the code says into the pages of `docs/`: `python -m tests.makers.doc_pages`."""

from tests.makers.doc_pages.write import written

for page, text in written().items():
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
