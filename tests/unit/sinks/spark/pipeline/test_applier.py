"""The applier without Spark: for all landed changes, and after any crash, plain Delta readers see the publisher's rows."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from subscriber.errors import DataLossError, SubscriberError, SubscriptionInUse, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Relation, Update
from subscriber.sinks.spark import landing_stream as landing_stream_module
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, read_snapshot
from subscriber.sinks.spark.files.location import Location, table_directory
from subscriber.sinks.spark.files.storage import Storage, StoredFile
from subscriber.sinks.spark.landing.manifest import first_manifest
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import seeds
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

SMALL = ApplierSettings(target_rows=8, round_bytes=20_000, log_files=10)


def storage(path: Path) -> Storage:
    return Storage.open(Location(path=str(path)))


def applier(path: Path, settings: ApplierSettings = SMALL) -> Applier:
    return Applier(storage(path), LocalEngine(storage(path)), settings)


def all_rounds(work: Applier) -> Snapshot:
    last = None
    while (snapshot := work.run_round()) is not None:
        last = snapshot
    found = last or read_snapshot(work._storage)
    assert found is not None
    return found


def stop_of(work: Applier, pattern: str) -> str:
    """Apply: the table leaves the snapshot. Gives the reason."""
    snapshot = all_rounds(work)
    assert TABLE not in snapshot.tables
    reason = snapshot.stopped[TABLE].error
    assert re.search(pattern, reason), reason
    return reason


@pytest.mark.slow
@seeds(1, 2)
async def test_any_transactions_give_the_publishers_rows(tmp_path: Path, seed: int) -> None:
    publisher = Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    work = applier(tmp_path)
    for _ in range(6):
        for _ in range(publisher.random.randrange(1, 6)):
            await sink.apply(batch(*(publisher.transaction(publisher.random.randrange(1, 30)) for _ in range(2))))
            await sink.advance(Lsn(publisher.end))
        snapshot = all_rounds(work)
        assert snapshot.lsn == publisher.end
        assert read(tmp_path, snapshot) == publisher.rows()
        work.tidy()
    await sink.close()
    work.tidy(now=True)
    assert read(tmp_path, all_rounds(work)) == publisher.rows()
    assert len(list((tmp_path / "landing").iterdir())) <= 1 + len(NAMES)


class Killed(BaseException):
    """The applier has ended."""


class Fragile(LocalEngine):
    """Dies before, amid or after a round's units."""

    def __init__(self, storage: Storage, dice: random.Random) -> None:
        super().__init__(storage)
        self.dice = dice

    def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
        if self.dice.random() < 0.15:
            raise Killed
        found = super().run(units)
        if self.dice.random() < 0.15:
            raise Killed
        return found


