"""The PostgreSQL sink: what would go wrong, said before it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.sinks.postgres.catalog.schema import VERSION
from subscriber.sinks.postgres.sink import PostgresSink
from tests.support.database import Database
from tests.support.roles import role
from tests.support.sink_postgres import NAME, Feed, opened


def published(name: str, *columns: str, identity: str = "d", types: tuple[int, ...] = ()) -> PublishedTable:
    names = tuple(column.lstrip("*") for column in columns)
    keys = names if identity == "f" else tuple(column[1:] for column in columns if column.startswith("*"))
    return PublishedTable(
        name=TableName("public", name),
        relation_id=1,
        kind="r",
        columns=names,
        key_columns=keys,
        replica_identity=identity,
        column_types=types,
    )


async def findings(database: Database, *tables: PublishedTable, target: str | None = None, **options: Any) -> list[Finding]:
    feed = Feed(database, **options)
    found = await feed.new_sink(target).check(tables, two_phase=False)
    # nothing is changed by looking
    assert database.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'subscriber'") in (0, 1)
    return found


@pytest.fixture
def plain_role(target_db: Database) -> Iterator[str]:
    target_db.execute("CREATE ROLE checker LOGIN PASSWORD 'pw'")
    yield target_db.conninfo(user="checker", password="pw")
    target_db.execute("DROP OWNED BY checker; DROP ROLE checker")


@pytest.mark.matrix
async def test_nothing_wrong(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text, more int)")
    assert await findings(any_target_db, published("t", "*id", "v", types=(23, 25))) == []
    assert any_target_db.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'subscriber'") == 0


async def test_tables_that_do_not_fit(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE few (id int PRIMARY KEY); CREATE TABLE made (id int PRIMARY KEY, v int GENERATED ALWAYS AS (1) STORED);
        CREATE TABLE keyless (id int); CREATE VIEW seen AS TABLE few; CREATE TABLE wide (a int, b int, PRIMARY KEY (a, b));
        CREATE TABLE other (id bigint PRIMARY KEY, v varchar(5))
    """)
    tables = [
        published("nowhere", "*id"),
        published("few", "*id", "v"),
        published("made", "*id", "v"),
        published("seen", "*id"),
        published("keyless", "*id"),
        published("keyless", "id", identity="f"),
        published("wide", "*a", "b"),
        published("other", "*id", "v", types=(23, 25)),
    ]
    found = await findings(target_db, *tables)
    assert [(finding.severity, finding.message) for finding in found] == [
        ("error", 'logical replication target relation "public.nowhere" does not exist'),
        ("error", 'logical replication target relation "public.few" is missing replicated column: "v"'),
        ("error", 'logical replication target relation "public.made" has incompatible generated column: "v"'),
        ("error", 'cannot use relation "public.seen" as logical replication target'),
        (
            "warning",
            'UPDATE and DELETE will fail: logical replication target relation "public.keyless" has neither REPLICA IDENTITY index nor '
            "PRIMARY KEY column and published relation does not have REPLICA IDENTITY FULL",
        ),
        (
            "warning",
            "UPDATE and DELETE will fail: publisher did not send replica identity column expected by the logical replication "
            'target relation "public.wide"',
        ),
        ("warning", 'column "id" of table "public.other" is of type integer on the publisher and of type bigint in the target'),
        ("warning", 'column "v" of table "public.other" is of type text on the publisher and of type character varying(5) in the target'),
    ]
    assert all(finding.hint for finding in found)
    named = ["nowhere", "few", "made", "seen", "keyless", "wide", "other", "other"]
    assert [finding.table for finding in found] == [TableName("public", name) for name in named]
    # natively, too, CREATE SUBSCRIPTION demands a table, and leaves its columns to the table's synchronization
    assert [finding.table for finding in found if finding.refuses] == [TableName("public", "nowhere"), TableName("public", "seen")]


