"""Retrieval heads: heads that look at the token that the model copies from a needle in a haystack (Wu et al. 2024)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Array, Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import HeadFunction, Measure
from headscope.data.corpus import Corpus
from headscope.data.template import Haystack, prompt_ids
from headscope.engine.base import Analysis, analysis
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelRule, Rate, head_table
from headscope.engine.heads.head_batch import max_and_position
from headscope.errors import ConfigError, DataError, flag, raise_first
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite, base_of, eval_mode
from headscope.model.forward import with_cache
from headscope.model.native.transformer import Transformer
from headscope.model.taps import observing


@dataclass(frozen=True)
class WrittenToken:
    """A generated token, and the weights [h s] of the query that predicted it at every (site, layer).

    Key s is at position `first[site, layer]` + s, since the cache of a sliding window holds only the last keys.
    """

    token: int
    weights: dict[SiteLayer, Tensor]
    first: dict[SiteLayer, int]


@torch.no_grad()
def continue_greedily(
    checkpoint: Checkpoint, prompt: list[int], *, steps: int, stop: frozenset[int]
) -> Iterator[WrittenToken]:
    """Continue a prompt greedily, until a token of `stop` or for `steps` tokens.

    All of the prompt but its last token is read with the model's own attention, unobserved, so that the weights of its
    queries are not kept.
    """
    ids, last = torch.tensor([prompt], device=checkpoint.device), dict[SiteLayer, Tensor]()

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        if attention_site.site is Site.DECODER_SELF:
            weights = call.weights[0, :, -1].detach()  # [h s]
            last[attention_site.site_layer] = weights if weights.element_size() > 2 else weights.float()

    with eval_mode(checkpoint.model):
        advance = _read_prompt(checkpoint, ids)
        token = ids[:, -1]
        for total in range(len(prompt), len(prompt) + steps):
            last.clear()
            with observing(checkpoint.model, see):
                token = advance(token).argmax(dim=-1)  # [1]
            first = {site_layer: total - weights.shape[-1] for site_layer, weights in last.items()}
            yield WrittenToken(int(token), dict(last), first)
            if int(token) in stop:
                return


def _read_prompt(checkpoint: Checkpoint, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Read a prompt [1 n] but its last token; return a function from a token [1] to the next one's logits [1 V]."""
    model: Any = checkpoint.model
    if isinstance(model, Transformer):
        state = model.begin(ids)
        return lambda token: model.step(token, state)
    cache = with_cache(base_of(model), input_ids=ids[:, :-1])[1] if ids.shape[1] > 1 else None

    def advance(token: Tensor) -> Tensor:
        nonlocal cache
        output, cache = with_cache(model, cache, input_ids=token[:, None])
        return output.logits[:, -1]

    return advance


MIN_RECALL = 0.5  # of the needle's answer, for a trial to count in `retrieval_program`
needle_option = partial(option, panel="Needle in a haystack")
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "Based on the content of the book, Question: What is the best thing to do in San Francisco?\nAnswer:"


@dataclass(frozen=True)
class RetrievalOptions(LabelOptions):
    """Options of `retrieval`."""

    needle: str = needle_option(NEEDLE, "The sentence that is hidden in the text.", metavar="TEXT")
    needle_answer: str = needle_option(ANSWER, "The part of it that the model should say.", metavar="TEXT")
    needle_question: str = needle_option(QUESTION, "What stands after the text, to be continued.", metavar="TEXT")
    haystack_lengths: tuple[int, ...] = needle_option(
        (500, 1000, 2000), "Lengths of prompts in subwords, at most what the model reads.", metavar="N,…"
    )
    needle_depths: int = needle_option(
        10, "How many depths the needle is hidden at in each length.", metavar="N", minimum=1
    )
    needle_steps: int = needle_option(50, "Tokens that the model writes at most.", metavar="N", minimum=1)
    kv_budget: int | None = needle_option(
        None, "Keys that heads keep on average, in retrieval_capacity.csv by score (HeadKV).", metavar="N", minimum=33
    )

    def __post_init__(self) -> None:
        problems = {
            f"{flag.needle_answer} must be a part of {flag.needle}, word for word": (
                self.needle_answer not in self.needle or not self.needle_answer.strip()
            ),
            f"{flag.haystack_lengths}: at least 1 is needed": any(length < 1 for length in self.haystack_lengths),
        }
        raise_first(ConfigError, problems)


