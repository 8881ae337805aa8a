"""Head statistics in the files of the MHR fork, for scripts that read those: nesting, types and shapes as there.

Every file is {"encoder": [{"self_attn": X}, …], "decoder": [{"self_attn": X, "enc_attn": X}, …]}, a list entry a
layer. X is for
- confidence (`confs_eval/NAME-base.pkl`, `…-advanced.pkl`, `…-pairwise.pkl`): float64 [n h+1], a row a batch:
  scores, batch size;
- `cosine_similarities_eval`, `l2_pairwise_distances_eval`: a vector a batch, [b h h] flattened and then b, as
  float64 [n b·h·h+1], or as an array of n vectors where their lengths differ;
- `alphas_eval`: float32 [h h].

`rows` says what a row is. "corpus": one row for all sentences, each measured without padding, decoders
teacher-forced over all positions; scores are means over sentences (`advanced` over those with two keys or more),
and the matrices too (b is 1). "batch": a row for each batch, put together and padded as fairseq-generate does
(`headscope.engine.fork.batches`), padding counted as the fork counts it, decoders teacher-forced. "generate": the same
batches searched, so that decoder rows are what the fork saves: the last decoding step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.engine.fork.batches import BatchSize, fork_batches
from headscope.engine.fork.confidence import advanced, base, pairwise, without_last_cell
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import Site
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite
from headscope.model.mixing.base import head_matrices
from headscope.model.taps import observing
from headscope.results.study_files import nested

Rows = Literal["corpus", "batch", "generate"]
ROWS: tuple[Rows, ...] = get_args(Rows)
SCORES = dict.fromkeys(("base", "advanced", "pairwise"), "confs_eval")
MATRICES = {"cosine": "cosine_similarities_eval", "l2": "l2_pairwise_distances_eval"}
At = tuple[Site, int]


def mhr_pickles(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    rows: Rows = "corpus",
    limit: int,
    tokens: int = 2048,
    size: BatchSize | None = None,
) -> dict[str, Any]:
    """Content of every file by its path (`mhr/confs_eval/checkpoint_best-base.pkl`), in a pass of its own.

    `size` is about the batches that are rows; a pass without rows takes `tokens` at once. ConfigError for an unknown
    `rows`, or where a model that is no `Transformer` is to be batched as fairseq does.
    """
    if rows not in ROWS:
        raise ConfigError(f"--mhr-rows {rows!r} is not known; choose one of {', '.join(ROWS)}")
    if rows != "corpus" and not checkpoint.is_native:
        raise ConfigError(f"--mhr-rows {rows} is for fairseq-like models; take 'corpus' for {checkpoint.path}")
    collected = _FileRows(summed=rows == "corpus")
    last: dict[At, AttentionCall] = {}

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        last[attention_site.site, attention_site.layer] = call

    read = (batch.to(checkpoint.device) for batch in _batches(checkpoint, corpus, rows, limit, tokens, size))
    with torch.inference_mode(), observing(checkpoint.model, see):
        for batch in read:
            last.clear()
            native = cast(TransformerCheckpoint, checkpoint)  # where rows are batches
            if rows == "generate" and native.two_sided and native.target is not None:
                native.searched(batch.source, native.search)
            else:
                checkpoint.forward(batch)
            for at, call in last.items():
                real = [side.real for side in batch.sides(at[0])] if rows == "corpus" else [None, None]
                collected.add(at, fork_numbers(call, *real))
    name = Path(checkpoint.path).name.removesuffix(".pt").removesuffix(".npz")
    files = {f"{SCORES[kind]}/{name}-{kind}": collected.scores(kind) for kind in SCORES}
    files |= {f"{folder}/{name}": collected.matrices(kind) for kind, folder in MATRICES.items()}
    if alphas := fork_alphas(checkpoint):
        files[f"alphas_eval/{name}"] = alphas
    return {f"mhr/{file}.pkl": nested(attention_sites) for file, attention_sites in files.items()}


def fork_numbers(call: AttentionCall, queries: Tensor | None, keys: Tensor | None) -> dict[str, Tensor]:
    """base, advanced and pairwise [b h], cosine and l2 [b h h] of every sentence (spec of the fork, §4).

    Weights are those before mixing (`headscope.engine.fork.confidence`). Contexts before mixing are flattened over
    positions: 1 + cosine, and the distance. `queries` [b t] and `keys` [b s] say which are real, and `advanced`
    leaves sentences with a single key out; None: all of them, as the fork has it, which divides by 0 there.
    """
    weights, context = call.weights.float(), call.context.float()
    b, _, t, s = weights.shape
    alone = keys is not None
    queries = weights.new_ones(b, t, dtype=torch.bool) if queries is None else queries
    keys = weights.new_ones(b, s, dtype=torch.bool) if keys is None else keys
    widths = keys.sum(dim=1)
    weights = without_last_cell(weights, queries, keys)
    spread = advanced(weights, widths)
    flat = (context * queries[:, None, :, None]).flatten(2)  # [b h t·k]
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    return {
        "base": base(weights),
        "advanced": spread[widths > 1] if alone else spread,
        "pairwise": pairwise(weights),
        "cosine": 1 + unit @ unit.transpose(1, 2),
        "l2": torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist"),
    }


class _FileRows:
    """Rows of every file, or where `summed` the sums of what one row will say."""

    def __init__(self, *, summed: bool) -> None:
        self.summed = summed
        self.values: dict[str, dict[At, list[Tensor]]] = {kind: {} for kind in (*SCORES, *MATRICES)}
        self.counts: dict[tuple[str, At], int] = {}

    def add(self, at: At, numbers: Mapping[str, Tensor]) -> None:
        """What one batch gives for one module."""
        for kind, values in numbers.items():
            batches_of, count = self.values[kind].setdefault(at, []), len(values)
            if self.summed:
                values = values.double().sum(dim=0, keepdim=True).cpu()
                values = values if not batches_of else values + batches_of.pop()
            batches_of.append(values.cpu())
            self.counts[kind, at] = self.counts.get((kind, at), 0) + count

    def scores(self, kind: str) -> dict[At, NDArray[Any]]:
        """Scores and batch size, a row a batch."""
        scores = {}
        for at, batches_of in self.values[kind].items():
            if self.summed:
                count = self.counts[kind, at]
                rows = [[*(values[0] / count).tolist(), count] for values in batches_of]
            else:
                rows = [[*values.mean(dim=0).tolist(), len(values)] for values in batches_of]
            scores[at] = np.array(rows, dtype=np.float64)
        return scores

    def matrices(self, kind: str) -> dict[At, NDArray[Any]]:
        """Matrices and batch size, a vector a batch."""
        matrices = {}
        for at, batches_of in self.values[kind].items():
            divisor = self.counts[kind, at] if self.summed else 1
            vectors = [np.append((values / divisor).double().flatten().numpy(), len(values)) for values in batches_of]
            if len({len(vector) for vector in vectors}) == 1:
                matrices[at] = np.stack(vectors)
            else:
                matrices[at] = np.empty(len(vectors), dtype=object)
                matrices[at][:] = vectors
        return matrices


def fork_alphas(checkpoint: Checkpoint) -> dict[At, NDArray[Any]]:
    """The alpha matrix [h h] of every module that mixes heads with one; empty for models that do not."""
    matrices = head_matrices(checkpoint.model)
    return {site_layer: matrix.detach().float().cpu().numpy().copy() for site_layer, matrix in matrices.items()}


def _batches(
    checkpoint: Checkpoint, corpus: Corpus, rows: Rows, limit: int, tokens: int, size: BatchSize | None
) -> Iterator[Batch]:
    if rows != "corpus":
        return fork_batches(cast(TransformerCheckpoint, checkpoint), corpus, limit=limit, size=size)
    return batches(corpus, checkpoint, tokens=tokens, limit=limit)
