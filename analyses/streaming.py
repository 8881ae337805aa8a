"""Streaming heads: gates between full and streaming attention, learnt on passkeys (DuoAttention, Xiao et al. 2024)."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.data.template import Haystack, Passkeys, prompt_ids
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.errors import ConfigError, DataError, NumericalError, flag, raise_first
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.attention import AttentionCall, repeat_groups
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.taps import frozen_parameters, tapped_sites

stream_option = partial(option, panel="Streaming heads")
WORDS = (
    *("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima"),
    *("mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor", "whiskey"),
    *("xray", "yankee", "zulu"),
)
NEEDLE = "Remember this sequence of words, it's the {ordinal} passkey to the vault:"
QUESTION = "Based on the content of the book, what is the {ordinal} passkey to the vault?\nPasskey:"


@dataclass(frozen=True)
class StreamingOptions:
    """Options of `streaming`."""

    streaming_sink: int = stream_option(128, "First keys that streaming attention sees.", metavar="N", minimum=0)
    streaming_recent: int = stream_option(
        256, "Last keys that it sees, a query's own among them.", metavar="N", minimum=1
    )
    streaming_penalty: float = stream_option(0.05, "Weight of the mean gate in the loss.", metavar="NUMBER", minimum=0)
    streaming_steps: int = stream_option(2000, "Texts that gates learn from, one a step.", metavar="N", minimum=1)
    streaming_lr: float = stream_option(0.02, "Learning rate of the gates.", metavar="NUMBER", minimum=0)
    streaming_lengths: tuple[int, ...] = stream_option(
        (1000, 4000), "Shortest and longest text without passkeys and questions, in subwords.", metavar="N,N"
    )
    passkeys: int = stream_option(10, "Passkeys hidden in a text.", metavar="N", minimum=1, maximum=20)
    passkey_length: int = stream_option(32, "Words of a passkey.", metavar="N", minimum=1)
    passkey_words: tuple[str, ...] = stream_option(WORDS, "Words that passkeys are drawn from.", metavar="WORD,…")
    passkey_needle: str = stream_option(NEEDLE, "What stands before a hidden passkey.", metavar="TEXT")
    passkey_question: str = stream_option(QUESTION, "What asks for it.", metavar="TEXT")

    def __post_init__(self) -> None:
        lengths = self.streaming_lengths
        problems = {
            f"{flag.streaming_lengths} takes two numbers, the shortest and the longest: 1000,4000": (
                len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1]
            ),
            f"{flag.passkey_words}: at least one word is needed": not self.passkey_words,
        }
        raise_first(ConfigError, problems)


Gates = Mapping[SiteLayer, Tensor]
"""Gates [g] of every (site, layer), one a key/value head."""


def streaming_keys(queries: int, keys: int, *, sink: int, recent: int, device: torch.device | None = None) -> Tensor:
    """The mask of streaming attention [t s]: the first `sink` keys, the last `recent` with the query itself."""
    t = torch.arange(keys - queries, keys, device=device)[:, None]
    s = torch.arange(keys, device=device)
    return (s <= t) & ((s < sink) | (t - s < recent))


def streaming_weights(weights: Tensor, visible: Tensor, sink_share: Tensor | float = 0.0) -> Tensor:
    """Weights [b h t s] of a softmax over the visible keys [t s] alone, from those over all keys.

    `sink_share` [b h t] is the share that a learnt sink has of the softmax, where rows sum to less than one (gpt-oss).
    """
    visible_weights, tiny = weights * visible, torch.finfo(weights.dtype).tiny
    return visible_weights / (visible_weights.sum(dim=-1) + sink_share).clamp(min=tiny)[..., None]


@contextmanager
def mixed_with_streaming(checkpoint: Checkpoint, gates: Gates, options: StreamingOptions) -> Iterator[None]:
    """Within the block every head's context is α · full + (1 − α) · streaming, α being its group's gate."""

    def tap(site: AttentionSite, call: AttentionCall, context: Tensor) -> Tensor | None:
        if site.site_layer not in gates:
            return None
        weights, heads = call.weights, call.weights.shape[1]
        sizes = {"sink": options.streaming_sink, "recent": options.streaming_recent}
        visible = streaming_keys(*weights.shape[-2:], **sizes, device=weights.device)
        sink_share = (1 - weights.sum(dim=-1)).clamp(min=0) if hasattr(call.module, "sinks") else 0.0
        streaming = streaming_weights(weights, visible, sink_share) @ repeat_groups(call.value, heads)
        gate = gates[site.site_layer].to(context)
        alpha = gate.repeat_interleave(heads // len(gate))[:, None, None]  # [h 1 1]
        return alpha * context + (1 - alpha) * streaming

    with tapped_sites(checkpoint.model, tap, before_mixing=True):
        yield


def distillation_loss(
    checkpoint: Checkpoint, gates: Gates, ids: list[int], first: int, options: StreamingOptions
) -> Tensor:
    """Mean over the tokens from `first` on and channels of (H_full − H_mixed)² plus penalty · mean of |α|."""
    side = pad_side([Encoded.plain(ids)]).to(checkpoint.device)
    batch = Batch(torch.zeros(1, dtype=torch.long), 0, side)
    with torch.no_grad():
        full = checkpoint.states(batch)[0, first:].float()  # [n d]
    with mixed_with_streaming(checkpoint, gates, options):
        mixture = checkpoint.states(batch)[0, first:].float()
    penalty = torch.cat([gate.abs() for gate in gates.values()]).mean()
    return (full - mixture).square().mean() + options.streaming_penalty * penalty


def learning_rate_share(step: int, steps: int) -> float:
    """The factor on the learning rate: up from a tenth in the first fifth of the steps, down in the last fifth."""
    fifth = max(steps // 5, 1)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def learn_gates(
    checkpoint: Checkpoint, texts: Iterator[tuple[list[int], int]], options: StreamingOptions
) -> dict[SiteLayer, Tensor]:
    """Learn gates in [0, 1] of every key/value head of the decoder's self attention by AdamW, starting at 1.

    Each step takes one of `texts`: its ids, and the position from which on states are compared. NumericalError if the
    loss is not finite.
    """
    gates = {
        part.site_layer: torch.ones(part.groups, device=checkpoint.device, requires_grad=True)
        for part in checkpoint.attention_sites.at(Site.DECODER_SELF)
        if part.heads
    }
    optimiser = torch.optim.AdamW(gates.values(), lr=options.streaming_lr, weight_decay=0.0)
    with eval_mode(checkpoint.model), frozen_parameters(checkpoint.model), torch.enable_grad():
        for step in range(options.streaming_steps):
            optimiser.param_groups[0]["lr"] = options.streaming_lr * learning_rate_share(step, options.streaming_steps)
            loss = distillation_loss(checkpoint, gates, *next(texts), options)
            if not bool(loss.isfinite()):
                raise NumericalError(f"the loss of the streaming gates is no number; take a wider {flag.dtype}")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            with torch.no_grad():
                for gate in gates.values():
                    gate.clamp_(0, 1)
    return {site_layer: gate.detach().double().cpu() for site_layer, gate in gates.items()}


@analysis
class Streaming(Analysis):
    """The need of a head for full attention: a gate α learnt on passkeys (DuoAttention, Xiao et al. 2024).

    `full_attention` is α in α · full + (1 − α) · streaming, where streaming sees the first 128 and last 256 keys
    (`streaming-sink`, `streaming-recent`). α minimises (H_full − H_mixed)² on final states of question and answer
    plus 0.05 · mean α: AdamW, 2,000 texts of ten passkeys. Heads of a group share α. No interval, no label.

    streaming/ has `full_attention_heads.tsv` and `config.json` as DuoAttention's loader reads them. Both terms come
    from the mixed stream, as in the paper; the authors' program takes the full term from the unchanged model.
    Decoder-only.
    """

    name = "streaming"
    order = 301
    default = False
    sampled = True
    passes = frozenset()
    summary = "gates between full attention and that to the first and last keys, learnt on passkeys"
    measures = (
        Measure(
            "full_attention", "need of full attention", range=(0, 1), keep="highest", why="they need far keys least"
        ),
    )
    Options = StreamingOptions
    signature_entry = (
        "streaming:{streaming_sink}+{streaming_recent},l1={streaming_penalty:g},{streaming_steps}x{streaming_lr:g}"
    )

    gates: dict[SiteLayer, Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.two_sided or Site.DECODER_SELF not in {site for site, _ in checkpoint.layout}:
            return "is for decoder-only models"
        return None

    def read(self, corpus: Corpus) -> None:
        self.gates = learn_gates(self.checkpoint, self._texts(corpus), self.options)
        for site_layer, gate in self.gates.items():
            self.exact[site_layer] = {
                "full_attention": gate.repeat_interleave(self.checkpoint.layout[site_layer] // len(gate))
            }

    def _texts(self, corpus: Corpus) -> Iterator[tuple[list[int], int]]:
        """Endless texts of random lengths with new passkeys: ids, and the position where the questions begin."""
        checkpoint, options, generator = self.checkpoint, self.options, random.Random(self.run.seed)
        passkeys = Passkeys(
            count=options.passkeys,
            length=options.passkey_length,
            words=options.passkey_words,
            needle=options.passkey_needle,
            question=options.passkey_question,
        )
        shortest, longest = options.streaming_lengths
        haystack = Haystack.read(corpus, checkpoint, length=longest)
        while True:
            length = generator.randint(shortest, longest)
            text, questions = passkeys.hidden(haystack, length=length, generator=generator)
            question_length = len(prompt_ids(checkpoint, f"{text}\n{questions}")) - length
            if checkpoint.default_length is not None and question_length + length > checkpoint.default_length:
                length = checkpoint.default_length - question_length
                if length < 1:
                    raise DataError(
                        f"{options.passkeys} passkeys with their questions take about {question_length} subwords, "
                        f"and the model reads {checkpoint.default_length}; give a smaller {flag.passkey_length}"
                    )
                text, questions = passkeys.hidden(haystack, length=length, generator=generator)
            before = prompt_ids(checkpoint, f"{text}\n")
            yield prompt_ids(checkpoint, f"{text}\n{questions}")[: checkpoint.default_length], len(before)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        layers, widths = [layer for _, layer in self.gates], {len(gate) for gate in self.gates.values()}
        if layers == list(range(len(layers))) and len(widths) == 1:
            # tab-separated, a line a layer, no header: as DuoAttention stores them
            text = io.StringIO()
            np.savetxt(text, torch.stack(list(self.gates.values())).numpy(), delimiter="\t")
            report.files = {
                "streaming/full_attention_heads.tsv": text.getvalue(),
                "streaming/config.json": json.dumps(self._config()) + "\n",
            }
        else:
            why = "layers without heads, or with different numbers of them"
            report.remarks.append(f"streaming: {why}, do not fit into full_attention_heads.tsv, which is not written")
        return report

    def _config(self) -> dict[str, object]:
        """The settings of this run under the names of the authors' program."""
        options = self.options
        return {
            "model_name": self.checkpoint.path,
            "dataset_format": "multiple_passkey",
            "sink_size": options.streaming_sink,
            "recent_size": options.streaming_recent,
            "reg_weight": options.streaming_penalty,
            "num_steps": options.streaming_steps,
            "lr": options.streaming_lr,
            "batch_size": 1,
            "initial_value": 1.0,
            "context_length_min": options.streaming_lengths[0],
            "context_length_max": options.streaming_lengths[1],
            "num_passkeys": options.passkeys,
            "passkey_length": options.passkey_length,
            "seed": self.run.seed,
        }
