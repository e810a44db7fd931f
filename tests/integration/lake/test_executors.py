"""Initial copies by the applier's tasks, in threads: the same rows as by the subscriber's own COPY, even if a program is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from psycopg.conninfo import conninfo_to_dict

from subscriber import ConfigurationError, Subscription, TableName, Until
from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.interfaces import PublishedTable
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.copy import task as copytask
from subscriber.sinks.spark.copy.copier import Copier, LocalCopyRunner
from subscriber.sinks.spark.copy.order import CopyFailure, CopyOrder
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.maintenance.retention import remove_unneeded_files
from subscriber.sinks.spark.pipeline.applier import ApplierSettings
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.subscription.run.copy_snapshots import PublishedSnapshot
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.integration.lake.test_replica import subscription
from tests.support import every_type, program
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.lakes import applied, assert_same, storage
from tests.support.replica import QUICK
from tests.support.row_gates import open_transaction, waiting_for_lock_on
from tests.support.table_swap import make_swappable_table, swap_in, swap_out

pytest.importorskip("adbc_driver_postgresql", reason="pip install 'pg-subscriber[spark-snapshot]'")

IN_PARTS = replace(QUICK, copy_range_size=64 * 1024, max_copy_workers_per_table=2)
T = TableName("public", "t")


def passfile_of(publisher: Database, directory: Path) -> Path:
    """The password as executors on other machines would have it."""
    params = conninfo_to_dict(publisher.conninfo())
    passfile = directory / "passfile"
    passfile.write_text(f"{params['host']}:{params['port']}:*:{params['user']}:{params['password']}\n")
    passfile.chmod(0o600)
    return passfile


class CountedProgress(Quiet):
    """What a progress bar would show."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def advanced(self, table: TableName, rows: int) -> None:
        self.rows.append(rows)


def by_executors(publisher: Database, directory: Path, progress: CopyProgress | None = None) -> Subscription:
    parameters = f"?copy=executors&batch_delay=50ms&copy_connection={quote(f'passfile={passfile_of(publisher, directory)}')}"
    return Subscription(
        f"lake_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=f"spark://{directory / 'lake'}{parameters}",
        settings=IN_PARTS,
        progress=progress,
    )


@contextlib.asynccontextmanager
async def copier(lake: Path, runner: LocalCopyRunner | None = None) -> AsyncIterator[None]:
    """The copying half of an applier."""
    running = Copier(storage(lake), runner or LocalCopyRunner(storage(lake)), 250_000).running()
    await asyncio.to_thread(running.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


class Watched(LocalCopyRunner):
    """One that tells what it is about to do, and may be held up."""

    def __init__(self, lake: Path, before: Callable[[CopyOrder, Sequence[int]], Sequence[int]]) -> None:
        super().__init__(storage(lake))
        self._before = before

    def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
        return super().run(order, self._before(order, numbers), target_rows, stop)


def many_rows(publisher: Database, rows: int = 5000) -> None:
    publisher.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, d numeric(10,2));"
        f"INSERT INTO t SELECT i, repeat('v' || i, 10), i / 8.0 FROM generate_series(1, {rows}) AS i; CREATE PUBLICATION pub FOR TABLE t"
    )


def files_of(lake: Path, snapshot: Snapshot, name: TableName = T) -> set[str]:
    table = snapshot.tables[name]
    return {Path(uri).name for uri in DeltaTable(str(lake / table.path), version=table.version).file_uris()}


def log_of(lake: Path, name: TableName = T) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = DeltaTable(str(lake / "log" / name.namespace / name.name)).to_pyarrow_table().to_pylist()
    return rows


