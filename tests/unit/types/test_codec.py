"""Values from texts and from the binary format. That both are PostgreSQL's is tested against a server, in integration/."""

from __future__ import annotations

import datetime
import math
import struct
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.types import Attribute, TypeFact, TypeKind, TypeRegistry, ValueRefused, codec
from subscriber.types.builtin import builtin_facts
from subscriber.types.codec import binary_problem

OIDS = {fact.name: fact.oid for fact in builtin_facts()}
REGISTRY = TypeRegistry()
CODECS = {name: codec(REGISTRY.resolve(oid)) for name, oid in OIDS.items()}

UTC = datetime.UTC

VALUES = [
    ("bool", "t", True),
    ("bool", "f", False),
    ("int2", "-32768", -32768),
    ("int8", "9223372036854775807", 2**63 - 1),
    ("oid", "4294967295", 2**32 - 1),
    ("xid8", "18446744073709551615", 2**64 - 1),
    ("float4", "0.1", 0.10000000149011612),
    ("float8", "0.1", 0.1),
    ("float8", "-Infinity", -math.inf),
    ("numeric", "1.500", Decimal("1.500")),
    ("numeric", "-Infinity", Decimal("-Infinity")),
    ("numeric", "9" * 1000 + "." + "1" * 500, Decimal("9" * 1000 + "." + "1" * 500)),
    ("bytea", "\\x00ff", b"\x00\xff"),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")),
    ("date", "2024-02-29", datetime.date(2024, 2, 29)),
    ("date", "0001-01-01", datetime.date(1, 1, 1)),
    ("date", "infinity", "infinity"),
    ("date", "0044-03-15 BC", "0044-03-15 BC"),
    ("date", "10000-01-01", "10000-01-01"),
    ("time", "23:59:59.999999", datetime.time(23, 59, 59, 999999)),
    ("time", "12:00:00.5", datetime.time(12, 0, 0, 500000)),
    ("time", "24:00:00", "24:00:00"),
    ("timetz", "12:34:56.7+05:30", datetime.time(12, 34, 56, 700000, datetime.timezone(datetime.timedelta(hours=5, minutes=30)))),
    ("timetz", "00:00:00-15:59:59", datetime.time(0, 0, 0, 0, datetime.timezone(-datetime.timedelta(hours=15, minutes=59, seconds=59)))),
    ("timestamp", "1999-12-31 23:59:59.1", datetime.datetime(1999, 12, 31, 23, 59, 59, 100000)),  # noqa: DTZ001
    ("timestamp", "-infinity", "-infinity"),
    ("timestamp", "294276-12-31 23:59:59", "294276-12-31 23:59:59"),
    ("timestamp", "4713-01-01 00:00:00 BC", "4713-01-01 00:00:00 BC"),
    ("timestamptz", "2024-01-01 02:00:00+00", datetime.datetime(2024, 1, 1, 2, tzinfo=UTC)),
    ("timestamptz", "2024-01-01 02:00:00.25-03:30", datetime.datetime(2024, 1, 1, 5, 30, 0, 250000, tzinfo=UTC)),
    ("timestamptz", "0044-03-15 00:00:00+00 BC", "0044-03-15 00:00:00+00 BC"),
    ("timestamptz", "infinity", "infinity"),
    ("timestamptz", "9999-12-31 23:00:00-05", "9999-12-31 23:00:00-05"),
    ("interval", "1 year -2 mons +3 days -04:05:06.7", "1 year -2 mons +3 days -04:05:06.7"),
    ("jsonb", '{"a": 1}', '{"a": 1}'),
    ("_int4", "{1,NULL,3}", [1, None, 3]),
    ("_int4", "{}", []),
    ("_int4", "{{1,2},{3,4}}", [[1, 2], [3, 4]]),
    ("_int4", "[0:1]={5,6}", "[0:1]={5,6}"),
    ("_text", '{"a,b","c\\"d","NULL",NULL,"\\\\"," ",""}', ["a,b", 'c"d', "NULL", None, "\\", " ", ""]),
    ("_bool", "{t,f}", [True, False]),
    ("_box", "{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    ("_bytea", '{"\\\\x00"}', [b"\x00"]),
    ("int4range", "[1,5)", "[1,5)"),
    ("money", "$1.00", "$1.00"),
]


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_values_of_texts(name: str, text: str, value: object) -> None:
    found = CODECS[name].value(text.encode(), binary=False)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, datetime.datetime | datetime.time):
        assert isinstance(found, datetime.datetime | datetime.time)
        assert found.tzinfo == value.tzinfo
    if isinstance(value, Decimal):
        assert str(found) == str(value)
    if not isinstance(value, str | list):
        assert isinstance(found, CODECS[name].python)


