"""Conflicts: found, counted under the names of pg_stat_subscription_stats, and explained without any value.

Native's test of the same topic: t/035_conflicts.pl of src/test/subscription. Source: PostgreSQL manual, Logical Replication, Conflicts.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Protocol

import pytest

from subscriber import ApplyError, Subscription
from subscriber.errors import TargetError
from subscriber.interfaces import ApplyStatistics
from subscriber.protocol.messages import Message
from subscriber.testing.server import EmbeddedServer
from tests.support.database import WAIT_SECONDS, Database, ServerAddress, fresh_database
from tests.support.observation import eventually
from tests.support.replica import subscription_of
from tests.support.sink_postgres import Feed, Remote, opened

SECRET = "S3CRETVALUE"
NAMES = tuple(field.name for field in fields(ApplyStatistics) if field.name.startswith("confl_"))
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[0-9.+:-]*"


def conflicts(statistics: ApplyStatistics) -> dict[str, int]:
    """Those that there were."""
    return {name: number for name in NAMES if (number := getattr(statistics, name))}


async def refused(feed: Feed, *messages: Message) -> list[str]:
    """The error's notes."""
    with pytest.raises(ApplyError) as caught:
        await feed.apply(*messages)
    assert SECRET not in caught.value.one_line()
    assert caught.value.sqlstate == "23505"
    return list(caught.value.__notes__)


# --- errors


@pytest.mark.matrix
async def test_rows_that_exist(any_target_db: Database) -> None:
    any_target_db.execute(f"""
        CREATE TABLE t (id int PRIMARY KEY, u text, w text, e int, extra int);
        CREATE UNIQUE INDEX t_u ON t (u); CREATE UNIQUE INDEX "T lower" ON t (lower(w)) WHERE e > 0; CREATE INDEX t_plain ON t (e);
        ALTER TABLE t ADD CONSTRAINT late UNIQUE (extra) DEFERRABLE;
        INSERT INTO t VALUES (1, '{SECRET}', 'W', 1, 1), (2, 'other', 'not indexed', 0, 2)
    """)
    ((first,), (second,)) = any_target_db.fetch("SELECT xmin::text FROM t ORDER BY id")
    assert first == second
    remote = Remote("t", "*id", "u", "w", "e")

    def exists(index: str, key: str) -> str:
        return f'Key already exists in unique index "{index}", modified in transaction {first}: key ({key}).'

    async with opened(any_target_db) as feed:
        counted = feed.sink.statistics
        notes = await refused(feed, remote.relation, remote.insert(1, "new", "new", 1))
        assert notes[:2] == ['conflict detected on relation "public.t": conflict=insert_exists', exists("t_pkey", "id")]
        notes = await refused(feed, remote.relation, remote.insert(3, SECRET, "new", 1))
        assert notes[:2] == ['conflict detected on relation "public.t": conflict=insert_exists', exists("t_u", "u")]
        assert conflicts(counted) == {"confl_insert_exists": 2}
        # an expression, of rows that the index has
        notes = await refused(feed, remote.relation, remote.insert(3, "new", "w", 5))
        assert notes[1] == exists("T lower", "lower(w)")
        await feed.apply(remote.relation, remote.insert(4, "four", "w", 0))
        # several at once, by one row or by two
        notes = await refused(feed, remote.relation, remote.insert(1, SECRET, "new", 1))
        assert notes[:3] == [
            'conflict detected on relation "public.t": conflict=multiple_unique_conflicts',
            exists("t_pkey", "id"),
            exists("t_u", "u"),
        ]
        notes = await refused(feed, remote.relation, remote.insert(2, SECRET, "w", 1))
        assert notes[1:4] == [exists("t_pkey", "id"), exists("t_u", "u"), exists("T lower", "lower(w)")]
        assert conflicts(counted) == {"confl_insert_exists": 3, "confl_multiple_unique_conflicts": 2}
        # an UPDATE is not in its own way
        notes = await refused(feed, remote.relation, remote.update(2, SECRET, "not indexed", 0))
        assert notes[:2] == ['conflict detected on relation "public.t": conflict=update_exists', exists("t_u", "u")]
        notes = await refused(feed, remote.relation, remote.update(1, "other", "w", 0, old=(2, None, None, None)))
        assert notes[:2] == ['conflict detected on relation "public.t": conflict=update_exists', exists("t_pkey", "id")]
        notes = await refused(feed, remote.relation, remote.update(1, SECRET, "w", 0, old=(2, None, None, None)))
        assert notes[0] == 'conflict detected on relation "public.t": conflict=multiple_unique_conflicts'
        # it occurs again, and is counted again
        again = feed.transaction(remote.relation, remote.insert(1, "new", "new", 1))
        for _ in range(3):
            with pytest.raises(ApplyError):
                await feed.opened.apply(feed.batch(again))
        assert conflicts(counted) == {
            "confl_insert_exists": 6,
            "confl_update_exists": 2,
            "confl_multiple_unique_conflicts": 3,
        }
        # a prepared transaction has them too
        with pytest.raises(ApplyError, match="duplicate key") as caught:
            await feed.prepare(remote.insert(1, "new", "new", 1))
        assert caught.value.__notes__[1] == exists("t_pkey", "id")
        assert counted.confl_insert_exists == 7
        # the conflicting row is of the same transaction: there is only the server's message
        notes = await refused(feed, remote.relation, remote.insert(9, "n", "x", 0), remote.insert(9, "m", "y", 0))
        assert notes[1] == 'Key already exists in unique index "t_pkey".'
    assert any_target_db.value("SELECT count(*) FROM t") == 3


