"""Attention on one sentence: maps of chosen heads with their subwords, and every head as a tiny matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.config import option
from headscope.data.offsets import visible
from headscope.errors import CheckpointError, ConfigError, check_one_given, flag
from headscope.heads import SITES, refuse_absent, select_heads
from headscope.report.charts import SHARES, hide_frame, number_cells
from headscope.report.registry import RUN, PlotFigure
from headscope.report.sheet import RULE, Sheet, em, shorten, text_width
from headscope.results.study import Study
from headscope.results.study_tables import RunError

if TYPE_CHECKING:
    from headscope.data.corpus import Sentence
    from headscope.engine.attention_maps import Maps
    from headscope.formats.base import Checkpoint

LONGEST = 9.0  # ems of a subword's label; longer ones end in an ellipsis
MAX_CELLS = 4096  # a map with more cells is a bitmap even in SVG and PDF
GAP_DIVISOR = 12  # width of a small matrix over that of the gap beside it
SIDE = 6.5  # ems of a small matrix
Matrices = Sequence[NDArray[np.floating]]


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """The sentence that a figure shows."""

    sentence: str | None = option(None, "The sentence to look at.", metavar="TEXT")
    index: int | None = option(None, "Or line N, from 0, of the run's own data.", metavar="N", minimum=0)
    target: str | None = option(None, "The other side, for models that have one.", metavar="TEXT")

    def __post_init__(self) -> None:
        check_one_given({f"{flag.sentence} TEXT": self.sentence, f"{flag.index} N, a sentence of the run": self.index})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(SentenceOptions):
    """Options of the figure."""

    heads: str = option(help="Heads of one site: 2.5,3.* or cross.0.*", metavar="LIST")


def draw_attention(run: Study, sheet: Sheet, options: AttentionOptions) -> None:
    """The attention weights of `heads` on one sentence; opens the run's checkpoint again."""
    from headscope.description.tokens import TokenReader

    heads = select_heads(options.heads, run.head_layout)
    sites = sorted({str(head.site) for head in heads})
    if len(sites) != 1:
        problem = f"are of {', '.join(sites)}" if sites else "are none"
        raise ConfigError(f"{flag.heads} {options.heads!r} {problem}; a figure shows one site, draw one for each")
    checkpoint, _, maps = sentence_maps(run, options)
    refuse_absent(heads, checkpoint.layout)
    site = heads[0].site
    if (site, heads[0].layer) not in maps.tensors.calls:
        raise ConfigError(f"{site} heads need the translation too; give {flag.target} TEXT")
    weights = [maps.tensors[site, head.layer]["weights"][0, head.head].float().cpu().numpy() for head in heads]
    words = [TokenReader.of(checkpoint, side).display(maps.sides[side].ids) for side in maps.side_names(site)]
    draw_maps(sheet, dict(zip(map(str, heads), weights, strict=True)), words, model=run.model)


def sentence_maps(run: Study, options: SentenceOptions) -> tuple[Checkpoint, Sentence, Maps]:
    """Open the run's checkpoint, and capture the attention of all heads on one sentence."""
    from headscope.config import Companions
    from headscope.config.option import take_config
    from headscope.data.batching import DEFAULT_LIMIT
    from headscope.data.corpus import Sentence
    from headscope.engine.attention_maps import attention_maps
    from headscope.formats.base import open_checkpoint

    settings, source = run.record.get("options", {}), run.record.get("checkpoint", {})
    if source["path"].endswith(" in memory") and not Path(source["path"]).exists():
        raise RunError(
            f"{source['path']} has no files to open again; save it with its tokenizer, and analyse its folder"
        )
    checkpoint = open_checkpoint(
        source["path"], format=source.get("format"), companions=take_config(Companions, settings)
    )
    if checkpoint.digest != source.get("digest"):
        raise CheckpointError(f"{checkpoint.path} has changed since {run.folder} measured it; analyse it again")
    if options.index is not None:
        line = _line(run, options.index)
    else:
        line = Sentence(0, options.sentence or "", options.target)
    off = select_heads(settings["mask"], checkpoint.layout) if settings.get("mask") else []
    return checkpoint, line, attention_maps(checkpoint, line, limit=settings.get("limit", DEFAULT_LIMIT), off=off)


def _line(run: Study, index: int) -> Sentence:
    """Line `index` of the run's texts."""
    from headscope.config import TextFiles
    from headscope.data.corpus import open_text

    data, sentences = dict(run.record.get("data", {})), run.record.get("options", {}).get("typed") or {}
    data["source"] = data.get("source") or data.get("clean")
    texts = {name: Path(data[name]) for name in ("source", "target", "source2", "labels") if data.get(name)}
    parse = data.get("parse")
    if not texts and not sentences and parse in (None, "", "stanza"):
        raise ConfigError(f"run {run.name} does not keep its list of sentences; give {flag.sentence} TEXT")
    files = TextFiles(**(texts | sentences), pairs=bool(data.get("pairs")))
    corpus = open_text(files, parses=Path(parse) if parse and parse != "stanza" else None, max_sentences=index + 1)
    if corpus.count <= index:
        raise ConfigError(f"the run's data have {corpus.count} lines; {flag.index} counts from 0")
    *_, last = corpus
    return last


