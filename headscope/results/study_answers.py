"""Answers of a study: one function a question, the most important first.

Ablation, or else the best estimate that was measured, answers which heads matter. Measures that are shares within a
layer do not compare heads of different layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.config.declarations import Measure, import_target, measure_of
from headscope.config.option import MIN_UNITS
from headscope.errors import flag
from headscope.heads import HeadId
from headscope.results.answer import Answer, AnswerTable, filled_table, interval_text, list_text, number_text
from headscope.results.roles import NONE, SINK, role_of, roles_of
from headscope.signature import count_of

if TYPE_CHECKING:
    import pandas as pd

    from headscope.results.study import Study

IMPORTANCES = ("ablation", "shapley", "integrated_gradients", "taylor")
"""Measures of importance, the preferred first: those that switch heads off, then an estimate."""
EXACT = IMPORTANCES[:3]
LEVEL = 0.05
FEWEST_PROMPTS = 10
MOST_NEEDED, MAX_ROLES = 5, 8
WIDTH, GAP, MIN_NAMES_WIDTH = 97, 3, 12  # letters of a row, between columns, and of the names of heads


def study_answers(study: Study) -> list[Answer]:
    """All answers of a study; those with `detail` last."""
    questions = (subject, importance, prompts, roles, alignment, explanations, sharpest, rankings, gaps, cautions)
    answers = [answer for question in (*questions, unsupported) for answer in question(study)]
    lines = [*study.remarks, *(f"left out: {entry.analysis} ({entry.why})" for entry in study.left_out)]
    return answers + [Answer("", line, detail=True) for line in lines]


def subject(study: Study) -> Iterator[Answer]:
    """The model and the text, and whether it is too short to tell what heads do."""
    shape = "; ".join(
        f"{site} {len(counts)} × {'/'.join(map(str, dict.fromkeys(counts)))}" for site, counts in study.layout.items()
    )
    text = f"{study.model}: {count_of(len(study.heads), 'head')} ({shape}), {study.data}"
    yield Answer("", text, caution=not study.complete)
    if is_short(study) and not study.has_table("patching"):  # `prompts` answers this itself
        text = f"{count_of(study.sentences, 'sentence')} cannot tell what a head does; {MIN_UNITS} or more can"
        yield Answer("Too short", text, caution=True)


def is_short(study: Study) -> bool:
    """Whether the text has fewer sentences than a test of what a head does needs."""
    return study.has_table("labels") and study.sentences < MIN_UNITS


def known_labels(study: Study) -> dict[str, list[str]]:
    """The labels of heads by name; on a short text also those that lack evidence."""
    labels = {str(head): supported for head, supported in study.labels.items()}
    for head, texts in study.unsupported.items() if is_short(study) else ():
        labels[str(head)] = [*labels.get(str(head), []), *(text.partition(" (")[0] for text in texts)]
    return labels


def main_importance(study: Study) -> Measure | None:
    """The preferred measure of importance; None if none was measured that compares heads of all layers."""
    if not study.has_table("importance"):
        return None
    rows = study.tables["importance"].dropna(subset=["value"])
    names = [name for name in dict.fromkeys(rows["measure"]) if measure_of(name).orders]
    order = [*(name for name in IMPORTANCES if name in names), *names]
    return measure_of(order[0]) if order else None


def ranked_rows(study: Study, measure: str, table: str = "importance") -> pd.DataFrame:
    """The rows of a measure in a table, the most needed head first."""
    rows = study.tables[table]
    return rows[(rows["measure"] == measure) & rows["value"].notna()].sort_values("rank", kind="stable")


def importance(study: Study) -> Iterator[Answer]:
    """The heads that the model needs most; the question says if this is estimated."""
    measure = main_importance(study)
    if measure is None:
        return
    rows = ranked_rows(study, measure.name)
    exact = measure.name in EXACT
    columns = ("head", importance_label(study, measure), "95 %", "what it does")
    p_values = rows["p_adjusted"].dropna()
    zero = int((p_values > LEVEL).sum())
    notes = [f"{zero} of {len(p_values)} heads cannot be told from zero, each off by itself"] if len(p_values) else []
    if part := study.record.get("sampled", {}).get(measure.name):
        notes.append(f"{measure.words} on {part} sentences")
    question = f"Which heads the model needs{'' if exact else ' (estimated)'}"
    yield _head_table(study, question, rows, columns, "; ".join(notes))


def importance_label(study: Study, measure: Measure) -> str:
    """The heading of a measure's numbers, with their unit; for exact measures, the damage of a head that is off."""
    return f"{damage_words(study)} if off" if measure.name in EXACT and "objective" in study.record else measure.label


def damage_words(study: Study) -> str:
    """The heading of the damage of heads that are off, with its unit."""
    return str(study.record.get("objective", {}).get("damage", "damage"))


