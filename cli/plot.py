"""`headscope plot`: redraw the figures of finished runs as PNG, SVG or PDF, or all of them as one HTML page."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from headscope.bounds import WHOLE
from headscope.cli.failures import Application
from headscope.cli.options import declared, option_of, parameter, value_of
from headscope.engine.declarations import AnalysisFigure, analysis_figures, imported
from headscope.errors import ConfigError, check_one_given

if TYPE_CHECKING:  # matplotlib and pandas take a second to import: only inside the commands
    from matplotlib.figure import Figure

    from headscope.heads import HeadId
    from headscope.report.readers.run import AnalysisRun


class Figures(TyperGroup):
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
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="PATH",
        help="File to write: .png, .svg or .pdf. For several runs a directory, or a name with {run} in it.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Dpi = Annotated[int, typer.Option("--dpi", min=30, max=2400, help="Dots per inch of PNG.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]
Measure = Annotated[str, typer.Option("--measure", metavar="NAME", help="Column of heads.csv.")]
DPI = 200


@app.command()
def heads(
    runs: FilesArg,
    out: Out,
    measure: Annotated[
        list[str] | None,
        typer.Option("--measure", metavar="NAME", help="Column of heads.csv; repeat it for several maps side by side."),
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Sort the heads of each layer by the measure.")] = False,
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Layers × heads maps of measures, with the functions of the heads; also of the MHR fork's confidence files."""
    from headscope.report.figures.headmap import heads_figure
    from headscope.report.readers.fork import confidence_run

    draw = _Draw("heads", lambda run: heads_figure(run, measure, sort=sort), from_pickle=confidence_run)
    draw(runs, out, force=force, dpi=dpi, as_json=as_json)


@app.command()
def functions(runs: RunsArg, out: Out, force: Force = False, dpi: Dpi = DPI, as_json: AsJson = False) -> None:
    """Which function each head has, and how many heads of each layer have it."""
    from headscope.report.figures.functionmap import functions_figure

    _Draw("functions", functions_figure)(runs, out, force=force, dpi=dpi, as_json=as_json)


@app.command()
def faithfulness(
    runs: RunsArg,
    out: Out,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="Curves of: loss (unasked), accuracy, bleu, or the objective's."),
    ] = None,
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Heads removed in the order of every ranking: which ranking deserves belief (`analyze --faithfulness`)."""
    from headscope.report.figures.faithfulness import faithfulness_figure

    draw = _Draw("faithfulness", lambda run: faithfulness_figure(run, metric))
    draw(runs, out, force=force, dpi=dpi, as_json=as_json)


@app.command()
def compare(
    first: RunArg,
    second: RunArg,
    out: Out,
    measure: Measure = "confidence",
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Two runs side by side: both maps, their difference, and head against head."""
    from headscope.report.figures.compare import compare_figure
    from headscope.report.layout.save import check_path, write_figure
    from headscope.report.readers.checkpoint import read_run

    check_path(out, force=force)
    pair = read_run(first), read_run(second)
    figure = compare_figure(*pair, measure)
    names = [run.name for run in pair]
    _say("compare", [(names, write_figure(figure, out, dpi=dpi, force=force))], as_json=as_json)


@app.command()
def attention(
    run: RunArg,
    out: Out,
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
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Attention maps of chosen heads over one sentence."""
    check_one_given({"--sentence TEXT": sentence, "--index N, a sentence of the run": index})
    from headscope.report.figures.attention import attention_figure
    from headscope.report.layout.save import check_path, write_figure
    from headscope.report.readers.checkpoint import read_run
    from headscope.report.readers.sentence import sentence_attention

    check_path(out, force=force)
    opened = read_run(run)
    head_ids = _of_one_site(heads, opened)
    maps = sentence_attention(opened, sentence=sentence, index=index, target=target, heads=head_ids)
    figure = attention_figure(maps.weights, maps.subwords_t, maps.subwords_s, maps.names, run=opened)
    written = write_figure(figure, out, dpi=dpi, force=force)
    _say("attention", [([opened.name], written)], as_json=as_json)


@app.command()
def training(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories that `headscope train --out` wrote.")],
    out: Out,
    axis: Annotated[
        str, typer.Option("--axis", metavar="NAME", help="What runs from left to right: update, tokens or seconds.")
    ] = "update",
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Loss, BLEU, and histories of gates, mixing matrices and swaps, of several training runs together."""
    from headscope.report.figures.training import load_history, training_figure
    from headscope.report.layout.save import check_path, write_figure

    check_path(out, force=force)
    histories = [load_history(path) for path in runs]
    figure = training_figure(histories, axis=axis)
    written = write_figure(figure, out, dpi=dpi, force=force)
    _say("training", [([history.name for history in histories], written)], as_json=as_json)


@app.command()
def confidence(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|DIR…",
            help="Directories that `headscope train --save-confidence` wrote, or of the MHR fork's epoch-N.pkl.",
        ),
    ],
    out: Out,
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """Confidence of every head on the training batches, from epoch to epoch."""
    from headscope.report.figures.confidence import confidence_figure, load_confidence

    draw = _Draw("confidence", confidence_figure, load=load_confidence)
    draw(runs, out, force=force, dpi=dpi, as_json=as_json)


