"""Commands about one checkpoint: `headscope show`, `convert`, `evaluate` and `translate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.next_commands import CHECKPOINT_OPTIONS, HALF, TEXT_OPTIONS, command_line
from headscope.cli.options import options_from
from headscope.config.commands import ConvertConfig, EvaluateConfig, ShowConfig, TranslateConfig

if TYPE_CHECKING:
    from headscope.config.commands import TranslateOptions, Translation
    from headscope.evaluation.quality import Evaluation
    from headscope.evaluation.run import EachHead


@options_from(ShowConfig, config=False, verbose=True)
def show(config: ShowConfig, printer: Printer) -> None:
    """Print what a checkpoint is, its heads, what removing them can save, and what can be measured."""
    from headscope.api.model import Model
    from headscope.formats.base import open_configured

    model = Model(open_configured(config), companions=config)
    overview = model.overview()
    if config.mask:
        overview.record["mask"] = [str(head) for head in model.select(config.mask)]
    printer.show(overview, commands=after_overview(overview.record, vars(config)))


def after_overview(record: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Commands that measure, rank and remove heads on the sample text; none for a model that reads sound."""
    from headscope.assets import sample
    from headscope.formats.base import FORMATS

    sites = {site["site"] for site in record["sites"]}
    text = {"source": sample("en"), "target": sample("de") if {"cross", "encoder-self"} <= sites else None}
    needs_dictionaries = not record["tokenizer"] and "dicts" in FORMATS.get(record["format"]).takes
    if needs_dictionaries:
        text["dicts"] = Path("DIR")
    if record["reads"] != "text" or not (record["tokenizer"] or needs_dictionaries):
        return
    path, options_used, names = record["path"], {**options, **text}, (*TEXT_OPTIONS, *CHECKPOINT_OPTIONS)
    for purpose, words, ending in (
        ("What each head does", ("analyze", path), "run"),
        ("Which heads matter", ("analyze", path, "--importance"), "importance"),
        ("A smaller model", ("prune", "shrink", path, "--keep-fraction", HALF), "small"),
    ):
        out = f"{PurePath(path).name}-{ending}"
        yield purpose, command_line(*words, "--out", out, options=options_used, names=names)


@options_from(ConvertConfig, config=False)
def convert(config: ConvertConfig, printer: Printer) -> None:
    """Write a fairseq, MHR, story-of-heads or native Transformer for Hugging Face, fairseq or headscope.

    Or a model, also one whose heads were removed, for an engine.

    Matrices that mix heads are folded into the output projections for Hugging Face; for fairseq they stay, as its
    fork MHR has them. What was written is read again and must give the same logits, else nothing is left behind.
    What the format cannot express is refused.
    """
    from headscope.api.model import Model
    from headscope.export.convert import check_target_format
    from headscope.formats.base import open_configured

    check_target_format(config.to)
    options = {name: getattr(config, name) for name in ("quantize", "hub_name", "hub_public", "force")}
    result = Model(open_configured(config), companions=config).convert(config.out, to=config.to, **options)
    commands = [("What it is", command_line("show", result.path))] if result.readable else []
    printer.show(result, out=result.folder, commands=commands)


@options_from(EvaluateConfig, verbose=True)
def evaluate(config: EvaluateConfig, printer: Printer) -> None:
    """Score translations, how well the model predicts a text, or how near it is to the intact one.

    Processes of torchrun share the text.

    Perplexity is exp(Σ -log p / tokens), accuracy the share of tokens that the model finds likeliest: over every token
    of the references and the one that closes each (teacher-forced); for decoders alone over every token that follows
    another; for encoders alone over every token, hidden. Of classifiers both, and macro-F1, are over the --labels. The
    cosine and the relative l2 distance compare final states, pooled (the mean over a sentence) or token by token, with
    those of the intact model, --against.
    """
    from headscope.distributed import process_group
    from headscope.evaluation.run import run_each_head, run_evaluation

    with process_group() as processes:
        run = run_each_head if config.each_head else run_evaluation
        result: EachHead | Evaluation = run(config, progress=console.progress, processes=processes)
    if not processes.main:
        return
    out = config.out if config.each_head else config.per_sentence
    files = [f"Results: {out}"] if out and result.complete else []
    printer.show(result, files=files)
    if not result.complete:
        console.end_interrupted(": the numbers are of the sentences that were done, see n= in the signature")


@options_from(TranslateConfig, json=False)
def translate(config: TranslateConfig, printer: Printer) -> None:
    """Translate: headscope translate CKPT < text > text. Empty lines stay empty.

    Processes of torchrun share the lines.
    """
    from headscope.api.model import Model
    from headscope.data.encoded import UnknownSubwords
    from headscope.distributed import process_group
    from headscope.evaluation.translation import shared_lines, translate_lines
    from headscope.files.reading import lines_of
    from headscope.formats.base import open_configured
    from headscope.model.mixing.experts import one_expert
    from headscope.progress import no_progress

    counts = UnknownSubwords()
    with process_group() as processes:
        window = processes.on_main(lambda: 1 if sys.stdin.isatty() else config.window)
        model = Model(open_configured(config), companions=config)
        checkpoint, progress = model.checkpoint, console.progress if processes.main else no_progress
        with (
            model.masked(config.mask or ()),
            one_expert(checkpoint.model, config.expert, seed=config.seed),
            progress("translating", None, unit="lines") as step,
        ):
            lines = lines_of(sys.stdin.buffer, name="stdin") if processes.main else ()
            translations = translate_lines(
                checkpoint,
                shared_lines(lines, processes, window=window),
                options=config.search,
                tokens=config.batch_tokens,
                window=window,
                unknown=counts,
                progress=step,
                processes=processes,
            )
            if not processes.main:
                for _ in translations:
                    pass
                return
            number, complete = write_translations(translations, config.search, window)
    for warning in counts.remarks(checkpoint)[1:]:  # the first remark is the share of unknown subwords
        console.say(warning)
    if not number and complete:
        console.say("there is nothing on stdin to translate: headscope translate CKPT < text > translation")
    if not complete:
        console.end_interrupted(f": {number} lines are translated")
    if counts.cut:
        cut_lines = ", ".join(map(str, sorted(counts.cut)[:8])) + " …" * (len(counts.cut) > 8)
        limit = checkpoint.source_length(config.max_length)
        console.say(f"cut off at {limit} subwords (--max-length): {len(counts.cut)} lines ({cut_lines})")


def write_translations(
    translations: Iterator[list[Translation]], options: TranslateOptions, window: int
) -> tuple[int, bool]:
    """Write translations to stdout as they are computed; returns the number of lines, and False after Ctrl-C."""
    number, stdout = 0, sys.stdout.buffer
    try:
        for nbest in translations:
            for translation in nbest:
                prefix = f"{number}\t" if options.nbest > 1 else ""
                score = f"{translation.score:.4f}\t" if options.scores else ""
                stdout.write(f"{prefix}{score}{translation.text}\n".encode())
            number += 1
            if number % window == 0:
                stdout.flush()
    except KeyboardInterrupt:
        if not number:
            raise
        return number, False
    finally:
        stdout.flush()
    return number, True
