"""The PostgreSQL sink: values of all kinds of types, as text and as binary, through INSERT, UPDATE and both ways of finding a row."""

from __future__ import annotations

import psycopg
import pytest

from subscriber.protocol.messages import TupleData
from tests.support.database import Database
from tests.support.sink_postgres import Remote, opened

SETUP = """
CREATE SCHEMA app;
CREATE TYPE app.mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN app.posint AS int CHECK (value > 0);
CREATE DOMAIN app.required AS text NOT NULL;
CREATE TYPE app.pair AS (a int, b app.mood);
CREATE TYPE app.floatrange AS RANGE (subtype = float8);
"""

COLUMNS = {
    "c_bool": ("bool", ["true", "false"]),
    "c_int2": ("int2", ["-32768", "32767"]),
    "c_int4": ("int4", ["-2147483648", "0"]),
    "c_int8": ("int8", ["-9223372036854775808", "9223372036854775807"]),
    "c_numeric": ("numeric", ["NaN", "123456789012345678901234567890.0001000"]),
    "c_scaled": ("numeric(10, 3)", ["1.500", "-0.001"]),
    "c_float4": ("float4", ["NaN", "1.1754944e-38"]),
    "c_float8": ("float8", ["-Infinity", "0.1"]),
    "c_text": ("text", ["", "Grüße 🐘 \\ ' \" \n\t"]),
    "c_varchar": ("varchar(10)", ["abc  ", "äöü"]),
    "c_char": ("char(5)", ["ab   ", "     "]),
    "c_name": ("name", ["a", "b"]),
    "c_bytea": ("bytea", ["\\x", "\\x00ff5c27"]),
    "c_date": ("date", ["infinity", "0044-03-15 BC"]),
    "c_time": ("time", ["24:00:00", "00:00:00.000001"]),
    "c_timetz": ("timetz", ["12:00:00+15:59", "23:59:59.999999-00:30"]),
    "c_timestamp": ("timestamp", ["-infinity", "4713-01-01 00:00:00 BC"]),
    "c_timestamptz": ("timestamptz", ["infinity", "294276-12-31 23:59:59.999999+00"]),
    "c_interval": ("interval", ["-1 years -2 mons +3 days -04:05:06.7", "00:00:00"]),
    "c_uuid": ("uuid", ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    "c_inet": ("inet", ["192.168.0.1/24", "::1"]),
    "c_cidr": ("cidr", ["10.0.0.0/8", "2001:db8::/32"]),
    "c_bit": ("bit(4)", ["1010", "0000"]),
    "c_varbit": ("varbit", ["", "10101"]),
    "c_json": ("json", ['{"b": 1,  "a": [null, "x"]}', "3"]),
    "c_jsonb": ("jsonb", ['{"a": [null, "x"]}', "3"]),
    "c_jsonpath": ("jsonpath", ['$."a"[*]', "strict $"]),
    "c_tsvector": ("tsvector", ["'a':1 'b':2A", ""]),
    "c_int4s": ("int4[]", ["{1,NULL,3}", "[0:1]={5,6}"]),
    "c_texts": ("text[]", ['{"a,b","c\\"d",NULL,"NULL"}', "{{a,b},{c,d}}"]),
    "c_range": ("int4range", ["[1,5)", "empty"]),
    "c_tstzrange": ("tstzrange", ['["2024-01-01 00:00:00+00",)', "(,)"]),
    "c_point": ("point", ["(1,2.5)", "(0,0)"]),
    "c_enum": ("app.mood", ["sad", "happy"]),
    "c_enums": ("app.mood[]", ["{sad,ok}", "{}"]),
    "c_domain": ("app.posint", ["1", "7"]),
    "c_required": ("app.required", ["x", ""]),
    "c_pair": ("app.pair", ["(1,ok)", "(,)"]),
    "c_pairs": ("app.pair[]", ['{"(1,ok)",NULL}', "{}"]),
    "c_floatrange": ("app.floatrange", ["[0.1,Infinity)", "[-1.5,0)"]),
    "c_pglsn": ("pg_lsn", ["0/0", "16/B374D848"]),
}


def create(database: Database, key: str) -> None:
    described = ", ".join(f"{name} {sql_type}" for name, (sql_type, _) in COLUMNS.items())
    database.execute(SETUP)
    database.execute(f"CREATE TABLE app.t (id int{key}, {described}); CREATE TABLE app.expected (LIKE app.t)")


def fetch(database: Database, table: str) -> list[tuple[object, ...]]:
    with database.connect(options="-c extra_float_digits=3") as connection:
        columns = ", ".join(f"{name}::text" for name in COLUMNS)
        return connection.execute(f"SELECT id, {columns} FROM app.{table} ORDER BY id".encode()).fetchall()


def as_sent(database: Database, binary: bool) -> list[TupleData]:
    """The rows of ``expected`` as a publisher's walsender would send them."""
    rows = []
    options = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3"
    with psycopg.connect(database.conninfo(options=options), client_encoding="UTF8") as connection:
        result = connection.pgconn.exec_params(b"SELECT * FROM app.expected ORDER BY id", None, result_format=int(binary))
        for number in range(result.ntuples):
            values = [result.get_value(number, column) for column in range(result.nfields)]
            kinds = bytes(ord("n") if value is None else ord("b" if binary else "t") for value in values)
            rows.append(TupleData(kinds, values))
    return rows


def fill_expected(database: Database) -> None:
    with database.connect() as connection:
        for number in (0, 1):
            literals = ", ".join(f"$v${values[number]}$v$::{sql_type}" for sql_type, values in COLUMNS.values())
            connection.execute(f"INSERT INTO app.expected VALUES ({number}, {literals})".encode())
        connection.execute("INSERT INTO app.expected (id, c_required) VALUES (2, 'null everywhere else')")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("identity", ["d", pytest.param("f", marks=pytest.mark.matrix)])
async def test_every_type(any_target_db: Database, binary: bool, identity: str) -> None:
    create(any_target_db, " PRIMARY KEY" if identity == "d" else "")
    fill_expected(any_target_db)
    rows = as_sent(any_target_db, binary)
    full = identity == "f"
    remote = Remote("t", "id" if full else "*id", *COLUMNS, identity=identity, namespace="app")
    async with opened(any_target_db) as feed:
        inserts = [remote.insert() for _ in rows]
        for insert, new in zip(inserts, rows, strict=True):
            insert.new = new
        await feed.apply(remote.relation, *inserts)
        assert fetch(any_target_db, "t") == fetch(any_target_db, "expected")

        # each row becomes another one, found by its key or by everything it holds
        order = [1, 2, 0]
        updates = [remote.update(old=()) for _ in rows]
        for update, before, after in zip(updates, rows, [rows[index] for index in order], strict=True):
            update.new = TupleData(before.kinds[:1] + after.kinds[1:], [before.values[0], *after.values[1:]])
            if full:
                update.old = before
            else:
                update.key = None
        await feed.apply(*updates)
        expected = [(index, *fetch(any_target_db, "expected")[order[index]][1:]) for index in range(3)]
        assert fetch(any_target_db, "t") == expected
        assert feed.sink.statistics.updates == 3

        deletes = [remote.delete() for _ in rows]
        for delete, update in zip(deletes, updates, strict=True):
            old = (
                update.new
                if full
                else TupleData(update.new.kinds[:1] + b"n" * len(COLUMNS), [update.new.values[0], *([None] * len(COLUMNS))])
            )
            delete.key, delete.old = (None, old) if full else (old, None)
        await feed.apply(*deletes)
        assert any_target_db.value("SELECT count(*) FROM app.t") == 0


async def test_types_may_differ_where_texts_fit(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id bigint PRIMARY KEY, v varchar, n text, e numeric)")
    remote = Remote("t", "*id", "v", "n", "e")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "text", 42, "1e3"), remote.update(1, "t", "{}", "5"))
        assert target_db.fetch("SELECT id, v, n, e::text FROM t") == [(1, "t", "{}", "5")]


