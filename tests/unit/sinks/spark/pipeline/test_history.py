"""Histories of tables: at every LSN they have the publisher's rows of that LSN, whatever was killed."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Update
from subscriber.sinks.spark.catalog.history import history_name
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.maintenance.log_files import write_log_part
from subscriber.sinks.spark.merge.units import write_history_unit
from subscriber.sinks.spark.pipeline import history as history_module
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.sink import SparkSink
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.transaction.model import Transaction
from tests.support.examples import some_and_others
from tests.support.lakes import published
from tests.unit.sinks.spark.damage import rot
from tests.unit.sinks.spark.model import NAMES, RELATIONS, Publisher, Values, read, text_of
from tests.unit.sinks.spark.pipeline.test_applier import SMALL, Killed, all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import copy
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

pytestmark = pytest.mark.slow

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

States = Mapping[int, Mapping[str, Counter[Values]]]


def kept(path: Path, tables: Sequence[TableName] = (TABLE,)) -> SparkSink:
    """A sink of a lake with histories."""
    return make(path, "?batch_delay=1h" + "".join(f"&history.{name}=scd2" for name in tables))


def history_rows(path: Path, snapshot: Snapshot, name: TableName) -> list[dict[str, Any]]:
    """The rows of a table's history at a snapshot. Values of the table are texts."""
    relation = next((one for one in (*RELATIONS, RELATION) if one.name == name.name), RELATION)
    table = snapshot.tables[history_name(name, ())]
    found = []
    for item in DeltaTable(str(path / table.path), version=table.version).to_pyarrow_table().to_pylist():
        special = json.loads(item["_special"] or "{}")
        values = tuple(special.get(column.name, text_of(item[column.name])) for column in relation.columns)
        found.append({**item, "values": values})
    return found


def valid_at(rows: Sequence[Mapping[str, Any]], lsn: int) -> Counter[Values]:
    return Counter(item["values"] for item in rows if item["_lsn"] <= lsn and (item["_end_lsn"] is None or lsn < item["_end_lsn"]))


def assert_versions(rows: Sequence[Mapping[str, Any]], states: States, table: str, until: int) -> None:
    """The history has the table's rows at every commit, and no other version."""
    for lsn, state in states.items():
        if lsn <= until:
            assert valid_at(rows, lsn) == state[table], f"{table} at {lsn}"
    for item in rows:
        assert item["_is_current"] == (item["_end_lsn"] is None) == (item["_valid_to"] is None)
        assert item["_end_lsn"] is None or item["_lsn"] < item["_end_lsn"]
        # transactions of these tests have their LSN as the commit time, in seconds
        assert item["_valid_from"].timestamp() - 946684800 == item["_lsn"]
        assert item["_valid_to"] is None or item["_valid_to"].timestamp() - 946684800 == item["_end_lsn"]


class Fragile(LocalEngine):
    """Dies before, amid or after the work of a round."""

    def __init__(self, storage: Storage, dice: random.Random) -> None:
        super().__init__(storage)
        self.dice = dice

    def each(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result]:
        if self.dice.random() < 0.06:
            raise Killed
        found = super().each(function, items, weights, what)
        if self.dice.random() < 0.06:
            raise Killed
        return found


