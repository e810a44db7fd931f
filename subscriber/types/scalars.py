"""The built-in base types: functions from the binary format to text, and from text to Python.

Types that are in none of these tables stay text in both formats.
"""

from __future__ import annotations

import datetime
from binascii import unhexlify
from collections.abc import Callable, Mapping
from decimal import Decimal
from struct import Struct
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from subscriber.types import datetimes, geometry, network, numerics, textsearch
from subscriber.types.value_errors import ValueRefused

__all__ = ["BINARY_TEXT", "BINARY_VALUE", "NO_BINARY", "TEXT_CANONICAL", "TEXT_VALUE", "refuse_binary"]

_INT2: Final = Struct(">h")
_INT4: Final = Struct(">i")
_INT8: Final = Struct(">q")
_UINT4: Final = Struct(">I")
_UINT8: Final = Struct(">Q")
_TID: Final = Struct(">IH")
_SNAPSHOT: Final = Struct(">iQQ")
_FLOAT4: Final = Struct(">f")
_FLOAT8: Final = Struct(">d")

_NAMES_NEEDED: Final = "its binary format is a number, and only the publisher's catalog has the name for it"
_INTERNAL: Final = "its binary format is PostgreSQL's internal one"

NO_BINARY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "money": "its binary format lacks the position of the decimal point, which depends on the publisher's lc_monetary",
        **dict.fromkeys(
            (
                "regproc",
                "regprocedure",
                "regoper",
                "regoperator",
                "regclass",
                "regcollation",
                "regtype",
                "regrole",
                "regnamespace",
                "regconfig",
                "regdictionary",
            ),
            _NAMES_NEEDED,
        ),
        **dict.fromkeys(
            ("pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"), _INTERNAL
        ),
    }
)
"""Types whose binary format cannot be read, and why."""


def refuse_binary(name: str, reason: str) -> Callable[[bytes], Any]:
    """Return a function that rejects every value in the binary format."""

    def read(data: bytes) -> Any:
        raise ValueRefused(
            f"a value of type {name} cannot be read in the binary format: {reason}", hint="set binary = false on the subscription"
        )

    return read


def _text(data: bytes) -> str:
    return data.decode()


def _integer(layout: Struct) -> Callable[[bytes], int]:
    def read(data: bytes) -> int:
        number: int = layout.unpack(data)[0]
        return number

    return read


def _integer_text(layout: Struct) -> Callable[[bytes], str]:
    def read(data: bytes) -> str:
        return str(layout.unpack(data)[0])

    return read


def _float(layout: Struct) -> Callable[[bytes], float]:
    def read(data: bytes) -> float:
        number: float = layout.unpack(data)[0]
        return number

    return read


def _bool_value(data: bytes) -> bool:
    return _BOOLEANS[data]


_BOOLEANS: Final = MappingProxyType({b"t": True, b"f": False})


def _bool_from_binary(data: bytes) -> bool:
    return _BINARY_BOOLEANS[data]


_BINARY_BOOLEANS: Final = MappingProxyType({b"\x01": True, b"\x00": False})


def _bool_text(data: bytes) -> str:
    return "t" if _BINARY_BOOLEANS[data] else "f"


def _bytea_value(data: bytes) -> bytes:
    if data[:2] != b"\\x":
        return _escaped_bytea(data)
    return unhexlify(memoryview(data)[2:])


def _escaped_bytea(data: bytes) -> bytes:
    """Read the older text format, ``bytea_output = escape``: a backslash is doubled, unprintable bytes are octal."""
    found = bytearray()
    position = 0
    while position < len(data):
        byte = data[position]
        if byte != 0x5C:
            found.append(byte)
            position += 1
        elif data[position + 1] == 0x5C:
            found.append(byte)
            position += 2
        else:
            found.append(int(data[position + 1 : position + 4], 8))
            position += 4
    return bytes(found)


def _bytea_canonical(data: bytes) -> str:
    return "\\x" + data.hex()


def _uuid_value(data: bytes) -> UUID:
    return UUID(data.decode("ascii"))


def _uuid_from_binary(data: bytes) -> UUID:
    return UUID(bytes=data)


def _uuid_text(data: bytes) -> str:
    return str(UUID(bytes=data))


def _char_text(data: bytes) -> str:
    """Text of "char", one byte. Bytes that are not ASCII are octal, and zero is empty."""
    (byte,) = data
    if byte == 0:
        return ""
    return f"\\{byte:03o}" if byte & 0x80 else chr(byte)


