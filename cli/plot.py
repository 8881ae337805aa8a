"""`headscope plot`: redraw the figures of finished runs as PNG, SVG or PDF, or all of them as one HTML page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.bounds import WHOLE
from headscope.cli.failures import Application
from headscope.cli.help_text import PlainGroup
from headscope.cli.options import option_of, parameter, read
from headscope.cli.plot_options import FORCE, JSON, FigureOutput, drawing, say, shared_command
from headscope.config.option import declared_options
from headscope.engine.declarations import AnalysisFigure, analysis_figures, imported
from headscope.errors import ConfigError, check_one_given

if TYPE_CHECKING:  # matplotlib and pandas take a second to import: only inside the commands
    from matplotlib.figure import Figure

    from headscope.heads import HeadId
    from headscope.report.readers.run import AnalysisRun


class Figures(PlainGroup):
    """The commands of this file, and one for every figure that an analysis declares."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, the figures of analyses after those of whole runs."""
        names = super().list_commands(ctx)
        return [*names[:2], *analysis_figures(), *names[2:]]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a figure."""
        if cmd_name not in analysis_figures():
            return super().get_command(ctx, cmd_name)
        _, figure = analysis_figures()[cmd_name]
        return _command(figure)


app = Application(
    cls=Figures, help="Draw figures from the files of finished runs.", no_args_is_help=True, add_completion=False
)

RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="Directory that `headscope analyze --out` wrote.")]
RunsArg = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Directories that `headscope analyze --out` wrote.")
]
FilesArg = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|PICKLE…", help="Directories of runs, pickles of runs, or pickles that the MHR fork wrote."
    ),
]
TrainedArg = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Directories that `headscope train --out` wrote.")
]
Measure = Annotated[str, typer.Option("--measure", metavar="NAME", help="Column of heads.csv.")]
Range = Annotated[
    str | None,
    typer.Option("--range", metavar="LOW,HIGH", help="Range of the scale, such as 0,1; default: that of the measure."),
]


@app.command()
@drawing
def heads(
    runs: FilesArg,
    output: FigureOutput,
    measure: Annotated[
        list[str] | None,
        typer.Option("--measure", metavar="NAME", help="Column of heads.csv; repeat it for several maps."),
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Sort the heads of each layer by the measure.")] = False,
    range: Range = None,
) -> None:
    """Layers × heads maps of measures, with the functions of the heads; also of the MHR fork's confidence files."""
    from headscope.report.figures.headmap import heads_figure
    from headscope.report.readers.fork import confidence_run

    draw = _Draw("heads", lambda run: heads_figure(run, measure, sort=sort, range=range), from_pickle=confidence_run)
    draw(runs, output)


@app.command()
@drawing
def functions(runs: RunsArg, output: FigureOutput) -> None:
    """Which function each head has, and how many heads of each layer have it."""
    from headscope.report.figures.functionmap import functions_figure

    _Draw("functions", functions_figure)(runs, output)


@app.command()
@drawing
def rankings(
    runs: RunsArg,
    output: FigureOutput,
    ranking: Annotated[
        list[str] | None,
        typer.Option("--ranking", metavar="NAME", help="Column of heads.csv; repeat it; default: all that rank heads."),
    ] = None,
) -> None:
    """Rankings of heads against each other: how much they agree, with intervals, and the ranks of all heads."""
    from headscope.report.figures.rankings import rankings_figure

    _Draw("rankings", lambda run: rankings_figure(run, ranking))(runs, output)


@app.command()
@drawing
def faithfulness(
    runs: RunsArg,
    output: FigureOutput,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="Curves of: loss (unasked), accuracy, bleu, or the objective's."),
    ] = None,
) -> None:
    """Heads removed in the order of every ranking: which ranking deserves belief (`analyze --faithfulness`)."""
    from headscope.report.figures.faithfulness import faithfulness_figure

    _Draw("faithfulness", lambda run: faithfulness_figure(run, metric))(runs, output)


