"""Answers of what chooses heads, made of the records: one choice, and a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headscope.heads import HeadId
from headscope.results.answer import (
    MAX_ROWS,
    Answer,
    AnswerTable,
    filled_table,
    list_text,
    number_text,
    remark_answers,
    signed_text,
)
from headscope.signature import count_of

QUANTITIES = ("nll", "damage")  # under which a choice records what it costs
WHEN = {"before": "all heads", "gated": "gates as learnt", "masked": "these heads off"}
"""When a choice measures a loss, in words."""
CAN_GO = {"non-inferior": "can go", "worse": "worse", "not established": "not shown", "not tested": ""}


def choice_answers(record: Mapping[str, Any], name: str) -> list[Answer]:
    """What the pruning.json of a choice says: how many heads stay, what it costs, which go; `name` is the run's."""
    parts = (_choice(record, name), _costs(record), _heads_gone(record), _sites(record), _learning(record))
    answers = [answer for part in parts for answer in part]
    return [*answers, *remark_answers(record["remarks"], "pruning.json")]


def _choice(record: Mapping[str, Any], name: str) -> Iterator[Answer]:
    ranking = record.get("ranking")
    how = ranking["direction"] if ranking else f"by {record['method']}, whose gates learn which"
    yield Answer("", f"{name}: {record['kept']:,} of {record['heads']:,} heads stay; {how}")


def _costs(record: Mapping[str, Any]) -> Iterator[Answer]:
    """What a loss measures before, with the heads masked, and tuned."""
    values: Mapping[str, float] = next((record[name] for name in QUANTITIES if record.get(name)), {})
    if values:
        numbers = ", ".join(f"{WHEN.get(when, when)} {round(value, 4) + 0.0:.4f}" for when, value in values.items())
        unit = " (nats)" if "nll" in record else ""
        yield Answer("What it costs", f"{record['title'].replace('-', '−')}{unit}: {numbers}")


def _heads_gone(record: Mapping[str, Any]) -> Iterator[Answer]:
    """The heads that go, by short names where the model has one site, and where they have gone."""
    sites = record["kept_per_site"]
    names = [HeadId.parse(head).name(sites) for head in record["removed"]]
    yield Answer("Heads that go", list_text(names) or "none", heads=tuple(record["removed"]))
    if record["removed_to"]:
        yield Answer("Smaller checkpoint", str(record["removed_to"]))


def _sites(record: Mapping[str, Any]) -> Iterator[Answer]:
    sites = record["kept_per_site"]
    if len(sites) > 1:
        rows = tuple((site, str(counts["of"]), str(counts["kept"])) for site, counts in sites.items())
        yield Answer("By site", "", AnswerTable(("", "heads", "stay"), rows))


def _learning(record: Mapping[str, Any]) -> Iterator[Answer]:
    """The price of an open head, and what else learning was made of."""
    learning = record.get("learning", {})
    if "lambda_paper" in learning:
        is_searched = learning["lambda_searched"]
        paper, code = (number_text(learning[name], 4) for name in ("lambda_paper", "lambda_code"))
        how = " (searched)" if is_searched else ""
        yield Answer("λ", f"{paper} on the sum over heads, {code} on the mean over modules{how}", detail=True)
        if is_searched:
            count = learning["heads_with_log_a_above_0"]
            yield Answer("", f"log_a > 0 alone would keep {count_of(count, 'head')}", detail=True)
    if "updates" in learning:
        data = f"{count_of(learning['updates'], 'update')} on {count_of(learning['sentences'], 'sentence')}"
        yield Answer("Learnt", f"{data}, by {learning['learnt_by']}", detail=True)


def run_answers(rows: Sequence[Mapping[str, Any]], name: str) -> list[Answer]:
    """How many heads stay in each of several runs that chose heads once."""
    counts = [row["kept"] for row in rows]
    text = f"{name}: {len(rows)} runs chose heads, {min(counts):,} to {max(counts):,} stay"
    columns = [column for column in rows[0] if column not in ("cell", "control")]
    cells = [tuple(_cell(row[column]) for column in columns) for row in rows[:MAX_ROWS]]
    titles = [column.replace("_", " ") for column in columns]
    return [Answer("", text), Answer("Each run", "", filled_table(titles, cells))]


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sweep_answers(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], name: str, metric: str) -> list[Answer]:
    """How small a sweep says that the model can be, then its table; `rows` are seeds put together, with verdicts."""
    answers = [Answer("", f"{name}: {_how_small(record)}")]
    answers += [Answer("", conclusion, detail=True) for conclusion in record["conclusions"]]
    has_prices = any(row["size"].startswith("lambda") for row in rows)
    columns = ("", *(["λ"] if has_prices else []), "heads", metric, "± sd", "change", "worse ≤", "verdict")
    first_rows = sorted(rows, key=lambda row: row["method"] != "unpruned")[:MAX_ROWS]
    table = filled_table(columns, [_sweep_row(row, has_prices=has_prices) for row in first_rows])
    hidden = len(rows) - len(first_rows)
    answers.append(Answer("Sizes", f"{hidden} more in sweep.csv" if hidden > 0 else "", table))
    answers += [Answer(method, direction, detail=True) for method, direction in record["directions"].items()]
    return [*answers, *remark_answers(record["remarks"], "sweep.json")]


def _how_small(record: Mapping[str, Any]) -> str:
    """The method that removes most heads and is shown to be as good; else that none is, and what could be seen."""
    conclusions, verdicts = record["conclusions"], record.get("verdicts", [])
    if good := [row for row in verdicts if row["verdict"] == "non-inferior"]:
        best = min(good, key=lambda row: row["kept"])
        method = f"{best['method']} {best['control']}".strip()
        return str(next(line.partition(";")[0] for line in conclusions if line.startswith(f"{method}: ")))
    if verdicts and len(conclusions) > 1:
        return f"no size is shown to be as good as the unpruned model; {conclusions[-1].partition(';')[0]}"
    return conclusions[0] if conclusions else "no verdict" if record["remarks"] else "nothing to compare with"


def _sweep_row(row: Mapping[str, Any], *, has_prices: bool) -> tuple[str, ...]:
    whole = row["method"] == "unpruned"
    size = row["size"].removeprefix("lambda ") if row["size"].startswith("lambda") else ""
    return (
        f"{row['method']} {row['control']}".strip(),
        *([size] if has_prices else []),
        f"{row['kept']:.4g}",
        f"{row['value']:.4g}",
        "" if row["seeds"] == 1 else f"{row['sd']:.2g} of {row['seeds']}",
        "" if whole else signed_text(row["difference"], ".3g"),
        "" if row["worse_limit"] != row["worse_limit"] else number_text(row["worse_limit"]),
        CAN_GO.get(row["verdict"], ""),
    )
