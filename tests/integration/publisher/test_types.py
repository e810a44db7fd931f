"""Every type of PostgreSQL's catalogue: what is read from COPY's binary format is the text that PostgreSQL itself writes."""

from __future__ import annotations

import pytest

from subscriber.types import PgType, TypeRegistry, codec, copy_decoder
from subscriber.types.codec import binary_problem
from subscriber.walreceiver.session import Session
from subscriber.walreceiver.type_reader import type_facts
from tests.support import every_type
from tests.support.database import Database


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    publisher18_db.execute(every_type.SETUP)
    every_type.create_table(publisher18_db, "t")
    every_type.fill(publisher18_db, "t")
    return publisher18_db


async def column_types(database: Database, relation: str) -> dict[str, PgType]:
    rows = database.fetch(f"""
        SELECT attname, atttypid::int8, atttypmod FROM pg_attribute
         WHERE attrelid = '{relation}'::regclass AND attnum > 0 ORDER BY attnum
    """)
    session = await Session.connect(database.dsn, application_name="test")
    try:
        registry = TypeRegistry()
        registry.add(await type_facts(session, [oid for _, oid, _ in rows]))
    finally:
        await session.close()
    assert not registry.unknown(oid for _, oid, _ in rows)
    return {name: registry.resolve(oid, modifier) for name, oid, modifier in rows}


async def test_the_list_is_complete(source: Database) -> None:
    names = source.fetch("""
        SELECT t.typname FROM pg_type AS t
         WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype IN ('b', 'e', 'r', 'm', 'd')
           AND NOT EXISTS (SELECT FROM pg_type AS e WHERE e.typarray = t.oid)
    """)
    assert {name for (name,) in names} == every_type.BUILTIN_NAMES
    # and built-in ones are known without asking
    oids = source.fetch("""
        SELECT t.oid::int8 FROM pg_type AS t LEFT JOIN pg_type AS e ON e.typarray = t.oid
         WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype IN ('b', 'r', 'm') AND COALESCE(e.typtype, '-') NOT IN ('c', 'p')
    """)
    assert TypeRegistry().unknown(oid for (oid,) in oids) == frozenset()


async def test_binary_values_are_read_as_postgresql_writes_them(source: Database) -> None:
    types = await column_types(source, "app.t")
    readable = [name for name, found in types.items() if binary_problem(found) is None and found.builtin not in {"aclitem", "gtsvector"}]
    readable = [name for name in readable if name not in {"a_aclitem", "a_gtsvector"}]
    unreadable = {name.removeprefix("c_") for name in types if name.startswith("c_") and name not in readable}
    assert unreadable == {
        *("aclitem", "gtsvector", "money", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"),
        *("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "regproc", "regprocedure", "regoper", "regoperator", "regclass"),
        *("regtype", "regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"),
    }
    options = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c search_path="
    columns = ", ".join(f'"{name}"' for name in readable)
    rows = {}
    with source.connect(options=options, client_encoding="UTF8") as connection:
        for binary in (False, True):
            decoder = copy_decoder(len(readable), binary=binary)
            query = f"COPY (SELECT {columns} FROM app.t ORDER BY id) TO STDOUT {'BINARY' if binary else ''}"
            with connection.cursor().copy(query.encode()) as copy:
                rows[binary] = [row for data in copy for row in decoder.feed(bytes(data))]
            decoder.finish()
    assert len(rows[True]) == len(rows[False]) == every_type.ROWS
    expected = [values for _, values in every_type.texts(source, "t")]
    for row, of_text, of_binary in zip(expected, rows[False], rows[True], strict=True):
        for name, text_value, binary_value in zip(readable, of_text, of_binary, strict=True):
            if name == "id":
                continue
            read = codec(types[name])
            from_text = None if text_value is None else read.text(text_value, binary=False)
            from_binary = None if binary_value is None else read.text(binary_value, binary=True)
            assert (name, from_text) == (name, row[name])
            assert (name, from_binary) == (name, row[name])
            if text_value is not None and binary_value is not None:
                values = read.value(text_value, binary=False), read.value(binary_value, binary=True)
                assert (name, repr(values[0])) == (name, repr(values[1]))


async def test_powers_of_two_as_float4(source: Database) -> None:
    """Where the shortest text is hardest to find: the gap below is half of the one above."""
    source.execute(
        "CREATE TABLE app.floats AS SELECT (2.0::float8 ^ i)::float4 AS f, 2.0::float8 ^ (i * 8) AS d FROM generate_series(-126, 127) AS i"
    )
    with source.connect(options="-c extra_float_digits=3") as connection:
        copies = {}
        for binary in (False, True):
            decoder = copy_decoder(2, binary=binary)
            with connection.cursor().copy(f"COPY app.floats TO STDOUT {'BINARY' if binary else ''}".encode()) as copy:
                copies[binary] = [row for data in copy for row in decoder.feed(bytes(data))]
    registry = TypeRegistry()
    for index, oid in enumerate((700, 701)):
        read = codec(registry.resolve(oid))
        for of_text, of_binary in zip(copies[False], copies[True], strict=True):
            assert read.text(of_binary[index] or b"", binary=True) == (of_text[index] or b"").decode()
