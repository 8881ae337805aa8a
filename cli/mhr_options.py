"""Options of the MHR fork and of fairseq, and what does their work here: the tables of docs/mhr-options.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.files.reading import read_toml

TRAIN = "train baseline"  # stands for all variants, which have these options too


@dataclass(frozen=True)
class Counterpart:
    """`headscope COMMAND OPTIONS` does what an option of theirs does.

    `commands` are those that take our options, with bars; empty where nothing does it.
    """

    commands: str = ""
    options: str = ""
    note: str = ""

    def usage(self, command: str = "") -> str:
        """The words to type, in `command` (`train swap`) if it takes the options; empty without a counterpart."""
        names = self.commands.split("|")
        variant = self.commands == TRAIN and command.startswith("train ")
        name = command if command in names or variant else names[0]
        return " ".join(filter(None, ("headscope", name, self.options))) if name else ""


_TABLES = read_toml(Path(__file__).with_name("mhr_options.toml"))
FORK, FAIRSEQ = ({name: Counterpart(*row) for name, row in _TABLES[part].items()} for part in ("fork", "fairseq"))
"""Options that the fork added, and those of fairseq's own that its commands use."""
SHORT = {"-s": "--source-lang", "-t": "--target-lang", "-a": "--arch"}


def counterpart(option: str) -> Counterpart | None:
    """The counterpart of an option of the fork or of fairseq (with its dashes; underscores are dashes)."""
    name = SHORT.get(option, option.replace("_", "-"))
    return FORK.get(name) or FAIRSEQ.get(name)


def answer(option: str, command: str = "") -> str | None:
    """One line for who has given an option of theirs to a command of ours; else None."""
    equivalent = counterpart(option)
    if equivalent is None:
        return None
    program = "the MHR fork" if SHORT.get(option, option.replace("_", "-")) in FORK else "fairseq"
    if not equivalent.commands:
        return f"{option} of {program} has no counterpart here: {equivalent.note}"
    note = f" ({equivalent.note})" if equivalent.note else ""
    return f"{option} is an option of {program}; here it is `{equivalent.usage(command)}`{note}"
