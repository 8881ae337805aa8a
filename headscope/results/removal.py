"""A removal: the result of `prune remove` and `prune shrink`, with the model's quality and size before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from headscope.config.declarations import import_target
from headscope.errors import flag
from headscope.heads import HeadId, by_layer
from headscope.results.answer import (
    MAX_ROWS,
    Answer,
    AnswerTable,
    StoredResult,
    number_text,
    record_entry,
    remark_answers,
    signed_text,
)
from headscope.results.study_tables import open_record
from headscope.signature import count_of

RECORD = "pruning.json"
KINDS = ("removal", "shrink")
OPEN, WORSE = "not established", "worse"
VERDICTS = {
    "non-inferior": "AS GOOD, within {margin}",
    WORSE: "WORSE, by more than {margin}",
    OPEN: "NOT SHOWN TO BE AS GOOD",
}


class Removal(StoredResult):
    """A model without some heads: the heads, its check against the masked model, quality, size and speed.

    `record` is what pruning.json holds, `folder` the directory of all files (of a model in memory, that of the whole
    model).
    """

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Removal:
        """The removal in a folder that `prune remove` or `prune shrink` wrote; RunError for another folder."""
        path, record = open_record(folder, RECORD, *KINDS, wrote="prune remove` or `shrink")
        return Removal(record, path)

    @property
    def path(self) -> Path:
        """The smaller checkpoint."""
        name = self.record["output"]["file"]
        return self.folder if name == "." else self.folder / name

    @property
    def removed(self) -> list[HeadId]:
        """The heads that were removed, as numbered in the whole model."""
        return [HeadId.parse(name) for name in self.record["removed"]]

    verified = record_entry("verified", "Difference from the whole model with these heads masked, and its tolerance.")
    compensation = record_entry("compensation", "Method, errors of modules, loss on held-out text; None without.")
    quality = record_entry("quality", "A metric before and after on held-out text, with a test; None without text.")
    elsewhere = record_entry("elsewhere", "The same on a second text, of another kind, where that was measured.")

    @property
    def sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Parameters, heads, bytes, floating point operations and cache, "before" and "after"."""
        return {when: self.record[when] for when in ("before", "after")}

    @property
    def engines(self) -> list[Any]:
        """The files that were written for engines, and how they were checked (`EngineFile`)."""
        return [import_target("headscope.export.base:EngineFile")(**file) for file in self.record["engines"]]

    def answers(self) -> list[Answer]:
        """The verdict, what is saved, how it was checked; then the other contents of the record."""
        questions = (verdict, comparison, largest_saving, whole_layers, refit, equality, details, compensations)
        answers = [answer for question in questions for answer in question(self)]
        return answers + remark_answers(self.record["notes"], RECORD)


def verdict(removal: Removal) -> Iterator[Answer]:
    """The number of removed heads, and whether the smaller model is as good."""
    record, quality = removal.record, removal.record["quality"]
    before, after = record["before"]["attention_heads"], record["after"]["attention_heads"]
    count = len(record["removed"])
    what = merged_text(record) or f"{count:,} of {before:,} heads removed"
    if not merged_text(record) and after > before - count:
        what += f", {after - before + count:,} of zeros in their place"
    judgement = None if quality is None else quality["verdict"]
    result = "QUALITY NOT MEASURED" if quality is None else "NO VERDICT"
    if judgement is not None:
        result = VERDICTS[judgement["verdict"]].format(margin=quality["margin"])
    good = judgement is not None and judgement["verdict"] not in (OPEN, WORSE)
    heads = tuple(record["removed"])
    yield Answer("", f"{removal.folder.resolve().name}: {what}   {result}", heads=heads, caution=not good)


def merged_text(record: Mapping[str, Any]) -> str:
    """The numbers of key/value heads before and after a merge; empty without one."""
    layers = [sets for layers in record["merged"].values() for sets in layers.values()]
    counts = sorted({(sum(map(len, sets)), len(sets)) for sets in layers})
    numbers = " and ".join(f"{before} into {after}" for before, after in counts)
    return numbers and f"key/value heads merged {numbers} in {count_of(len(layers), 'layer')}"


def comparison(removal: Removal) -> Iterator[Answer]:
    """Quality, size and speed before and after, and advice where the model is not shown to be as good."""
    record = removal.record
    rows = [row for name in ("quality", "elsewhere") for row in _quality_rows(record[name], other=name != "quality")]
    for title, (name, unit, suffix) in SIZES.items():
        old, new = record["before"][name], record["after"][name]
        if old:
            digits = 0 if unit == 1 else 3 if old < unit else 1
            values = (f"{value / unit:,.{digits}f}{suffix}" for value in (old, new))
            rows.append((title, *values, percent(new / old - 1), ""))
    of_largest_batch = {timing["what"]: timing for timing in record["times"]}
    rows += [_time_row(timing) for timing in of_largest_batch.values()]
    table = AnswerTable(("", "before", "after", "change", "on"), tuple(rows))
    yield Answer("Quality, size and speed", _advice(record), table)
    qualities = [quality for quality in (record["quality"], record["elsewhere"]) if quality is not None]
    texts = [f"{count_of(quality['sentences'], 'line')} of {Path(quality['text']).name}" for quality in qualities]
    if texts:
        yield Answer("Measured on", "; other text: ".join(texts), detail=True)


