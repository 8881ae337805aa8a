"""What a pair function is: a small predicate that says of which pairs of a query and a key something holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headscope.description.tokens import Flags, Pairs
from headscope.heads import Site
from headscope.registry import Registry

Predicate = Callable[[Pairs], Flags]
SELF = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})


@dataclass(frozen=True)
class PairFunction:
    """A predicate with the name that labels have (`looks:NAME`), and what such a head looks at, in words.

    `sites` are where it means something; with `parsed` it needs a parse.
    """

    name: str
    meaning: str
    holds: Predicate
    sites: frozenset[Site] = SELF
    parsed: bool = False


PAIR_FUNCTIONS: Registry[PairFunction] = Registry(
    "pair function", package="headscope.pair_functions", group="headscope.pair_functions"
)


def pair_function(
    name: str, *, meaning: str = "", sites: frozenset[Site] = SELF, parsed: bool = False
) -> Callable[[Predicate], Predicate]:
    """Register a predicate: `Pairs` → flags [n s] of its n queries and s keys.

    What such keys are, in words, is the first line of its docstring, or `meaning`. Nothing is said of special tokens,
    nor of keys that a query does not see: these are left out for all of them.
    """

    def register(holds: Predicate) -> Predicate:
        said = meaning or (holds.__doc__ or name).strip().splitlines()[0].rstrip(".")
        function = PairFunction(name, said[0].lower() + said[1:], holds, sites, parsed)
        PAIR_FUNCTIONS.register(name, function, where=getattr(holds, "__module__", __name__))
        return holds

    return register