def prompts(study: Study) -> Iterator[Answer]:
    """The heads that change the answers to prompts."""
    if not study.has_table("patching"):
        return
    names = list(dict.fromkeys(study.tables["patching"].dropna(subset=["value"])["measure"]))
    if not names:
        return
    measure = measure_of("patching" if "patching" in names else names[0])
    effects = ranked_rows(study, measure.name, "patching")
    clear = effects[effects["p_adjusted"] <= LEVEL]
    if not len(clear):
        count = count_of(study.sentences, "prompt")
        text = f"no head can be told from zero with {count} ({len(effects)} heads tested)"
        if study.sentences < FEWEST_PROMPTS:
            text = f"{count} are too few to tell a head from zero; give {FEWEST_PROMPTS} or more"
        yield Answer("Which heads the answers need", text, caution=True)
        return
    strongest = clear.sort_values("value", key=abs, ascending=False, kind="stable")
    against = int((clear["value"] < 0).sum())
    sentence = f"{len(clear)} of {len(effects)} heads can be told from zero; {against} of them speak against the answer"
    columns = ("head", measure.label, "95 %", "what it does")
    yield _head_table(study, "Which heads the answers need", strongest, columns, sentence)
    yield from _estimates(study, measure.name)


def _estimates(study: Study, exact: str) -> Iterator[Answer]:
    """The agreement of estimates with the exact effects."""
    for row in study.tables["patching_agreement"].to_dict("records"):
        if row["first"] == exact:
            heads = f"the {count_of(row['heads'], 'head')} that {measure_of(exact).words} tells from zero"
            numbers = []
            for name, what in (("pearson", "Pearson of sizes"), ("spearman", "Spearman of order")):
                interval = interval_text(row[f"{name}_low"], row[f"{name}_high"])
                numbers.append(f"{what} {number_text(row[name], 2)}{interval and f' ({interval})'}")
            text = ", ".join(numbers) if row["pearson"] == row["pearson"] else "too few to compare"
            yield Answer(f"Does {measure_of(row['second']).words} agree", f"on {heads}: {text}")


def _head_table(study: Study, question: str, rows: pd.DataFrame, columns: tuple[str, ...], sentence: str) -> Answer:
    """An answer with the first heads of ranked rows: their values, intervals and roles."""
    labels = known_labels(study)
    first = rows.head(MOST_NEEDED).to_dict("records")
    names = [str(HeadId.of_row(row)) for row in first]
    cells = tuple(
        (
            study.short_name(name),
            number_text(row["value"], 2),
            interval_text(row["value_low"], row["value_high"], 2),
            ", ".join(dict.fromkeys(map(role_of, labels.get(name, [])))) or "no known role",
        )
        for name, row in zip(names, first, strict=True)
    )
    return Answer(question, sentence, filled_table(columns, cells), tuple(names))


def roles(study: Study) -> Iterator[Answer]:
    """A row for every role, with its heads and their joint effect."""
    if "functions" not in study.heads or not study.has_table("labels"):
        return
    labels = known_labels(study)
    by_role = roles_of(labels)
    effects = joint_effects(study)
    texts = dict.fromkeys(text for _, text in effects.values() if text)
    marks = {text: "*" * number for number, text in enumerate(texts, start=1)}
    together = {role: effect + marks.get(text, "") for role, (effect, text) in effects.items()}
    columns = ("role", "heads", f"{damage_words(study)} if all are off", "which")
    room = WIDTH - 4 * GAP - max(map(len, [*by_role, NONE])) - max(map(len, together.values()), default=0)
    rows = []
    for role, names in by_role.items():
        heads_text = list_text([study.short_name(name) for name in names], max(MIN_NAMES_WIDTH, room))
        rows.append((role, str(len(names)), together.get(role, ""), heads_text))
    hidden = len(rows) - MAX_ROLES
    if hidden > 0:
        rows = rows[: MAX_ROLES - 1] + rows[-1:]
    unlabelled = len(study.heads) - len(labels)
    if unlabelled:
        rows.append((NONE, str(unlabelled), "", ""))
    notes = [f"{count_of(hidden + 1, 'more role')} in heads.csv"] if hidden > 0 else []
    if unsure := [head for head in study.unsupported if str(head) not in labels]:
        notes.append(f"{len(unsure)} of the others may have one, which more text would tell (labels.csv)")
    notes += [f"{mark} on {text}" for text, mark in marks.items()]
    heads = tuple(dict.fromkeys(name for role, names in by_role.items() if role != SINK for name in names))
    question = "What the heads seem to do (not tested)" if is_short(study) else "What the heads do"
    yield Answer(question, "; ".join(notes), filled_table(columns, rows), heads)


def joint_effects(study: Study) -> dict[str, tuple[str, str]]:
    """Joint effects by role with the range of random sets, and the name of their text if it is not the study's."""
    if not study.has_table("roles"):
        return {}
    effects = {}
    for row in study.tables["roles"].dropna(subset=["value"]).to_dict("records"):
        low, high = (number_text(row[f"random_{end}"], 2) for end in ("low", "high"))
        among = f" (random {low if low == high else f'{low} to {high}'})" if row["sets"] else ""
        effects[row["role"]] = number_text(row["value"], 2) + among, row["text"].removeprefix("text")
    return effects


