"""Options of the MHR fork and of fairseq, and their counterparts in headscope: the tables of docs/mhr-options.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.files.reading import read_toml

TRAIN = "train baseline"  # stands for all variants, which have these options too


@dataclass(frozen=True)
class Counterpart:
    """The command and options of headscope that replace an option of the MHR fork or of fairseq.

    `commands` may be several with bars between; it is empty if nothing replaces the option.
    """

    commands: str = ""
    options: str = ""
    note: str = ""

    def usage(self, command: str = "") -> str:
        """The command line to type, of `command` (`train swap`) if it has the options; empty without a counterpart."""
        names = self.commands.split("|")
        variant = self.commands == TRAIN and command.startswith("train ")
        name = command if command in names or variant else names[0]
        return " ".join(filter(None, ("headscope", name, self.options))) if name else ""


_TABLES = read_toml(Path(__file__).with_name("mhr_options.toml"))
FORK, FAIRSEQ = ({name: Counterpart(*row) for name, row in _TABLES[part].items()} for part in ("fork", "fairseq"))
"""Options that the MHR fork added to fairseq, and those of fairseq itself."""
SHORT = {"-s": "--source-lang", "-t": "--target-lang", "-a": "--arch"}


def counterpart(option: str) -> Counterpart | None:
    """The counterpart of an option of the fork or of fairseq, given with its dashes; underscores count as dashes."""
    name = SHORT.get(option, option.replace("_", "-"))
    return FORK.get(name) or FAIRSEQ.get(name)


def counterpart_message(option: str, command: str = "") -> str | None:
    """The error for an option of the MHR fork or fairseq that was given to a command of headscope; else None."""
    equivalent = counterpart(option)
    if equivalent is None:
        return None
    program = "the MHR fork" if SHORT.get(option, option.replace("_", "-")) in FORK else "fairseq"
    if not equivalent.commands:
        return f"{option} of {program} has no counterpart here: {equivalent.note}"
    note = f" ({equivalent.note})" if equivalent.note else ""
    return f"{option} is an option of {program}; here it is `{equivalent.usage(command)}`{note}"
