"""What the lake has for each type, as in ``docs/reference/lake.md``, and whether a value that was read back is the publisher's.

Written again, independently of the program's own table, so that each finds the other's mistakes.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from subscriber.sinks.spark.schema.arrow_values import parse_array
from tests.support import every_type

SCALARS = {
    "bool": "bool",
    "int2": "int16",
    "int4": "int32",
    "int8": "int64",
    "oid": "int64",
    "float4": "float",
    "float8": "double",
    "date": "date32[day]",
    "timestamp": "timestamp[us]",
    "timestamptz": "timestamp[us, tz=UTC]",
    "bytea": "binary",
}
"""Arrow's names; ``numeric`` by its modifier, all others ``string``."""
ELEMENTS = {*SCALARS, "numeric", "text", "varchar", "bpchar", "char", "name", "json", "jsonb", "uuid"}
"""Types whose arrays are lists."""
ALIASES = {
    "boolean": "bool",
    "smallint": "int2",
    "integer": "int4",
    "int": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "character varying": "varchar",
    "character": "bpchar",
    '"char"': "char",
}
_SPECIAL = re.compile(r"NaN|[Ii]nfinity| BC|(?<!\d)\d{5,}-\d\d-\d\d|^\[|^\{\{|^\{\[")
"""Texts of which the lake cannot hold the value: of numeric, date, timestamps, and arrays."""


def lake_type(type_name: str) -> str:
    """Arrow's name for a column.

    Args:
        type_name: as ``format_type`` gives it.
    """
    base, array = re.subn(r"(\[\])+$", "", type_name)
    match = re.fullmatch(r"(numeric)\((\d+),(-?\d+)\)|([^(]+?)(?:\(\d+\))?( with(?:out)? time zone)?", base)
    name = base if match is None else match[1] or f"{match[4]}{match[5] or ''}"
    name = ALIASES.get(name, name)
    if array and name not in ELEMENTS:
        return "string"
    scalar = SCALARS.get(name, "string")
    if match is not None and match[1] and int(match[2]) <= 38 and 0 <= int(match[3]) <= int(match[2]):
        scalar = f"decimal128({match[2]}, {match[3]})"
    return f"list<{scalar}>" if array else scalar


def differences(
    rows: Mapping[int, Mapping[str, Any]], texts: list[tuple[int, dict[str, str | None]]], types: Mapping[str, str]
) -> list[str]:
    """What of the rows of a lake is not what the publisher has.

    Args:
        rows: of the lake, by id.
        texts: the publisher's.
        types: of the columns, as :func:`lake_type` names them.
    """
    found: list[str] = []
    for number, expected in texts:
        row = rows[number]
        special = json.loads(row["_special"] or "{}")
        for specimen in every_type.SPECIMENS:
            name, text = specimen.name, expected[specimen.name]
            if name in special:
                kept = types[name] != "string" and row[name] is None and special[name] == text and _SPECIAL.search(text or "")
                if not kept:
                    found.append(f"{name} of row {number}: beside its column {special[name]!r}, published {text!r}")
            elif not same(row[name], text, types[name]):
                found.append(f"{name} of row {number}: {row[name]!r}, published {text!r}")
    return found


def same(value: Any, text: str | None, type_: str) -> bool:
    """Whether a value is the one that PostgreSQL writes so, exactly."""
    if value is None or text is None:
        return value is None and text is None
    if type_.startswith("list<"):
        elements = parse_array(text)
        inner = type_[5:-1]
        return (
            elements is not None and len(elements) == len(value) and all(same(*pair, inner) for pair in zip(value, elements, strict=True))
        )
    match type_:
        case "bool":
            return bool(value is (text == "t"))
        case "int16" | "int32" | "int64":
            return type(value) is int and value == int(text)
        case "float":
            return struct.pack("f", value) == struct.pack("f", float(text)) or (value != value and text == "NaN")
        case "double":
            return struct.pack("d", value) == struct.pack("d", float(text)) or (value != value and text == "NaN")
        case "date32[day]":
            return type(value) is date and value.isoformat() == text
        case "timestamp[us]" | "timestamp[us, tz=UTC]":
            return type(value) is datetime and (value.tzinfo is not None) == type_.endswith("UTC]") and _moment(value) == text
        case "binary":
            return isinstance(value, bytes | bytearray) and f"\\x{bytes(value).hex()}" == text
        case "string":
            return type(value) is str and value == text
    return isinstance(value, Decimal) and format(value, "f") == text


def _moment(value: datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(sep=" ")
    text = text.rstrip("0") if "." in text else text
    return text if value.tzinfo is None else text + "+00"
