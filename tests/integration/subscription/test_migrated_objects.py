"""A schema with every kind of object, migrated and cut over: pg_dump shows the same on both sides, and what it does not show is equal."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from subscriber import Migration, TargetError, cutover, verify
from subscriber.subscription.management.schema import SchemaOptions, copy_schema
from subscriber.subscription.migration import migration as module
from tests.conftest import Servers
from tests.integration.subscription.test_schema_copy import BINDIR, EVERY_KIND
from tests.integration.subscription.test_whole_migration import properties
from tests.support.database import WAIT_SECONDS, Database, ServerAddress, fresh_database
from tests.support.roles import role

OBJECTS = """
ALTER TABLE k.plain REPLICA IDENTITY FULL; ALTER TABLE k.inherits REPLICA IDENTITY FULL;
INSERT INTO k.plain VALUES (1); INSERT INTO k.parent (a, b) VALUES (1, 'x'), (2, 'y'); REFRESH MATERIALIZED VIEW k.materialized;
CREATE TABLE k.numbered (a int GENERATED ALWAYS AS IDENTITY (START 5 INCREMENT 3) PRIMARY KEY, b serial UNIQUE, c text COLLATE "C");
ALTER TABLE k.numbered ALTER c SET STORAGE MAIN;
CREATE INDEX k_numbered_c ON k.numbered (lower(c) COLLATE "C" DESC) WHERE a > 0; ALTER TABLE k.numbered ALTER c SET STATISTICS 77;
INSERT INTO k.numbered (c) VALUES ('ä'), ('z'), ('Z'); SELECT nextval('k.sequence'), nextval('k.sequence');
CREATE MATERIALIZED VIEW k.empty AS SELECT a FROM k.numbered WITH NO DATA; ALTER TABLE k.numbered SET (fillfactor = 71);
CREATE FUNCTION k.e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; CREATE PUBLICATION mine FOR TABLE k.plain;
CREATE EVENT TRIGGER every_trigger ON sql_drop EXECUTE FUNCTION k.e(); ALTER EVENT TRIGGER every_trigger DISABLE;
ALTER TABLE k.numbered OWNER TO {role}; GRANT SELECT (a), UPDATE (b) ON k.numbered TO {role}; ALTER SCHEMA k OWNER TO {role};
GRANT EXECUTE ON FUNCTION k.trigger() TO {role} WITH GRANT OPTION; REVOKE ALL ON FUNCTION k.trigger() FROM PUBLIC;
GRANT USAGE ON TYPE k.enum TO {role}; GRANT USAGE ON SEQUENCE k.sequence TO {role}; GRANT USAGE ON FOREIGN SERVER every_server TO {role};
ALTER DEFAULT PRIVILEGES FOR ROLE {role} REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC; CREATE POLICY mine ON k.child TO {role} USING (a > 0);
ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'; GRANT CREATE ON DATABASE {name} TO {role}; COMMENT ON DATABASE {name} IS 'the shop';
ALTER ROLE {role} IN DATABASE {name} SET work_mem = '7MB'; ALTER DATABASE {name} OWNER TO {role}
"""
ICU = """
CREATE COLLATION k.german (provider = icu, locale = 'de-u-co-phonebk', deterministic = false);
CREATE TABLE k.sorted (a text COLLATE k.german PRIMARY KEY); CREATE INDEX ON k.sorted (a COLLATE "sv-x-icu");
INSERT INTO k.sorted VALUES ('ä'), ('z'), ('a'), ('af')
"""
_NOISE = re.compile(r"^(?:--.*|\\(?:un)?restrict .*|)\n", re.MULTILINE)


def shown(database: Database, left_out: str) -> list[str]:
    """The statements of pg_dump with owners and privileges, without those of the migration."""
    options = ["--schema-only", "--exclude-schema=subscriber", "--dbname", database.dsn]
    done = subprocess.run([f"{BINDIR}/pg_dump", *options], capture_output=True, text=True, check=True)
    return [each.strip() for each in _NOISE.sub("", done.stdout).split(";\n") if left_out not in each]


def contents(database: Database) -> list[object]:
    """What pg_dump does not show, without the fence of the old database."""
    views = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relkind = 'm' AND c.relispopulated ORDER BY 1"
    tables = [name for (name,) in database.fetch(views)]
    return [
        [row for row in properties(database) if "default_transaction_read_only" not in str(row[2])],
        database.fetch("SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'k' ORDER BY 1"),
        [(table, database.fetch(f"SELECT * FROM {table} ORDER BY 1")) for table in [*tables, "k.numbered", "k.parent", "k.plain"]],
        database.value("SELECT datdba::regrole::text FROM pg_database WHERE datname = current_database()"),
    ]


def has_icu(database: Database) -> bool:
    """Whether the server was built with it."""
    try:
        database.execute("CREATE COLLATION of_icu (provider = icu, locale = 'de'); DROP COLLATION of_icu")
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


@pytest.fixture(
    params=[(15, 18), *(pytest.param((version, version), marks=pytest.mark.endurance) for version in (15, 18))],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def pair(request: pytest.FixtureRequest, servers: Servers) -> Iterator[tuple[Database, Database]]:
    """A publisher and a target."""
    with contextlib.ExitStack() as stack:
        addresses = (
            ServerAddress(servers.get(role, version).dsn(), version)
            for role, version in zip(("publisher", "target"), request.param, strict=True)
        )
        publisher, target = (stack.enter_context(fresh_database(address, "obj")) for address in addresses)
        yield publisher, target


async def test_every_kind_of_object(pair: tuple[Database, Database]) -> None:
    publisher, target = pair
    publisher.execute(EVERY_KIND)
    icu = all(map(has_icu, pair))
    if icu:
        publisher.execute(ICU)
    said, name = list[str](), f"objects_{publisher.name}"
    with role(publisher) as owner:
        target.execute(f"CREATE ROLE {owner.name}")
        publisher.execute(OBJECTS.format(role=owner.name, name=publisher.name))
        options = SchemaOptions(bindir=BINDIR, owners=True, publications=True, event_triggers=True)
        migration = Migration(
            name, connection=publisher.dsn, target=target.dsn, publication=name, schema=options, tell=said.append, verification=False
        )
        running = asyncio.create_task(migration.run())
        await heard(running, said, "ready for the cutover")
        await cutover(name, target=target.dsn, tell=said.append)
        migration.stop()
        await running
        for database in pair:
            database.reconnect()
        assert contents(target) == contents(publisher)
        assert len(publisher.fetch("SELECT FROM k.materialized")) == 2
        if icu:
            order = "SELECT a FROM k.sorted ORDER BY a"
            assert target.fetch(order) == publisher.fetch(order) == [("a",), ("ä",), ("af",), ("z",)]
        # 16 and later name the table of a view's column only where it is needed
        before, after = ([re.sub(r"\b(numbered|parent)[.]a\n", r"a\n", each) for each in shown(database, name)] for database in pair)
        assert after == before
        for database in pair:
            database.execute("SET default_transaction_read_only = off")
            database.execute(f"ALTER DATABASE {database.name} OWNER TO CURRENT_USER; DROP OWNED BY {owner.name} CASCADE")
            database.execute(f"ALTER ROLE {owner.name} IN DATABASE {database.name} RESET ALL")
        target.execute(f"DROP ROLE {owner.name}")


async def heard(running: asyncio.Task[bool], said: list[str], text: str, times: int = 1) -> None:
    """Wait until a migration says this."""
    async with asyncio.timeout(2 * WAIT_SECONDS):
        while sum(text in line for line in said) < times:
            assert not running.done(), (await running, said)
            await asyncio.sleep(0.05)


async def test_a_server_without_icu(servers: Servers) -> None:
    with contextlib.ExitStack() as stack:
        addresses = (ServerAddress(servers.get(role, version).dsn(), version) for role, version in (("publisher", 15), ("target", 18)))
        publisher, target = (stack.enter_context(fresh_database(address, "icu")) for address in addresses)
        if has_icu(target) or not has_icu(publisher):
            pytest.skip("PostgreSQL 18 has ICU here, or 15 has not")
        publisher.execute(f"CREATE SCHEMA k; {ICU}")
        with pytest.raises(TargetError, match="ICU is not supported in this build") as refused:
            await copy_schema(connection=publisher.dsn, target=target.dsn, options=SchemaOptions(bindir=BINDIR))
        assert "while creating collation k.german in the target" in refused.value.one_line()


LATER = """
CREATE SEQUENCE {0}_s; CREATE VIEW {0}_v AS SELECT id FROM t; CREATE MATERIALIZED VIEW {0}_m AS SELECT id FROM t;
CREATE INDEX {0}_i ON t (v); CREATE FUNCTION {0}_f() RETURNS int LANGUAGE sql AS 'SELECT 1'
"""
FOUND = """
SELECT num_nonnulls(to_regclass('{0}_s'), to_regclass('{0}_v'), to_regclass('{0}_i'), to_regproc('{0}_f'),
    (SELECT CASE WHEN relispopulated THEN 1 END FROM pg_class WHERE relname = '{0}_m'))
