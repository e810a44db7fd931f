"""Values in PostgreSQL's binary format, written by psycopg from their text."""

from __future__ import annotations

from typing import Final

from psycopg.adapt import Transformer
from psycopg.errors import ProgrammingError
from psycopg.pq import Format

from subscriber.testing.fake_publisher.tables import Types
from subscriber.types import TypeKind, codec

__all__ = ["binary_value"]

_AS_TEXT: Final = frozenset({"text", "varchar", "bpchar", "name", "json", "xml", "unknown"})
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
    if found.builtin is None:
        return None
    value = codec(found).value_from_text(text)
    try:
        dumper = _TRANSFORMER.adapters.get_dumper_by_oid(found.oid, Format.BINARY)(type(value), _TRANSFORMER)
    except ProgrammingError:
        return None
    if isinstance(value, str):
        # no Python object holds the value: infinity, dates before Christ
        return None
    dumped = dumper.dump(value)
    return None if dumped is None else bytes(dumped)
