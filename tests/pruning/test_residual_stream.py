"""What outputs are added to, read off the operations of small models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope.pruning.closed_form.output_projections import StreamTap

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
X, FED = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
norm = nn.LayerNorm(7, dtype=torch.float64)


def in_place(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """The stream is overwritten by the sum, and the sum by what comes after."""
    x = x.clone()
    x += y
    return x.mul_(torch.zeros_like(x))


BLOCKS: dict[str, tuple[Block, Tensor | None]] = {
    "post-norm": (lambda y, x, fed: norm(y + x), X),
    "pre-norm": (lambda y, x, fed: (total := x + y) + norm(total), X),
    "parallel": (lambda y, x, fed: norm(fed + y + x), FED + X),
    "in two shapes": (lambda y, x, fed: norm((x.view(6, 7) + y.view(6, 7)).view(2, 3, 7)), X),
    "scaled": (lambda y, x, fed: norm(x + y * 0.25), X / 0.25),
    "scaled by a tensor": (lambda y, x, fed: norm(torch.tensor(0.25) * y + x), X / 0.25),
    "copied": (lambda y, x, fed: norm(x.float() + y.float().clone()), X.float()),
    "dropout and slices of all": (lambda y, x, fed: norm(x + nn.functional.dropout(y[:, :], 0.3, training=False)), X),
    "in place": (in_place, X),
    "norm first": (lambda y, x, fed: x + norm(y), None),
    "part only": (lambda y, x, fed: norm(x[:, :1] + y[:, :1]), None),
    "scaled by zero": (lambda y, x, fed: norm(x + y * 0), None),
    "never read": (lambda y, x, fed: norm(x), None),
    "broadcast": (lambda y, x, fed: norm(y + x[:1]), None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_stream_is_what_is_added_before_anything_else_reads(name: str) -> None:
    block, wanted = BLOCKS[name]
    projection = nn.Linear(5, 7, dtype=torch.float64)
    norm.to(torch.float32 if name == "copied" else torch.float64)
    tap = StreamTap()
    with torch.no_grad(), tap.observing([projection]):
        for _ in range(2):
            block(projection(torch.randn(2, 3, 5, dtype=torch.float64)), X, FED)
    first, second = tap.streams()
    for stream in (first, second):
        if wanted is None:
            assert stream is None
        else:
            assert stream is not None and torch.equal(stream.view_as(wanted), wanted)
    assert tap.streams() == []


def test_one_operation_may_read_two_outputs() -> None:
    projection, tap = nn.Linear(5, 7, dtype=torch.float64), StreamTap()
    with torch.no_grad(), tap.observing([projection]):
        first, second = (projection(torch.randn(2, 3, 5, dtype=torch.float64)) for _ in range(2))
        norm.double()(first + second)
    streams = tap.streams()
    for stream, other in zip(streams, (second, first), strict=True):
        assert stream is not None and torch.equal(stream, other)


def test_without_the_tap_nothing_is_hooked() -> None:
    projection = nn.Linear(5, 7)
    with pytest.raises(ZeroDivisionError), StreamTap().observing([projection]):
        raise ZeroDivisionError
    assert not projection._forward_hooks
