"""Options that say something of each site: one value for all of them, or three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headscope.errors import ConfigError
from headscope.heads import SITES, Site

T = TypeVar("T")


def per_site(flag: str, values: Sequence[T]) -> dict[Site, T]:
    """Values of an option by site: one for all, or one each for encoder-self, decoder-self and cross.

    ConfigError for another number of values, which names the option.
    """
    if len(values) == 1:
        return dict.fromkeys(SITES, values[0])
    if len(values) != len(SITES):
        raise ConfigError(
            f"{flag} has {len(values)} values; give one for all sites, or three for {', '.join(map(str, SITES))}"
        )
    return dict(zip(SITES, values, strict=True))
