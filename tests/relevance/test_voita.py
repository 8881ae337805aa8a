"""Voita's relevance: against the original program, against matrix-form oracles, in batches, on every architecture."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope.config import Companions
from headscope.data.encoded import IGNORED, Batch, pad_side
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.heads import Site
from headscope.model.attention import AttentionCall, ScoreOptions, attend, tap_contexts
from headscope.model.mixing.experts import experts_of
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.taps import gated
from headscope.relevance.modules import NormParameters
from headscope.relevance.voita.explain import VoitaRelevance, projection_shares, relevance_of_pass, voita_relevance
from headscope.relevance.voita.rules import OutputUnits, VoitaRules, VoitaSettings
from tests.contracts.architectures import CATALOGUE, inputs_of, row_of, sharpen
from tests.oracles import classifiers
from tests.oracles import voita as slow

pytestmark = pytest.mark.slow

SITES = {Site.ENCODER_SELF: "enc_self", Site.DECODER_SELF: "dec_self", Site.CROSS: "dec_enc"}
DOUBLE = torch.float64


# What the original program computed


@pytest.fixture(scope="module")
def story(oracles: Path) -> Checkpoint:
    """The reference model, in float64: differences are then the program's own rounding."""
    folder = oracles / "story-of-heads"
    checkpoint = open_checkpoint(str(folder / "model.npz"), device="cpu", companions=Companions())
    checkpoint.model.double()
    return checkpoint


def sentence(story: Checkpoint, text: dict[str, str]) -> Batch:
    source, target = (
        story.encode([text[key]], side=name, limit=99)[0]  # type: ignore[arg-type]
        for key, name in (("src", "source"), ("dst", "target"))
    )
    return Batch(torch.tensor([0]), 0, pad_side([source]), pad_side([target]))


def texts(oracles: Path) -> list[dict[str, str]]:
    folder = oracles / "story-of-heads"
    sentences: list[dict[str, str]] = json.loads((folder / "sentences.json").read_text())["sentences"]
    return sentences


# Largest differences over the largest value of each array: what float32 rounding of the program leaves. In alpha-beta
# mode its softmax gives 1 - 2^-24 to a lone key, and near-zero sums are compared with eps at position 0.
@pytest.mark.parametrize(
    ("name", "settings", "heads", "tokens"),
    [
        ("lrp_ab", VoitaSettings(), 1e-4, 4e-3),
        ("lrp_ab_attnconst", VoitaSettings(attention_constant=True), 1e-5, 1e-5),
        ("lrp_eps", VoitaSettings(mode="eps"), 5e-3, 4e-3),
        ("lrp_eps_attnconst", VoitaSettings(mode="eps", attention_constant=True), 5e-3, 4e-3),
    ],
)
def test_the_program_gives_the_same(
    story: Checkpoint, oracles: Path, name: str, settings: VoitaSettings, heads: float, tokens: float
) -> None:
    reference = np.load(oracles / "story-of-heads" / f"{name}.npz")
    for number, text in enumerate(texts(oracles)[:3]):
        result = voita_relevance(story, sentence(story, text), settings=settings)
        key = f"s{number:02}"
        compare_heads(result, reference, key, heads)
        tokens_read, inputs = (part.abs().sum(dim=-1) for part in result.inputs)
        outputs = (tokens_read, torch.nn.functional.pad(inputs[..., 1:], (0, 1)), inputs, result.memory)
        names = ("src_tok_abs", "dst_tok_abs", "dst_tok_abs_nocrop", "R_enc_out")
        for output, array in zip(outputs, names, strict=True):
            assert output is not None
            assert gap(output[:, 0].numpy(), reference[f"{key}/{array}"]) < (tokens if "dst" in array else heads)