def _quality_rows(quality: Mapping[str, Any] | None, *, other: bool) -> Iterator[tuple[str, ...]]:
    """The row of a metric, with its loss and the upper bound of that; and the row of the loss in nats."""
    if quality is None:
        return
    title = f"other text ({quality['metric']})" if other else quality["title"]
    values = [f"{quality[end]['value']:.4g}" for end in ("before", "after")]
    yield title, *values, _lost_text(quality["verdict"]), count_of(quality["sentences"], "line")
    if quality["loss"] is not None and not other:
        yield "loss (nats)", *(f"{value:.4f}" for value in quality["loss"]), "", ""


def _lost_text(judgement: Mapping[str, Any] | None) -> str:
    """The loss and its upper bound, `worse by 0.062, perhaps 0.22`; empty without a verdict."""
    if judgement is None:
        return ""
    worse, limit = judgement["worse"], judgement["worse_limit"]
    loss = "as good" if worse == 0 else f"{'worse' if worse > 0 else 'better'} by {number_text(abs(worse), 2)}"
    if limit != limit or limit <= 0:
        return loss
    return f"{loss}, perhaps {number_text(limit, 2)}{'' if worse > 0 else ' worse'}"


def _advice(record: Mapping[str, Any]) -> str:
    """Why there is no verdict, how many more lines would give one, or how to lose less."""
    quality = record["quality"]
    if quality is None:
        return next((text for text in record["notes"] if text.startswith("quality was not measured")), "")
    judgement = quality["verdict"]
    if judgement is None:
        return str(quality["why"])
    if judgement["verdict"] == OPEN and (lines_needed := quality["needed"]):
        lines = count_of(quality["sentences"], "held-out line")
        loss = f"a loss of {number_text(judgement['margin'], 2)} in {quality['title']}"
        return f"{lines} cannot tell {loss} from none; about {lines_needed:,} could ({flag.valid_source})"
    if judgement["verdict"] != WORSE:
        return ""
    compensation = record["compensation"]
    choice = compensation["choice"] if compensation else None
    candidates = [candidate["name"] for candidate in choice["candidates"]] if choice else []
    if not compensation or compensation["feed_forward"] or record["merged"] or "feed-forward" in " ".join(candidates):
        return "less is lost with more heads"
    return f"less is lost with {flag.feed_forward}, which takes many passes, or with more heads"


SIZES = {
    "parameters": ("parameters", 1, ""),
    "size": ("bytes", 1e6, " MB"),
    "FLOPs of the text": ("flops", 1e9, " G"),
    "cache a token": ("cache", 1, " bytes"),
    "cache a source token": ("cross_cache", 1, " bytes"),
}


def _time_row(timing: Mapping[str, Any]) -> tuple[str, ...]:
    if timing["tokens"]:
        values = [f"{timing['tokens'] / timing[end]:,.0f} tokens/s" for end in ("before", "after")]
    else:
        values = [f"{number_text(1e3 * timing[end])} ms" for end in ("before", "after")]
    alike = ", not told apart" if timing["least"] < 1 < timing["most"] else ""
    ratio = f"{timing['before'] / timing['after']:.2f}× ({timing['least']:.2f}–{timing['most']:.2f}){alike}"
    return timing["what"], *values, ratio, count_of(timing["sentences"], "line")


def percent(share: float) -> str:
    """`−6.3 %`, `+2 %`; `0 %` if it rounds to zero."""
    percents = round(100 * share, 1)
    return "0 %" if percents == 0 else f"{signed_text(percents, '.3g')} %"


def largest_saving(removal: Removal) -> Iterator[Answer]:
    """The largest share of the parameters that removing this number of heads can save."""
    before, count = removal.record["before"], len(removal.record["removed"])
    if not (count and before["parameters"] and before["attention_parameters"]):
        return
    share = 100 * before["attention_parameters"] / before["parameters"]
    percents = 100 * (1 - removal.record["after"]["parameters"] / before["parameters"])
    limit = max(share * count / before["attention_heads"], percents)  # layers of unequal size may save more
    saving = f"{count_of(count, 'head')} can save at most {number_text(limit, 2)} %"
    yield Answer("", f"Attention is {number_text(share, 2)} % of this model's parameters: {saving}")


def whole_layers(removal: Removal) -> Iterator[Answer]:
    """The quality of the model without whole layers that have as many parameters."""
    layers, before = removal.record["layers"], removal.record["before"]
    if not layers:
        return
    saving = f"{layers['parameters'] / before['parameters']:.1%} of the parameters, {layers['flops']:.1%} of the FLOPs"
    if before["cache"]:
        saving += f", {layers['cache']:.1%} of the cache"
    saving = saving.replace("%", " %")
    costs = f"{removal.record['quality']['title']} {layers['quality']:.4g}"
    if layers["elsewhere"] is not None:
        costs += f", on other text {layers['elsewhere']:.4g}"
    which = f"layer{'s' * (len(layers['layers']) > 1)} {', '.join(layers['layers'])}"
    yield Answer("If whole layers went instead", f"without {which} ({saving}), not refitted: {costs}")


