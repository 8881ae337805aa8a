"""Mixtures of experts, massive activations, gates of heads and matrices that mix heads, against loops."""

import json
import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.data.corpus import Corpus, Sentence, open_corpus
from headscope.engine.plan import analyze
from headscope.heads import Site
from headscope.model.mixing.experts import Experts, expert_mode, experts_of
from tests.makers.studies import study_of
from tests.oracles import gated_heads, massive, mhr, native, speakers
from tests.oracles.experts import perturb_gates
from tests.oracles.shuffled import reverse_folds
from tests.oracles.speakers import make_example
from tests.oracles.tiny import END, MASK, PAD, PIECES, START

WORDS = [f"w{number}" for number in range(4, 19)]


def corpus(count: int = 23) -> Corpus:
    generator = torch.Generator().manual_seed(4)
    texts = [
        [" ".join(WORDS[n] for n in torch.randint(len(WORDS), (int(size),), generator=generator)) for size in sizes]
        for sizes in torch.randint(1, 8, (count, 2), generator=generator)
    ]
    source, target = zip(*texts, strict=True)
    return open_corpus(source, target=target)


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    checkpoint = mhr.small(mixing_options={})
    torch.manual_seed(0)
    checkpoint.model = perturb_gates(native.model(self_mixing="experts.v1")).eval()
    return checkpoint


def gates_of(checkpoint: Any, module: Experts, sentence: Sentence) -> tuple[torch.Tensor, list[int], list[bool]]:
    """Gates [p e] of a module on one sentence, with the ids of its side and which of them are special."""
    gates: list[torch.Tensor] = []
    hook = module.gate.register_forward_hook(lambda _, __, output: gates.append(output))  # type: ignore[union-attr]
    source = checkpoint.encode([sentence.source], side="source", limit=99)[0]
    target = checkpoint.encode([sentence.target], side="target", limit=99)[0]
    with torch.no_grad():
        checkpoint.model(torch.tensor([source.ids]), torch.tensor([target.ids]))
    hook.remove()
    side = source if gates[0].shape[1] == 1 else target
    return gates[0][0].exp(), side.ids, side.special


@pytest.mark.slow
def test_gates_are_measured_where_they_stand(checkpoint: Any) -> None:
    study = study_of(checkpoint, corpus(), "experts", tokens=60, seed=3)
    gates, experts, tokens = (study.tables[name] for name in ("experts_gates", "experts", "experts_tokens"))
    mixtures = [
        (site, layer, module.mixing)
        for site, layer, _, module in checkpoint.model.attention_modules()
        if module.mixing.experts
    ]
    assert len(gates) == len(mixtures) == 6 and len(tokens) > 9
    for site, layer, mixture in mixtures[:4]:
        entropies, best, mean = [], np.zeros(mixture.experts), np.zeros(mixture.experts)
        counts: dict[tuple[int, int], int] = {}
        for sentence in corpus():
            rows, ids, special = gates_of(checkpoint, mixture, sentence)
            for position, number in enumerate(ids):
                if special[position]:
                    continue
                gate = rows[0 if len(rows) == 1 else position]
                key = (int(gate.argmax()), number)
                counts[key] = counts.get(key, 0) + 1
                if len(rows) == 1 and position != special.index(False):
                    continue  # a sentence counts once
                entropies.append(-float((gate * gate.log()).sum()))
                best[key[0]] += 1
                mean += gate.numpy()
        row = gates[(gates.site == site.value) & (gates.layer == layer)].iloc[0]
        assert row.entropy == pytest.approx(np.mean(entropies), rel=1e-6)
        assert row.even == pytest.approx(math.log(mixture.experts))
        expert_rows = experts[(experts.site == site.value) & (experts.layer == layer)]
        np.testing.assert_allclose(expert_rows.share, best / len(entropies), atol=1e-6)
        np.testing.assert_allclose(expert_rows.responsibility, mean / len(entropies), rtol=1e-5)
        assert expert_rows.lacks.tolist() == [str(n) for n in range(mixture.heads)]
        heads = study.heads[(study.heads.site == site.value) & (study.heads.layer == layer)]
        h = mixture.heads
        np.testing.assert_allclose(heads.expert_factor, h / (h - 1) * (1 - mean / len(entropies)), rtol=1e-5)
        total = sum(counts.values())
        vocabulary = checkpoint.source if site.value == "encoder-self" else checkpoint.target
        table = tokens[(tokens.site == site.value) & (tokens.layer == layer)]
        for entry in table.itertuples():
            number = vocabulary.id_of(entry.token)
            joint = counts[entry.expert, number]
            expert = sum(value for (e, _), value in counts.items() if e == entry.expert)
            token = sum(value for (_, n), value in counts.items() if n == number)
            assert entry.count == joint and token >= 5
            assert entry.pmi == pytest.approx(math.log(joint * total / (expert * token)))