async def test_rows_that_exist_in_partitions(target_db: Database) -> None:
    """The partition and its indexes are named, as natively: also those that the partitioned table does not have."""
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text, UNIQUE (id, v)) PARTITION BY RANGE (id);
        CREATE SCHEMA "S"; CREATE TABLE "S"."low Q" PARTITION OF t FOR VALUES FROM (0) TO (10); CREATE TABLE high (v text, id int NOT NULL);
        ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (10) TO (20); CREATE UNIQUE INDEX v_index ON high (v);
        INSERT INTO t VALUES (1, 'a'), (2, 'b'), (11, 'b'), (12, 'c')
    """)
    remote = Remote("t", "*id", "v")
    there = r'Key already exists in unique index "{}", modified in transaction \d+: key \({}\)\.'
    async with opened(target_db) as feed:
        notes = await refused(feed, remote.relation, remote.insert(1, "b"))
        assert notes[0] == 'conflict detected on relation "S.low Q": conflict=insert_exists'
        assert re.fullmatch(there.format("low Q_pkey", "id"), notes[1])
        notes = await refused(feed, remote.relation, remote.update(11, "c"))
        assert notes[0] == 'conflict detected on relation "public.high": conflict=update_exists'
        assert re.fullmatch(there.format("v_index", "v"), notes[1])
        notes = await refused(feed, remote.relation, remote.insert(12, "c"))
        assert notes[0] == 'conflict detected on relation "public.high": conflict=multiple_unique_conflicts'
        assert [note.split('"')[1] for note in notes[1:4]] == ["high_pkey", "high_id_v_key", "v_index"]


async def test_row_of_another_origin_in_a_partition(tracked_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    tracked_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 'local')
    """)
    t = Remote("t", "*id", "v")
    line = await logged(tracked_db, caplog, t.relation, t.update(1, "ours"))
    assert line.startswith('conflict detected on relation "public.low": conflict=update_origin_differs: ')


