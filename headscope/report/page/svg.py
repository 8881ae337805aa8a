"""Figures as SVG for the page: elements of its own document, which the page's policy lets stand."""

from __future__ import annotations

import re
from io import StringIO
from xml.sax.saxutils import quoteattr

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from headscope.report.styles import FigureStyle
from headscope.results.result import CONTROL

PROPERTY = re.compile(r"\s*([\w-]+):\s*([^;]*)")
LONG = re.compile(r"(\d\.\d\d)\d+")


def figure_svg(figure: Figure, name: str, title: str) -> Markup:
    """A figure as an `svg` element: no style of its own, ids that begin with `name`, hundredths of a point."""
    content = StringIO()
    with FigureStyle().in_use(), rc_context({"svg.hashsalt": name}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    svg = content.getvalue()
    svg = CONTROL.sub("\ufffd", svg[svg.index("<svg") :])
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r"<[^>]+>", lambda tag: _element(tag[0], name, used), svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label={quoteattr(title)}', 1))


def _element(tag: str, name: str, used: set[str]) -> str:
    """A tag with its style as attributes, and an id only where something refers to it."""
    tag = re.sub(r' id="([^"]*)"', lambda own: f' id="{name}-{own[1]}"' if own[1] in used else "", tag)
    tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r' style="([^"]*)"', lambda style: _attributes(style[1]), LONG.sub(r"\1", tag))
    return re.sub(r"\s+", " ", tag)


def _attributes(style: str) -> str:
    """Properties as attributes; the family of letters is the page's."""
    return "".join(f" {own[1]}={quoteattr(own[2])}" for own in PROPERTY.finditer(style) if own[1] != "font-family")
