"""`headscope prune remove`: cut heads out of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.next_commands import after_removal
from headscope.cli.options import made_of, read
from headscope.pruning.options.remove import RemoveConfig

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.pruning.closed_form.calibration import Compensated
    from headscope.pruning.closed_form.damage import Performance
    from headscope.pruning.removal.record import Removed


@made_of(RemoveConfig)
def remove(values: Mapping[str, Any], *, json: bool) -> None:
    """Cut heads out of the weights and write the smaller checkpoint, if it computes what the masked one does.

    The output has the input's format. Differences, savings and times are printed and kept in pruning.json.

    A Hugging Face class has one number of heads for all layers, so its folder is self-contained: headscope opens it,
    and transformers does with trust_remote_code=True, without headscope. With --compensate the masked model is the one
    whose output projections are refitted. With --merge-kv no head goes: key/value heads are merged, and the model is
    compared with the one whose projections are averaged in place.
    """
    from headscope.pruning.removal.record import removal_record
    from headscope.pruning.removal.remove import run_removal

    config = read(RemoveConfig, values)
    with console.stages() as begin:
        removed = run_removal(config, progress=begin)
    if json:
        console.print_json({"out": str(removed.path), **removal_record(removed), **console.pushed(removed.pushed)})
        return
    show_removed(removed, values)


def show_removed(removed: Removed, options: Mapping[str, Any] | None = None, *, answer: str = "") -> None:
    """Print what a removal with these options saved and cost, and how it was proved; last an `answer` in one line."""
    from rich.text import Text

    from headscope.evaluation.before_after import verdict_words
    from headscope.pruning.removal.record import merge_counts
    from headscope.pruning.removal.savings import allowed, rest
    from headscope.signature import counted

    proof = removed.verified
    columns = ("before", "after", "less, faster", *(["at most"] if removed.timings else []))
    table = console.table(["", *columns], _quality_rows(removed), numbers=columns, whole=columns)
    table.columns[0].overflow = "fold"
    for title, name in _SIZES.items():
        old, new = getattr(removed.before, name), getattr(removed.after, name)
        if old:
            table.add_row(title, f"{old:,}", f"{new:,}", f"{_fixed(100 * (1 - new / old), 1)} %")
    for timing in removed.timings:
        title = f"{timing.what}, {counted(timing.sentences, 'sentence')}, "
        title += "tokens/s" if timing.tokens else "ms"
        values = [timing.tokens / each if timing.tokens else 1e3 * each for each in (timing.before, timing.after)]
        most = allowed(timing, removed.before, removed.after)
        ratio = f"{timing.speedup:.2f}× ({timing.least:.2f}–{timing.most:.2f})"
        table.add_row(title, *(f"{value:,.2f}" for value in values), ratio, f"{most:.2f}×")
    console.show([table])
    merges = merge_counts(removed.removal)
    masked = "averaged" if merges else "masked"
    if removed.compensated is not None:
        held_out, choice = removed.compensated.text.held_out, removed.compensated.choice
        title = f"on {counted(held_out.count, 'sentence')} that were not calibrated on ({held_out.name})"
        title += f"; other text: {counted(choice.sentences, 'sentence')} ({choice.text})" if choice is not None else ""
        change = "key/value heads merged" if merges else "heads removed"
        console.show([Text(title, style="italic"), _performance_table(removed.compensated, change)])
        masked = masked if removed.compensated.options.method == "none" else f"refitted {masked}"
    done = merges or f"{counted(len(removed.removal.removed), 'head')} removed"
    quality = removed.quality
    verdict = [] if quality is None else [f"{verdict_words(quality.record())} ({quality.text})"]
    lines = [
        f"{masked} and shrunk logits differ by {proof.difference:.1e} of the largest (limit {proof.tolerance:.0e}), "
        f"reloaded {proof.reloaded or 0.0:.1e}, on {counted(proof.sentences, 'sentence')} ({proof.data})"
    ]
    if proof.cached is not None:
        lines.append(f"through the key/value cache: {proof.cached:.1e}")
    if proof.searches:
        lines.append(f"beam search: {proof.searched} of {proof.searches} results are the same")
    lines += [file.proof for file in removed.engines]
    if removed.timings:
        lines.append(f"at most: by FLOPs of a pass, by bytes that a step reads; the FLOPs left: {rest(removed.after)}")
    lines += [f"pushed to {removed.pushed}"] if removed.pushed else []
    if removed.compensated is not None and removed.compensated.refits:
        calibration, seconds = removed.compensated.text.calibration, removed.compensated.seconds
        lines.append(
            f"moments and refits: {seconds:.1f} s on {counted(calibration.count, 'sentence')} ({calibration.name})"
        )
    console.show(console.signed([*lines, *(f"note: {note}" for note in removed.notes)], removed.signature))
    made = f"{removed.path}: {done} ({removed.format}, {removed.export})"
    answers, page = ([answer], removed.out / "page.html") if answer else ([*verdict, made], None)
    console.show(console.ending(answers, removed.path, after_removal(removed, options or {}), page=page))


def _quality_rows(removed: Removed) -> Iterator[tuple[str, ...]]:
    """The metric and the loss before and after, and how much more or less that is."""
    from headscope.signature import counted

    quality = removed.quality
    if quality is None:
        return
    rows = [(f"{quality.title}, {counted(quality.sentences, 'sentence')}", quality.before.value, quality.after.value)]
    rows += [] if quality.loss is None else [("loss (nats)", *quality.loss)]
    for name, old, new in rows:
        yield name, _fixed(old), _fixed(new), _fixed(old - new)


def _performance_table(compensated: Compensated, change: str) -> Table:
    """The objective of the intact, the pruned and the refitted model, on held-out text and on other text."""
    performance, choice = compensated.performance, compensated.choice
    objective = performance["intact"].objective
    other = "" if choice is None else choice.masked.check.objective
    columns = {"representation": "cosine to the intact model"}.get(objective, objective), "worse by"
    more = ("on other text" if other == objective else f"{other} on other text", "worse by")
    numbers = (*columns, *(more if choice is not None else ()))
    table = console.table(["", *numbers], numbers=numbers)
    table.columns[0].overflow = "fold"
    table.add_row("intact", *_numbers(performance["intact"]))
    if choice is None:
        table.add_row(change, *_numbers(performance["removed"]))
        return table
    for candidate in choice.candidates:
        name = change if candidate is choice.masked else f"and {candidate.name}"
        taken = " (taken)" if candidate is choice.taken and len(choice.candidates) > 2 else ""
        table.add_row(f"{name}{taken}", *_numbers(candidate.held_out), *_numbers(candidate.check))
    return table


def _numbers(performance: Performance) -> tuple[str, str]:
    return _fixed(performance.value), _fixed(performance.damage)


def _fixed(value: float, digits: int = 4) -> str:
    """So many digits behind the point; what is rounded to 0 has no sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


_SIZES = {
    "attention heads": "attention_heads",
    "parameters": "parameters",
    "bytes": "bytes",
    "FLOPs of the text": "flops",
    "cache bytes per token": "cache",
    "cache bytes per source token": "cross_cache",
}
