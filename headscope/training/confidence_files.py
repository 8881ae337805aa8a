"""Confidence of every head on the training batches of each epoch, in the MHR fork's files: DIR/confs/epoch-N.pkl.

A file is {"encoder": [{"self_attn": X}, …], "decoder": [{"self_attn": X, "enc_attn": X}, …]}, X float64 [n h+1]: a
row for each of the n micro-batches, the scores of the h heads (means over sentences) and the
number of sentences. As in the fork they are taken from the forward passes of training itself, with its
dropout, from weights before their dropout and before any mixing of heads.

Deviations: padding is left out, so that a row is the mean of what the fork gives for each sentence by itself (it
counts padded queries, and divides by the padded length); there is a row for every micro-batch of every process (the
fork keeps the last one of an update, of the first process); where an update passes its batches several times (MAE),
the last pass counts; the fork calls the folder `confs/NAME-method=base`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope.engine.heads.head_batch import ObservedBatch
from headscope.files.tables import write_pickle
from headscope.heads import Site
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.discovery import AttentionSite
from headscope.results.study_files import nest
from headscope.training.checkpoints import CONFIDENCE
from headscope.training.config import TrainingPosition
from headscope.training.swap_scores import score_of
from headscope.training.variant import Gradients, Variant, VariantChain

if TYPE_CHECKING:
    from headscope.data.encoded import Batch
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun


class ConfidenceFiles(Variant):
    """Watches training and writes a file after every whole epoch; what it has of an unfinished one is in its state.

    It uses the hooks of a variant and changes nothing of the training.
    """

    name = "confidence-files"
    summary = "Confidence of heads on the training batches of every epoch."

    def __init__(self, method: str) -> None:
        super().__init__(None)
        self.method, self.score = method, score_of(method)
        self.sites: dict[int, AttentionSite] = {}
        self.heads: dict[tuple[Site, int], int] = {}
        self.calls: list[AttentionCall] = []
        self.passes: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.noted = 0

    def prepare(self, run: TrainingRun) -> None:
        calls = run.model.declared_attention().calls
        self.sites = {key: attention_site for key, (attention_site,) in calls.items() if attention_site.heads}
        self.heads = {attention_site.place: attention_site.heads for attention_site in self.sites.values()}

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        self.calls, self.passes = [], []
        with tap_contexts(self._record_call, before_mixing=True):
            sums = gradients(batches)
        rows = [
            row.cpu() for row, batch in zip(self.passes[-len(batches) :], batches, strict=True) if len(batch.indices)
        ]
        self.rows += [row for process_rows in run.processes.all(rows) for row in process_rows]
        return sums

    def _record_call(self, call: AttentionCall, _: Tensor) -> None:
        if id(call.module) in self.sites:
            self.calls.append(call)

    @torch.no_grad()
    def extra_loss(self, run: TrainingRun, batch: Batch) -> None:
        """No loss; the calls of the forward pass that is over become a row."""
        calls, self.calls, view = self.calls, [], ObservedBatch(batch)
        scores: dict[tuple[Site, int], Tensor] = {}
        for call in calls:
            attention_site = self.sites[id(call.module)]
            ratio = self.score(view.heads(attention_site, call))
            total, count = (part.sum(dim=0) for part in (ratio.total, ratio.count))
            scores[attention_site.place] = torch.cat([total / count.clamp_min(1), count])
        self.passes.append(torch.cat([scores[site_layer] for site_layer in self.heads]))

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        rows = self._by_site_layer(self.rows)
        self.rows, self.noted = [], 0
        if run.processes.main:
            arrays = {site_layer: values.numpy().astype("float64") for site_layer, values in rows.items()}
            write_pickle(run.config.out / CONFIDENCE / f"epoch-{position.epoch}.pkl", nest(arrays))

    def history(self, run: TrainingRun) -> dict[str, float]:
        """Mean over the heads of a site and the sentences since the line before, of this epoch."""
        means = dict.fromkeys(sorted({site for site, _ in self.heads}), float("nan"))
        if recent := self.rows[self.noted :]:
            rows = self._by_site_layer(recent)
            for site in means:
                parts = [
                    (rows[site_layer][:, :-1], rows[site_layer][:, -1:])
                    for site_layer in self.heads
                    if site_layer[0] is site
                ]
                count = sum(float(sizes.sum()) * scores.shape[1] for scores, sizes in parts)
                means[site] = sum(float((scores * sizes).sum()) for scores, sizes in parts) / max(count, 1)
        self.noted = len(self.rows)
        return {f"confidence_{self.method}.{site}": value for site, value in means.items()}

    def state_dict(self) -> Mapping[str, Any]:
        return {"rows": self.rows, "noted": self.noted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows, self.noted = list(state["rows"]), state["noted"]

    def _by_site_layer(self, rows: Sequence[Tensor]) -> dict[tuple[Site, int], Tensor]:
        """Rows [n h+1] of every module, those that count no sentence left out."""
        sizes = [count + 1 for count in self.heads.values()]
        table = torch.stack([row.double() for row in rows]) if rows else torch.zeros(0, sum(sizes))
        parts = zip(self.heads, torch.split_with_sizes(table, sizes, dim=1), strict=True)
        return {site_layer: part[part[:, -1] > 0] for site_layer, part in parts}


def with_confidence(variant: Variant, method: str) -> Variant:
    """The variant, watched by `ConfidenceFiles`; it keeps its name."""
    chain = VariantChain([ConfidenceFiles(method), variant], options=variant.options)
    chain.name = variant.name  # type: ignore[misc]
    return chain
