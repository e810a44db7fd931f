"""``--register``: the views of a lake in Spark's catalog show one snapshot, while snapshots are published."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Insert, Message, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable
from subscriber.sinks.spark.catalog.status_files import APPLIER, read_quietly
from subscriber.sinks.spark.pipeline.program import registration as registration_module
from subscriber.sinks.spark.pipeline.program.registration import CatalogRegistration, require_catalog
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, start
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.filterwarnings("ignore")
READS = int(os.environ.get("SUBSCRIBER_REGISTERED_READS", "12"))
LEFT, RIGHT = (
    Relation(5 + n, "public", name, "d", (Column("id", 23, -1, True), Column("a'`b", 23, -1, False))) for n, name in enumerate("lr")
)

LEFT_NAME, RIGHT_NAME = TableName("public", "l"), TableName("public", "r")
READY = TableEntry(TableState.READY)


def registration(spark: SparkSession, path: Path, schema: str) -> CatalogRegistration:
    return CatalogRegistration(spark, storage(path), f"spark_catalog.{schema}", lambda _: None)


async def _until_registered(spark: SparkSession, schema: str) -> None:
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(spark.catalog.tableExists, f"{schema}.public_r"):
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def schema_of(spark: SparkSession, name: str) -> Iterator[str]:
    try:
        yield name
    finally:
        spark.sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest.mark.timeout(600 + 10 * READS)
async def test_no_query_over_two_views_is_torn(tmp_path: Path, delta: SparkSession) -> None:
    sink, work = await begun(make(tmp_path, "?batch_delay=0")), applier(tmp_path)
    await sink.add_tables([RIGHT_NAME, LEFT_NAME], READY)
    accounts = range(5)
    values = [Insert(number, row(str(account), "100")) for number in (5, 6) for account in accounts]
    await sink.apply(batch(transaction(200, LEFT, RIGHT, *values)))
    all_rounds(work)
    totals, versions, failures = list[int](), set[int](), list[BaseException]()
    read_again, stop = threading.Event(), threading.Event()
    with schema_of(delta, "torn") as schema:
        found = registration(delta, tmp_path, schema)
        with found.running():
            await _until_registered(delta, schema)

            def read() -> None:
                session = delta.newSession()
                query = "SELECT (SELECT sum(`a'``b`) FROM torn.public_l), (SELECT sum(`a'``b`) FROM torn.public_r)"
                try:
                    while len(totals) < READS:
                        left, right = session.sql(query).collect()[0]
                        totals.append(left + right)
                        versions.add(left)
                        read_again.set()
                except BaseException as error:  # noqa: BLE001 -- the test raises it
                    failures.append(error)
                finally:
                    stop.set()
                    read_again.set()

            reader = threading.Thread(target=read)
            reader.start()
            end, amount = 200, 0
            while not stop.is_set():
                end, amount = end + 10, (amount + 7) % 50
                moved = [Update(5, None, None, row("1", str(100 - amount))), Update(6, None, None, row("2", str(100 + amount)))]
                await sink.apply(batch(transaction(end, *moved)))
                await asyncio.to_thread(all_rounds, work)
                found.publish()
                # one publication for each query: more of them would only keep the processors from the queries
                await asyncio.to_thread(read_again.wait)
                read_again.clear()
            reader.join()
    await sink.close()
    assert not failures, failures
    print(f"{len(totals)} reads of {len(versions)} snapshots, torn: {sum(total != 1000 for total in totals)}")
    assert totals == [1000] * READS
    assert len(versions) > 1, "snapshots were registered between the reads"


@pytest.mark.timeout(600)
async def test_views_follow_columns_and_tables(tmp_path: Path, delta: SparkSession) -> None:
    sink, work = await begun(make(tmp_path, "?batch_delay=0")), applier(tmp_path)
    await sink.add_tables([LEFT_NAME, RIGHT_NAME], READY)
    await sink.apply(batch(transaction(200, LEFT, RIGHT, Insert(5, row("1", "10")), Insert(6, row("1", "10")))))
    with schema_of(delta, "followed") as schema:
        found = registration(delta, tmp_path, schema)
        snapshot = all_rounds(work)
        # another lake of another applier has this name, too
        delta.sql(f"CREATE SCHEMA {schema}")
        delta.sql(f"CREATE TABLE {schema}.public_r_latest USING DELTA LOCATION '{tmp_path}/tables/public/l'")
        with pytest.raises(TargetError, match=r"public_r_latest exists and is another table"):
            found.register(snapshot)
        delta.sql(f"DROP TABLE {schema}.public_r_latest")
        found.register(snapshot)
        wider = Relation(5, "public", "l", "d", (*LEFT.columns, Column("Location", 25, -1, False)))
        await sink.apply(batch(transaction(300, wider, Insert(5, row("2", "20", "x")))))
        snapshot = all_rounds(work)
        # the view is of the published version; the table is what it is
        assert delta.table("followed.public_l").select("id").collect() == [(1,)]
        assert delta.table("followed.public_l_latest").count() == 2
        found.register(snapshot)
        rows = delta.sql("SELECT id, `Location` FROM followed.public_l ORDER BY id").collect()
        assert list(map(tuple, rows)) == [(1, None), (2, "x")]
        plan = delta.sql("SELECT id FROM followed.public_l WHERE id > 1")._jdf.queryExecution().optimizedPlan().toString()
        assert "Union" not in plan, "the other tables are not read"
        assert "struct" not in plan
        # started again: a table has left
        await sink.remove_table(RIGHT_NAME)
        await sink.apply(batch(transaction(400, Insert(5, row("3", "30", "y")))))
        await sink.close()
        found.register(all_rounds(work))
        names = {table.name for table in delta.catalog.listTables(schema)}
        assert names == {"published_snapshot", "public_l", "public_l_latest"}
        # another applier finds what is registered
        registration(delta, tmp_path, schema).register(all_rounds(work))
        assert delta.table("followed.public_l").count() == 3
        # without its view; a column has the name of what is read of the table
        delta.sql("DROP VIEW followed.public_l")
        registration(delta, tmp_path, schema).register(all_rounds(work))
        assert delta.table("followed.public_l").count() == 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tables", [(LEFT_NAME,), (LEFT_NAME, RIGHT_NAME)])
@pytest.mark.parametrize("again", [False, True], ids=["running", "started again"])
async def test_view_goes_with_a_table_that_leaves_the_snapshot(
    tmp_path: Path, delta: SparkSession, tables: tuple[TableName, ...], again: bool
) -> None:
    """The bugs were that the last view of a lake stayed, and with an applier that was started again, all of them."""
    sink, work = await begun(make(tmp_path, "?batch_delay=0"), tables=()), applier(tmp_path)
    await sink.add_tables(list(tables), READY)
    more: list[Message] = [RIGHT, Insert(6, row("1", "10"))] if RIGHT_NAME in tables else []
    await sink.apply(batch(transaction(200, LEFT, Insert(5, row("1", "10")), *more)))
    await sink.close()
    with schema_of(delta, "leaving") as schema:

        def names() -> set[str]:
            return {table.name for table in delta.catalog.listTables(schema)}

        found = registration(delta, tmp_path, schema)
        found.register(all_rounds(work))
        there = names()
        assert "public_l" in there
        delta.sql(f"CREATE VIEW {schema}.of_a_user AS SELECT 1 AS one")
        last = max((tmp_path / "tables/public/l/_delta_log").glob("0*.json"))
        moved = last.rename(tmp_path / "moved")
        # a new applier reads the whole log
        work = applier(tmp_path)
        snapshot = all_rounds(work)
        assert LEFT_NAME in snapshot.stopped
        found = registration(delta, tmp_path, schema) if again else found
        found.register(snapshot)
        left = there - {"public_l", "public_l_latest"} if len(tables) > 1 else set()
        assert names() == {*left, "of_a_user"}
        moved.rename(last)
        work._next_look = 0.0
        found.register(all_rounds(work))
        assert names() == {*there, "of_a_user"}
        assert delta.table(f"{schema}.public_l").count() == 1


@pytest.mark.timeout(600)
async def test_registration_that_was_killed_while_views_go_is_finished(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bugs were that the external table stayed, and that a user's view of the published snapshot went."""

    class Dying:
        """A session of a process that is killed after the first object is dropped."""

        dropped = 0

        def sql(self, text: str) -> Any:
            if text.startswith("DROP"):
                if self.dropped:
                    raise Killed
                self.dropped += 1
            return delta.sql(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(delta, name)

    sink, work = await begun(make(tmp_path, "?batch_delay=0"), tables=()), applier(tmp_path)
    await sink.add_tables([LEFT_NAME, RIGHT_NAME], READY)
    await sink.apply(batch(transaction(200, LEFT, RIGHT, Insert(5, row("1", "10")), Insert(6, row("1", "10")))))
    with schema_of(delta, "killed") as schema:
        found = registration(delta, tmp_path, schema)
        found.register(all_rounds(work))
        there = {table.name for table in delta.catalog.listTables(schema)}
        of_all = f"`spark_catalog`.`{schema}`.`published_snapshot`"
        delta.sql(f"CREATE VIEW {schema}.of_a_user AS SELECT public_r.id FROM {of_all} WHERE name = 'public_r'")
        await sink.remove_table(LEFT_NAME)
        await sink.advance(Lsn(210))
        await sink.close()
        snapshot = all_rounds(work)
        assert snapshot.tables.keys() == {RIGHT_NAME}
        monkeypatch.setattr(found, "_spark", Dying())
        with pytest.raises(Killed):
            found.register(snapshot)
        registration(delta, tmp_path, schema).register(snapshot)
        assert {table.name for table in delta.catalog.listTables(schema)} == there - {"public_l", "public_l_latest"} | {"of_a_user"}
        assert delta.table(f"{schema}.of_a_user").count() == 1


@pytest.mark.timeout(600)
async def test_view_has_the_rows_of_a_table_that_began_again(tmp_path: Path, delta: SparkSession) -> None:
    """The new log has the same version number, which Spark may have in its cache."""
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    with schema_of(delta, "began") as schema:
        found, query = registration(delta, tmp_path, schema), f"SELECT id, note FROM {schema}.public_t"
        before = all_rounds(work)
        found.register(before)
        assert delta.sql(query).collect() == [(1, "a")]
        shutil.rmtree(tmp_path / "tables/public/t/_delta_log")
        await sink.remove_table(TABLE)
        await sink.add_tables([TABLE], TableEntry(TableState.INIT))
        await copy(sink, TABLE, b"7\tseven\n", 400)
        await sink.advance(Lsn(410))
        await sink.close()
        after = all_rounds(work)
        assert after.tables[TABLE].version == before.tables[TABLE].version
        found.register(after)
        for session in (delta, delta.newSession()):
            assert session.sql(query).collect() == [(7, "seven")]


@pytest.mark.timeout(600)
async def test_catalog_that_refuses_holds_up_nothing_and_is_tried_again(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "_RETRY_SECONDS", 0.1)
    sink, work = await begun(make(tmp_path, "?batch_delay=0"), tables=(LEFT_NAME, RIGHT_NAME)), applier(tmp_path)
    work.open()
    await sink.apply(batch(transaction(200, LEFT, RIGHT, Insert(5, row("1", "10")), Insert(6, row("1", "10")))))
    all_rounds(work)
    with schema_of(delta, "refused") as schema:
        delta.sql(f"CREATE SCHEMA {schema}")
        delta.sql(f"CREATE TABLE {schema}.public_l_latest USING DELTA LOCATION '{tmp_path}/tables/public/r'")
        found = CatalogRegistration(delta, storage(tmp_path), f"spark_catalog.{schema}", partial(work.failed, what="registration"))
        with found.running():
            async with asyncio.timeout(300):
                while not (told := read_quietly(storage(tmp_path), APPLIER).get("last_error")):
                    await asyncio.sleep(0.1)
            assert told.startswith(f"spark_catalog.{schema}.public_l_latest exists and is another table (hint: ")
            await sink.apply(batch(transaction(300, Insert(5, row("2", "20")))))
            assert (await asyncio.to_thread(all_rounds, work)).lsn == 300
            delta.sql(f"DROP TABLE {schema}.public_l_latest")
            await _until_registered(delta, schema)
        assert delta.table(f"{schema}.public_l").count() == 2
        assert read_quietly(storage(tmp_path), APPLIER)["last_error"] is None
    work.close()
    await sink.close()


@pytest.mark.timeout(600)
async def test_what_cannot_be_registered_is_told(tmp_path: Path, delta: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match='"lake" is not a catalog and a schema'):
        require_catalog(delta, "lake")
    with pytest.raises(ConfigurationError, match="catalog is in memory"):
        require_catalog(delta, "spark_catalog.lake")
    missing = CatalogRegistration(delta, storage(tmp_path), "nowhere.lake", lambda _: None)
    tables = {LEFT_NAME: SnapshotTable("tables/public/l", 1, Lsn(1))}
    with pytest.raises(TargetError, match=r"could not register the snapshot at 0/1 in nowhere\.lake: "):
        missing.register(Snapshot(Lsn(1), Lsn(1), tables))


@pytest.mark.timeout(600)
async def test_lake_with_many_tables_has_views_of_their_own_versions(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that a lake with more than 50 tables could not be registered."""
    sink, work = await begun(make(tmp_path, "?batch_delay=0"), tables=(LEFT_NAME, RIGHT_NAME)), applier(tmp_path)
    await sink.apply(batch(transaction(200, LEFT, RIGHT, Insert(5, row("1", "10")), Insert(6, row("1", "10")))))
    with schema_of(delta, "many") as schema:
        found = registration(delta, tmp_path, schema)
        found.register(all_rounds(work))
        there = {table.name for table in delta.catalog.listTables(schema)}
        monkeypatch.setattr(registration_module, "_SHARED_TABLES", 1)
        replaced = list[str]()
        real = CatalogRegistration._replace

        def counted(self: CatalogRegistration, name: str, query: str) -> None:
            replaced.append(name)
            real(self, name, query)

        monkeypatch.setattr(CatalogRegistration, "_replace", counted)
        await sink.apply(batch(transaction(300, Insert(5, row("2", "20")))))
        found.register(all_rounds(work))
        assert sorted(replaced) == ["public_l", "public_r"]
        assert {table.name for table in delta.catalog.listTables(schema)} == there - {"published_snapshot"}
        wider = Relation(5, "public", "l", "d", (*LEFT.columns, Column("more", 25, -1, False)))
        await sink.apply(batch(transaction(400, wider, Insert(5, row("3", "30", "x")))))
        found.register(all_rounds(work))
        assert replaced[2:] == ["public_l"], "a view is replaced only if its table has changed"
        with monkeypatch.context() as few:
            few.setattr(registration_module, "_SHARED_TABLES", 50)
            await sink.apply(batch(transaction(401, Insert(6, row("2", "20")))))
            found.register(all_rounds(work))
            assert "more" in delta.table(f"{schema}.public_l").columns, "also the column that came meanwhile"
        await sink.apply(batch(transaction(402, Insert(6, row("3", "30")))))
        found.register(all_rounds(work))
        assert delta.sql(f"SELECT id, more FROM {schema}.public_l ORDER BY id").collect() == [(1, None), (2, None), (3, "x")]
        # another applier finds what is registered, and leaves views that are a user's
        delta.sql(f"CREATE VIEW {schema}.theirs AS SELECT * FROM delta.`{tmp_path}/tables/public/l` VERSION AS OF 1")
        await sink.remove_table(RIGHT_NAME)
        await sink.advance(Lsn(410))
        await sink.close()
        snapshot = all_rounds(work)
        monkeypatch.setattr(registration_module, "_SHARED_TABLES", 0)
        registration(delta, tmp_path, schema).register(snapshot)
        assert {table.name for table in delta.catalog.listTables(schema)} == {"public_l", "public_l_latest", "theirs"}
        # and all at once when the tables are few again
        monkeypatch.setattr(registration_module, "_SHARED_TABLES", 50)
        registration(delta, tmp_path, schema).register(snapshot)
        assert {table.name for table in delta.catalog.listTables(schema)} == {"published_snapshot", "public_l", "public_l_latest", "theirs"}
        assert delta.table(f"{schema}.public_l").count() == 3
