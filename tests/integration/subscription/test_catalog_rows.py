"""The primitives that the catalog's logic is written over: each kind of target keeps the same rows, and finds the same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from subscriber import Lsn, SubscriptionOptions, TableName
from subscriber.catalog import Definition
from subscriber.catalog.model import PG_SUBSCRIPTION, PG_SUBSCRIPTION_REL, POSITION, SUBSCRIPTION_STATS, WORKER
from subscriber.catalog.store import Plus, Rows
from subscriber.errors import RelationError
from subscriber.interfaces import TwoPhaseState
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog
from tests.support.sqlalchemy_targets import TABLE, OtherTarget

OID, RELID = 4_000_000_001, 4_000_000_002
DEFINITION = Definition(
    name="ünlike \"any' other",
    enabled=False,
    conninfo="host='a\\'b' password=%s",
    slot_name=None,
    publications=("a", "b,\"c'", "{}", "ü"),
    options=SubscriptionOptions(binary=True, streaming="on", origin="none"),
    two_phase=TwoPhaseState.PENDING,
    skip_lsn=Lsn(2**64 - 1),
    pending_refresh=False,
    generation=2**40,
)
WORKER_ROW: dict[str, Any] = {
    **dict.fromkeys(WORKER.columns),
    **{"subid": OID, "relid": 0, "worker_type": "apply", "received_lsn": Lsn(5), "transactions": 2**40, "changes_per_second": 0.125},
    **{"last_msg_send_time": 1_700_000_000.123456, "details": "x" * 100_000},
}


@pytest.fixture(params=["sqlite", "mariadb", "asyncpg", "psycopg"])
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A target with table t: its kind and URL."""
    match request.param:
        case "sqlite":
            file: OtherTarget = request.getfixturevalue("sqlite_file")
            file.execute(TABLE)
            return request.param, file.url
        case "mariadb":
            mariadb = request.getfixturevalue("mariadb_db")
            mariadb.execute(TABLE)
            return request.param, mariadb.url
        case kind:
            database = request.getfixturevalue("target_db")
            database.execute(TABLE)
            return kind, database.dsn


@pytest.fixture
async def rows(target: tuple[str, str]) -> AsyncIterator[Rows]:
    kind, url = target
    async with contextlib.AsyncExitStack() as stack:
        opened: SqlAlchemyCatalog | PostgresCatalog
        if kind in {"sqlite", "mariadb"}:
            opened = await SqlAlchemyCatalog.open(url)
        else:
            opened = await PostgresCatalog.open(url, "test")
        stack.push_async_callback(opened.close)
        if kind == "psycopg":
            session = await ApplySession.connect(Target(url), application_name="test", synchronous_commit="off")
            stack.push_async_callback(session.close)
            yield await stack.enter_async_context(_in_transaction(session))
        else:
            yield await stack.enter_async_context(opened.store.transaction())


@contextlib.asynccontextmanager
async def _in_transaction(session: ApplySession) -> AsyncIterator[Rows]:
    async with session.transaction():
        yield SessionRows(session, OID).rows


def shown(row: Any, table: Any) -> dict[str, Any]:
    """Without what only this kind of target has."""
    return {name: row[name] for name in table.columns}


async def test_inserted_rows_are_selected(rows: Rows) -> None:
    subscription = {"oid": OID, **DEFINITION.columns}
    await rows.insert(PG_SUBSCRIPTION, [subscription])
    await rows.insert(WORKER, [WORKER_ROW, {**WORKER_ROW, "relid": RELID}])
    await rows.insert(SUBSCRIPTION_STATS, [])
    assert [shown(row, PG_SUBSCRIPTION) for row in await rows.select(PG_SUBSCRIPTION, {})] == [subscription]
    assert [shown(row, PG_SUBSCRIPTION) for row in await rows.select(PG_SUBSCRIPTION, {"subname": DEFINITION.name})] == [subscription]
    assert await rows.select(PG_SUBSCRIPTION, {"subname": "other"}) == []
    assert [shown(row, WORKER) for row in await rows.select(WORKER, {"subid": OID, "relid": 0})] == [WORKER_ROW]
    assert not rows.hidden


async def test_rows_are_found_by_lists_and_null(rows: Rows) -> None:
    place = {"slot_name": "s", "system_identifier": "7" * 19, "timeline": 2**31 - 1, "remote_lsn": Lsn(0)}
    await rows.insert(POSITION, [{"srsubid": OID, "srrelid": RELID + number, **place} for number in range(2500)])
    assert len(await rows.select(POSITION, {"srsubid": OID})) == 2500
    found = await rows.select(POSITION, {"srsubid": OID, "srrelid": [RELID, RELID + 2499, 1]})
    assert sorted(row["srrelid"] for row in found) == [RELID, RELID + 2499]
    assert {row["remote_lsn"] for row in found} == {Lsn(0)}
    await rows.insert(WORKER, [WORKER_ROW, {**WORKER_ROW, "relid": 7, "details": None}])
    assert [row["relid"] for row in await rows.select(WORKER, {"details": None})] == [7]
    await rows.delete(POSITION, {"srsubid": OID, "srrelid": [RELID, RELID + 1]})
    assert len(await rows.select(POSITION, {}, lock=True)) == 2498


async def test_updates_are_counted(rows: Rows) -> None:
    await rows.insert(PG_SUBSCRIPTION, [{"oid": OID, **DEFINITION.columns}])
    assert await rows.update(PG_SUBSCRIPTION, {"oid": OID + 1}, {"subenabled": True}) == 0
    changed = {"subgeneration": Plus(-1), "subslotname": "slot", "subpublications": (), "subconninfo": None, "substream": "p"}
    assert await rows.update(PG_SUBSCRIPTION, {"oid": OID, "subslotname": None}, changed) == 1
    (row,) = await rows.select(PG_SUBSCRIPTION, {"oid": OID})
    assert (row["subgeneration"], row["subslotname"], row["subpublications"], row["subconninfo"]) == (2**40 - 1, "slot", (), None)
    await rows.delete(PG_SUBSCRIPTION, {"oid": OID})
    assert await rows.select(PG_SUBSCRIPTION, {}) == []


async def test_tables_have_numbers_and_names(rows: Rows) -> None:
    there, missing = TableName("public", "t"), TableName("public", "nowhere")
    found = await rows.relids([there, missing])
    relid, error = found[there], found[missing]
    assert isinstance(relid, int)
    assert isinstance(error, RelationError)
    assert (str(error), error.sqlstate) == ('relation "public.nowhere" does not exist', "42P01")
    row = {"srsubid": OID, "srrelid": relid, "srnspname": "public", "srrelname": "t", "srsubstate": "s", "srsublsn": Lsn(9), "srmode": "r"}
    row |= {"srerror": "é", "srerrortime": 1_800_000_000.5, "srcolumns": "é"}
    await rows.insert(PG_SUBSCRIPTION_REL, [row])
    for where in ({"srsubid": OID}, {"srnspname": "public", "srrelname": ["t", "u"]}, {"srsubstate": "s"}):
        assert [shown(each, PG_SUBSCRIPTION_REL) for each in await rows.select(PG_SUBSCRIPTION_REL, where, lock=True)] == [row]
    numbers = [await rows.new_oid() for _ in range(3)]
    assert len({*numbers, relid}) == 4
    assert min(numbers) >= 16384
    assert (await rows.target_identifier()).isdecimal()
