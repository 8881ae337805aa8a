"""`headscope analyze`: one forward pass over the corpus, shared by every analysis that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.accumulate import BUDGET, FOLDS, GROUPS, REPLICATES, Array, Bootstrap, GroupSums, Ratio
from headscope.analysis import ANALYSES, Analysis, Findings, Heads, Options, Tally
from headscope.capture import observing
from headscope.data import Batch, Corpus, Encoded, Long, Losses, Side, batches, side
from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, HeadId, Site, all_heads
from headscope.model.attention import AttentionCall
from headscope.model.places import Place

DEFAULT_LIMIT = 512
DEFAULT_TOKENS = 2048
RANDOM_SEQUENCES, RANDOM_BLOCK = 64, 25


@dataclass(frozen=True)
class LeftOut:
    """An analysis, or a site of it, that was not measured, and why."""

    analysis: str
    why: str


@dataclass
class Study:
    """What came of it: a row per head, the analyses' own tables and arrays, labels, and what was left out."""

    heads: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, Array]
    labels: dict[HeadId, list[str]]
    left_out: list[LeftOut]
    remarks: list[str]
    signatures: dict[str, dict[str, str]]
    detail: dict[str, dict[str, Array]]
    losses: Losses
    sentences: int
    complete: bool
    seconds: float


@dataclass(frozen=True)
class Pace:
    """How the corpus is read: positions a batch, pieces a sentence, and what happens to longer ones."""

    tokens: int = DEFAULT_TOKENS
    limit: int | None = None
    long: Long = "truncate"


def choose(*, only: Sequence[str] = (), skip: Sequence[str] = (), also: Sequence[str] = ()) -> list[type[Analysis]]:
    """The analyses to run: the default ones, or `only` these; plus `also`, minus `skip`.

    ConfigError for an unknown name, with the nearest known one.
    """
    for name in (*only, *skip, *also):
        ANALYSES.get(name)
    found = dict(ANALYSES)
    wanted = set(only) or {name for name, cls in found.items() if cls.default}
    wanted = (wanted | set(also)) - set(skip)
    if not wanted:
        raise ConfigError("no analysis is left to run; ask for fewer to be skipped")
    return sorted((found[name] for name in wanted), key=lambda cls: (cls.order, cls.name))


def analyze(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    analyses: Sequence[type[Analysis]],
    options: Options,
    pace: Pace | None = None,
    replicates: int = REPLICATES,
    detail: bool = False,
    progress: Callable[[int], None] = lambda sentences: None,
) -> Study:
    """Measure every head of a checkpoint on a corpus with all `analyses` in one pass.

    `progress` is called with the number of sentences after each batch. A KeyboardInterrupt ends the pass;
    the study then covers what was done and says `complete=False`. Errors: CheckpointError where the
    model's heads cannot be seen, DataError where the corpus cannot be read.
    """
    began = time.monotonic()
    running, left_out = _applicable(checkpoint, corpus, analyses, options)
    survey = _Survey(checkpoint, running, options, detail=detail)
    losses, complete, done = Losses(), True, 0
    limit = sentence_limit(checkpoint, pace or Pace())
    try:
        for one in running:
            one.inspect(checkpoint)
        streams = _streams(checkpoint, corpus, running, options, pace or Pace(), limit, losses)
        with torch.inference_mode(), observing(checkpoint.model, survey.see):
            for batch in streams:
                survey.run(batch)
                if batch.kind == "text":
                    done += len(batch.indices)
                    progress(len(batch.indices))
    except KeyboardInterrupt:
        if done == 0:
            raise
        complete = False
    study = survey.conclude(Bootstrap(seed=options.seed, replicates=replicates))
    study.left_out[:0] = left_out
    study.losses, study.sentences, study.complete = losses, done, complete
    study.seconds = time.monotonic() - began
    return study


def sentence_limit(checkpoint: Checkpoint, pace: Pace) -> int:
    """The most pieces a sentence may have; ConfigError where more is asked than the model has positions for."""
    if pace.limit is not None and checkpoint.limit is not None and pace.limit > checkpoint.limit:
        raise ConfigError(f"--max-length {pace.limit} is more than the {checkpoint.limit} positions of the model")
    return pace.limit or min(DEFAULT_LIMIT, checkpoint.limit or DEFAULT_LIMIT)


def _applicable(
    checkpoint: Checkpoint, corpus: Corpus, analyses: Sequence[type[Analysis]], options: Options
) -> tuple[list[Analysis], list[LeftOut]]:
    """Instances of the analyses that have what they need, and why the others have not."""
    if corpus.has_target and not checkpoint.two_sided:
        raise ConfigError(f"a model of type {checkpoint.model_type!r} reads one side only; leave out --target")
    there = {place.site for place in checkpoint.places.order}
    measured = there if corpus.has_target or not checkpoint.two_sided else there & {Site.ENCODER_SELF}
    left_out = []
    if unmeasured := sorted(site.value for site in there - measured):
        left_out.append(LeftOut("all", f"{' and '.join(unmeasured)} need a --target"))
    running = []
    for cls in analyses:
        why = _missing(cls, corpus, options) or _elsewhere(cls, measured) or cls.applies(checkpoint)
        if why:
            left_out.append(LeftOut(cls.name, why))
        else:
            running.append(cls(options))
    if not running:
        raise ConfigError("no analysis can run: " + "; ".join(f"{each.analysis}: {each.why}" for each in left_out))
    return running, left_out