@app.command()
def pruning(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="SWEEP|RUN…", help="Directories that `headscope prune sweep`, `l0`, `subset` or `rank` wrote."
        ),
    ],
    out: Out,
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
    force: Force = False,
    dpi: Dpi = DPI,
    as_json: AsJson = False,
) -> None:
    """What pruning costs, where the heads that stay are, which functions survive, and how gates learnt."""
    from headscope.report.figures.pruning import pruning_figure
    from headscope.report.layout.save import check_path, write_figure
    from headscope.report.readers.pruning_runs import load_pruned

    check_path(out, force=force)
    pruned = load_pruned(runs, functions=functions)
    written = write_figure(pruning_figure(pruned, figure), out, dpi=dpi, force=force)
    _say("pruning", [([run.name for run in pruned], written)], as_json=as_json)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…", help="Directories that `headscope analyze`, `prune` or `train` wrote, in any order."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="PAGE.html", help="The page to write.")],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """One HTML page about runs, which works from disk: findings, maps, table, detail of every head, comparison."""
    from headscope.report.page.write import check_page, write_page

    check_page(out, force=force)
    written = write_page(runs, out, force=force)
    _say("report", [([path.resolve().name for path in runs], written)], as_json=as_json)


def _command(figure: AnalysisFigure) -> Any:
    """The command of a figure that an analysis declares."""
    sources = ["RUN", *(["CKPT"] if figure.from_checkpoint else []), *(["PICKLE"] if figure.from_pickle else [])]
    kinds = {"CKPT": "checkpoints", "PICKLE": "pickles that the MHR fork wrote"}
    help = ", ".join(["Directories that `headscope analyze --out` wrote", *(kinds[source] for source in sources[1:])])
    runs = Annotated[list[Path], typer.Argument(metavar=f"{'|'.join(sources)}…", help=f"{help}.")]
    hints = get_type_hints(figure.Options)
    declared_options = [option_of(field, hints[field.name], None) for field in fields(figure.Options)]

    def command(**values: Any) -> None:
        options = {
            option.name: value_of(option.name, hints[option.name], values[option.name]) for option in declared_options
        }
        readers = [imported(name) if name else None for name in (figure.from_pickle, figure.from_checkpoint)]
        draw = _Draw(
            figure.stem,
            lambda run: imported(figure.draw)(run, **options),
            from_pickle=readers[0],
            from_checkpoint=readers[1],
        )
        draw(values["runs"], values["out"], force=values["force"], dpi=values["dpi"], as_json=values["as_json"])

    none = inspect.Parameter.empty
    parameters = [parameter("runs", runs, none), parameter("out", Out, none), *declared_options]
    parameters += [parameter("force", Force, False), parameter("dpi", Dpi, DPI), parameter("as_json", AsJson, False)]
    group = Application(add_completion=False)
    group.command(name=figure.name, help=figure.summary)(declared(command, parameters))
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
        load: Callable[[Path], AnalysisRun] | None = None,
    ) -> None:
        self.name = name
        self.draw = draw
        self.from_pickle = from_pickle
        self.from_checkpoint = from_checkpoint
        self.load = load

    def __call__(self, paths: Sequence[Path], out: Path, *, force: bool, dpi: int, as_json: bool) -> None:
        from headscope.report.layout.save import target_paths, write_figure
        from headscope.report.readers.checkpoint import read_run

        read = self.load or partial(read_run, from_pickle=self.from_pickle, from_checkpoint=self.from_checkpoint)
        runs = [read(path) for path in paths]
        targets = target_paths(out, runs, figure=self.name, force=force)
        written = []
        for run, target in zip(runs, targets, strict=True):
            written.append(([run.name], write_figure(self.draw(run), target, dpi=dpi, force=force)))
        _say(self.name, written, as_json=as_json)


def _of_one_site(names: str, run: AnalysisRun) -> list[HeadId]:
    """The heads that `--heads` selects; subwords differ between sites, so a figure shows only one."""
    from headscope.heads import select_heads

    head_ids = select_heads(names, run.head_layout)
    sites = sorted({str(head.site) for head in head_ids})
    if len(sites) != 1:
        problem = f"are of {', '.join(sites)}" if sites else "are none"
        raise ConfigError(f"--heads {names!r} {problem}; a figure shows heads of one site, draw one for each")
    return head_ids


def _say(figure: str, written: Sequence[tuple[list[str], Path]], *, as_json: bool) -> None:
    """One line on stdout about the files written."""
    if as_json:
        files: list[dict[str, Any]] = [{"figure": figure, "runs": names, "path": str(path)} for names, path in written]
        typer.echo(json.dumps({"written": files}))
        return
    from rich.console import Console
    from rich.text import Text

    line = Text("wrote ").append(", ".join(str(path) for _, path in written), style="bold")
    Console(soft_wrap=True).print(line)
