"""Figures show themselves in a notebook, although pyplot did not make them."""

from __future__ import annotations

import sys


def show_in_notebook() -> None:
    """Let IPython draw figures as PNG where it does not know how to yet: unasked it does once pyplot is imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib.figure import Figure

    formatters = shell.display_formatter.formatters
    if not any(Figure in formatters[f"image/{kind}"].type_printers for kind in ("png", "jpeg", "svg+xml")):
        select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
