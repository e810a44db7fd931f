"""Every type between PostgreSQL 18 and any other version, in both directions: as texts, in binary, and into columns of other types."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import psycopg
import pytest

from tests.integration.subscription.test_verified_tables import READABLE
from tests.support.database import Database
from tests.support.every_type import ROWS, SETUP, Specimen, create_table, fill, texts
from tests.support.replica import Replica, replica

pytestmark = pytest.mark.matrix

TABLES = {"copied": "PRIMARY KEY", "keyed": "PRIMARY KEY", "whole": ""}
"""By name, with what follows the column id. The rows of the first are copied, those of the others are streamed."""
CHANGES = (
    # in a set, as the rows were inserted: their number is above the least of a set
    "UPDATE app.keyed SET c_bool = NOT c_bool",
    # one by one: keys change
    "UPDATE app.keyed SET id = id + 1000 WHERE id < 5; DELETE FROM app.keyed WHERE id IN (6, 7)",
    # found by all of their values
    "UPDATE app.whole SET id = id + 1000; DELETE FROM app.whole WHERE id % 2 = 0",
)
IN_OTHER_TYPES = {
    "c_bool": "varchar(5)",
    "c_int2": "int8",
    "c_int4": "numeric",
    "c_int8": "text",
    "c_numeric": "text",
    "c_float4": "text",
    "c_float8": "text",
    "c_date": "text",
    "c_time": "interval",
    "c_timestamp": "varchar",
    "c_timestamptz": "text",
    "c_interval": "text",
    "c_uuid": "text",
    "c_json": "text",
    "c_jsonb": "json",
    "c_varchar": "text",
    "c_bpchar": "text",
    "c_inet": "text",
    "c_text": "varchar",
    "d_numeric_10_3": "numeric",
    "d_varchar_10": "char(20)",
    "d_timestamp_3": "timestamptz",
    "d_int4_2d": "int8[]",
    "d_texts": "varchar[]",
    "d_enum": "text",
    "d_price": "numeric(20, 1)",
    "d_positive": "float8",
    "a_int4": "numeric[]",
    "a_date": "text",
}
"""Other types, which accept the texts of the values."""
OF_ONE_SERVER = ("c_reg", "a_reg", "d_enums", "d_positives", "d_price", "d_pair", "d_nested", "d_row", "d_catalog", "d_yes", "d_identifier")
"""Their binary formats hold oids, which belong to other objects and types on another server. Native replicates them as texts only."""


def known(databases: Sequence[Database]) -> tuple[Specimen, ...]:
    """The types that all servers have, with the values that all of them accept and write alike (before 16, not all of "char")."""
    found = []
    for specimen in READABLE:
        if any(database.value(f"SELECT to_regtype($t${specimen.type}$t$) IS NULL") for database in databases):
            continue
        values = []
        for value in specimen.values:
            written = {_written(database, f"({value})::{specimen.type}") for database in databases}
            if len(written) == 1 and None not in written:
                values.append(value)
        found.append(replace(specimen, values=tuple(values)))
    return tuple(found)


def _written(database: Database, expression: str) -> str | None:
    try:
        return str(database.value(f"SELECT format('%s', {expression})"))
    except (psycopg.Error, UnicodeDecodeError):
        return None


def read_in_binary(database: Database, specimens: Sequence[Specimen]) -> tuple[Specimen, ...]:
    """The types that have a binary format, with the values that PostgreSQL itself reads as it writes them (not an empty tsquery)."""
    found = []
    with database.connect() as session:
        for number, specimen in enumerate(specimens):
            session.execute(f"CREATE TEMPORARY TABLE one{number} (v {specimen.type})".encode())
            values = []
            for value in specimen.values:
                with contextlib.suppress(psycopg.Error):
                    with session.cursor().copy(f"COPY (SELECT ({value})::{specimen.type}) TO STDOUT (FORMAT binary)".encode()) as out:
                        data = b"".join(map(bytes, out))
                    with session.cursor().copy(f"COPY one{number} FROM STDIN (FORMAT binary)".encode()) as into:
                        into.write(data)
                    values.append(value)
            if values:
                found.append(replace(specimen, values=tuple(values)))
    return tuple(found)


async def caught_up(found: Replica) -> None:
    try:
        await found.caught_up()
    except TimeoutError as error:
        raise AssertionError(str(found.subscription.status.last_error)) from error


async def assert_every_value_arrives(publisher: Database, target: Database, *, binary: bool) -> None:
    for database in (publisher, target):
        database.execute(SETUP)
    specimens = known((publisher, target))
    assert len(specimens) > 150
    if binary:
        specimens = tuple(each for each in read_in_binary(target, specimens) if not each.name.startswith(OF_ONE_SERVER))
        assert len(specimens) > 100
    for database in (publisher, target):
        for table, key in TABLES.items():
            create_table(database, table, key, specimens)
    others = () if binary else tuple(each for each in specimens if each.name in IN_OTHER_TYPES)
    create_table(publisher, "other", specimens=others)
    create_table(target, "other", specimens=tuple(replace(each, type=IN_OTHER_TYPES[each.name]) for each in others))
    publisher.execute(
        "ALTER TABLE app.whole REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE app.copied, app.keyed, app.whole, app.other"
    )
    fill(publisher, "copied", specimens=specimens)
    fill(publisher, "other", specimens=others)
    async with replica(publisher, target, binary=binary) as found:
        await caught_up(found)
        fill(publisher, "keyed", specimens=specimens)
        fill(publisher, "whole", specimens=specimens)
        fill(publisher, "other", ROWS, specimens=others)
        for statement in CHANGES:
            publisher.execute(statement)
        await caught_up(found)
        assert found.subscription.status.last_error is None
    names = [each.name for each in specimens]
    for table in TABLES:
        rows = texts(target, table, names)
        assert len(rows) == {"copied": ROWS, "keyed": ROWS - 2, "whole": ROWS // 2}[table]
        for row, expected in zip(rows, texts(publisher, table, names), strict=True):
            assert row == expected, table
    if others:
        # what the output function writes, read as the other type
        listed = ", ".join(
            f"CASE WHEN {each.name} IS NOT NULL THEN format('%s', {each.name})::{IN_OTHER_TYPES[each.name]}::text END" for each in others
        )
        publisher.execute("SET TimeZone = 'UTC'; SET extra_float_digits = 1")
        target.execute("SET TimeZone = 'UTC'")
        expected_others = publisher.fetch(f"SELECT id, {listed} FROM app.other ORDER BY id")
        own = ", ".join(f"{each.name}::text" for each in others)
        assert target.fetch(f"SELECT id, {own} FROM app.other ORDER BY id") == expected_others
        assert len(expected_others) == 2 * ROWS


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_from_any_version(publisher_db: Database, target_db: Database, binary: bool) -> None:
    await assert_every_value_arrives(publisher_db, target_db, binary=binary)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_into_any_version(publisher18_db: Database, any_target_db: Database, binary: bool) -> None:
    await assert_every_value_arrives(publisher18_db, any_target_db, binary=binary)
