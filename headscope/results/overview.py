"""An overview of a checkpoint (`headscope show`), and a conversion (`headscope convert`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.results.answer import Answer, AnswerTable, StoredResult, list_text, number_text
from headscope.results.study import model_name
from headscope.signature import count_of


class Overview(StoredResult):
    """Format, architecture, attention by site, size, and the metrics, objectives and analyses that fit.

    `record` holds all of it.
    """

    def answers(self) -> list[Answer]:
        """The checkpoint, possible savings, and possible measures."""
        questions = (subject, mixing, size, peculiarities, text)
        answers = [answer for question in questions for answer in question(self.record)]
        return [*answers, Answer("Digest", str(self.record["digest"]), detail=True)]


Record = Mapping[str, Any]


def subject(record: Record) -> Iterator[Answer]:
    """The architecture and format."""
    heads = sum(sum(site["heads"]) for site in record["sites"])
    kind = f"{record['architecture']} ({record['model_type']}), {record['format']}, {record['dtype']}"
    yield Answer("", f"{model_name(record['path'])}: {count_of(heads, 'head')}, {kind}")


def size(record: Record) -> Iterator[Answer]:
    """Layers and heads of every site, the number of parameters, and the most that removing heads can save."""
    names = ("site", "layers", "heads", "width", "groups")
    rows = tuple(tuple(_short(site[name]) for name in names) for site in record["sites"])
    yield Answer("Attention", "", AnswerTable((*names[:-1], "key/value groups"), rows))
    parameters, cache = record["parameters"], record["cache"]
    total, attention = parameters["total"], parameters.get("attention", 0)
    parts = ", ".join(f"{name} {count:,}" for name, count in parameters.items() if name != "total")
    yield Answer("Parameters", f"{total:,} ({parts})")
    if total and attention:
        share = 100 * attention / total
        saving = f"attention is {share:.0f} % of the parameters: half of the heads save {share / 2:.0f} % at most"
        yield Answer("What heads can save", saving)
    bytes_kept = [f"{cache['own']:,} bytes a token"] * bool(cache["own"])
    bytes_kept += [f"{cache['cross']:,} bytes a source token"] * bool(cache["cross"])
    if bytes_kept:
        yield Answer("Key/value cache", f"{' and '.join(bytes_kept)}; half of the key/value heads save half of it")


def mixing(record: Record) -> Iterator[Answer]:
    """The mixing of heads, if there is one."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for entry in record["mixing"]:
        by_kind.setdefault((entry["mixing"], entry["summary"]), []).append(entry["site"])
    for (name, summary), where in by_kind.items():
        yield Answer("Mixing", f"{name}: at {' and '.join(where)} every attention module has {summary}", caution=True)
    if by_kind:
        yield Answer("", "Analyses see heads before they are mixed; masks and importances act on the mixed contexts.")


def peculiarities(record: Record) -> Iterator[Answer]:
    """Peculiarities of the heads: layers without attention, windows, shared weights."""
    for site in record["sites"]:
        if site["numbers"] != list(range(site["layers"])):
            layers = list_text(list(map(str, site["numbers"])))
            yield Answer("Layers with attention", f"{site['site']}: {layers}")
        for window in site["windows"]:
            layers = list_text(list(map(str, window["layers"])))
            yield Answer("Sliding window", f"{site['site']}: {window['tokens']:,} tokens in layers {layers}")
        for shared in site["shared"]:
            layers = list_text(list(map(str, shared)))
            why = "a head goes from all of them or from none"
            yield Answer("Shared weights", f"{site['site']}: layers {layers}; {why}")
    if record.get("mask"):
        yield Answer("Mask", list_text(record["mask"]))


def text(record: Record) -> Iterator[Answer]:
    """Text, languages and labels, and the metrics, objectives and analyses that fit."""
    tokenizer = record["tokenizer"]
    subwords = f"{tokenizer['class']}, {tokenizer['vocabulary']:,} subwords" if tokenizer else "no tokenizer"
    limit = f"; at most {record['limit']:,} tokens" if record["limit"] else ""
    yield Answer("Text", subwords + limit)
    if tokenizer and (spoken := tokenizer.get("languages")):
        yield Answer("Languages", f"reads {spoken['reads']}, writes {spoken['writes'] or '?'}; {spoken['known']} known")
    if record["labels"]:
        yield Answer("Labels", list_text(record["labels"]))
    metrics = ", ".join(dict.fromkeys(metric["name"] for metric in record["metrics"]))
    yield Answer("Metrics", metrics or "none fits")
    for kind in ("objectives", "analyses"):
        fitting = [entry for entry in record[kind] if entry["fits"]]
        names = ", ".join(entry["name"] + (f" ({entry['needs']})" if entry["needs"] else "") for entry in fitting)
        yield Answer(kind.capitalize(), names or "none fits")


def _short(value: Any) -> str:
    """A value, or the values of all layers with slashes between; equal values are one."""
    if not isinstance(value, list):
        return str(value)
    return "/".join(map(str, value[:1] if len(set(value)) == 1 else value))


@dataclass(repr=False)
class Conversion(StoredResult):
    """A checkpoint in another format, or in a file for an engine.

    `record` is what conversion.json holds, `difference` the largest difference of logits, `file` the name in the folder
    of what to open. headscope itself opens it if it is `readable`. `pushed` is an address on the hub.
    """

    record: dict[str, Any]
    folder: Path
    architecture: str
    difference: float
    notes: tuple[str, ...] = ()
    file: str = ""
    readable: bool = True
    pushed: str = ""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path to open."""
        return self.folder / self.file

    def answers(self) -> list[Answer]:
        """The written model, and the difference of its logits from the checkpoint's."""
        proof = f"; largest difference of logits {number_text(self.difference, 2)}"
        text = f"{self.folder.resolve().name}: {self.architecture}{proof if 'engine' not in self.record else ''}"
        return [Answer("", text), *(Answer("", note) for note in self.notes)]