def _missing(cls: type[Analysis], corpus: Corpus, options: Options) -> str | None:
    if "parse" in cls.needs and not corpus.has_parses:
        return "needs --parse stanza or --parse FILE.conllu"
    if "frequencies" in cls.needs and options.ranks is None:
        return "needs token frequencies"
    return None


def _elsewhere(cls: type[Analysis], measured: set[Site]) -> str | None:
    if cls.passes and not cls.sites & measured:
        wanted = " or ".join(site.value for site in SITES if site in cls.sites)
        return f"is for {wanted}; measured here: {', '.join(site.value for site in SITES if site in measured)}"
    return None


def _streams(
    checkpoint: Checkpoint,
    corpus: Corpus,
    running: Sequence[Analysis],
    options: Options,
    pace: Pace,
    limit: int,
    losses: Losses,
) -> Iterator[Batch]:
    passes = {name for one in running for name in one.passes}
    if "text" in passes:
        yield from batches(corpus, checkpoint, tokens=pace.tokens, limit=limit, long=pace.long, losses=losses)
    if "random" in passes and (corpus.has_target or not checkpoint.two_sided):
        yield from random_batches(checkpoint, seed=options.seed, limit=limit)


def random_batches(checkpoint: Checkpoint, *, seed: int, limit: int) -> Iterator[Batch]:
    """Sequences of random tokens, each block repeated once (Olsson et al. 2022): what only copying explains.

    The text's usual start comes first. An encoder sees the block once, its decoder the repetition.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = torch.tensor(checkpoint.common_ids())
    start = (
        checkpoint.encode(["a"], side="target", limit=limit)[0].ids[:1]
        if checkpoint.two_sided
        else checkpoint.start_ids()
    )
    block = min(RANDOM_BLOCK, (limit - len(start)) // 2)
    for first in range(0, RANDOM_SEQUENCES, FOLDS):
        drawn = plain[torch.randint(len(plain), (FOLDS, block), generator=generator)].tolist()
        repeated = [_plain(start, [*once, *once]) for once in drawn]
        sides = (
            (side([_plain([], once) for once in drawn]), side(repeated))
            if checkpoint.two_sided
            else (side(repeated), None)
        )
        indices = torch.arange(first, first + FOLDS)
        yield Batch(indices, 0, sides[0], sides[1], kind="random")


def _plain(start: Sequence[int], ids: Sequence[int]) -> Encoded:
    return Encoded([*start, *ids], [True] * len(start) + [False] * len(ids))


@dataclass
class _Survey:
    """Sums of every running analysis, batch by batch."""

    checkpoint: Checkpoint
    running: Sequence[Analysis]
    options: Options
    detail: bool = False
    sums: dict[str, dict[tuple[str, Site, int], GroupSums]] = field(default_factory=dict)
    detailed: dict[str, dict[str, dict[int, Tensor]]] = field(default_factory=dict)
    here: Batch = field(init=False)
    cache: dict[str, Any] = field(default_factory=dict)
    found: list[tuple[Analysis, tuple[str, Site, int], Ratio]] = field(default_factory=list)

    def run(self, batch: Batch) -> None:
        """One forward pass within `observing(model, survey.see)`; the batch counts when it is through."""
        self.here, self.cache, self.found = batch.to(self.checkpoint.device), {}, []
        self.checkpoint.forward(self.here)
        for one, key, ratio in self.found:
            self._add(one, key, batch, ratio)

    def see(self, place: Place, call: AttentionCall) -> None:
        """Every analysis sees every call of the batch that is on its way."""
        heads = self._heads(place, call, self.here, self.cache)
        for one in self.running:
            if self.here.kind in one.passes and place.site in one.sites:
                for name, ratio in one.observe(heads).items():
                    self.found.append((one, (name, place.site, place.layer), ratio))

    def _heads(self, place: Place, call: AttentionCall, batch: Batch, cache: dict[str, Any]) -> Heads:
        text = batch.source if batch.target is None else batch.target
        query_side = batch.source if place.site is Site.ENCODER_SELF else text
        key_side = text if place.site is Site.DECODER_SELF else batch.source
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        if tuple(call.weights.shape[-2:]) != expected:
            raise CheckpointError(
                f"{place.site}.{place.layer} attends from {call.weights.shape[-2]} to {call.weights.shape[-1]} "
                f"positions where the text has {expected[0]} and {expected[1]}; it cannot be analysed token by token"
            )
        keys = self._counted(key_side)
        return Heads(
            site=place.site,
            layer=place.layer,
            weights=_precise(call.weights),
            context=_precise(call.context),
            queries=self._counted(query_side) & keys.any(dim=-1, keepdim=True),
            keys=keys,
            visible=_visible(call, key_side, cache),
            query_side=query_side,
            key_side=key_side,
            batch=batch,
            cache=cache,
        )

    def _counted(self, its: Side) -> Tensor:
        return its.real if self.options.keep_special else its.real & ~its.special

    def _add(self, one: Analysis, key: tuple[str, Site, int], batch: Batch, ratio: Ratio) -> None:
        mine = self.sums.setdefault(one.name, {})
        if key not in mine:
            share = BUDGET // len(self.checkpoint.places.order)
            mine[key] = GroupSums(groups=FOLDS if ratio.whole else GROUPS, budget=share)
        slots = torch.tensor([batch.fold]) if ratio.whole else batch.indices
        mine[key].add(slots, ratio)
        if self.detail and batch.kind == "text" and ratio.total.ndim == 2 and not ratio.whole:
            self._keep(key, batch, ratio)

    def _keep(self, key: tuple[str, Site, int], batch: Batch, ratio: Ratio) -> None:
        name, site, layer = key
        values = (ratio.total / ratio.count).float().cpu()  # [b h]
        for sentence, value in zip(batch.indices.tolist(), values, strict=True):
            self.detailed.setdefault(name, {}).setdefault(f"{sentence}/{site}", {})[layer] = value

    def conclude(self, bootstrap: Bootstrap) -> Study:
        """Turn sums into columns, tables and labels."""
        findings: list[tuple[Analysis, Findings]] = []
        left_out, remarks = [], []
        for one in self.running:
            sums = self.sums.get(one.name, {})
            if one.passes and not sums:
                left_out.append(LeftOut(one.name, "found nothing to measure"))
                continue
            found = one.report(Tally(sums, bootstrap))
            findings.append((one, found))
            remarks += found.remarks
        labels: dict[HeadId, list[str]] = {}
        for _, found in findings:
            for head, texts in found.labels.items():
                labels.setdefault(head, []).extend(texts)
        return Study(
            heads=_heads_table(self._measured(), [found for _, found in findings], labels),
            tables={name: frame for _, found in findings for name, frame in found.tables.items()},
            arrays={name: array for _, found in findings for name, array in found.arrays.items()},
            labels=labels,
            left_out=left_out,
            remarks=remarks,
            signatures={one.name: {"m": f"{one.name}.v{one.version}", **one.signature()} for one, _ in findings},
            detail={
                name: {key: _stacked(layers) for key, layers in its.items()} for name, its in self.detailed.items()
            },
            losses=Losses(),
            sentences=0,
            complete=True,
            seconds=0.0,
        )

    def _measured(self) -> list[HeadId]:
        """Heads of the sites that were seen; all of them where only parameters were looked at."""
        seen = {(site, layer) for mine in self.sums.values() for _, site, layer in mine}
        layout = self.checkpoint.layout
        return list(all_heads({place: count for place, count in layout.items() if place in seen or not seen}))


def _precise(values: Tensor) -> Tensor:
    """At least float32: a sum of a few hundred weights in half precision has an error in the third digit."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _visible(call: AttentionCall, key_side: Side, cache: dict[str, Any]) -> Tensor:
    """Where each query may look [b t s]: what the model's mask leaves, without padding."""
    name = f"visible/{id(call.mask)}/{id(key_side)}/{call.weights.shape[-2]}"
    if name not in cache:
        real = key_side.real[:, None, :].expand(-1, call.weights.shape[-2], -1)
        if call.mask is None:
            visible = real
        elif call.mask.dtype == torch.bool:
            visible = call.mask[:, 0] & real
        else:
            visible = (call.mask[:, 0] > torch.finfo(call.mask.dtype).min / 2) & real
        cache[name] = (visible, call.mask)  # holding the mask keeps its id from being used again
    found: Tensor = cache[name][0]
    return found


