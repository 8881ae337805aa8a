"""What the numbers of a report say, in sentences: each is computed from the data, none is written by hand.

Heads are named in full (`encoder-self.2.5`): the page makes links of the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headscope.report.layout.legend import functions_of
from headscope.report.page.importance import best_ranking, head_names, importances, needed, numbers
from headscope.report.page.numbers import LOSS, with_interval, words
from headscope.signature import counted

Data = Mapping[str, Any]
NAMED = 4  # heads that a sentence names
FEW = 3
LEVEL = 0.05
SHARPNESS = "sharpness"


def findings(data: Data) -> list[str]:
    """Sentences about one analysis run."""
    return [
        *_size(data),
        *_functions(data),
        *_unsupported(data),
        *_sharpness(data),
        *_importance(data),
        *_answers(data),
        *_faithfulness(data),
        *_similarity(data),
    ]


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


def _size(data: Data) -> Iterator[str]:
    parts = []
    for site, counts in data["layout"].items():
        heads = str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
        parts.append(f"{site} {len(counts)} × {heads}")
    yield f"{counted(len(data['functions']), 'head')} of {data['model']} ({', '.join(parts)}), on {data['data']}."
    if not data["complete"]:
        yield "The run was interrupted: its numbers are of the sentences that were done."


def _functions(data: Data) -> Iterator[str]:
    names = head_names(data)
    families: dict[str, list[tuple[str, str]]] = {}
    kinds = {}
    for name, labels in zip(names, data["functions"], strict=True):
        for function in functions_of(";".join(labels)):
            kinds[function.family.name] = function.family
            said = function.short if function.detail and function.family.detail == "offset" else function.detail
            families.setdefault(function.family.name, []).append((name, said))
    for family in sorted(kinds.values(), key=lambda family: (family.order, family.name)):
        heads: dict[str, list[str]] = {}
        for name, short in families[family.name]:
            heads.setdefault(name, []).append(short)
        listed = [" ".join(filter(None, [name, ", ".join(filter(None, shorts))])) for name, shorts in heads.items()]
        about = family.meaning.removeprefix(f"{family.name}: ")
        verb = "is" if len(listed) == 1 else "are"
        yield f"{counted(len(listed), 'head')} {verb} labelled {family.name} ({about}): {_some(listed)}."
    bare = sum(not labels for labels in data["functions"])
    if kinds and bare:
        yield f"{counted(bare, 'head')} {'has' if bare == 1 else 'have'} no label."
    elif not kinds:
        yield "No head was given a label."


def _unsupported(data: Data) -> Iterator[str]:
    """Labels that the estimates alone would give."""
    lacking = []
    for name, labels in zip(head_names(data), data["unsupported"], strict=True):
        reasons: dict[str, str] = {}
        for label in labels:  # by several measures perhaps: the first reason is enough here
            reasons.setdefault(label.partition(" (")[0], label)
        lacking += [f"{name} {label}" for label in reasons.values()]
    if lacking:
        few = len(lacking) == 1
        yield (
            f"{counted(len(lacking), 'label')} that the estimate{'' if few else 's'} would give "
            f"{'has' if few else 'have'} not enough evidence: {_some(lacking)}."
        )


def _sharpness(data: Data) -> Iterator[str]:
    measure = next((measure for measure in data["measures"] if measure["name"] == SHARPNESS), None)
    if measure is None:
        return
    sinks = np.array(["sink" in labels for labels in data["functions"]])
    names, values = head_names(data), np.where(sinks, np.nan, numbers(measure))
    if not np.isfinite(values).any():
        return
    top, bottom = int(np.nanargmax(values)), int(np.nanargmin(values))
    yield (
        f"The sharpest head beside sinks is {names[top]}: its largest weight is {_value(measure, top)} times an even "
        f"one, over queries that see five keys or more; the least sharp is {names[bottom]} with "
        f"{_value(measure, bottom)}."
    )


def _importance(data: Data) -> Iterator[str]:
    measures = importances(data)
    if not measures:
        return
    measure, names = measures[0], head_names(data)
    order = needed(measure)
    if not len(order):
        return
    few = max(1, min(FEW, len(order) // 2))
    most = ", ".join(f"{names[row]} {_value(measure, row)}" for row in order[:few])
    least = ", ".join(f"{names[row]} {_value(measure, row)}" for row in order[::-1][:few])
    yield f"By {measure['title']} the model needs most: {most}."
    yield f"It needs least: {least}."
    said = (data.get("importance") or {}).get("functions", {}).get(measure["name"], {}).get("said")
    if said:
        yield f"{said[0].upper()}{said[1:]}."
    yield from _zero(measure, data.get("importance") or {})
    agreement = (data.get("importance") or {}).get("median")
    if agreement is not None:
        count = len(data["importance"]["measures"])
        yield f"The {count} importances order heads alike with a median rank correlation of {words(agreement)}."


def _answers(data: Data) -> Iterator[str]:
    """The heads that speak most for the answers to prompts, and most against them."""
    measure = next((measure for measure in data["measures"] if measure["group"] == "prompts" and measure["keep"]), None)
    order = needed(measure) if measure else ()
    if measure is None or not len(order):
        return
    names, few = head_names(data), max(1, min(FEW, len(order) // 2))
    most, least = (
        ", ".join(f"{names[row]} {_value(measure, row)}" for row in rows) for rows in (order[:few], order[::-1][:few])
    )
    yield f"By {measure['title']} the answers to the prompts need most: {most}; least: {least}."


def _zero(measure: Data, importance: Data) -> Iterator[str]:
    """How many heads may be worth nothing: by the tests of the run, or else by intervals where there is a sign."""
    tested = [p for p in importance.get("zero", {}).get(measure["name"], ()) if p is not None]
    if tested:
        zero = sum(p > LEVEL for p in tested)
        yield (
            f"{zero:,} of {counted(len(tested), 'head')} cannot be told from zero, each by itself (5 % false "
            "discoveries, corrected for all heads); together they may matter."
        )
        return
    low, high = numbers(measure, "low"), numbers(measure, "high")
    if measure["bounds"] is not None and (low < np.minimum(high, 0)).any():  # of one sentence they have no width
        zero = int(((low <= 0) & (high >= 0)).sum())
        of = counted(len(low), "head")
        yield f"{zero:,} of {of} have an interval that includes zero; together they may matter."


def _faithfulness(data: Data) -> Iterator[str]:
    faithfulness = data.get("faithfulness")
    best = best_ranking(faithfulness) if faithfulness else None
    if best is None:
        return
    area = with_interval(*(np.nan if best.get(key) is None else best[key] for key in ("area", "area_low", "area_high")))
    chance = best.get("area_random")
    against = f"; random orders give {words(chance)}" if chance is not None else ""
    yield f"Removal bears out the ranking by {best['ranking']} best: the area between its curves is {area}{against}."


def _similarity(data: Data) -> Iterator[str]:
    similar = data.get("similar")
    if not similar:
        return
    kind = next((kind for kind in similar["kinds"] if kind["name"] == "cka"), similar["kinds"][0])
    rows = similar["rows"][kind["name"]]
    pairs = [(alike[0][1], row, alike[0][0]) for row, alike in rows.items() if alike and alike[0][1] is not None]
    if pairs:
        names = head_names(data)
        value, one, other = max(pairs, key=lambda pair: pair[0])
        alike = f"{names[one]} and {names[other]} ({kind['title']} {words(value)})"
        yield f"The two heads most alike within a layer are {alike}."


def _value(measure: Data, row: int) -> str:
    value, low, high = (numbers(measure, part)[row] for part in ("values", "low", "high"))
    return with_interval(value, low, high)


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {hidden:,} more" if hidden > 0 else "")
