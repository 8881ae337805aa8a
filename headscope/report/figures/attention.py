"""Attention maps of chosen heads over one sentence, with its subwords on both axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config import option
from headscope.config.option import WHOLE
from headscope.data.token_text import visible
from headscope.errors import CheckpointError, ConfigError, check_one_given
from headscope.heads import HeadId, refuse_absent, select_heads
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import BAR, LABEL, TICK, Page, even_width, flow, shorten, text_width
from headscope.report.registry import RUN, PlotFigure
from headscope.results.study import Study
from headscope.results.study_tables import RunError

if TYPE_CHECKING:
    from headscope.data.corpus import Sentence
    from headscope.engine.attention_maps import Maps
    from headscope.formats.base import Checkpoint


@dataclass(frozen=True)
class SentenceAttention:
    """What `attention_figure` draws: weights [n t s] of n heads, and the subwords on their two axes."""

    weights: NDArray[np.floating]
    subwords_t: list[str]
    subwords_s: list[str]
    names: list[str]


def sentence_attention(
    run: Study,
    *,
    sentence: str | None = None,
    index: int | None = None,
    target: str | None = None,
    heads: Sequence[HeadId],
) -> SentenceAttention:
    """The weights of `heads` (all of one site) on one sentence, which is chosen as `sentence_maps` has it.

    ConfigError for heads that the checkpoint lacks, and where they need a translation that is not there.
    """
    from headscope.description.tokens import TokenReader

    checkpoint, _, maps = sentence_maps(run, sentence=sentence, index=index, target=target)
    sites = {each.site for each in heads}
    if len(sites) != 1:
        raise ConfigError(f"heads of one site go into one figure, got {', '.join(sorted(map(str, sites))) or 'none'}")
    refuse_absent(heads, checkpoint.layout)
    site = sites.pop()
    if (site, heads[0].layer) not in maps.captured.calls:
        raise ConfigError(f"{site} heads need the translation too; give --target TEXT")
    weights = [maps.captured[site, head.layer]["weights"][0, head.head].float().cpu().numpy() for head in heads]
    query, key = (TokenReader.of(checkpoint, side).shown(maps.sides[side].ids) for side in maps.between(site))
    return SentenceAttention(np.stack(weights), query, key, [str(head) for head in heads])


def sentence_maps(
    run: Study, *, sentence: str | None = None, index: int | None = None, target: str | None = None
) -> tuple[Checkpoint, Sentence, Maps]:
    """Open the run's checkpoint and capture all heads on one sentence.

    Either `sentence` is given, or `index`, the line of the run's own data from 0; `target` is the
    other side for models that have one. CheckpointError where the checkpoint is no longer the one that the
    run measured, RunError where that was in memory alone, ConfigError for a line that is not there.
    """
    from headscope.config import COMPANIONS, Companions
    from headscope.data.batching import DEFAULT_LIMIT
    from headscope.data.corpus import Sentence
    from headscope.engine.attention_maps import attention_maps
    from headscope.formats.base import open_checkpoint

    options, measured = _section(run, "options", *COMPANIONS, "mask"), _section(run, "checkpoint", "path")
    if not measured.get("path"):
        raise RunError(f"run {run.name}: run.json does not say which checkpoint it measured; analyse again")
    if measured["path"].endswith(" in memory") and not Path(measured["path"]).exists():
        raise RunError(
            f"run {run.name} measured {measured['path']}, which has no files to open again; save the model with its "
            "tokenizer, and analyse its folder"
        )
    checkpoint = open_checkpoint(measured["path"], format=measured.get("format"), companions=Companions.of(options))
    if checkpoint.digest != measured.get("digest"):
        raise CheckpointError(
            f"{checkpoint.path} is not the checkpoint that {run.folder} measured (its digest differs); analyse it again"
        )
    line = _line(run, index) if index is not None else Sentence(0, sentence or "", target)
    off = select_heads(options["mask"], checkpoint.layout) if options.get("mask") else []
    limit = options.get("limit", DEFAULT_LIMIT)
    if type(limit) is not int or not 2 <= limit <= WHOLE:
        raise RunError(f"run {run.name}: run.json says limit {str(limit)[:20]}; analyse again")
    return checkpoint, line, attention_maps(checkpoint, line, limit=limit, off=off)


def _section(run: Study, name: str, *texts: str) -> dict[str, Any]:
    """A table of run.json; RunError where it is none, or where one of `texts` is there and is no text."""
    section = run.record.get(name, {})
    if not isinstance(section, dict) or any(not isinstance(section.get(key) or "", str) for key in texts):
        raise RunError(f"run {run.name}: {name} in run.json is malformed; analyse again")
    return section


def _line(run: Study, index: int) -> Sentence:
    """Line `index` of the run's texts."""
    from headscope.config import TextFiles
    from headscope.data.corpus import open_text

    data = dict(_section(run, "data", "source", "target", "source2", "labels", "clean", "parse"))
    typed = _section(run, "options").get("typed") or {}
    if not isinstance(typed, dict) or not all(isinstance(lines, list) for lines in typed.values()):
        raise RunError(f"run {run.name}: what was typed is malformed in run.json; analyse again")
    data["source"] = data.get("source") or data.get("clean")
    texts = {name: Path(data[name]) for name in ("source", "target", "source2", "labels") if data.get(name)}
    parse = data.get("parse")
    if not texts and not typed and parse in (None, "", "stanza"):
        raise ConfigError(f"run {run.name} measured a list of sentences, which it does not keep; give --sentence TEXT")
    files = TextFiles(
        **{**texts, **{name: typed[name] for name in typed if name in texts}}, pairs=bool(data.get("pairs"))
    )
    corpus = open_text(files, parses=Path(parse) if parse and parse != "stanza" else None, max_sentences=index + 1)
    if corpus.count <= index:
        raise ConfigError(f"the run's data have {corpus.count} lines; --index counts from 0")
    *_, last = corpus
    return last