def _heads_table(
    heads: Sequence[HeadId], findings: Sequence[Findings], labels: Mapping[HeadId, list[str]]
) -> pd.DataFrame:
    """One row per head: site, layer, head, every measure with its interval, the labels."""
    columns: dict[str, list[Any]] = {
        "site": [head.site.value for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
    }
    for found in findings:
        for name, texts in found.texts.items():
            columns[name] = [texts.get(head, "") for head in heads]
        for column in found.columns:
            for end, part in (("", "value"), ("_low", "low"), ("_high", "high")):
                columns[column.name + end] = [_entry(column.estimates, head, part) for head in heads]
    columns["functions"] = [";".join(labels.get(head, [])) for head in heads]
    return pd.DataFrame(columns)


def _entry(estimates: Mapping[tuple[Site, int], Any], head: HeadId, part: str) -> float:
    estimate = estimates.get((head.site, head.layer))
    return float("nan") if estimate is None else float(getattr(estimate, part)[head.head])


def _stacked(layers: Mapping[int, Tensor]) -> Array:
    """Per-layer values [h] as [layer h]; layers with fewer heads are filled with NaN."""
    widest = max(len(values) for values in layers.values())
    found = np.full((max(layers) + 1, widest), np.nan)
    for layer, values in layers.items():
        found[layer, : len(values)] = values.numpy()
    return found