@analysis
class Retrieval(Analysis):
    """Share of a needle's tokens that a head copies while the model says them (Wu et al. 2024, §2).

    A sentence is hidden in the corpus's text at several depths and lengths; the model answers a question greedily. A
    head copies a token where the predicting query looks most at it and the written token is that one. `retrieval`
    counts each token once, over all trials; `retrieval_program` is the authors' program: twice copied counts twice,
    only trials that said half of the needle. Needle and question are the authors' by default; no chat template.
    Decoder-only models.

    Label `retrieval`: a mean of at least 0.1, with trials as units.
    """

    name = "retrieval"
    order = 300
    default = False
    passes = frozenset()
    summary = "share of a hidden sentence's tokens that a head copies while the model says them"
    measures = (
        Measure("retrieval", "needle tokens copied", range=(0, 1), keep="highest", why="they copy least of a needle"),
        Measure("retrieval_program", "needle tokens copied, as the authors count", range=(0, None)),
    )
    functions = (HeadFunction("retrieval", "⚲", "R", "#6699cc", "retrieval: copies from far back", order=13),)
    Options = RetrievalOptions
    rules = (LabelRule("retrieval", "retrieval", 0.1, rate=Rate("of the tokens of hidden sentences")),)

    trials: list[Trial]
    n_lost: int

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.two_sided or Site.DECODER_SELF not in {site for site, _ in checkpoint.layout}:
            return "is for decoder-only models"
        return None if checkpoint.predicts == "words" else "needs a model that predicts words"

    def read(self, corpus: Corpus) -> None:
        checkpoint, options = self.checkpoint, self.options
        self.trials, self.n_lost = [], 0
        around = sum(len(prompt_ids(checkpoint, text)) for text in (options.needle, options.needle_question))
        longest = (checkpoint.default_length or max(options.haystack_lengths)) - options.needle_steps
        lengths = sorted({min(length, longest) - around for length in options.haystack_lengths})
        if lengths[-1] < 1:
            raise DataError(
                f"needle, question and answer take {around} + {options.needle_steps} subwords, the prompt may have "
                f"{lengths[-1] + around + options.needle_steps}; give shorter ones, or longer {flag.haystack_lengths}"
            )
        haystack = Haystack.read(corpus, checkpoint, length=lengths[-1])
        # a special id or a new line ends the answer
        special = set(range(checkpoint.vocabulary)) - set(checkpoint.plain_ids(side="target"))
        newlines = (checkpoint.id_of(subword, side="target") for subword in ("<0x0A>", "Ċ", "\n"))
        stop = frozenset(special | {number for number in newlines if number is not None})
        for length in (length for length in lengths if length > 0):
            for depth in np.linspace(0, 1, options.needle_depths).tolist():
                text = haystack.around([(depth, options.needle)], length=length)
                whole = f"{text}\n{options.needle_question}"
                prompt = Prompt.of(checkpoint, whole, options.needle, options.needle_answer)
                if prompt is None:
                    self.n_lost += 1
                    continue
                steps = continue_greedily(checkpoint, prompt.ids, steps=options.needle_steps, stop=stop)
                self.trials.append(Trial.of(prompt, list(steps), depth=depth))

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        lengths = torch.tensor([[float(trial.prompt.length)] for trial in self.trials])  # [n 1]
        answered_trials = [trial for trial in self.trials if trial.recall > MIN_RECALL]
        for site_layer in self.trials[0].copies if self.trials else ():
            copies = [trial.copies[site_layer].any(dim=0).sum(dim=-1).double() for trial in self.trials]
            self.units[(self.name, *site_layer)] = Ratio(torch.stack(copies), lengths)
            if answered_trials:
                scores = torch.stack([trial.program_score(site_layer) for trial in answered_trials])
                self.units[("retrieval_program", *site_layer)] = Ratio(scores, torch.ones(len(scores), 1))
        report = super().report(aggregates)
        report.columns = {measure.name: report.columns.get(measure.name, {}) for measure in self.measures}
        report.tables["retrieval"] = pd.DataFrame([trial.row(self.checkpoint) for trial in self.trials])
        if self.options.kv_budget is not None and self.trials:
            capacities = head_table(
                {site_layer: {"keys": of.value} for site_layer, of in report.columns[self.name].items()}
            )
            keys = head_capacities(capacities["keys"].to_numpy(), budget=self.options.kv_budget)
            report.tables["retrieval_capacity"] = capacities.assign(keys=keys.astype(int))
        by_head = {
            f"{layer}-{head}": of_head
            for (name, _, layer), ratio in self.units.items()
            if name == "retrieval_program"
            for head, of_head in enumerate(ratio.total.T.tolist())
        }
        report.files["retrieval/head_score.json"] = json.dumps(by_head) + "\n"
        if self.n_lost:
            report.remarks.append(f"retrieval: the needle could not be found again in {self.n_lost} prompts")
        if not answered_trials:
            report.remarks.append("retrieval: no trial said half of the needle, so retrieval_program is empty")
        return report

    def signature(self) -> dict[str, str]:
        options = self.options
        lengths = ",".join(map(str, options.haystack_lengths))
        return {"needle": f"{lengths}x{options.needle_depths},{options.needle_steps}", **super().signature()}


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt; those from `start` to before `end` are the answer in the needle."""

    ids: list[int]
    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of the answer's tokens."""
        return self.end - self.start

    @property
    def answer(self) -> list[int]:
        """The answer's ids."""
        return self.ids[self.start : self.end]

    @classmethod
    def of(cls, checkpoint: Checkpoint, text: str, needle: str, answer: str) -> Prompt | None:
        """The prompt of a text. Returns None if the answer cannot be located among its ids."""
        ids = prompt_ids(checkpoint, text)
        first = text.index(needle) + needle.index(answer)
        spans = checkpoint.spans(text, ids, side="target")
        if spans is not None:
            inside = [n for n, span in enumerate(spans) if span and span[0] < first + len(answer) and span[1] > first]
            return cls(ids, inside[0], inside[-1] + 1) if inside else None
        start = find_needle(ids, prompt_ids(checkpoint, answer, special=False))
        return None if start is None else cls(ids, start, start + len(prompt_ids(checkpoint, answer, special=False)))


