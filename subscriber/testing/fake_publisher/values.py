"""Values in PostgreSQL's binary format, written by psycopg from their text."""

from __future__ import annotations

from struct import pack
from typing import Any, Final

from psycopg.adapt import Transformer
from psycopg.errors import ProgrammingError
from psycopg.pq import Format

from subscriber.testing.fake_publisher.tables import Types
from subscriber.types import PgType, TypeKind, codec
from subscriber.types.containers import ArrayReader

__all__ = ["binary_value"]

_AS_TEXT: Final = frozenset({"text", "varchar", "bpchar", "name", "json", "xml", "unknown"})
_INFINITE: Final = {"date": 4, "timestamp": 8, "timestamptz": 8}
"""Types with infinity, and their sizes."""
_MIDNIGHT: Final = b"24:00:00"
_DAY: Final = 86_400_000_000
_INFINITY: Final = frozenset({b"infinity", b"-infinity"})
_TRANSFORMER: Final = Transformer()


def binary_value(types: Types, oid: int, modifier: int, text: bytes) -> bytes | None:
    """The binary form of a value, or None: this type is sent as text.

    Args:
        types: of the publisher.
        oid: of the type.
        modifier: of the column.
        text: PostgreSQL's text.
    """
    found = types.registry.resolve(oid, modifier)
    if found.kind is TypeKind.ENUM or found.builtin in _AS_TEXT:
        return text
    if found.builtin == "jsonb":
        return b"\1" + text
    if found.kind is TypeKind.ARRAY and found.element is not None and not text.startswith(b"["):
        return _array(types, found.element, ArrayReader(found.delimiter).read(text.decode(), str))
    if found.builtin is None:
        return None
    if text in _INFINITY and found.builtin in _INFINITE:
        largest = (1 << _INFINITE[found.builtin] * 8 - 1) - 1
        return (largest if text == b"infinity" else -largest - 1).to_bytes(_INFINITE[found.builtin], "big", signed=True)
    value = codec(found).value_from_text(text)
    if found.builtin == "time" and text == _MIDNIGHT:
        return _DAY.to_bytes(8, "big")
    try:
        dumper = _TRANSFORMER.adapters.get_dumper_by_oid(found.oid, Format.BINARY)(type(value), _TRANSFORMER)
    except ProgrammingError:
        return None
    if isinstance(value, str):
        # no Python object holds the value: dates before Christ
        return None
    dumped = dumper.dump(value)
    return None if dumped is None else bytes(dumped)


def _array(types: Types, element: PgType, items: list[Any]) -> bytes | None:
    sizes = []
    level: Any = items
    while isinstance(level, list) and level:
        sizes.append(len(level))
        level = level[0]
    for _ in sizes[1:]:
        items = [item for part in items for item in part]
    written = [None if item is None else binary_value(types, element.oid, element.modifier, item.encode()) for item in items]
    if any(data is None and item is not None for data, item in zip(written, items, strict=True)):
        return None
    head = pack(">iiI", len(sizes), None in written, element.oid) + b"".join(pack(">ii", size, 1) for size in sizes)
    return head + b"".join(pack(">i", -1) if data is None else pack(">i", len(data)) + data for data in written)
