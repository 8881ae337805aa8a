"""A hook of MkDocs (see mkdocs.yml): in tables, code with bars loses the backslashes that GitHub wants and it shows."""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"`[^`]*`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page without those backslashes."""

    def bare(row: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])

    return re.sub(r"^\|.*$", bare, markdown, flags=re.MULTILINE)
