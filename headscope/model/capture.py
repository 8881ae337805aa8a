"""Read queries, keys, values, weights and contexts of every head: `with capture(model, wanted) as heads: model(…)`.

`observing` calls a function for each attention call (what analyses use: nothing is kept); `capture` keeps the
tensors named in `wanted` (for one sentence, a test, a figure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.attention import AttentionCall, repeat_groups, tapped
from headscope.model.discovery import AttentionSite, track_calls

LAYERS = 12  # layers that a repr lists
FIELDS = ("query", "key", "value", "weights", "context")


@contextmanager
def observing(model: nn.Module, see: Callable[[AttentionSite, AttentionCall], None]) -> Iterator[None]:
    """Within the block `see(attention_site, call)` is called for every attention call of `model`."""
    with track_calls(model) as tracker:

        def tap(call: AttentionCall, _: Tensor) -> None:
            attention_site = tracker.attention_site(call.module)
            if attention_site is not None and attention_site.heads:  # a pruned layer may have none
                see(attention_site, call)

        with tapped(tap):
            yield


@dataclass
class Captured:
    """Captured tensors: `captured["encoder-self", 2]["weights"]` of the last call, `.calls` of all of them.

    A head's name, `captured["encoder-self.2.5"]`, gives its slices: weights [b t s], context [b t k].
    """

    calls: dict[tuple[Site, int], list[dict[str, Tensor]]] = field(default_factory=dict)

    def __getitem__(self, attention_site: tuple[Site | str, int] | HeadId | str) -> dict[str, Tensor]:
        if isinstance(attention_site, tuple):
            return self._last(attention_site)
        if not isinstance(attention_site, (HeadId, str)):
            raise ConfigError(f"{attention_site!r:.60} names no layer and no head; write ('cross', 1) or 'cross.1.5'")
        head = attention_site if isinstance(attention_site, HeadId) else HeadId.parse(attention_site)
        tensors = self._last((head.site, head.layer))
        if head.head >= next(iter(tensors.values())).shape[1]:
            raise ConfigError(f"{head.site}.{head.layer} has no head {head.head}; it was captured with fewer")
        return {name: tensor[:, head.head] for name, tensor in tensors.items()}

    def __repr__(self) -> str:
        layers = [f"{site}.{layer}" for site, layer in self.calls]
        if not layers:
            return "<Captured nothing yet: run the model within the block>"
        calls = list(self.calls.values())
        shown = layers if len(layers) <= LAYERS else [*layers[: LAYERS - 1], "…", layers[-1]]
        return f"<Captured {', '.join(calls[0][-1])} of {', '.join(shown)}; {max(map(len, calls))} calls at most>"

    def _last(self, attention_site: tuple[Site | str, int]) -> dict[str, Tensor]:
        """The last call of a (site, layer); ConfigError where there was none."""
        by_name = {(site.value, layer): calls for (site, layer), calls in self.calls.items()}
        site = attention_site[0].value if isinstance(attention_site[0], Site) else attention_site[0]
        if len(attention_site) != 2 or (site, attention_site[1]) not in by_name:
            captured = (
                ", ".join(f"{name}.{layer}" for name, layer in by_name) or "nothing: run the model within the block"
            )
            raise ConfigError(
                f"{'.'.join(map(str, (site, *attention_site[1:])))} was not captured; captured: {captured}"
            )
        return by_name[site, attention_site[1]][-1]

    def weights(self, site: Site) -> list[Tensor]:
        """Weights [b h t s] of one site, by layer (the last call's)."""
        return [
            self.calls[attention_site][-1]["weights"]
            for attention_site in sorted(self.calls, key=lambda p: p[1])
            if attention_site[0] is site
        ]


@contextmanager
def capture(model: nn.Module, tensors: Iterable[str] = ("weights",)) -> Iterator[Captured]:
    """Keep tensors of every head while the block runs: weights [b h t s], context, query [b h t k], …

    `tensors` names any of query, key, value, weights, context; keys and values of grouped-query attention
    are repeated to one per query head. Contexts are those before mixing and gates, weights those before
    dropout. Memory grows with every call: for a corpus use `observing`. ConfigError for an unknown name.
    """
    names = tuple(tensors)
    if unknown := [name for name in names if name not in FIELDS]:
        raise ConfigError(f"cannot capture {', '.join(map(str, unknown))}; what can be captured: {', '.join(FIELDS)}")
    captured = Captured()

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        call_tensors: dict[str, Tensor] = {name: getattr(call, name) for name in names}
        for name in {"key", "value"} & set(names):
            call_tensors[name] = repeat_groups(call_tensors[name], attention_site.heads)
        captured.calls.setdefault((attention_site.site, attention_site.layer), []).append(call_tensors)

    with observing(model, see):
        yield captured
