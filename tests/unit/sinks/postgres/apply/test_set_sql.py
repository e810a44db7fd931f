"""The arrays that the PostgreSQL sink sends for runs of changes, and the runs that are no sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber._implementation import source_file
from subscriber.interfaces import TableName
from subscriber.protocol.messages import Message
from subscriber.sinks.postgres.apply import arrays
from subscriber.sinks.postgres.apply.arrays import text_array
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable
from tests.support.column_arrays import array_of
from tests.support.sink_postgres import UNCHANGED, Binary, Remote
from tests.unit.sinks.postgres.recording import INT4, column, send, table

TEXT, JSON, DATE, TIMESTAMP, TIMESTAMPTZ = 25, 114, 1082, 1114, 1184
compiled = arrays.__file__ != source_file(arrays.__name__)
INT4_ARRAY, TEXT_ARRAY, BOX_ARRAY = 1007, 1009, 1020
ID = column("id", INT4, "integer", array=INT4_ARRAY)
VALUE = column("v", array=TEXT_ARRAY)
LIST = column("n", INT4_ARRAY, "integer[]", array=TEXT_ARRAY, cast="integer[]")
T = Remote("t", "*id", "v", "n")
COUNTED = "::int4 FROM changed"


def plain(*, watched: bool = False, other_unique: bool = False, key_unique: bool = True) -> TargetTable:
    return table(columns=(ID, VALUE, LIST), watched=watched, other_unique=other_unique, key_unique=key_unique)


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        (plain(watched=True), [T.insert(number, "x", None) for number in range(9)]),
        (plain(), [T.insert(number, "x", None) for number in range(7)]),
        (plain(), [T.delete(number, None, None) for number in range(15)]),
        (plain(), [T.insert(Binary(bytes(4)), Binary(b"x"), Binary(b"x")) for _ in range(9)]),
        (plain(), [T.update(1, "x", None) for _ in range(17)]),
        (plain(other_unique=True), [T.update(number, "x", None) for number in range(17)]),
        (plain(key_unique=False), [T.delete(number, None, None) for number in range(17)]),
        (plain(), [T.update(number + 1, "x", None, old=(number, None, None)) for number in range(17)]),
    ],
    ids=["trigger", "short", "short for a search", "binary array", "same key", "other unique index", "key of partitions", "key changes"],
)
async def test_runs_that_are_sent_one_by_one(target: TargetTable, messages: list[Message]) -> None:
    sent = await send(target, T.relation, *messages)
    assert len(sent) == len(messages)
    assert not any(one.statement.together for one in sent)


async def test_partition_whose_sets_missed_rows_does_not_affect_another_one() -> None:
    other = Remote("u", "*id", "v", "n", relation_id=T.relation_id + 1)
    target = plain()
    both = [target, replace(target, name=TableName("public", "u"))]
    messages: list[Message] = [T.relation, other.relation]
    messages += [remote.insert(number, "x", None) for remote in (T, other) for number in range(9)]
    sent = await send(both, *messages, without_sets={target.name})
    assert [one.statement.together for one in sent] == [False] * 9 + [True]


async def test_origins_of_rows_are_reported_one_by_one() -> None:
    changes: list[Message] = [
        *(T.insert(number, "x", None) for number in range(8)),
        *(T.delete(number, None, None) for number in range(16)),
    ]
    sent = await send(plain(), T.relation, *changes, differs=1)
    assert [one.statement.together for one in sent] == [True] + [False] * 16


def test_elements_of_arrays_are_exact() -> None:
    assert text_array([b"a", None, b""], b";") == b'{"a";NULL;""}'
    assert text_array([b"NULL", b'"', b"\\", b"{,}"], b",") == rb'{"NULL","\"","\\","{,}"}'
    found = array_of([b"ab", None], 25, binary=True)
    assert found is not None
    assert found.hex() == "0000000100000001000000190000000200000001" + "000000026162" + "ffffffff"
    long = [b"x" * size for size in (0, 195, 196, 200, 5000)]
    found = array_of(long, 25, binary=True)
    assert found is not None
    assert found[20:] == b"".join([len(value).to_bytes(4) + value for value in long])


async def test_a_text_that_is_no_plain_number_is_sent_as_it_is() -> None:
    (sent,) = await send(plain(), T.relation, *(T.insert(f" {number}", "x", None) for number in range(8)))
    assert sent.values[0] == b'{" 0"," 1"," 2"," 3"," 4"," 5"," 6"," 7"}'
    assert sent.formats == [0, 1, 1]


async def test_types_whose_binary_format_is_no_text() -> None:
    target = table(columns=(ID, column("v", JSON, "json", array=199), column("n", 1700, "numeric", array=1231)), watched=False)
    (sent,) = await send(target, T.relation, *(T.insert(number, "{}", "1") for number in range(8)))
    assert (sent.values[1], sent.formats) == (text_array([b"{}"] * 8, b","), [int(compiled), 0, int(compiled)])


@pytest.mark.skipif(not compiled, reason="integers are converted by the compiled core")
@pytest.mark.parametrize(("oid", "size"), [(21, 2), (23, 4), (20, 8)])
def test_integers_in_binary_format(oid: int, size: int) -> None:
    greatest = min(256**size // 2, 10**18) - 1
    numbers = [0, 1, -1, 255, -256, greatest, -greatest, -greatest - 1 if size < 8 else 0]
    binary = [number.to_bytes(size, signed=True) for number in numbers]
    texts: list[bytes | None] = [str(number).encode() for number in numbers]
    assert array_of([*texts, None], oid) == array_of([*binary, None], oid, binary=True)
    for other in (b"", b"-", b"+1", b" 1", b"1_0", b"0x1", b"1.0", b"--1", str(greatest + 1).encode(), str(-greatest - 2).encode()):
        assert array_of([b"1", other], oid) is None


@pytest.mark.skipif(not compiled, reason="numerics are converted by the compiled core")
def test_numerics_in_binary_format() -> None:
    fields = {
        "0": "0001 0000 0000 0000 0000",
        "0.05": "0002 0000 0000 0002 0000 01f4",
        "-12345.67": "0003 0001 4000 0002 0001 0929 1a2c",
        "10000": "0002 0001 0000 0000 0001 0000",
        "9999.00000": "0003 0000 0000 0005 270f 0000 0000",
    }
    texts: list[bytes | None] = [text.encode() for text in fields]
    assert array_of([*texts, None], 1700) == array_of([*map(bytes.fromhex, fields.values()), None], 1700, binary=True)
    for other in ("", "-", "NaN", "Infinity", "-Infinity", ".5", "5.", "1e3", "+1", " 1", "1 ", "1.2.3", "1_0", "0x1", "1" * 1001):
        assert array_of([b"1", other.encode()], 1700) is None


@pytest.mark.skipif(not compiled, reason="dates and times are converted by the compiled core")
@pytest.mark.parametrize(
    ("oid", "text"),
    [
        *((DATE, text) for text in ("infinity", "0044-03-15 BC", "10000-01-01", "0999-01-01", "2023-02-29", "1900-02-29", "2024-04-31")),
        *((DATE, text) for text in ("2024-13-01", "2024-00-01", "2024-01-00", "2024/01/01", "2024-01-01 ", "2024-01-1", "")),
        *((TIMESTAMP, f"2024-01-01 {text}") for text in ("24:00:00", "00:60:00", "00:00:60", "00:00:00.", "00:00:00.1234567", "00:00:0x")),
        *((TIMESTAMP, text) for text in ("infinity", "2024-01-01T00:00:00", "2024-01-01 00:00:00+00", "2024-01-01", "2024-01-01 00.00:00")),
        *(
            (TIMESTAMPTZ, f"2024-01-01 00:00:00{text}")
            for text in ("", " UTC", "Z", "+", "+1", "+16", "+01:60", "+01:00:00:00", "+01x", "+1:0")
        ),
        (TIMESTAMPTZ, "2024-01-01 00:00:00+00 BC"),
    ],
)
def test_dates_and_times_that_are_sent_as_texts(oid: int, text: str) -> None:
    assert array_of([text.encode()], oid) is None


@pytest.mark.skipif(not compiled, reason="booleans are converted by the compiled core")
def test_booleans_in_binary_format() -> None:
    assert array_of([b"t", None, b"f"], 16) == array_of([b"\1", None, b"\0"], 16, binary=True)
    assert array_of([b"true"], 16) is None


async def test_full_updates_are_one_set_up_to_a_change_of_the_key() -> None:
    full = Remote("t", "id", "v", "n", identity="f")
    same = [full.update(number, UNCHANGED, "{1}", old=(number, None if number > 4 else "old", None)) for number in range(16)]
    other = full.update(17, UNCHANGED, "{1}", old=(16, "old", None))
    together, moved = [each for each in await send(plain(), full.relation, *same, other) if each.statement.message_type]
    assert together.statement.together
    assert together.sql.count("unnest") == 2
    assert together.values[2] == b"16"
    assert not moved.statement.together
    assert moved.values == [b"17", None, b"{1}", b"16"]
