"""Exported snapshots, and reading tables under them in parts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from subscriber.errors import PublisherError
from subscriber.interfaces import CopyFormat, PublishedTable, TableName
from subscriber.protocol.messages import Insert
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.copying.snapshot import ExportedSnapshot, SnapshotReader
from subscriber.walreceiver.copying.table_copy import (
    CopyPart,
    copy_parts,
    copy_query,
    is_intact,
    is_renamed,
    is_rewritten,
)
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import Session
from tests.support.database import Database
from tests.support.roles import role
from tests.support.streams import streaming, transactions

RANGE = 64 * 1024


def snapshot_of(database: Database, slot: str = "s"):  # type: ignore[no-untyped-def]
    return ExportedSnapshot.create(database.dsn, f"{slot}_{database.name}", application_name="test")


async def described(session: Session, name: str, publication: str = "p") -> PublishedTable:
    (table,) = await published_tables(session, [publication], TableName("public", name))
    return table


async def read(reader: SnapshotReader, table: PublishedTable, part: CopyPart, copy_format: CopyFormat = CopyFormat.TEXT) -> bytes:
    return b"".join([chunk async for chunk in reader.copy_out(copy_query(table, part, copy_format), copy_format)])


async def rows(reader: SnapshotReader, table: PublishedTable, range_size: int = 10**9) -> list[bytes]:
    """The rows of all parts, sorted."""
    found: list[bytes] = []
    for part in await copy_parts(reader, table, range_size):
        found += (await read(reader, table, part)).splitlines()
    return sorted(found)


@pytest.mark.matrix
async def test_every_change_is_in_the_snapshot_or_in_the_slot(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; INSERT INTO t VALUES (1), (2)")
    async with snapshot_of(publisher_db) as snapshot:
        publisher_db.execute("INSERT INTO t VALUES (3)")
        async with snapshot.reader() as reader:
            publisher_db.execute("INSERT INTO t VALUES (4)")
            table = await described(reader, "t")
            assert await rows(reader, table) == [b"1", b"2"]
        slot = snapshot.slot_name
    async with streaming(publisher_db, slot) as stream:
        inserted = [message.new.values[0] for message in await transactions(stream, 2) if isinstance(message, Insert)]
    assert inserted == [b"3", b"4"]


async def test_readers_keep_the_snapshot_after_its_block(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t AS SELECT 1 AS a; CREATE PUBLICATION p FOR TABLE t")
    async with snapshot_of(publisher_db) as snapshot:
        reader = await SnapshotReader.open(publisher_db.dsn, snapshot.snapshot_name, application_name="test")
    publisher_db.execute("INSERT INTO t VALUES (2)")
    assert await rows(reader, await described(reader, "t")) == [b"1"]
    await reader.close()
    with pytest.raises(PublisherError, match="snapshot"):
        await SnapshotReader.open(publisher_db.dsn, snapshot.snapshot_name, application_name="test")
    # the slot stays: it is what gives the rest
    assert publisher_db.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{snapshot.slot_name}'") == 1


async def test_idle_snapshot_is_not_timed_out(publisher18_db: Database) -> None:
    publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET idle_in_transaction_session_timeout = '20ms'")
    publisher18_db.execute("CREATE TABLE t AS SELECT 1 AS a; CREATE PUBLICATION p FOR TABLE t")
    async with snapshot_of(publisher18_db) as snapshot:
        # a session that keeps the setting is cut: so the timeout has passed for the snapshot's, too
        victim = await Session.connect(publisher18_db.dsn, application_name="victim")
        await victim.execute("SET idle_in_transaction_session_timeout = '20ms'")
        await victim.execute("BEGIN")
        gone = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'victim'"
        await asyncio.to_thread(publisher18_db.wait, gone, 0)
        await victim.close()
        async with snapshot.reader() as reader:
            assert await rows(reader, await described(reader, "t")) == [b"1"]


@pytest.mark.parametrize("copy_format", list(CopyFormat))
@pytest.mark.matrix
async def test_counts_and_formats(publisher_db: Database, copy_format: CopyFormat) -> None:
    publisher_db.execute(
        "CREATE TABLE t AS SELECT g AS a, E'new\\nline' AS b FROM generate_series(1, 20000) g; CREATE TABLE e (a int);"
        " CREATE PUBLICATION p FOR TABLE t, e"
    )
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        counted: list[int] = []
        table = await described(reader, "t")
        query = copy_query(table, CopyPart(table.name, table.relation_id, only=True), copy_format)
        chunks = [chunk async for chunk in reader.copy_out(query, copy_format, counted.append)]
        assert sum(counted) == 20000
        assert len(counted) > 1
        assert max(len(chunk) for chunk in chunks) < 256 * 1024
        data = b"".join(chunks)
        if copy_format is CopyFormat.BINARY:
            assert data.startswith(b"PGCOPY\n\xff\r\n\0")
            assert data.endswith(b"\xff\xff")
        else:
            assert data.splitlines()[0] == b"1\\tnew\\\\nline".decode("unicode_escape").encode()
            assert len(data.splitlines()) == 20000
        empty = await described(reader, "e")
        counted.clear()
        query = copy_query(empty, CopyPart(empty.name, empty.relation_id, only=True), copy_format)
        data = b"".join([chunk async for chunk in reader.copy_out(query, copy_format, counted.append)])
        assert sum(counted) == 0
        assert bool(data) == (copy_format is CopyFormat.BINARY)


@pytest.mark.publisher(min=15, lacks="row filters")
async def test_error_in_a_copy(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t (a int); INSERT INTO t SELECT 4711; CREATE PUBLICATION p FOR TABLE t WHERE (make_date(a, 13, 1) IS NULL)"
    )
    publisher_db.execute("CREATE TABLE u AS SELECT 1 AS a")
    async with snapshot_of(publisher_db) as snapshot:
        async with snapshot.reader() as reader:
            table = await described(reader, "t")
            with pytest.raises(PublisherError) as caught:
                await rows(reader, table)
            assert caught.value.sqlstate == "22008"
            assert "4711" not in caught.value.one_line()
        async with snapshot.reader() as reader:
            with pytest.raises(PublisherError, match="nothing_here"):
                [chunk async for chunk in reader.copy_out("COPY nothing_here TO STDOUT")]


@pytest.mark.publisher(min=14, lacks="reading of a ctid range alone")
async def test_ranges_cover_the_table(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text); INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(1, 5000) g;"
        f" DELETE FROM t WHERE a BETWEEN 1000 AND 2500; CREATE PUBLICATION p FOR TABLE t {publisher_db.row_filter('a % 3 = 0')}"
    )
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        table = await described(reader, "t")
        parts = await copy_parts(reader, table, RANGE)
        assert len(parts) > 10
        # rows written after the snapshot, past the measured end, are not in it; nor is any row twice
        publisher_db.execute("INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(6000, 7000) g")
        found = []
        async with snapshot.reader() as second:
            for number, part in enumerate(parts):
                found += (await read((reader, second)[number % 2], table, part)).splitlines()
        step = 3 if publisher_db.version >= 15 else 1
        expected = [number for number in range(1, 5001) if number % step == 0 and not 1000 <= number <= 2500]
        assert sorted(int(row.split(b"\t")[0]) for row in found) == expected


@pytest.mark.publisher(min=14, lacks="reading of a ctid range alone")
@pytest.mark.matrix
async def test_plan_of_a_range_reads_only_the_range(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t AS SELECT g AS a, repeat('x', 200) AS b FROM generate_series(1, 5000) g; CREATE PUBLICATION p FOR TABLE t"
    )
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        table = await described(reader, "t")
        query = copy_query(table, (await copy_parts(reader, table, RANGE))[1], CopyFormat.TEXT)
        select = query.removeprefix("COPY (").removesuffix(") TO STDOUT")
        plan = "\n".join(line or "" for (line,) in await reader.execute(f"EXPLAIN {select}"))
        assert "Tid Range Scan" in plan


async def test_inheritance_children_are_copied_on_their_own(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t (a int); CREATE TABLE child () INHERITS (t); INSERT INTO t VALUES (1); INSERT INTO child VALUES (2);"
        f" CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q FOR TABLE t {publisher_db.row_filter('a > 0')}"
    )
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        for publication in ("p", "q"):
            assert await rows(reader, await described(reader, "t", publication)) == [b"1"]
            assert await rows(reader, await described(reader, "child", publication)) == [b"2"]


@pytest.mark.matrix
async def test_partitioned_root(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TABLE r (a int, b text) PARTITION BY RANGE (a);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (1000);
        CREATE TABLE r2 (dropped int, b text, a int);
        ALTER TABLE r2 DROP COLUMN dropped;
        ALTER TABLE r ATTACH PARTITION r2 FOR VALUES FROM (1000) TO (2000) ;
        CREATE TABLE r3 PARTITION OF r FOR VALUES FROM (2000) TO (3000) PARTITION BY LIST (a);
        CREATE TABLE r31 PARTITION OF r3 DEFAULT;
        INSERT INTO r SELECT g, repeat('y', 300) FROM generate_series(0, 2999) g;
    """)
    publisher_db.execute(f"CREATE PUBLICATION p FOR TABLE r {publisher_db.row_filter('a % 2 = 0')} WITH (publish_via_partition_root)")
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        table = await described(reader, "r")
        assert [part.relation.name for part in await copy_parts(reader, table, 10**9)] == ["r"]
        parts = await copy_parts(reader, table, RANGE)
        assert {part.relation.name for part in parts} == {"r1", "r2", "r31"}
        assert len(parts) > 10 if publisher_db.version >= 14 else len(parts) == 3
        expected = sorted(f"{number}\t{'y' * 300}".encode() for number in range(0, 3000, 2 if publisher_db.version >= 15 else 1))
        assert await rows(reader, table, RANGE) == expected
        assert await rows(reader, table) == expected