async def test_every_type_as_by_the_landing(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(every_type.SETUP)
    every_type.create_table(publisher18_db, "t")
    every_type.fill(publisher18_db, "t")
    publisher18_db.execute(
        'CREATE TABLE others (id int PRIMARY KEY, c character(9), nothing app.pair, odd "char", "we ird" text);'
        "INSERT INTO others VALUES (1, 'ab', ROW(NULL, NULL), 'x', 'y'), (2, NULL, NULL, NULL, NULL);"
        "CREATE PUBLICATION pub FOR TABLE app.t, others"
    )
    plain = tmp_path / "plain"
    await subscription(publisher18_db, plain).run(Until())
    publisher18_db.execute(f"SELECT pg_drop_replication_slot('lake_{publisher18_db.name}')")
    async with copier(tmp_path / "lake"):
        await by_executors(publisher18_db, tmp_path).run(Until())
    one, other = await applied(plain), await applied(tmp_path / "lake")
    assert set(one.tables) == set(other.tables)
    for name in one.tables:
        assert any(file.startswith("copy-") for file in files_of(tmp_path / "lake", other, name))
        for directory in ("tables", "log"):
            left, right = (
                DeltaTable(str(path / directory / name.namespace / name.name)).to_pyarrow_table() for path in (plain, tmp_path / "lake")
            )
            assert left.schema == right.schema
            wanted = [column for column in left.schema.names if column not in {"_lsn", "_ts"}]
            texts = [Counter(map(repr, table.select(wanted).to_pylist())) for table in (left, right)]
            assert texts[0] == texts[1]
            assert left.num_rows > 1


@pytest.mark.timeout(300)
async def test_copied_in_parts_under_load_and_followed(publisher18_db: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    await create_tables(publisher18_db.dsn, rows=4000)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    load = MixedLoad(publisher18_db.dsn, seed=11, sessions=2, huge_rows=1000)
    let_slots_be_created(publisher18_db)
    found = by_executors(publisher18_db, tmp_path)
    running = asyncio.create_task(found.run())
    async with copier(lake):
        await load.run(transactions=60)
        await load.finish()
        await found.wait_for(publisher18_db.current_lsn(), 90)
    small = ApplierSettings(target_rows=500)
    await applied(lake, small)
    found.stop()
    await running
    let_small_transactions_stream(publisher18_db)
    found = by_executors(publisher18_db, tmp_path)
    running = asyncio.create_task(found.run())
    await load.run(transactions=20)
    await load.finish()
    await found.wait_for(publisher18_db.current_lsn(), 60)
    found.stop()
    await running
    names = [TableName("load", name) for name in TABLES]
    assert_same(lake, await applied(lake, small), publisher18_db, names)
    for name in names:
        changes = [(row["_lsn"], row["_seq"]) for row in log_of(lake, name) if row["_op"] != "c"]
        assert len(changes) == len(set(changes))


async def test_parts_that_are_done_are_kept_when_the_applier_is_stopped(publisher18_db: Database, tmp_path: Path) -> None:
    many_rows(publisher18_db)
    lake, first = tmp_path / "lake", threading.Event()
    all_parts: list[int] = []

    def only_the_first(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        if first.is_set():
            return []
        all_parts.extend(numbers)
        first.set()
        return numbers[:1]

    progress = CountedProgress()
    running = asyncio.create_task(by_executors(publisher18_db, tmp_path, progress).run(Until()))
    async with copier(lake, Watched(lake, only_the_first)):
        assert await asyncio.to_thread(first.wait, 30)
        done = lake / "copy/1-1/done-000000.json"
        await until(done.exists)
    before = {file.name for file in (lake / "tables/public/t").glob("copy-*")}
    assert len(before) == 1
    rest: list[int] = []

    def note(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        rest.extend(numbers)
        return numbers

    async with copier(lake, Watched(lake, note)):
        await running
    assert len(all_parts) > 3
    assert rest == all_parts[1:]
    assert len(progress.rows) == len(all_parts)
    assert sum(progress.rows) == 5000
    snapshot = await applied(lake)
    assert before < files_of(lake, snapshot)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert Counter(row["_op"] for row in log_of(lake)) == {"c": 5000}
    assert len({row["_lsn"] for row in log_of(lake)}) == 1


async def test_stopped_subscriber_starts_the_copy_again_and_leaves_no_files(publisher18_db: Database, tmp_path: Path) -> None:
    many_rows(publisher18_db)
    lake, begun = tmp_path / "lake", threading.Event()

    def one_part(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        begun.set()
        return numbers[:1] if order.generation == 1 and len(numbers) == len(order.parts) else [] if order.generation == 1 else numbers

    async with copier(lake, Watched(lake, one_part)):
        running = asyncio.create_task(by_executors(publisher18_db, tmp_path).run(Until()))
        assert await asyncio.to_thread(begun.wait, 30)
        await until((lake / "copy/1-1/done-000000.json").exists)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        publisher18_db.execute("DELETE FROM t WHERE id % 2 = 0")
        await by_executors(publisher18_db, tmp_path).run(Until())
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert {file.name for file in (lake / "tables/public/t").glob("copy-*")} == files_of(lake, snapshot)
    assert not (lake / "copy/1-1").exists()


async def test_lost_snapshot_is_reported_and_the_table_copied_again(
    publisher18_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many_rows(publisher18_db)
    lake = tmp_path / "lake"

    def lose(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        if order.generation == 1:
            walsender = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walsender' AND application_name LIKE '%_sync_%'"
            with publisher18_db.connect() as session:
                for (pid,) in session.execute(walsender).fetchall():
                    session.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        return numbers

    with caplog.at_level(logging.WARNING):
        async with copier(lake, Watched(lake, lose)):
            await by_executors(publisher18_db, tmp_path).run(Until())
    assert "the session that exported the snapshot was lost" in caplog.text
    assert_same(lake, await applied(lake), publisher18_db, [T])


@pytest.mark.endurance
@pytest.mark.parametrize(
    ("alter", "rows"),
    [
        # no comparison with timestamps any more
        ("ALTER TABLE t ALTER at TYPE text", 5000),
        ("ALTER TABLE t ALTER at TYPE date", 5000),
        ("ALTER TABLE t RENAME at TO later", 5000),
        ("ALTER TABLE t DROP at", 5000),
        ("BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, 'new', 1); COMMIT", 1),
    ],
)
async def test_altered_between_two_parts(publisher18_db: Database, tmp_path: Path, alter: str, rows: int) -> None:
    many_rows(publisher18_db)
    publisher18_db.execute("ALTER TABLE t ADD at timestamp; UPDATE t SET at = timestamp '2024-01-01' + id * interval '1 hour'")
    publisher18_db.execute("VACUUM FULL t")
    lake, calls = tmp_path / "lake", Counter[int]()

    def between(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        calls[order.generation] += 1
        if calls[1] == 1:
            return numbers[:1]
        if calls[1] == 2 and order.generation == 1:
            publisher18_db.execute(alter)
        return numbers

    async with copier(lake, Watched(lake, between)):
        await by_executors(publisher18_db, tmp_path).run(Until())
    assert calls[2] > 0, "the parts do not fit together"
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert publisher18_db.value("SELECT count(*) FROM t") == rows


@pytest.mark.endurance
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("partitioned", [False, True])
async def test_swapped_between_two_parts(publisher18_db: Database, tmp_path: Path, partitioned: bool, back: bool) -> None:
    """The bug was that parts that were read while another table had the name were that one's."""
    name = make_swappable_table(publisher18_db, partitioned=partitioned)
    lake = tmp_path / "lake"
    generations: list[int] = []

    def between(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        if order.schema.table != T:
            return numbers
        generations.append(order.generation)
        if len(generations) == 2:
            publisher18_db.execute(swap_in(name))
        if len(generations) == 3 and back:
            publisher18_db.execute(swap_out(name))
        return numbers[:1] if len(generations) < 3 else numbers

    async with copier(lake, Watched(lake, between)):
        await by_executors(publisher18_db, tmp_path).run(Until())
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert generations[:3] == [1, 1, 2]


@pytest.mark.endurance
async def test_swapped_while_a_part_waits_to_be_read(publisher18_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And renamed back before the next check: the part itself has to notice."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    publisher18_db.execute("INSERT INTO t VALUES (1); INSERT INTO t_new VALUES (2); CREATE PUBLICATION pub FOR TABLE t, t_new")
    real_check, real_verify, done = copytask._check, PublishedSnapshot.verify, list[str]()

    def once(statements: str) -> None:
        if statements not in done:
            done.append(statements)
            publisher18_db.execute(statements)

    def check(cursor: Any, query: str, *, read: bool) -> None:
        real_check(cursor, query, read=read)
        if '"."t"' in query:
            once(swap_in("t"))

    async def verify(self: PublishedSnapshot, table: PublishedTable) -> None:
        if table.name == T:
            await asyncio.to_thread(once, swap_out("t"))
        await real_verify(self, table)

    def next_time(order: CopyOrder, numbers: Sequence[int]) -> Sequence[int]:
        if order.schema.table == T and order.generation > 1:
            once(swap_out("t"))
        return numbers

    monkeypatch.setattr(copytask, "_check", check)
    monkeypatch.setattr(PublishedSnapshot, "verify", verify)
    async with copier(tmp_path / "lake", Watched(tmp_path / "lake", next_time)):
        await by_executors(publisher18_db, tmp_path).run(Until())
    assert_same(tmp_path / "lake", await applied(tmp_path / "lake"), publisher18_db, [T])


async def test_executors_that_may_not_connect_are_told_of_until_they_may(
    publisher18_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many_rows(publisher18_db, 10)
    found = by_executors(publisher18_db, tmp_path)
    passfile = tmp_path / "passfile"
    right = passfile.read_text()
    passfile.write_text(right.rsplit(":", 1)[0] + ":wrong\n")
    with caplog.at_level(logging.WARNING):
        async with copier(tmp_path / "lake"):
            running = asyncio.create_task(found.run(Until()))
            await until(lambda: 'table "public.t" could not be copied: an executor could not connect to the publisher' in caplog.text)
            passfile.write_text(right)
            await running
    assert_same(tmp_path / "lake", await applied(tmp_path / "lake"), publisher18_db, [T])
    password = conninfo_to_dict(publisher18_db.conninfo())["password"]
    for file in (tmp_path / "lake").rglob("*.json"):
        assert f"password={password}" not in file.read_text()


async def test_base_files_that_no_commit_names_yet_are_not_swept(publisher18_db: Database, tmp_path: Path) -> None:
    many_rows(publisher18_db, 10)
    lake = tmp_path / "lake"
    async with copier(lake):
        await by_executors(publisher18_db, tmp_path).run(Until())
    # as where the table was once there, and its copy took longer than the retention time
    table = LakeDelta(storage(lake), "tables/public/t")
    table.create(pa.schema([pa.field("id", pa.int32())]))
    known = Lake.find(storage(lake))
    assert known is not None
    assert table.unneeded(0)
    assert remove_unneeded_files(storage(lake), known, [table], 0, {}) == 0
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert {file.name for file in (lake / "tables/public/t").glob("copy-*")} == files_of(lake, snapshot)


# --- an end while a part waits

LOCK = "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"
WAITS = f"SELECT ({waiting_for_lock_on('t')}) > 0"


async def ordered(publisher: Database, tmp_path: Path) -> asyncio.Task[None]:
    """A subscriber that has ordered a copy, of which nothing is read yet."""
    many_rows(publisher)
    syncing = asyncio.create_task(by_executors(publisher, tmp_path).run(Until()))
    await until((tmp_path / "lake/copy/1-1/order.json").exists)
    return syncing


async def given_up(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def applier_beside(publisher: Database, tmp_path: Path) -> list[str]:
    """Arguments of a subscriber with the applier in it."""
    target = (
        f"spark://{tmp_path / 'lake'}?copy=executors&apply=local&copy_connection={quote(f'passfile={passfile_of(publisher, tmp_path)}')}"
    )
    name = f"--name=lake_{publisher.name}"
    return ["run", f"--connection={publisher.conninfo()}", "--publication=pub", f"--target={target}", name, "-c", "copy_range_size=64kB"]


async def test_a_part_that_waits_for_a_lock_does_not_keep_the_copier(
    publisher18_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = tmp_path / "lake"
    syncing = await ordered(publisher18_db, tmp_path)
    with open_transaction(publisher18_db, LOCK), caplog.at_level(logging.WARNING):
        async with copier(lake):
            await asyncio.to_thread(publisher18_db.wait, WAITS, True)
        # no session waits there any more; the cause was the stop, not an error
        await asyncio.to_thread(publisher18_db.wait, WAITS, False)
        assert [record for record in caplog.records if record.name.endswith(".copier")] == []
        assert not (lake / "copy/1-1/failure.json").exists()
    async with copier(lake):
        await syncing
    assert_same(lake, await applied(lake), publisher18_db, [T])


async def test_a_row_that_takes_long_does_not_keep_the_copier(
    publisher18_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_rows(publisher18_db)
    # the rows flow already, and then one waits
    publisher18_db.execute(
        "CREATE FUNCTION slow(id int) RETURNS bool LANGUAGE plpgsql IMMUTABLE"
        " AS 'BEGIN IF id = 4000 THEN PERFORM pg_catalog.pg_sleep(300); END IF; RETURN true; END';"
        "CREATE VIEW sleeping AS SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    )

    class Slow(Watched):
        def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
            with monkeypatch.context() as patched:
                query = CopyOrder.query
                patched.setattr(
                    CopyOrder, "query", lambda order, number: f"SELECT * FROM ({query(order, number)}) AS q WHERE public.slow(id)"
                )
                return super().run(order, numbers, target_rows, stop)

    syncing = asyncio.create_task(by_executors(publisher18_db, tmp_path).run(Until()))
    await until((tmp_path / "lake/copy/1-1/order.json").exists)
    async with copier(tmp_path / "lake", Slow(tmp_path / "lake", lambda _, numbers: numbers)):
        await asyncio.to_thread(publisher18_db.wait, "SELECT count(*) FROM sleeping", 1)
    await asyncio.to_thread(publisher18_db.wait, "SELECT count(*) FROM sleeping", 0)
    await given_up(syncing)


@pytest.mark.endurance
async def test_the_applier_ends_while_a_part_waits_for_a_lock(publisher18_db: Database, tmp_path: Path) -> None:
    syncing = await ordered(publisher18_db, tmp_path)
    with open_transaction(publisher18_db, LOCK), program.running("spark-apply", str(tmp_path / "lake"), "--engine=local") as applier:
        await asyncio.to_thread(publisher18_db.wait, WAITS, True)
        applier.send(signal.SIGTERM)
        done = await asyncio.to_thread(applier.ended)
        assert (done.status, [word for word in ("Traceback", "not waiting for them", "copying") if word in done.errors]) == (0, []), (
            done.errors
        )
        await asyncio.to_thread(publisher18_db.wait, WAITS, False)
    await given_up(syncing)


@pytest.mark.endurance
async def test_a_subscriber_with_its_applier_ends_while_a_part_waits_for_a_lock(publisher18_db: Database, tmp_path: Path) -> None:
    # large enough that the lock is taken amid the copy
    many_rows(publisher18_db, 60_000)
    more = ("-c", "max_copy_workers_per_table=1")
    with program.running(*applier_beside(publisher18_db, tmp_path), *more) as run:
        await until(lambda: any((tmp_path / "lake/copy").glob("*/done-*")))
        with open_transaction(publisher18_db, LOCK):
            await asyncio.to_thread(publisher18_db.wait, WAITS, True)
            run.send(signal.SIGTERM)
            done = await asyncio.to_thread(run.ended)
            assert (done.status, [word for word in ("Traceback", "not waiting for them") if word in done.errors]) == (0, []), done.errors
            await asyncio.to_thread(publisher18_db.wait, WAITS, False)


@pytest.mark.endurance
async def test_the_applier_ends_while_the_publisher_does_not_answer(publisher18_db: Database, tmp_path: Path) -> None:
    syncing = await ordered(publisher18_db, tmp_path)
    order = CopyOrder.find(storage(tmp_path / "lake"), "copy/1-1")
    assert order is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # of a keyword that comes twice, the last counts
        address = f"{order.connection} host=127.0.0.1 hostaddr=127.0.0.1 port={silent.getsockname()[1]}"
        replace(order, connection=address).place(storage(tmp_path / "lake"))
        with program.running("spark-apply", str(tmp_path / "lake"), "--engine=local") as applier:
            # accepted, and no word after that
            peer, _ = await asyncio.to_thread(silent.accept)
            with peer:
                applier.send(signal.SIGTERM)
                done = await asyncio.to_thread(applier.ended)
    assert (done.status, "not waiting for them" in done.errors, "Traceback" in done.errors) == (0, True, False), done.errors
    await given_up(syncing)


@pytest.mark.endurance
async def test_killed_applier_leaves_no_session_waiting_on_the_publisher(publisher18_db: Database, tmp_path: Path) -> None:
    syncing = await ordered(publisher18_db, tmp_path)
    with open_transaction(publisher18_db, LOCK), program.running("spark-apply", str(tmp_path / "lake"), "--engine=local") as applier:
        await asyncio.to_thread(publisher18_db.wait, WAITS, True)
        applier.send(signal.SIGKILL)
        await asyncio.to_thread(applier.ended)
        await asyncio.to_thread(publisher18_db.wait, WAITS, False)
    await given_up(syncing)


@pytest.mark.parametrize("text", ["password=x", "host=h  password = 'x'", "sslpassword=x"])
def test_no_password_in_a_lake(text: str) -> None:
    with pytest.raises(ConfigurationError, match="copy_connection contains a password"):
        Location.parse(f"spark:///lake?copy=executors&copy_connection={quote(text)}")
    with pytest.raises(ConfigurationError, match='unrecognized copy value: "executor"'):
        Location.parse("spark:///lake?copy=executor")


async def until(condition: Callable[[], bool], timeout: float = 30) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)