def refit(removal: Removal) -> Iterator[Answer]:
    """The chosen refit of the remaining weights, and the number of candidates."""
    compensation = removal.record["compensation"]
    if not compensation:
        return
    choice = compensation["choice"]
    text = f"fitted to {count_of(compensation['calibration']['sentences'], 'line')}"
    if choice is None:
        if compensation["method"] != "none":
            yield Answer("Refit", f"{compensation['method']}, {text}")
        return
    rows = choice["candidates"]
    best = next(row for row in rows if row["name"] == choice["taken"])
    trials = f" of {len(rows) - 1} tried" if len(rows) > 2 else ""
    harms = best["check"]["harm"] > 1
    on_other = f"; worse on other text than no refit, see {flag.compensate} auto" if harms else ""
    yield Answer("Refit", f"{choice['taken']} taken{trials}, {text}{on_other}", caution=harms)


def equality(removal: Removal) -> Iterator[Answer]:
    """The largest difference from the masked model's outputs, and how to open the smaller model."""
    record, check = removal.record, removal.record["verified"]
    has_refit = record["compensation"] and record["compensation"]["method"] != "none"
    how = "key/value heads averaged in place" if record["merged"] else "these heads off"
    yield Answer(
        "Checked",
        f"outputs equal those of the {'refitted ' if has_refit else ''}model with {how} to "
        f"{number_text(check['difference'], 2)} (limit {number_text(check['tolerance'], 1)}), on "
        f"{count_of(check['sentences'], 'line')}; reloaded {number_text(check['reloaded'] or 0.0, 2)}",
    )
    for file in removal.engines:
        yield Answer("", file.proof, detail=True)
    if opens := record["opens"]:  # the model card lists all of them
        yield Answer("Opens with", opens[0].replace("FOLDER", repr(str(removal.path))))


def details(removal: Removal) -> Iterator[Answer]:
    """The source checkpoint, the removed heads by layer, all checks and all times."""
    record, source, check = removal.record, removal.record["source"], removal.record["verified"]
    digest = f"{Path(source['path']).name} ({source['format']}, {source['digest'][:12]})"
    yield Answer("Made of", digest, detail=True)
    if record["removed"]:
        heads_kept = record["kept"]
        layers = (
            f"{site}.{layer}: {', '.join(map(str, heads)) if heads_kept[site.value][str(layer)] else 'all'}"
            for (site, layer), heads in by_layer(removal.removed).items()
        )
        yield Answer("Heads removed", "; ".join(layers), heads=tuple(record["removed"]), detail=True)
    if check["cached"] is not None:
        yield Answer("Through the key/value cache", f"to {number_text(check['cached'], 2)}", detail=True)
    if check["searches"]:
        yield Answer("Beam search", f"{check['searched']} of {check['searches']} results are the same", detail=True)
    if record["times"]:
        rows = tuple((*_time_row(timing), f"{timing['at_most']:.2f}×") for timing in record["times"])
        columns = ("", "before", "after", "faster", "on", "at most")
        limits = "at most: by FLOPs of a pass, by bytes that a step reads"
        yield Answer("Times", limits, AnswerTable(columns, rows), detail=True)


def compensations(removal: Removal) -> Iterator[Answer]:
    """The objective of the intact, the pruned and all refitted models, on held-out text and on other text."""
    compensation = removal.record["compensation"]
    if not compensation:
        return
    change = "key/value heads merged" if removal.record["merged"] else "heads removed"
    performance, choice = compensation["performance"], compensation["choice"]
    intact = performance["intact"]
    title = {"representation": "cosine to the intact model"}.get(intact["objective"], intact["objective"])
    columns: tuple[str, ...] = ("", f"{title}, held out", "worse by")
    rows: list[tuple[str, ...]] = [("intact", *_numbers(intact))]
    if choice is None:
        rows.append((change, *_numbers(performance["removed"])))
    else:
        columns += (f"{choice['objective']}, other text", "worse by")
        rows = [("intact", *_numbers(intact), "", "")]
        for row in choice["candidates"][:MAX_ROWS]:
            name = change if row["name"] == "none" else row["name"]
            mark = " (taken)" if row["name"] == choice["taken"] else ""
            rows.append((f"{name}{mark}", *_numbers(row["held_out"]), *_numbers(row["check"])))
    text = compensation["held_out"]
    sources = f"held out: {count_of(text['sentences'], 'line')} of {Path(text['text']).name}"
    sources += f"; other: {count_of(choice['sentences'], 'line')} of {Path(choice['text']).name}" if choice else ""
    yield Answer("Compensations", sources, AnswerTable(columns, tuple(rows)), detail=True)


def _numbers(performance: Mapping[str, Any]) -> tuple[str, str]:
    """An objective and its loss, without negative zeros."""
    value, damage = (f"{round(performance[name], 4) + 0.0:.4f}" for name in ("value", "damage"))
    return value, damage
