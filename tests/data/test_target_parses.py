"""Parses of the translations: what decoders read has words, tags and relations too."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import headscope as hs
from headscope.assets import captions, trained
from headscope.data.parses import read_conllu

LINES = 24


def test_decoder_heads_are_tested_on_the_relations_of_the_target() -> None:
    parses = list(islice(read_conllu(captions("de.conllu")), LINES))
    found = Counter(relation.relation for parse in parses for relation in parse.relations)
    study = hs.load(trained()).analyze(
        captions("en"),
        target=captions("de"),
        target_parse=captions("de.conllu"),
        only="syntactic",
        max_sentences=LINES,
        bootstrap=20,
    )
    table = study.table("syntactic")
    assert set(table["site"]) == {"decoder-self"}
    rows = table[(table["layer"] == 1) & (table["head"] == 6)].to_dict("records")
    head: dict[str, Any] = {str(row["label"]): row for row in rows}
    assert not study.record["data"]["unaligned"]
    for name in ("nsubj", "obj", "amod"):
        assert head[f"{name}>"]["count"] == head[f"{name}<"]["count"] == found[name]
    # in German the object follows its verb here, and a decoder sees what is before it alone
    assert head["obj<"]["accuracy"] > 0.5 > head["obj>"]["accuracy"]
    assert "parse:captions.de.conllu" in str(study.signature)