async def test_each_kind_of_conflict_is_logged_before_its_position_is_confirmed(
    target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would be lost with the process."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    t = Remote("t", "*id", "v")

    def logged() -> list[str]:
        return re.findall(r"conflict=(\w+)", caplog.text)

    async with opened(target_db) as feed:
        await feed.apply(t.relation, t.update(1, "nobody"))
        assert logged() == ["update_missing"]
        await feed.apply(t.delete(1, None))
        assert logged() == ["update_missing", "delete_missing"]
        # more of one kind wait for each other
        await feed.apply(t.update(2, "nobody"))
        await feed.apply(t.update(3, "nobody"))
        assert logged() == ["update_missing", "delete_missing"]
    assert logged() == ["update_missing", "delete_missing", "update_missing"]
    assert "to be updated (2 rows)" in caplog.text


async def test_the_context_of_every_kind_of_message(target_db: Database) -> None:
    """Native's apply_error_callback, with its names of the messages."""
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE referring (id int REFERENCES t);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.v = 99)
            EXECUTE FUNCTION refuse();
        ALTER TABLE t ENABLE ALWAYS TRIGGER late
    """)
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:

        async def last_note(*messages: Message) -> str:
            with pytest.raises(TargetError) as caught:
                await feed.apply(remote.relation, *messages)
            note = caught.value.__notes__[-1]
            where = f'processing remote data for replication origin "pg_{feed.oid}" during message type '
            finished = f" in transaction {feed.xid}, finished at 0/{feed.lsn:X}"
            assert note.startswith(where)
            assert note.endswith(finished)
            return note[len(where) : -len(finished)]

        table = ' for replication target relation "public.t"'
        assert await last_note(remote.insert(1, "x")) == f'"INSERT"{table} column "v"'
        await feed.apply(remote.relation, remote.insert(1, 1), remote.insert(2, 2))
        assert await last_note(remote.insert(1, 1)) == f'"INSERT"{table}'
        assert await last_note(remote.update(1, "x")) == f'"UPDATE"{table} column "v"'
        assert await last_note(remote.update(1, 1, old=(2, None))) == f'"UPDATE"{table}'
        assert await last_note(remote.delete("x", None)) == f'"DELETE"{table} column "id"'
        assert await last_note(remote.insert(3, 99)) == '"COMMIT"'
        target_db.execute("DROP TABLE t CASCADE")
        assert await last_note(remote.insert(1, 1)) == f'"INSERT"{table}'


# --- changes that are made, or passed over


@pytest.fixture(params=[18, 16])
def tracked_db(make_server: Callable[..., EmbeddedServer], request: pytest.FixtureRequest) -> Iterator[Database]:
    """A target that keeps commit timestamps."""
    server = make_server(request.param, track_commit_timestamp="on")
    with fresh_database(ServerAddress(server.dsn(), request.param), "tgt") as database:
        yield database


async def test_rows_of_another_origin(tracked_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    tracked_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE keyless (id int, v text);
        SELECT pg_replication_origin_create('elsewhere'); SELECT pg_replication_origin_create('gone')
    """)
    t, keyless = Remote("t", "*id", "v"), Remote("keyless", "id", "v", identity="f", relation_id=4712)
    async with opened(tracked_db) as feed:
        counted = feed.sink.statistics
        await feed.apply(t.relation, keyless.relation, *(t.insert(key, "ours") for key in range(1, 9)), keyless.insert(1, "ours"))
        # what we changed ourselves, in this transaction or in another one, is no conflict
        await feed.apply(t.update(1, "again"), t.update(1, "and again"), t.insert(20, "x"), t.delete(20, None), t.update(8, "x"))
        await feed.apply(t.delete(8, None))
        assert conflicts(counted) == {}
        tracked_db.execute(f"UPDATE t SET v = '{SECRET}' WHERE id = 1; INSERT INTO keyless VALUES (2, 'local'), (2, 'local')")
        for origin, key in (("elsewhere", 2), ("gone", 3)):
            with tracked_db.connect() as session:
                session.execute("SELECT pg_replication_origin_session_setup(%s)", (origin,))
                session.execute("UPDATE t SET v = 'theirs' WHERE id = %s", (key,))
                session.execute("SELECT pg_replication_origin_session_reset()")
        tracked_db.execute("SELECT pg_replication_origin_drop('gone')")
    xids = dict(tracked_db.fetch("SELECT id, xmin::text FROM t"))
    (local,) = {xid for (xid,) in tracked_db.fetch("SELECT xmin::text FROM keyless WHERE id = 2")}
    for relation, change, explanation in (
        (t, t.update(1, "ours"), rf"update_origin_differs: Updating the row that was modified locally in transaction {xids[1]} at T"),
        (
            t,
            t.delete(2, None),
            rf'delete_origin_differs: Deleting the row that was modified by a different origin "elsewhere" in transaction {xids[2]} at T',
        ),
        (
            t,
            t.update(3, "ours"),
            rf"update_origin_differs: Updating the row that was modified by a non-existent origin in transaction {xids[3]} at T",
        ),
        (
            keyless,
            keyless.update(2, "ours", old=(2, "local")),
            rf"update_origin_differs: Updating the row that was modified locally in transaction {local} at T",
        ),
        (keyless, keyless.delete(9, "nobody"), "delete_missing: Could not find the row to be deleted"),
        (t, t.update(9, "nobody"), "update_missing: Could not find the row to be updated"),
    ):
        identity = "full" if relation is keyless else r"\(id\)"
        pattern = (
            rf'conflict detected on relation "public\.{relation.relation.name}": '
            rf"conflict={explanation.replace(' at T', f' at {TIME}')}\. Replica identity {identity}\."
        )
        assert re.fullmatch(pattern, await logged(tracked_db, caplog, relation.relation, change))
    # now they are ours again
    async with opened(tracked_db) as feed:
        feed.lsn = int(feed.position())
        await feed.apply(t.relation, t.update(1, "last"))
        # which row conflicts
        notes = await refused(feed, t.relation, t.insert(1, "x"))
        assert re.fullmatch(
            rf'Key already exists in unique index "t_pkey", modified by origin "subscriber_{feed.oid}" in transaction \d+ at {TIME}: '
            r"key \(id\)\.",
            notes[1],
        )
        assert conflicts(feed.sink.statistics) == {"confl_insert_exists": 1}
    assert tracked_db.fetch("SELECT * FROM t WHERE id < 4 ORDER BY id") == [(1, "last"), (3, "ours")]
    assert sorted(tracked_db.fetch("SELECT id, v FROM keyless")) == [(1, "ours"), (2, "local"), (2, "ours")]