@pytest.mark.parametrize("name", ["float4", "float8", "numeric"])
def test_nan(name: str) -> None:
    value = CODECS[name].value(b"NaN", binary=False)
    assert isinstance(value, float | Decimal)
    assert math.isnan(value)


def test_texts_are_those_of_our_session_settings() -> None:
    text = CODECS["timestamptz"].text
    assert text(b"2024-01-01 02:00:00.5+02", binary=False) == "2024-01-01 00:00:00.5+00"
    assert text(b"2024-01-01 02:00:00+00", binary=False) == "2024-01-01 02:00:00+00"
    assert text(b"0099-01-01 02:00:00+01", binary=False) == "0099-01-01 01:00:00+00"
    assert CODECS["bytea"].text(b"a\\\\\\000\\377b", binary=False) == "\\x615c00ff62"
    assert CODECS["bytea"].value(b"a\\\\\\000\\377b", binary=False) == b"a\\\x00\xffb"


BAD_TEXTS = [
    ("bool", b"maybe"),
    ("int4", b"1x"),
    ("float8", b""),
    ("numeric", b"1..2"),
    ("bytea", b"\\xzz"),
    ("uuid", b"1"),
    ("date", b"2024-99-01"),
    ("timestamp", b"2024-01-01 99:00:00"),
    ("text", b"\xff"),
    ("_int4", b"{1,2"),
    ("_int4", b"1}"),
    ("_int4", b"{1}}"),
    ("_int4", b""),
    ("_int4", b"{a}"),
]


@pytest.mark.parametrize(("name", "data"), BAD_TEXTS)
def test_invalid_values_are_rejected_without_showing_them(name: str, data: bytes) -> None:
    with pytest.raises(ValueRefused) as refused:
        CODECS[name].value(data, binary=False)
    assert str(refused.value) == f"invalid value for type {CODECS[name].source}"


@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=80), st.booleans())
def test_any_bytes_are_read_or_refused(name: str, data: bytes, binary: bool) -> None:
    found = CODECS[name]
    for read in (found.text, found.value):
        try:
            value = read(data, binary=binary)
        except ValueRefused:
            continue
        assert isinstance(value, str | found.python)


def field(data: bytes | None) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def array(element: str, elements: list[bytes | None], sizes: list[int], bounds: list[int] | None = None) -> bytes:
    dimensions = b"".join(struct.pack(">ii", size, bound) for size, bound in zip(sizes, bounds or [1] * len(sizes), strict=True))
    return struct.pack(">iiI", len(sizes), None in elements, OIDS[element]) + dimensions + b"".join(map(field, elements))


def int4(number: int) -> bytes:
    return struct.pack(">i", number)


def test_arrays_in_the_binary_format() -> None:
    data = array("int4", [int4(1), None, int4(3), int4(4)], [2, 2])
    assert CODECS["_int4"].text(data, binary=True) == "{{1,NULL},{3,4}}"
    assert CODECS["_int4"].value(data, binary=True) == [[1, None], [3, 4]]
    assert CODECS["_int4"].text(array("int4", [int4(1), int4(2)], [2], [0]), binary=True) == "[0:1]={1,2}"
    assert CODECS["_text"].text(array("text", [b"null", b"", b'"', b"\\", b"a b", b"{"], [6]), binary=True) == (
        '{"null","","\\"","\\\\","a b","{"}'
    )
    assert CODECS["int2vector"].text(array("int2", [b"\x00\x01", b"\x00\x02"], [2], [0]), binary=True) == "1 2"