async def test_locale_dependent_settings_of_the_database_do_not_matter(target_db: Database) -> None:
    name = target_db.name
    target_db.execute(f"""
        ALTER DATABASE {name} SET datestyle = 'German, DMY'; ALTER DATABASE {name} SET intervalstyle = sql_standard;
        ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'; ALTER DATABASE {name} SET search_path = nowhere;
        ALTER DATABASE {name} SET default_transaction_isolation = serializable; ALTER DATABASE {name} SET statement_timeout = '20s';
        ALTER DATABASE {name} SET client_encoding = latin1
    """)
    target_db.execute("CREATE TABLE public.t (id int PRIMARY KEY, d date, i interval, z timestamptz, v text)")
    remote = Remote("t", "*id", "d", "i", "z", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "2024-03-04", "-1 days +02:00:00", "2024-03-04 05:06:07+00", "ł"))
        query = "SELECT to_char(d, 'YYYYMMDD'), extract(epoch FROM i)::int, extract(epoch FROM z)::int, v FROM public.t"
        assert target_db.fetch(query) == [("20240304", -79200, 1709528767, "ł")]
        session = feed.opened.session
        assert await session.fetch("SHOW statement_timeout") == [("0",)]
        assert await session.fetch("SHOW default_transaction_isolation") == [("read committed",)]


async def test_target_in_another_encoding(target_db: Database) -> None:
    name = f"{target_db.name}_l1"
    target_db.execute(f"CREATE DATABASE {name} ENCODING latin1 LOCALE 'C' TEMPLATE template0")
    other = Database(target_db.server, name)
    try:
        other.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        remote = Remote("t", "*id", "v")
        async with opened(other) as feed:
            await feed.apply(remote.relation, remote.insert(1, "Grüße"))
            assert other.fetch("SELECT convert_to(v, 'latin1'), octet_length(v) FROM t") == [("Grüße".encode("latin1"), 5)]
    finally:
        other.close()
        target_db.execute(f"DROP DATABASE {name} WITH (FORCE)")