@app.command()
@drawing
def compare(
    first: RunArg, second: RunArg, output: FigureOutput, measure: Measure = "confidence", range: Range = None
) -> None:
    """Two runs side by side: both maps, their difference, and head against head."""
    from headscope.report.figures.compare import compare_figure
    from headscope.report.readers.checkpoint import read_run

    output.check()
    pair = read_run(first), read_run(second)
    output.write("compare", [run.name for run in pair], compare_figure(*pair, measure, range=range))


@app.command()
@drawing
def attention(
    run: RunArg,
    output: FigureOutput,
    heads: Annotated[
        str,
        typer.Option("--heads", metavar="LIST", help="Heads of one site: encoder-self.2.5,encoder-self.3.*"),
    ],
    sentence: Annotated[str | None, typer.Option("--sentence", metavar="TEXT", help="The sentence to look at.")] = None,
    index: Annotated[
        int | None,
        typer.Option("--index", min=0, max=WHOLE - 1, metavar="N", help="Or line N, from 0, of the run's own data."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="TEXT", help="The other side, for models that have one.")
    ] = None,
) -> None:
    """Attention maps of chosen heads over one sentence."""
    check_one_given({"--sentence TEXT": sentence, "--index N, a sentence of the run": index})
    from headscope.report.figures.attention import attention_figure
    from headscope.report.readers.checkpoint import read_run
    from headscope.report.readers.sentence import sentence_attention

    output.check()
    opened = read_run(run)
    head_ids = _of_one_site(heads, opened)
    maps = sentence_attention(opened, sentence=sentence, index=index, target=target, heads=head_ids)
    figure = attention_figure(maps.weights, maps.subwords_t, maps.subwords_s, maps.names, run=opened)
    output.write("attention", [opened.name], figure)


@app.command()
@drawing
def training(
    runs: TrainedArg,
    output: FigureOutput,
    axis: Annotated[
        str, typer.Option("--axis", metavar="NAME", help="What runs from left to right: update, tokens or seconds.")
    ] = "update",
) -> None:
    """Loss, BLEU, and histories of gates, mixing matrices and swaps, of several training runs together."""
    from headscope.report.figures.training import load_history, training_figure

    output.check()
    histories = [load_history(path) for path in runs]
    output.write("training", [history.name for history in histories], training_figure(histories, axis=axis))


@app.command()
@drawing
def gates(runs: TrainedArg, output: FigureOutput) -> None:
    """Gates and experts of a mixture (`train mae`) while they learn: entropies, and how much each expert counts."""
    from headscope.report.figures.experts import gates_figure
    from headscope.report.figures.training import load_history

    _Draw("gates", gates_figure, load=load_history)(runs, output)


@app.command()
@drawing
def confidence(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|DIR…",
            help="Directories that `headscope train --save-confidence` wrote, or of the MHR fork's epoch-N.pkl.",
        ),
    ],
    output: FigureOutput,
    range: Range = None,
) -> None:
    """Confidence of every head on the training batches, from epoch to epoch."""
    from headscope.report.figures.confidence import confidence_figure, load_confidence

    _Draw("confidence", lambda run: confidence_figure(run, range=range), load=load_confidence)(runs, output)


@app.command()
@drawing
def pruning(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="SWEEP|RUN…", help="Directories that `headscope prune sweep`, `l0`, `subset` or `rank` wrote."
        ),
    ],
    output: FigureOutput,
    figure: Annotated[
        str | None,
        typer.Option(
            "--figure",
            metavar="quality|sites|functions|gates",
            help="quality: metric against heads kept; sites: heads kept at each site; functions: of the survivors; "
            "gates: while they learn. Default: quality for sweeps, sites for other runs.",
        ),
    ] = None,
    functions: Annotated[
        Path | None,
        typer.Option("--functions", metavar="RUN", help="A run of `headscope analyze` that labels the heads."),
    ] = None,
) -> None:
    """What pruning costs, where the heads that stay are, which functions survive, and how gates learnt."""
    from headscope.report.figures.pruning import pruning_figure
    from headscope.report.readers.pruning_runs import load_pruned

    output.check()
    pruned = load_pruned(runs, functions=functions)
    output.write("pruning", [run.name for run in pruned], pruning_figure(pruned, figure))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…", help="Directories that `headscope analyze`, `prune` or `train` wrote, in any order."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="PAGE.html", help="The page to write.")],
    force: FORCE = False,
    as_json: JSON = False,
) -> None:
    """One HTML page about runs, which works from disk: findings, maps, table, detail of every head, comparison."""
    from headscope.report.page.write import check_page, write_page

    check_page(out, force=force)
    written = write_page(runs, out, force=force)
    say("report", [([path.resolve().name for path in runs], written)], as_json=as_json)