def draw_maps(
    sheet: Sheet, maps: Mapping[str, NDArray[np.floating]], words: Sequence[Sequence[str]], *, model: str
) -> None:
    """Draw the weights [t s] of heads, queries down and keys across, on one colour scale from 0 to 1.

    `words` are the subwords of the queries and of the keys.
    """
    size = float(rcParams["xtick.labelsize"])
    rows, columns = ([shorten(visible(word) or "∅", LONGEST * em(), size) for word in side] for side in words)
    row_margin, below = (max(text_width(word, size) for word in side) / em() + 2.0 for side in (rows, columns))
    pitch = 1.9 if max(len(rows), len(columns)) <= 14 else 1.45
    extent = (max(len(columns) * pitch, 8.0), len(rows) * pitch)
    panels = sheet.panels(list(maps), [extent] * len(maps), bar=True, beside=row_margin, above=below + 2.5)
    for axes, weights in zip(panels, maps.values(), strict=True):
        edges = np.arange(len(columns) + 1), np.arange(len(rows) + 1)
        looks: dict[str, Any] = {"edgecolors": "#eeeeee", "linewidth": 0.25, "rasterized": weights.size > MAX_CELLS}
        shades = axes.pcolormesh(*edges, weights.astype(np.float64), cmap="Blues", norm=SHARES, **looks)
        axes.set(ylim=(len(rows), 0))
        axes.set_yticks(np.arange(len(rows)) + 0.5, rows, parse_math=False)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns, parse_math=False, rotation=90)
        axes.tick_params(length=0)
    sheet.scale(shades, panels, "weight")
    sheet.headline("Attention weights", f"rows: queries, columns: keys · {model}")


ATTENTION = PlotFigure(
    "attention",
    "Attention maps of chosen heads over one sentence.",
    draw_attention,
    Options=AttentionOptions,
    source=RUN,
    runs=1,
    order=310,
)


def draw_glance(run: Study, sheet: Sheet, options: SentenceOptions) -> None:
    """All heads on one sentence: for each site a grid of small matrices, queries down and keys across."""
    checkpoint, line, maps = sentence_maps(run, options)
    sites: dict[str, Matrices] = {}
    for site in SITES:
        layers = sorted(layer for (other, layer), heads in checkpoint.layout.items() if other is site and heads)
        if layers and all((site, layer) in maps.tensors.calls for layer in layers):
            sites[site.value] = [maps.tensors[site, layer]["weights"][0].float().cpu().numpy() for layer in layers]
    if not sites:
        raise ConfigError(f"no site was seen on this sentence; give {flag.target} TEXT for an encoder-decoder")
    sizes = [(max(map(len, layers)) * SIDE, len(layers) * SIDE) for layers in sites.values()]
    panels = sheet.panels(list(sites), sizes, bar=True, share="")
    for axes, matrices in zip(panels, sites.values(), strict=True):
        shades = _draw_site(axes, matrices)
    sheet.scale(shades, panels, "weight")
    sheet.headline("Every head on one sentence", " → ".join(filter(None, (line.source, line.target))))


def _draw_site(axes: Axes, layers: Matrices) -> AxesImage:
    """Draw the matrices [h t s] of all layers as one image, with gaps between them."""
    slots, (_, t, s) = max(map(len, layers)), layers[0].shape
    down, across = t + max(1, t // GAP_DIVISOR), s + max(1, s // GAP_DIVISOR)
    image = np.full((len(layers) * down, slots * across), np.nan)
    for layer, heads in enumerate(layers):
        for head, weights in enumerate(heads):
            image[layer * down : layer * down + t, head * across : head * across + s] = weights
            axes.add_patch(Rectangle((head, layer), s / across, t / down, fill=False, edgecolor=RULE, linewidth=0.4))
    hide_frame(axes)
    number_cells(axes, x=slots, y=len(layers))
    looks: dict[str, Any] = {"cmap": "Blues", "norm": SHARES, "aspect": "auto", "interpolation": "nearest"}
    axes.set(xlabel="head", ylabel="layer")
    return axes.imshow(image, extent=(0, slots, len(layers), 0), **looks)


GLANCE = PlotFigure(
    "glance",
    "Every head on one sentence: a tiny matrix a head, layers × heads.",
    draw_glance,
    Options=SentenceOptions,
    source=RUN,
    runs=1,
    order=305,
)
