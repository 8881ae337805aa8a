"""The compact form of a report, which a notebook shows: findings, maps as static SVG, the first rows of the table.

It holds no script and no style sheet, works in light and in dark, and shows the numbers of a cell on hover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from headscope.report.layout.families import contrast, functions_of
from headscope.report.page.importance import numbers, places_of
from headscope.report.page.numbers import palette, words
from headscope.report.page.write import text

Data = Mapping[str, Any]
SHOWN = 12  # rows of the table
CELL, EDGE, TOP = 22, 26, 34  # pixels of a cell, beside and above a map
MAPS = 2  # measures


def compact_html(data: Data, heads: pd.DataFrame, remarks: Sequence[str]) -> str:
    """What `Study._repr_html_` gives: inert HTML, whatever the texts and names of a run contain."""
    findings = "".join(f"<li>{text(finding)}</li>" for finding in data["findings"])
    lines = "".join(f"<p>{text(line)}</p>" for line in remarks)
    maps = "".join(_maps(data, measure) for measure in _measures(data))
    columns = [name for name in heads.columns if not str(name).endswith(("_low", "_high"))]
    rows = (
        heads[columns].head(SHOWN).map(lambda cell: text(cell) if isinstance(cell, str) else cell).rename(columns=text)
    )
    table = rows.to_html(index=False, border=0, escape=False, float_format=lambda value: f"{value:.3f}")
    hidden = len(heads) - SHOWN
    more = f"<p>… {hidden} more heads in <code>.heads</code></p>" if hidden > 0 else ""
    details = f"<details><summary>table, remarks, signature</summary>{table}{more}{lines}"
    return (
        f"<div><ul>{findings}</ul>{maps}{details}<p><small>{text(data['signature'])}</small></p></details>"
        "<p><small>the whole page: <code>.report('page.html')</code></small></p></div>"
    )


def _measures(data: Data) -> list[Data]:
    """The first overview measures of a run, or its first one."""
    ranked = sorted((m for m in data["measures"] if m["overview"]), key=lambda measure: measure["overview"])
    measures: list[Data] = [*ranked, *data["measures"]]
    return measures[: max(min(MAPS, len(ranked)), 1)]


def _maps(data: Data, measure: Data) -> str:
    colors, values = palette(measure["scale"]["cmap"]), numbers(measure)
    grids = []
    for site, counts in data["layout"].items():
        cells = [
            _cell(place, value, labels, measure, colors)
            for place, value, labels in zip(places_of(data), values, data["functions"], strict=True)
            if place[0] == site
        ]
        width, height = EDGE + max(counts, default=0) * CELL + 4, TOP + len(counts) * CELL + 4
        layers = "".join(
            f'<text x="{EDGE - 6}" y="{TOP + layer * CELL + 15}" text-anchor="end">{layer}</text>'
            for layer in range(len(counts))
        )
        across = "".join(
            f'<text x="{EDGE + head * CELL + CELL / 2:g}" y="{TOP - 5}" text-anchor="middle">{head}</text>'
            for head in range(max(counts, default=0))
        )
        title = f'<text x="2" y="13" font-weight="bold">{text(measure["title"])} · {text(site)}</text>'
        grids.append(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
            f'aria-label="{text(measure["title"])} of the heads at {text(site)}" font-family="sans-serif" '
            f'font-size="10" fill="currentColor" overflow="visible">{title}{layers}{across}{"".join(cells)}</svg>'
        )
    return f"<p>{' '.join(grids)}</p>"


def _cell(
    place: tuple[str, int, int], value: float, labels: Sequence[str], measure: Data, colors: Sequence[str]
) -> str:
    low, high = measure["scale"]["low"], measure["scale"]["high"]
    x, y = EDGE + place[2] * CELL, TOP + place[1] * CELL
    color = ""
    if value == value:
        share = (value - low) / (high - low) if high > low else 0.5
        color = colors[round(min(max(share, 0), 1) * (len(colors) - 1))]
    fill = f'fill="{color}"' if color else 'fill="none" stroke="currentColor" stroke-opacity="0.3"'
    ink = contrast(color) if color else "currentColor"
    at = f'x="{x + CELL / 2 - 1:g}" y="{y + 14}"'
    glyph = "".join(function.family.glyph for function in functions_of(";".join(labels))[:1])
    mark = f'<text {at} text-anchor="middle" fill="{ink}">{text(glyph)}</text>' if glyph else ""
    said = f"{'.'.join(map(str, place))}: {measure['title']} {words(value)}; {', '.join(labels) or 'no label'}"
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" {fill}/>'
    return f"<g><title>{text(said)}</title>{box}{mark}</g>"
