"""What check says about a publisher before anything is begun."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

import subscriber
from subscriber import PublisherError, create_subscription
from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Finding
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.checks import check_publisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.copying.large_rows import find_large_rows
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.publisher_errors import PLUGIN_HINT
from tests.support.database import Database, fresh_database
from tests.support.roles import role
from tests.support.streams import streaming

MakeServer = Callable[..., EmbeddedServer]


async def check(
    conninfo: str, *publications: str, slot: str | None = None, copy_data: bool = True, sync_workers: int = 2, only_local: bool = False
) -> list[Finding]:
    connection = await WalReceiverConnection.connect(conninfo, application_name="check")
    try:
        tables = await published_tables(connection, publications)
        return await check_publisher(
            connection,
            publications,
            tables,
            slot,
            options=SubscriptionOptions(copy_data=copy_data, origin="none" if only_local else "any"),
            settings=Settings(max_sync_workers_per_subscription=sync_workers),
        )
    finally:
        await connection.close()


def messages(findings: list[Finding]) -> list[str]:
    assert all(finding.hint and "\n" not in finding.message + finding.hint for finding in findings)
    return [f"{finding.severity}: {finding.message}" for finding in findings]


@pytest.mark.matrix
async def test_nothing_to_say(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    assert await check(publisher_db.dsn, "p", slot="new_one") == []


async def test_missing_publication_and_no_table(publisher_db: Database) -> None:
    assert messages(await check(publisher_db.dsn, "absent")) == ['error: publication "absent" does not exist on the publisher']
    publisher_db.execute("CREATE PUBLICATION empty")
    assert messages(await check(publisher_db.dsn, "empty")) == ["warning: the publications publish no table"]


async def test_wal_level(make_server: MakeServer) -> None:
    server = make_server(18, wal_level="replica")
    assert 'error: wal_level is "replica" on the publisher' in messages(await check(server.dsn(), "p"))


async def test_an_output_plugin_that_is_not_allowed(make_server: MakeServer) -> None:
    server = make_server(18, output_plugin_libraries='test_decoding, "pgoutput"')
    assert not any("pgoutput" in message for message in messages(await check(server.dsn(), "p")))
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET output_plugin_libraries = 'test_decoding, my_pgoutput'")
    (found,) = [finding for finding in await check(server.dsn(), "p") if "pgoutput" in finding.message]
    assert found.message == "output_plugin_libraries does not allow pgoutput on the publisher"
    receiver = await WalReceiverConnection.connect(server.dsn(), application_name="test")
    with pytest.raises(PublisherError, match='library "pgoutput" may not be used as an output plugin') as refused:
        await receiver.create_slot("one")
    await receiver.close()
    assert found.severity == "error"
    assert found.hint == refused.value.hint == PLUGIN_HINT


async def test_encodings(publisher18_db: Database, make_server: MakeServer) -> None:
    publisher18_db.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    server = make_server(18)
    dsn = ""
    for encoding, finding in (
        (
            "LATIN1",
            "warning: the target's database has encoding LATIN1, the publisher's UTF8: a character that the target lacks stops replication",
        ),
        ("SQL_ASCII", None),
    ):
        dsn = server.createdb(encoding.lower(), encoding=encoding, template="template0", locale="C")
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE t (a int PRIMARY KEY)")
        found = messages(await subscriber.check("s", connection=publisher18_db.dsn, publications=["p"], target=dsn))
        assert found == ([finding] if finding else [])
    ours = [publisher18_db.dsn, "warning: the publisher's database has encoding SQL_ASCII: a text that is not UTF-8 stops replication"]
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
    assert messages(await subscriber.check("s", connection=dsn, publications=["p"], target=ours[0])) == ours[1:]


async def test_headroom(make_server: MakeServer) -> None:
    server = make_server(16, max_replication_slots="2", max_wal_senders="3")
    connection = await WalReceiverConnection.connect(server.dsn(), application_name="test")
    await connection.create_slot("one")
    found = messages(await check(server.dsn(), "p", slot="mine", sync_workers=2))
    # of 3 walsenders the one above is in use, and the check's own will be free
    assert "warning: only 1 of max_replication_slots = 2 are free, but table synchronization needs up to 3" in found
    assert "warning: only 2 of max_wal_senders = 3 are free, but table synchronization needs up to 3" in found
    await connection.create_slot("two")
    found = messages(await check(server.dsn(), "p", slot="mine", copy_data=False))
    assert "error: none of max_replication_slots = 2 is free" in found
    # the slot that is there already is ours
    assert not any("max_replication_slots" in message for message in messages(await check(server.dsn(), "p", slot="two", copy_data=False)))
    await connection.close()


@pytest.mark.matrix
async def test_privileges(publisher_db: Database) -> None:
    listed = "(a)" if publisher_db.version >= 15 else ""
    publisher_db.execute(f"""
        CREATE SCHEMA s;
        CREATE TABLE s.hidden (a int PRIMARY KEY); CREATE TABLE denied (a int PRIMARY KEY); CREATE TABLE fine (a int PRIMARY KEY);
        CREATE TABLE some_columns (a int PRIMARY KEY, b int); CREATE TABLE policy (a int PRIMARY KEY);
        ALTER TABLE policy ENABLE ROW LEVEL SECURITY;
        CREATE PUBLICATION p FOR TABLE s.hidden, denied, fine, policy, some_columns {listed};
    """)
    with role(publisher_db, "LOGIN REPLICATION") as replicator:
        publisher_db.execute(
            f"GRANT SELECT ON s.hidden, fine, policy TO {replicator.name}; GRANT SELECT {listed} ON some_columns TO {replicator.name}"
        )
        assert messages(await check(replicator.conninfo, "p")) == [
            "error: permission denied for schema s",
            "error: permission denied for table public.denied",
            f'error: row-level security hides rows of table public.policy from role "{replicator.name}"',
        ]
        assert await check(replicator.conninfo, "p", copy_data=False) == []


@pytest.mark.matrix
async def test_slot_states(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    slot = f"s_{publisher_db.name}"
    physical = f"p_{publisher_db.name}"
    publisher_db.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    publisher_db.fetch(f"SELECT pg_create_physical_replication_slot('{physical}')")
    try:
        assert await check(publisher_db.dsn, "p", slot=slot) == []
        assert messages(await check(publisher_db.dsn, "p", slot=physical)) == [f'error: replication slot "{physical}" is a physical slot']
        elsewhere = await check(publisher_db.server.dsn("postgres"), "p", slot=slot)
        assert f'error: replication slot "{slot}" belongs to database "{publisher_db.name}"' in messages(elsewhere)
        async with streaming(publisher_db, slot):
            pid = publisher_db.value(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'")
            assert messages(await check(publisher_db.dsn, "p", slot=slot)) == [
                f'warning: replication slot "{slot}" is active for PID {pid}'
            ]
    finally:
        publisher_db.fetch(f"SELECT pg_drop_replication_slot('{physical}')")


@pytest.mark.parametrize("publish", ["insert", "insert, update", "delete", "truncate"])
async def test_replica_identity(publisher_db: Database, publish: str) -> None:
    publisher_db.execute(f"""
        CREATE TABLE keyed (a int PRIMARY KEY); CREATE TABLE whole (a int); ALTER TABLE whole REPLICA IDENTITY FULL;
        CREATE TABLE bare (a int); CREATE TABLE nothing (a int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING;
        CREATE PUBLICATION p FOR TABLE keyed, whole, bare, nothing WITH (publish = '{publish}')
    """)
    found = messages(await check(publisher_db.dsn, "p"))
    complaint = "warning: table public.{} has no replica identity: updates and deletes of it fail on the publisher"
    expected = [complaint.format("bare"), complaint.format("nothing")] if "update" in publish or "delete" in publish else []
    assert found == expected


@pytest.mark.matrix
async def test_rows_of_another_origin(publisher_db: Database) -> None:
    """As a native subscription warns: the copy includes rows that the publisher itself replicated."""
    with fresh_database(publisher_db.server, "src") as source:
        source.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION q FOR TABLE t")
        slot = f"s_{source.name}"
        source.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        publisher_db.execute(
            "CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE own (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t, own"
        )
        publisher_db.execute(
            f"CREATE SUBSCRIPTION s_{publisher_db.name} CONNECTION '{source.conninfo()}' PUBLICATION q"
            f" WITH (create_slot = false, slot_name = '{slot}', enabled = false, copy_data = false)"
        )
        (found,) = messages(await check(publisher_db.dsn, "p", only_local=True))
        assert "the copy of table public.t may include rows of another origin" in found
        assert await check(publisher_db.dsn, "p", only_local=False) == []
        assert await check(publisher_db.dsn, "p", only_local=True, copy_data=False) == []


async def test_rows_that_came_by_our_own_subscriptions(publisher_db: Database) -> None:
    """As those of native subscriptions: the copy includes rows that the publisher itself replicated."""
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u (a int PRIMARY KEY); CREATE TABLE own (a int PRIMARY KEY)")
    publisher_db.execute("CREATE PUBLICATION p FOR TABLE t, u, own")
    with fresh_database(publisher_db.server, "src") as source:
        source.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION q FOR TABLE t")
        source.execute("CREATE TABLE u (a int PRIMARY KEY); CREATE PUBLICATION r FOR TABLE u")
        for publication, url in (("q", publisher_db.dsn), ("r", publisher_db.dsn)):
            name = f"{publication}_{publisher_db.name}"
            await create_subscription(name, connection=source.conninfo(), publications=[publication], target=url)
        with role(publisher_db, "LOGIN REPLICATION") as replicator:
            publisher_db.execute(f"GRANT SELECT ON t, u, own TO {replicator.name}")
            for conninfo in (publisher_db.dsn, replicator.conninfo):
                found = messages(await check(conninfo, "p", only_local=True))
                assert "the copy of table public.t may include rows of another origin" in found[0]
                if conninfo == publisher_db.dsn:
                    assert "the copy of table public.u may include rows of another origin" in found[1]


@pytest.mark.parametrize("partitioned", [False, True])
async def test_rows_that_are_larger_than_the_memory_budget(publisher_db: Database, partitioned: bool) -> None:
    by_range = "PARTITION BY RANGE (a)" if partitioned else ""
    root = ", publish_via_partition_root" if partitioned else ""
    publisher_db.execute(f"""
        CREATE TABLE small (a int PRIMARY KEY, b text);
        CREATE TABLE "Large ""1" (a int PRIMARY KEY, b text, c text) {by_range};
        {'CREATE TABLE part PARTITION OF "Large ""1" FOR VALUES FROM (0) TO (9);' if partitioned else ""}
        ALTER TABLE {"part" if partitioned else '"Large ""1"'} ALTER b SET STORAGE EXTERNAL, ALTER c SET STORAGE EXTERNAL;
        INSERT INTO small VALUES (1, repeat('x', 9000000));
        INSERT INTO "Large ""1" VALUES (1, repeat('x', 2000000), repeat('y', 3000000)), (2, 'x', NULL);
        CREATE PUBLICATION p FOR TABLE small, "Large ""1" WITH (publish = 'insert'{root})
    """)
    connection = await WalReceiverConnection.connect(publisher_db.dsn, application_name="check")
    try:
        tables = await published_tables(connection, ["p"])
        (found,) = messages(await find_large_rows(connection, tables, 4 * 1024**2))
        assert found == 'warning: table public.Large "1 has rows of 4 MB and more, logical_decoding_work_mem is 4 MB'
        assert await find_large_rows(connection, tables, 6 * 1024**2) == []
    finally:
        await connection.close()


PARTITIONS = """
    CREATE TABLE root (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
    CREATE TABLE same PARTITION OF root FOR VALUES IN (1);
    CREATE TABLE "full" PARTITION OF root FOR VALUES IN (2);
    ALTER TABLE "full" REPLICA IDENTITY FULL;
    CREATE TABLE nothing PARTITION OF root FOR VALUES IN (3);
    ALTER TABLE nothing REPLICA IDENTITY NOTHING;
    CREATE TABLE other PARTITION OF root FOR VALUES IN (4);
    CREATE UNIQUE INDEX other_part ON other (part);
    ALTER TABLE other REPLICA IDENTITY USING INDEX other_part;
    CREATE TABLE more PARTITION OF root FOR VALUES IN (5) PARTITION BY LIST (part);
    CREATE TABLE "Deep" PARTITION OF more DEFAULT;
    CREATE UNIQUE INDEX deep_part ON "Deep" (part);
    ALTER TABLE "Deep" REPLICA IDENTITY USING INDEX deep_part
"""


async def test_partitions_with_another_replica_identity(publisher_db: Database) -> None:
    """Of their rows the publisher sends other old values than the root's description says: updates and deletes find no row."""
    publisher_db.execute(PARTITIONS)
    publisher_db.execute("CREATE PUBLICATION p FOR TABLE root WITH (publish_via_partition_root)")
    warning = (
        "warning: updates and deletes of 2 partitions of table public.root will be lost, because the replica identity there lacks columns"
        " of the table's: public.Deep, public.other"
    )
    for identity in ("DEFAULT", "FULL"):
        publisher_db.execute(f"ALTER TABLE root REPLICA IDENTITY {identity}")
        assert messages(await check(publisher_db.dsn, "p")) == [warning]
    publisher_db.execute("ALTER PUBLICATION p SET (publish = insert)")
    assert await check(publisher_db.dsn, "p") == []
    publisher_db.execute("ALTER PUBLICATION p SET (publish = 'insert, delete', publish_via_partition_root = false)")
    assert "partition" not in " ".join(messages(await check(publisher_db.dsn, "p")))


async def test_functions_that_were_revoked(publisher18_db: Database) -> None:
    """An error only if a run cannot do without them."""
    publisher18_db.execute("REVOKE EXECUTE ON FUNCTION pg_blocking_pids, pg_xact_status, pg_get_expr(pg_node_tree, oid) FROM PUBLIC")
    with role(publisher18_db, "LOGIN REPLICATION") as plain:
        found = messages(await check(plain.conninfo))
    assert sorted(text for text in found if "function" in text) == [
        "error: permission denied for function pg_get_expr(pg_node_tree,oid) on the publisher",
        "warning: permission denied for function pg_blocking_pids(integer) on the publisher: the log cannot say what a wait is for",
        "warning: permission denied for function pg_xact_status(xid8) on the publisher:"
        " a large transaction with savepoints is received a second time, without streaming",
    ]