@pytest.mark.slow
def test_one_expert_costs_something(checkpoint: Any) -> None:
    row: Any
    random: Any
    row, random = study_of(checkpoint, corpus(), "one_expert", tokens=60, seed=3).tables["one_expert"].itertuples()
    nll = {}
    for mode in ("soft", "argmax"):
        total = count = 0.0
        with expert_mode(experts_of(checkpoint.model), mode), torch.no_grad():
            for sentence in corpus():
                source = checkpoint.encode([sentence.source], side="source", limit=99)[0]
                target = checkpoint.encode([sentence.target], side="target", limit=99)[0]
                labels = torch.tensor(checkpoint.labels([sentence.target], limit=99)[0])
                log_p = checkpoint.model(torch.tensor([source.ids]), torch.tensor([target.ids])).log_softmax(-1)[0]
                total -= float(log_p[torch.arange(len(labels)), labels].sum())
                count += len(labels)
        nll[mode] = total / count
    assert row.expert == "argmax" and random.expert == "random"
    assert row.nll == pytest.approx(nll["argmax"]) and row.nll_mixture == pytest.approx(nll["soft"])
    assert row.drop == pytest.approx(nll["argmax"] - nll["soft"]) and row.drop_low <= row.drop <= row.drop_high
    assert random.nll != row.nll


def test_experts_without_gates_are_measured_one_at_a_time() -> None:
    checkpoint = mhr.small()
    checkpoint.model = native.model(self_mixing="experts.v1", mixing_options={"uniform": True}).eval()
    (row,) = study_of(checkpoint, corpus(), "one_expert", tokens=60, seed=3).tables["one_expert"].to_dict("records")
    assert row["expert"] == "random" and row["nll"] == pytest.approx(row["nll_mixture"] + row["drop"])


# Massive activations and the gates of heads, against slow re-derivations on tiny models in float64.


BOUNDS: dict[str, Any] = {"massive_magnitude": 1.0, "massive_ratio": 3.5}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_massive(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = speakers.checkpoint(kind)
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", reverse_folds)
    study = study_of(checkpoint, speakers.corpus(kind), "massive", tokens=101, **BOUNDS)
    by_head: dict[Any, list[tuple[float, float]]] = {}
    tokens = Counter[tuple[int, int, bool]]()
    for sentence in speakers.corpus(kind):
        example = make_example(kind, sentence, hide=False)
        bounds = {"magnitude": BOUNDS["massive_magnitude"], "ratio": BOUNDS["massive_ratio"]}
        rows, massive_positions = massive.terms(checkpoint, example, special=(PAD, START, END, MASK), **bounds)
        for key, pairs in rows.items():
            by_head.setdefault(key, []).extend(pairs)
        for site_layer, positions in massive_positions.items():
            tokens.update((site_layer[1], example.source[position], position == 0) for position in positions)
    heads: list[Any] = list(study.heads.itertuples())
    assert by_head and len(heads) == sum(checkpoint.layout.values())
    for row in heads:
        values = np.array(by_head.get(((Site(row.site), row.layer), row.head), [(np.nan, np.nan)]))
        atol = 1e-6 if kind == "llama" else 1e-9  # whose norms compute in float32
        np.testing.assert_allclose((row.massive, row.massive_chance), values.mean(axis=0), atol=atol)
    table: list[Any] = list(study.tables["massive"].itertuples())
    table_counts = {(row.layer, row.id, row.first): row.count for row in table}
    assert table_counts and all(tokens[key] == count for key, count in table_counts.items())
    for layer in {row.layer for row in table}:
        counts = sorted((count for (token_layer, _, _), count in tokens.items() if token_layer == layer), reverse=True)
        assert [row.count for row in table if row.layer == layer] == counts[:20]
    assert max(row.magnitude for row in table) > 1 and all(
        row.token == PIECES[row.id] and 0 < row.share <= 1 for row in table
    )


@pytest.mark.parametrize("kind", ["qwen", "afmoe"])
def test_gates_of_heads(kind: str) -> None:
    checkpoint = gated_heads.checkpoint(kind)
    study, model = study_of(checkpoint, speakers.corpus("llama"), "head_gates", tokens=101), checkpoint.model
    by_head: dict[tuple[int, int], list[torch.Tensor]] = {}
    for sentence in speakers.corpus("llama"):
        ids = make_example("llama", sentence).source
        reads: dict[int, torch.Tensor] = {}
        attention: dict[int, Any] = {s.layer: model.get_submodule(s.name) for s in checkpoint.attention_sites.order}

        def note(_: Any, arguments: Any, keywords: Any, *, layer: int, store: dict[int, torch.Tensor]) -> None:
            store[layer] = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]

        hooks = [
            part.register_forward_pre_hook(partial(note, layer=layer, store=reads), with_kwargs=True)
            for layer, part in attention.items()
        ]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        for layer, part in attention.items():
            for head in range(4):
                rows = slice(12 * head + 6, 12 * head + 12) if kind == "qwen" else slice(6 * head, 6 * head + 6)
                weight = (part.q_proj if kind == "qwen" else part.gate_proj).weight.detach()[rows]
                values = 1 / (1 + torch.exp(-(reads[layer][0] @ weight.T)))
                by_head.setdefault((layer, head), []).append(values[1:])  # without the special start
    rows_found: list[Any] = list(study.heads.itertuples())
    assert len(rows_found) == 8
    for row in rows_found:
        values = torch.cat(by_head[row.layer, row.head])
        assert row.head_gate == pytest.approx(values.mean().item(), abs=1e-6)
        assert row.head_gate_closed == pytest.approx((values < 0.1).double().mean().item(), abs=1e-9)
        assert row.head_gate_spread == pytest.approx(values.mean(dim=1).std(correction=0).item(), abs=1e-6)


