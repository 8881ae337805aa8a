"""Options of the MHR fork and of fairseq are answered with ours, which are there."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import typer

from headscope.cli import main
from headscope.cli.mhr_options import FAIRSEQ, FORK, SHORT, TRAIN, counterpart

# mhr.md §6: every flag that the fork registers
REGISTERED = re.findall(
    r"--\S+",
    """
--mask-layer-type --mask-layer --mask-head --mhr-experiment --head-confidence-method --gamma-conf --radius
--loss-start-after --enc-self-alpha-loss-ratio --dec-self-alpha-loss-ratio --dec-enc-alpha-loss-ratio
--use-alphas-bias --cosine-sim-loss --dynamic-type --start-dynamic-mhr --dynamic-swap-frequency
--dynamic-max-switches --dynamic-rest --dynamic-end-epoch --keep-alphas-eval --save-heads-cos_sim
""",
)


def options_of(command: str) -> set[str]:
    """The long options of a command."""
    found: Any = typer.main.get_command(main.app)
    for word in command.split():
        found = found.get_command(None, word)
    return {name for each in found.params for name in (*each.opts, *each.secondary_opts)}


def test_every_flag_of_the_fork_is_in_the_table() -> None:
    assert {flag.replace("_", "-") for flag in REGISTERED} == set(FORK)
    assert all(counterpart(flag) is FORK[flag.replace("_", "-")] for flag in REGISTERED)
    assert not set(FORK) & set(FAIRSEQ) and set(SHORT.values()) <= set(FAIRSEQ)


@pytest.mark.slow
def test_what_is_named_is_there() -> None:
    known: dict[str, set[str]] = {}
    for option, its in {**FORK, **FAIRSEQ}.items():
        assert its.commands or its.note, option
        for command in filter(None, its.commands.split("|")):
            there = known.setdefault(command, options_of(command))
            for named in re.findall(r"--[a-z-]+", its.options):
                assert named in there, (option, command, named)
            assert option not in there or option in its.options, (option, command)
        every = set().union(*known.values())
        for named in re.findall(r"--[a-z][a-z-]*[a-z]", its.note):
            assert named in every or named in options_of(TRAIN) | options_of("analyze"), (option, named)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train mixing --gamma-conf 40", "of the MHR fork; here it is `headscope train mixing --gamma G` (with"),
        ("evaluate x --mask-layer-type enc-enc", "here it is `headscope evaluate --mask SITE.LAYER.HEAD` (enc-enc is"),
        ("train --gamma-conf=40", "here it is `headscope train mixing --gamma G`"),
        ("--save-heads-cos_sim yes", "here it is `headscope analyze --mhr-pickles --set mhr-rows=generate`"),
        ("train swap --adam-betas 0.9,0.98", "of fairseq; here it is `headscope train swap --betas A,B`"),
        ("train --adam-betas=0.9,0.98", "of fairseq; here it is `headscope train baseline --betas A,B`"),
        ("train mixing --eval-bleu-print-samples", "here it is `headscope translate RUN/last < TEXT` (translations"),
        ("train mixing --eval-bleu-remove-bpe", "of fairseq has no counterpart here: BLEU is always of whole words"),
        ("train mixing --eval-bleu-detok moses", "of fairseq has no counterpart here: BLEU of validation is of raw"),
        ("train mixing --use-alphas-bias 1", "of the MHR fork has no counterpart here: the fork never uses that bias"),
        ("evaluate x -s de", "-s is an option of fairseq; here it is `headscope evaluate --source FILE --target FILE`"),
    ],
)
def test_the_command_line_answers(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headscope", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main.run()
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert said in message