@pytest.mark.timeout(300)
async def test_killed_anywhere_a_history_has_every_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice, publisher = random.Random(seed), Publisher(seed)
    states: dict[int, dict[str, Counter[Values]]] = {100: publisher.rows()}
    kills = 0

    def fragile(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if dice.random() < 0.03:
                raise Killed
            found = original(*arguments, **named)
            if dice.random() < 0.03:
                raise Killed
            return found

        return call

    sink = await begun(kept(tmp_path, NAMES), tables=NAMES)
    monkeypatch.setattr(LakeDelta, "commit", fragile(LakeDelta.commit))
    monkeypatch.setattr(Storage, "delete", fragile(Storage.delete))
    monkeypatch.setattr(history_module, "_SMALL_FILES", 6)
    work = Applier(storage(tmp_path), Fragile(storage(tmp_path), dice), SMALL)
    for _ in range(14):
        await sink.apply(batch(publisher.transaction(publisher.random.randrange(1, 40))))
        await sink.advance(Lsn(publisher.end))
        states[publisher.end] = publisher.rows()
        try:
            work.run_round()
            work.tidy(now=dice.random() < 0.3)
        except Killed:
            kills += 1
            settings = ApplierSettings(target_rows=8, round_bytes=dice.choice([1, 5_000, 10**9]), log_files=dice.choice([0, 10]))
            work = Applier(storage(tmp_path), Fragile(storage(tmp_path), dice), settings)
        snapshot = read_snapshot(storage(tmp_path))
        if snapshot is not None:
            for relation in RELATIONS:
                name = TableName("public", relation.name)
                # published together
                assert (name in snapshot.tables) == (history_name(name, ()) in snapshot.tables)
                if name in snapshot.tables:
                    assert_versions(history_rows(tmp_path, snapshot, name), states, relation.name, snapshot.lsn)
    await sink.close()
    monkeypatch.undo()
    snapshot = all_rounds(applier(tmp_path))
    assert kills > 3
    assert snapshot.lsn == publisher.end
    tables = {name: table for name, table in snapshot.tables.items() if name in NAMES}
    assert read(tmp_path, Snapshot(snapshot.lsn, snapshot.landed, tables)) == publisher.rows()
    for relation in RELATIONS:
        rows = history_rows(tmp_path, snapshot, TableName("public", relation.name))
        assert_versions(rows, states, relation.name, snapshot.lsn)


def versions(path: Path, snapshot: Snapshot, *columns: str) -> list[tuple[Any, ...]]:
    """Values, begin and end of each version of the table ``t``."""
    names = [*columns, "_lsn", "_end_lsn"]
    return sorted((tuple(item[name] for name in names) for item in history_rows(path, snapshot, TABLE)), key=repr)


async def landed(path: Path, *transactions: Transaction) -> None:
    sink = await begun(kept(path))
    for one in transactions:
        await sink.apply(batch(one))
        await sink.advance(one.end_lsn)
    await sink.close()


async def copied(path: Path, lsn: int, lines: bytes) -> None:
    """Copy the table ``t`` again."""
    sink = await begun(kept(path))
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, lines, lsn)
    await sink.advance(Lsn(lsn + 10))
    await sink.close()