"""


async def test_objects_that_are_created_late(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # the bugs were that they were missing, and that a restart of the migration ended when a table without a key was published
    monkeypatch.setattr(module, "_NEW_TABLES_SECONDS", 0.2)
    name, said = f"late_{publisher18_db.name}", list[str]()
    publisher18_db.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION {name} FOR ALL TABLES"
    )

    async def verified(*arguments: object, **more: object) -> object:
        publisher18_db.execute(LATER.format("verified"))
        return await verify(*arguments, **more)  # type: ignore[arg-type]

    def migrated() -> tuple[Migration, asyncio.Task[bool]]:
        said.clear()
        options = SchemaOptions(bindir=BINDIR)
        found = Migration(name, connection=publisher18_db.dsn, target=target_db.dsn, publication=name, schema=options, tell=said.append)
        return found, asyncio.create_task(found.run())

    monkeypatch.setattr(module, "verify", verified)
    migration, running = migrated()
    await heard(running, said, "ready for the cutover")
    assert target_db.value(FOUND.format("verified")) == 5
    # the bug was that the tables which a cutover makes were new: all objects were created again while writers were stopped
    publisher18_db.execute("CREATE SCHEMA subscriber; CREATE TABLE subscriber.fence (id serial PRIMARY KEY)")
    assert await migration._schema.is_complete()
    publisher18_db.execute("DROP SCHEMA subscriber CASCADE")
    monkeypatch.setattr(module, "verify", verify)
    publisher18_db.execute(LATER.format("later"))
    await asyncio.to_thread(target_db.wait, FOUND.format("later"), 5)
    publisher18_db.execute("CREATE TABLE keyless (id int)")
    keyless = 'table "public.keyless" has no replica identity: once published, its UPDATE and DELETE fail on the publisher'
    await heard(running, said, f'{keyless} (hint: ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL;)')
    migration.stop()
    assert await running
    migration, running = migrated()
    await heard(running, said, f"run: {keyless}")
    assert not any("ready for the cutover" in line for line in said)
    publisher18_db.execute("INSERT INTO t VALUES (2, 2); INSERT INTO keyless VALUES (1)")
    await asyncio.to_thread(target_db.wait, "SELECT (SELECT count(*)::int FROM t) + (SELECT count(*)::int FROM keyless)", 3)
    publisher18_db.execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
    await heard(running, said, "ready for the cutover")
    migration.stop()
    assert await running
