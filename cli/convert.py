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
    from headscope.pruning.engines.base import ENGINES
    from headscope.pruning.engines.convert import check_goal

    config = read(ConvertConfig, values)
    check_goal(config.to)
    model = load(config.checkpoint, **config.opening)
    done = model.convert(
        config.out,
        to=config.to,
        quantize=config.quantize,
        push_to=config.hub_name,
        public=config.hub_public,
        force=config.force,
    )
    if json:
        console.print_json(
            {
                "out": str(done.folder),
                "to": done.goal,
                "architecture": done.architecture,
                "logit_difference": done.difference,
                "notes": list(done.notes),
                **console.pushed(done.pushed),
            }
        )
        return
    screen = console.out()
    for note in done.notes:
        screen.print(f"note: {note}", soft_wrap=True)
    if done.pushed:
        screen.print(f"pushed to {done.pushed}", soft_wrap=True)
    if config.to in ENGINES.names() or done.difference is None:
        console.show(console.ending([f"{done.folder}: {done.architecture}"], done.folder, ""))
        return
    answer = f"{done.folder}: {done.architecture}; largest difference of logits {done.difference:.1e}"
    console.show(console.ending([answer], done.folder, command_line("show", done.path) if done.opened else ""))
