"""Which heads go and which stay, checked against a model's key/value groups and shared layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, Site, all_heads, describe_heads
from headscope.model.discovery import AttentionSites


@dataclass(frozen=True)
class RemovalPlan:
    """Heads to remove, and for every (site, layer) the numbers of the heads and key/value groups that stay."""

    removed: tuple[HeadId, ...]
    kept: Mapping[tuple[Site, int], tuple[int, ...]]
    groups: Mapping[tuple[Site, int], tuple[int, ...]]

    @property
    def layout(self) -> Layout:
        """Number of heads that stay, by (site, layer)."""
        return {attention_site: len(heads) for attention_site, heads in self.kept.items()}


def plan_removal(attention_sites: AttentionSites, heads: Iterable[HeadId], *, whole_groups: bool = True) -> RemovalPlan:
    """Check which heads can go.

    Under grouped-query attention query heads share keys and values: a group goes with its last head, and the
    groups that stay must all have the same number of heads, else nothing narrower computes the same
    (`whole_groups` False skips that, for weights that are only set to zero). ConfigError for no heads, for heads
    that the model lacks, for incomplete groups, and for different heads of layers that share one module.
    """
    layout, going = attention_sites.layout, set(heads)
    for head in sorted(going):
        if head.head >= layout.get((head.site, head.layer), 0):
            raise ConfigError(f"this model has no head {head}; it has {describe_heads(layout)}")
    if not going:
        raise ConfigError("no head is to be removed; name some with --heads, or those to keep with --keep-only")
    kept = {
        (site, layer): tuple(head for head in range(count) if HeadId(site, layer, head) not in going)
        for (site, layer), count in layout.items()
    }
    groups = {}
    for attention_site in attention_sites.order:
        site_layer = (attention_site.site, attention_site.layer)
        shared = attention_site.heads // max(attention_site.groups, 1)
        groups[site_layer] = _groups(site_layer, kept[site_layer], shared, whole_groups=whole_groups)
    _check_shared(attention_sites, kept)
    return RemovalPlan(tuple(sorted(going)), kept, groups)


def keeping(layout: Layout, heads: Collection[HeadId]) -> list[HeadId]:
    """All other heads of the sites that `heads` name: what goes where only `heads` are to stay."""
    sites = {head.site for head in heads}
    return [head for head in all_heads(layout) if head.site in sites and head not in set(heads)]


def _groups(site_layer: tuple[Site, int], kept: tuple[int, ...], shared: int, *, whole_groups: bool) -> tuple[int, ...]:
    """The groups of `shared` heads each that still have a head."""
    sizes: dict[int, int] = {}
    for head in kept:
        sizes[head // shared] = sizes.get(head // shared, 0) + 1
    if whole_groups and len(set(sizes.values())) > 1:
        site, layer = site_layer
        group_sizes = ", ".join(f"group {group} keeps {size}" for group, size in sizes.items())
        raise ConfigError(
            f"not whole groups: in {site}.{layer} every {shared} query heads share one key and value, "
            f"and {group_sizes}; "
            "remove whole groups, or as many heads of each (--export masked takes any heads)"
        )
    return tuple(sizes)


def _check_shared(attention_sites: AttentionSites, kept: Mapping[tuple[Site, int], tuple[int, ...]]) -> None:
    for calls in attention_sites.calls.values():
        if len({kept[attention_site.site, attention_site.layer] for attention_site in calls}) > 1:
            layers = ", ".join(str(attention_site.layer) for attention_site in calls)
            raise ConfigError(
                f"{calls[0].site} layers {layers} are one module with one set of weights; "
                "remove the same heads from all of them"
            )
