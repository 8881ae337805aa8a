"""`headscope translate`: lines of stdin to lines of stdout, in their order."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from headscope.cli import console
from headscope.cli.options import options_from, read
from headscope.config.commands import TranslateConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headscope.config.commands import TranslateOptions, Translation
    from headscope.distributed import Processes
    from headscope.formats.base import Checkpoint


@options_from(TranslateConfig, json=False)
def translate(values: Mapping[str, Any]) -> None:
    """Translate: headscope translate CKPT < text > text. Empty lines stay empty.

    Processes of torchrun share the lines.
    """
    from headscope.api.commands import load
    from headscope.config.commands import TranslateOptions
    from headscope.distributed import process_group
    from headscope.model.mixing.experts import one_expert

    config = read(TranslateConfig, values)
    options = TranslateOptions.of(config)
    with process_group() as processes:
        window = processes.on_main(lambda: 1 if sys.stdin.isatty() else config.window)
        model = load(config.checkpoint, **config.opening)
        with model.masked(config.mask or ()), one_expert(model.checkpoint.model, config.expert, seed=config.seed):
            _translate(model.checkpoint, options, config.batch_tokens, window, processes)


def _translate(
    checkpoint: Checkpoint, options: TranslateOptions, batch_tokens: int | None, window: int, processes: Processes
) -> None:
    from headscope.data.encoded import UnknownSubwords
    from headscope.data.lines import lines_of
    from headscope.evaluation.translation import decoded_lines, shared_lines, translate_lines
    from headscope.progress import no_progress

    limit = checkpoint.reads(options.longest)
    cut: list[int] = []
    unknown_counts = UnknownSubwords()
    with console.progress("translating", None, unit="lines") if processes.main else no_progress("", 0) as step:
        lines = decoded_lines(lines_of(sys.stdin.buffer, name="stdin")) if processes.main else ()
        translations = translate_lines(
            checkpoint,
            shared_lines(lines, processes, window=window),
            options=options,
            tokens=batch_tokens,
            window=window,
            cut=cut.append,
            unknown=unknown_counts,
            progress=step,
            processes=processes,
        )
        if not processes.main:
            for _ in translations:
                pass
            return
        number, complete = _write(translations, options, window)
    for warning in unknown_counts.remarks(checkpoint)[1:]:  # the share itself is no news where little is unknown
        console.say(warning)
    if not number and complete:
        console.say("there is nothing on stdin to translate: headscope translate CKPT < text > translation")
    if not complete:
        console.say(f"interrupted: {number} lines are translated")
        raise typer.Exit(130)
    if cut:
        cut_lines = ", ".join(map(str, sorted(cut)[:8])) + (" …" if len(cut) > 8 else "")
        console.say(f"cut off at {limit} subwords (--max-length): {len(cut)} lines ({cut_lines})")


def _write(translations: Iterator[list[Translation]], options: TranslateOptions, window: int) -> tuple[int, bool]:
    """Write translations as they are computed; returns the number of lines, and False if Ctrl-C ended it."""
    number = 0
    try:
        for nbest in translations:
            sys.stdout.buffer.write(b"".join(line.encode() + b"\n" for line in _output_lines(number, nbest, options)))
            number += 1
            if number % window == 0:
                sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        if not number:
            raise
        sys.stdout.buffer.flush()
        return number, False
    return number, True


def _output_lines(number: int, translations: Sequence[Translation], options: TranslateOptions) -> Iterator[str]:
    for translation in translations:
        score = f"{translation.score:.4f}\t" if options.scores else ""
        yield (f"{number}\t" if options.best > 1 else "") + score + translation.text