@pytest.mark.slow
@seeds(1, 2)
async def test_killed_anywhere_the_snapshot_is_one_and_nothing_comes_twice(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    publisher = Publisher(seed + 100)
    history: dict[int, dict[str, Counter[tuple[str | None, ...]]]] = {100: publisher.rows()}
    kills = 0

    def fragile(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if dice.random() < 0.08:
                raise Killed
            found = original(*arguments, **named)
            if dice.random() < 0.08:
                raise Killed
            return found

        return call

    sink = await begun(make(tmp_path), tables=NAMES)
    monkeypatch.setattr(LakeDelta, "commit", fragile(LakeDelta.commit))
    monkeypatch.setattr(SnapshotPublisher, "publish", fragile(SnapshotPublisher.publish))
    monkeypatch.setattr(Storage, "delete", fragile(Storage.delete))
    work = Applier(storage(tmp_path), Fragile(storage(tmp_path), dice), SMALL)
    for _ in range(25):
        one = publisher.transaction(publisher.random.randrange(1, 40))
        await sink.apply(batch(one))
        await sink.advance(Lsn(publisher.end))
        history[publisher.end] = publisher.rows()
        try:
            work.run_round()
            work.tidy()
        except Killed:
            kills += 1
            # another size of rounds, so that they end elsewhere
            settings = ApplierSettings(target_rows=8, round_bytes=dice.choice([1, 5_000, 10**9]), log_files=dice.choice([0, 10]))
            work = Applier(storage(tmp_path), Fragile(storage(tmp_path), dice), settings)
        snapshot = read_snapshot(storage(tmp_path))
        if snapshot is not None and len(snapshot.tables) == len(NAMES):
            assert read(tmp_path, snapshot) == history[snapshot.lsn]
    monkeypatch.undo()
    assert kills > 5
    await sink.close()
    last = applier(tmp_path)
    snapshot = all_rounds(last)
    assert read(tmp_path, snapshot) == publisher.rows()
    last.tidy(now=True)
    changes = [
        (item["_lsn"], item["_seq"])
        for name in NAMES
        for item in DeltaTable(str(tmp_path / "log" / name.namespace / name.name)).to_pyarrow_table(columns=["_lsn", "_seq"]).to_pylist()
    ]
    assert len(changes) == len(set(changes))
    statistics = sink.statistics
    rows = statistics.inserts + statistics.deletes + statistics.truncates + statistics.updates
    assert len(changes) == rows + publisher.pairs_of_rows


async def _one(path: Path, *transactions: object) -> None:
    sink = await begun(make(path))
    for found in transactions:
        await sink.apply(batch(found))  # type: ignore[arg-type]
        await sink.advance(found.end_lsn)  # type: ignore[attr-defined]
    await sink.close()


def current(path: Path, columns: Sequence[str] = ("id", "note")) -> list[tuple[object, ...]]:
    rows = DeltaTable(str(path / "tables/public/t")).to_pyarrow_table().to_pylist()
    return sorted(tuple(item[column] for column in columns) for item in rows)


async def test_a_new_column_is_added_and_a_dropped_one_becomes_null(tmp_path: Path) -> None:
    wider = Relation(5, "public", "t", "d", (*RELATION.columns, Column("more", 20, -1, False)))
    narrow = Relation(5, "public", "t", "d", (RELATION.columns[0], wider.columns[3]))
    await _one(tmp_path, transaction(200, RELATION, Insert(5, row("1", "one", None))))
    all_rounds(applier(tmp_path))
    await _one(tmp_path, transaction(300, wider, Insert(5, row("2", "two", None, "7"))))
    all_rounds(applier(tmp_path))
    assert current(tmp_path, ("id", "note", "more")) == [(1, "one", None), (2, "two", 7)]
    await _one(tmp_path, transaction(400, narrow, Insert(5, row("3", "9"))))
    all_rounds(applier(tmp_path))
    assert current(tmp_path, ("id", "note", "more")) == [(1, None, None), (2, None, 7), (3, None, 9)]
    await _one(tmp_path, transaction(500, wider, Insert(5, row("4", "again", None, None))))
    all_rounds(applier(tmp_path))
    assert current(tmp_path, ("id", "note", "more")) == [(1, None, None), (2, None, 7), (3, None, 9), (4, "again", None)]


@pytest.mark.parametrize(("oid", "modifier", "text", "value"), [(20, -1, "5000000000", 5_000_000_000), (25, -1, "five", "five")])
async def test_a_widened_type_takes_all_rows_along(tmp_path: Path, oid: int, modifier: int, text: str, value: object) -> None:
    before = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("note", 23, -1, False)))
    after = Relation(5, "public", "t", "d", (Column("id", 20, -1, True), Column("note", oid, modifier, False)))
    await _one(tmp_path, *(transaction(200 + n, before, Insert(5, row(str(n), "7"))) for n in range(30)))
    all_rounds(applier(tmp_path))
    await _one(tmp_path, transaction(300, after, Update(5, None, None, row("3", text))))
    work = applier(tmp_path)
    all_rounds(work)
    work.tidy(now=True)
    seven = 7 if isinstance(value, int) else "7"
    assert current(tmp_path) == sorted([(n, value if n == 3 else seven) for n in range(30)])
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == 31


async def test_only_touched_files_are_rewritten_and_small_ones_are_merged(tmp_path: Path) -> None:
    first = [Insert(5, row(str(n), "old", None)) for n in range(100)]
    await _one(tmp_path, transaction(200, RELATION, *first))
    settings = ApplierSettings(target_rows=10)
    all_rounds(applier(tmp_path, settings))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    before = set(table.file_uris())
    assert len(before) == 10
    await _one(tmp_path, transaction(300, RELATION, Update(5, None, None, row("95", "new", None)), Insert(5, row("100", "new", None))))
    all_rounds(applier(tmp_path, settings))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    assert len(before & set(table.file_uris())) == 9
    assert len(current(tmp_path)) == 101


