"""Conflicts by rule in SQL targets: each rule in each situation, in runs and change by change, with equal rows and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, TargetError
from subscriber.protocol.messages import Message
from subscriber.sinks import conflict_log
from subscriber.sinks.conflict_log import LoggedConflict
from subscriber.sinks.sqlalchemy.conflict_log import ConflictLog
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.subscription.spec import require_rules
from subscriber.testing.compliance import ComplianceTarget
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import UNSENT, Table, truncate
from tests.integration.apply.test_conflicts import conflicts
from tests.sinks.targets import MariaDBTarget, SqliteTarget

T = Table("t", "*id int4", "v", "w")
KEY = Table("k", "*id int4", relation_id=2)
LOCAL = (1, "local", "local")


@dataclass
class Situation:
    rules: dict[str, str]
    changes: list[Message]
    after: list[tuple[object, ...]] | None
    conflicts: dict[str, int]


INSERTS: list[Message] = [T.insert(1, "remote", None), T.insert(2, "remote", None), T.insert(2, "again", None)]
SITUATIONS = {
    "error": Situation({}, INSERTS, None, {"confl_insert_exists": 1}),
    "apply_remote": Situation(
        {"insert_exists": "apply_remote"}, INSERTS, [(1, "remote", None), (2, "again", None)], {"confl_insert_exists": 2}
    ),
    "keep_local": Situation({"insert_exists": "keep_local"}, INSERTS, [LOCAL, (2, "remote", None)], {"confl_insert_exists": 2}),
    "of another table": Situation({"insert_exists.public.k": "apply_remote"}, INSERTS, None, {"confl_insert_exists": 1}),
    "skip": Situation(
        {}, [T.update(9, "x", "y"), T.delete(8, None, None)], [LOCAL], {"confl_update_missing": 1, "confl_delete_missing": 1}
    ),
    "insert": Situation(
        {"update_missing": "insert"},
        [T.update(1, "remote", UNSENT), T.update(9, "x", "y"), T.update(9, "z", UNSENT), T.update(8, "moved", None, old=(7, None, None))],
        [(1, "remote", "local"), (8, "moved", None), (9, "z", "y")],
        {"confl_update_missing": 2},
    ),
    "insert without the whole row": Situation({"update_missing": "insert"}, [T.update(9, "x", UNSENT)], None, {"confl_update_missing": 1}),
    "update error": Situation(
        {"update_missing": "error"}, [T.update(1, "x", "y"), T.update(9, "x", "y")], None, {"confl_update_missing": 1}
    ),
    "delete error": Situation(
        {"delete_missing": "error"}, [T.delete(1, None, None), T.delete(9, None, None)], None, {"confl_delete_missing": 1}
    ),
}


@pytest.fixture(params=["sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)])
def target(request: pytest.FixtureRequest) -> ComplianceTarget:
    if request.param == "sqlite":
        directory: Path = request.getfixturevalue("tmp_path")
        return SqliteTarget(directory / "replica.db")
    return MariaDBTarget(request.getfixturevalue("mariadb_db"))


async def test_every_rule(target: ComplianceTarget) -> None:
    feed = Feed(target)
    url = feed.sink._target  # type: ignore[attr-defined]
    await feed.open()
    await feed.create(T, KEY)
    for name, each in SITUATIONS.items():
        await feed.close()
        feed.sink = SqlAlchemySink(url, options=SubscriptionOptions(conflict=each.rules), settings=Settings(create_tables=False))
        await feed.open()
        await feed.apply(T.relation, truncate(T))
        await feed.apply(T.insert(*LOCAL))
        if each.after is None:
            with pytest.raises(TargetError) as caught:
                await feed.apply(*each.changes)
            assert any("conflict=" in note for note in caught.value.__notes__), name
            await feed.expect(T, LOCAL)
        else:
            await feed.apply(*each.changes)
            await feed.expect(T, *each.after)
        assert conflicts(feed.sink.statistics) == each.conflicts, name
    await feed.close()


async def test_rows_that_have_only_a_key(target: ComplianceTarget) -> None:
    feed = Feed(target)
    rules = SubscriptionOptions(conflict={"insert_exists": "apply_remote", "update_missing": "insert"})
    feed.sink = SqlAlchemySink(feed.sink._target, options=rules, settings=Settings(create_tables=False))  # type: ignore[attr-defined]
    await feed.open()
    await feed.create(KEY)
    await target.insert(KEY, [("1",)])
    await feed.apply(KEY.relation, KEY.insert(1), KEY.insert(2), KEY.update(3))
    await feed.expect(KEY, (1,), (2,), (3,))
    assert conflicts(feed.sink.statistics) == {"confl_insert_exists": 1, "confl_update_missing": 1}
    # without a unique key in the target no row conflicts, change by change either
    await feed.create(Table("loose", "id int4", "v", relation_id=3))
    loose = Table("loose", "*id int4", "v", relation_id=3)
    await feed.apply(loose.relation, loose.insert(1, "a"), loose.insert(1, "b"), KEY.insert(1))
    await feed.expect(loose, (1, "a"), (1, "b"))
    assert conflicts(feed.sink.statistics)["confl_insert_exists"] == 2
    await feed.close()


async def test_other_unique_keys_have_no_rule(target: ComplianceTarget, request: pytest.FixtureRequest) -> None:
    """What a rule is not for is an error, and nothing of the transaction stays."""
    execute = target._execute if isinstance(target, SqliteTarget) else request.getfixturevalue("mariadb_db").execute
    u = Table("u", "*id int4", "n int4")
    feed = Feed(target)
    url = feed.sink._target  # type: ignore[attr-defined]
    await feed.open()
    await feed.create(u)
    execute("CREATE UNIQUE INDEX u_n ON u (n)")
    await target.insert(u, [("1", "10"), ("2", "20")])
    for rule in ("error", "apply_remote", "keep_local"):
        await feed.close()
        feed.sink = SqlAlchemySink(
            url, options=SubscriptionOptions(conflict={"insert_exists": rule}), settings=Settings(create_tables=False)
        )
        await feed.open()
        refused: list[tuple[Message, str]] = [(u.insert(3, 10), "insert_exists"), (u.update(1, 20), "update_exists")]
        # the key, and another unique key
        refused += [(u.insert(1, 20), "insert_exists")] if rule != "keep_local" else []
        for change, conflict in refused:
            with pytest.raises(TargetError) as caught:
                await feed.apply(u.relation, u.insert(9, 90), change)
            assert f"conflict={conflict}" in caught.value.__notes__[0]
            await feed.expect(u, (1, 10), (2, 20))
    await feed.apply(u.relation, u.insert(1, 20))
    await feed.expect(u, (1, 10), (2, 20))
    await feed.close()


LOG = """
SELECT schema_name, table_name, conflict, rule, applied, xid, lsn, {quote}key{quote}, local_row, remote_row
FROM {log} ORDER BY lsn, conflict, xid
"""


async def test_log_of_conflicts(target: ComplianceTarget, request: pytest.FixtureRequest) -> None:
    is_file = isinstance(target, SqliteTarget)
    fetch = target._execute if isinstance(target, SqliteTarget) else request.getfixturevalue("mariadb_db").fetch
    quote = '"' if is_file else "`"
    feed = Feed(target)
    url = feed.sink._target  # type: ignore[attr-defined]
    await feed.open()
    await feed.create(T, KEY)
    await feed.apply(T.relation, T.insert(*LOCAL))
    for rows in (False, True):
        await feed.close()
        options = SubscriptionOptions(
            conflict={"insert_exists": "keep_local", "update_missing": "insert"},
            conflict_log="Logs.conflicts" if rows else "public.conflicts",
            conflict_log_rows=rows,
        )
        feed.sink = SqlAlchemySink(url, options=options, settings=Settings(create_tables=False))
        await feed.open()
        assert await feed.sink.check((), two_phase=False) == []
        log, new = ("logs__conflicts", 16) if rows else ("conflicts", 7)
        old = f"INSERT INTO {log} (logged_at, subscription) VALUES ('2001-01-01 00:00:00.000000', '{feed.name}')"
        await asyncio.to_thread(fetch if is_file else request.getfixturevalue("mariadb_db").execute, old)
        many = [T.update(number, "x", "y") for number in range(50, 60)] if rows else []
        await feed.apply(T.relation, T.insert(1, "remote", None), T.insert(5 + rows, "remote", None), T.delete(8, None, None))
        xid, lsn = feed._xid, f"0/{feed._lsn:X}"
        await feed.apply(T.update(new, "é", "y"), T.update(1, "again", UNSENT))
        last, end = feed._xid, f"0/{feed._lsn:X}"
        with pytest.raises(TargetError):
            # what is rolled back is not logged
            await feed.apply(T.delete(9, None, None), T.update(99, "x", UNSENT))
        local = f'{{"id": 1, "v": "{"again" if rows else "local"}", "w": "local"}}'
        assert fetch(LOG.format(log=log, quote=quote)) == [
            ("public", "t", "delete_missing", "skip", 0, xid, lsn, '{"id": 8}', None, None),
            (
                *("public", "t", "insert_exists", "keep_local", 0, xid, lsn, '{"id": 1}'),
                *((local, '{"id": 1, "v": "remote", "w": null}') if rows else (None, None)),
            ),
            (
                *("public", "t", "update_missing", "insert", 1, last, end, f'{{"id": {new}}}', None),
                f'{{"id": {new}, "v": "é", "w": "y"}}' if rows else None,
            ),
        ]
        assert fetch(f"SELECT count(*) FROM {log} WHERE commit_time IS NULL") == [(0,)]
        assert (feed.sink.statistics.confl_delete_missing, feed.sink.statistics.confl_insert_exists) == (1, 1)
        await feed.apply(*many)
        assert fetch(f"SELECT count(*) FROM {log}") == [(3 + len(many),)]
    await feed.close()
    # another table
    feed.sink = SqlAlchemySink(url, options=SubscriptionOptions(conflict_log="public.t"), settings=Settings(create_tables=False))
    with pytest.raises(ConfigurationError, match='table "t" of the target is not a log of conflicts: it has other columns') as caught:
        await feed.open()
    assert str(caught.value.hint).startswith("ALTER TABLE ")
    assert [finding.message for finding in await feed.sink.check((), two_phase=False)] == [str(caught.value)]


async def test_log_of_conflicts_that_cannot_be_written(
    target: ComplianceTarget, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflict_log, "MOST", 3)
    execute = target._execute if isinstance(target, SqliteTarget) else request.getfixturevalue("mariadb_db").execute
    feed = Feed(target)
    url = feed.sink._target  # type: ignore[attr-defined]
    await feed.open()
    await feed.create(T)
    await feed.close()
    feed.sink = SqlAlchemySink(url, options=SubscriptionOptions(conflict_log="public.conflicts"), settings=Settings(create_tables=False))
    await feed.open()
    written = list[int]()
    write = ConflictLog.write

    async def count(log: ConflictLog, connection: AsyncConnection, conflicts: Sequence[LoggedConflict]) -> None:
        written.append(len(conflicts))
        await write(log, connection, conflicts)

    monkeypatch.setattr(ConflictLog, "write", count)
    # few wait in memory
    await feed.apply(T.relation, *(T.delete(number, None, None) for number in range(7)))
    assert written == [3, 3, 1]
    await asyncio.to_thread(execute, "DROP TABLE conflicts")
    with pytest.raises(TargetError) as caught:
        await feed.apply(T.delete(1, None, None))
    assert 'while writing into table "conflicts" of the target, the log of conflicts' in caught.value.__notes__
    await feed.close()
    await feed.open()
    await feed.apply(T.relation, T.delete(1, None, None))
    await feed.close()
    if not isinstance(target, SqliteTarget):
        await asyncio.to_thread(execute, "ALTER TABLE conflicts ENGINE = MyISAM")
        with pytest.raises(ConfigurationError, match="has storage engine myisam, which has no transactions") as refused:
            await feed.open()
        assert refused.value.hint == "ALTER TABLE `conflicts` ENGINE = InnoDB"


def test_rules_that_a_sql_target_does_not_have(tmp_path: Path) -> None:
    for kind, rule, hint in (
        ("insert_exists", "last_update_wins", "use error or apply_remote or keep_local"),
        ("update_origin_differs", "keep_local", "omit the rule"),
        ("update_exists", "keep_local", "omit the rule"),
    ):
        options = SubscriptionOptions(conflict={f"{kind}.public.t": rule})
        with pytest.raises(ConfigurationError, match=f"conflict.{kind} = {rule} is not available for this kind of target") as caught:
            require_rules(options, SqlAlchemySink(f"sqlite:///{tmp_path}/x.db", options=options, settings=Settings()))
        assert caught.value.hint == hint
