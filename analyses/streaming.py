"""Streaming heads: gates between full and streaming attention, learnt on passkeys (DuoAttention, Xiao et al. 2024)."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.attribution.fitted_gates import LabelledText, StreamingFit, learn_gates
from headscope.bootstrap import Estimate
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.corpus import Corpus
from headscope.data.haystack import Haystack, Passkeys, prompt_ids
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.errors import ConfigError, DataError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import Site

PANEL = "Streaming heads"
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

    streaming_sink: int = option(128, "First keys that streaming attention sees.", metavar="N", panel=PANEL, minimum=0)
    streaming_recent: int = option(
        256, "Last keys that it sees, a query's own among them.", metavar="N", panel=PANEL, minimum=1
    )
    streaming_penalty: float = option(
        0.05, "Weight of the mean gate in the loss.", metavar="NUMBER", panel=PANEL, minimum=0
    )
    streaming_steps: int = option(2000, "Texts that gates learn from, one a step.", metavar="N", panel=PANEL, minimum=1)
    streaming_lr: float = option(0.02, "Learning rate of the gates.", metavar="NUMBER", panel=PANEL, minimum=0)
    streaming_lengths: tuple[int, ...] = option(
        (1000, 4000),
        "Shortest and longest text without passkeys and questions, in subwords.",
        metavar="N,N",
        panel=PANEL,
    )
    passkeys: int = option(10, "Passkeys hidden in a text.", metavar="N", panel=PANEL, minimum=1, maximum=20)
    passkey_length: int = option(32, "Words of a passkey.", metavar="N", panel=PANEL, minimum=1)
    passkey_words: tuple[str, ...] = option(WORDS, "Words that passkeys are drawn from.", metavar="WORD,…", panel=PANEL)
    passkey_needle: str = option(NEEDLE, "What stands before a hidden passkey.", metavar="TEXT", panel=PANEL)
    passkey_question: str = option(QUESTION, "What asks for it.", metavar="TEXT", panel=PANEL)

    def __post_init__(self) -> None:
        lengths = self.streaming_lengths
        if len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1]:
            raise ConfigError(f"{flag.streaming_lengths} takes two numbers, the shortest and the longest: 1000,4000")
        if not self.passkey_words:
            raise ConfigError(f"{flag.passkey_words}: at least one word is needed")


@analysis
class Streaming(Analysis):
    """How much of its full attention a head needs: a gate α learnt on passkeys (DuoAttention, Xiao et al. 2024).

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

    gates: dict[tuple[Site, int], Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.two_sided or Site.DECODER_SELF not in {site for site, _ in checkpoint.layout}:
            return "is for decoder-only models"
        return None

    def read(self, corpus: Corpus) -> None:
        options = self.options
        fit = StreamingFit(
            sink=options.streaming_sink,
            recent=options.streaming_recent,
            penalty=options.streaming_penalty,
            steps=options.streaming_steps,
            learning_rate=options.streaming_lr,
        )
        self.gates = learn_gates(self.checkpoint, self._texts(corpus, self.checkpoint), fit)
        repeats = {place: self.checkpoint.layout[place] // len(gate) for place, gate in self.gates.items()}
        self.exact["full_attention"] = {
            place: Estimate.exact(gate.repeat_interleave(repeats[place])) for place, gate in self.gates.items()
        }

    def _texts(self, corpus: Corpus, checkpoint: Checkpoint) -> Iterator[LabelledText]:
        """Fresh passkeys in texts of fresh lengths, without end."""
        options, generator = self.options, random.Random(self.run.seed)
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
            if checkpoint.context is not None and question_length + length > checkpoint.context:
                length = checkpoint.context - question_length
                if length < 1:
                    raise DataError(
                        f"{options.passkeys} passkeys with their questions take about {question_length} subwords, "
                        f"and the model reads {checkpoint.context}; give a smaller {flag.passkey_length}"
                    )
                text, questions = passkeys.hidden(haystack, length=length, generator=generator)
            before = prompt_ids(checkpoint, f"{text}\n")
            yield LabelledText(prompt_ids(checkpoint, f"{text}\n{questions}")[: checkpoint.context], len(before))

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
        """The arguments of the authors' program that this run has, by their names."""
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
