"""The pictures of docs/figures.md: `python -m scripts.gallery` types docs/figures/draw.sh.

Of the runs that are measured there it keeps the columns that are drawn.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
from PIL import Image
from typer.testing import CliRunner

from headscope import assets
from headscope.cli.main import app
from headscope.report import styles
from headscope.report.figures.rankings import importances
from headscope.results.study import Study
from scripts import documented

ROOT = Path(__file__).resolve().parents[1]
COLORS, WHITE = 256, 246  # of a picture; what is lighter is white
PAGE, SCRIPT = ROOT / "docs/figures.md", ROOT / "docs/figures/draw.sh"
COLUMNS = ["site", "layer", "head", "confidence", "sink", "functions"]  # and importances


def commands() -> dict[str, list[str]]:
    """The words after `headscope` of every command, by the picture that it writes."""
    lines = [command.arguments for command in documented.commands(SCRIPT)]
    return {Path(words[words.index("--out") + 1]).name: words for words in lines if words[0] == "plot"}


def measure(words: list[str]) -> None:
    """Run an `analyze` of the script, and keep the drawn columns of its run."""
    out = ROOT / words[words.index("--out") + 1]
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        line = [assets.demo_checkpoint() if word == "$MODEL" else word for word in words]
        line[line.index("--out") + 1] = str(run_folder)
        result = CliRunner().invoke(app, line)
        if result.exception:
            raise RuntimeError(f"headscope {shlex.join(words)}: {result.output}{result.exception}")
        out.mkdir(exist_ok=True)
        heads = pd.read_csv(run_folder / "heads.csv")
        columns = [*COLUMNS, *(importance.name for importance in importances(Study.open(run_folder)))]
        heads[columns].to_csv(out / "heads.csv", index=False, float_format="%.5g")
        record = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    short_record = {key: record[key] for key in ("signature", "checkpoint", "data", "layout", "complete")}
    if "$MODEL" in words:  # where it lies says nothing
        short_record["checkpoint"]["path"] = Path(short_record["checkpoint"]["path"]).parent.name
    short_record |= {"options": {}, "left_out": []}
    text = json.dumps(short_record, indent=1).replace(f"{ROOT}/", "")  # no path of this machine
    (out / "run.json").write_text(text + "\n", encoding="utf-8")


def draw(words: list[str]) -> None:
    """Run a `plot` of the script at the root of the project, and make its picture small."""
    original = styles.write_figure
    with mock.patch.object(styles, "write_figure", lambda *args, **options: _small(original(*args, **options))):
        result = CliRunner().invoke(app, words)
    if result.exception:
        raise RuntimeError(f"headscope {shlex.join(words)}: {result.output}{result.exception}")


def _small(path: Path) -> Path:
    """The picture with a palette of colours, a third of the size."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    shades = np.array(small.getpalette()).reshape(-1, 3)
    shades[(shades > WHITE).all(axis=1)] = 255  # the page
    small.putpalette(shades.ravel().tolist())
    small.save(path, optimize=True)
    return path


if __name__ == "__main__":
    for command in documented.commands(SCRIPT):
        if command.arguments[0] == "analyze":
            measure(command.arguments)
    for words in commands().values():
        draw(words)
