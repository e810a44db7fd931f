"""Replication origins of the target's changes: no loops, cascades, progress, and what happens without any.

Native's test of the same topic: t/030_origin.pl of src/test/subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest

from subscriber import SubscriptionOptions, drop_subscription
from subscriber.interfaces import CopyFormat
from subscriber.sinks.postgres.session.origins import drop_origins
from subscriber.subscription.setup.checks import check
from subscriber.testing.server import EmbeddedServer
from tests.integration.postgres.test_tablesync import AT, syncing, text
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.managed import create, launched, same
from tests.support.observation import all_ready, eventually, until
from tests.support.replica import QUICK, Replica, replica
from tests.support.roles import role
from tests.support.sink_postgres import Remote, opened

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "SELECT id, md5(v) FROM t ORDER BY id"
COUNT = "SELECT count(*) FROM t"
COPIED = 3000
COPY = f"INSERT INTO t SELECT g, repeat('c', 200) FROM generate_series(1, {COPIED}) AS g"
SIDE = 10_000_000
"""Keys from here on are of the first side, from twice this on of the second one."""


def oid_of(target: Database) -> int:
    found = target.value("SELECT oid::int8 FROM subscriber.pg_subscription")
    assert isinstance(found, int)
    return found


def origins(target: Database) -> list[str]:
    """Those of the target's one subscription."""
    rows = target.fetch(f"SELECT roname FROM pg_replication_origin WHERE roname ~ '^subscriber_{oid_of(target)}(_[0-9]|$)' ORDER BY 1")
    return [name for (name,) in rows]


