"""A removal: what `prune remove` and `prune shrink` did to a model, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.files.reading import read_json
from headscope.results.answer import Answer, AnswerTable, number_text
from headscope.results.result import Result
from headscope.results.study_tables import RunError
from headscope.signature import counted

RECORD = "pruning.json"
VERDICTS = {
    "non-inferior": "AS GOOD, within {margin}",
    "worse": "WORSE, by more than {margin}",
    "not established": "NOT SHOWN TO BE AS GOOD",
    "not tested": "NOT SHOWN TO BE AS GOOD",
}


class Removal(Result):
    """A model without some heads: the heads, the proof, quality, size and speed before and after.

    `record` is what pruning.json holds, `path` where the smaller checkpoint is, `folder` the directory of all files.
    """

    def __init__(self, record: dict[str, Any], folder: Path) -> None:
        self.record, self.folder = record, folder
        self.tables: Mapping[str, pd.DataFrame] = {}

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Removal:
        """The removal in a folder that `prune remove` or `prune shrink` wrote; RunError for another folder."""
        path = Path(folder)
        if not (path / RECORD).is_file():
            raise RunError(f"{path} has no {RECORD}; name a folder that `headscope prune remove` wrote")
        return cls(read_json(path / RECORD, error=RunError, name=str(path / RECORD)), path)

    @property
    def path(self) -> Path:
        """The smaller checkpoint."""
        name = self.record["output"]["file"]
        return self.folder if name == "." else self.folder / name

    @property
    def removed(self) -> list[str]:
        """Names of the heads that were removed, as numbered in the whole model."""
        return list(self.record["removed"])

    def answers(self) -> list[Answer]:
        """Is it any good, what does it save, how was it proved."""
        questions = (verdict, comparison, most_saved, refit, checked, notes)
        return [answer for question in questions for answer in question(self)]


def verdict(removal: Removal) -> Iterator[Answer]:
    """Which heads went, and whether the smaller model is as good, in one line."""
    record, quality = removal.record, removal.record["quality"]
    before, after = record["before"]["attention_heads"], record["after"]["attention_heads"]
    what = f"{before - after} of {before} heads removed"
    if merged := sum(len(layers) for layers in record["merged"].values()):
        what = f"key/value heads merged in {counted(merged, 'layer')}"
    judged = None if quality is None else quality["verdict"]
    if judged is None:
        why = "its quality was not measured" if quality is None else quality["why"]
        yield Answer("", f"{removal.folder.name}: {what}; {why}", heads=tuple(removal.removed), caution=True)
        return
    said = VERDICTS[judged["verdict"]].format(margin=quality["margin"])
    good = judged["verdict"] == "non-inferior"
    yield Answer("", f"{removal.folder.name}: {what}   {said}", heads=tuple(removal.removed), caution=not good)


def comparison(removal: Removal) -> Iterator[Answer]:
    """Quality, size and speed before and after."""
    record = removal.record
    rows = [*_quality_rows(record["quality"], ""), *_quality_rows(record["elsewhere"], "other text: ")]
    rows += [*_size_rows(record["before"], record["after"]), *map(_time_row, record["times"])]
    table = AnswerTable(("", "before", "after", "change"), tuple(rows))
    yield Answer("Before and after", _too_little_text(record["quality"]), table)


def _quality_rows(quality: Mapping[str, Any] | None, kind: str) -> Iterator[tuple[str, ...]]:
    """The metric with what was lost, and how much more may have been."""
    if quality is None:
        return
    before, after, judged = quality["before"]["value"], quality["after"]["value"], quality["verdict"]
    change = ""
    if judged is not None:
        word = "worse" if judged["worse"] >= 0 else "better"
        change = f"{word} by {number_text(abs(judged['worse']), 2)}"
        if judged["worse_limit"] == judged["worse_limit"] and judged["worse_limit"] > 0:
            change += f", perhaps {number_text(judged['worse_limit'], 2)} worse"
    title = f"{kind}{quality['title']}, {counted(quality['sentences'], 'line')}"
    yield title, f"{before:.4g}", f"{after:.4g}", change
    if quality["loss"] is not None:
        yield f"{kind}loss (nats)", *(f"{value:.4f}" for value in quality["loss"]), ""


def _too_little_text(quality: Mapping[str, Any] | None) -> str:
    """What to give where the verdict stays open."""
    if quality is None or quality["verdict"] is None or quality["verdict"]["verdict"] != "not established":
        return ""
    return f"{counted(quality['sentences'], 'held-out line')} cannot show it; give more with --valid-source"


SIZES = {
    "parameters": ("parameters", 1, ""),
    "size": ("bytes", 1e6, " MB"),
    "FLOPs of the text": ("flops", 1e9, " G"),
    "cache a token": ("cache", 1, " bytes"),
    "cache a source token": ("cross_cache", 1, " bytes"),
}


def _size_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for title, (name, unit, suffix) in SIZES.items():
        old, new = before[name], after[name]
        if old:
            values = (f"{value / unit:,.{0 if unit == 1 else 1}f}{suffix}" for value in (old, new))
            yield title, *values, f"{percent(new / old - 1)}"


def _time_row(timing: Mapping[str, Any]) -> tuple[str, ...]:
    title = f"{timing['what']}, {counted(timing['sentences'], 'sentence')}"
    if timing["tokens"]:
        values = [f"{timing['tokens'] / timing[end]:,.0f} tokens/s" for end in ("before", "after")]
    else:
        values = [f"{1e3 * timing[end]:,.0f} ms" for end in ("before", "after")]
    ratio = timing["before"] / timing["after"]
    return title, *values, f"{ratio:.2f}× ({timing['least']:.2f}–{timing['most']:.2f})"


def percent(share: float) -> str:
    """`−6.3 %`, `+2 %`; `0 %` for what is rounded to nothing."""
    rounded = round(100 * share, 1)
    return "0 %" if rounded == 0 else f"{rounded:+.3g} %".replace("-", "−")


def most_saved(removal: Removal) -> Iterator[Answer]:
    """What removal can save at most; `savings` of newer records says it."""
    savings = removal.record.get("savings")
    if savings:
        yield Answer("What heads can save", savings)


def refit(removal: Removal) -> Iterator[Answer]:
    """Which compensation was taken, of how many."""
    compensation = removal.record["compensation"]
    if not compensation:
        return
    choice = compensation["choice"]
    if choice is None:
        text = counted(compensation["calibration"]["sentences"], "sentence")
        yield Answer("Refit", f"{compensation['method']}, on {text}")
        return
    tried = counted(len(choice["candidates"]) - 1, "compensation")
    rows = tuple(
        (row["name"], f"{row['held_out']['value']:.4f}", f"{row['check']['value']:.4f}")
        for row in choice["candidates"][:12]
    )
    yield Answer("Refit", f"{choice['taken']} taken; {tried} tried (table: pruning.json)")
    yield Answer("Compensations", "", AnswerTable(("", "held-out text", "other text"), rows), detail=True)


def checked(removal: Removal) -> Iterator[Answer]:
    """How the smaller model was compared with the whole one with these heads masked."""
    proof = removal.record["verified"]
    text = f"outputs equal those of the model with these heads off to {proof['difference']:.0e} (limit "
    text += f"{proof['tolerance']:.0e}), on {counted(proof['sentences'], 'sentence')}; it reloads"
    yield Answer("Checked", text)
    for file in removal.record["engines"]:
        yield Answer("", file["proof"])
    if proof.get("searches"):
        yield Answer("Beam search", f"{proof['searched']} of {proof['searches']} results are the same", detail=True)


def notes(removal: Removal) -> Iterator[Answer]:
    """What else there is to know."""
    for note in removal.record["notes"]:
        yield Answer("", note, detail=True)