GAP = 0.2  # inches between maps
LONGEST = 0.9  # inches of a subword's label; longer ones end in an ellipsis
ABOVE = 0.2
WIDEST = 14.0
SMALLEST = 99  # subwords that make cells as small as they get
MANY = 4096  # cells: more are an image in vector graphics too
TALLEST = 150.0  # inches of all maps; a PDF has at most 200


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """Which sentence a figure shows."""

    sentence: str | None = option(None, "The sentence to look at.", metavar="TEXT")
    index: int | None = option(None, "Or line N, from 0, of the run's own data.", metavar="N", minimum=0)
    target: str | None = option(None, "The other side, for models that have one.", metavar="TEXT")

    def __post_init__(self) -> None:
        check_one_given({"--sentence TEXT": self.sentence, "--index N, a sentence of the run": self.index})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(SentenceOptions):
    """Options of the figure."""

    heads: str = option(help="Heads of one site: 2.5,3.* or cross.0.*", metavar="LIST")


def sentence_figure(
    run: Study, *, heads: str, sentence: str | None = None, index: int | None = None, target: str | None = None
) -> Figure:
    """The weights of `heads` on one sentence, for which the run's checkpoint is opened once more."""
    chosen = select_heads(heads, run.head_layout)
    sites = sorted({str(head.site) for head in chosen})
    if len(sites) != 1:
        problem = f"are of {', '.join(sites)}" if sites else "are none"
        raise ConfigError(f"--heads {heads!r} {problem}; a figure shows heads of one site, draw one for each")
    maps = sentence_attention(run, sentence=sentence, index=index, target=target, heads=chosen)
    return attention_figure(maps.weights, maps.subwords_t, maps.subwords_s, maps.names, run=run)