def prepared(database: Database) -> set[str]:
    return {gid for (gid,) in database.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")}


# --- two databases that replicate into each other


@dataclass
class Load:
    """What one side did."""

    inserted: int = 0


@contextlib.asynccontextmanager
async def load(database: Database, first: int) -> AsyncIterator[Load]:
    """While the block lasts: inserts (small and streamed ones), updates and deletes of rows from key ``first`` on."""
    done, stop = Load(), threading.Event()

    def work() -> None:
        turn = 0
        with database.connect() as session:
            while not stop.is_set():
                turn += 1
                rows = 300 if turn % 50 == 0 else 1
                key = first + done.inserted
                insert = "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(%s::int, %s::int) AS g"
                session.execute(insert, (key, key + rows - 1))
                done.inserted += rows
                session.execute("UPDATE t SET v = v || 'u' WHERE id = %s", (key,))
                # no faster than a subscriber on a busy machine can follow
                stop.wait(0.005)
                if turn % 3 == 0:
                    session.execute("DELETE FROM t WHERE id = %s", (key - 1,))

    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        yield done
    finally:
        stop.set()
        await working


def prepare(database: Database, key: int) -> str:
    """A prepared transaction that inserts a row; its gid."""
    gid = f"{database.name} {key}"
    database.execute(f"BEGIN; INSERT INTO t VALUES ({key}, 'prepared'); PREPARE TRANSACTION '{gid}'")
    return gid


async def test_two_of_ours_replicate_into_each_other(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute(COPY)
    settings = replace(QUICK, copy_range_size=64 * 1024)
    options = {"origin": "none", "two_phase": True, "settings": settings}
    # the way back first: there is nothing to copy on it yet
    async with replica(target_db, publisher18_db, **options) as back:
        await enabled(back)
        async with load(publisher18_db, 1 * SIDE) as here, replica(publisher18_db, target_db, **options) as forth:
            await forth.caught_up()
            # not before: a copy takes all rows, those too that came from where it goes to
            async with load(target_db, 2 * SIDE) as there:
                await enabled(forth)
                await until(lambda: min(here.inserted, there.inserted) > 300, "load from both sides")
        # forth was stopped in the middle of the load
        async with replica(publisher18_db, target_db, **options) as forth:
            await both_equal(forth, back)
            gids = {side.publisher: prepare(side.publisher, number * SIDE - 1) for number, side in enumerate((forth, back), 1)}
            await both_caught_up(forth, back)
            for side in (forth, back):
                # its own, and the other side's, and nothing that came around
                theirs = prepared(side.publisher) - {gids[side.publisher]}
                assert len(theirs) == 1
                assert theirs.pop().startswith(f"pg_gid_{oid_of(side.publisher)}_")
            for side in (forth, back):
                side.publisher.execute(f"COMMIT PREPARED '{gids[side.publisher]}'")
            await both_equal(forth, back)
            assert prepared(publisher18_db) == prepared(target_db) == set()
            # what came around would be a conflict, and would be counted
            assert back.subscription.status.statistics.inserts == there.inserted + 1
            for side in (forth, back):
                assert side.subscription.status.last_error is None
            assert origins(target_db) == [f"subscriber_{oid_of(target_db)}"]


async def enabled(found: Replica) -> None:
    await all_ready(found)
    await eventually(found.target, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
    await found.caught_up()


async def both_caught_up(forth: Replica, back: Replica) -> None:
    await forth.caught_up()
    await back.caught_up()


async def both_equal(forth: Replica, back: Replica) -> None:
    await both_caught_up(forth, back)
    assert forth.publisher.fetch(ROWS) == forth.target.fetch(ROWS)


@pytest.mark.publisher(min=16, lacks="origin = none")
@pytest.mark.matrix
async def test_ours_and_a_native_one_replicate_into_each_other(publisher_db: Database, target_db: Database) -> None:
    for database in (publisher_db, target_db):
        database.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
    publisher_db.execute(COPY)
    async with native(target_db, publisher_db, "origin = none, two_phase = true"):
        settings = replace(QUICK, copy_range_size=64 * 1024)
        running = replica(publisher_db, target_db, origin="none", two_phase=True, settings=settings)
        async with load(publisher_db, 1 * SIDE) as here, running as forth:
            await forth.caught_up()
            async with load(target_db, 2 * SIDE) as there:
                await enabled(forth)
                await until(lambda: min(here.inserted, there.inserted) > 300, "load from both sides")
        async with replica(publisher_db, target_db, origin="none", two_phase=True, settings=settings) as forth:
            await forth.caught_up()
            await eventually(publisher_db, COUNT, target_db.value(COUNT))
            gids = [prepare(publisher_db, 1 * SIDE - 1), prepare(target_db, 2 * SIDE - 1)]
            await forth.caught_up()
            await eventually(publisher_db, "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()", 2)
            assert len(prepared(target_db)) == 2
            publisher_db.execute(f"COMMIT PREPARED '{gids[0]}'")
            target_db.execute(f"COMMIT PREPARED '{gids[1]}'")
            await forth.caught_up()
            await eventually(publisher_db, "SELECT count(*) FROM t WHERE v = 'prepared'", 2)
            await eventually(target_db, "SELECT count(*) FROM t WHERE v = 'prepared'", 2)
            target_rows = target_db.fetch(ROWS)
            await eventually(publisher_db, ROWS, target_rows)
            assert target_rows[COPIED - 1][0] == COPIED
            assert forth.subscription.status.last_error is None
            # errors are what a loop leads to
            errors = "SELECT apply_error_count + sync_error_count FROM pg_stat_subscription_stats WHERE subname = 'native'"
            assert publisher_db.value(errors) == 0


@contextlib.asynccontextmanager
async def native(publisher: Database, target: Database, options: str, name: str = "native") -> AsyncIterator[None]:
    """A subscription of PostgreSQL's own; its tables are ready when the block begins."""
    slot = f"{name}_{target.name}"
    target.execute(f"CREATE SUBSCRIPTION {name} CONNECTION '{publisher.conninfo()}' PUBLICATION pub WITH (slot_name = '{slot}', {options})")
    try:
        ready = """
            SELECT bool_and(srsubstate = 'r') AND min(s.subtwophasestate::text) <> 'p' FROM pg_subscription_rel
              JOIN pg_subscription AS s ON s.oid = srsubid
        """
        await eventually(target, ready, True)
        yield
    finally:
        await asyncio.to_thread(target.execute, f"DROP SUBSCRIPTION {name}")


async def test_cascades(publisher18_db: Database, target_db: Database, publisher18: ServerAddress) -> None:
    """With origin = any, replicated changes are passed on: from this program to a native subscription, and the other way."""
    with fresh_database(publisher18, "end") as end:
        for database in (publisher18_db, target_db, end):
            database.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
        publisher18_db.execute(COPY)
        async with replica(publisher18_db, target_db) as first:
            await first.caught_up()
            async with native(target_db, end, "origin = any"):
                publisher18_db.execute("UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id = 100")
                assert len(await first.same(ROWS)) == COPIED - 1
                await eventually(end, ROWS, publisher18_db.fetch(ROWS))
        end.execute("TRUNCATE t")
        target_db.execute("TRUNCATE t")
        async with native(publisher18_db, target_db, "origin = any"), replica(target_db, end) as second:
            await second.caught_up()
            publisher18_db.execute("UPDATE t SET v = 'followed again' WHERE id <= 20; INSERT INTO t VALUES (100, 'again')")
            await eventually(target_db, ROWS, publisher18_db.fetch(ROWS))
            # not second.same(): what a native subscription has committed need not be flushed, and is not waited for
            await eventually(end, ROWS, publisher18_db.fetch(ROWS))
            assert end.value(COUNT) == COPIED


# --- what carries an origin


class Decoder:
    """What a subscriber of this database with origin = none would be sent, by kind of message."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute("CREATE PUBLICATION everything FOR TABLE t")
        self._slot = f"decoder_{database.name}"
        database.execute(f"SELECT pg_create_logical_replication_slot('{self._slot}', 'pgoutput', false, true)")

    def changes(self, origin: str) -> str:
        query = f"""
            SELECT coalesce(string_agg(chr(get_byte(data, 0)), '' ORDER BY n), '')
              FROM pg_logical_slot_peek_binary_changes('{self._slot}', NULL, NULL,
                       'proto_version', '4', 'publication_names', 'everything', 'origin', '{origin}')
                   WITH ORDINALITY AS c(lsn, xid, data, n) WHERE chr(get_byte(data, 0)) IN ('I', 'U', 'D', 'T')
        """
        found = self._database.value(query)
        assert isinstance(found, str)
        return found


async def _at_once(both: asyncio.Barrier, key: int) -> AsyncIterator[bytes]:
    """A part of a copy that ends when the other one has begun: else one session may do both."""
    await both.wait()
    async for data in text((key, "copied")):
        yield data


@pytest.mark.target(min=16, lacks="origin = none of pgoutput, by which the test sees them")
@pytest.mark.matrix
async def test_everything_that_changes_rows_carries_one(any_target_db: Database) -> None:
    any_target_db.execute(TABLE)
    decoder, remote = Decoder(any_target_db), Remote("t", "*id", "v")
    async with syncing(any_target_db) as (feed, sink):
        # two parts side by side, and a copy that is undone
        for last in (False, True):
            await sink.begin()
            await sink.start_copy()
            both = asyncio.Barrier(2)
            await asyncio.gather(*(sink.copy(["id", "v"], CopyFormat.TEXT, _at_once(both, key)) for key in (1, 2)))
            if not last:
                await sink.close()
        assert decoder.changes("any") == "IIDDII"
        own = f"subscriber_{oid_of(any_target_db)}"
        of_table = f"{own}_{sink.relation_id}"
        assert origins(any_target_db) == [own, of_table, f"{of_table}_1", f"{of_table}_2"]
        await sink.finish_copy(AT)
        assert origins(any_target_db) == [own, of_table]
        # catching up
        feed.lsn = int(AT.lsn)
        await sink.apply(feed.batch(feed.transaction(remote.relation, remote.update(1, "caught up"))))
        await sink.finish_sync(feed.transaction().end_lsn)
        await sink.close()
        assert origins(any_target_db) == [own]
        # and the apply session: plain, prepared, rolled back
        await feed.apply(remote.relation, remote.insert(3, "x"), remote.delete(2, None))
        first, second = await feed.prepare(remote.insert(4, "x")), await feed.prepare(remote.insert(5, "x"))
        await feed.opened.commit_prepared(feed.commit_prepared(first))
        await feed.opened.rollback_prepared(feed.rollback_prepared(second))
        any_target_db.execute("INSERT INTO t VALUES (6, 'local')")
        assert decoder.changes("any") == "IIDDIIUIDIII"
        assert decoder.changes("none") == "I"
    any_target_db.execute(f"SELECT pg_drop_replication_slot('decoder_{any_target_db.name}')")


async def test_progress(any_target_db: Database) -> None:
    """For monitoring: the origin follows the position."""
    any_target_db.execute(TABLE)
    remote = Remote("t", "*id", "v")
    async with opened(any_target_db) as feed:
        progress = f"SELECT remote_lsn::text FROM pg_replication_origin_status WHERE external_id = 'subscriber_{feed.oid}'"
        applied = await feed.apply(remote.relation, remote.insert(1, "x"))
        assert any_target_db.value(progress) == str(applied.end_lsn)
        prepared_one = await feed.prepare(remote.insert(2, "x"))
        assert any_target_db.value(progress) == str(prepared_one.end_lsn)
        committed = feed.commit_prepared(prepared_one)
        await feed.opened.commit_prepared(committed)
        assert any_target_db.value(progress) == str(committed.end_lsn)
        rolled_back = feed.rollback_prepared(await feed.prepare(remote.insert(3, "x")))
        await feed.opened.rollback_prepared(rolled_back)
        assert any_target_db.value(progress) == str(rolled_back.rollback_end_lsn) == str(feed.position())


# --- who has one, and who drops it


async def test_waits_for_an_origin_that_is_still_active(target_db: Database) -> None:
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        name = f"subscriber_{feed.oid}"
        await feed.opened.close()
        with target_db.connect() as holder:
            await released(target_db, name)
            holder.execute("SELECT pg_replication_origin_session_setup(%s)", (name,))
            opening = asyncio.create_task(feed.sink.open("sub", feed.durable.append))
            tried = "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'sub' AND query ~ 'origin_session_setup'"
            await eventually(target_db, tried, True)
            assert not opening.done()
        feed.opened = await opening
        assert (await feed.apply(Remote("t", "*id", "v").relation)).end_lsn == feed.position()


async def released(target: Database, name: str) -> None:
    """The backend of a closed session has ended, and the origin is free."""
    locks = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sub' AND datname = current_database()"
    await eventually(target, locks, 0)


async def test_leftovers_are_swept_and_all_can_be_dropped(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    async with opened(target_db) as feed:
        own = f"subscriber_{feed.oid}"
        tables = dict(target_db.fetch("SELECT relname, oid::int8 FROM pg_class WHERE relname IN ('t', 'u')"))
        feed.subscribe("public", "t")
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'd'")
        feed.subscribe("public", "u")
        kept = [own, f"{own}_{tables['t']}", f"{own}_{tables['t']}_1"]
        others = [f"{own}9", f"other_{own}"]
        for name in (*kept[1:], f"{own}_{tables['u']}", f"{own}_{tables['u']}_2", f"{own}_999", *others):
            target_db.execute(f"SELECT pg_replication_origin_create('{name}')")
        await feed.reopen()
        assert origins(target_db) == kept

        async def run(query: str) -> list[tuple[object, ...]]:
            return target_db.fetch(query)

        await feed.opened.close()
        await released(target_db, own)
        await drop_origins(run, feed.oid)
        assert origins(target_db) == []
        for name in others:
            target_db.execute(f"SELECT pg_replication_origin_drop('{name}')")
        # dropped by another session: created again
        await feed.reopen()
        assert origins(target_db) == [own]


# --- without an origin


async def test_drop_removes_them_all(publisher18_db: Database, target_db: Database) -> None:
    """The subscription's, those of parallel apply, and those of a table's synchronization that was killed; not those of others."""
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher, target, options=SubscriptionOptions(streaming="parallel"))
    oid = oid_of(target)
    applied = (
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE '%parallel apply' AND backend_xid IS NOT NULL"
    )
    async with launched(target):
        await same(publisher, target, name, COUNT)
        await eventually(target, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        with contextlib.closing(publisher.connect()) as session:
            session.execute("BEGIN")
            session.execute(COPY.encode())
            await eventually(target, applied, True)
            session.execute("COMMIT")
        await same(publisher, target, name, ROWS)
    every = f"SELECT roname FROM pg_replication_origin WHERE roname ~ '^subscriber_{oid}' ORDER BY 1"
    made = [f"subscriber_{oid}", f"subscriber_{oid}_parallel_1"]
    assert [origin for (origin,) in target.fetch(every)] == made
    relid = target.value("SELECT 't'::regclass::oid::int8")
    others = [f"subscriber_{oid}1", f"subscriber_{oid}1_parallel_1"]
    for origin in (f"subscriber_{oid}_{relid}", f"subscriber_{oid}_{relid}_0", f"subscriber_{oid}_parallel_2", *others):
        target.fetch(f"SELECT pg_replication_origin_create('{origin}')")
    try:
        await drop_subscription(name, target=target.dsn)
        assert [origin for (origin,) in target.fetch(every)] == others
    finally:
        for origin in others:
            target.fetch(f"SELECT pg_replication_origin_drop('{origin}')")


async def test_a_role_without_the_privilege(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    for database in (publisher18_db, target_db):
        database.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'copied')")
    with role(target_db) as plain:
        target_db.execute(f"""
            GRANT SET ON PARAMETER session_replication_role TO {plain.name}; GRANT CREATE ON DATABASE {target_db.name} TO {plain.name};
            ALTER TABLE t OWNER TO {plain.name}
        """)
        target = Target(target_db, plain.name, plain.password)
        try:
            found = await check("x", connection=publisher18_db.conninfo(), publications=["pub"], target=target.dsn, settings=QUICK)
            ((severity, message, hint),) = [(f.severity, f.message, f.hint) for f in found if "origin" in f.message]
            assert (severity, message) == (
                "warning",
                f'role "{plain.name}" may not use replication origins in the target: a subscription to the target with origin = none'
                " would receive the replicated changes as the target's own",
            )
            async with replica(publisher18_db, target, origin="none") as without:
                publisher18_db.execute("INSERT INTO t VALUES (2, 'followed')")
                await without.same(ROWS)
                assert origins(target_db) == []
            warnings = [record.getMessage() for record in caplog.records if "replication origin" in record.getMessage()]
            assert len([text for text in warnings if text.startswith("changes are applied to the target without")]) == 1
            target_db.execute(hint)
            async with replica(publisher18_db, target) as with_origin:
                publisher18_db.execute("INSERT INTO t VALUES (3, 'followed')")
                await with_origin.same(ROWS)
                assert origins(target_db) == [f"subscriber_{oid_of(target_db)}"]
                active = f"SELECT remote_lsn > '0/0' FROM pg_replication_origin_status WHERE external_id = '{origins(target_db)[0]}'"
                assert target_db.value(active) is True
            again = await check("x", connection=publisher18_db.conninfo(), publications=["pub"], target=target.dsn, settings=QUICK)
            assert not [finding for finding in again if "origin" in finding.message]
        finally:
            target.close()
            target_db.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {plain.name}")


class Target(Database):
    """The target as a role sees it."""

    def __init__(self, database: Database, user: str, password: str) -> None:
        super().__init__(database.server, database.name)
        self._as = {"user": user, "password": password}

    @property
    def dsn(self) -> str:
        return self.conninfo(**self._as)


async def test_no_free_slot(make_server: Callable[..., EmbeddedServer], publisher18_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The apply session has the only origin: the copy works without one."""
    server = make_server(18, max_active_replication_origins="1")
    publisher18_db.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute(COPY)
    with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as target_db:
        target_db.execute(TABLE)
        async with replica(publisher18_db, target_db, origin="none") as found:
            await all_ready(found)
            publisher18_db.execute("INSERT INTO t VALUES (-1, 'followed')")
            assert len(await found.same(ROWS)) == COPIED + 1
            assert found.subscription.status.last_error is None
            assert origins(target_db) == [f"subscriber_{oid_of(target_db)}"]
        warnings = [
            text for record in caplog.records if (text := record.getMessage()).startswith("changes are applied to the target without")
        ]
        assert len(warnings) == 1
        assert "could not find free replication state slot" in warnings[0]
        assert warnings[0].endswith("(hint: increase max_active_replication_origins of the target)")
