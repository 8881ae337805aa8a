"""Copying, composition, successors and the vocabulary of heads, from whole matrices."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headscope as hs
from headscope.analyses.composition import compositions, spectra
from headscope.analyses.copying import copying_scores
from headscope.analyses.vocabulary import BETWEEN, TOKENS, decompose
from headscope.attribution.residual_stream import HeadFactors, stream_of
from headscope.description.tokens import TokenReader
from headscope.errors import ConfigError
from headscope.heads import Site
from headscope.results.study import Study
from tests.makers.studies import study_of
from tests.makers.wrappers import hugging_face
from tests.oracles import full_circuits, speakers, tiny

KINDS = ("gpt2", "llama", "t5", "native-pre")
every_kind = pytest.mark.parametrize("kind", KINDS)
NAMES = ("copying", "composition")


@cache
def study(kind: str, *names: str) -> Study:
    return study_of(speakers.checkpoint(kind), speakers.corpus(kind), *(names or NAMES))


def decoder_rows(study: Study) -> Any:
    return study.heads[study.heads.site == Site.DECODER_SELF.value]


def tuples(frame: Any) -> list[Any]:
    """Rows with their columns as attributes."""
    return list(frame.itertuples())


@every_kind
def test_copying_is_that_of_the_whole_circuit(kind: str) -> None:
    checkpoint, rows = speakers.checkpoint(kind), decoder_rows(study(kind))
    assert len(rows) == sum(heads for (site, _), heads in checkpoint.layout.items() if site is Site.DECODER_SELF)
    for row in tuples(rows):
        expected = full_circuits.copying(kind, checkpoint, row.layer, row.head)
        assert row.copying == pytest.approx(expected, abs=1e-7) and row.copying_low == row.copying == row.copying_high
        assert row.copying_chance > 0
    table = study(kind).tables["copying"]
    np.testing.assert_allclose(table.trace / table.absolute, rows.copying, atol=1e-12)


@every_kind
def test_composition_is_that_of_whole_matrices(kind: str) -> None:
    checkpoint, table = speakers.checkpoint(kind), study(kind).tables["composition"]
    layers = sorted({layer for (site, layer), n in checkpoint.layout.items() if site is Site.DECODER_SELF and n})
    earlier = sum(checkpoint.layout[Site.DECODER_SELF, layer] for layer in layers[:-1])
    assert set(table.layer) == set(layers[1:]) and len(layers) == 2
    assert len(table) == earlier * checkpoint.layout[Site.DECODER_SELF, layers[-1]] * 3
    for row in tuples(table):
        pair = (row.earlier_layer, row.earlier_head), (row.layer, row.head)
        expected = full_circuits.composition(kind, checkpoint, *pair, row.kind)
        assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, abs=1e-9)
        assert row.above == pytest.approx(row.score - row.baseline)
    best = table.groupby(["layer", "head", "kind"]).above.max()
    for row in tuples(decoder_rows(study(kind))):
        for letter in "qkv":
            largest = getattr(row, f"composition_{letter}")
            assert np.isnan(largest) if row.layer == layers[0] else largest == best[row.layer, row.head, letter]


def build_decoder(kind: str, **more: Any) -> Any:
    """A language model of two layers, in double precision."""
    sizes: dict[str, Any] = {"vocab_size": 53, "hidden_size": 20, "intermediate_size": 17, "num_hidden_layers": 2}
    ids = {"pad_token_id": tiny.PAD, "bos_token_id": tiny.START, "eos_token_id": tiny.END}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ids, **more)).double().eval()


def with_gains(model: Any) -> Any:
    """The model with random gains of its norms."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.4 * torch.randn_like(parameter)
    return model


@pytest.mark.slow
def test_factors_of_what_is_added_are_part_of_it() -> None:
    """Granite's `residual_multiplier` equals a factor in the output projections."""
    factors = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "attention_multiplier": 0.4}
    studies = []
    for factor in (0.25, 1.0):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "residual_multiplier": factor}
        model = build_decoder("granite", **factors, **heads)
        for layer in model.model.layers if factor == 1 else ():
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.data *= 0.25
        wrapper = hs.load(model, tokenizer=tiny.tokenizer([tiny.START], []))
        studies.append(wrapper.analyze(["ah aj bl", "aj ah"], only="copying,composition,direct_logit", bootstrap=10))
        assert not studies[-1].left_out
    by_config, by_weights = (study.heads[["copying", "composition_v", "direct_logit"]] for study in studies)
    np.testing.assert_allclose(by_config, by_weights, rtol=1e-6)
    assert by_config.direct_logit.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo2"])