CORPUS = open_corpus(["w5 w6"], target=["w7"])


def test_numbers_of_every_matrix() -> None:
    checkpoint = mhr.small()
    study = study_of(checkpoint, CORPUS, "alphas")
    entries, modules, spectrum = (study.tables[name] for name in ("alphas", "alphas_modules", "alphas_spectrum"))
    count = 0
    for site, layer, _, attention in checkpoint.model.attention_modules():
        h = attention.heads
        module_rows = modules[(modules.site == site.value) & (modules.layer == layer)]
        assert len(module_rows) == (h > 0)
        if not h:
            continue
        count += 1
        mixing: Any = attention.mixing
        a = mixing.alpha.detach().numpy()
        alphas = entries[(entries.site == site.value) & (entries.layer == layer)]
        entry: Any
        for entry in alphas.itertuples():
            assert entry.alpha == a[entry.head, entry.source]
        assert len(alphas) == h * h
        row = module_rows.iloc[0]
        values = np.sqrt(np.clip(np.sort(np.linalg.eigvalsh(a.T @ a))[::-1], 0, None))
        assert row.heads == h and row.nuclear_norm == pytest.approx(values.sum())
        off = sum(abs(a[i, j]) for i in range(h) for j in range(h) if i != j)
        assert row.off_diagonal == pytest.approx(off / np.abs(a).sum())
        skew = [((a[i, j] - a[j, i]) / 2) ** 2 for i in range(h) for j in range(h)]
        assert row.skew_share == pytest.approx(sum(skew) / (a**2).sum())
        assert row.from_identity == pytest.approx(np.sqrt(((a - np.eye(h)) ** 2).sum()))
        singular = spectrum[(spectrum.site == site.value) & (spectrum.layer == layer)].singular_value
        np.testing.assert_allclose(singular, values, atol=1e-10)
        heads = study.heads[(study.heads.site == site.value) & (study.heads.layer == layer)]
        np.testing.assert_array_equal(heads["alpha_own"], a.diagonal())
        share = [1 - abs(a[i, i]) / np.abs(a[i]).sum() for i in range(h)]
        np.testing.assert_allclose(heads["alpha_others"], share)
    assert count == 7 and len(modules) == 7


def test_nuclear_norms_are_those_of_the_original(shared: Path) -> None:
    reference = json.loads((shared / "oracles/mhr/alpha/oracle/teacher_forced_reference.json").read_text())
    checkpoint, _ = mhr.load_reference(shared / "oracles")
    modules = study_of(checkpoint, CORPUS, "alphas").tables["alphas_modules"]
    norms = reference[next(key for key in reference if key.startswith("nuclear"))]
    names = {
        "encoder-self": "encoder.{}.self_attn",
        "decoder-self": "decoder.{}.self_attn",
        "cross": "decoder.{}.enc_attn",
    }
    row: Any
    for row in modules.itertuples():
        assert row.nuclear_norm == pytest.approx(norms[names[row.site].format(row.layer)], abs=1e-3)
    assert len(modules) == 9