async def test_conflicts_of_what_is_prepared(target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged at once, and count if it is committed."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    t = Remote("t", "*id", "v")
    caplog.set_level("INFO")

    def lines(level: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if "conflict=" in record.getMessage() and record.levelname == level]

    async with opened(target_db) as feed:
        counted = feed.sink.statistics
        committed = await feed.prepare(t.relation, t.update(1, SECRET), t.update(2, SECRET), t.delete(3, None))
        rolled_back = await feed.prepare(t.update(4, SECRET), t.delete(5, None))
        assert conflicts(counted) == {}
        assert lines("WARNING") == []
        missing = "conflict=update_missing: Could not find the row to be updated (2 rows). Replica identity (id)."
        assert lines("INFO")[0].startswith(f'conflict on relation "public.t" in transaction {committed.xid}, which is prepared: {missing}')
        await feed.opened.rollback_prepared(feed.rollback_prepared(rolled_back))
        assert conflicts(counted) == {}
        message = feed.commit_prepared(committed)
        for _ in range(2):
            await feed.opened.commit_prepared(message)
            assert conflicts(counted) == {"confl_update_missing": 2, "confl_delete_missing": 1}
        (line,) = lines("WARNING")
        assert line.startswith(f'conflict detected on relation "public.t": {missing}')
        assert SECRET not in caplog.text
        # its id is used again
        feed.xid = committed.xid - 1
        again = await feed.prepare(t.insert(1, "there"))
        await feed.opened.commit_prepared(feed.commit_prepared(again))
        assert conflicts(counted) == {"confl_update_missing": 2, "confl_delete_missing": 1}


async def logged(database: Database, caplog: pytest.LogCaptureFixture, *messages: Message) -> str:
    """The one line about a conflict of this transaction."""
    caplog.clear()
    async with opened(database) as feed:
        feed.lsn = int(feed.position())
        await feed.apply(*messages)
        ((number,),) = [conflicts(feed.sink.statistics).values()]
        assert number == 1
    (line,) = [text for record in caplog.records if (text := record.getMessage()).startswith("conflict")]
    assert SECRET not in line
    return line


# --- the same as native


class Side(Protocol):
    """A subscription with disable_on_error = true, ours or a native one."""

    target: Database

    async def caught_up(self) -> None: ...

    async def failed(self) -> None:
        """It had an error, and is disabled."""
        ...

    async def enable(self) -> None: ...

    def conflicts(self) -> dict[str, int]: ...


class Native:
    """PostgreSQL's own."""

    def __init__(self, publisher: Database, target: Database) -> None:
        self._publisher = publisher
        self.target = target
        target.execute(
            f"CREATE SUBSCRIPTION native CONNECTION '{publisher.conninfo()}' PUBLICATION pub"
            f" WITH (slot_name = 'native_{target.name}', disable_on_error = true)"
        )

    async def caught_up(self) -> None:
        ready = "SELECT bool_and(srsubstate IN ('r', 's')) FROM pg_subscription_rel"
        await eventually(self.target, ready, True)
        lsn = self._publisher.current_lsn()
        slot = f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE slot_name = 'native_{self.target.name}'"
        await eventually(self._publisher, slot, True)

    async def failed(self) -> None:
        await eventually(self.target, "SELECT subenabled FROM pg_subscription WHERE subname = 'native'", False)

    async def enable(self) -> None:
        self.target.execute("ALTER SUBSCRIPTION native ENABLE")

    def conflicts(self) -> dict[str, int]:
        row = self.target.fetch(f"SELECT {', '.join(NAMES)} FROM pg_stat_subscription_stats WHERE subname = 'native'")[0]
        return {name: number for name, number in zip(NAMES, row, strict=True) if number}


class Ours:
    """One subscription, created again when it failed: its counters are added up here."""

    def __init__(self, publisher: Database, target: Database) -> None:
        self._publisher = publisher
        self.target = target
        self._counted: Counter[str] = Counter()
        self._subscription, self._running = self._start()

    def _start(self) -> tuple[Subscription, asyncio.Task[None]]:
        subscription = subscription_of(self._publisher, self.target, disable_on_error=True)
        return subscription, asyncio.create_task(subscription.run())

    async def caught_up(self) -> None:
        await self._subscription.wait_for(self._publisher.current_lsn(), WAIT_SECONDS)

    async def failed(self) -> None:
        with pytest.raises(ApplyError):
            await asyncio.wait_for(self._running, WAIT_SECONDS)

    async def enable(self) -> None:
        self._counted.update(conflicts(self._subscription.status.statistics))
        self._subscription, self._running = self._start()

    def conflicts(self) -> dict[str, int]:
        return dict(self._counted + Counter(conflicts(self._subscription.status.statistics)))

    async def stop(self) -> None:
        self._subscription.stop()
        await self._running


COPIED = "TRUNCATE t; INSERT INTO t SELECT g, 'u' || g, 'copied' FROM generate_series(100, 102) AS g"


async def scenario(publisher: Database, side: Side) -> dict[str, int]:
    """Every kind of conflict, once or more; the counters at the end. It begins with the rows of COPIED."""
    target = side.target
    await side.caught_up()
    publisher.execute("INSERT INTO t SELECT g, 'u' || g, 'followed' FROM generate_series(1, 9) AS g")
    await side.caught_up()
    target.execute("UPDATE t SET v = 'local' WHERE id IN (1, 2, 3); DELETE FROM t WHERE id IN (4, 5)")
    publisher.execute("UPDATE t SET v = 'p' WHERE id IN (1, 3, 4)")
    publisher.execute("DELETE FROM t WHERE id IN (2, 5)")
    publisher.execute("UPDATE t SET v = 'p' WHERE id IN (1, 6, 100); DELETE FROM t WHERE id = 101")
    await side.caught_up()
    for local, remote in (
        ("(10, 'local', '')", "INSERT INTO t VALUES (10, 'u10', '')"),
        ("(11, 'u6 too', '')", "UPDATE t SET u = 'u6 too' WHERE id = 6"),
        ("(12, 'u12', '')", "INSERT INTO t VALUES (12, 'u12', '')"),
        ("(13, 'u13', ''), (14, 'u14', '')", "UPDATE t SET id = 13, u = 'u14' WHERE id = 7"),
    ):
        target.execute(f"INSERT INTO t VALUES {local}")
        publisher.execute(remote)
        await side.failed()
        target.execute("DELETE FROM t WHERE id BETWEEN 10 AND 19 AND id IN (SELECT id FROM t EXCEPT SELECT id FROM mine)")
        await side.enable()
        await side.caught_up()
        target.execute("INSERT INTO mine SELECT id FROM t ON CONFLICT DO NOTHING")
    return side.conflicts()


async def test_the_same_conflicts_as_native(
    make_server: Callable[..., EmbeddedServer], publisher18_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, u text UNIQUE, v text)"
    publisher18_db.execute(f"{table}; CREATE PUBLICATION pub FOR TABLE t")
    server = make_server(18, track_commit_timestamp="on", wal_retrieve_retry_interval="200ms")
    address = ServerAddress(server.dsn(), 18)
    with fresh_database(address, "ours") as our_target, fresh_database(address, "native") as native_target:
        for target in (our_target, native_target):
            target.execute(f"{table}; CREATE TABLE mine (id int PRIMARY KEY)")
        publisher18_db.execute(COPIED)
        native = Native(publisher18_db, native_target)
        native_counted = await scenario(publisher18_db, native)
        rows = "SELECT id, u, v FROM t ORDER BY id"
        native_rows = native_target.fetch(rows)
        native_target.execute("DROP SUBSCRIPTION native")
        publisher18_db.execute(COPIED)
        ours = Ours(publisher18_db, our_target)
        our_counted = await scenario(publisher18_db, ours)
        await ours.stop()
        assert our_counted == native_counted
        assert our_target.fetch(rows) == native_rows
        assert set(our_counted) == set(NAMES), "there was one of each kind"
        # and in the same words
        said = re.compile(
            r'conflict detected on relation "public\.t": conflict=\w+|(?:Updating|Deleting) the row that was modified locally'
        )
        assert said.findall(caplog.text)
        assert set(said.findall(caplog.text)) <= set(said.findall(server.log()))


@pytest.mark.parametrize("enable", ["REPLICA", "ALWAYS"])
@pytest.mark.parametrize("of", ["t", "low"])
async def test_row_that_a_trigger_passes_over(any_target_db: Database, of: str, enable: str) -> None:
    """Such a row is there: no conflict, as natively. The bug was that UPDATE and DELETE were counted as if it were missing."""
    any_target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 'kept'), (2, 'other');
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF OLD.id = 1 THEN RETURN NULL; END IF; RETURN OLD; END'
    """)
    remote = Remote("t" if of == "t" else "low", "*id", "v")
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, remote.update(1, "kept"))
        # made while the table is known
        any_target_db.execute(f"""
            CREATE TRIGGER keep BEFORE UPDATE OR DELETE ON {of} FOR EACH ROW EXECUTE FUNCTION keep();
            ALTER TABLE {of} ENABLE {enable} TRIGGER keep
        """)
        await feed.apply(remote.update(1, "new"), remote.delete(1, None), remote.update(3, "moved", old=(1, None)))
        assert conflicts(feed.sink.statistics) == {}
        await feed.apply(remote.update(9, "new"), remote.delete(9, None), remote.delete(2, None))
        assert conflicts(feed.sink.statistics) == {"confl_update_missing": 1, "confl_delete_missing": 1}
    assert any_target_db.fetch("SELECT * FROM t") == [(1, "kept")]


async def test_partition_whose_trigger_passes_over(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 'kept');
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER keep BEFORE UPDATE OR DELETE ON low FOR EACH ROW EXECUTE FUNCTION keep();
        ALTER TABLE low ENABLE ALWAYS TRIGGER keep
    """)
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.update(1, "new"), remote.delete(1, None))
        assert conflicts(feed.sink.statistics) == {}
    assert target_db.fetch("SELECT * FROM t") == [(1, "kept")]
