"""`headscope convert`: a checkpoint in another format, verified before anything is left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.next_commands import command_line
from headscope.cli.options import options_from, read
from headscope.config.commands import ConvertConfig


@options_from(ConvertConfig, config=False)
def convert(values: Mapping[str, Any], *, json: bool) -> None:
    """Write a fairseq, MHR, story-of-heads or native Transformer for Hugging Face, fairseq or headscope.

    Or a model, also one whose heads were removed, for an engine.

    Matrices that mix heads are folded into the output projections for Hugging Face; for fairseq they stay, as its
    fork MHR has them. What was written is read again and must give the same logits, else nothing is left behind.
    What the format cannot express is refused.
    """
    from headscope.api.commands import load
    from headscope.export.convert import check_goal

    config = read(ConvertConfig, values)
    check_goal(config.to)
    model = load(config.checkpoint, **config.opening)
    result = model.convert(
        config.out,
        to=config.to,
        quantize=config.quantize,
        hub_name=config.hub_name,
        hub_public=config.hub_public,
        force=config.force,
    )
    if json:
        console.print_json({"out": str(result.folder), **result.to_json(), **console.push_record(result.pushed)})
        return
    files = [f"Pushed to {result.pushed}"] if result.pushed else []
    commands = [("What it is", command_line("show", result.path))] if result.readable else []
    show_result(result, files=files, commands=commands)
