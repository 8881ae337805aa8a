"""Writing figures: format from the extension, temporary name and rename, text kept as text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from headscope.errors import ConfigError
from headscope.files.output_checks import check_file
from headscope.files.writing import write_atomically
from headscope.report.layout.style import DPI, current_style

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


def write_figure(figure: Figure, path: Path, *, dpi: int | None = None, force: bool = False) -> Path:
    """Write the figure in the format of the path's extension; never leaves half a file.

    `dpi` is of PNG; None: that of the style that holds.
    """
    dpi = dpi or DPI[current_style().name]
    check_path(path, force=force)
    kind = path.suffix.lower()
    width, height = (int(inches * dpi) for inches in figure.get_size_inches())
    if kind == ".png" and (max(width, height) > MOST_PIXELS or width * height > MOST_PIXELS**2 // 16):
        raise ConfigError(
            f"--dpi {dpi} makes an image of {width:,} × {height:,} pixels; take a lower one, or write .svg or .pdf"
        )

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
