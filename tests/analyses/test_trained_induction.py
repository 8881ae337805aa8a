"""Links of words that a user writes into a CoNLL-U file, measured on a model that was trained on repeated words."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headscope.heads import HeadId, Site
from headscope.results.study import Study

FOLDER = Path(__file__).parents[1] / "data" / "induction"  # made by scripts/induction.py
INDUCTION = HeadId(Site.DECODER_SELF, 1, 0)


@pytest.mark.slow
def test_links_of_any_kind_are_relations_of_a_conllu_file(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """Coreference and the like: a word's HEAD is what it refers to; here, the word after its earlier occurrence."""
    luck, lines = random.Random(2), []
    for _ in range(20):
        words = luck.sample([f"w{number}" for number in range(40)], luck.randint(9, 15))
        n, twice = len(words), words + words
        heads = [0 if place <= n or place == 2 * n else place - n + 1 for place in range(1, 2 * n + 1)]
        lines += [f"# text = {' '.join(twice)}"]
        for place, (word, head) in enumerate(zip(twice, heads, strict=True), start=1):
            relation = "coref" if head else "root"
            lines.append(f"{place}\t{word}\t_\t_\t_\t_\t{head}\t{relation}\t_\t_")
        lines.append("")
    (tmp_path / "links.conllu").write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = (
        "--parse",
        tmp_path / "links.conllu",
        "--set",
        "syntactic.relations=coref",
        "--only",
        "syntactic",
        "--device",
        "cpu",
    )
    status, _, err = command("analyze", FOLDER, *given, "--out", tmp_path / "run")
    assert status == 0, err
    found = Study.open(tmp_path / "run")
    assert [head for head, labels in found.labels.items() if "syntactic:coref<" in labels] == [INDUCTION]
