"""What a removal has done: the smaller model and its proof, what `pruning.json` and the folder's card say of it."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headscope.config import Companions, flag
from headscope.evaluation.before_after import QualityChange, verdict_words
from headscope.files.hub import HubTarget, push
from headscope.formats.base import Checkpoint, Export, SavedFiles
from headscope.formats.exports import Card, hub_metadata
from headscope.formats.size import Size
from headscope.heads import Site, by_layer
from headscope.model.removal_plan import RemovalPlan
from headscope.pruning.closed_form.calibration import Compensated
from headscope.pruning.engines.base import EngineExport, EngineFile, EngineOptions
from headscope.pruning.model_inputs import InputTexts
from headscope.pruning.options.refit import anchor_name
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.removal.export import choose_export
from headscope.pruning.removal.savings import Timing, allowed, speed_words
from headscope.pruning.removal.verify import Verification
from headscope.signature import Signature, counted
from headscope.version import VERSION


@dataclass(frozen=True)
class Removed:
    """What was done: the heads that went, proof, savings, and where the result is.

    `heads` is the list as it was typed: the option, and the digest of its file where it is one. `command` is for the
    card, `pushed` the address on the hub ("" where it is not there).
    """

    path: Path
    out: Path
    format: str
    export: str
    source: Mapping[str, str]
    removal: RemovalPlan
    verified: Verification
    before: Size
    after: Size
    timings: tuple[Timing, ...]
    notes: tuple[str, ...]
    signature: Signature
    heads: Mapping[str, str | None]
    engines: tuple[EngineFile, ...] = ()
    seconds: float = 0.0
    compensated: Compensated | None = None
    quality: QualityChange | None = None
    elsewhere: QualityChange | None = None
    command: str = "prune remove"
    pushed: str = ""

    def __repr__(self) -> str:
        heads = f"{self.after.attention_heads} of {self.before.attention_heads} heads stay"
        sizes = f"{self.after.parameters:,} of {self.before.parameters:,} parameters"
        return f"<Removed, in {self.path}: {heads}, {sizes}; outputs differ by {self.verified.difference:.1e}>"


@dataclass(frozen=True)
class Shrunk:
    """A model without some heads, in memory, and the proof that it computes what the whole one does with them masked.

    `source` says which checkpoint it comes from, `before` how large that is, `data` what the two were compared on.
    Where output projections were refitted the whole one is the refitted one, `compensated.checkpoint`. `quality` is
    that of the intact model and of this one, on a second text it is `elsewhere`; why it was not measured is
    `unmeasured`. `alignment` says what became of heads that the generation settings name, `rounded` how far weights
    that changed were rounded, as files have them.
    """

    checkpoint: Checkpoint
    export: Export
    source: Mapping[str, str]
    removal: RemovalPlan
    verified: Verification
    data: InputTexts
    before: Size
    signature: Signature
    compensated: Compensated | None = None
    quality: QualityChange | None = None
    elsewhere: QualityChange | None = None
    unmeasured: str = ""
    alignment: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()


def padding_note(done: Shrunk) -> tuple[str, ...]:
    """How many heads of zeros the layers are filled up with."""
    layout, kept = done.checkpoint.layout, done.removal.layout
    zeros = sum(layout[place] - kept[place] for place in kept)
    if not zeros or done.export.name == "masked":
        return ()
    counts = sorted(set(layout.values()))
    saved = ": nothing is saved" if sum(layout.values()) == done.before.attention_heads else ""
    return (f"filled up with {counted(zeros, 'head')} of zeros, to {', '.join(map(str, counts))} heads a layer{saved}",)


def merge_counts(removal: RemovalPlan) -> str:
    """How many key/value heads became how many; empty where none were merged."""
    counts = {(sum(map(len, sets)), len(sets)) for sets in removal.merged.values()}
    numbers = " and ".join(f"{before} into {after}" for before, after in sorted(counts))
    return numbers and f"key/value heads merged {numbers} in {counted(len(removal.merged), 'layer')}"


def removal_card(removed: Removed, written: SavedFiles) -> Card:
    """What the folder's README says."""
    before, after, proof = removed.before, removed.after, removed.verified
    name = Path(removed.source["path"]).name
    refitted = "refitted and " if removed.compensated and removed.compensated.refits else ""
    merges = merge_counts(removed.removal)
    title = f"{after.attention_heads} of {before.attention_heads} heads"
    changed = f"removed: {counted(len(removed.removal.removed), 'attention head')}: {_heads_by_layer(removed.removal)}"
    compared = f"these heads {refitted}masked"
    if merges:
        title = changed = f"{merges}, their projections averaged"
        compared = f"key and value projections averaged in place{', output projections refitted' if refitted else ''}"
    return Card(
        title=f"{name}: {title}",
        command=removed.command,
        facts=(
            f"made of {name} ({removed.source['format']}, {removed.source['digest'][:12]})",
            changed,
            f"parameters: {before.parameters:,} before, {after.parameters:,} now",
            *([f"cache: {before.cache:,} bytes a token before, {after.cache:,} now"] if before.cache else []),
            f"outputs equal those of the whole model with {compared} to {proof.difference:.1e} of the largest, "
            f"on {counted(proof.sentences, 'sentence')} ({_without_folder(proof.data)})",
            *_measured(removed.compensated),
            *_change(removed.quality),
            *(_change(removed.elsewhere)[:1] if removed.elsewhere else ()),
            *(file.proof for file in removed.engines),
            *removed.notes,
        ),
        opens=(*written.opens, *(line for file in removed.engines for line in file.opens)),
        limits=(*written.limits, *(line for file in removed.engines for line in file.limits)),
        metadata=hub_metadata(
            removed.source["path"],
            library="transformers" if removed.format == "huggingface" else "headscope",
            tags=("attention-head-pruning",),
        ),
    )


