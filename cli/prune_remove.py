"""`headscope prune remove`: cut heads out of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.answers import show_result
from headscope.cli.next_commands import after_removal
from headscope.cli.options import made_of, read
from headscope.pruning.options.remove import RemoveConfig

if TYPE_CHECKING:
    from headscope.results.removal import Removal


def show_removal(removal: Removal, options: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Print what a removal with these options saved and cost, and what could come next."""
    if json:
        console.print_json({"out": str(removal.path), **removal.to_json(), **console.pushed(removal.pushed)})
        return
    page = removal.folder / "page.html"
    files = [f"Page: {page}"] if page.is_file() else []
    files += [f"Pushed to {removal.pushed}"] if removal.pushed else []
    show_result(removal, verbose=verbose, files=files, commands=[after_removal(removal, options)])


@made_of(RemoveConfig, verbose=True)
def remove(values: Mapping[str, Any], *, json: bool, verbose: bool) -> None:
    """Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.

    The output has the input's format. Differences, savings and times are printed and kept in pruning.json.

    A Hugging Face class has one number of heads for all layers, so its folder is self-contained: headscope opens it,
    and transformers does with trust_remote_code=True, without headscope. With --compensate the masked model is the one
    whose output projections are refitted. With --merge-kv no head goes: key/value heads are merged, and the model is
    compared with the one whose projections are averaged in place.
    """
    from headscope.pruning.removal.remove import run_removal

    config = read(RemoveConfig, values)
    with console.stages() as begin:
        removal = run_removal(config, progress=begin)
    show_removal(removal, values, json=json, verbose=verbose)
