"""Our ``test_decoding`` beside the contrib module, on the same WAL: the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.test_decoding import TestDecoding
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Relation, StreamStart, StreamStop
from subscriber.testing.binaries import download_directory
from subscriber.testing.server import EmbeddedServer
from subscriber.types import TypeRegistry
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.type_reader import type_facts
from tests.support import every_type
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.program import subscriber

# what a walsender has
SETTINGS = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c search_path="
STREAMED_ROWS = 2000


class Both:
    """Two slots on one database, one for each plugin."""

    def __init__(self, database: Database, version: int, *, two_phase: bool) -> None:
        self.database = database
        self.capabilities = capabilities(version * 10000)
        self.two_phase = two_phase
        flags = ", false, true" if two_phase else ""
        for plugin in ("pgoutput", "test_decoding"):
            database.execute(f"SELECT pg_create_logical_replication_slot('{self.slot(plugin)}', '{plugin}'{flags})")

    def slot(self, plugin: str) -> str:
        return f"{plugin}_{self.database.name}"

    def contrib(self, options: Mapping[str, str]) -> list[bytes]:
        """The records of the contrib module."""
        with self.database.connect(options=SETTINGS) as session:
            words = [word for pair in options.items() for word in pair]
            query = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s)"
            return [bytes(data) for (data,) in session.execute(query, [self.slot("test_decoding"), words])]

    async def ours(self, options: Mapping[str, str]) -> list[bytes]:
        """The records of our plugin, fed from pgoutput."""
        wanted = {"proto_version": str(self.capabilities.protocol_version), "publication_names": "p", "messages": "true"}
        if options.get("stream-changes") == "on":
            wanted["streaming"] = "on"
        if options.get("only-local") == "on" and self.capabilities.origin:
            wanted["origin"] = "none"
        with self.database.connect(options=SETTINGS) as session:
            words = [word for pair in wanted.items() for word in pair]
            query = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s)"
            payloads = [bytes(data) for (data,) in session.execute(query, [self.slot("pgoutput"), words])]
        messages, in_stream = [], False
        for payload in payloads:
            message = decode(payload, in_stream=in_stream)
            in_stream = isinstance(message, StreamStart) or (in_stream and not isinstance(message, StreamStop))
            messages.append(message)
        types = TypeRegistry()
        oids = {column.type_oid for message in messages if isinstance(message, Relation) for column in message.columns}
        async with await WalReceiverConnection.connect(self.database.dsn, application_name="types") as connection:
            types.add(await type_facts(connection, oids))
        written: list[Record] = []
        feed = PluginFeed(
            TestDecoding(),
            LogicalDecodingContext(
                "test_decoding",
                options,
                capabilities=self.capabilities,
                writer=written.append,
                types=types,
                streaming=True,
                two_phase=self.two_phase,
            ),
        )
        feed.start()
        for message in messages:
            feed.message(message)
        feed.shutdown()
        assert not feed.holding
        return [record.data for record in written]

    async def compare(self, **options: str) -> list[str]:
        # binary, so that a message of any content comes through
        given = {"force-binary": "on", **{name.replace("_", "-"): value for name, value in options.items()}}
        contrib, ours = self.contrib(given), await self.ours(given)
        assert ours == contrib
        return [record.decode("utf-8", "replace") for record in ours]


pytestmark = [pytest.mark.matrix, pytest.mark.publisher(min=14, lacks="streaming and logical messages in pgoutput")]


@pytest.fixture(scope="session")
def contrib_server(publisher_version: int) -> Iterator[EmbeddedServer]:
    """A server of the npm packages, which hold the contrib module. Of 18 it is an older release than the wheel's."""
    bindir = download_directory() / str(publisher_version) / "bin"
    if not bindir.exists():
        pytest.skip(f"`make servers` installs PostgreSQL {publisher_version} with the contrib module test_decoding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"SUBSCRIBER_PG{publisher_version}_BINDIR", str(bindir))
        server = EmbeddedServer.create(publisher_version)
    yield server
    server.remove()


@pytest.fixture
def contrib_db(contrib_server: EmbeddedServer) -> Iterator[Database]:
    """A database on a server that has the contrib module."""
    with fresh_database(ServerAddress(contrib_server.dsn(), contrib_server.version), "pub") as database:
        yield database


def prepared(database: Database) -> None:
    database.execute("""
        CREATE TABLE t (id int PRIMARY KEY, "Big" text, "select" numeric, flag bool, bits varbit(9), name text);
        ALTER TABLE t ALTER name SET STORAGE EXTERNAL;
        CREATE SCHEMA "S 1"; CREATE TABLE "S 1"."it's" (a int, b text); ALTER TABLE "S 1"."it's" REPLICA IDENTITY FULL;
        CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int REFERENCES parent, k serial);
        CREATE TABLE indexed (a int NOT NULL, b text NOT NULL, c text); CREATE UNIQUE INDEX i ON indexed (a, b);
        ALTER TABLE indexed REPLICA IDENTITY USING INDEX i;
        CREATE PUBLICATION p FOR ALL TABLES
    """)


CHANGES = r"""
INSERT INTO t VALUES (1, E'it''s \\ \n ü', 1.50, true, '101', repeat('x', 9000)), (2, NULL, 'NaN', false, NULL, NULL);
UPDATE t SET flag = false WHERE id = 1;
UPDATE t SET id = 3 WHERE id = 1;
DELETE FROM t WHERE id = 3;
BEGIN; INSERT INTO "S 1"."it's" VALUES (1, NULL), (2, repeat('y', 9000)); UPDATE "S 1"."it's" SET a = 5; COMMIT; DELETE FROM "S 1"."it's";
INSERT INTO indexed VALUES (1, 'b', 'c'); UPDATE indexed SET c = 'd'; UPDATE indexed SET b = 'e'; DELETE FROM indexed;
BEGIN; INSERT INTO t VALUES (7); SAVEPOINT s; INSERT INTO t VALUES (8); ROLLBACK TO s; INSERT INTO t VALUES (9); COMMIT;
TRUNCATE t; TRUNCATE parent, child RESTART IDENTITY CASCADE; TRUNCATE child CASCADE; TRUNCATE t, indexed RESTART IDENTITY;
SELECT pg_logical_emit_message(false, 'loose', 'text');
BEGIN; SELECT pg_logical_emit_message(true, 'a prefix', E'\\x00ff0a'::bytea); INSERT INTO t VALUES (10); COMMIT;
BEGIN; SELECT pg_logical_emit_message(true, 'alone', 'ü'); COMMIT;
BEGIN; CREATE TABLE made (a int PRIMARY KEY, b timestamptz); INSERT INTO made VALUES (1, '2024-02-29 12:00+02'); COMMIT;
ALTER TABLE made ADD COLUMN c int DEFAULT 4; UPDATE made SET c = 5; ALTER TABLE made DROP COLUMN b; UPDATE made SET c = 6;
"""


def execute_all(database: Database, script: str) -> None:
    for line in script.strip().splitlines():
        if line.startswith("BEGIN"):
            database.execute(line)
        else:
            for statement in line.split("; "):
                database.execute(statement)


async def test_changes_truncate_messages_and_toast(contrib_db: Database, publisher_version: int) -> None:
    prepared(contrib_db)
    both = Both(contrib_db, publisher_version, two_phase=False)
    execute_all(contrib_db, CHANGES)
    await both.compare(skip_empty_xacts="on", include_timestamp="on")
    lines = await both.compare(skip_empty_xacts="on", include_xids="off")
    assert any("unchanged-toast-datum" in line for line in lines)
    if publisher_version < 15:
        await both.compare()


async def test_every_type(contrib_db: Database, publisher_version: int) -> None:
    contrib_db.execute(every_type.SETUP)
    specimens = tuple(
        specimen for specimen in every_type.SPECIMENS if publisher_version >= 17 or specimen.name not in {"c_interval", "a_interval"}
    )
    every_type.create_table(contrib_db, "every", specimens=specimens)
    contrib_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    both = Both(contrib_db, publisher_version, two_phase=False)
    every_type.fill(contrib_db, "every", specimens=specimens)
    contrib_db.execute("UPDATE app.every SET id = id + 1000")
    lines = await both.compare(skip_empty_xacts="on")
    assert len(lines) == 2 * (every_type.ROWS + 2)


async def test_transactions_in_progress(contrib_db: Database, publisher_version: int) -> None:
    prepared(contrib_db)
    both = Both(contrib_db, publisher_version, two_phase=False)
    many = f"INSERT INTO t (id) SELECT generate_series({{}}, {{}} + {STREAMED_ROWS})"
    rows = [many.format(first, first) for first in (10_000, 20_000, 30_000, 40_000)]
    with contrib_db.connect() as first, contrib_db.connect() as second:
        first.execute("BEGIN")
        second.execute("BEGIN")
        first.execute(rows[0].encode())
        first.execute("SAVEPOINT a")
        first.execute(rows[1].encode())
        second.execute(rows[2].encode())
        first.execute("ROLLBACK TO a")
        first.execute("SELECT pg_logical_emit_message(true, 'p', 'content')")
        contrib_db.execute("INSERT INTO t VALUES (1)")
        second.execute("ROLLBACK")
        first.execute("TRUNCATE indexed")
        first.execute(rows[3].encode())
        first.execute("COMMIT")
    for streaming in ("on", "off"):
        await both.compare(skip_empty_xacts="on", stream_changes=streaming, include_timestamp="on")
        lines = await both.compare(skip_empty_xacts="on", stream_changes=streaming, include_xids="off")
        assert any(line.startswith("opening a streamed block") for line in lines) == (streaming == "on")
    # a pipe has no place for bytes that are not text
    given = {"stream-changes": "on", "skip-empty-xacts": "on"}
    expected = both.contrib({**given, "force-binary": "on"})
    plugin = ("--plugin", "test_decoding", *(word for name, value in given.items() for word in ("-p", f"{name}={value}")))
    args = ("--connection", contrib_db.dsn, "--publication", "p", "--slot", both.slot("pgoutput"), *plugin, "--until-caught-up")
    done = await asyncio.to_thread(subscriber, "tail", *args)
    assert (done.status, done.errors) == (0, "")
    assert done.output.splitlines() == [record.decode() for record in expected]
    # all of it is acknowledged
    assert await both.ours({"skip-empty-xacts": "on"}) == []


async def test_two_phase(contrib_db: Database, publisher_version: int) -> None:
    if publisher_version < 15:
        pytest.skip("no two-phase commit in the protocol")
    prepared(contrib_db)
    both = Both(contrib_db, publisher_version, two_phase=True)
    name = contrib_db.name

    def prepare(gid: str, last: int = 10) -> None:
        contrib_db.execute(f"BEGIN; INSERT INTO t (id) SELECT generate_series({last - 10}, {last - 1}); PREPARE TRANSACTION '{gid}'")

    contrib_db.execute(
        f"BEGIN; INSERT INTO t (id) SELECT generate_series(1000, {1000 + STREAMED_ROWS}); PREPARE TRANSACTION 'large {name}'"
    )
    contrib_db.execute(f"COMMIT PREPARED 'large {name}'")
    # nothing between the two: the server sends the last block at the end, pgoutput before PREPARE
    contrib_db.execute(
        f"BEGIN; INSERT INTO t (id) SELECT generate_series(10000, {10_000 + STREAMED_ROWS}); PREPARE TRANSACTION 'large_nodecode {name}'"
    )
    contrib_db.execute(f"COMMIT PREPARED 'large_nodecode {name}'")
    gids = [f"a ''quoted'' \\{name}", f"rolled {name}", f"held_nodecode {name}", f"gone_nodecode {name}"]
    for number, gid in enumerate(gids):
        prepare(gid, 10 * (number + 1))
    contrib_db.execute("INSERT INTO t VALUES (50)")
    for gid in gids:
        contrib_db.execute(f"{'ROLLBACK' if gid.startswith(('rolled', 'gone')) else 'COMMIT'} PREPARED '{gid}'")
    for streaming in ("on", "off"):
        await both.compare(skip_empty_xacts="on", stream_changes=streaming, include_timestamp="on")
        lines = await both.compare(skip_empty_xacts="on", stream_changes=streaming, include_xids="off")
        assert sum("_nodecode" in line for line in lines) == 0
        assert sum(line.startswith("committing streamed") for line in lines) == (streaming == "on")
        assert sum(line.startswith("preparing streamed") for line in lines) == (streaming == "on")


async def test_only_local(contrib_db: Database, publisher_version: int) -> None:
    prepared(contrib_db)
    both = Both(contrib_db, publisher_version, two_phase=False)
    name = contrib_db.name
    contrib_db.execute(f"SELECT pg_replication_origin_create('{name}')")
    with contrib_db.connect() as session:
        session.execute(f"SELECT pg_replication_origin_session_setup('{name}')")
        session.execute("INSERT INTO t VALUES (1)")
        if both.capabilities.origin:
            session.execute("SELECT pg_logical_emit_message(false, 'loose', 'of another origin')")
        session.execute(f"INSERT INTO t (id) SELECT generate_series(100, 100 + {STREAMED_ROWS})".encode())
        session.execute("SELECT pg_replication_origin_session_reset()")
    contrib_db.execute("INSERT INTO t VALUES (2)")
    if both.capabilities.origin:
        contrib_db.execute("SELECT pg_logical_emit_message(false, 'loose', 'local')")
        contrib_db.execute("CREATE TABLE flushed ()")  # such a message is not flushed by itself
    for only in ("on", "off"):
        for streaming in ("on", "off"):
            await both.compare(skip_empty_xacts="on", only_local=only, stream_changes=streaming)
    if not both.capabilities.origin:
        contrib_db.execute("SELECT pg_logical_emit_message(false, 'loose', 'of an origin that is not told')")
        contrib_db.execute("CREATE TABLE flushed ()")
        with pytest.raises(ConfigurationError, match="before 16 a publisher does not tell the origin"):
            await both.ours({"skip-empty-xacts": "on", "only-local": "on"})
    else:
        # tail requests the stream so
        expected = both.contrib({"skip-empty-xacts": "on", "only-local": "on"})
        plugin = ("--plugin", "test_decoding", "-p", "only-local=on", "-p", "skip-empty-xacts=on")
        args = ("--connection", contrib_db.dsn, "--publication", "p", "--slot", both.slot("pgoutput"), *plugin, "--until-caught-up")
        done = await asyncio.to_thread(subscriber, "tail", *args)
        assert (done.status, done.errors) == (0, "")
        assert done.output.splitlines() == [record.decode() for record in expected]
    contrib_db.execute(f"SELECT pg_replication_origin_drop('{name}')")
