"""How many queries a block has: what is there for one at a time keeps within a budget of memory."""

from __future__ import annotations

from collections.abc import Iterator

BUDGET = 128 * 2**20
"""Bytes that streamed attention takes beside the model's own states: for blocks, and for what is kept between them."""
AT_A_TIME = BUDGET // 2
"""Bytes of all tensors of one block."""
KEPT = BUDGET - AT_A_TIME
"""Bytes of what all layers of a batch share."""
LEAST = 1
"""Queries of a block, however much memory one takes."""


def query_blocks(queries: int, bytes_each: int, *, at_most: int | None = None) -> Iterator[slice]:
    """Blocks of queries, each of which takes so many bytes, in their order; `at_most` so many queries in one."""
    step = max(LEAST, AT_A_TIME // max(1, bytes_each))
    step = step if at_most is None else min(step, at_most)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))
