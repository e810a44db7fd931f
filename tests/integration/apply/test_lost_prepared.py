"""Prepared transactions that SQL targets and lakes store: empty ones, those that wait over a restart, those that were lost, dropped tables.

Before 18, a publisher sends only COMMIT PREPARED of a transaction without changes. The bug was that a lost one was taken for such a one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber import Lsn, Subscription, SubscriptionOptions, TableName
from subscriber.errors import DataLossError, NeverPrepared
from subscriber.protocol.messages import CommitPrepared
from tests.support.database import WAIT_SECONDS, Database
from tests.support.lakes import applied, lake_rows
from tests.support.observation import confirmed, eventually, slot_of
from tests.support.replica import QUICK, at_work
from tests.support.sqlalchemy_targets import OtherTarget, sqlite_target
from tests.support.two_phase import finish, name, prepare

_EMPTY = "SELECT FROM t WHERE id = 1 FOR UPDATE"
_ROWS = "SELECT id FROM t ORDER BY id"


class _Sql:
    def __init__(self, target: OtherTarget) -> None:
        self.url, self.execute, self._fetch = target.url, target.execute, target.fetch

    async def ids(self) -> list[int]:
        return [row[0] for row in self._fetch(_ROWS)]

    def lose(self, xid: int) -> None:
        for table in ("prepared_transaction", "prepared_transaction_chunk"):
            assert self._fetch(f"SELECT count(*) FROM subscriber_{table} WHERE xid = {xid}") == [(1,)]
            self.execute(f"DELETE FROM subscriber_{table} WHERE xid = {xid}")

    def kept(self) -> int:
        return int(self._fetch("SELECT count(*) FROM subscriber_prepared_transaction")[0][0])


class _Lake:
    def __init__(self, path: Path) -> None:
        self._path = path / "lake"
        self.url = f"spark://{self._path}"

    async def ids(self) -> list[int]:
        snapshot = await applied(self._path)
        rows = lake_rows(self._path, snapshot, TableName("public", "t"), ["id"])
        return sorted(int(row[0] or "") for row in rows)

    def lose(self, xid: int) -> None:
        (directory,) = (self._path / "prepared").glob(f"{xid}-*")
        shutil.rmtree(directory)

    def kept(self) -> int:
        return len(list((self._path / "prepared").glob("*")))


def _subscription(publisher: Database, target: _Sql | _Lake) -> Subscription:
    return Subscription(
        slot_of(publisher),
        connection=publisher.conninfo(),
        publications=["pub"],
        target=target.url,
        options=SubscriptionOptions(two_phase=True),
        settings=replace(QUICK, create_tables=True),
    )


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> _Sql | _Lake:
    """A target that stores prepared transactions."""
    match request.param:
        case "sqlite":
            return _Sql(sqlite_target(tmp_path / "replica.db"))
        case "mariadb":
            database = request.getfixturevalue("mariadb_db")
            return _Sql(OtherTarget("mariadb", database.url, database.fetch, database.execute))
        case _:
            return _Lake(tmp_path)


@contextlib.asynccontextmanager
async def _running(publisher: Database, target: _Sql | _Lake) -> AsyncIterator[Subscription]:
    """Run it until everything is applied that is committed at the end of the block."""
    subscription = _subscription(publisher, target)
    async with at_work(subscription):
        yield subscription
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        assert subscription.status.last_error is None


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.parametrize("stored", [pytest.param("sqlite", marks=pytest.mark.matrix), "mariadb", "lake"], indirect=True)
async def test_stored_prepared_transactions(stored: _Sql | _Lake, publisher_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    target = stored
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t")
    publisher_db.execute("CREATE TABLE unpublished (id int)")
    async with _running(publisher_db, target) as subscription:
        enabled = f"SELECT bool_or(two_phase) FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
        await eventually(publisher_db, enabled, True)
        for how in ("COMMIT", "ROLLBACK"):
            prepare(publisher_db, "empty", _EMPTY)
            prepare(publisher_db, "not published", "INSERT INTO unpublished VALUES (1)")
            await subscription.wait_for(publisher_db.current_lsn(), WAIT_SECONDS)
            finish(publisher_db, "empty", how)
            finish(publisher_db, "not published", how)
            publisher_db.execute("INSERT INTO t SELECT max(id) + 1 FROM t")
        prepare(publisher_db, "empty", _EMPTY)
        prepare(publisher_db, "kept", "INSERT INTO t VALUES (10)")
        prepare(publisher_db, "gone", "INSERT INTO t VALUES (20)")
        lost = [prepare(publisher_db, gid, f"INSERT INTO t VALUES ({id_})") for gid, id_ in (("lost", 30), ("lost, unmissed", 40))]
    assert await target.ids() == [1, 2, 3]
    # while it does not run, entries are deleted; what has its entry continues, and so does what has no changes
    for xid in lost:
        target.lose(xid)
    for gid, how in (("empty", "COMMIT"), ("kept", "COMMIT"), ("gone", "ROLLBACK"), ("lost, unmissed", "ROLLBACK")):
        finish(publisher_db, gid, how)
    async with _running(publisher_db, target) as subscription:
        publisher_db.execute("INSERT INTO t VALUES (50)")
    assert await target.ids() == [1, 2, 3, 10, 50]
    before = confirmed(publisher_db)
    finish(publisher_db, "lost", "COMMIT")
    for _ in range(2):
        with pytest.raises(DataLossError, match="was received, and is lost") as raised:
            await asyncio.wait_for(_subscription(publisher_db, target).run(), WAIT_SECONDS)
        assert not isinstance(raised.value, NeverPrepared)
    assert confirmed(publisher_db) - before < 100, "COMMIT PREPARED was acknowledged"
    assert await target.ids() == [1, 2, 3, 10, 50]
    # the way out: skip it
    subscription = _subscription(publisher_db, target)
    opened = await subscription._spec.sink.open(slot_of(publisher_db), lambda _: None)
    end = publisher_db.current_lsn()
    await opened.skip(CommitPrepared(0, Lsn(end - 8), end, 0, lost[0], name(publisher_db, "lost")))
    await opened.close()
    async with _running(publisher_db, target):
        publisher_db.execute("INSERT INTO t VALUES (60)")
    assert await target.ids() == [1, 2, 3, 10, 50, 60]
    assert target.kept() == 0
    assert caplog.text.count("its PREPARE never came") == (2 if publisher_db.version < 18 else 0)


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.parametrize("stored", ["sqlite"], indirect=True)
async def test_table_that_is_dropped_before_its_changes_are_committed(
    stored: _Sql, publisher_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """As without two-phase, nothing could be lost. The bug was that the run stopped."""
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE old (id int PRIMARY KEY)")
    publisher_db.execute("CREATE PUBLICATION pub FOR TABLE t, old")
    async with _running(publisher_db, stored) as subscription:
        enabled = f"SELECT bool_or(two_phase) FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
        await eventually(publisher_db, enabled, True)
        prepare(publisher_db, "both", "INSERT INTO t VALUES (1)", "INSERT INTO old VALUES (1)", "TRUNCATE old")
        await subscription.wait_for(publisher_db.current_lsn(), WAIT_SECONDS)
    finish(publisher_db, "both", "COMMIT")
    publisher_db.execute("DROP TABLE old")
    stored.execute("DROP TABLE old")
    async with _running(publisher_db, stored):
        publisher_db.execute("INSERT INTO t VALUES (2)")
    assert await stored.ids() == [1, 2]
    assert caplog.text.count("its changes are left out") == 1
