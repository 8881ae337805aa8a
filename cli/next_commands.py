"""The command that could come next, ready to be typed: made of what the last one was given."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.api.analysis import Finished

COMPANIONS = ("format", "dicts", "hp", "bpe")
TEXT = (
    *("source", "target", "source2", "pairs", "labels", "clean", "corrupt", "answer", "parse", "max_sentences", "mask"),
)


def command_line(*words: object, options: Mapping[str, Any] | None = None, names: tuple[str, ...] = ()) -> str:
    """`headscope` with words and those of some options that were given, as a shell takes them."""
    typed = ["headscope", *map(str, words)]
    for name in names:
        value = (options or {}).get(name)
        if value not in (None, False, ""):
            typed += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(typed)


def after_analysis(finished: Finished) -> str:
    """After the functions of heads their importance; then a ranking that takes out what the model needs least."""
    from headscope.cli.importance import LEVEL, main_measure

    options, folder = finished.record.get("options", {}), finished.folder
    checkpoint = options.get("checkpoint")
    if not checkpoint or not finished.study.complete:
        return ""
    main = main_measure(finished.study)
    if not main:
        again = ("analyze", checkpoint, "--importance", "--out", f"{folder}-importance")
        return command_line(*again, options=options, names=(*TEXT, *COMPANIONS))
    table = finished.study.tables["importance"]
    rows = table[(table["measure"] == main) & table["value"].notna()]
    if len(rows) < len(finished.study.heads):
        return ""
    idle = int(((rows["p_adjusted"] > LEVEL) | (rows["value"] <= 0)).sum())
    most = max(len(rows) // 4, 1)  # heads that do nothing alone may matter together
    keep = len(rows) - (min(max(idle, 1), most) if rows["p"].notna().any() else most)
    ranking = ("prune", "rank", checkpoint, "--from", folder, "--by", main, "--keep", keep, "--out", f"{folder}-pruned")
    return command_line(*ranking, options=options, names=COMPANIONS)