def _bit_text(data: bytes) -> str:
    (length,) = _INT4.unpack_from(data)
    bits = data[4:]
    if length < 0 or len(bits) != -(-length // 8):
        raise ValueError("incorrect binary data format of bit")
    return f"{int.from_bytes(bits):0{len(bits) * 8}b}"[:length] if length else ""


def _tid_text(data: bytes) -> str:
    block, offset = _TID.unpack(data)
    return f"({block},{offset})"


def _lsn_text(data: bytes) -> str:
    (lsn,) = _UINT8.unpack(data)
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def _versioned_text(data: bytes) -> str:
    """Text of jsonb and jsonpath: a version byte, then text."""
    if data[0] != 1:
        raise ValueError("an unknown version of the binary format")
    return data[1:].decode()


def _snapshot_text(data: bytes) -> str:
    count, xmin, xmax = _SNAPSHOT.unpack_from(data)
    xids = [_UINT8.unpack_from(data, start)[0] for start in range(_SNAPSHOT.size, len(data), 8)]
    if len(xids) != count:
        raise ValueError("incorrect binary data format of pg_snapshot")
    return f"{xmin}:{xmax}:{','.join(map(str, xids))}"


BINARY_TEXT: Final[Mapping[str, Callable[[bytes], str]]] = MappingProxyType(
    {
        "bool": _bool_text,
        "bytea": _bytea_canonical,
        "char": _char_text,
        "int2": _integer_text(_INT2),
        "int4": _integer_text(_INT4),
        "int8": _integer_text(_INT8),
        "oid": _integer_text(_UINT4),
        "xid": _integer_text(_UINT4),
        "cid": _integer_text(_UINT4),
        "xid8": _integer_text(_UINT8),
        "tid": _tid_text,
        "float4": numerics.float4_text,
        "float8": numerics.float8_text,
        "numeric": numerics.numeric_text,
        "uuid": _uuid_text,
        "date": datetimes.date_text,
        "time": datetimes.time_text,
        "timetz": datetimes.timetz_text,
        "timestamp": datetimes.timestamp_text,
        "timestamptz": datetimes.timestamptz_text,
        "interval": datetimes.interval_text,
        "bit": _bit_text,
        "varbit": _bit_text,
        "inet": network.inet_text,
        "cidr": network.inet_text,
        "macaddr": network.macaddr_text,
        "macaddr8": network.macaddr_text,
        "point": geometry.point_text,
        "lseg": geometry.lseg_text,
        "box": geometry.box_text,
        "path": geometry.path_text,
        "polygon": geometry.polygon_text,
        "line": geometry.line_text,
        "circle": geometry.circle_text,
        "pg_lsn": _lsn_text,
        "jsonb": _versioned_text,
        "jsonpath": _versioned_text,
        "tsvector": textsearch.tsvector_text,
        "tsquery": textsearch.tsquery_text,
        "pg_snapshot": _snapshot_text,
        "txid_snapshot": _snapshot_text,
    }
)
"""From the binary format to PostgreSQL's own text."""

TEXT_VALUE: Final[Mapping[str, tuple[type, Callable[[bytes], Any]]]] = MappingProxyType(
    {
        "bool": (bool, _bool_value),
        "int2": (int, int),
        "int4": (int, int),
        "int8": (int, int),
        "oid": (int, int),
        "xid": (int, int),
        "cid": (int, int),
        "xid8": (int, int),
        "float4": (float, numerics.float4_value),
        "float8": (float, float),
        "numeric": (Decimal, numerics.numeric_value),
        "bytea": (bytes, _bytea_value),
        "uuid": (UUID, _uuid_value),
        "date": (datetime.date, datetimes.date_value),
        "time": (datetime.time, datetimes.time_value),
        "timetz": (datetime.time, datetimes.timetz_value),
        "timestamp": (datetime.datetime, datetimes.timestamp_value),
        "timestamptz": (datetime.datetime, datetimes.timestamptz_value),
    }
)
"""The Python class of values, and the function that reads them from text."""

BINARY_VALUE: Final[Mapping[str, Callable[[bytes], Any]]] = MappingProxyType(
    {
        "bool": _bool_from_binary,
        "int2": _integer(_INT2),
        "int4": _integer(_INT4),
        "int8": _integer(_INT8),
        "oid": _integer(_UINT4),
        "xid": _integer(_UINT4),
        "cid": _integer(_UINT4),
        "xid8": _integer(_UINT8),
        "float4": _float(_FLOAT4),
        "float8": _float(_FLOAT8),
        "bytea": bytes,
        "uuid": _uuid_from_binary,
    }
)
"""From the binary format to the Python object, for types where this is faster than through the text."""

TEXT_CANONICAL: Final[Mapping[str, Callable[[bytes], str]]] = MappingProxyType(
    {
        "timestamptz": datetimes.timestamptz_canonical,
        "bytea": lambda data: _text(data) if data[:2] == b"\\x" else _bytea_canonical(_escaped_bytea(data)),
    }
)
"""From text to PostgreSQL's own text under our settings, for types whose text depends on the settings of the publisher's session."""
