"""Errors of commands as one line on stderr, printed by one of the processes of torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import typer

from headscope.cli.help_text import SETTINGS, PlainCommand, PlainGroup
from headscope.errors import ConfigError, HeadscopeError
from headscope.progress import printable

USAGE: type[Exception] = typer.BadParameter.__bases__[0]  # click's UsageError: typer brings a click of its own
PATIENCE = timedelta(seconds=10)
GRACE = 2.0  # seconds


def described(error: BaseException) -> str | None:
    """The message for an error that the user can fix; None for a bug of headscope."""
    if isinstance(error, HeadscopeError):
        return one_line(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _memory(str(error))):
        return (
            f"there is not enough memory ({one_line(error)[:160]}); take a smaller --batch-tokens, --max-length or "
            "model"
        )
    if _peer_is_gone(error):
        return "another process of this torchrun has ended before its work was done"
    return None


def _peer_is_gone(error: BaseException) -> bool:
    """Whether a process waited in torch.distributed for one that has ended."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(error, RuntimeError):
        return False
    from torch import distributed

    return isinstance(error, distributed.DistError) or "gloo" in str(error) or "closed by peer" in str(error)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turns click's usage errors into a ConfigError of one line; `--help` is not touched.

    For an option of the MHR fork or of fairseq the message names the option of headscope.
    """
    try:
        yield
    except USAGE as error:
        refused: Any = error
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        if type(error).__name__ == "NoSuchOption":
            from headscope.cli.mhr_options import answer

            command = refused.ctx.info_name if refused.ctx is not None else ""
            if hint := answer(refused.option_name, command or ""):
                raise ConfigError(hint) from None
        see_help = "" if refused.ctx is None else f"; see {refused.ctx.command_path} --help"
        raise ConfigError(f"{one_line(refused.format_message()).rstrip('.')}{see_help}") from None


class ListsOnce(PlainCommand):
    """A command that takes each list (`--heads`, `--only`, …) once: click would take the last and drop the others.

    Of other options the last one counts, as everywhere: so a script's own options can be changed behind them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left; ConfigError for a list that is given more than once."""
        if args or not self.no_args_is_help:
            given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
            for option in filter(_is_list, given):
                if (count := given.count(option)) > 1:
                    name = max(option.opts, key=len)
                    raise ConfigError(f"{name} is given {count} times; give it once, as a list: {name} a,b,c")
        return super().parse_args(ctx, args)


def _is_list(option: Any) -> bool:
    """Whether an option's value is a list with commas, as its help writes it."""
    metavar = option.metavar or ""
    return option.param_type_name == "option" and (metavar in ("LIST", "NAMES") or "," in metavar)


class Application(typer.Typer):
    """An application with plain help texts, whose commands take each list once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{
                "cls": PlainGroup,
                "rich_markup_mode": None,
                "pretty_exceptions_enable": False,
                "context_settings": SETTINGS,
                **options,
            }
        )

    def command(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        """As typer's, with another class of commands."""
        return super().command(*names, **{"cls": ListsOnce, **options})


def reports_error(error: BaseException) -> bool:
    """Whether this process reports the error: of the processes of one torchrun, the first that calls this.

    One that was left alone waits until the other may have said why.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    if _peer_is_gone(error):
        time.sleep(GRACE)
    with suppress(Exception):  # no store any more: better reported twice than never
        from torch import distributed

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)  # type: ignore[attr-defined]
        return store.add("headscope/failed", 1) == 1
    return True


def one_process(context: typer.Context, *, shared: tuple[str, ...]) -> None:
    """Under torchrun, refuse a sub-command that is not `shared`: rank 0 raises ConfigError, the other ranks exit.

    Commands that are not shared would do, print and write the same in every process.
    """
    name = context.invoked_subcommand
    if name is None or name in shared or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if os.environ.get("RANK", "0") != "0":
        raise typer.Exit
    group = f"{context.info_name} " if context.parent is not None else ""
    raise ConfigError(f"headscope {group}{name} runs in one process; start it without torchrun")


def one_line(text: object) -> str:
    """The text in one line, without anything that a terminal would obey."""
    return printable(" ".join(str(text).split()))


def _memory(text: str) -> bool:
    return "can't allocate memory" in text or "out of memory" in text or "std::bad_alloc" in text