def _command(figure: AnalysisFigure) -> Any:
    """The command of a figure that an analysis declares."""
    sources = ["RUN", *(["CKPT"] if figure.from_checkpoint else []), *(["PICKLE"] if figure.from_pickle else [])]
    kinds = {"CKPT": "checkpoints", "PICKLE": "pickles that the MHR fork wrote"}
    help = ", ".join(["Directories that `headscope analyze --out` wrote", *(kinds[source] for source in sources[1:])])
    runs = Annotated[list[Path], typer.Argument(metavar=f"{'|'.join(sources)}…", help=f"{help}.")]
    own = [option_of(entry, hint) for entry, hint in declared_options(figure.Options)]

    def command(output: FigureOutput, **values: Any) -> None:
        options = vars(read(figure.Options, values))
        readers = [imported(name) if name else None for name in (figure.from_pickle, figure.from_checkpoint)]
        draw = _Draw(
            figure.stem,
            lambda run: imported(figure.draw)(run, **options),
            from_pickle=readers[0],
            from_checkpoint=readers[1],
        )
        draw(values["runs"], output)

    parameters = [parameter("runs", runs, inspect.Parameter.empty), *own]
    group = Application(add_completion=False)
    group.command(name=figure.name, help=figure.summary)(shared_command(command, parameters))
    return typer.main.get_command(group)


class _Draw:
    """One figure for every run named: all places to write to are checked before anything is drawn.

    `from_pickle` and `from_checkpoint` read a run from a file, where the figure can be drawn from one; `load` reads a
    directory that is no run of `headscope analyze`.
    """

    def __init__(
        self,
        name: str,
        draw: Callable[[Any], Figure],
        *,
        from_pickle: Callable[[Path], AnalysisRun] | None = None,
        from_checkpoint: Callable[[Path], AnalysisRun] | None = None,
        load: Callable[[Path], Any] | None = None,
    ) -> None:
        self.name = name
        self.draw = draw
        self.from_pickle = from_pickle
        self.from_checkpoint = from_checkpoint
        self.load = load

    def __call__(self, paths: Sequence[Path], output: FigureOutput) -> None:
        from headscope.report.layout.save import target_paths, write_figure
        from headscope.report.readers.checkpoint import read_run

        read = self.load or partial(read_run, from_pickle=self.from_pickle, from_checkpoint=self.from_checkpoint)
        runs = [read(path) for path in paths]
        targets = target_paths(output.out, [run.path for run in runs], figure=self.name, force=output.force)
        written = []
        for run, target in zip(runs, targets, strict=True):
            written.append(([run.name], write_figure(self.draw(run), target, dpi=output.dpi, force=output.force)))
        output.say(self.name, written)


def _of_one_site(names: str, run: AnalysisRun) -> list[HeadId]:
    """The heads that `--heads` selects; subwords differ between sites, so a figure shows only one."""
    from headscope.heads import select_heads

    head_ids = select_heads(names, run.head_layout)
    sites = sorted({str(head.site) for head in head_ids})
    if len(sites) != 1:
        problem = f"are of {', '.join(sites)}" if sites else "are none"
        raise ConfigError(f"--heads {names!r} {problem}; a figure shows heads of one site, draw one for each")
    return head_ids
