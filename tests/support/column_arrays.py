"""An array of a column's values, as the PostgreSQL sink makes it from messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType

from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import BINARY, TEXT, Insert, TupleData
from subscriber.sinks.postgres.apply import arrays

__all__ = ["array_of"]


def array_of(values: Sequence[bytes | None], oid: int, *, binary: bool = False, form: ModuleType = arrays) -> bytes | None:
    """The array; None: a value is not converted.

    Args:
        values: one for each message.
        oid: the type of the column.
        binary: whether they are in binary format.
        form: the module to use, as Python or as C.
    """
    kind = BINARY if binary else TEXT
    records = [encode(Insert(7, TupleData(b"n" if value is None else bytes([kind]), [value]))) for value in values]
    parts = ((struct.pack(">IcH", 7, b"N", 1), bytes([kind])),)
    (found,) = form.column_arrays(records, 1, parts, [(0, oid, binary)])
    assert found is None or isinstance(found, bytes)
    return found
