"""`kept_heads` in a smaller model's config: which heads of the first checkpoint are left, by site and layer.

It comes from a file, so it is compared with the weights before anything counts on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from headscope.errors import CheckpointError
from headscope.heads import Site
from headscope.model.discovery import AttentionSites, base_of
from headscope.model.projections import output_axis
from headscope.model.removal_plan import RemovalPlan

MOST_HEADS = 10**6
NumbersOfHeads = dict[str, dict[str, list[int]]]


def check_kept_heads(model: nn.Module, path: str, sites: AttentionSites) -> None:
    """CheckpointError where `config.kept_heads` of a narrowed model cannot be of its weights.

    Every layer needs as many different numbers as it has heads, below the number that its plain class has.
    """
    kept = getattr(model.config, "kept_heads", None)
    if problem := _problem(kept, sites, _heads_before(model, sites)):
        raise CheckpointError(
            f"{path}: kept_heads in config.json is damaged: {problem}; take the folder as `prune remove` wrote it"
        )


def _problem(kept: Any, sites: AttentionSites, before: dict[tuple[Site, int], int] | None) -> str:
    """What is wrong with the numbers of heads; "" if nothing is. `before`: how many there were, where that is known."""
    if not isinstance(kept, dict) or not all(isinstance(layers, dict) for layers in kept.values()):
        return f"{_short(kept)} is no table of heads by site and layer"
    known = {site.value for site, _ in sites.layout}
    places = {(site.value, str(layer)): (site, layer) for site, layer in sites.layout}
    stored = {(str(site), layer): numbers for site, layers in kept.items() for layer, numbers in layers.items()}
    unknown = [site for site in kept if site not in {site.value for site in Site}]
    unknown += [f"{site}.{layer}" for site, layer in stored if site in known and (site, layer) not in places]
    if unknown:
        return f"there is no {unknown[0]!r} in the model"
    for name, (site, layer) in places.items():
        heads, numbers = sites.layout[site, layer], stored.get(name)
        most = MOST_HEADS if before is None else before.get((site, layer), heads)
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            return f"{site}.{layer} needs a list of {heads} numbers, and has {_short(numbers)}"
        if len(numbers) != heads or len(set(numbers)) != heads or not all(0 <= number < most for number in numbers):
            return f"{site}.{layer} has {heads} heads, and {_short(numbers)} are not {heads} numbers below {most}"
    return ""


def _heads_before(model: nn.Module, sites: AttentionSites) -> dict[tuple[Site, int], int] | None:
    """Heads in the plain class, where a layer has fewer now: its output projection has so many times fewer columns.

    That is in the attention module, or beside it (BERT). None for a model that was not opened from a file.
    """
    plain: Any = getattr(model, "plain_shapes", None)
    if plain is None:
        return None
    names = {id(parameter): name for name, parameter in base_of(model).named_parameters()}
    before: dict[tuple[Site, int], int] = {}
    for module in model.modules():
        for site in sites.calls.get(id(module), ()):
            around = model.get_submodule(site.name.rpartition(".")[0])
            shares = [(now, whole) for part in (module, around) for now, whole in _columns(part, names, plain)]
            now, whole = shares[0] if shares else (1, 1)
            before[site.site, site.layer] = site.heads * whole // now
    return before


def _columns(part: nn.Module, names: dict[int, str], plain: dict[str, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Of every matrix that reads fewer numbers than in the plain class: how many it reads, now and there."""
    for module in part.modules():
        weight = getattr(module, "weight", None)
        shape = plain.get(names.get(id(weight), ""), ())
        axis = 1 - output_axis(module)
        if len(shape) == 2 and weight is not None and shape[axis] > weight.shape[axis]:
            yield int(weight.shape[axis]), shape[axis]


def _short(value: Any) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # a number of more digits than Python prints
        return "something else"


def renumbered(before: NumbersOfHeads | None, removal: RemovalPlan) -> NumbersOfHeads:
    """{site: {layer: numbers}} of the heads that stay, as the checkpoint counted them that was pruned first."""
    numbers: NumbersOfHeads = {}
    for (site, layer), kept in removal.kept.items():
        old = (before or {}).get(site.value, {}).get(str(layer))
        numbers.setdefault(site.value, {})[str(layer)] = [head if old is None else old[head] for head in kept]
    return numbers