def _heads_by_layer(removal: RemovalPlan) -> str:
    """`encoder-self.0: 1, 2; cross.3: all`."""
    return "; ".join(
        f"{site}.{layer}: {', '.join(map(str, heads)) if removal.kept[site, layer] else 'all'}"
        for (site, layer), heads in by_layer(removal.removed).items()
    )


def _measured(compensated: Compensated | None) -> tuple[str, ...]:
    """The objective on held-out text of the intact, the pruned and the refitted model."""
    if compensated is None:
        return ()
    held_out, performance = compensated.text.held_out, compensated.performance
    names = {"intact": "intact", "removed": "heads removed", "refitted": "heads removed and the rest refitted"}
    values = ", ".join(f"{names[name]} {performance[name].value:.4f}" for name in names if name in performance)
    text = f"{counted(held_out.count, 'held-out sentence')} ({_without_folder(held_out.name)})"
    lines = [f"{performance['intact'].objective} on {text}: {values}"]
    choice = compensated.choice
    if choice is not None:
        taken = choice.taken
        other = f"{counted(choice.sentences, 'sentence')} of another kind ({_without_folder(choice.text)})"
        refit = "no refit did less harm" if taken is choice.masked else f"{taken.name} {taken.check.value:.4f}"
        numbers = f"heads removed {choice.masked.check.value:.4f}, {refit}"
        lines.append(f"{taken.check.objective} on {other}: {numbers}")
    return tuple(lines)


def _change(quality: QualityChange | None) -> tuple[str, ...]:
    """The metric before and after, and the verdict; that there is none where nothing was measured."""
    if quality is None:
        return ("quality was not measured when this was written (`--source` does, and `headscope evaluate`)",)
    values = f"{quality.before.value:.4f} before, {quality.after.value:.4f} now"
    text = f"{counted(quality.sentences, 'sentence')} ({_without_folder(quality.text)})"
    return (f"{quality.title} on {text}: {values}", verdict_words(quality.record()))


def _without_folder(name: str) -> str:
    """The name of a text; a card is read elsewhere, where the folders of this machine mean nothing."""
    return Path(name).name if os.path.exists(name) else name


def removal_record(removed: Removed) -> dict[str, Any]:
    """What `pruning.json` says."""
    kept: dict[str, dict[str, list[int]]] = {}
    for (site, layer), heads in sorted(
        removed.removal.kept.items(), key=lambda item: (list(Site).index(item[0][0]), item[0][1])
    ):
        kept.setdefault(site.value, {})[str(layer)] = list(heads)
    merged: dict[str, dict[str, Sequence[Sequence[int]]]] = {}
    for (site, layer), sets in sorted(removed.removal.merged.items()):
        merged.setdefault(site.value, {})[str(layer)] = sets
    inside = removed.path != removed.out
    return {
        "headscope": VERSION,
        "source": removed.source,
        "output": {"format": removed.format, "export": removed.export, "file": removed.path.name if inside else "."},
        "heads": dict(removed.heads),
        "removed": [str(head) for head in removed.removal.removed],
        "kept": kept,
        "merged": merged,
        "verified": asdict(removed.verified),
        "engines": [asdict(file) for file in removed.engines],
        "compensation": None if removed.compensated is None else removed.compensated.record(),
        "quality": None if removed.quality is None else removed.quality.record(),
        "elsewhere": None if removed.elsewhere is None else removed.elsewhere.record(),
        "before": asdict(removed.before),
        "after": asdict(removed.after),
        "times": [
            {**asdict(timing), "at_most": allowed(timing, removed.before, removed.after)} for timing in removed.timings
        ],
        "notes": list(removed.notes),
        "signature": str(removed.signature),
        "seconds": round(removed.seconds, 3),
    }


