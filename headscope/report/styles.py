"""Styles of figures (print or screen, width, title and signature), and writing them to files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headscope.config.option import option
from headscope.errors import ConfigError, flag
from headscope.files.output_checks import check_file
from headscope.files.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = Path(__file__).parent / "style-sheets"
look_option = partial(option, panel="Size and looks")
FORMATS = (".png", ".svg", ".pdf")
MAX_PIXELS = 2**16 - 1  # of a side, the renderer's limit; an image may have a sixteenth of its square, 1 GB


@dataclass(frozen=True)
class FigureStyle:
    """The style of figures: options of every figure's command, and of `headscope.plot`."""

    style: Literal["screen", "paper"] = look_option(
        "screen", "screen: letters of 8 to 12 points; paper: of 6 to 9 points, PNG with 300 dots per inch."
    )
    width: float | None = look_option(
        None, "Width; default: what panels need. A paper's column has 3.3.", metavar="INCHES", minimum=2, maximum=60
    )
    title: bool = look_option(True, "Write title, model and data above the figure.")
    signature: bool = look_option(
        False, "Write below the figure what the numbers depend on; the file's metadata has it anyway."
    )
    dpi: int | None = look_option(
        None, "Dots per inch of PNG; default: 150, with --style paper 300.", minimum=30, maximum=2400
    )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block matplotlib draws in this style."""
        from matplotlib import style

        with style.context([LOOKS / "headscope.mplstyle", LOOKS / f"{self.style}.mplstyle"]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box, as anywhere
            yield


def check_path(path: Path, *, page: bool = False, force: bool = False) -> Path:
    """The path; ConfigError for an unknown extension, OutputError for a file that must not be replaced."""
    formats = (".html", ".htm") if page else FORMATS
    if path.suffix.lower() not in formats:
        kind = path.suffix or "a file without extension"
        raise ConfigError(f"{flag.out} {path}: cannot write {kind}; end the name with one of {', '.join(formats)}")
    check_file(path, force=force)
    return path


def write_figure(figure: Figure, path: Path, *, dpi: int | None = None, force: bool = False) -> Path:
    """Write the figure in the format of the path's extension, with its signature and no date in the metadata."""
    from matplotlib import rcParams

    check_path(path, force=force)
    kind = path.suffix.lower()
    signature = getattr(figure, "signature", "")
    metadata: dict[str, dict[str, Any]] = {
        ".png": {"Software": "headscope", "Description": signature},
        ".svg": {"Creator": "headscope", "Date": None, "Description": signature},
        ".pdf": {"Creator": "headscope", "CreationDate": None, "Subject": signature},
    }
    with getattr(figure, "style", FigureStyle()).in_use():
        dpi = dpi or int(rcParams["savefig.dpi"])
        width, height = (int(inches * dpi) for inches in figure.get_size_inches())
        image = kind == ".png" or any(artist.get_rasterized() for artist in figure.findobj())
        if image and (max(width, height) > MAX_PIXELS or width * height > MAX_PIXELS**2 // 16):
            instead = ", or write .svg or .pdf" if kind == ".png" else ""
            raise ConfigError(f"{flag.dpi} {dpi} makes {width:,} × {height:,} pixels; take a lower one{instead}")
        looks: dict[str, Any] = {"format": kind[1:], "dpi": dpi, "metadata": metadata[kind]}
        return write_atomically(path, lambda temporary: figure.savefig(temporary, **looks))


def target_paths(out: Path, runs: Sequence[Path], *, figure: str, force: bool = False) -> list[Path]:
    """The file for the figure of each run."""
    if "{run}" not in str(out):
        if not out.is_dir() and (len(runs) == 1 or out.suffix.lower() in FORMATS):
            if len(runs) > 1:
                instead = f"{out.stem}-{{run}}{out.suffix}, or a directory"
                raise ConfigError(f"{flag.out} {out} is one file for {len(runs)} runs; name {instead}")
            return [check_path(out, force=force)]
        out = out / f"{{run}}-{figure}.png"
    return [check_path(Path(str(out).replace("{run}", name)), force=force) for name in _distinct_names(runs)]


def _distinct_names(runs: Sequence[Path]) -> list[str]:
    """Names of paths: their last components, as many as make the names distinct."""
    paths = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["-".join(parts[-depth:]).replace("/", "") for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("the same run was named twice; name each run once")


def number_same(names: Sequence[str]) -> list[str]:
    """Names, with numbers behind equal ones."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]