def compare_heads(result: VoitaRelevance, reference: Any, key: str, tolerance: float) -> None:
    for site, name in SITES.items():
        layers = range(reference[f"{key}/head_raw/{name}"].shape[1])
        raw = np.stack([result.heads[site, layer].raw[:, 0].numpy() for layer in layers], axis=1)
        by_query = np.stack([result.heads[site, layer].by_query[:, 0].numpy() for layer in layers], axis=1)
        assert gap(raw, reference[f"{key}/head_raw/{name}"]) < tolerance
        assert gap(by_query, reference[f"{key}/head_pos/{name}"]) < tolerance


def gap(values: np.ndarray, expected: np.ndarray) -> float:
    assert values.shape == expected.shape
    return float(np.abs(values - expected).max() / np.abs(expected).max())


# Matrix-form oracles in float64


def native(norm: str = "pre", *, seed: int = 0, two_sided: bool = True, **options: Any) -> Transformer:
    """A model of prime sizes with random biases and norm parameters."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"d_model": 7, "d_ffn": 11, "d_head": 5, "d_value": 3, "norm": norm, "qkv_bias": True}
    sizes |= {"final_norm": norm == "pre", "self_heads": (2, 3)} | options
    start = sizes.pop("start", "token")
    encoder = StackConfig(vocabulary=13, **sizes) if two_sided else None
    decoder = StackConfig(vocabulary=17, **sizes, cross_heads=(3, 2) if two_sided else ())
    model = Transformer(TransformerConfig(encoder=encoder, decoder=decoder, start=start, output_bias=True))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.3)
        elif "alpha" in name:
            torch.nn.init.normal_(parameter)
    return model.double().eval()


SOURCE = torch.tensor([[5, 3, 9, 4, 7], [6, 8, 0, 0, 0], [3, 12, 4, 0, 0]])
TARGET = torch.tensor([[2, 5, 9], [2, 11, 0], [2, 7, 4]])
LENGTHS = ((5, 3), (2, 2), (3, 3))  # the padding is in the middle of the batch


def whole_batch(model: Transformer, settings: VoitaSettings, **options: Any) -> VoitaRelevance:
    real = [torch.arange(ids.shape[1]) < torch.tensor([pair[i] for pair in LENGTHS])[:, None]
            for i, ids in enumerate((SOURCE, TARGET))]  # fmt: skip
    source = SOURCE if model.encoder is not None else None
    mask = real[0] if source is not None else None
    return relevance_of_pass(
        model,
        lambda: model(source, TARGET, source_mask=mask, target_mask=real[1]),
        lambda logits: top(logits, real[1]),
        settings=settings,
        **options,
    )


def top(logits: Tensor, real: Tensor | None = None) -> OutputUnits:
    """1.0 at the likeliest unit of every real position."""
    values = torch.ones(logits.shape[:2], dtype=logits.dtype) if real is None else real.to(logits.dtype)
    tokens = torch.arange(logits.shape[1])[:, None].expand(-1, len(logits))
    return OutputUnits(tokens, logits.argmax(dim=-1).T, values.T)


def agree_with_oracle(model: Transformer, result: VoitaRelevance, ops: Any, tolerance: float) -> None:
    with torch.no_grad():
        for b, (n, m) in enumerate(LENGTHS):
            walk = slow.Walk(model, SOURCE[b, :n] if model.encoder is not None else None, TARGET[b, :m])
            for p in {m - 1, m - 1 - int(b == 1)}:  # the last position, and the first where there are two
                expected = walk.explain(ops, p, int(walk.logits[p].argmax()))
                for (site, layer), heads in result.heads.items():
                    neurons = expected[site.value, layer]  # [h t c]
                    assert_close(heads.raw[p, b], neurons.sum(dim=(-1, -2)), tolerance)
                    assert_close(heads.absolute[p, b], neurons.abs().sum(dim=(-1, -2)), tolerance)
                    assert_close(heads.by_query[p, b, :, : neurons.shape[1]], neurons.sum(dim=-1), tolerance)
                    assert not heads.by_query[p, b, :, neurons.shape[1] :].any()
                assert_close(result.inputs[-1][p, b, :m], expected["target"], tolerance)
                if model.encoder is not None and result.memory is not None:
                    assert_close(result.inputs[0][p, b, :n], expected["source"], tolerance)
                    assert_close(result.memory[p, b, :n], expected["memory"], tolerance)
            assert not result.heads[Site.DECODER_SELF, 0].raw[m:, b].any()


def assert_close(values: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1e-30))


@pytest.mark.parametrize(("norm", "signed", "constant"), [("pre", True, False), ("post", False, True)])
def test_core_rule_is_its_matrix_form(norm: str, signed: bool, constant: bool) -> None:
    model = native(norm, seed=1)
    settings = VoitaSettings(mode="eps" if signed else "alpha-beta", attention_constant=constant)
    result = whole_batch(model, settings)
    agree_with_oracle(model, result, slow.Program(signed=signed, constant=constant), 1e-7 if signed else 1e-10)
    assert result.is_explained.tolist() == [[True, True, True], [True, True, True], [True, False, True]]


def test_mixed_heads_are_read_after_mixing() -> None:
    model = native("pre", seed=4, self_mixing="alpha.v1")
    result = whole_batch(model, VoitaSettings(mode="eps"))
    agree_with_oracle(model, result, slow.Program(signed=True, constant=False), 1e-7)


def test_factors_of_experts_are_constants_and_hand_relevance_on() -> None:
    model = native("pre", seed=4, self_mixing="experts.v1", cross_mixing="experts.v1")
    gates = [module for module in experts_of(model) if module.gate is not None]
    assert len(gates) == 6, "in every module"
    result = whole_batch(model, VoitaSettings())
    agree_with_oracle(model, result, slow.Program(signed=False, constant=False), 1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_papers_rule_is_its_matrix_form(norm: str) -> None:
    model = native(norm, seed=5)
    agree_with_oracle(model, whole_batch(model, VoitaSettings(version="paper")), slow.Paper(), 1e-6)


def test_gates_are_as_if_folded_into_the_output_projection() -> None:
    model = native("post", seed=6)
    gates = {(Site.DECODER_SELF, 1): torch.tensor([0.5, 1.0, 0.0]), (Site.CROSS, 0): torch.tensor([1.5, 0.0, 0.25])}
    with gated(model, gates):
        result = whole_batch(model, VoitaSettings())
    assert model.encoder is not None
    with torch.no_grad():
        for weight, values in (
            (model.get_parameter("decoder.layers.1.self_attention.output.weight"), gates[Site.DECODER_SELF, 1]),
            (model.get_parameter("decoder.layers.0.cross_attention.output.weight"), gates[Site.CROSS, 0]),
        ):
            weight.mul_(values.repeat_interleave(3))
    expected = whole_batch(model, VoitaSettings())
    for site_layer, heads in expected.heads.items():
        assert_close(result.heads[site_layer].raw, heads.raw, 1e-12)


@pytest.mark.parametrize("mode", ["alpha-beta", "eps"])
def test_positions_together_and_in_small_blocks_are_positions_one_by_one(mode: Any) -> None:
    model = native("pre", seed=7)
    settings = VoitaSettings(mode=mode)
    together = whole_batch(model, settings)
    blocks = whole_batch(model, settings, block_bytes=1)
    for site_layer, heads in together.heads.items():
        assert_close(blocks.heads[site_layer].raw, heads.raw, 1e-8)
        assert heads.value_share is not None and heads.qk_share is not None
        if mode == "alpha-beta":  # both ways together are what went in, but for epsilon
            assert_close(heads.value_share + heads.qk_share, heads.raw, 1e-3)
            assert (heads.value_share > 0)[heads.raw > 0].all()
    for p in range(3):
        target = partial(one_unit, p=p)
        alone = relevance_of_pass(model, lambda: model(SOURCE[:1], TARGET[:1]), target, settings=settings)
        for site_layer, heads in alone.heads.items():
            assert_close(heads.raw[0, 0], together.heads[site_layer].raw[p, 0], 1e-8)


def one_unit(logits: Tensor, p: int) -> OutputUnits:
    units = top(logits)
    return OutputUnits(units.tokens[p : p + 1], units.classes[p : p + 1], units.values[p : p + 1])


# Operations that the native Transformer lacks: grouped keys, soft caps, sinks, RMS norms, products


@pytest.mark.parametrize("signed", [False, True])
def test_attention_with_groups_caps_and_sinks_is_its_matrix_form(signed: bool) -> None:
    torch.manual_seed(9)
    query, key, value = (
        torch.randn(2, 6, 3, 5).double(),
        torch.randn(2, 2, 7, 5).double(),
        torch.randn(2, 2, 7, 3).double(),
    )
    sinks, visible = torch.randn(6).double(), torch.rand(2, 1, 3, 7) > 0.3
    calls: list[AttentionCall] = []
    with tap_contexts(lambda call, _: calls.append(call)):
        attend(torch.nn.Identity().eval(), query, key, value, ScoreOptions(visible, 0.7, 2.0, sinks=sinks))
    settings = VoitaSettings(mode="eps" if signed else "alpha-beta")
    rules = VoitaRules(settings, sentences=2, dtype=DOUBLE, block=1)
    relevance = torch.rand(4, 2, 6, 3, 3).double()
    parts, _, _ = rules.attention(relevance, calls[0])
    ops = slow.Program(signed=signed, constant=False)
    for p in range(4):
        for b in range(2):
            expected = _head_parts(ops, relevance[p, b], query[b], key[b], value[b], sinks, visible[b, 0])
            for part, oracle_part in zip(parts, expected, strict=True):
                assert part is not None
                assert_close(part[p, b], oracle_part, 1e-9)


def _head_parts(ops: Any, r: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor) -> list[Tensor]:
    heads = []
    for h in range(6):

        def f(a: Tensor, b: Tensor, c: Tensor, h: int = h) -> Tensor:
            scores = (torch.tanh(a @ b.mT * 0.7 / 2.0) * 2.0).masked_fill(~visible, -1e300)
            column = sinks[h].expand(len(scores), 1)
            return torch.softmax(torch.cat([scores, column], dim=1), dim=1)[:, :-1] @ c

        heads.append(ops.core(f, r[h], [q[h], k[h // 3], v[h // 3]]))
    parts = ops.rescale(r, [torch.stack(part) for part in zip(*heads, strict=True)])
    groups = [
        [ops.gather(*(part[3 * g + i] for i in range(3))) for g in range(2)] if not ops.signed else part
        for part in parts[1:]
    ]
    if ops.signed:  # what the heads of a group give is scaled over all groups of the sentence
        groups = [list(ops.gather(*(part.unflatten(0, (2, 3))[:, i] for i in range(3)))) for part in parts[1:]]
    return [parts[0], *(torch.stack(list(part)) for part in groups)]


@pytest.mark.parametrize("signed", [False, True])
def test_rms_norms_and_products_are_their_matrix_forms(signed: bool) -> None:
    torch.manual_seed(10)
    x, y = torch.randn(2, 1, 3, 7).double().unbind()
    scale = torch.randn(7).double()
    relevance = torch.rand(5, 1, 3, 7).double()
    settings = VoitaSettings(mode="eps" if signed else "alpha-beta")
    rules = VoitaRules(settings, sentences=1, dtype=DOUBLE, block=1)
    ops = slow.Program(signed=signed, constant=False)
    norm_relevance = rules.norm(relevance, x, NormParameters(scale, None, 0.1, centred=False))
    left, right = rules.product(relevance, x, y)
    for p in range(5):
        expected = ops.rows(lambda row: row * (row.square().mean() + 0.1).rsqrt() * scale, relevance[p, 0], x[0])
        assert_close(norm_relevance[p, 0], expected, 1e-9)
        pairs = [ops.core(lambda a, b: a * b, *pair) for pair in
                 ((r, [a, b]) for r, a, b in zip(relevance[p, 0], x[0], y[0], strict=True))]  # fmt: skip
        for part, oracle_part in zip((left, right), zip(*pairs, strict=True), strict=True):
            assert_close(part[p, 0], torch.stack(oracle_part), 1e-9)


# Hugging Face classes


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma", "t5", "mt5", "marian", "gpt_neox"])
def test_a_batch_of_hugging_face_sentences_is_each_alone(name: str) -> None:
    architecture: Any = CATALOGUE[name]
    model, inputs = sharpen(architecture.model()).double(), inputs_of(architecture, lengths=(4, 6), targets=(5, 3))

    def explain(inputs: dict[str, Tensor]) -> VoitaRelevance:
        return relevance_of_pass(model, lambda: model(**inputs, use_cache=False).logits, top, settings=settings)

    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    for mode in ("alpha-beta", "eps"):
        settings = VoitaSettings(mode=mode)
        together = explain(inputs)
        for b in range(2):
            alone = explain(row_of(inputs, b))
            assert alone.heads.keys() == together.heads.keys()
            for site_layer, heads in alone.heads.items():
                assert_close(together.heads[site_layer].raw[: len(heads.raw), b], heads.raw[:, 0], 1e-7)
            if mode == "alpha-beta":
                parts = [part.sum(dim=(-1, -2)) for part in alone.inputs]
                total = torch.stack(parts).sum(dim=0)
                assert ((total > 0.995) & (total < 1 + 1e-9)).all()
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()] == hooks


def test_classes_and_sentence_vectors_are_explained_once() -> None:
    ids, real = torch.randint(5, 53, (3, 7)), torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    classifier, encoder = classifiers.model("bert"), classifiers.model("bert-encoder")

    def class_scores(rows: slice, n: int) -> Tensor:
        logits: Tensor = classifier(input_ids=ids[rows, :n], attention_mask=real[rows, :n].long()).logits
        return logits

    def states(rows: slice, n: int) -> Tensor:
        output: Tensor = encoder(input_ids=ids[rows, :n], attention_mask=real[rows, :n].long()).last_hidden_state
        return output

    def likeliest(logits: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), 5)[None].double()

    with torch.inference_mode():  # as analyses run
        classes = relevance_of_pass(classifier, lambda: class_scores(slice(None), 7), likeliest)
        vectors = relevance_of_pass(
            encoder, lambda: states(slice(None), 7), lambda vector_states: projection_shares(vector_states, real)
        )
        for b, n in enumerate((7, 4, 6)):
            rows = slice(b, b + 1)
            class_alone = relevance_of_pass(classifier, lambda: class_scores(rows, n), likeliest)  # noqa: B023
            vector_alone = relevance_of_pass(
                encoder,
                lambda: states(rows, n),  # noqa: B023
                lambda vector_states: projection_shares(vector_states, real[rows, :n]),  # noqa: B023
            )
            for site_layer in class_alone.heads:
                assert_close(classes.heads[site_layer].raw[:, b], class_alone.heads[site_layer].raw[:, 0], 1e-10)
                assert_close(vectors.heads[site_layer].raw[:, b], vector_alone.heads[site_layer].raw[:, 0], 1e-10)
    output = states(slice(None), 7).detach()
    mean = (output * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)
    assert_close(projection_shares(output, real).sum(dim=(0, 2, 3)), mean.norm(dim=-1), 1e-12)


def test_reference_is_another_target_of_the_same_rule(story: Checkpoint, oracles: Path) -> None:
    text = texts(oracles)[0]
    plain = sentence(story, text)
    likeliest = voita_relevance(story, plain)
    labels = story.logits(plain)[:1].argmax(dim=-1)
    labels[0, 2] = IGNORED
    result = voita_relevance(story, replace(plain, labels=labels), target="reference")
    assert result.is_explained[:, 0].tolist() == [p != 2 for p in range(labels.shape[1])]
    for site_layer, heads in likeliest.heads.items():
        assert not result.heads[site_layer].raw[2].any()
        assert_close(result.heads[site_layer].raw[3], heads.raw[3], 1e-12)
