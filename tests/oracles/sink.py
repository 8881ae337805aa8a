"""Mean weight on the first key, and on special keys; in self attention the first query does not count."""

from headscope.heads import Site, SiteLayer
from tests.oracles.trace import Term, Trace


def _later(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> list[list[float]]:
    rows = trace.rows(site_layer, head, keep)
    return [row for t, row, _ in rows if t > 0 or site_layer[0] is Site.CROSS]


def first(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    rows = _later(trace, site_layer, head, keep)
    return sum(row[0] for row in rows), len(rows)


def special(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    _, special = trace.key_side(site_layer[0])
    rows = _later(trace, site_layer, head, keep)
    return sum(row[s] for row in rows for s in range(len(row)) if special[s]), len(rows)


def queries(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, only_special: bool) -> Term:
    """Number of queries with at least half of their weight on the sinks."""
    _, special = trace.key_side(site_layer[0])
    rows = _later(trace, site_layer, head, keep)
    is_sink = special if only_special else [s == 0 for s in range(len(special))]
    return sum(sum(row[s] for s in range(len(row)) if is_sink[s]) >= 0.5 for row in rows), len(rows)


def chance(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, only_special: bool) -> Term:
    """The weight on them of queries that look at all they see alike."""
    _, special = trace.key_side(site_layer[0])
    total, count = 0.0, 0
    for t, _, _ in trace.rows(site_layer, head, keep):
        if t > 0 or site_layer[0] is Site.CROSS:
            sees = trace.calls[site_layer].visible[t]
            is_sink = special if only_special else [s == 0 for s in range(len(special))]
            total += sum(sees[s] for s in range(len(sees)) if is_sink[s]) / sum(sees)
            count += 1
    return total, count