async def test_a_copy_ends_all_versions_and_a_history_that_is_asked_for_later_has_everything(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    for one in (
        transaction(200, RELATION, Insert(5, row("1", "a", None)), Insert(5, row("2", "a", None))),
        transaction(300, Update(5, None, None, row("1", "b", None))),
    ):
        await sink.apply(batch(one))
        await sink.advance(one.end_lsn)
    await sink.close()
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert history_name(TABLE, ()) not in snapshot.tables
    work.tidy(now=True)
    await copied(tmp_path, 400, b"1\tb\n3\tc\n")
    snapshot = all_rounds(work)
    expected = [(1, "a", 200, 300), (1, "b", 300, 400), (1, "b", 400, None), (2, "a", 200, 400), (3, "c", 400, None)]
    assert versions(tmp_path, snapshot, "id", "note") == expected
    begun_at = {item["_valid_from"] for item in history_rows(tmp_path, snapshot, TABLE) if item["_lsn"] == 400}
    assert begun_at == {item["_valid_to"] for item in history_rows(tmp_path, snapshot, TABLE) if item["_end_lsn"] == 400}
    assert None not in begun_at
    # an empty copy, too
    await copied(tmp_path, 500, b"")
    snapshot = all_rounds(work)
    assert versions(tmp_path, snapshot, "id", "note") == [(*one[:3], one[3] or 500) for one in expected]
    shutil.rmtree(tmp_path / "history")
    assert versions(tmp_path, all_rounds(applier(tmp_path)), "id", "note") == [(*one[:3], one[3] or 500) for one in expected]


async def test_a_table_that_begins_again_begins_its_history_again_once(tmp_path: Path) -> None:
    """The publisher dropped the table and created it again. It left the publication, or not; then it is copied."""
    await landed(tmp_path, transaction(200, RELATION, *(Insert(5, row(str(n), "old", None)) for n in (1, 2, 3))))
    work = applier(tmp_path)
    all_rounds(work)
    # the stream of the new table follows that of the old one: its rows are not deleted, in the table neither
    again = replace(RELATION, relation_id=55)
    await landed(tmp_path, transaction(300, again, Insert(55, row("1", "new", None)), Insert(55, row("4", "new", None))))
    before = all_rounds(work)
    assert versions(tmp_path, before, "id", "note") == [
        (1, "new", 300, None),
        (1, "old", 200, 300),
        (2, "old", 200, None),
        (3, "old", 200, None),
        (4, "new", 300, None),
    ]
    # the table of the lake is damaged meanwhile, so it begins again too
    shutil.rmtree(tmp_path / "tables/public/t/_delta_log")
    await copied(tmp_path, 400, b"1\tnew\n4\tnew\n")
    await landed(tmp_path, transaction(500, again, Update(55, None, None, row("4", "newer", None))))
    for _ in range(2):
        snapshot = all_rounds(work)
        assert not snapshot.stopped
        assert snapshot.lsn == 500
        assert versions(tmp_path, snapshot, "id", "note") == [
            (1, "new", 300, 400),
            (1, "new", 400, None),
            (1, "old", 200, 300),
            (2, "old", 200, 400),
            (3, "old", 200, 400),
            (4, "new", 300, 400),
            (4, "new", 400, 500),
            (4, "newer", 500, None),
        ]
        # derived again, it is the same
        shutil.rmtree(tmp_path / "history")
        work = applier(tmp_path)


async def test_a_copy_ends_versions_though_the_log_has_nothing_before_it(tmp_path: Path) -> None:
    """The bug was that a log whose directory was removed began with the copied rows, so that rows which the copy lacked stayed."""
    other = TableName("public", "other")
    sink = await begun(kept(tmp_path), tables=(TABLE, other))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), "old", None)) for n in (1, 2)))))
    await sink.advance(Lsn(200))
    work = applier(tmp_path)
    all_rounds(work)
    await sink.apply(batch(transaction(300, replace(RELATION, relation_id=6, name="other"), Insert(6, row("1", "x", None)))))
    await sink.advance(Lsn(300))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    shutil.rmtree(tmp_path / "log/public/t")
    await copied(tmp_path, 400, b"1\told\n3\tnew\n")
    snapshot = all_rounds(applier(tmp_path))
    assert not snapshot.stopped
    expected = [(1, 200, 400), (1, 400, None), (2, 200, 400), (3, 400, None)]
    assert versions(tmp_path, snapshot, "id") == expected


async def test_empty_table_that_is_copied_has_an_empty_history(tmp_path: Path) -> None:
    """The bug was an IndexError, which ended the applier: the change log of an empty copy has no file."""
    sink = await begun(kept(tmp_path), tables=())
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await sink.close()
    work = applier(tmp_path)
    await copied(tmp_path, 200, b"")
    snapshot = all_rounds(work)
    assert history_rows(tmp_path, snapshot, TABLE) == []
    work.tidy(now=True)
    await landed(tmp_path, transaction(300, RELATION, Insert(5, row("1", "a", None))))
    snapshot = all_rounds(work)
    assert [(item["_lsn"], item["id"]) for item in history_rows(tmp_path, snapshot, TABLE)] == [(300, 1)]


