"""`headscope convert`: a checkpoint in another format, verified before anything is left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscope.cli import console
from headscope.cli.next_commands import command_line
from headscope.cli.options import options_from, read
from headscope.config.small import ConvertConfig


@options_from(ConvertConfig, config=False)
def convert(values: Mapping[str, Any], *, json: bool) -> None:
    """Write a fairseq, MHR, story-of-heads or native Transformer for Hugging Face, fairseq or headscope.

    Or a model, also one whose heads were removed, for an engine.

    Matrices that mix heads are folded into the output projections for Hugging Face; for fairseq they stay, as its
    fork MHR has them. What was written is read again and must give the same logits, else nothing is left behind.
    What the format cannot express is refused.
    """
    from headscope.api.commands import load
    from headscope.export.base import ENGINES
    from headscope.export.convert import check_goal
    from headscope.results.answer import number_text

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
        console.print_json(
            {
                "out": str(result.folder),
                "to": result.goal,
                "architecture": result.architecture,
                "logit_difference": result.difference,
                "notes": list(result.notes),
                **console.push_record(result.pushed),
            }
        )
        return
    has_difference = config.to not in ENGINES.names()
    difference = f"; largest difference of logits {number_text(result.difference, 2)}" if has_difference else ""
    lines = [f"{result.folder}: {result.architecture}{difference}", *(f"note: {note}" for note in result.notes)]
    lines += [f"Pushed to {result.pushed}"] if result.pushed else []
    lines += [f"What it is:  {command_line('show', result.path)}"] if has_difference and result.opened else []
    console.show(lines)
