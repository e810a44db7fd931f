"""Both databases have another default for every setting that a session can make. Nothing of it may change what is replicated."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from subscriber import SchemaOptions, copy_schema, repair, verify
from subscriber.protocol.session_settings import PINNED, READING
from subscriber.sinks.postgres.session.settings import apply_settings
from subscriber.sinks.postgres.session.target import Target
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.session import Session
from tests.integration.subscription.test_schema_copy import BINDIR
from tests.integration.subscription.test_verified_tables import READABLE
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.every_type import ROWS, SETUP, create_table, fill
from tests.support.hostile import LOCALES, compile_locales, hostile_defaults, other_values
from tests.support.replica import replica

TABLES = r"""
CREATE TABLE app.found (id int PRIMARY KEY, words text[], amount money DEFAULT '1234.56');
CREATE INDEX ON app.found USING gin (words); ALTER TABLE app.found REPLICA IDENTITY FULL;
CREATE TABLE app.named (name text PRIMARY KEY, "Text" text DEFAULT E'a\\b''c', at timestamptz DEFAULT '2024-07-01 12:00+02', "null" text);
COMMENT ON TABLE app.named IS E'with \\ and ''';
CREATE VIEW app.seen AS SELECT name FROM app.named WHERE "null" = NULL
"""
ROWS_OF_OTHERS = r"""
INSERT INTO app.found SELECT i, ARRAY['a', 'b' || i], i * 1.11 FROM generate_series({0} + 1, {0} + 500) AS i;
INSERT INTO app.named (name, "Text") SELECT name || {0}, name FROM unnest(ARRAY[
    E'\\', E'\\''; DROP TABLE app.found; --', E'a\\''', '''', 'NULL', E'%s \\n']) AS name
"""
CHANGES = r"""
UPDATE app.every SET id = id + 1000;
UPDATE app.named SET "null" = name; UPDATE app.named SET name = name || E'\\2';
UPDATE app.found SET amount = '-92233720368547758.08' WHERE id = 7; DELETE FROM app.found WHERE id > 490
"""
FILTERED = "SELECT * FROM app.found WHERE words @> '{a}' ORDER BY id"
DAMAGE = r"""
SET session_replication_role = replica;
DELETE FROM app.named WHERE name LIKE E'%\\\\%'; INSERT INTO app.named VALUES (E'\\''; too much', E'\\');
UPDATE app.named SET "null" = E'\\' WHERE name LIKE '%NULL%';
UPDATE app.every SET d_texts = '{NULL,"NULL"}', c_money = '1' WHERE id % 2 = 0; RESET session_replication_role
"""


@pytest.fixture(scope="module")
def hostile_servers() -> Iterator[tuple[ServerAddress, ServerAddress, bool]]:
    """A publisher and a target that know more locales, and whether they do."""
    with tempfile.TemporaryDirectory(prefix="locales-") as directory, pytest.MonkeyPatch.context() as environment:
        has_locales = compile_locales(Path(directory))
        environment.setenv("LOCPATH", directory)
        with EmbeddedServer.create(18) as publisher, EmbeddedServer.create(18) as target:
            yield ServerAddress(publisher.dsn(), 18), ServerAddress(target.dsn(), 18), has_locales


@contextlib.asynccontextmanager
async def databases(servers: tuple[ServerAddress, ServerAddress, bool]) -> AsyncIterator[tuple[Database, Database]]:
    with fresh_database(servers[0], "pub") as publisher, fresh_database(servers[1], "tgt") as target:
        yield publisher, target


async def replicates(publisher: Database, target: Database, **options: Any) -> None:
    """Copy the schema and the rows, apply changes, verify and repair."""
    await copy_schema(connection=publisher.conninfo(), target=target.dsn, options=SchemaOptions(bindir=BINDIR), progress=lambda _: None)
    async with replica(publisher, target, **options) as found:
        await found.caught_up()
        fill(publisher, "every", first=ROWS, specimens=READABLE)
        publisher.execute(ROWS_OF_OTHERS.format(500))
        publisher.execute(CHANGES)
        await found.caught_up()
        same(publisher, target)
        name = found.subscription.name
        report = await verify(name, target=target.dsn, connection=publisher.conninfo())
        assert report.equal, report.to_json()
        target.execute(DAMAGE)
        report = await verify(name, target=target.dsn, connection=publisher.conninfo())
        assert {str(table.table): bool(table.differences) for table in report.tables} == {
            "app.every": True,
            "app.found": False,
            "app.named": True,
        }
        await repair(report, target=target.dsn)
        same(publisher, target)


def same(publisher: Database, target: Database) -> None:
    for query in (
        "SELECT t::text FROM app.every AS t ORDER BY id",
        'SELECT t::text FROM app.named AS t ORDER BY name COLLATE "C"',
        FILTERED,
        "SELECT pg_get_viewdef('app.seen'::regclass)",
        "SELECT obj_description('app.named'::regclass)",
        "SELECT attname, pg_get_expr(adbin, adrelid) FROM pg_attrdef JOIN pg_attribute ON (attrelid, attnum) = (adrelid, adnum)"
        " WHERE adrelid IN ('app.named'::regclass, 'app.found'::regclass) ORDER BY 1",
    ):
        there = target.fetch(query)
        for row, other in zip(publisher.fetch(query), there, strict=True):
            assert other == row


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", [0, pytest.param(1, marks=pytest.mark.endurance)])
async def test_every_setting_of_both_servers(hostile_servers: tuple[ServerAddress, ServerAddress, bool], variant: int) -> None:
    has_locales = hostile_servers[2]

    async def outcome(names: Collection[str] | None) -> Exception | None:
        async with databases(hostile_servers) as (publisher, target):
            publisher.execute(SETUP)
            create_table(publisher, "every", specimens=READABLE)
            publisher.execute(TABLES)
            fill(publisher, "every", specimens=READABLE)
            publisher.execute(ROWS_OF_OTHERS.format(0))
            publisher.execute("CREATE PUBLICATION pub FOR TABLE app.every, app.named, app.found WHERE (words @> '{a}')")
            locales = LOCALES[variant : variant + 2] if has_locales else (None, None)
            with (
                hostile_defaults(publisher, other_values(publisher, variant, locales[0]), names),
                hostile_defaults(target, other_values(target, variant, locales[1]), names),
            ):
                try:
                    await replicates(publisher, target, streaming=("parallel", "on")[variant])
                except Exception as error:  # noqa: BLE001
                    return error
        return None

    if (failure := await outcome(None)) is not None:
        async with databases(hostile_servers) as (publisher, _):
            names = sorted(other_values(publisher, variant))
        # which setting is it? Halve them as long as one half fails
        while len(names) > 1:
            halves = (names[: len(names) // 2], names[len(names) // 2 :])
            for half in halves:
                if (found := await outcome(half)) is not None:
                    names, failure = half, found
                    break
            else:
                break
        raise AssertionError(f"with {', '.join(names)}") from failure


@pytest.mark.matrix
async def test_every_session_has_the_settings(publisher_db: Database, any_target_db: Database) -> None:
    query = "SELECT lower(name), setting FROM pg_settings"
    with (
        hostile_defaults(publisher_db, other_values(publisher_db)),
        hostile_defaults(any_target_db, other_values(any_target_db)),
    ):
        target, wanted = Target(any_target_db.dsn), apply_settings("local")
        session = await target.connect("x", wanted)
        reader = await target.connect_asyncpg(session, "x", wanted)
        reading = await target.connect("x", READING)
        found = [
            (dict(await (await session.execute(query)).fetchall()), wanted),
            (dict(map(tuple, await reader.fetch(query))), wanted),
            (dict(await (await reading.execute(query)).fetchall()), READING),
        ]
        await session.close()
        await reader.close()
        await reading.close()
        for replication in (False, True):
            async with await Session.connect(publisher_db.conninfo(), application_name="x", replication=replication) as walsender:
                found.append(({name or "": value for name, value in await walsender.execute(query)}, READING))
        for settings, further in found:
            pinned = {"search_path": "", "statement_timeout": "0", "client_encoding": "UTF8", **PINNED, **further}
            # an older server lacks some
            assert {name: settings.get(name, value) for name, value in pinned.items()} == pinned