def test_no_two_tables_lie_in_one_directory() -> None:
    parts = ["_", "t", "ä", "ö", "_-1", "_-2", "t-1", "t-12", "_-1-1", "a-b", "A b", "x.y", ".x", "a" * 100 + "-1", "a" * 101, "T"]
    parts += ["_delta_log", "delta_log", "_change_data", "_SUCCESS", "a=b", ".", "..", "a/b", "a\\b", "con", "NUL.x", "x", "x.", "ä" * 200]
    names = [TableName(schema, table) for schema in parts for table in parts]
    lying: dict[str, set[tuple[TableName, int]]] = {}
    for name in names:
        for number in (1, 2, 12):
            lying.setdefault(table_directory("tables", name, number), set()).add((name, number))
    # no part is hidden, a partition, or longer than file systems allow; none differs from another one in letter case, or is of Windows
    part = r"(?!(?:con|nul)(?:[./]|\Z))[a-z0-9][a-z0-9_.-]{0,98}(?<!\.)"
    assert all(re.fullmatch(rf"tables/{part}/{part}", path) for path in lying)
    for tables in lying.values():
        # a number is one table's
        assert len({name for name, _ in tables}) == 1 or len({number for _, number in tables}) == 1
    assert table_directory("log", TableName("public", "t.a-b_1"), 7) == "log/public/t.a-b_1"


@pytest.mark.parametrize("name", [".x", "[0]", "x.y", "..", "[1", "$", "%"])
async def test_a_key_may_have_any_name(tmp_path: Path, name: str) -> None:
    relation = Relation(5, "public", "t", "d", (Column("v", 23, -1, False), Column(name, 23, -1, True), Column("y", 23, -1, True)))
    await _one(tmp_path, transaction(200, relation, *(Insert(5, row(str(99 - n), str(n), "1")) for n in (3, 1, 2))))
    all_rounds(applier(tmp_path))
    await _one(tmp_path, transaction(300, relation, Update(5, None, None, row("500", "2", "1")), Delete(5, row(None, "1", "1"), None)))
    all_rounds(applier(tmp_path))
    (file,) = DeltaTable(str(tmp_path / "tables/public/t")).file_uris()
    assert [tuple(found.values())[:2] for found in pq.read_table(file, partitioning=None).to_pylist()] == [(500, 2), (96, 3)]


async def test_a_second_applier_is_refused(tmp_path: Path) -> None:
    await _one(tmp_path, transaction(200, RELATION, Insert(5, row("1", None, None))))
    first = applier(tmp_path)
    first.open()
    with pytest.raises(SubscriptionInUse, match="already has an applier"):
        applier(tmp_path).open()
    first.close()
    with pytest.raises(TargetError, match="there is no lake"):
        applier(tmp_path / "nowhere").open()


async def test_table_changed_by_another_writer_leaves_the_snapshot(tmp_path: Path) -> None:
    await _one(tmp_path, transaction(200, RELATION, Insert(5, row("1", None, None))))
    work = applier(tmp_path)
    all_rounds(work)
    await _one(tmp_path, transaction(300, RELATION, Update(5, None, None, row("1", "x", None))))

    class Meddled(LocalEngine):
        def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
            DeltaTable(str(tmp_path / "tables/public/t")).delete()
            return super().run(units)

    work = Applier(storage(tmp_path), Meddled(storage(tmp_path)), SMALL)
    assert "copy it again" in stop_of(work, r"public/t was changed by another writer, in version 2 ")
    snapshot = read_snapshot(storage(tmp_path))
    assert snapshot is not None
    assert snapshot.lsn == 300


@pytest.mark.parametrize(
    ("victim", "error", "words"),
    [
        ("*300.json", DataLossError, "has a gap"),
        ("*300-*.parquet", TargetError, "is missing"),
    ],
)
async def test_what_is_missing_in_the_landing_zone_is_named(tmp_path: Path, victim: str, error: type[TargetError], words: str) -> None:
    await _one(tmp_path, *(transaction(end, RELATION, Insert(5, row(str(end), None, None))) for end in (200, 300, 400)))
    next((tmp_path / "landing").glob(victim)).unlink()
    with pytest.raises(error, match=words):
        applier(tmp_path).run_round()
    assert read_snapshot(storage(tmp_path)) is None


@pytest.mark.slow
async def test_of_a_long_backlog_each_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=1h&confirm=applied"))
    for end in range(200, 600, 10):
        await sink.apply(batch(transaction(end, RELATION, Insert(5, row(str(end), None, None)))))
        await sink._usable.land()
    read, names = Storage.read, list[str]()

    def counted(place: Storage, name: str) -> bytes | None:
        if name.startswith("landing/"):
            names.append(name)
        return read(place, name)

    monkeypatch.setattr(Storage, "read", counted)
    # a waiter for the applier checks the oldest batch, and not again before something is published
    for _ in range(5):
        assert await sink._usable.applied() == 100
    assert names in ([], [f"landing/{200:020d}.json"])  # its own watch may have looked before
    names.clear()
    work, rounds = applier(tmp_path, ApplierSettings(round_bytes=1, log_files=15)), 0
    while work.run_round() is not None:
        work.tidy()
        rounds += 1
    assert rounds == 40
    assert len(names) == len(set(names)) == 40
    assert await sink._usable.applied() == 590
    await sink.close()


