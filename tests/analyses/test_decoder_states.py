"""Massive activations and the gates of heads, against slow re-derivations on tiny models in float64."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headscope.data.batching import BatchingOptions
from headscope.engine.plan import analyze, choose_analyses
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.taps import capture
from headscope.results.study import Study
from tests.oracles import gated_heads, massive, speakers
from tests.oracles.run_options import run_options
from tests.oracles.shuffled import other_way_round
from tests.oracles.speakers import SPEAKERS, asked
from tests.oracles.tiny import END, MASK, PAD, PIECES, START

BOUNDS: dict[str, Any] = {"massive_magnitude": 1.0, "massive_ratio": 3.5}


def run(its: Checkpoint, kind: str, name: str, *, tokens: int = 101, **options: Any) -> Study:
    return analyze(
        its,
        speakers.corpus(kind),
        analyses=choose_analyses(only=[name]),
        options=run_options(**options),
        batching=BatchingOptions(tokens=tokens),
        replicates=11,
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_massive(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    its = speakers.checkpoint(kind)
    monkeypatch.setattr(sys.modules[analyze.__module__], "batches", other_way_round)
    study = run(its, kind, "massive", **BOUNDS)
    every: dict[Any, list[tuple[float, float]]] = {}
    tokens = Counter[tuple[int, int, bool]]()
    for sentence in speakers.corpus(kind):
        one = asked(kind, sentence, hide=False)
        bounds = {"magnitude": BOUNDS["massive_magnitude"], "ratio": BOUNDS["massive_ratio"]}
        rows, found = massive.terms(its, one, special=(PAD, START, END, MASK), **bounds)
        for key, pairs in rows.items():
            every.setdefault(key, []).extend(pairs)
        for place, positions in found.items():
            tokens.update((place[1], one.source[position], position == 0) for position in positions)
    heads: list[Any] = list(study.heads.itertuples())
    assert every and len(heads) == sum(its.layout.values())
    for row in heads:
        values = np.array(every.get(((Site(row.site), row.layer), row.head), [(np.nan, np.nan)]))
        within = 1e-6 if kind == "llama" else 1e-9  # whose norms compute in float32
        np.testing.assert_allclose((row.massive, row.massive_chance), values.mean(axis=0), atol=within)
    table: list[Any] = list(study.tables["massive"].itertuples())
    listed = {(row.layer, row.id, row.first): row.count for row in table}
    assert listed and all(tokens[key] == count for key, count in listed.items())
    for layer in {row.layer for row in table}:
        counts = sorted((count for (where, _, _), count in tokens.items() if where == layer), reverse=True)
        assert [row.count for row in table if row.layer == layer] == counts[:20]
    assert max(row.magnitude for row in table) > 1 and all(
        row.token == PIECES[row.id] and 0 < row.share <= 1 for row in table
    )


@pytest.mark.parametrize("kind", ["qwen", "afmoe"])
def test_gates_of_heads(kind: str) -> None:
    its = gated_heads.checkpoint(kind)
    study, model = run(its, "llama", "head_gates"), its.model
    every: dict[tuple[int, int], list[torch.Tensor]] = {}
    for sentence in speakers.corpus("llama"):
        ids = asked("llama", sentence).source
        reads: dict[int, torch.Tensor] = {}
        attention: dict[int, Any] = {part.layer: model.get_submodule(part.name) for part in its.attention_sites.order}

        def note(_: Any, arguments: Any, keywords: Any, *, layer: int, kept: dict[int, torch.Tensor]) -> None:
            kept[layer] = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]

        hooks = [
            part.register_forward_pre_hook(partial(note, layer=layer, kept=reads), with_kwargs=True)
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
                every.setdefault((layer, head), []).append(values[1:])  # without the special start
    rows_found: list[Any] = list(study.heads.itertuples())
    assert len(rows_found) == 8
    for row in rows_found:
        values = torch.cat(every[row.layer, row.head])
        assert row.head_gate == pytest.approx(values.mean().item(), abs=1e-6)
        assert row.head_gate_closed == pytest.approx((values < 0.1).double().mean().item(), abs=1e-9)
        assert row.head_gate_spread == pytest.approx(values.mean(dim=1).std(correction=0).item(), abs=1e-6)


def test_gates_of_zero_rows_are_half_open() -> None:
    """Spec of the model: σ(0) = ½, so the layer's heads write half of their contexts."""
    model: Any = gated_heads.checkpoint("qwen").model
    its = speakers.wrapped(lambda: type(model)(model.config), SPEAKERS["llama"], seed=5)
    attention: Any = its.model.get_submodule(its.attention_sites.order[-1].name)
    with torch.no_grad():
        attention.q_proj.weight.view(4, 2, 6, 20)[:, 1] = 0
    study = run(its, "llama", "head_gates")
    last = study.heads[study.heads.layer == 2]
    assert (last.head_gate == 0.5).all() and (last.head_gate_spread == 0).all()
    seen: list[torch.Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad(), capture(its.model, ("context",)) as captured:
        its.model(input_ids=torch.tensor([[2, 7, 9]]))
    hook.remove()
    context = captured[Site.DECODER_SELF, 2]["context"].transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen[0], context / 2)