@given(st.lists(st.none() | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), min_size=1))
def test_an_array_of_texts_is_read_as_it_was_written(elements: list[str | None]) -> None:
    data = array("text", [None if element is None else element.encode() for element in elements], [len(elements)])
    text = CODECS["_text"].text(data, binary=True)
    assert CODECS["_text"].value(text.encode(), binary=False) == elements
    assert CODECS["_text"].value(data, binary=True) == elements


def test_ranges_in_the_binary_format() -> None:
    half_open = bytes([0x02]) + field(int4(1)) + field(int4(5))
    assert CODECS["int4range"].text(half_open, binary=True) == "[1,5)"
    assert CODECS["int4range"].text(bytes([0x01]), binary=True) == "empty"
    assert CODECS["int4range"].text(bytes([0x08 | 0x10]), binary=True) == "(,)"
    assert CODECS["int4multirange"].text(struct.pack(">i", 1) + field(half_open), binary=True) == "{[1,5)}"
    with pytest.raises(ValueRefused):
        CODECS["int4range"].text(half_open + b"x", binary=True)


def test_composite_values_in_the_binary_format() -> None:
    registry = TypeRegistry()
    registry.add([TypeFact(20_000, "app", "pair", TypeKind.COMPOSITE, attributes=(Attribute("a", 23), Attribute("b", 25)))])
    pair = codec(registry.resolve(20_000))

    def record(*fields: tuple[int, bytes | None]) -> bytes:
        return struct.pack(">i", len(fields)) + b"".join(struct.pack(">I", oid) + field(data) for oid, data in fields)

    assert pair.text(record((23, int4(7)), (25, b'a"b')), binary=True) == '(7,"a""b")'
    assert pair.text(record((23, None), (25, b"")), binary=True) == '(,"")'
    for wrong in (record((23, int4(7)), (23, int4(7))), record((23, None), (25, None), (25, None)), record((23, None))[:-1]):
        with pytest.raises(ValueRefused):
            pair.text(wrong, binary=True)


def test_types_whose_binary_format_is_rejected() -> None:
    registry = TypeRegistry()
    registry.add([TypeFact(20_000, "app", "offer", TypeKind.COMPOSITE, attributes=(Attribute("price", 790),))])
    assert binary_problem(registry.resolve(23)) is None
    assert binary_problem(registry.resolve(OIDS["aclitem"])) is None
    assert "lc_monetary" in (binary_problem(registry.resolve(790)) or "")
    assert "lc_monetary" in (binary_problem(registry.resolve(20_000)) or "")
    assert "regclass" in (binary_problem(registry.resolve(OIDS["_regclass"])) or "")
    assert binary_problem(registry.resolve(99_999)) == "the binary format of type with OID 99999 is unknown"
    with pytest.raises(ValueRefused) as refused:
        codec(registry.resolve(790)).text(bytes(8), binary=True)
    assert refused.value.hint == "set binary = false on the subscription"


@given(st.floats(width=32))
def test_float4_texts_are_the_shortest(number: float) -> None:
    text = CODECS["float4"].text(struct.pack(">f", number), binary=True)
    back = CODECS["float4"].value(text.encode(), binary=False)
    assert struct.pack(">f", float(str(back))) == struct.pack(">f", number) or math.isnan(number)


@given(st.floats())
def test_float8_texts_round_trip(number: float) -> None:
    text = CODECS["float8"].text(struct.pack(">d", number), binary=True)
    assert struct.pack(">d", float(text)) == struct.pack(">d", number) or math.isnan(number)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e15, "1e+15"),
        (123456789012345.0, "123456789012345"),
        (1e-4, "0.0001"),
        (1e-5, "1e-05"),
        (-0.0, "-0"),
        (1e100, "1e+100"),
        (0.5, "0.5"),
    ],
)
def test_float8_texts(number: float, text: str) -> None:
    assert CODECS["float8"].text(struct.pack(">d", number), binary=True) == text
