"""The heads to remove and to keep, checked against a model's key/value groups and shared layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headscope.errors import ConfigError, flag
from headscope.heads import HeadId, Layout, Site, SiteLayer, all_heads, refuse_absent
from headscope.model.discovery import AttentionSite, AttentionSites


@dataclass(frozen=True)
class RemovalPlan:
    """Heads to remove, and for every (site, layer) the numbers of the heads and key/value groups that stay, in order.

    `merged`: if key/value groups are merged, the sets of groups that become one
    (`headscope.pruning.removal.merge_plan`).
    """

    removed: tuple[HeadId, ...]
    kept: Mapping[SiteLayer, tuple[int, ...]]
    groups: Mapping[SiteLayer, tuple[int, ...]]
    merged: Mapping[SiteLayer, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Number of heads that stay, by (site, layer)."""
        return {attention_site: len(heads) for attention_site, heads in self.kept.items()}


def plan_removal(attention_sites: AttentionSites, heads: Iterable[HeadId], *, whole_groups: bool = True) -> RemovalPlan:
    """A plan that removes `heads`, after a check that a model without them can exist.

    Under grouped-query attention query heads share keys and values: a group is removed with its last head, and the
    groups that stay must all have the same number of heads, else no narrower layer computes the same (`whole_groups`
    False skips that check, for weights that are only set to zero). ConfigError for no heads, for heads that the model
    lacks, for incomplete groups, and for different heads of layers that share one module.
    """
    layout, going = attention_sites.layout, set(heads)
    refuse_absent(sorted(going), layout)
    if not going:
        raise ConfigError(f"no head is to be removed; name some ({flag.heads}), or those to keep ({flag.keep_only})")
    heads_kept = {
        site_layer: tuple(head for head in range(count) if HeadId(*site_layer, head) not in going)
        for site_layer, count in layout.items()
    }
    groups = {}
    for site in attention_sites.order:
        by_group = _by_group(heads_kept[site.site_layer], site)
        if whole_groups and len({*map(len, by_group.values())}) > 1:
            sizes = ", ".join(f"group {group} keeps {len(of_group)}" for group, of_group in by_group.items())
            shared = f"in {site.site}.{site.layer} {site.heads // site.groups} query heads share one key and value"
            advice = f"remove whole groups, or as many heads of each ({flag.export} masked takes any heads)"
            raise ConfigError(f"not whole groups: {shared}, and {sizes}; {advice}")
        groups[site.site_layer] = tuple(by_group)
    for calls in attention_sites.modules:
        if len({heads_kept[attention_site.site_layer] for attention_site in calls}) > 1:
            layers = ", ".join(str(attention_site.layer) for attention_site in calls)
            raise ConfigError(f"{calls[0].site} layers {layers} share one module; remove the same heads from each")
    return RemovalPlan(tuple(sorted(going)), heads_kept, groups)


def padded_plan(attention_sites: AttentionSites, plan: RemovalPlan, *, same_heads: bool = False) -> RemovalPlan:
    """A plan that removes fewer heads, so that every layer keeps as many heads and groups as the largest.

    Heads that are kept here and not in `plan.kept` are padding, to be set to zero. With `same_heads` every layer keeps
    the same head numbers: all that any layer keeps.
    """
    sites = {site.site_layer: site for site in attention_sites.order}
    per_group = {site_layer: _by_group(plan.kept[site_layer], site) for site_layer, site in sites.items()}
    max_groups = max(len(groups) for groups in per_group.values())
    most_heads = max((len(heads) for groups in per_group.values() for heads in groups.values()), default=1)
    union = {head for heads_kept in plan.kept.values() for head in heads_kept}
    heads_kept, groups = {}, {}
    for site_layer, site in sites.items():
        filled_groups = _by_group(tuple(sorted(union)), site) if same_heads else per_group[site_layer]
        count, size = (len(filled_groups), 0) if same_heads else (max(max_groups, 1), most_heads)
        groups[site_layer], heads_kept[site_layer] = _fill_groups(filled_groups, site, groups=count, heads=size)
    removed_heads = [head for head in plan.removed if head.head not in heads_kept[head.site, head.layer]]
    return RemovalPlan(tuple(removed_heads), heads_kept, groups)


def _by_group(heads: tuple[int, ...], site: AttentionSite) -> dict[int, list[int]]:
    shared = site.heads // max(site.groups, 1)
    by_group: dict[int, list[int]] = {}
    for head in heads:
        by_group.setdefault(head // shared, []).append(head)
    return by_group


def _fill_groups(
    by_group: Mapping[int, list[int]], site: AttentionSite, *, groups: int, heads: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of `groups` groups, with `by_group`'s first, and of their heads, at least `heads` in each group."""
    shared = site.heads // max(site.groups, 1)
    chosen_groups = sorted(range(site.groups), key=lambda group: (group not in by_group, group))[:groups]
    heads_kept: list[int] = []
    for group in sorted(chosen_groups):
        group_heads = by_group.get(group, [])
        members = range(group * shared, (group + 1) * shared)
        heads_kept += sorted(
            sorted(members, key=lambda head: (head not in group_heads, head))[: max(heads, len(group_heads))]
        )
    return tuple(sorted(chosen_groups)), tuple(heads_kept)


def heads_to_remove(layout: Layout, heads: Collection[HeadId]) -> list[HeadId]:
    """The heads to remove so that only `heads` stay, in the sites that these name."""
    sites = {head.site for head in heads}
    return [head for head in all_heads(layout) if head.site in sites and head not in set(heads)]


# The cross heads that a model's settings name as aligning text with sound (`alignment_heads` of Whisper).


def alignment_heads(model: nn.Module) -> list[HeadId]:
    """The cross heads from which Whisper reads the times of words; an empty list if its settings name none."""
    settings: Any = getattr(model, "generation_config", None)
    head_pairs = getattr(settings, "alignment_heads", None)
    pairs = head_pairs if isinstance(head_pairs, list) else []
    return [HeadId(Site.CROSS, *pair) for pair in pairs if len(pair) == 2 and all(type(n) is int for n in pair)]


def renumber_alignment(model: Any, removal: RemovalPlan) -> None:
    """Renumber the alignment heads in the settings of a shrunk model, without those that were removed.

    If none is left the entry is deleted: transformers then says that there are no times of words.
    """
    if heads := alignment_heads(model):
        heads_kept = {head: removal.kept.get((head.site, head.layer), ()) for head in heads}
        stay = [[head.layer, heads_kept[head].index(head.head)] for head in heads if head.head in heads_kept[head]]
        if stay:
            model.generation_config.alignment_heads = stay
        else:
            del model.generation_config.alignment_heads


def alignment_note(intact: nn.Module, smaller: nn.Module) -> tuple[str, ...]:
    """A remark on the alignment heads of a model whose copy lacks some heads."""
    before, after = alignment_heads(intact), alignment_heads(smaller)
    if before == after:
        return ()
    stay = f"{len(after)} of {len(before)} alignment heads (generation_config.json) stay, renumbered"
    if len(after) == len(before):
        return (stay,)
    suffix = "" if after else "; without any there are no times of words"
    return (f"{stay}{suffix} (prune rank {flag.protect} alignment keeps all)",)
