"""Cross heads that `generation_config.alignment_heads` names: Whisper takes the times of words from their weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from headscope.heads import HeadId, Site
from headscope.model.removal_plan import RemovalPlan


def alignment_heads(model: nn.Module) -> list[HeadId]:
    """The heads [[layer, head], …] that a model's generation settings name; none where they name none."""
    settings: Any = getattr(model, "generation_config", None)
    named = getattr(settings, "alignment_heads", None)
    pairs = named if isinstance(named, list) else []
    return [HeadId(Site.CROSS, *pair) for pair in pairs if len(pair) == 2 and all(type(n) is int for n in pair)]


def renumber_alignment(model: Any, removal: RemovalPlan) -> None:
    """Count the alignment heads of a shrunk model as it counts its own; those that went are no longer named.

    Where none is left the entry goes: transformers then says that there are no times of words.
    """
    if heads := alignment_heads(model):
        kept = {head: removal.kept.get((head.site, head.layer), ()) for head in heads}
        stay = [[head.layer, kept[head].index(head.head)] for head in heads if head.head in kept[head]]
        if stay:
            model.generation_config.alignment_heads = stay
        else:
            del model.generation_config.alignment_heads


def alignment_note(whole: nn.Module, made: nn.Module) -> tuple[str, ...]:
    """What became of the alignment heads of a model whose copy lacks some heads."""
    before, after = alignment_heads(whole), alignment_heads(made)
    if before == after:
        return ()
    stay = f"{len(after)} of {len(before)} alignment heads (generation_config.json) stay, renumbered"
    if len(after) == len(before):
        return (stay,)
    without = "" if after else "; without any there are no times of words"
    return (f"{stay}{without} (prune rank --protect alignment keeps all)",)