def test_norms_on_what_a_layer_writes_are_part_of_it(kind: str) -> None:
    """By hand, from states of the model: o_h over σ of all heads together, times the gain of its norm."""
    model = with_gains(build_decoder(kind, num_attention_heads=2, num_key_value_heads=2, head_dim=10))
    tokenizer = tiny.tokenizer([tiny.START], [])
    study = hs.load(model, tokenizer=tokenizer).analyze(["ah aj bl"], only="direct_logit", bootstrap=10)
    states: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = model.model.layers
    modules = {"end": model.model.norm}
    for number, layer in enumerate(layers):
        modules |= {f"W_O {number}": layer.self_attn.o_proj, f"norm {number}": layer.post_attention_layernorm}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, x, y, name=name: states.update({name: (x[0][0], y[0])}))
    tokens = tokenizer("ah aj bl", return_tensors="pt").input_ids
    with torch.no_grad():
        model(tokens)
        weight = model.get_output_embeddings().weight
        towards = weight[tokens[0, 1:]] - weight.mean(dim=0)
        expected = []
        for number, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            part, (z, _) = slice(10 * head, 10 * head + 10), states[f"W_O {number}"]
            contribution = z[:, part] @ layers[number].self_attn.o_proj.weight[:, part].T
            for name in (f"norm {number}", "end"):
                x, y = states[name]
                contribution = contribution * y / x  # an RMSNorm: gain over σ
            expected.append((contribution[:-1] * towards).sum(dim=-1).mean().item())
    np.testing.assert_allclose(study.heads.direct_logit, expected, rtol=1e-6)


@pytest.mark.parametrize(("kind", "plus"), [("gemma3_text", 1), ("qwen3", 0)])
def test_norms_around_a_heads_projections_are_folded_into_them(kind: str, plus: int) -> None:
    """Gains of the layer's input norm, of its norms of queries and keys before rotation, and of its output norm."""
    model = with_gains(build_decoder(kind, num_attention_heads=4, num_key_value_heads=2, head_dim=6))
    checkpoint = hugging_face(model, tiny.tokenizer([tiny.START], []))
    layer, factors = model.model.layers[1], stream_of(checkpoint, embeddings=True).factors((Site.DECODER_SELF, 1))
    weights = {name: getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkvo"}
    gains = {name: (norm.weight + plus).detach() for name, norm in layer.self_attn.named_modules() if "norm" in name}
    gain_in = (layer.input_layernorm.weight + plus).detach()
    gain_out = (layer.post_attention_layernorm.weight + plus).detach() if plus else torch.ones(20).double()
    for head in range(4):
        rows, group = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
        expected = {
            "query": (weights["q"][rows] * gain_in).T * gains["q_norm"],
            "key": (weights["k"][group] * gain_in).T * gains["k_norm"],
            "value": (weights["v"][group] * gain_in).T,
            "output": weights["o"][:, rows].T * gain_out,
        }
        for name, matrix in expected.items():
            assert torch.allclose(getattr(factors, name)[head], matrix), name


def factors(seed: int, *, heads: int = 1, d: int = 23, k: int = 5) -> HeadFactors:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(heads, d, k, dtype=torch.float64) for _ in range(3))
    return HeadFactors(query, key, value, torch.randn(heads, k, d, dtype=torch.float64), centred=False)


def rotations(count: int, d: int) -> torch.Tensor:
    """Orthogonal matrices [n d d], all equally likely (Mezzadri 2007)."""
    torch.manual_seed(11)
    q, r = torch.linalg.qr(torch.randn(count, d, d, dtype=torch.float64))
    turns: torch.Tensor = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    return turns


@pytest.mark.slow
def test_baseline_and_p_of_composition_are_those_of_rotations() -> None:
    """1/√d is the root mean square over rotations of one head, for any two heads; p is near uniform in its tail."""
    writer, reader = factors(1), factors(2)
    assert writer.query is not None and writer.key is not None
    query, key, value = (part.expand(4000, -1, -1) for part in (writer.query, writer.key, writer.value))
    writers = HeadFactors(query, key, value, writer.output @ rotations(4000, 23), centred=False)
    for kind, scores in compositions(writers, reader, spectra(writers.value, writers.output)).items():
        squares = scores.score[:, 0].square()
        assert squares.mean().sqrt().item() == pytest.approx(scores.baseline, rel=0.01), kind
        assert squares.var().item() == pytest.approx(scores.variance[0, 0].item(), rel=0.1), kind
        p = np.concatenate([scores.p(torch.tensor([number])) for number in range(4000)])
        for level in (0.05, 0.01):
            assert 0.3 * level < (p <= level).mean() < 1.4 * level, (kind, level)


def test_chance_of_copying_is_that_of_rotations() -> None:
    head, product = factors(3), torch.randn(23, 23, dtype=torch.float64)
    scores = copying_scores(head, product)
    spread = (scores["copying_chance"] * scores["absolute"]).item()
    values = rotations(4000, 23) @ head.value
    sums = torch.einsum("hij,njk,hki->n", head.output, product @ values, torch.eye(5).double()[None])
    assert sums.std().item() == pytest.approx(spread, rel=0.05)
    assert abs(sums.mean().item()) < 0.1 * spread


@every_kind
def test_copy_suppression_counts_tokens_among_the_ten_lowest_of_their_own_row(kind: str) -> None:
    checkpoint = speakers.checkpoint(kind)
    study = study_of(checkpoint, speakers.corpus(kind), "copy_suppression")
    plain = checkpoint.plain_ids(side="target")
    for row in tuples(decoder_rows(study)):
        logits = full_circuits.ov_logits(kind, checkpoint, row.layer, row.head).tolist()
        count = sum(number in sorted(range(len(logits)), key=logits[number].__getitem__)[:10] for number in plain)
        assert row.copy_suppression == pytest.approx(count / len(plain))
        assert row.copy_suppression_chance == pytest.approx(10 / len(logits)) and row.functions == ""