async def test_role_without_rights(target_db: Database, plain_role: str) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE s (id int PRIMARY KEY); GRANT SELECT, INSERT ON s TO checker;
        ALTER TABLE s ENABLE ROW LEVEL SECURITY
    """)
    database, owner = target_db.name, target_db.value("SELECT current_user::text")
    found = await findings(target_db, published("t", "*id"), published("s", "*id"), target=plain_role, run_as_owner=True)
    assert [finding.message for finding in found] == [
        'role "checker" may not set session_replication_role in the target',
        'role "checker" may not create schema "subscriber" in the target',
        'role "checker" lacks INSERT, UPDATE, DELETE, TRUNCATE, SELECT on table "public.t" of the target',
        'user "checker" cannot replicate into relation with row-level security enabled: "s"',
    ]
    target_db.execute(f"""
        GRANT SET ON PARAMETER session_replication_role TO checker; GRANT CREATE ON DATABASE {database} TO checker;
        GRANT ALL ON t TO checker
    """)
    try:
        assert await findings(target_db, published("t", "*id"), target=plain_role, run_as_owner=True) == []
        found = await findings(target_db, published("t", "*id"), target=plain_role)
        assert [finding.message for finding in found] == [f'role "checker" cannot SET ROLE to "{owner}", the owner of table "public.t"']
        target_db.execute("CREATE SCHEMA subscriber")
        found = await findings(target_db, target=plain_role)
        assert [finding.message for finding in found] == ['role "checker" may not create tables in schema "subscriber" of the target']
    finally:
        target_db.execute("REVOKE SET ON PARAMETER session_replication_role FROM checker")


async def test_columns_of_its_own_without_temporary_tables(target_db: Database) -> None:
    """A reconciliation keeps their values in temporary tables."""
    owner = f"owner_{target_db.name}"
    target_db.execute(f"""
        CREATE TABLE own (id int PRIMARY KEY, more int); CREATE TABLE same (id int PRIMARY KEY); CREATE TABLE bag (id int, more int);
        CREATE ROLE {owner}; GRANT USAGE ON SCHEMA public TO {owner}; ALTER TABLE own OWNER TO {owner}; ALTER TABLE same OWNER TO {owner};
        ALTER TABLE bag OWNER TO {owner}; REVOKE TEMPORARY ON DATABASE {target_db.name} FROM public
    """)
    try:
        tables = published("own", "*id"), published("same", "*id"), published("bag", "id", identity="n")
        (found,) = [finding for finding in await findings(target_db, *tables) if "temporary" in finding.message]
        assert (found.severity, found.table) == ("warning", TableName("public", "own"))
        assert f'role "{owner}" may not create temporary tables: table "public.own", which has columns of its own' in found.message
        target_db.execute(found.hint)
        assert await findings(target_db, published("own", "*id")) == []
    finally:
        target_db.execute(f"DROP OWNED BY {owner} CASCADE; DROP ROLE {owner}")


async def test_functions_that_were_revoked(target_db: Database) -> None:
    target_db.execute("""
        CREATE ROLE hardened LOGIN PASSWORD 'pw'; GRANT SET ON PARAMETER session_replication_role TO hardened;
        REVOKE EXECUTE ON FUNCTION pg_current_wal_flush_lsn, pg_blocking_pids, lo_create FROM PUBLIC
    """)
    target_db.execute(f"GRANT CREATE ON DATABASE {target_db.name} TO hardened")
    target = target_db.conninfo(user="hardened", password="pw")
    try:
        revoked = [
            ("error", "permission denied for function lo_create(oid) in the target"),
            (
                "warning",
                "permission denied for function pg_blocking_pids(integer) in the target: the log cannot say what a wait is for,"
                " and transactions are applied in parallel less often",
            ),
        ]
        found = await findings(target_db, target=target, synchronous_commit="local")
        assert [(finding.severity, finding.message) for finding in found] == revoked
        found = await findings(target_db, target=target, synchronous_commit="off")
        assert [(finding.severity, finding.message) for finding in found] == [
            *revoked,
            (
                "warning",
                "synchronous_commit = off has no effect: each commit waits until it is on disk, because of: "
                "permission denied for function pg_current_wal_flush_lsn",
            ),
        ]
    finally:
        target_db.execute("REVOKE SET ON PARAMETER session_replication_role FROM hardened")
        target_db.execute("DROP OWNED BY hardened; DROP ROLE hardened")


async def test_catalog_of_another_version_or_owner(target_db: Database, plain_role: str) -> None:
    feed = Feed(target_db)
    await feed.open()
    await feed.opened.close()
    assert await findings(target_db) == []
    found = await findings(target_db, target=plain_role)
    assert 'role "checker" cannot use schema "subscriber" of the target: permission denied for table pg_subscription' in [
        f.message for f in found
    ]
    target_db.execute("UPDATE subscriber.version SET version = 7")
    assert [finding.message for finding in await findings(target_db)] == [
        f'schema "subscriber" of the target has version 7, but this program needs version {VERSION}'
    ]


async def test_target_that_cannot_be_looked_at(target_db: Database) -> None:
    with pytest.raises(TargetUnavailable):
        await findings(target_db, target="host=127.0.0.1 port=1 dbname=x user=x")
    with pytest.raises(TargetError, match="password authentication failed"):
        await findings(target_db, target=target_db.conninfo(password="wrong"))


@pytest.mark.matrix
async def test_room_for_apply_workers(any_target_db: Database) -> None:
    """Connections and origins are counted, those of the subscription itself as free."""

    async def lacks(workers: int, *, target: str | None = None, again: bool = False) -> list[str]:
        sink = PostgresSink(target or any_target_db.dsn, options=SubscriptionOptions(), settings=Settings(apply_workers=workers))
        assert await sink.exists(NAME) is again or not again
        found = [each for each in await sink.check([], two_phase=False) if "apply_workers" in each.message]
        assert {each.severity for each in found} <= {"warning"}
        assert all("or decrease apply_workers" in each.hint for each in found)
        return [each.message for each in found]

    assert await lacks(1) == []
    assert await lacks(2) == []
    (line,) = await lacks(64)
    free = int(re.fullmatch(r"apply_workers = 64 needs 65 replication origins in the target: (\d+) are free", line)[1])  # type: ignore[index]
    assert await lacks(free - 1) == []
    assert len(await lacks(free)) == 1
    async with opened(any_target_db):
        # its apply session has one
        assert await lacks(free - 1, again=True) == []
    with role(any_target_db) as few:
        any_target_db.execute(f"ALTER ROLE {few.name} CONNECTION LIMIT 8; GRANT USAGE ON SCHEMA subscriber TO {few.name}")
        assert await lacks(4, target=few.conninfo, again=True) == []
        assert await lacks(5, target=few.conninfo, again=True) == [
            "apply_workers = 5 needs 8 connections with the target, with those of every run: 7 are free"
        ]
