"""The attention weights of one sentence, recomputed with the run's own checkpoint for a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headscope.bounds import WHOLE
from headscope.errors import CheckpointError, ConfigError
from headscope.heads import HeadId, Layout, Site, describe_heads
from headscope.report.readers.run import AnalysisRun, RunError

if TYPE_CHECKING:
    from headscope.data.corpus import Sentence


@dataclass(frozen=True)
class SentenceAttention:
    """What `attention_figure` draws: weights [n t s] of n heads, and the subwords on their two axes."""

    weights: NDArray[np.floating]
    subwords_t: list[str]
    subwords_s: list[str]
    names: list[str]


def sentence_attention(
    run: AnalysisRun,
    *,
    sentence: str | None = None,
    index: int | None = None,
    target: str | None = None,
    heads: Sequence[HeadId],
) -> SentenceAttention:
    """Open the run's checkpoint and capture `heads` (all of one site) on one sentence.

    Either `sentence` is given, or `index`, the line of the run's own data from 0; `target` is the
    other side for models that have one. CheckpointError where the checkpoint is no longer the one that the
    run measured, ConfigError for heads it lacks or a line that is not there.
    """
    from headscope.config import Companions
    from headscope.data.batching import DEFAULT_LIMIT
    from headscope.data.corpus import Sentence
    from headscope.engine.attention_maps import attention_maps
    from headscope.formats.base import open_checkpoint
    from headscope.heads import select_heads

    options, measured = _section(run, "options", "dicts", "hp", "bpe", "mask"), _section(run, "checkpoint", "path")
    files = {name: Path(options[name]) for name in ("dicts", "hp", "bpe") if options.get(name)}
    if not measured.get("path"):
        raise RunError(f"run {run.name}: run.json does not say which checkpoint it measured; analyse again")
    checkpoint = open_checkpoint(measured["path"], format=measured.get("format"), companions=Companions(**files))
    if checkpoint.digest != measured.get("digest"):
        raise CheckpointError(
            f"{checkpoint.path} is not the checkpoint that {run.path} measured (its digest differs); analyse it again"
        )
    site = _one_site(heads, checkpoint.layout)
    line = _line(run, index) if index is not None else Sentence(0, sentence or "", target)
    if checkpoint.two_sided and site is not Site.ENCODER_SELF and line.target is None:
        raise ConfigError(f"{site} heads need the translation too; give --target TEXT")
    off = select_heads(options["mask"], checkpoint.layout) if options.get("mask") else []
    limit = options.get("limit", DEFAULT_LIMIT)
    if type(limit) is not int or not 2 <= limit <= WHOLE:
        raise RunError(f"run {run.name}: run.json says limit {str(limit)[:20]}; analyse again")
    maps = attention_maps(checkpoint, line, limit=limit, off=off)
    weights = [maps.captured[site, head.layer]["weights"][0, head.head].float().cpu().numpy() for head in heads]
    query, key = (checkpoint.subwords(maps.sides[side].ids) for side in maps.between(site))
    return SentenceAttention(np.stack(weights), query, key, [str(head) for head in heads])


def _section(run: AnalysisRun, name: str, *texts: str) -> dict[str, Any]:
    """A table of run.json; RunError where it is none, or where one of `texts` is there and is no text."""
    section = run.meta.get(name, {})
    if not isinstance(section, dict) or any(not isinstance(section.get(key) or "", str) for key in texts):
        raise RunError(f"run {run.name}: {name} in run.json is malformed; analyse again")
    return section


def _one_site(heads: Sequence[HeadId], layout: Layout) -> Site:
    sites = {head.site for head in heads}
    if len(sites) != 1:
        raise ConfigError(f"heads of one site go into one figure, got {', '.join(sorted(map(str, sites))) or 'none'}")
    for head in heads:
        if head.head >= layout.get((head.site, head.layer), 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")
    return sites.pop()


def _line(run: AnalysisRun, index: int) -> Sentence:
    """Line `index` of the run's texts."""
    from headscope.config import TextFiles
    from headscope.evaluation.labels import open_text

    data = dict(_section(run, "data", "source", "target", "source2", "labels", "clean", "parse"))
    data["source"] = data.get("source") or data.get("clean")
    texts = {name: Path(data[name]) for name in ("source", "target", "source2", "labels") if data.get(name)}
    parse = data.get("parse")
    files = TextFiles(**texts, pairs=bool(data.get("pairs")))
    corpus = open_text(files, parses=Path(parse) if parse and parse != "stanza" else None, max_sentences=index + 1)
    if corpus.count <= index:
        raise ConfigError(f"the run's data have {corpus.count} lines; --index counts from 0")
    *_, last = corpus
    return last
