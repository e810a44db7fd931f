"""Conflicts by rule: each rule in each situation, as single changes, in sets, and in a transaction that is applied before its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest

from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Delete, Insert, Message, Update
from subscriber.sinks import conflict_log
from subscriber.sinks.conflict_log import LoggedConflict
from subscriber.sinks.postgres.apply import set_sender
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.tables.conflict_log import ConflictLog
from subscriber.testing.server import EmbeddedServer
from tests.integration.apply.test_conflicts import conflicts
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.sink_postgres import UNCHANGED, Feed, Remote, opened, truncate

SETUP = """
CREATE TABLE t (id int PRIMARY KEY, v text, own text DEFAULT 'own');
CREATE TABLE u (id int PRIMARY KEY, a text UNIQUE, b text UNIQUE, v text);
CREATE TABLE keyless (id int, v text);
CREATE TABLE part (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE part_low PARTITION OF part FOR VALUES FROM (0) TO (100);
CREATE TABLE part_high PARTITION OF part FOR VALUES FROM (100) TO (200);
CREATE TABLE lonely (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
CREATE TABLE numbered (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a text UNIQUE, v text);
"""
T = Remote("t", "*id", "v")
T_FULL = Remote("t", "*id", "v", identity="f", relation_id=7)
U = Remote("u", "*id", "a", "b", "v", relation_id=2)
KEYLESS = Remote("keyless", "id", "v", identity="f", relation_id=3)
PART = Remote("part", "*id", "v", relation_id=4)
NUMBERED = Remote("numbered", "*id", "a", "v", relation_id=5)
LONELY = Remote("lonely", "*id", relation_id=6)
NEVER = 10**9


@dataclass
class Situation:
    """A change that conflicts.

    Attributes:
        rules: the rules, as options.
        table: the table; the rows are compared.
        rows: the rows of the target before.
        changes: the changes.
        after: the rows of the target after them; None: the change is refused.
        conflicts: how many conflicts are counted.
    """

    rules: dict[str, str]
    remote: Remote
    rows: str
    changes: list[Message]
    after: list[tuple[object, ...]] | None
    conflicts: dict[str, int]


ROWS = "(1, 'local'), (2, 'local')"
INSERTS: list[Message] = [T.insert(1, "remote"), T.insert(3, "remote")]
UROWS = "(1, 'a1', 'b1', 'local'), (2, 'a2', 'b2', 'local'), (3, 'a3', 'b3', 'local')"
U1, U2, U3 = (1, "a1", "b1", "local"), (2, "a2", "b2", "local"), (3, "a3", "b3", "local")
APPLY, KEEP, MULTIPLE = {"insert_exists": "apply_remote"}, {"insert_exists": "keep_local"}, "multiple_unique_conflicts"

SITUATIONS = {
    "insert_exists error": Situation({}, T, ROWS, INSERTS, None, {"confl_insert_exists": 1}),
    "insert_exists apply_remote": Situation(
        APPLY,
        T,
        ROWS,
        INSERTS,
        [(1, "remote", "own"), (2, "local", "own"), (3, "remote", "own")],
        {"confl_insert_exists": 1},
    ),
    "insert_exists keep_local": Situation(
        KEEP, T, ROWS, INSERTS, [(1, "local", "own"), (2, "local", "own"), (3, "remote", "own")], {"confl_insert_exists": 1}
    ),
    "insert_exists apply_remote in a partition": Situation(
        APPLY,
        PART,
        "(1, 'local'), (150, 'local')",
        [PART.insert(1, "remote"), PART.insert(150, "remote"), PART.insert(151, "remote")],
        [(1, "remote"), (150, "remote"), (151, "remote")],
        {"confl_insert_exists": 2},
    ),
    "insert_exists apply_remote in another index": Situation(
        APPLY, U, UROWS, [U.insert(4, "a1", "new", "remote")], [U2, U3, (4, "a1", "new", "remote")], {"confl_insert_exists": 1}
    ),
    "insert_exists keep_local in another index": Situation(
        KEEP, U, UROWS, [U.insert(4, "a1", "new", "remote")], [U1, U2, U3], {"confl_insert_exists": 1}
    ),
    "insert_exists of a row of the same transaction": Situation(
        APPLY,
        T,
        ROWS,
        [T.insert(7, "x"), T.insert(7, "y")],
        [(1, "local", "own"), (2, "local", "own"), (7, "y", "own")],
        {"confl_insert_exists": 1},
    ),
    "insert_exists apply_remote twice": Situation(
        APPLY,
        T_FULL,
        ROWS,
        [T_FULL.insert(1, "x"), T_FULL.insert(1, "y")],
        [(1, "y", "own"), (2, "local", "own")],
        {"confl_insert_exists": 2},
    ),
    "insert_exists apply_remote of an identity column": Situation(
        APPLY,
        NUMBERED,
        "(1, 'a1', 'local'), (2, 'a2', 'local')",
        [NUMBERED.insert(1, "new", "remote"), NUMBERED.insert(9, "a2", "remote")],
        [(1, "new", "remote"), (9, "a2", "remote")],
        {"confl_insert_exists": 2},
    ),
    "no key": Situation(APPLY, KEYLESS, "(1, 'local')", [KEYLESS.insert(1, "local"), KEYLESS.insert(1, "local")], [(1, "local")] * 3, {}),
    "only an identity column": Situation(
        APPLY, LONELY, "(1), (2)", [LONELY.insert(1), LONELY.insert(3)], [(1,), (2,), (3,)], {"confl_insert_exists": 1}
    ),
    "update of an identity column": Situation(
        {"update_missing": "insert", "update_exists": "apply_remote"},
        NUMBERED,
        "(1, 'a1', 'local'), (2, 'a2', 'local')",
        [NUMBERED.update(9, "a2", "remote", old=(1, None, None)), NUMBERED.update(7, "a7", "new", old=(6, None, None))],
        [(7, "a7", "new"), (9, "a2", "remote")],
        {"confl_update_exists": 1, "confl_update_missing": 1},
    ),
    "multiple error": Situation(APPLY, U, UROWS, [U.insert(1, "a2", "new", "remote")], None, {f"confl_{MULTIPLE}": 1}),
    "multiple apply_remote": Situation(
        {MULTIPLE: "apply_remote"},
        U,
        UROWS,
        [U.insert(1, "a2", "b3", "remote"), U.insert(4, "a4", "b4", "remote")],
        [(1, "a2", "b3", "remote"), (4, "a4", "b4", "remote")],
        {f"confl_{MULTIPLE}": 1},
    ),
    "multiple apply_remote of one row": Situation(
        {MULTIPLE: "apply_remote"},
        U,
        UROWS,
        [U.insert(1, "a1", "b1", "remote")],
        [(1, "a1", "b1", "remote"), U2, U3],
        {f"confl_{MULTIPLE}": 1},
    ),
    "multiple keep_local": Situation(
        {MULTIPLE: "keep_local"},
        U,
        UROWS,
        [U.insert(1, "a2", "new", "remote"), U.update(3, "a1", "b2", "remote")],
        [U1, U2, U3],
        {f"confl_{MULTIPLE}": 2},
    ),
    "update_exists error": Situation(APPLY, U, UROWS, [U.update(1, "a2", "b1", "remote")], None, {"confl_update_exists": 1}),
    "update_exists apply_remote": Situation(
        {"update_exists": "apply_remote"},
        U,
        UROWS,
        [U.update(1, "a2", UNCHANGED, "remote")],
        [(1, "a2", "b1", "remote"), U3],
        {"confl_update_exists": 1},
    ),
    "update_exists apply_remote of the key": Situation(
        {"update_exists": "apply_remote"},
        T,
        ROWS,
        [T.update(2, "remote", old=(1, None))],
        [(2, "remote", "own")],
        {"confl_update_exists": 1},
    ),
    "update_exists keep_local": Situation(
        {"update_exists": "keep_local"},
        U,
        UROWS,
        [U.update(1, "a2", "b1", "remote"), U.update(3, "new", "b3", "remote")],
        [U1, U2, (3, "new", "b3", "remote")],
        {"confl_update_exists": 1},
    ),
    "update_missing skip": Situation(
        {},
        T,
        ROWS,
        [T.update(1, "remote"), T.update(9, "remote")],
        [(1, "remote", "own"), (2, "local", "own")],
        {"confl_update_missing": 1},
    ),
    "update_missing insert": Situation(
        {"update_missing": "insert"},
        T,
        ROWS,
        [T.update(1, "remote"), T.update(9, "remote"), T.update(9, "again"), T.update(8, "moved", old=(7, None))],
        [(1, "remote", "own"), (2, "local", "own"), (8, "moved", "own"), (9, "again", "own")],
        {"confl_update_missing": 2},
    ),
    "update_missing insert without the whole row": Situation(
        {"update_missing": "insert"}, T, ROWS, [T.update(2, UNCHANGED), T.update(9, UNCHANGED)], None, {"confl_update_missing": 1}
    ),
    "update_missing insert of a row that exists": Situation(
        {"update_missing": "insert", "update_exists": "apply_remote"},
        U,
        UROWS,
        [U.update(9, "a1", "new", "remote")],
        [U2, U3, (9, "a1", "new", "remote")],
        {"confl_update_missing": 1, "confl_update_exists": 1},
    ),
    "update_missing error": Situation(
        {"update_missing": "error"}, T, ROWS, [T.update(1, "remote"), T.update(9, "remote")], None, {"confl_update_missing": 1}
    ),
    "delete_missing skip": Situation(
        {}, T, ROWS, [T.delete(1, None), T.delete(9, None)], [(2, "local", "own")], {"confl_delete_missing": 1}
    ),
    "delete_missing error": Situation(
        {"delete_missing": "error"}, T, ROWS, [T.delete(1, None), T.delete(9, None)], None, {"confl_delete_missing": 1}
    ),
    "missing without a key": Situation(
        {"update_missing": "insert", "delete_missing": "skip"},
        KEYLESS,
        "(1, 'local'), (2, NULL)",
        [KEYLESS.update(2, "remote", old=(2, None)), KEYLESS.update(9, "remote", old=(9, None)), KEYLESS.delete(8, "nobody")],
        [(1, "local"), (2, "remote"), (9, "remote")],
        {"confl_update_missing": 1, "confl_delete_missing": 1},
    ),
    "a rule of another table": Situation({"insert_exists.public.u": "apply_remote"}, T, ROWS, INSERTS, None, {"confl_insert_exists": 1}),
    "a rule of this table": Situation(
        {"insert_exists": "keep_local", "insert_exists.PUBLIC.t": "apply_remote"},
        T,
        ROWS,
        INSERTS,
        [(1, "remote", "own"), (2, "local", "own"), (3, "remote", "own")],
        {"confl_insert_exists": 1},
    ),
}


async def _early(feed: Feed, remote: Remote, changes: list[Message]) -> bool:
    """Apply the changes in a session of parallel apply; False: refused, and rolled back."""
    feed.xid += 1
    xid = feed.xid
    records = [encode(replace(remote.relation, xid=xid))]
    for change in changes:
        assert isinstance(change, Insert | Update | Delete)
        change.xid = xid
        records.append(encode(change))
        change.xid = None
    feed.subscribe("public", remote.relation.name)
    parallel = await feed.opened.open_parallel(xid, lambda _: True)
    try:
        await parallel.apply(records)
        transaction = replace(feed.transaction(), xid=xid, records=records, prefixed=True)
        return await parallel.commit(transaction)
    except TargetError:
        return False
    finally:
        await parallel.roll_back()


@pytest.mark.parametrize("how", ["single", "set", "streamed"])
async def test_every_rule(any_target_db: Database, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(set_sender, "_LEAST", NEVER if how == "single" else 1)
    any_target_db.execute(SETUP)
    for name, each in SITUATIONS.items():
        table = each.remote.relation.name
        always = "OVERRIDING SYSTEM VALUE " if table in {"numbered", "lonely"} else ""
        any_target_db.execute(f"TRUNCATE {table}; INSERT INTO {table} {always}VALUES {each.rows}")
        async with opened(any_target_db, conflict=each.rules) as feed:
            feed.lsn = max(feed.lsn, int(feed.position()))
            counted = feed.sink.statistics
            if how == "streamed" and await _early(feed, each.remote, each.changes):
                assert each.after is not None, name
                assert counted.parallel_transactions == 1
            elif each.after is None:
                with pytest.raises(TargetError) as caught:
                    await feed.apply(each.remote.relation, *each.changes)
                assert "conflict=" in caught.value.__notes__[0], name
                if name == "multiple error":
                    assert "or give a rule (conflict.multiple_unique_conflicts)" in str(caught.value.hint)
                assert caught.value.finish_lsn is not None
            else:
                await feed.apply(each.remote.relation, *each.changes)
            assert conflicts(counted) == each.conflicts, name
        rows = any_target_db.fetch(f"SELECT * FROM {table} AS x ORDER BY x::text")
        if each.after is not None:
            assert rows == each.after, name
        else:
            assert {row[-1 if table == "u" else 1] for row in rows} == {"local"}, name


@pytest.fixture(params=[18, 14])
def tracked_db(make_server: Callable[..., EmbeddedServer], request: pytest.FixtureRequest) -> Iterator[Database]:
    """A target that keeps commit timestamps."""
    server = make_server(request.param, track_commit_timestamp="on")
    with fresh_database(ServerAddress(server.dsn(), request.param), "tgt") as database:
        yield database


@contextlib.asynccontextmanager
async def reopened(database: Database, **rules: str) -> AsyncIterator[Feed]:
    async with opened(database, conflict=rules) as feed:
        feed.lsn = max(feed.lsn, int(feed.position()))
        yield feed


def micros(database: Database, interval: str) -> int:
    """A time relative to the target's clock, in microseconds since 2000."""
    return int(database.value(f"SELECT (extract(epoch FROM now() + interval '{interval}' - timestamptz '2000-01-01Z') * 1000000)::int8"))


@pytest.mark.parametrize("how", ["single", "set"])
async def test_rules_by_origin_and_time(tracked_db: Database, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(set_sender, "_LEAST", NEVER if how == "single" else 1)
    tracked_db.execute(SETUP)
    old, new = micros(tracked_db, "-1 day"), micros(tracked_db, "1 day")

    async def apply(feed: Feed, commit_time: int, *messages: Message) -> None:
        await feed.opened.apply(feed.batch(replace(feed.transaction(*messages), commit_time=commit_time)))

    differs = {"update_origin_differs": "keep_local", "delete_origin_differs": "keep_local"}
    async with reopened(tracked_db, **differs) as feed:
        await apply(feed, new, T.relation, T.insert(1, "ours"), T.insert(2, "ours"), T.insert(3, "ours"))
        tracked_db.execute("UPDATE t SET v = 'local' WHERE id > 1")
        # ours are changed, those of others are kept
        await apply(feed, new, T.update(1, "again"), T.update(2, "again"), T.delete(3, None))
        assert conflicts(feed.sink.statistics) == {"confl_update_origin_differs": 1, "confl_delete_origin_differs": 1}
        assert feed.sink.statistics.updates == 1
    assert tracked_db.fetch("SELECT id, v FROM t ORDER BY id") == [(1, "again"), (2, "local"), (3, "local")]
    # what the table had when its synchronization ended is ours
    tracked_db.execute("UPDATE subscriber.pg_subscription_rel SET srsyncxid = pg_current_xact_id()::text::int8")
    tracked_db.execute("UPDATE t SET v = 'later' WHERE id = 3")
    async with reopened(tracked_db, **differs) as feed:
        await apply(feed, new, T.relation, T.update(2, "again"), T.update(3, "again"))
        assert conflicts(feed.sink.statistics) == {"confl_update_origin_differs": 1}
    assert tracked_db.fetch("SELECT id, v FROM t ORDER BY id") == [(1, "again"), (2, "again"), (3, "later")]
    # so it does for the log of conflicts without rules
    tracked_db.execute("UPDATE subscriber.pg_subscription_rel SET srsyncxid = pg_current_xact_id()::text::int8")
    async with opened(tracked_db, conflict_log="public.log") as feed:
        feed.lsn = max(feed.lsn, int(feed.position()))
        await apply(feed, new, T.relation, T.update(3, "again"))
        assert conflicts(feed.sink.statistics) == {}

    tracked_db.execute("TRUNCATE t; INSERT INTO t VALUES (1, 'local'), (2, 'local'), (3, 'local'), (4, 'local')")
    kinds = ("insert_exists", "update_exists", "update_origin_differs", "delete_origin_differs")
    async with reopened(tracked_db, **dict.fromkeys(kinds, "last_update_wins")) as feed:
        await apply(feed, old, T.relation, T.insert(1, "remote"), T.update(2, "remote"), T.delete(3, None), T.update(4, "x", old=(5, None)))
        assert tracked_db.fetch("SELECT DISTINCT v FROM t") == [("local",)]
        await apply(feed, new, T.insert(1, "remote"), T.update(2, "remote"), T.delete(3, None))
        counted = {"confl_insert_exists": 2, "confl_update_origin_differs": 2, "confl_delete_origin_differs": 2, "confl_update_missing": 1}
        assert conflicts(feed.sink.statistics) == counted
        # before the end of a streamed transaction, its time is not known: it is applied at its end
        assert not await _early(feed, T, [T.insert(1, "early")])
        assert await _early(feed, T, [T.insert(9, "early")])
        # each transaction is committed with its own time
        first = replace(feed.transaction(T.relation, T.insert(10, "x")), commit_time=old)
        second = replace(feed.transaction(T.insert(11, "x")), commit_time=new)
        await feed.opened.apply(feed.batch(first, second))
        times = "SELECT count(DISTINCT pg_xact_commit_timestamp(xmin)) FROM t WHERE id > 9"
        assert tracked_db.value(times) == 2
    assert tracked_db.fetch("SELECT id, v FROM t WHERE id < 10 ORDER BY id") == [(1, "remote"), (2, "remote"), (4, "local"), (9, "early")]

    # the default, given; several rows in the way
    tracked_db.execute(f"INSERT INTO u VALUES {UROWS}; UPDATE t SET v = 'local' WHERE id = 9")
    rules = {"update_origin_differs": "apply_remote", MULTIPLE: "last_update_wins"}
    async with reopened(tracked_db, **rules) as feed:
        await apply(feed, old, T.relation, T.update(9, "remote"), U.relation, U.insert(1, "a2", "new", "remote"))
        assert tracked_db.fetch("TABLE u ORDER BY id") == [U1, U2, U3]
        await apply(feed, new, U.insert(1, "a2", "new", "remote"))
        assert conflicts(feed.sink.statistics) == {"confl_update_origin_differs": 1, f"confl_{MULTIPLE}": 2}
    assert tracked_db.fetch("TABLE u ORDER BY id") == [(1, "a2", "new", "remote"), U3]
    assert tracked_db.value("SELECT v FROM t WHERE id = 9") == "remote"


async def test_rules_that_the_target_cannot_follow(any_target_db: Database, target_version: int) -> None:
    for kind, rule in (("insert_exists", "last_update_wins"), ("update_origin_differs", "keep_local")):
        feed = Feed(any_target_db, conflict={f"{kind}.public.t": rule})
        needs = "track_commit_timestamp in the target, which is off" if target_version >= 14 else "a target of PostgreSQL 14 or later"
        with pytest.raises(ConfigurationError, match=f"conflict.{kind} = {rule} needs {needs}") as caught:
            await feed.open()
        assert caught.value.hint
        findings = await feed.sink.check((), two_phase=False)
        assert [finding.message for finding in findings if finding.severity == "error"] == [str(caught.value)]


async def test_resolved_conflicts_are_logged_without_values(target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    target_db.execute(SETUP + "INSERT INTO t VALUES (1, 'S3CRET')")
    async with reopened(target_db, insert_exists="apply_remote", update_missing="insert") as feed:
        await feed.apply(T.relation, T.insert(1, "S3CRET"), T.update(2, "S3CRET"))
    assert (
        'conflict=insert_exists, resolution=apply_remote: Key already exists in unique index "t_pkey", modified in transaction'
        in caplog.text
    )
    assert "conflict=update_missing, resolution=insert: Could not find the row to be updated" in caplog.text
    assert "S3CRET" not in caplog.text


async def test_overlapping_rows_are_no_keys(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE booked (room int4range, at daterange, v text, PRIMARY KEY (room, at WITHOUT OVERLAPS));
        INSERT INTO booked VALUES ('[1,5)', '[2020-01-01,2030-01-01)', 'local')
    """)
    booked = Remote("booked", "*room", "*at", "v")
    years = "[2029-01-01,2031-01-01)"
    async with reopened(target_db, insert_exists="apply_remote", update_missing="insert", update_exists="apply_remote") as feed:
        await feed.apply(booked.relation, booked.insert("[1,2)", years, "x"), booked.update("[2,3)", years, "y"))
        assert conflicts(feed.sink.statistics) == {"confl_update_missing": 1}
        with pytest.raises(TargetError, match="violates exclusion constraint"):
            await feed.apply(booked.insert("[1,5)", years, "z"))
    assert target_db.fetch("SELECT v FROM booked ORDER BY v") == [("local",), ("x",), ("y",)]


LOG = """
SELECT schema_name, table_name, conflict, rule, applied, xid, lsn::text, key, local_row, remote_row FROM log
WHERE conflict IS NOT NULL ORDER BY lsn, conflict, key
"""


@pytest.mark.parametrize("how", ["single", "set", "streamed"])
async def test_log_of_conflicts(any_target_db: Database, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(set_sender, "_LEAST", 1 if how == "set" else NEVER)
    any_target_db.execute(SETUP + "INSERT INTO t VALUES (1, 'local'), (2, 'local'); INSERT INTO keyless VALUES (1, NULL)")
    rules = {"insert_exists": "keep_local", "update_missing": "insert"}
    changes: list[Message] = [T.insert(1, "remote"), T.insert(5, "remote"), T.update(7, "x"), T.delete(8, None)]
    old = "INSERT INTO log (logged_at, subscription) VALUES (now() - interval '31 days', 'sub'), (now(), 'sub')"
    for rows in (False, True):
        async with opened(any_target_db, conflict=rules, conflict_log="PUBLIC.log", conflict_log_rows=rows) as feed:
            feed.lsn = max(feed.lsn, int(feed.position()))
            any_target_db.execute(old)
            # without a replica identity, old rows could not be deleted
            any_target_db.execute("DROP PUBLICATION IF EXISTS logs; CREATE PUBLICATION logs FOR TABLE log")
            if how == "streamed":
                assert await _early(feed, T, changes)
            else:
                await feed.apply(T.relation, *changes)
            xid, lsn = feed.xid, f"0/{feed.lsn:X}"
            await feed.apply(KEYLESS.relation, KEYLESS.update(1, "x", old=(1, "no")))
            last, end = feed.xid, f"0/{feed.lsn:X}"
            # what is rolled back is not logged
            with pytest.raises(TargetError):
                await feed.apply(T.update(9, "x"), T.update(1, UNCHANGED, old=(2, None)), T.insert(9, "x" * 10, "more"))
        local = {"id": 1, "v": "local", "own": "own"}
        found = any_target_db.fetch(LOG)
        if how == "streamed":
            xid = found[0][5]
        assert found == [
            ("public", "t", "delete_missing", "skip", False, xid, lsn, {"id": 8}, None, None),
            (
                "public",
                "t",
                "insert_exists",
                "keep_local",
                False,
                xid,
                lsn,
                {"id": 1},
                *((local, {"id": 1, "v": "remote"}) if rows else (None, None)),
            ),
            ("public", "t", "update_missing", "insert", True, xid, lsn, {"id": 7}, None, {"id": 7, "v": "x"} if rows else None),
            (
                "public",
                "keyless",
                "update_missing",
                "insert",
                True,
                last,
                end,
                {"id": 1, "v": "no"},
                None,
                {"id": 1, "v": "x"} if rows else None,
            ),
        ]
        # rows are removed after a month
        assert any_target_db.value("SELECT count(*) FROM log WHERE conflict IS NULL") == 1
        assert any_target_db.fetch("SELECT DISTINCT commit_time::text FROM log WHERE conflict IS NOT NULL") == [("2000-01-01 00:00:00+00",)]
        any_target_db.execute("TRUNCATE log; DELETE FROM t WHERE id > 2")


async def test_old_rows_of_the_log_are_removed_bit_by_bit(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict_log, "_ROWS", 10)
    target_db.execute(SETUP)
    async with opened(target_db, conflict_log="public.log", conflict_log_retention=60.0) as feed:
        assert target_db.value("SELECT indexdef FROM pg_indexes WHERE tablename = 'log'").endswith("(subscription, logged_at)")
        target_db.execute("INSERT INTO log (logged_at, subscription) SELECT now() - interval '1 hour', 'sub' FROM generate_series(1, 30)")
        target_db.execute("INSERT INTO log (logged_at, subscription) SELECT now() - interval '1 hour', 'another'")
        left = "SELECT count(*) FROM log WHERE logged_at < now() - interval '1 minute' AND subscription = 'sub'"
        await feed.apply(T.relation, T.delete(1, None))
        # 10, and 2 for each new one
        assert target_db.value(left) == 18
        await feed.apply(T.delete(1, None))
        assert target_db.value(left) == 18, "not due"
        await feed.apply(*(T.delete(number, None) for number in range(9)))
        assert target_db.value(left) == 0
        assert target_db.value("SELECT count(*) FROM log WHERE conflict IS NULL") == 1


async def test_rows_for_the_log_are_read_only_in_a_conflict(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_sender, "_LEAST", NEVER)
    target_db.execute("""
        CREATE TYPE counted AS ENUM ('x'); CREATE SEQUENCE calls;
        CREATE FUNCTION counting(counted) RETURNS json LANGUAGE sql AS 'SELECT pg_catalog.to_json(pg_catalog.nextval(''public.calls''))';
        CREATE CAST (counted AS json) WITH FUNCTION counting(counted);
        CREATE TABLE t (id int PRIMARY KEY, v text, own counted DEFAULT 'x'); INSERT INTO t SELECT generate_series(1, 9)
    """)
    rules = {"insert_exists": "apply_remote", "update_missing": "insert", "update_exists": "apply_remote"}
    async with opened(target_db, conflict=rules, conflict_log="public.log", conflict_log_rows=True) as feed:
        await feed.apply(T.relation, *(T.update(number, "x") for number in range(1, 9)), T.insert(10, "x"), T.delete(9, None))
        assert target_db.value("SELECT is_called FROM calls") is False
        await feed.apply(T.insert(1, "y"))
        assert target_db.fetch("SELECT last_value, is_called FROM calls") == [(1, True)]
    assert target_db.value("SELECT local_row FROM log") == {"id": 1, "v": "x", "own": 1}


@pytest.mark.parametrize("kind", [23, 25], ids=["form by form", "in order"])
async def test_conflicts_of_a_large_transaction_do_not_wait_for_its_end(
    target_db: Database, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Whatever the order of its changes is: the log takes their conflicts while it is applied, so they do not fill the memory."""
    monkeypatch.setattr(set_sender, "_LEAST", NEVER)
    monkeypatch.setattr(conflict_log, "MOST", 100)
    waiting: list[int] = []
    send = ConflictLog.send

    def observed(log: ConflictLog, pipeline: Pipeline, conflicts: Sequence[LoggedConflict], *arguments: Any, **named: Any) -> None:
        waiting.append(len(conflicts))
        send(log, pipeline, conflicts, *arguments, **named)

    monkeypatch.setattr(ConflictLog, "send", observed)
    target_db.execute(SETUP)
    remote = Remote("t", "*id", "v", types={"id": kind})
    changes = [each for number in range(3000) for each in (remote.insert(number, "x"), remote.update(number + 10_000, "x"))]
    async with opened(target_db, conflict={"update_missing": "skip"}, conflict_log="public.log") as feed:
        await feed.apply(remote.relation, *changes)
    assert (sum(waiting), target_db.value("SELECT count(*) FROM log")) == (3000, 3000)
    assert max(waiting) < 2000


async def test_table_that_is_described_again_after_its_truncate(target_db: Database) -> None:
    """The bug was that another session read the unique indexes, which waited for the lock of our own TRUNCATE for ever."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w text)")
    before, after = Remote("t", "*id", "v"), Remote("t", "*id", "v", "w")
    async with opened(target_db, conflict={"insert_exists": "apply_remote"}) as feed:
        await feed.apply(before.relation, before.insert(1, "x"))
        # so many that the TRUNCATE is sent
        rows = [before.insert(number, "x" * 900) for number in range(10, 5000)]
        async with asyncio.timeout(60):
            await feed.apply(truncate(before), *rows, after.relation, after.insert(2, "x", "y"))
    assert target_db.fetch("SELECT count(*), max(w) FROM t") == [(4991, "y")]


async def test_log_of_conflicts_that_cannot_be_written(target_db: Database) -> None:
    role = f"{target_db.name}_writer"
    target_db.execute(f"CREATE TABLE log (lsn text, needed int NOT NULL); CREATE ROLE {role}; CREATE SCHEMA closed")

    async def refused(table: str, message: str, hint: str) -> None:
        feed = Feed(target_db, conflict_log=table)
        with pytest.raises(ConfigurationError, match=message) as caught:
            await feed.open()
        assert str(caught.value.hint).startswith(hint)
        findings = await feed.sink.check((), two_phase=False)
        assert [finding.message for finding in findings if finding.severity == "error"] == [str(caught.value)]

    await refused("public.log", 'is not a log of conflicts: it has other columns .*"lsn".*"needed"', 'ALTER TABLE "public"."log" RENAME TO')
    await refused("nowhere.log", 'schema "nowhere" of the target, for the log of conflicts, does not exist', 'CREATE SCHEMA "nowhere"')
    # a role that may not write it
    async with opened(target_db, conflict_log="public.made"), await psycopg.AsyncConnection.connect(target_db.dsn) as session:
        await session.execute(f"SET ROLE {role}".encode())

        async def run(query: str) -> list[tuple[Any, ...]]:
            return await (await session.execute(query.encode())).fetchall()

        for schema, name, message, hint in (
            (
                "public",
                "made",
                f'role "{role}" may not write table "public.made"',
                f'GRANT SELECT, INSERT, DELETE ON "public"."made" TO "{role}"',
            ),
            (
                "closed",
                "log",
                f'role "{role}" may not create table "closed.log"',
                f'GRANT CREATE ON SCHEMA "closed" TO "{role}", or CREATE TABLE',
            ),
        ):
            error = await ConflictLog(TableName(schema, name), rows=False, retention=0).refused(run)
            assert str(error).startswith(message)
            assert error is not None
            assert str(error.hint).startswith(hint)
    target_db.execute(f"DROP ROLE {role}")
