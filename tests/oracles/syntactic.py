"""Words from pieces, word-level attention, accuracy and best-offset baseline (Clark 2019, §4.1; Voita 2019, §5.2)."""

from collections import Counter
from collections.abc import Sequence

from headscope.heads import SiteLayer
from tests.oracles.trace import Trace, first_peak

Span = tuple[int, int]


def units(tokens: Sequence[Span], pieces: Sequence[Span | None]) -> tuple[list[list[int]], list[int]]:
    """Piece positions of each unit, and the unit of each token: tokens that share a piece are one unit."""
    parts = [
        [p for p, span in enumerate(pieces) if span and span[0] < end and start < span[1]] for start, end in tokens
    ]
    groups: list[set[int]] = []
    unit_of: list[int] = []
    for part in parts:
        if not groups or not groups[-1] & set(part):
            groups.append(set())
        groups[-1] |= set(part)
        unit_of.append(len(groups) - 1)
    return [sorted(group) for group in groups], unit_of


def relations(edges: Sequence[tuple[str, int, int]], unit_of: Sequence[int]) -> list[tuple[str, int, int]]:
    """(relation, head unit, dependent unit), without those inside one unit."""
    ends = [(name, unit_of[head], unit_of[dependent]) for name, head, dependent in edges]
    return [end for end in ends if end[1] != end[2]]


def word_focus(trace: Trace, site_layer: SiteLayer, head: int) -> list[int]:
    """For each unit the unit with its largest weight: sums over key pieces, means over query pieces."""
    assert trace.units is not None
    weights = trace.calls[site_layer].weights[head]
    argmax_position = []
    for queries in trace.units:
        words = list[float]()
        if not queries:
            argmax_position.append(-1)
            continue
        for keys in trace.units:
            words.append(sum(weights[t, s].item() for t in queries for s in keys) / len(queries) if keys else -1.0)
        argmax_position.append(first_peak(words, trace.tie))
    return argmax_position


def instances(trace: Trace, relation: str, direction: str) -> list[tuple[int, int]]:
    """(from, to) unit of each instance; `>` is read from head to dependent."""
    if trace.units is None:
        return []
    ends = [(head, dependent) for name, head, dependent in trace.relations if name == relation]
    return ends if direction == ">" else [(dependent, head) for head, dependent in ends]


def hits(trace: Trace, site_layer: SiteLayer, head: int, relation: str, direction: str) -> tuple[float, float]:
    pairs = instances(trace, relation, direction)
    if not pairs:
        return 0.0, 0
    argmax_position = word_focus(trace, site_layer, head)
    return float(sum(argmax_position[start] == end for start, end in pairs)), len(pairs)


def offsets(trace: Trace, relation: str, direction: str) -> Counter[int]:
    return Counter(end - start for start, end in instances(trace, relation, direction))