def pushed(removed: Removed, target: HubTarget | None) -> Removed:
    """The same, once its folder is on the hub too; OutputError where that fails."""
    if target is None:
        return removed
    counts = f"{removed.after.attention_heads} of {removed.before.attention_heads} attention heads"
    return replace(removed, pushed=push(removed.out, target, title=f"{counts}, by headscope prune remove"))


def list_made(done: Shrunk) -> dict[str, str | None]:
    """The option of `prune remove` that says what went, where no such command was typed."""
    if done.removal.merged:
        counts = [str(len(groups)) for groups in done.removal.groups.values()]
        return {
            "option": "--merge-kv",
            "list": ",".join(counts[:1] if len(set(counts)) == 1 else counts),
            "sha256": None,
        }
    return {"option": "--heads", "list": ",".join(map(str, done.removal.removed)), "sha256": None}


def list_typed(config: RemoveConfig, done: Shrunk) -> dict[str, str | None]:
    """The list as it was typed, and the digest of its file if it is one (a ranking that a method wrote)."""
    if config.merge_kv:
        by = config.merge_by
        table = None if by is None else (by / "heads.csv" if by.is_dir() else by)
        return {**list_made(done), "sha256": None if table is None else hashlib.sha256(table.read_bytes()).hexdigest()}
    heads = config.heads or config.keep_only or ""
    is_list = "," not in heads and os.path.isfile(heads)
    digest = hashlib.sha256(Path(heads).read_bytes()).hexdigest() if is_list else None
    return {"option": "--heads" if config.heads else "--keep-only", "list": heads, "sha256": digest}


def command_made(done: Shrunk, companions: Companions, engines: Sequence[EngineExport], options: EngineOptions) -> str:
    """The command that would do the same, where none was typed; of a refit without its text."""
    said, default = list_made(done), choose_export(None, done.checkpoint).name
    calibration = None if done.compensated is None else done.compensated.options
    compensate = "none" if calibration is None else calibration.method
    chosen = {
        **companions.given(),
        "quantize": options.quantize if options.quantize != "none" else "",
        "unverified": options.unverified,
        str(said["option"]).removeprefix("--"): said["list"],
        "export": (*([done.export.name] if done.export.name != default else []), *(each.name for each in engines)),
        "pad": bool(padding_note(done)),
        "compensate": compensate if compensate != "none" else "",
        "anchor": "" if calibration is None else anchor_name(calibration.anchor),
        "sequential": calibration is not None and calibration.sequential and not done.removal.merged,
        "feed_forward": calibration is not None and calibration.feed_forward,
        "strength": "" if calibration is None or calibration.strength == 1 else calibration.strength,
    }
    return typed_command(done.source["path"], chosen)


def typed_command(checkpoint: str, options: Mapping[str, Any], *, command: str = "prune remove") -> str:
    """The command with its options, files by their names."""
    words = []
    for name, value in options.items():
        if value not in (None, (), "", False):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            shown = Path(shown).name if os.path.isfile(shown) else shown
            words += [flag(name)] if value is True else [flag(name), shlex.quote(shown)]
    return " ".join([command, shlex.quote(Path(checkpoint).name), *words])


def summary(removed: Removed) -> str:
    """In one line what was saved, what it costs, and how sure that is.

    `36 of 72 heads stay, 7.8 % fewer parameters, 16.9 % fewer FLOPs; perplexity 12.1 before, 12.6 now, …`.
    """
    before, after = removed.before, removed.after
    saved = [f"{after.attention_heads} of {before.attention_heads} heads stay"]
    for title, name in (("parameters", "parameters"), ("FLOPs", "flops")):
        old, new = getattr(before, name), getattr(after, name)
        saved += [f"{100 * (1 - new / old):.1f} % fewer {title}"] if old else []
    whole = next((timing for timing in removed.timings if timing.what == "forward" and timing.sentences > 1), None)
    saved += [speed_words(whole)] if whole else []
    parts = [", ".join(saved)]
    if removed.quality is not None:
        parts += [_before_and_after(removed.quality), verdict_words(removed.quality.record())]
    if removed.elsewhere is not None:
        parts.append(f"on a second text {_before_and_after(removed.elsewhere)}")
    return "; ".join(parts)


def _before_and_after(quality: QualityChange) -> str:
    """The metric before and after, and on what."""
    text = f"{counted(quality.sentences, 'sentence')} of {Path(quality.text).name}"
    return f"{quality.title} {quality.before.value:.4g} before, {quality.after.value:.4g} now ({text})"
