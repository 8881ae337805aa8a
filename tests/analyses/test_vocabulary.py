"""What heads read and write in words, against singular directions of matrices that are written out in full."""

from typing import Any

import pytest
import torch

from headscope.analyses.vocabulary import BETWEEN, TOKENS, decompose
from headscope.description.tokens import TokenReader
from headscope.errors import ConfigError
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.oracles import full_circuits, speakers

KINDS = ("gpt2", "llama", "t5", "native-pre")
COUNT = 3


def run(kind: str, **options: Any) -> Study:
    its = speakers.checkpoint(kind)
    return study_of(its, speakers.corpus(kind), "vocabulary", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_those_of_the_whole_matrices(kind: str) -> None:
    its, found = speakers.checkpoint(kind), run(kind, vocabulary_directions=COUNT)
    reader, plain = TokenReader.of(its, "target"), torch.tensor(its.plain_ids(side="target"))
    table = found.tables["vocabulary"]
    heads = found.heads.dropna(subset=["ov_rank"])
    assert len(heads) and (table["group"] == 1).all()
    for head in heads.to_dict("records"):
        for circuit in ("ov", "qk"):
            place = (head["layer"], head["head"])
            read, sizes, written = full_circuits.directions(kind, its, *place, circuit)
            shares = sizes / sizes.sum()
            assert head[f"{circuit}_rank"] == pytest.approx(float((-torch.xlogy(shares, shares).sum()).exp()))
            rows = table[(table["layer"] == place[0]) & (table["head"] == place[1]) & (table["circuit"] == circuit)]
            assert rows["size"].tolist() == pytest.approx(sizes[:COUNT].repeat_interleave(2).tolist())
            assert rows["share"].tolist() == pytest.approx(
                (sizes.square() / sizes.square().sum())[:COUNT].repeat_interleave(2).tolist()
            )
            for direction in range(COUNT):
                expected = {
                    tuple(
                        BETWEEN.join(
                            reader.label(int(plain[n])) for n in (sign * part[plain, direction]).topk(TOKENS)[1]
                        )
                        for part in (read, written)
                    )
                    for sign in (1, -1)
                }
                mine = rows[rows["direction"] == direction]
                assert {*zip(mine["from"], mine["to"], strict=True)} == expected  # the sign has no meaning


def test_named_tokens() -> None:
    its, kind = speakers.checkpoint("gpt2"), "gpt2"
    reader, plain = TokenReader.of(its, "target"), torch.tensor(its.plain_ids(side="target"))
    number = int(plain[5])
    table = run(kind, vocabulary_tokens=(reader.label(number),)).tables["vocabulary_tokens"]
    assert set(table["relation"]) == {"looks at", "is looked at by", "raises"} and len(table) % 3 == 0
    own, e = full_circuits.matrices(kind, its, 1, 0), full_circuits.embedding(kind, its)
    qk = e @ own["q"] @ own["k"].T @ e.T
    logits = e @ own["v"] @ own["o"] @ full_circuits.unembedding(kind, its)
    for relation, scores in (("looks at", qk[number]), ("is looked at by", qk[:, number]), ("raises", logits[number])):
        row = table[(table["layer"] == 1) & (table["head"] == 0) & (table["relation"] == relation)].iloc[0]
        best = plain[scores[plain].topk(TOKENS)[1]]
        assert row["tokens"] == BETWEEN.join(reader.label(int(token)) for token in best)
    with pytest.raises(ConfigError, match="--vocabulary-tokens"):
        run(kind, vocabulary_tokens=("no such thing",))


def test_equal_singular_values_are_one_group() -> None:
    torch.manual_seed(3)
    basis = torch.linalg.qr(torch.randn(11, 5, dtype=torch.float64))[0]
    sizes = torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0]).double()
    svd = decompose(basis * sizes, torch.linalg.qr(torch.randn(13, 5, dtype=torch.float64))[0])
    assert svd.sizes.tolist() == pytest.approx(sizes.tolist()) and svd.sizes[-1] == 0
    assert [(group.start, group.stop) for group in svd.groups(9)] == [(0, 1), (1, 3), (3, 4)]
    assert [(group.start, group.stop) for group in svd.groups(2)] == [(0, 1), (1, 3)]
    span = svd.left[:, 1:3]
    assert (span @ span.T) == pytest.approx((basis[:, 1:3] @ basis[:, 1:3].T).numpy())
