"""A ranking of heads, and which of them are removed: the result of `prune rank`, `l0` and `subset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.config.option import convert_value
from headscope.errors import ConfigError
from headscope.files.reading import read_text
from headscope.files.tables import read_csv
from headscope.heads import HeadId
from headscope.results.answer import Answer, AnswerTable, StoredResult, list_text, remark_answers
from headscope.results.study_tables import HEAD_COLUMNS, RunError, open_record

RECORD = "pruning.json"


class Ranking(StoredResult):
    """Scores of heads, the heads to keep and to remove, and the loss of removing them.

    `record` is what pruning.json holds. The table "ranking" has a row for every head that may be removed, the best
    first; "gates" has the learnt gates by update. `kept` are the heads to keep. Heads that must go together (they share
    keys and values, or their layers share a module) each have the mean of their scores.
    """

    def __init__(
        self,
        record: dict[str, Any],
        tables: Mapping[str, pd.DataFrame],
        kept: Sequence[HeadId],
        folder: Path,
        *,
        lowest: Callable[[int, str], list[HeadId]] | None = None,
    ) -> None:
        self.record, self.tables, self.kept, self.folder, self._lowest = record, tables, list(kept), folder, lowest

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Ranking:
        """The ranking in a folder that `prune rank`, `l0` or `subset` wrote; RunError for another folder."""
        path, record = open_record(folder, RECORD, "choice by", wrote="prune l0`, `subset`, `rank` or `sweep")
        files = [name for name in ("ranking", "gates") if (path / f"{name}.csv").is_file()]
        tables = {name: read_csv(path / f"{name}.csv", texts=HEAD_COLUMNS[:1], error=RunError) for name in files}
        return cls(record, tables, [HeadId.parse(name) for name in read_text(path / "kept.txt").split()], path)

    @property
    def removed(self) -> list[HeadId]:
        """The heads to remove."""
        return [HeadId.parse(name) for name in self.record["removed"]]

    @property
    def quantity(self) -> str:
        """The name of the measured loss in the record: "nll" or "damage"."""
        return next(name for name in QUANTITIES if name in self.record)

    @property
    def quality(self) -> Mapping[str, float]:
        """The measured loss "before", with the heads "masked", and "tuned"."""
        return self.record[self.quantity]

    @property
    def direction(self) -> str:
        """Whether the lowest or the highest heads are removed first, and why."""
        return str(self.record["ranking"]["direction"]).partition(": ")[2]

    @property
    def scores(self) -> pd.DataFrame:
        """A row per head that may be removed, the best first: site, layer, head, score, rank."""
        return self.tables["ranking"][[*HEAD_COLUMNS, "score", "rank"]]

    def answers(self) -> list[Answer]:
        """The number of heads to keep, the loss, and the heads to remove."""
        return list(choice_answers(self))

    def lowest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to remove first, by site, layer and head; of a ranking that `Model.rank` made.

        `per_layer` takes the same share of every layer; `uniform` leaves the same number in every layer of the encoder,
        and of the decoder, which classes of transformers and most engines need. Default: as `allocate` said. With
        `steps` the model is scored again.

        ConfigError where there are fewer, where groups of heads do not add up to `count`, or where a head has no score.
        """
        if per_layer and uniform:
            raise ConfigError("per_layer and uniform both say how many heads each layer keeps; give one of them")
        if self._lowest is None:
            raise ConfigError("this ranking says itself which heads go: `removed`")
        return self._lowest(convert_value("count", int, count), "uniform" * uniform or "per-layer" * per_layer)

    def highest(self, count: int, *, per_layer: bool = False, uniform: bool = False) -> list[HeadId]:
        """The `count` heads to keep, including all protected ones; options and ConfigError as of `lowest`."""
        lowest = {*self.lowest(len(self) - count, per_layer=per_layer, uniform=uniform)}
        return [head for head in self.kept if head not in lowest]

    def __len__(self) -> int:
        return int(self.record["heads"])


QUANTITIES = ("nll", "damage")
WHEN = {"before": "all heads", "gated": "gates as learnt", "masked": "these heads off"}
"""The models whose loss is measured, in words."""


def choice_answers(choice: Ranking) -> Iterator[Answer]:
    """The number of heads to keep, the loss, the heads to remove, and the smaller checkpoint."""
    record, name = choice.record, choice.folder.resolve().name
    ranking, sites = record.get("ranking"), record["kept_per_site"]
    how = ranking["direction"] if ranking else f"by {record['method']}, whose gates learn which"
    yield Answer("", f"{name}: {record['kept']:,} of {record['heads']:,} heads stay; {how}")
    if losses := choice.quality:
        numbers = ", ".join(f"{WHEN.get(when, when)} {round(value, 4) + 0.0:.4f}" for when, value in losses.items())
        unit = " (nats)" if "nll" in record else ""
        yield Answer("What it costs", f"{record['title'].replace('-', '−')}{unit}: {numbers}")
    names = [HeadId.parse(head).name(sites) for head in record["removed"]]
    yield Answer("Heads that go", list_text(names) or "none", heads=tuple(record["removed"]))
    if record["removed_to"]:
        yield Answer("Smaller checkpoint", str(record["removed_to"]))
    if len(sites) > 1:
        rows = tuple((site, str(counts["of"]), str(counts["kept"])) for site, counts in sites.items())
        yield Answer("By site", "", AnswerTable(("", "heads", "stay"), rows))
    yield from remark_answers(record["remarks"], "pruning.json")