async def test_partitions_without_select_privilege(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TABLE r (a int, b text) PARTITION BY RANGE (a);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (1000);
        INSERT INTO r SELECT g, repeat('y', 300) FROM generate_series(0, 999) g;
        CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root)
    """)
    with role(publisher_db) as reader_role:
        publisher_db.execute(f"GRANT SELECT ON r TO {reader_role.name}")
        async with snapshot_of(publisher_db) as snapshot:
            reader = await SnapshotReader.open(reader_role.conninfo, snapshot.snapshot_name, application_name="test")
            table = await described(reader, "r")
            assert table.size > RANGE
            assert [part.relation.name for part in await copy_parts(reader, table, RANGE)] == ["r"]
            assert len(await rows(reader, table, RANGE)) == 1000
            await reader.close()


RENAMED = "ALTER TABLE s.t RENAME TO u; "


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (RENAMED + "CREATE TABLE s.t (a int)", None),
        (RENAMED + "CREATE VIEW s.t AS SELECT a FROM s.u", None),
        ("ALTER SCHEMA s RENAME TO s_old; ALTER SCHEMA s_new RENAME TO s", None),
        # a part may take its time, and all the while nothing is locked that keeps a schema from being renamed
        (
            "ALTER SCHEMA s RENAME TO s_old; ALTER SCHEMA s_new RENAME TO s",
            "ALTER SCHEMA s RENAME TO s_new; ALTER SCHEMA s_old RENAME TO s",
        ),
    ],
    ids=["table", "view", "schema", "schema and back"],
)
async def test_name_that_moves_to_another_relation_is_detected(publisher_db: Database, change: str, undo: str | None) -> None:
    publisher_db.execute("CREATE SCHEMA s; CREATE TABLE s.t (a int); INSERT INTO s.t VALUES (1); CREATE PUBLICATION p FOR TABLE s.t")
    publisher_db.execute("CREATE SCHEMA s_new; CREATE TABLE s_new.t (a int); INSERT INTO s_new.t VALUES (2)")
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader, snapshot.reader() as second:
        (table,) = await published_tables(reader, ["p"])
        (part,) = await copy_parts(reader, table, RANGE)
        assert await is_intact(reader, part, read=False)
        # nothing is locked yet: that would be needed once it was read
        assert not await is_intact(reader, part, read=True)
        assert await reader.execute("SELECT a FROM s.t") == [("1",)]
        assert await is_intact(reader, part, read=True)
        assert not await is_renamed(reader, table)
        assert await is_intact(second, part, read=False)
        await reader.close()
        await asyncio.to_thread(publisher_db.execute, f"BEGIN; {change}; COMMIT")
        assert await is_renamed(second, table)
        await second.execute("SELECT a FROM s.t")
        if undo is not None:
            publisher_db.execute(f"BEGIN; {undo}; COMMIT")
        assert not await is_intact(second, part, read=True)


async def test_root_that_becomes_a_partition_of_another_table_is_detected(publisher_db: Database) -> None:
    """Which is read by its name, and locks the former."""
    publisher_db.execute("""
        CREATE TABLE r (a int) PARTITION BY LIST (a); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); INSERT INTO r VALUES (1);
        CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root)
    """)
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        async with snapshot.reader() as finding:
            table = await described(finding, "r")
            (part,) = await copy_parts(finding, table, 10**9)
        change = """
            BEGIN; ALTER TABLE r RENAME TO r_old; CREATE TABLE r (a int) PARTITION BY RANGE (a);
            ALTER TABLE r ATTACH PARTITION r_old FOR VALUES FROM (0) TO (10); COMMIT
        """
        await asyncio.to_thread(publisher_db.execute, change)
        assert await read(reader, table, part) == b"1\n"
        assert not await is_intact(reader, part, read=True)


async def test_rename_between_snapshot_and_description_is_detected(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int); CREATE TABLE t_new (a int); CREATE PUBLICATION p FOR ALL TABLES")
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        publisher_db.execute("ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; CREATE TABLE later (a int)")
        connection = await Session.connect(publisher_db.dsn, application_name="test")
        assert await is_renamed(reader, await described(connection, "t"))
        # all its rows come behind the snapshot, but perhaps by another name
        assert await is_renamed(reader, await described(connection, "later"))
        await connection.close()


@pytest.mark.publisher(min=14, lacks="reading of a ctid range alone")
async def test_rewritten_detached_partition_is_detected(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TABLE r (a int, b text) PARTITION BY RANGE (a);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (1000);
        INSERT INTO r SELECT g, repeat('y', 300) FROM generate_series(0, 999) g;
        CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root)
    """)
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader, snapshot.reader() as second:
        async with snapshot.reader() as finding:
            table = await described(finding, "r")
            parts = await copy_parts(finding, table, RANGE)
        await asyncio.to_thread(publisher_db.execute, "ALTER TABLE r DETACH PARTITION r1")
        assert await is_intact(reader, parts[0], read=False)
        assert await read(reader, table, parts[0])
        assert await is_intact(reader, parts[0], read=True)
        await reader.close()
        await asyncio.to_thread(publisher_db.execute, "VACUUM FULL r1")
        assert not await is_intact(second, parts[1], read=False)
        assert not await is_rewritten(second, table), "which is all that the root's own tree tells"