@pytest.mark.parametrize("missed", [[["200"]], [["300"]], [["200"], ["300"]], [["200", "300"]], [["300"], ["200"], ["300", "400"]]])
async def test_a_listing_that_misses_what_is_being_made_is_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missed: list[list[str]]
) -> None:
    for end in (200, 300, 400):
        await _one(tmp_path, transaction(end, RELATION, Insert(5, row(str(end), None, None))))
    original = Storage.files

    def files(place: Storage, directory: str) -> list[StoredFile]:
        found = original(place, directory)
        if directory != "landing" or not missed:
            return found
        names = [f"{int(end):020d}.json" for end in missed.pop(0)]
        return [file for file in found if file.name not in names]

    monkeypatch.setattr(Storage, "files", files)
    again = [list(some) for some in missed]
    assert all_rounds(applier(tmp_path)).lsn == 400
    assert current(tmp_path) == [(200, None), (300, None), (400, None)]
    missed[:] = again
    first = first_manifest(storage(tmp_path), "landing", Lsn(100))
    assert first is not None
    assert first.end == 200
    missed.clear()
    assert first_manifest(storage(tmp_path), "landing", Lsn(400)) is None
    (tmp_path / f"landing/{300:020d}.json").unlink()
    with pytest.raises(DataLossError, match="has a gap: no manifest from 0/C8 to 0/12C"):
        first_manifest(storage(tmp_path), "landing", Lsn(200))


async def test_a_damaged_landed_file_is_named(tmp_path: Path) -> None:
    await _one(tmp_path, transaction(200, RELATION, *(Insert(5, row(str(n), "x" * 100, None)) for n in range(1000))))
    file = next((tmp_path / "landing").glob("*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(TargetError, match=rf"{file.name} is damaged"):
        applier(tmp_path).run_round()


async def test_confirm_applied_reports_what_the_applier_published(tmp_path: Path) -> None:
    durable: list[int] = []
    sink = await begun(make(tmp_path, "?batch_delay=1ms&confirm=applied"), durable)
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    async with asyncio.timeout(20):
        while not (tmp_path / "landing" / f"{200:020d}.json").exists():  # not by a pattern: what is being written has its name in its own
            await asyncio.sleep(0.01)
    assert 200 not in durable
    all_rounds(applier(tmp_path))
    async with asyncio.timeout(20):
        while 200 not in durable:
            await asyncio.sleep(0.01)
    await sink.apply(batch(transaction(300, RELATION, Insert(5, row("2", None, None)))))
    await sink.close()
    sink = await make(tmp_path, "?batch_delay=1h&confirm=applied").open("replica", durable.append)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == 200
    # what is sent again is dropped
    await sink.apply(batch(transaction(300, RELATION, Insert(5, row("2", None, None)))))
    await sink.close()
    snapshot = all_rounds(applier(tmp_path))
    assert snapshot.lsn == 300
    assert current(tmp_path) == [(1, None), (2, None)]


async def test_what_the_applier_publishes_and_removes_meanwhile_is_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(_: object) -> None:
        """A waiter that checks five times a second would check in between."""

    monkeypatch.setattr(landing_stream_module.LandingStream, "_watch_applied", nobody)
    sink = await begun(make(tmp_path, "?batch_delay=1h&confirm=applied"))
    work = applier(tmp_path)

    async def landed(*ends: int) -> None:
        for end in ends:
            await sink.apply(batch(transaction(end, RELATION, Insert(5, row(str(end), None, None)))))
            await sink._usable.land()

    await landed(200)
    all_rounds(work)
    await landed(300, 400, 500)

    real = Snapshots.newest

    def overtaken(snapshots: Snapshots) -> Snapshot | None:
        monkeypatch.setattr(Snapshots, "newest", real)
        found = snapshots.newest()
        all_rounds(work)
        work.tidy(now=True)
        return found

    monkeypatch.setattr(Snapshots, "newest", overtaken)
    assert await sink._usable.applied() == 500
    # a manifest that is missing is a loss all the same
    await landed(600, 700)
    for end in (500, 600):
        (tmp_path / f"landing/{end:020d}.json").unlink()
    sink._usable._waiting = None
    with pytest.raises(DataLossError, match="has a gap"):
        await sink._usable.applied()
    await sink.close()