def attention_figure(
    weights: NDArray[np.floating],
    subwords_t: Sequence[str],
    subwords_s: Sequence[str],
    names: Sequence[str],
    *,
    run: Study | None = None,
) -> Figure:
    """`weights` [n t s] of the heads `names`: queries down, keys across, one scale from 0 to 1."""
    weights = np.asarray(weights, dtype=np.float64)
    expected = (len(names), len(subwords_t), len(subwords_s))
    if weights.shape != expected or not weights.size:
        raise ConfigError(
            f"attention maps need weights [heads queries keys] of shape {expected}, none of them 0; got {weights.shape}"
        )
    rows, columns = (
        [shorten(visible(subword) or "∅", LONGEST, TICK) for subword in side] for side in (subwords_t, subwords_s)
    )
    label_width, label_height = (max(text_width(subword, TICK) for subword in side) + 0.08 for side in (rows, columns))
    usual = _pitch(max(expected[1:]))
    beside = label_width + 0.1
    pitch = cell_pitch(usual, len(columns), besides=beside + BAR, least=_pitch(SMALLEST))
    for across in range(len(names), 1, -1):  # smaller cells where more maps then stand in a line of the asked width
        smaller = cell_pitch(usual, across * len(columns), besides=across * (beside + GAP) - GAP + BAR, least=0)
        if smaller >= _pitch(SMALLEST):
            pitch = min(pitch, smaller)
            break
    wide, tall = len(columns) * pitch, len(rows) * pitch
    most = widest(WIDEST, besides=BAR)
    title = min(max(text_width(name, LABEL, weight="bold") for name in names), most - label_width - 0.1)
    size = (label_width + max(wide, title) + 0.1, ABOVE + tall + label_height)
    laid = flow(list(repeat(size, len(names))), even_width(len(names), size[0], most, gap=GAP), gap=(GAP, 0.2))
    if laid.height > TALLEST:
        raise ConfigError(
            f"maps of {len(names)} heads with {len(rows)} × {len(columns)} tokens are {laid.height:.0f} inches high, "
            f"of at most {TALLEST:.0f}; choose fewer --heads or a shorter sentence"
        )
    page = Page(
        laid.width + BAR,
        laid.height + 0.14,
        title="Attention weights",
        subtitle="rows: queries, columns: keys" + (f" · {run.model}" if run else ""),
        footer=run.signature if run else "",
    )
    norm = Normalize(0, 1)
    for name, matrix, (x, y) in zip(names, weights, laid.corners, strict=True):
        axes = page.axes(x + label_width, y + ABOVE, wide, tall)
        _draw(axes, matrix, norm, rows, columns)
        axes.set_title(name, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
    bar = ScalarMappable(norm, "Blues")
    page.color_bar(laid.width + 0.05, ABOVE, min(tall, 2.0), bar, label="weight")
    return page.finished()


def _draw(axes: Axes, weights: NDArray[np.float64], norm: Normalize, rows: list[str], columns: list[str]) -> None:
    queries, keys = weights.shape
    edges = np.arange(keys + 1), np.arange(queries + 1)
    axes.pcolormesh(*edges, weights, cmap="Blues", norm=norm, rasterized=weights.size > MANY)
    axes.set(xlim=(0, keys), ylim=(queries, 0))
    axes.set_yticks(np.arange(queries) + 0.5, rows, parse_math=False)
    axes.set_xticks(np.arange(keys) + 0.5, columns, parse_math=False, rotation=90)
    for line in range(1, max(queries, keys)):  # faint rules lead the eye from a cell to its subwords
        if line < queries:
            axes.axhline(line, color="#eeeeee", linewidth=0.25)
        if line < keys:
            axes.axvline(line, color="#eeeeee", linewidth=0.25)


def _pitch(subwords: int) -> float:
    """Inches of a cell; never below what a label of 6.5 points needs."""
    return 0.18 if subwords <= 14 else 0.14 if subwords <= 30 else 0.105


ATTENTION = PlotFigure(
    "attention",
    "Attention maps of chosen heads over one sentence.",
    sentence_figure,
    Options=AttentionOptions,
    source=RUN,
    runs=1,
    order=310,
)
