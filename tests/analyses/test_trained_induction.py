"""A model trained on repeated random words: every analysis for induction heads finds its induction head."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.data.corpus import Corpus, open_corpus
from headscope.evaluation.prompts import with_answers
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import HeadId, Site
from headscope.results.study import Study
from tests.makers.shared import Command, succeed
from tests.makers.studies import study_of

FOLDER = Path(__file__).parents[1] / "data" / "induction"  # made by scripts/induction.py
PREVIOUS, BEFORE, INDUCTION, _ = (HeadId(Site.DECODER_SELF, layer, head) for layer in (0, 1) for head in (0, 1))
NAMES = ("previous_token", "induction", "copying", "composition", "retrieval", "causal_head_gating")
OPTIONS: dict[str, Any] = {
    **{"needle": "w50 w51 w52 w53 w54", "needle_answer": "w51 w52 w53 w54", "needle_question": "w50"},
    **{"needle_depths": 12, "needle_steps": 4, "haystack_lengths": (30,)},
    **{"chg_fits": 7, "chg_steps": 30, "chg_batch": 8, "chg_lr": (0.5, 0.1)},
}


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(FOLDER))


@cache
def study() -> Study:
    rng = random.Random(1)
    texts = [" ".join(rng.sample([f"w{number}" for number in range(40)], rng.randint(9, 15))) for _ in range(24)]
    corpus = open_corpus([f"{text} {text}" for text in texts])
    return study_of(checkpoint(), corpus, *NAMES, tokens=4096, replicates=50, **OPTIONS)


def test_it_says_what_was_said_before() -> None:
    ids = 2 + torch.rand(16, 60, generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :25]
    ids = torch.cat([torch.zeros(16, 1, dtype=torch.long), ids, ids], dim=1)
    model: Any = checkpoint().model
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    assert losses[:, 26:].mean() < 0.01 and 3.5 < losses[:, :25].mean() < 4.5


@pytest.mark.slow
def test_labels_are_those_of_the_circuit() -> None:
    labels = study().labels
    assert {"previous", "facilitating"} <= set(labels[PREVIOUS])
    expected = {"induction", "copying", f"k-composition:{PREVIOUS.layer}.{PREVIOUS.head}", "retrieval", "facilitating"}
    assert expected <= set(labels[INDUCTION])
    other_labels = {label for head, names in labels.items() if head not in (PREVIOUS, INDUCTION) for label in names}
    assert other_labels <= {"retrieval"}
    retrieval = study().heads.set_index(["layer", "head"])["retrieval"]
    assert retrieval.idxmax() == (INDUCTION.layer, INDUCTION.head), "what others find, it finds more of"


@cache
def prompt_corpus() -> Corpus:
    """Prompts that repeat a word: the answer followed it before; the corrupt prompt has another word there."""
    rng, texts = random.Random(2), []
    for _ in range(16):
        words = rng.sample([f"w{number}" for number in range(60)], 12)
        texts.append((" ".join([*words[:11], words[4]]), " ".join([*words[:4], words[11], *words[5:11], words[4]])))
    clean = open_corpus([clean for clean, _ in texts])
    answers = [text.split()[5] for text, _ in texts]
    return with_answers(checkpoint(), clean, [corrupt for _, corrupt in texts], answers)


@pytest.mark.slow
def test_answers_to_prompts_need_the_same_heads() -> None:
    study = study_of(checkpoint(), prompt_corpus(), "causal_head_gating", tokens=4096, replicates=50, **OPTIONS)
    assert study.labels == {PREVIOUS: ["facilitating"], INDUCTION: ["facilitating"], BEFORE: ["interfering"]}


@pytest.mark.slow
def test_links_of_any_kind_are_relations_of_a_conllu_file(tmp_path: Path, command: Command) -> None:
    """Coreference and the like: a word's HEAD is what it refers to; here, the word after its earlier occurrence."""
    rng, lines = random.Random(2), []
    for _ in range(20):
        words = rng.sample([f"w{number}" for number in range(40)], rng.randint(9, 15))
        n, text = len(words), words + words
        heads = [0 if position <= n or position == 2 * n else position - n + 1 for position in range(1, 2 * n + 1)]
        lines += [f"# text = {' '.join(text)}"]
        for position, (word, head) in enumerate(zip(text, heads, strict=True), start=1):
            relation = "coref" if head else "root"
            lines.append(f"{position}\t{word}\t_\t_\t_\t_\t{head}\t{relation}\t_\t_")
        lines.append("")
    (tmp_path / "links.conllu").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ("--parse", tmp_path / "links.conllu", "--set", "syntactic.relations=coref", "--only", "syntactic")
    succeed(command, "analyze", FOLDER, *options, "--no-figures", "--out", tmp_path / "run")
    result = Study.open(tmp_path / "run")
    assert [head for head, labels in result.labels.items() if "syntactic:coref<" in labels] == [INDUCTION]