ORDERS = "ah ai aj ak al ah\nbh bi nothing bk bl\nch ci\n"


@every_kind
def test_successor_counts_words_whose_next_one_is_raised_most(kind: str, tmp_path: Path) -> None:
    checkpoint, path = speakers.checkpoint(kind), tmp_path / "orders"
    path.write_text(ORDERS, encoding="utf-8")
    study = study_of(checkpoint, speakers.corpus(kind), "successor", sequences=path)
    words = study.tables["successor_words"]
    pairs = [*pairwise(("ah", "ai", "aj", "ak", "al", "ah")), ("bh", "bi"), ("bk", "bl"), ("ch", "ci")]
    assert list(zip(words.token, words.next_token, strict=True)) == pairs
    candidates = {tiny.PIECES.index(word) for pair in pairs for word in pair}
    shares = study.tables["successor"].set_index(["layer", "head", "sequence"]).share
    for row in tuples(decoder_rows(study)):
        logits = full_circuits.ov_logits(kind, checkpoint, row.layer, row.head).tolist()
        hits = []
        for word, following in pairs:
            best = max(candidates, key=logits[tiny.PIECES.index(word)].__getitem__)
            hits.append(best == tiny.PIECES.index(following))
        assert row.successor == pytest.approx(sum(hits) / 8) and row.functions == ""
        assert shares[row.layer, row.head, "ah … ah"] == pytest.approx(sum(hits[:5]) / 5)


def test_norms_without_parameters_are_norms() -> None:
    """OLMo subtracts the mean and has neither gain nor shift."""
    model = build_decoder("olmo", num_attention_heads=2, max_position_embeddings=61)
    wrapper = hs.load(model, tokenizer=tiny.tokenizer([tiny.START], []))
    study = wrapper.analyze(["ah aj bl", "aj ah"], only="copying,composition,direct_logit,vocabulary", bootstrap=10)
    assert not study.left_out and study.heads.direct_logit.notna().all()
    rows, centred = slice(10, 20), torch.eye(20).double() - 1 / 20
    attention = model.model.layers[1].self_attn
    value, output = attention.v_proj.weight[rows], attention.o_proj.weight[:, rows]
    embedding, unembedding = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    eigenvalues = torch.linalg.eigvals(embedding @ centred @ value.T @ output.T @ centred @ unembedding.T)
    expected = (eigenvalues.real.sum() / eigenvalues.abs().sum()).item()
    assert study.heads.copying.iloc[-1] == pytest.approx(expected, abs=1e-6)


COUNT = 3


def run(kind: str, **options: Any) -> Study:
    checkpoint = speakers.checkpoint(kind)
    return study_of(checkpoint, speakers.corpus(kind), "vocabulary", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_those_of_the_whole_matrices(kind: str) -> None:
    checkpoint, study = speakers.checkpoint(kind), run(kind, vocabulary_directions=COUNT)
    reader, plain = TokenReader.of(checkpoint, "target"), torch.tensor(checkpoint.plain_ids(side="target"))
    table = study.tables["vocabulary"]
    heads = study.heads.dropna(subset=["ov_rank"])
    assert len(heads) and (table["group"] == 1).all()
    for head in heads.to_dict("records"):
        for circuit in ("ov", "qk"):
            ids = (head["layer"], head["head"])
            inputs, sizes, outputs = full_circuits.directions(kind, checkpoint, *ids, circuit)
            shares = sizes / sizes.sum()
            assert head[f"{circuit}_rank"] == pytest.approx(float((-torch.xlogy(shares, shares).sum()).exp()))
            rows = table[(table["layer"] == ids[0]) & (table["head"] == ids[1]) & (table["circuit"] == circuit)]
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
                        for part in (inputs, outputs)
                    )
                    for sign in (1, -1)
                }
                pairs = rows[rows["direction"] == direction]
                assert {*zip(pairs["from"], pairs["to"], strict=True)} == expected  # the sign has no meaning


def test_named_tokens() -> None:
    checkpoint, kind = speakers.checkpoint("gpt2"), "gpt2"
    reader, plain = TokenReader.of(checkpoint, "target"), torch.tensor(checkpoint.plain_ids(side="target"))
    number = int(plain[5])
    table = run(kind, vocabulary_tokens=(reader.label(number),)).tables["vocabulary_tokens"]
    assert set(table["relation"]) == {"looks at", "is looked at by", "raises"} and len(table) % 3 == 0
    matrices, e = full_circuits.matrices(kind, checkpoint, 1, 0), full_circuits.embedding(kind, checkpoint)
    qk = e @ matrices["q"] @ matrices["k"].T @ e.T
    logits = e @ matrices["v"] @ matrices["o"] @ full_circuits.unembedding(kind, checkpoint)
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
