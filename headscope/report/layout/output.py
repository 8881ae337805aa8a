"""How figures are set (for print or for a screen, how wide, with or without title and signature) and written.

Figures are laid out in inches and points of print; for a screen the finished figure is enlarged as a whole, so that
both have the same proportions. A style holds within `with figure_style(…)`, for everything that is drawn there.
A file has its format from its extension and comes by a rename; text is kept as text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axis import Tick
from matplotlib.collections import Collection, PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from headscope.errors import ConfigError
from headscope.files.output_checks import check_file
from headscope.files.writing import write_atomically

MARGIN = 0.18  # inches around everything
ENLARGED = {"paper": 1.0, "screen": 1.35}
DPI = {"paper": 300, "screen": 150}
"""Dots per inch of PNG where none are asked for."""
SIZES_OF_TICKS = ("length", "width", "pad", "labelsize")
NARROWEST, WIDEST = 2.0, 60.0  # inches that a figure may be asked to have


@dataclass(frozen=True)
class FigureStyle:
    """`paper` has letters of 6 to 10 points, `screen` letters a third larger; `width` in inches is that of the figure.

    Without a width a figure is as wide as its cells and panels need.
    """

    name: str = "screen"
    width: float | None = None
    title: bool = True
    signature: bool = True

    def __post_init__(self) -> None:
        if self.name not in ENLARGED:
            raise ConfigError(f"--style {self.name!r} is not known; choose from {', '.join(ENLARGED)}")
        if self.width is not None and not NARROWEST <= self.width <= WIDEST:
            raise ConfigError(f"--width {self.width:g}: give inches from {NARROWEST:g} to {WIDEST:g}")

    @property
    def scale(self) -> float:
        """By how much the finished figure is enlarged."""
        return ENLARGED[self.name]

    @property
    def room(self) -> float | None:
        """Inches between the margins, before the figure is enlarged; None if it may be as wide as it needs."""
        return None if self.width is None else self.width / self.scale - 2 * MARGIN


_STYLE: ContextVar[FigureStyle] = ContextVar("figure style", default=FigureStyle())  # noqa: B039 - it is frozen


def current_style() -> FigureStyle:
    """The style that holds here."""
    return _STYLE.get()


@contextmanager
def figure_style(style: FigureStyle) -> Iterator[None]:
    """Within the block figures are drawn in this style."""
    token = _STYLE.set(style)
    try:
        yield
    finally:
        _STYLE.reset(token)


def widest(usual: float, *, besides: float = 0.0) -> float:
    """Inches that panels may take in a line: as usual, or what the asked width leaves `besides` other things."""
    room = current_style().room
    return usual if room is None else room - besides


def cell_pitch(usual: float, count: int, *, besides: float, least: float = 0.05) -> float:
    """Inches of each of `count` cells in a row: as usual, or less where the asked width leaves less.

    `besides` is what the panel needs for labels and colour bar; a cell is never narrower than `least`.
    """
    room = current_style().room
    return usual if room is None else max(min(usual, (room - besides) / max(count, 1)), least)


def panel_width(
    usual: float, count: int, *, left: float, gap: float, most: float, besides: float = 0.0, least: float = 0.8
) -> float:
    """Inches of the axes of equal panels in lines of `most` inches, `left` inches of labels beside each.

    As usual, or, where a width is asked for, so that they fill what it leaves `besides` other things: in as many
    columns as leave each `least` of the usual.
    """
    if current_style().room is None:
        return usual
    room = widest(most, besides=besides)
    columns = max(1, min(count, int((room + gap + 1e-9) // (left + least * usual + gap))))
    return min((room + gap) / columns - gap - left, 1.8 * usual)


def enlarge(figure: Figure, scale: float) -> None:
    """Make a figure, its letters, lines and marks larger; nothing moves relative to the page."""
    if scale == 1:
        return
    figure.set_size_inches(*(figure.get_size_inches() * scale))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):  # ticks that do not exist yet too
            ticks = axis.get_tick_params()
            sizes: dict[str, Any] = {name: ticks[name] * scale for name in SIZES_OF_TICKS if name in ticks}
            axis.set_tick_params(**sizes)
            axis.labelpad *= scale
    of_ticks = {id(part) for tick in figure.findobj(Tick) for part in tick.findobj()}
    for artist in figure.findobj(include_self=False):
        if id(artist) not in of_ticks:
            if isinstance(artist, Text):
                artist.set_fontsize(float(artist.get_fontsize()) * scale)
            elif isinstance(artist, Line2D):
                artist.set_linewidth(artist.get_linewidth() * scale)
                artist.set_markersize(artist.get_markersize() * scale)
                artist.set_markeredgewidth(artist.get_markeredgewidth() * scale)
            elif isinstance(artist, Patch):
                artist.set_linewidth(artist.get_linewidth() * scale)
            elif isinstance(artist, Collection):
                artist.set_linewidth((np.atleast_1d(artist.get_linewidth()) * scale).tolist())
                if isinstance(artist, PathCollection):
                    artist.set_sizes(artist.get_sizes() * scale**2)


FORMATS = (".png", ".svg", ".pdf")
MOST_PIXELS = 2**16 - 1  # of a side, which is what the renderer can do; of an image a sixteenth of its square: 1 GB
METADATA: dict[str, dict[str, Any]] = {  # no dates: the same run gives the same bytes
    ".png": {"Software": "headscope"},
    ".svg": {"Creator": "headscope", "Date": None},
    ".pdf": {"Creator": "headscope", "CreationDate": None},
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headscope",
    "pdf.fonttype": 42,
    "text.hinting": "none",  # small letters as wide as they were measured
    "hatch.linewidth": 0.4,
    "axes.unicode_minus": True,
}
# pieces of texts in scripts that DejaVu Sans lacks, drawn where one of these is installed
FALLBACKS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Devanagari", "WenQuanYi Zen Hei", "Arial Unicode MS")


def check_path(path: Path, *, force: bool = False) -> Path:
    """ConfigError for an extension that is no format, OutputError for a file that must not be replaced."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"--out {path}: cannot write {path.suffix or 'a file without extension'}; "
            f"end the name with one of {', '.join(FORMATS)}"
        )
    check_file(path, force=force)
    return path


