"""Which values get into which columns of other databases."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import types as sql
from sqlalchemy.dialects import mysql, sqlite

from subscriber.sinks.sqlalchemy.schema.converters import Unfit, converter
from subscriber.types import TypeFact, TypeKind, TypeRegistry, ValueRefused, codec
from subscriber.types.builtin import builtin_facts

OIDS = {fact.name: fact.oid for fact in builtin_facts()}
MOOD = 20_000
REGISTRY = TypeRegistry()
REGISTRY.add([TypeFact(MOOD, "app", "mood", TypeKind.ENUM, labels=("sad", "ok"))])
OIDS["mood"] = MOOD

EXACT: list[tuple[str, sql.TypeEngine[Any], str, bytes, object]] = [
    ("sqlite", sqlite.TEXT(), "numeric", b"1.500", "1.500"),
    ("sqlite", sqlite.TEXT(), "bool", b"t", "t"),
    ("sqlite", sqlite.INTEGER(), "int8", b"-9223372036854775808", -(2**63)),
    ("sqlite", sqlite.INTEGER(), "bool", b"t", 1),
    ("sqlite", sqlite.INTEGER(), "numeric", b"10.00", 10),
    ("sqlite", sqlite.BOOLEAN(), "bool", b"f", 0),
    ("sqlite", sqlite.REAL(), "float8", b"Infinity", math.inf),
    ("sqlite", sqlite.REAL(), "float8", b"NaN", "NaN"),
    ("sqlite", sqlite.REAL(), "int4", b"7", 7.0),
    ("sqlite", sqlite.NUMERIC(), "float4", b"0.5", 0.5),
    ("sqlite", sql.DATE(), "date", b"infinity", "infinity"),
    ("sqlite", sql.DATETIME(), "timestamptz", b"2024-01-01 02:00:00+02", "2024-01-01 00:00:00+00"),
    ("sqlite", sql.NullType(), "float4", b"0.1", 0.10000000149011612),
    ("sqlite", sql.NullType(), "bytea", b"\\x00", b"\x00"),
    ("sqlite", sqlite.BLOB(), "text", b"a", "a"),
    ("sqlite", sql.NullType(), "xid8", b"18446744073709551615", "18446744073709551615"),
    ("mysql", mysql.LONGTEXT(), "date", b"infinity", "infinity"),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"12345678.90", Decimal("12345678.90")),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"1.5000", Decimal("1.5000")),
    ("mysql", mysql.DECIMAL(10, 2), "int4", b"-5", Decimal(-5)),
    ("mysql", mysql.DECIMAL(2, 2), "numeric", b"0.99", Decimal("0.99")),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"0.000", Decimal("0.000")),
    ("mysql", mysql.TINYINT(display_width=1), "bool", b"t", 1),
    ("mysql", mysql.BIGINT(unsigned=True), "xid8", b"18446744073709551615", 2**64 - 1),
    ("mysql", mysql.DOUBLE(), "float8", b"0.1", 0.1),
    ("mysql", mysql.FLOAT(), "float4", b"0.5", 0.5),
    ("mysql", mysql.DATE(), "date", b"2024-02-29", datetime.date(2024, 2, 29)),
    ("mysql", mysql.TIME(fsp=6), "time", b"24:00:00", "24:00:00"),
    ("mysql", mysql.TIME(), "time", b"12:00:00", datetime.time(12)),
    ("mysql", mysql.DATETIME(fsp=3), "timestamptz", b"2024-01-01 02:00:00.5+02", datetime.datetime(2024, 1, 1, 0, 0, 0, 500000)),  # noqa: DTZ001
    ("mysql", mysql.DATETIME(fsp=6), "timestamptz", b"2024-01-01 02:00:00.5+00", "2024-01-01 02:00:00.5"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamp", b"0001-01-01 00:00:00", "0001-01-01 00:00:00"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamptz", b"2024-01-01 02:00:00+02", datetime.datetime(2024, 1, 1)),  # noqa: DTZ001
    ("mysql", mysql.LONGBLOB(), "bytea", b"\\x00ff", b"\x00\xff"),
    ("mysql", mysql.VARBINARY(10), "text", "ä".encode(), "ä".encode()),
    ("mysql", mysql.BINARY(2), "bytea", b"\\x00ff", b"\x00\xff"),
    ("mysql", mysql.ENUM("ok", "sad", "more"), "mood", b"sad", "sad"),
    ("mysql", mysql.CHAR(5), "bpchar", b"ab   ", "ab"),
    ("mysql", mysql.CHAR(5), "bpchar", b"     ", ""),
    ("mysql", mysql.VARCHAR(5), "bpchar", b"ab   ", "ab   "),
    ("mysql", mysql.CHAR(5), "text", b"ab", "ab"),
    ("mysql", mysql.VARCHAR(3), "text", "ä  ".encode(), "ä  "),
    # the server refuses it
    ("mysql", mysql.VARCHAR(3), "text", b"abcd", "abcd"),
    ("mysql", mysql.TINYTEXT(), "text", b"a" * 254 + b" ", "a" * 254 + " "),
    ("mysql", mysql.TEXT(), "text", b" " * 65535, " " * 65535),
    ("mysql", mysql.MEDIUMTEXT(), "text", b" " * 65536, " " * 65536),
    ("mysql", mysql.LONGTEXT(), "text", b" " * 2**24, " " * 2**24),
    ("mysql", sql.UUID(), "uuid", b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
]

REFUSED: list[tuple[str, sql.TypeEngine[Any], str, bytes]] = [
    ("sqlite", sqlite.INTEGER(), "xid8", b"9223372036854775808"),
    ("sqlite", sqlite.INTEGER(), "numeric", b"1.5"),
    ("sqlite", sqlite.INTEGER(), "numeric", b"NaN"),
    ("sqlite", sqlite.INTEGER(), "numeric", b"1e30"),
    ("sqlite", sqlite.REAL(), "int8", b"9007199254740993"),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"1.005"),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"123456789.00"),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"NaN"),
    ("mysql", mysql.DECIMAL(10, 2), "numeric", b"1e100"),
    ("mysql", mysql.DECIMAL(2, 2), "numeric", b"1.00"),
    ("mysql", mysql.DECIMAL(10, 2), "int8", b"100000000"),
    ("mysql", mysql.DOUBLE(), "float8", b"NaN"),
    ("mysql", mysql.DOUBLE(), "float4", b"-Infinity"),
    ("mysql", mysql.FLOAT(), "int4", b"16777217"),
    ("mysql", mysql.DATE(), "date", b"infinity"),
    ("mysql", mysql.DATE(), "date", b"0044-03-15 BC"),
    ("mysql", mysql.TIME(fsp=3), "time", b"12:00:00.0001"),
    ("mysql", mysql.DATETIME(), "timestamp", b"2024-01-01 00:00:00.5"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamp", b"infinity"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamp", b"4713-01-01 00:00:00 BC"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamp", b"10000-01-01 00:00:00"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamptz", b"10000-01-01 00:00:00+00"),
    ("mysql", mysql.DATETIME(fsp=6), "timestamptz", b"-infinity"),
    ("mysql", mysql.BINARY(3), "bytea", b"\\x00ff"),
    ("mysql", mysql.CHAR(5), "text", b"ab "),
    ("mysql", mysql.VARCHAR(3), "text", b"ab  "),
    ("mysql", mysql.VARCHAR(3), "bpchar", b"    "),
    ("mysql", mysql.TINYTEXT(), "text", "ä".encode() * 127 + b"  "),
    ("mysql", mysql.TEXT(), "text", b" " * 65536),
    ("mysql", mysql.MEDIUMTEXT(), "text", b" " * 2**24),
]

UNFIT: list[tuple[str, sql.TypeEngine[Any], str]] = [
    ("sqlite", sqlite.INTEGER(), "text"),
    ("sqlite", sqlite.INTEGER(), "float8"),
    ("sqlite", sqlite.REAL(), "numeric"),
    ("sqlite", sqlite.NUMERIC(), "numeric"),
    ("sqlite", sqlite.NUMERIC(), "text"),
    ("sqlite", sql.DATE(), "varbit"),
    ("sqlite", sqlite.JSON(), "json"),
    ("mysql", mysql.INTEGER(), "text"),
    ("mysql", mysql.DOUBLE(), "numeric"),
    ("mysql", mysql.FLOAT(), "float8"),
    ("mysql", mysql.FLOAT(7, 2), "float4"),
    ("mysql", mysql.DATE(), "timestamp"),
    ("mysql", mysql.DATETIME(), "date"),
    ("mysql", mysql.TIME(), "timetz"),
    ("mysql", mysql.ENUM("ok"), "mood"),
    ("mysql", mysql.ENUM("ok"), "text"),
    ("mysql", mysql.SET("ok"), "text"),
    ("mysql", mysql.JSON(), "jsonb"),
    ("mysql", mysql.BIT(4), "bit"),
    ("mysql", mysql.YEAR(), "int4"),
    ("mysql", sql.UUID(), "text"),
]


def reading(name: str) -> Any:
    return codec(REGISTRY.resolve(OIDS[name]))


def names(cases: list[Any]) -> list[str]:
    return [f"{dialect}-{column_type.__class__.__name__}-{name}" for dialect, column_type, name, *_ in cases]


@pytest.mark.parametrize(("dialect", "column_type", "name", "data", "parameter"), EXACT, ids=names(EXACT))
def test_values_that_fit(dialect: str, column_type: sql.TypeEngine[Any], name: str, data: bytes, parameter: object) -> None:
    found = converter(reading(name), column_type, dialect).text(data)
    assert (found, type(found)) == (parameter, type(parameter))


@pytest.mark.parametrize(("dialect", "column_type", "name", "data"), REFUSED, ids=names(REFUSED))
def test_values_that_do_not_fit(dialect: str, column_type: sql.TypeEngine[Any], name: str, data: bytes) -> None:
    with pytest.raises(ValueRefused) as refused:
        converter(reading(name), column_type, dialect).text(data)
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("in the target")
    # never a value in a message; these are kinds of values
    if data not in {b"infinity", b"-infinity", b"NaN"}:
        assert data.decode() not in str(refused.value)


@pytest.mark.parametrize(("dialect", "column_type", "name"), UNFIT, ids=names(UNFIT))
def test_types_that_do_not_fit(dialect: str, column_type: sql.TypeEngine[Any], name: str) -> None:
    with pytest.raises(Unfit, match="cannot be stored without loss"):
        converter(reading(name), column_type, dialect)


@pytest.mark.parametrize("dialect", ["sqlite", "mysql", "mssql"])
def test_text_takes_every_type(dialect: str) -> None:
    for name in OIDS:
        assert converter(reading(name), sql.TEXT(), dialect).text(b"2024-01-01") is not None, name