@dataclass
class Trial:
    """The ids that the model wrote after a prompt, and the tokens of the answer that each head copied.

    `copies[site, layer]` [steps h n]: whether the head copied token n of the answer in a step.
    """

    prompt: Prompt
    depth: float
    output: list[int]
    copies: dict[SiteLayer, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Prompt, steps: Sequence[WrittenToken], *, depth: float) -> Trial:
        """The trial of a continuation's steps."""
        trial = cls(prompt, depth, [step.token for step in steps])
        answer = torch.tensor(prompt.answer)
        for site_layer in steps[0].weights:
            rows = [
                max_and_position(step.weights[site_layer])[1].cpu() + step.first[site_layer] for step in steps
            ]  # [h] each
            argmax = torch.stack(rows)  # [steps h]
            looks_at = argmax[..., None] == torch.arange(prompt.start, prompt.end)  # [steps h n]
            trial.copies[site_layer] = looks_at & (answer == torch.tensor(trial.output)[:, None])[:, None]
        return trial

    @property
    def recall(self) -> float:
        """The share of the answer's tokens that were written, in any order."""
        common = Counter(self.prompt.answer) & Counter(self.output)
        return sum(common.values()) / self.prompt.length

    def program_score(self, site_layer: SiteLayer) -> Tensor:
        """The score of the authors' program [h]: steps that copy, over the tokens of the needle."""
        return self.copies[site_layer].any(dim=-1).sum(dim=0).double() / self.prompt.length

    def row(self, checkpoint: Checkpoint) -> dict[str, object]:
        """A line of retrieval.csv."""
        return {
            "length": len(self.prompt.ids),
            "depth": self.depth,
            "start": self.prompt.start,
            "tokens": self.prompt.length,
            "recall": self.recall,
            "counted_by_program": self.recall > MIN_RECALL,
            "written": " ".join(checkpoint.subwords(self.output, side="target")),
        }


def find_needle(ids: Sequence[int], needle: Sequence[int]) -> int | None:
    """The start of the first window as long as the needle that has more than 90 % of the needle's distinct ids."""
    needle_ids = set(needle)
    for start in range(len(ids) - len(needle) + 1):
        if len(needle_ids & set(ids[start : start + len(needle)])) > 0.9 * len(needle_ids):
            return start
    return None


def head_capacities(scores: Array, *, budget: int, window: int = 32, beta: float = 1.005) -> Array:
    """Cache capacities [n] of heads, in addition to the newest `window` keys, for a mean `budget` of keys.

    With c = budget − window, every head keeps c − ⌊c/β⌋ keys, and n·⌊c/β⌋ are distributed by score, as in the authors'
    program. That rounds each head by itself; here the largest remainders are rounded up, so that capacities sum to n·c.
    If all scores are zero, every head gets the same.
    """
    positive = np.clip(np.nan_to_num(scores), 0, None)
    shares = positive / positive.sum() if positive.sum() > 0 else np.full(len(scores), 1 / len(scores))
    free = budget - window
    shared = int(free // beta)
    exact = shares * shared * len(scores) + free - shared
    floors: Array = np.floor(exact)
    missing = round(free * len(scores) - floors.sum())
    floors[np.argsort(floors - exact, kind="stable")[:missing]] += 1
    return floors