async def test_column_privileges_are_sufficient(publisher_db: Database) -> None:
    """A role needs SELECT on the published columns, and nothing for the checks."""
    publisher_db.execute("CREATE TABLE t (a int, hidden int); INSERT INTO t VALUES (1, 2); CREATE PUBLICATION p FOR TABLE t")
    with role(publisher_db) as reader_role:
        publisher_db.execute(f"GRANT SELECT (a) ON t TO {reader_role.name}")
        async with snapshot_of(publisher_db) as snapshot:
            reader = await SnapshotReader.open(reader_role.conninfo, snapshot.snapshot_name, application_name="test")
            table = replace(await described(reader, "t"), columns=("a",))
            (part,) = await copy_parts(reader, table, RANGE)
            assert await is_intact(reader, part, read=False)
            assert await read(reader, table, part) == b"1\n"
            assert await is_intact(reader, part, read=True)
            assert not await is_rewritten(reader, table)
            assert not await is_renamed(reader, table)
            await reader.close()


async def test_rows_hidden_by_a_policy_are_an_error(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t AS SELECT 1 AS a; ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE PUBLICATION p FOR TABLE t")
    with role(publisher_db) as reader_role:
        publisher_db.execute(f"GRANT SELECT ON t TO {reader_role.name}")
        async with snapshot_of(publisher_db) as snapshot:
            reader = await SnapshotReader.open(reader_role.conninfo, snapshot.snapshot_name, application_name="test")
            with pytest.raises(PublisherError, match="row-level security"):
                await rows(reader, await described(reader, "t"))
            await reader.close()


async def test_names_that_need_quotes(publisher_db: Database) -> None:
    publisher_db.execute('CREATE TABLE "T "" x" ("A""b" int, "select" text, "ü" int); INSERT INTO "T "" x" VALUES (1, \'x\', 2)')
    publisher_db.execute('CREATE PUBLICATION "P\'q" FOR ALL TABLES')
    async with snapshot_of(publisher_db) as snapshot, snapshot.reader() as reader:
        (table,) = await published_tables(reader, ["P'q"], TableName("public", 'T " x'))
        assert table.columns == ('A"b', "select", "ü")
        assert await rows(reader, table) == [b"1\tx\t2"]


async def test_temporary_slot_with_snapshot(publisher_db: Database) -> None:
    name = f"s_{publisher_db.name}"
    async with ExportedSnapshot.create(publisher_db.dsn, name, application_name="test", temporary=True) as snapshot:
        connection = await WalReceiverConnection.connect(publisher_db.dsn, application_name="test")
        slot = await connection.slot(name)
        await connection.close()
        assert slot is not None
        assert slot.temporary
        assert snapshot.consistent_point == slot.confirmed_flush_lsn
    await asyncio.to_thread(publisher_db.wait, f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'", 0)
