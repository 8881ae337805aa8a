"""`headscope evaluate`: the metrics that a checkpoint has, also with each head off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.config import EvaluateConfig
from headscope.heads import HeadId, Site

if TYPE_CHECKING:
    from headscope.distributed import Processes
    from headscope.evaluation.each_head import EachHead
    from headscope.evaluation.quality import Evaluation, Score

SHOWN = 20


@made_of(EvaluateConfig)
def evaluate(values: Mapping[str, Any], *, json: bool) -> None:
    """Score translations, how well the model predicts a text, or how near it is to the intact one.

    Processes of torchrun share the text.

    Perplexity is exp(Σ -log p / tokens), accuracy the share of tokens that the model finds likeliest: over every token
    of the references and the one that closes each (teacher-forced); for decoders alone over every token that follows
    another; for encoders alone over every token, hidden. Of classifiers both, and macro-F1, are over the --labels. The
    cosine and the relative l2 distance compare final states, pooled (the mean over a sentence) or token by token, with
    those of the intact model, --against.
    """
    from headscope.distributed import process_group

    config = read(EvaluateConfig, values)
    with process_group() as processes:
        result = (_each_head if config.each_head else _evaluate)(config, processes, json=json)
    if not processes.main:
        return
    if result.late:
        raise typer.Exit(2)
    if not result.complete:
        console.say("interrupted: the numbers are of the sentences that were done, see n= in the signature")
        raise typer.Exit(130)


def _evaluate(config: EvaluateConfig, processes: Processes, *, json: bool) -> Evaluation:
    from headscope.evaluation.run import run_evaluation

    evaluation = run_evaluation(config, progress=console.progress, processes=processes)
    if not processes.main:
        return evaluation
    if json:
        console.print_json(_as_json(evaluation))
    else:
        _show(evaluation, config.per_sentence if evaluation.complete else None)
    return evaluation


def _as_json(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "scores": [
            {
                "metric": score.metric,
                "name": score.name,
                "value": score.value,
                "low": score.low,
                "high": score.high,
                "signature": score.signature or str(evaluation.signature),
            }
            for score in evaluation.scores
        ],
        "tokens": evaluation.tokens,
        "nll": evaluation.nll,
        "unknown_pieces": evaluation.unknown.to_json(),
        "remarks": evaluation.remarks,
        "signature": str(evaluation.signature),
        "complete": evaluation.complete,
    }


def _score(score: Score) -> tuple[str, str]:
    """A score and its interval, which is empty where there is none."""
    width = score.decimals
    return f"{score.value:.{width}f}", "" if score.low != score.low else f"{score.low:.{width}f}–{score.high:.{width}f}"


def _show(evaluation: Evaluation, out: Path | None) -> None:
    rows = [(score.name, *_score(score)) for score in evaluation.scores]
    table = console.table(["metric", "value", "95 %"], rows, numbers=("value", "95 %"), whole=("metric",))
    lines = [f" {remark}" for remark in evaluation.remarks]
    if evaluation.tokens is not None:
        lines.insert(0, f" {evaluation.nll:.2f} nats over {evaluation.tokens} {evaluation.unit}")
    signatures = [f"{score.name}|{score.signature}" for score in evaluation.scores if score.signature]
    console.show([*([table] if rows else []), *console.signed(lines, *signatures, evaluation.signature)])
    answer = ", ".join(f"{name} {value}{interval and f' ({interval})'}" for name, value, interval in rows)
    console.show(console.ending([answer or "nothing was measured"], out or ""))


def _each_head(config: EvaluateConfig, processes: Processes, *, json: bool) -> EachHead:
    from headscope.evaluation.run import run_each_head
    from headscope.signature import signed_rows

    heads = run_each_head(config, progress=console.progress, processes=processes)
    if not processes.main:
        return heads
    if json:
        rows = signed_rows(heads.table, heads.signature)
        console.print_json({**rows, "remarks": heads.remarks, "complete": heads.complete})
    else:
        _show_heads(heads, config.out if heads.complete else None)
    return heads


def _show_heads(heads: EachHead, out: Path | None) -> None:
    """The model as it is, then the heads that matter most."""
    columns = [name for name in heads.table.columns[3:] if name != "nll" and not name.endswith(("_low", "_high"))]
    titles = [_title(name, heads.loss) for name in columns]
    table = console.table(["head off", *titles], numbers=titles, whole=("head off",))
    for row in heads.table.head(SHOWN + 1).to_dict("records"):
        head = _head(row, heads) if row["site"] else "none"
        table.add_row(head, *(f"{row[name]:+.4f}" if "_diff" in name else f"{row[name]:.4f}" for name in columns))
    lines = [f" {remark}" for remark in heads.remarks]
    if len(heads.table) > SHOWN + 1:
        where = f"all are in {out}" if out else "--out FILE.csv writes them all"
        lines.insert(0, f" … {len(heads.table) - SHOWN - 1} more heads; {where}")
    console.show([table, *console.signed(lines, heads.signature), *console.ending(_heads_answer(heads), out or "")])


def _title(name: str, loss: str) -> str:
    """A column of the table of heads; what is a difference to the model as it is says so."""
    metric, difference, _ = name.partition("_difference")
    metric = {"nll_per_token": loss}.get(metric, metric)
    return f"Δ {metric}" if difference else metric


def _head(row: Mapping[Any, Any], heads: EachHead) -> str:
    return HeadId(Site(row["site"]), row["layer"], row["head"]).name(set(heads.table["site"][1:]))


def _heads_answer(heads: EachHead) -> Iterator[str]:
    """Which head matters most and least, and how many change nothing that can be told."""
    table, by = heads.table, heads.by
    if len(table) < 2:
        return
    change, title = f"{by}_difference", _title(by, heads.loss)
    worst, least = ({**table.iloc[row].to_dict()} for row in (1, -1))
    named = []
    for row in (worst, least):
        by_how_much = f"{row[change]:+.4f}" if change in table else f"{row[by]:.4f}"
        named.append(f"{_head(row, heads)} ({title} {by_how_much})")
    yield f"off alone, {named[0]} matters most and {named[1]} least"
    if f"{change}_low" in table:
        rows = table.iloc[1:]
        zero = int(((rows[f"{change}_low"] <= 0) & (rows[f"{change}_high"] >= 0)).sum())
        yield f"the 95 % interval of Δ {title} contains 0 for {zero} of {len(rows)} heads (each by itself, uncorrected)"