def check_page(out: Path, *, force: bool = False) -> None:
    """As `check_path`, for a page."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: the report is one HTML page; end the name with .html")
    check_file(out, force=force)


def write_figure(figure: Figure, path: Path, *, dpi: int | None = None, force: bool = False) -> Path:
    """Write the figure in the format of the path's extension; never leaves half a file.

    `dpi` is of PNG; None: that of the style that holds.
    """
    dpi = dpi or DPI[current_style().name]
    check_path(path, force=force)
    kind = path.suffix.lower()
    width, height = (int(inches * dpi) for inches in figure.get_size_inches())
    image = kind == ".png" or any(artist.get_rasterized() for artist in figure.findobj())
    if image and (max(width, height) > MOST_PIXELS or width * height > MOST_PIXELS**2 // 16):
        instead = ", or write .svg or .pdf" if kind == ".png" else ""
        raise ConfigError(f"--dpi {dpi} makes an image of {width:,} × {height:,} pixels; take a lower one{instead}")

    def save(temporary: Path) -> None:
        installed = {font.name for font in fontManager.ttflist}
        fonts = ["DejaVu Sans", *(name for name in FALLBACKS if name in installed)]
        with rc_context({**STYLE, "font.sans-serif": fonts}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box, as anywhere
            figure.savefig(temporary, format=kind[1:], dpi=dpi, metadata=METADATA[kind])

    return write_atomically(path, save)


def target_paths(out: Path, runs: Sequence[Path], *, figure: str, force: bool = False) -> list[Path]:
    """Where the figure of each run, given by its directory, goes.

    `out` is a file for one run. It may contain `{run}`, the directory's name; for several runs without
    it, `out` is a directory that gets `{run}-{figure}.png` files.
    """
    if "{run}" not in str(out):
        directory = len(runs) > 1 and out.suffix.lower() not in FORMATS
        if not (directory or out.is_dir()):
            if len(runs) > 1:
                raise ConfigError(
                    f"--out {out} is one file for {len(runs)} runs; "
                    f"put {{run}} into the name, such as {out.stem}-{{run}}{out.suffix}, or name a directory"
                )
            return [check_path(out, force=force)]
        out = out / f"{{run}}-{figure}.png"
    names = _distinct([run.resolve() for run in runs])
    return [check_path(Path(str(out).replace("{run}", name)), force=force) for name in names]


def _distinct(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["-".join(path.parts[-depth:]).replace("/", "") for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("the same run was named twice; name each run once")
