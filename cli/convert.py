"""`headscope convert`: a checkpoint in another format, verified before anything is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headscope.cli import console
from headscope.cli.next_commands import command_line
from headscope.cli.options import (
    OUTPUT,
    Bpe,
    CheckpointName,
    Dicts,
    Dtype,
    Force,
    FormatName,
    HubName,
    HubPublic,
    HyperParameters,
    Json,
    Unverified,
)


def convert(
    checkpoint: CheckpointName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="native, huggingface, fairseq, gguf (llama.cpp), ctranslate2 or onnx.", rich_help_panel=OUTPUT
        ),
    ],
    quantize: Annotated[
        str, typer.Option(metavar="none|q8_0", help="For gguf: store matrices in 8 bits.", rich_help_panel=OUTPUT)
    ] = "none",
    unverified: Unverified = False,
    hub_name: HubName = None,
    hub_public: HubPublic = False,
    dtype: Dtype = "auto",
    format: FormatName = None,
    dicts: Dicts = None,
    hp: HyperParameters = None,
    bpe: Bpe = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a fairseq, MHR, story-of-heads or native Transformer for Hugging Face, fairseq or headscope.

    With --to gguf a Llama-like model of transformers for llama.cpp, also one whose heads were removed; with --to
    ctranslate2 a translation model; with --to onnx any model that torch exports. These are run by the engine before
    they are kept.

    Matrices that mix heads are folded into the output projections for Hugging Face; for fairseq they stay, as its
    fork MHR has them. What was written is read again and must give the same logits, else nothing is left behind;
    so is what the format cannot express.
    """
    from headscope.api.loading import load
    from headscope.formats.convert import goals
    from headscope.pruning.engines.base import ENGINES
    from headscope.registry import unknown

    allowed = [*goals(), *ENGINES.names()]
    if to not in allowed:
        raise typer.BadParameter(unknown("format", to, allowed), param_hint="--to")
    model = load(checkpoint, device="cpu", dtype=dtype, format=format, dicts=dicts, hp=hp, bpe=bpe)
    done = model.convert(
        out, to=to, quantize=quantize, unverified=unverified, push_to=hub_name, public=hub_public, force=force
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
    if to in ENGINES.names() or done.difference is None:
        console.show(console.ending([f"{done.folder}: {done.architecture}"], done.folder, ""))
        return
    answer = f"{done.folder}: {done.architecture}; largest difference of logits {done.difference:.1e}"
    console.show(console.ending([answer], done.folder, command_line("show", done.path)))
