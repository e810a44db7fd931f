"""How much of a table one unit of work has in memory, where ALTER TABLE comes amid its changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from subscriber.errors import SubscriberError
from subscriber.protocol.messages import Delete, Insert, Message, Relation, Update
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import TableResult, TableRound
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_rounds import Identity, land, relation, rows
from tests.unit.sinks.spark.stream import begun, make, row

pytestmark = pytest.mark.slow

FILES = 10
ROWS = 100


class Recording(LocalEngine):
    """Remembers what the last round was given."""

    units: Sequence[Unit] = ()
    works: Sequence[TableRound] = ()

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        self.works = works
        return super().apply(works)

    def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
        self.units = units
        return super().run(units)


def columns(identity: Identity, *extra: tuple[str, int], note: int = 23) -> Relation:
    full = identity == "f"
    return relation(identity, ("id", 23, True), ("note", note, full), *((name, oid, full) for name, oid in extra))


def applying(path: Path) -> tuple[Applier, Recording]:
    engine = Recording(storage(path))
    return Applier(storage(path), engine, ApplierSettings(target_rows=ROWS // FILES)), engine


async def filled(path: Path, described: Relation, *values: str) -> OpenedSparkSink:
    sink = await begun(make(path))
    await land(sink, 200, described, *(Insert(5, row(str(number), "7", *values)) for number in range(ROWS)))
    work, engine = applying(path)
    all_rounds(work)
    assert len(engine.units) == FILES
    return sink


PLAIN = columns("d")
EXTRA = columns("d", ("extra", 23))
MARKED = Update(5, None, None, row("55", "8"))


@pytest.mark.parametrize(
    ("before", "values", "messages"),
    [
        (PLAIN, (), [columns("d", note=25), MARKED]),
        (EXTRA, ("1",), [PLAIN, MARKED]),
        (EXTRA, ("1",), [PLAIN, MARKED, EXTRA, Insert(5, row("1000", "7", "2"))]),
        (columns("f", ("extra", 23)), ("1",), [columns("f"), Update(5, None, row("55", "7"), row("55", "8"))]),
        (
            PLAIN,
            (),
            [columns("d", note=20), MARKED, columns("f", note=20), Delete(5, None, row("5", "7")), Delete(5, None, row("55", "8"))],
        ),
    ],
    ids=["type", "drop", "drop and add", "full", "type and identity"],
)
async def test_unit_has_one_file_where_all_files_are_rewritten(
    tmp_path: Path, before: Relation, values: tuple[str, ...], messages: list[Message]
) -> None:
    sink = await filled(tmp_path, before, *values)
    await land(sink, 300, *messages)
    await sink.close()
    work, engine = applying(tmp_path)
    all_rounds(work)
    assert len(engine.units) == FILES
    assert {len(unit.base) for unit in engine.units} == {1}
    found = {one[0]: one[1:] for one in rows(tmp_path, ("id", "note", *(column.name for column in before.columns[2:])))}
    gone = {5, 55} if any(isinstance(message, Delete) for message in messages) else set()
    assert set(found) - {1000} == set(range(ROWS)) - gone
    extra = (None,) if values else ()
    kind = str if any(isinstance(message, Relation) and message.columns[1].type_oid == 25 for message in messages) else int
    assert {found[number] for number in range(ROWS) if number not in {5, 55}} == {(kind(7), *extra)}
    if not gone:
        assert found[55] == (kind(8), *extra)
    assert work.missing == MissingRows()


async def test_where_the_identity_changes_only_files_that_are_touched_are_read(tmp_path: Path) -> None:
    sink = await filled(tmp_path, PLAIN)
    await land(sink, 300, PLAIN, MARKED, columns("f"), Delete(5, None, row("55", "8")), Delete(5, None, row("95", "7")))
    await sink.close()
    work, engine = applying(tmp_path)
    all_rounds(work)
    assert [len(unit.base) for unit in engine.units] == [1, 1]
    assert {one[0] for one in rows(tmp_path)} == set(range(ROWS)) - {55, 95}
    assert work.missing == MissingRows()


async def test_a_new_column_that_a_killed_round_left_divides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await filled(tmp_path, PLAIN)
    await land(sink, 300, PLAIN, MARKED, EXTRA, Update(5, None, None, row("56", "8", "9")))
    await sink.close()
    work, _ = applying(tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            work.run_round()
    work, engine = applying(tmp_path)
    all_rounds(work)
    assert [(len(unit.base), len(unit.stretches)) for unit in engine.units] == [(1, 1)]
    assert set(rows(tmp_path, ("id", "note", "extra"))) >= {(54, 7, None), (55, 8, None), (56, 8, 9)}


WIDER = relation("d", ("id", 20, True), ("note", 23, False))
ANOTHER = relation("i", ("id", 23, False), ("note", 23, True))


@pytest.mark.parametrize(
    "messages", [[WIDER, MARKED], [PLAIN, Insert(5, row("1000", "1000")), ANOTHER, Delete(5, row(None, "1000"), None)]]
)
async def test_a_table_that_the_first_key_column_cannot_divide_is_one_unit(tmp_path: Path, messages: list[Message]) -> None:
    sink = await filled(tmp_path, PLAIN)
    await land(sink, 300, *messages)
    await sink.close()
    work, engine = applying(tmp_path)
    all_rounds(work)
    assert [len(unit.base) for unit in engine.units] == [FILES]
    assert {one[0] for one in rows(tmp_path)} == set(range(ROWS))
    assert work.missing == MissingRows()


async def test_a_plan_counts_the_rows_of_each_unit(tmp_path: Path) -> None:
    sink = await filled(tmp_path, PLAIN)
    inserts = [Insert(5, row(str(number), "7")) for number in (-1, *range(1000, 1005))]
    await land(sink, 300, PLAIN, *inserts, MARKED, Delete(5, row("95", None), None), Delete(5, row("41", None), None))
    await sink.close()
    work, engine = applying(tmp_path)
    all_rounds(work)
    (of_table,) = engine.works
    # of each unit, the rows of its files and its changes
    # a file whose keys no change has is not read
    assert [unit.rows for unit in of_table.plan.units] == [1, 11, 11, 16]
    assert {one[0] for one in rows(tmp_path)} == {*range(-1, ROWS), *range(1000, 1005)} - {41, 95}


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("identity", ["d", "f"])
async def test_large_file_of_another_writer_is_divided_by_keys(tmp_path: Path, identity: Identity, vectors: bool) -> None:
    """A task must not hold all of it in memory."""
    sink = await filled(tmp_path, columns(identity))
    DeltaTable(str(tmp_path / "tables/public/t")).optimize.compact(target_size=10**9)
    await land(
        sink,
        300,
        *(Update(5, None, row(str(number), "7") if identity == "f" else None, row(str(number), "8")) for number in range(0, ROWS, 3)),
    )
    await land(
        sink, 400, Insert(5, row("1000", "9")), Delete(5, None, row("50", "7")) if identity == "f" else Delete(5, row("50", None), None)
    )
    await sink.close()
    engine = Recording(storage(tmp_path))
    work = Applier(storage(tmp_path), engine, ApplierSettings(target_rows=ROWS // FILES, vectors=vectors))
    all_rounds(work)
    assert len(engine.units) >= 3
    assert all(len(unit.base) == 1 and unit.base[0].shared for unit in engine.units)
    expected = {number: 7 if number % 3 else 8 for number in range(ROWS) if number != 50} | {1000: 9}
    assert sorted(rows(tmp_path)) == sorted(expected.items())
    assert work.missing == MissingRows()
    # from now on its rows are in files of their own
    assert len(DeltaTable(str(tmp_path / "tables/public/t")).file_uris()) >= 10