async def test_a_log_that_is_gone_is_an_error_until_the_table_is_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that the log began again without a word, and that a history was built from the rest: it had no rows."""
    other, of_other = TableName("public", "other"), replace(RELATION, relation_id=6, name="other")
    sink = await begun(kept(tmp_path), tables=(other,))
    await sink.close()
    work = applier(tmp_path)
    await copied(tmp_path, 200, b"1\told\n2\told\n")
    await landed(tmp_path, transaction(300, of_other, Insert(6, row("1", "x", None))))
    all_rounds(work)
    work.tidy(now=True)
    name = history_name(TABLE, ())
    assert name in all_rounds(work).tables
    for directory in ("log", "history"):
        shutil.rmtree(tmp_path / directory / "public/t")
    # the table need not change, and a new process knows only the lake's files
    await landed(tmp_path, transaction(350, of_other, Insert(6, row("2", "x", None))))
    for attempt in range(3):
        if attempt == 1:
            work = applier(tmp_path)
        if attempt == 2:
            await landed(tmp_path, transaction(400, RELATION, Update(5, None, None, row("1", "new", None))))
        snapshot = all_rounds(work)
        work.tidy(now=True)
        assert TABLE in snapshot.tables
        assert name not in snapshot.tables
        assert "log/public/t is gone" in snapshot.stopped[name].error
        assert "log/public/t is gone, and its changes cannot be found elsewhere (hint: copy it again" in work.progress.stopped_logs[TABLE]
        assert not (tmp_path / "log/public/t/_delta_log").exists()
    assert len(DeltaTable(str(tmp_path / "log/public/other")).to_pyarrow_table()) == 2
    await copied(tmp_path, 500, b"1\tnew\n2\told\n")
    await landed(tmp_path, transaction(600, RELATION, Update(5, None, None, row("2", "new", None))))
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    snapshot = all_rounds(work)
    work.tidy(now=True)
    assert not snapshot.stopped
    assert not work.progress.stopped_logs
    rows = history_rows(tmp_path, snapshot, TABLE)
    current = {item["id"]: item["note"] for item in rows if (item["_end_lsn"] is None)}
    assert current == {1: "new", 2: "new"}


@some_and_others(
    ["damaged", "damage"],
    [("history", "missing"), ("history", "rotten"), ("log", "damaged")],
    [("history", "damaged"), ("log", "missing"), ("log", "rotten")],
)
async def test_a_history_that_lacks_a_file_leaves_the_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, damage: str
) -> None:
    """The bug was that every round failed then, so that no table of the lake was published."""
    await landed(tmp_path, transaction(200, RELATION, Insert(5, row("1", "a", None))))
    work = applier(tmp_path)
    all_rounds(work)
    if damaged == "log":
        shutil.rmtree(tmp_path / "history")  # it is built again from the log
    (lost,) = (tmp_path / damaged / "public/t").glob("*.parquet")
    lost.rename(tmp_path / lost.name)
    if damage != "missing":
        lost.write_bytes(b"garbage" * 100)
    if damage == "rotten":
        shutil.copy(tmp_path / lost.name, lost)
        rot(lost.parent, lost.name)
    read = list[str]()
    real = pq.read_metadata

    def recorded(path: str, **named: Any) -> pq.FileMetaData:
        read.append(path)
        return real(path, **named)

    monkeypatch.setattr(pq, "read_metadata", recorded)
    for end in (300, 400, 500):
        await landed(tmp_path, transaction(end, RELATION, Update(5, None, None, row("1", str(end), None))))
        snapshot = all_rounds(work)
        assert snapshot.lsn == snapshot.tables[TABLE].applied == end
        assert snapshot.tables.keys() == {TABLE}
        (stop,) = snapshot.stopped.values()
        told = "missing" if damage == "missing" else "damaged"
        assert f"{lost} is {told} (hint: remove its directory" in stop.error
        if end > 300:
            assert not read, "it is tried again after a minute"
        read.clear()
    monkeypatch.undo()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    (tmp_path / lost.name).rename(lost)
    await landed(tmp_path, transaction(600, RELATION, Update(5, None, None, row("1", "z", None))))
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert len(history_rows(tmp_path, snapshot, TABLE)) == 5


async def test_a_history_is_built_from_a_log_that_another_program_sorted(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    changes: list[Message] = [
        Insert(5, row("1", "z", None)),
        Update(5, None, None, row("1", "y", None)),
        Insert(5, row("2", "b", None)),
        Delete(5, row("2", None, None), None),
        Update(5, None, None, row("1", "a", None)),
        Insert(5, row("2", "a", None)),
    ]
    for lsn, change in enumerate(changes, start=2):
        one = transaction(lsn * 100, RELATION, change)
        await sink.apply(batch(one))
        await sink.advance(one.end_lsn)
    await sink.close()
    work = applier(tmp_path)
    all_rounds(work)
    work.tidy(now=True)
    theirs = DeltaTable(str(tmp_path / "log/public/t"))
    theirs.optimize.z_order(["note"])
    (path,) = theirs.file_uris()
    assert pq.read_table(path)["_lsn"].to_pylist() != [200, 300, 400, 500, 600, 700]
    await landed(tmp_path, transaction(800, RELATION, Insert(5, row("3", "c", None))))
    snapshot = all_rounds(work)
    expected = [
        (1, "a", 600, None),
        (1, "y", 300, 600),
        (1, "z", 200, 300),
        (2, "a", 700, None),
        (2, "b", 400, 500),
        (3, "c", 800, None),
    ]
    assert versions(tmp_path, snapshot, "id", "note") == expected


async def test_a_history_follows_new_types_columns_and_identities(tmp_path: Path) -> None:
    wider = Relation(5, "public", "t", "d", (Column("id", 20, -1, True), *RELATION.columns[1:], Column("more", 25, -1, False)))
    whole = replace(wider, replica_identity="f", columns=tuple(replace(one, key=True) for one in wider.columns))
    await landed(tmp_path, transaction(200, RELATION, Insert(5, row("1", "a", None)), Insert(5, row("2", "b", None))))
    work = applier(tmp_path)
    all_rounds(work)
    await landed(
        tmp_path,
        transaction(300, RELATION, Delete(5, row("2", None, None), None)),
        transaction(400, wider, Insert(5, row("5000000000", "a", None, "x")), Update(5, None, None, row("1", "a", None, "y"))),
        transaction(500, whole, Update(5, None, row("1", "a", None, "y"), row("7", "a", None, "y"))),
    )
    snapshot = all_rounds(work)
    assert versions(tmp_path, snapshot, "id", "note", "more") == [
        (1, "a", "y", 400, 500),
        (1, "a", None, 200, 400),
        (2, "b", None, 200, 300),
        (5000000000, "a", "x", 400, None),
        (7, "a", "y", 500, None),
    ]
    assert DeltaTable(str(tmp_path / "history/public/t")).to_pyarrow_dataset().schema.field("id").type == "int64"


async def test_another_writer_stops_the_history_alone_until_it_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await landed(tmp_path, transaction(200, RELATION, Insert(5, row("1", "a", None))))
    work, name = applier(tmp_path), history_name(TABLE, ())
    assert set(all_rounds(work).tables) == {TABLE, name}
    theirs = DeltaTable(str(tmp_path / "history/public/t"))
    theirs.delete()
    await landed(tmp_path, transaction(300, RELATION, Insert(5, row("2", "b", None))))
    snapshot = all_rounds(work)
    assert set(snapshot.tables) == {TABLE}
    assert re.match(
        r"history table .* was changed by another writer, in version 2 \(hint: remove its directory", snapshot.stopped[name].error
    )
    shutil.rmtree(tmp_path / "history")
    await landed(tmp_path, transaction(400, RELATION, Delete(5, row("1", None, None), None)))
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert snapshot.lsn == 400
    assert versions(tmp_path, snapshot, "id") == [(1, 200, 400), (2, 300, None)]


async def test_a_table_of_another_program_in_the_place_of_a_history_stops(tmp_path: Path) -> None:
    await landed(tmp_path, transaction(200, RELATION, Insert(5, row("1", "a", None))))
    columns = {"_deleted": [False], "_lsn": [100], "id": [1], "note": ["a"], "big": [""]}
    write_deltalake(tmp_path / "history/public/t", pa.table(columns))
    write_document(storage(tmp_path), "history.json", {"tables": [["public", "t"]]})
    work, name = applier(tmp_path), history_name(TABLE, ())
    assert "has no versions of rows (hint: remove its directory" in all_rounds(work).stopped[name].error


@pytest.mark.parametrize(("directory", "step"), [("history", write_history_unit), ("log", write_log_part)])
async def test_history_that_others_change_every_time_is_left_out_of_the_round(
    tmp_path: Path, directory: str, step: Callable[..., Any]
) -> None:
    busy = True

    class Disturbed(LocalEngine):
        def each(self, function: Callable[..., Any], items: Sequence[Any], weights: Sequence[int], what: str) -> list[Any]:
            found = super().each(function, items, weights, what)
            if busy and function is step:
                table = DeltaTable(str(tmp_path / directory / "public/t"))
                table.alter.set_table_properties({"delta.dataSkippingNumIndexedCols": str(table.version())})
            return found

    name = history_name(TABLE, ())
    await landed(tmp_path, transaction(200, RELATION, Insert(5, row("1", "a", None))))
    work = Applier(storage(tmp_path), Disturbed(storage(tmp_path)))
    snapshot = all_rounds(work)
    assert (snapshot.lsn, set(snapshot.tables), set(snapshot.stopped)) == (200, {TABLE}, {name})
    assert f"{directory}/public/t was changed by another writer at the same time (5 times)" in snapshot.stopped[name].error
    busy = False
    await landed(tmp_path, transaction(300, RELATION, Insert(5, row("2", "b", None))))
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert versions(tmp_path, snapshot, "id") == [(1, 200, None), (2, 300, None)]


async def test_steps_of_a_long_log_end_with_transactions_and_ended_versions_are_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "_STEP_FILES", 1)
    monkeypatch.setattr(history_module, "_SMALL_FILES", 8)
    work = applier(tmp_path, replace(SMALL, target_rows=200))
    rows = dict.fromkeys(range(30), 0)
    await landed(tmp_path, transaction(200, RELATION, *(Insert(5, row(str(number), "0", None)) for number in rows)))
    all_rounds(work)
    shutil.rmtree(tmp_path / "history")
    for end in range(300, 1500, 100):
        await landed(tmp_path, transaction(end, RELATION, *(Update(5, None, None, row(str(n), str(end), None)) for n in rows)))
        all_rounds(work)
    snapshot = published(tmp_path)
    found = versions(tmp_path, snapshot, "id")
    ends = range(200, 1400, 100)
    assert found == sorted(
        [(n, end, end + 100 if end > 200 else 300) for n in rows for end in ends] + [(n, 1400, None) for n in rows],
        key=repr,
    )
    files = DeltaTable(str(tmp_path / "history/public/t")).file_uris()
    assert len(files) <= 9
    shutil.rmtree(tmp_path / "history")
    snapshot = all_rounds(applier(tmp_path, replace(SMALL, target_rows=200)))
    assert versions(tmp_path, snapshot, "id") == found
    notes = [
        json.loads(entry["userMetadata"]) for entry in DeltaTable(str(tmp_path / "history/public/t")).history() if "userMetadata" in entry
    ]
    assert len([note for note in notes if note["subscriber"] == "history"]) >= 2


async def test_a_history_has_a_name_that_no_table_has(tmp_path: Path) -> None:
    other = TableName("public", "t_history")
    sink = await begun(kept(tmp_path), tables=[TABLE, other])
    own = replace(RELATION, relation_id=6, name="t_history")
    await sink.apply(batch(transaction(200, RELATION, own, Insert(5, row("1", "a", None)), Insert(6, row("2", "b", None)))))
    await sink.close()
    snapshot = all_rounds(applier(tmp_path))
    assert {str(name): table.path for name, table in snapshot.tables.items()} == {
        "public.t": "tables/public/t",
        "public.t_history": "tables/public/t_history",
        "public.t_history_": "history/public/t",
    }