def alignment(study: Study) -> Iterator[Answer]:
    """The joint word alignment of a decoder language model's heads."""
    if not study.has_table("alignment_together"):
        return
    rows = tuple(
        (row["name"], number_text(row["aer"], 2), row["which"])
        for row in study.tables["alignment_together"].to_dict("records")
    )
    columns = ("mean weights of", "error rate", "heads")
    yield Answer("Word alignment by heads together", "", AnswerTable(columns, rows))


def explanations(study: Study) -> Iterator[Answer]:
    """What explains the weights of heads, by the group that explains most."""
    if "explained" not in study.heads:
        return
    leading_explanation = import_target("headscope.description.features:leading_explanation")
    groups: dict[str, list[dict[Any, Any]]] = {}
    for row in study.heads.dropna(subset=["explained"]).to_dict("records"):
        groups.setdefault(leading_explanation(row), []).append(row)
    rows = []
    for name, members in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        clearest = max(members, key=lambda row: float(row["explained"]))
        head = study.short_name(str(HeadId.of_row(clearest)))
        share = f"{np.median([row['explained'] for row in members]):.2f}"
        rows.append((name, str(len(members)), share, f"{head} {clearest['description']}"))
    columns = ("mostly", "heads", "median share", "the clearest")
    sentence = ""
    if "beyond_sinks" in study.heads:
        beyond = study.heads["beyond_sinks"].dropna()
        share = f"{1 - beyond.median():.2f} of the median head's weight"
        sentence = f"{len(beyond)} heads beyond first and special tokens, which have {share}"
    yield Answer("What explains their weights", sentence, AnswerTable(columns, tuple(rows)))


def sharpest(study: Study) -> Iterator[Answer]:
    """The sharpest heads that are not sinks, if no importance was measured."""
    if "sharpness" not in study.heads or study.has_table("importance") or study.has_table("patching"):
        return
    sinks = study.heads["functions"].str.split(";").map(lambda labels: "sink" in labels)
    heads = study.heads[~sinks].dropna(subset=["sharpness"]).nlargest(MOST_NEEDED, "sharpness")
    if not len(heads):
        return
    names = {f"sharpness{end}": f"value{end}" for end in ("", "_low", "_high")}
    rows = heads[["site", "layer", "head", *names]].rename(columns=names)
    columns = ("head", measure_of("sharpness").label, "95 %", "what it does")
    yield _head_table(study, "The sharpest heads (without sinks)", rows, columns, "")


def rankings(study: Study) -> Iterator[Answer]:
    """The rankings that removing heads in their order confirms, the best first."""
    if not study.has_table("faithfulness_rankings"):
        return
    rows = [
        (
            str(row["ranking"]),
            number_text(row["area"]),
            interval_text(row["area_low"], row["area_high"]),
            f"{number_text(row['area_random'])} ± {number_text(row['area_random_sd'], 2)}",
        )
        for row in study.tables["faithfulness_rankings"].head(MOST_NEEDED).to_dict("records")
    ]
    columns = ("ranking", "area between its curves", "95 %", "random orders")
    yield Answer("Which ranking removal bears out", "", AnswerTable(columns, tuple(rows)))


def gaps(study: Study) -> Iterator[Answer]:
    """Analyses that were left out for lack of data."""
    reasons = {entry.analysis: entry.why for entry in study.left_out if "need" in entry.why and "--" in entry.why}
    if reasons:
        parts = [f"{name} ({why})" for name, why in reasons.items()]
        yield Answer("Not measured", "; ".join(parts[:3]) + (f"; {len(parts) - 3} more" if len(parts) > 3 else ""))


def cautions(study: Study) -> Iterator[Answer]:
    """Interruption, cut-off and unaligned sentences; and the heads that were named in the settings of a model."""
    data = study.record.get("data", {})
    if not study.complete:
        missing = ", ".join(entry.analysis for entry in study.left_out if entry.is_interrupted)
        part = f"{study.sentences} of {data.get('in_corpus')} sentences" + f", without {missing}" * bool(missing)
        yield Answer("Interrupted", f"the numbers are of {part}", caution=True)
    if data.get("truncated"):
        cut = count_of(data["truncated"], "sentence")
        yield Answer("Cut off", f"{cut} at the length limit ({flag.max_length}, {flag.long})", caution=True)
    for reason, count in (data.get("unaligned") or {}).items():
        yield Answer("Left out of syntactic", f"{count_of(count, 'sentence')} ({reason})", caution=True)
    if line := study.record.get("alignment_heads"):
        yield Answer("Alignment heads", line)


def unsupported(study: Study) -> Iterator[Answer]:
    """Labels that the estimates alone would give."""
    rows = []
    for head, texts in study.unsupported.items():
        for text in texts:
            label, _, missing = text.partition(" (")
            rows.append((study.short_name(str(head)), role_of(label), missing.removesuffix(")")))
    if rows:
        table = AnswerTable(("head", "role", "missing"), tuple(rows[:MAX_ROLES]))
        sentence = f"{count_of(len(rows), 'label')} in all; labels.csv has the evidence"
        yield Answer("Not enough evidence", sentence, table, detail=True)
