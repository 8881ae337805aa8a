"""Ways in which a file can be damaged, drawn by hypothesis: bytes, cells of a table, values of a JSON document."""

import json
from typing import Any

from hypothesis import strategies as st

WORDS = (
    *(b"NaN", b"Infinity", b"-1", b"1e400", b"0", b"99999999999999999999", b"7" * 5000, b"null", b"true", b"[]", b"{}"),
    *(b'"x"', b"\n", b"\r", b"\t", b",", b".", b"=", b"a" * 300, b""),
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc2\xb2"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, 2**31, "", "x", "cross.0.0", "\x00", "²" * 9),
    *([], {}, [[]], {"x": 1}, [1, "x"], ["cross.0.0"] * 3, [10**20], "9" * 5000),
)


@st.composite
def damage_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with one to three damages: cut, overwritten, or with something that does not belong."""
    data = content
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        if draw(st.integers(0, 4)) == 0:
            data = data[:start]
            continue
        end = min(len(data), start + draw(st.sampled_from((0, 1, 4, 40))))
        put = draw(st.one_of(st.sampled_from(WORDS), st.binary(min_size=1, max_size=8), st.just(data[:start][-60:])))
        data = data[:start] + put + data[end:]
    return data


@st.composite
def damage_json(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON document with one to three of its values taken out or replaced by others."""
    document = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        document = _change_value(draw, document)
    return json.dumps(document).encode()


def _change_value(draw: st.DrawFn, value: Any) -> Any:
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(VALUES))
    key = draw(st.sampled_from(inner))
    copy = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 5)) == 0:
        del copy[key]
    else:
        copy[key] = _change_value(draw, copy[key])
    return copy


@st.composite
def damage_table(draw: st.DrawFn, content: bytes) -> bytes:
    """A CSV table with one to three of its cells, or names of columns, replaced."""
    rows = [line.split(b",") for line in content.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from((0, draw(st.integers(0, len(rows) - 1)))))
        column = draw(st.integers(0, len(rows[row]) - 1))
        rows[row][column] = draw(st.sampled_from(WORDS))
    return b"".join(b",".join(row) + b"\n" for row in rows)


def damages(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """The damages that fit a file of this name."""
    kinds = {".json": damage_json, ".csv": damage_table}
    special = [kinds[suffix](content) for suffix in kinds if name.endswith(suffix)]
    return st.one_of([*special, damage_bytes(content)])
