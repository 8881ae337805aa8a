"""What the numbers of a report say, in sentences: each is computed from the data, none is written by hand.

Heads are named in full (`encoder-self.2.5`): the page makes links of the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headscope.report.page.importance import head_names
from headscope.report.page.numbers import LOSS, words
from headscope.signature import counted

Data = Mapping[str, Any]
NAMED = 4  # heads that a sentence names
FEW = 3


def compared(first: Data, second: Data, comparison: Data) -> list[str]:
    """Sentences about two runs."""
    if not comparison["pairs"]:
        means = ", but the means of their sites" if comparison["means"] else ""
        return [
            f"{first['name']} and {second['name']} have no site with the same layout: no heads are compared{means}."
        ]
    names, pairs = head_names(first), comparison["pairs"]
    changed = comparison["changed"]
    sentences = [
        f"{counted(len(changed), 'head')} of {len(pairs):,} changed function from {first['name']} to {second['name']}"
        + (f": {_some([names[row] for row, _ in changed])}." if changed else ".")
    ]
    # of a text, and no exact number about parameters
    sampled = {
        measure["name"]
        for measure in first["measures"]
        if measure["bounds"] is not None and measure["bounds"][0] != measure["bounds"][1]
    }
    known = [entry for entry in comparison["correlations"] if entry["spearman"] is not None]
    if known := [entry for entry in known if entry["name"] in sampled] or known:
        titles = {measure["name"]: measure["title"] for measure in first["measures"]}
        best, worst = (choose(known, key=lambda entry: entry["spearman"]) for choose in (max, min))
        text = f"{titles[best['name']]} orders heads most alike in both (rank correlation {words(best['spearman'])})"
        if best is not worst:
            text += f", {titles[worst['name']]} least ({words(worst['spearman'])})"
        sentences.append(text + ".")
    return sentences


def pruned(sweeps: Sequence[Data], removals: Sequence[Data]) -> list[str]:
    """Sentences about runs of `headscope prune`."""
    sentences = []
    for run in sweeps:
        sentences += [f"{note}." for note in run["notes"]]
        if not run["measured"]:
            cells = run["cells"]
            columns = (cells[name] for name in ("cell", "method", "kept", "of"))
            for folder, method, kept, of in zip(*columns, strict=True):
                if method != "unpruned":
                    sentences.append(f"{method} keeps {kept} of {counted(of, 'head')} ({folder}).")
    for removal in removals:
        sizes = {name: (before, after) for name, before, after in removal["sizes"]}
        metrics = [row for row in removal["quality"] if row[0] != LOSS]
        quality = [f"{name} {words(old)} before, {words(new)} after" for name, old, new in metrics]
        text = f"{counted(len(removal['removed']), 'head')} removed for good in {removal['name']}"
        if "parameters" in sizes and sizes["parameters"][0]:
            before, after = sizes["parameters"]
            text += f": {before:,} parameters became {after:,} ({words(100 * (before - after) / before)} % fewer)"
        sentences.append(f"{'; '.join([text, *quality])}.")
    return sentences


def trained(training: Data | None) -> list[str]:
    """Sentences about training runs."""
    sentences = []
    for run in training["runs"] if training else ():
        best = ", ".join(f"best {title} {words(value)} at update {update:,}" for title, value, update in run["best"])
        kind = f" ({run['variant']})" if run["variant"] else ""
        sentences.append(f"{run['name']}{kind}: {run['updates']:,} updates{'; ' + best if best else ''}.")
    return sentences


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {hidden:,} more" if hidden > 0 else "")
