"""Two engines take turns on the same tables, and the Delta jar reads what any of them wrote."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Update
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from tests.support.delta_tables import delta_rows
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def engine_of(name: str, spark: SparkSession, path: Path) -> Engine:
    """Engine ``local``; or ``spark``, whose units rewrite files, or which merges all tables."""
    from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine

    if name == "local":
        return LocalEngine(storage(path))
    return SparkEngine(spark, Location(path=str(path)), merges_all=name == "merge")


def operations(path: Path, snapshot: Snapshot, name: str) -> Counter[str]:
    """What made the table's versions, by Delta's own names."""
    table = snapshot.tables[TableName("public", name)]
    return Counter(str(entry["operation"]) for entry in DeltaTable(str(path / table.path)).history())


def applied_lsn(path: Path, name: str) -> int | None:
    """What the table's newest version says that it was brought to."""
    lake = Lake.find(storage(path))
    assert lake is not None
    table = lake.state.tables[TableName("public", name)]
    opened = DeltaTable(str(path / "tables/public" / name))
    return opened.transaction_version(f"subscriber-{lake.target_identifier}-{table.id}-{table.generation}")


def by_the_jar(spark: SparkSession, path: Path, snapshot: Snapshot) -> dict[str, Counter[tuple[Any, ...]]]:
    """All tables at a snapshot, as Spark with the Delta jar has them: every column, ``_special`` included."""
    found = {}
    for name, table in snapshot.tables.items():
        frame = spark.read.format("delta").option("versionAsOf", table.version).load(str(path / table.path))
        found[name.name] = Counter(tuple(map(_plain, entry)) for entry in frame.collect())
    return found


def by_delta_rs(path: Path, snapshot: Snapshot) -> dict[str, Counter[tuple[Any, ...]]]:
    found = {}
    for name, table in snapshot.tables.items():
        rows = delta_rows(DeltaTable(str(path / table.path), version=table.version))
        found[name.name] = Counter(tuple(map(_plain, item.values())) for item in rows)
    return found


def _plain(value: Any) -> Any:
    # Spark gives moments in the process's zone, NaN is not equal to itself, and -0 is to 0
    return str(value.replace(tzinfo=None)) if hasattr(value, "tzinfo") else repr(value) if isinstance(value, float | list) else value


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.endurance)])
async def test_engines_take_turns_and_the_rows_are_the_publishers(tmp_path: Path, delta: SparkSession, seed: int) -> None:
    delta.conf.set("spark.sql.session.timeZone", "UTC")
    publisher = Publisher(seed)
    dice = random.Random(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    snapshot: Snapshot | None = None
    ends: set[int | None] = set()
    for number in range(8):
        for _ in range(dice.randrange(1, 4)):
            await sink.apply(batch(publisher.transaction(dice.randrange(5, 40))))
            await sink.advance(Lsn(publisher.end))
        name = "merge" if number % 2 else dice.choice(["units", "local"])
        # a new one each time: nothing is known but what the tables say
        work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path), ApplierSettings(target_rows=120, log_files=10))
        snapshot = all_rounds(work)
        assert snapshot.lsn == publisher.end
        assert read(tmp_path, snapshot) == publisher.rows(), (number, name)
        assert by_the_jar(delta, tmp_path, snapshot) == by_delta_rs(tmp_path, snapshot), (number, name)
        assert work.missing.updates + work.missing.deletes == 0
        ends.add(publisher.end)
        found = [applied_lsn(tmp_path, changed) for changed in ("keyed", "pairs", "full", "log")]
        assert set(found) <= ends  # of the last round that had changes of it
        assert publisher.end in found
        work.tidy()
    await sink.close()
    assert snapshot is not None
    assert operations(tmp_path, snapshot, "keyed")["MERGE"] > 0
    assert operations(tmp_path, snapshot, "pairs")["MERGE"] > 0


async def one_round_behind(path: Path, spark: SparkSession) -> Applier:
    """An applier that merges, and the changes of its second round."""
    sink = await begun(make(path))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), "a", None)) for n in range(5)))))
    await sink.advance(Lsn(200))
    work = Applier(storage(path), engine_of("merge", spark, path), ApplierSettings(target_rows=30))
    all_rounds(work)
    await sink.apply(batch(transaction(300, Update(5, None, None, row("1", "b", None)), Insert(5, row("9", "c", None)))))
    await sink.close()
    return work


async def test_a_round_that_died_behind_its_merge_is_not_merged_again(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher

    work = await one_round_behind(tmp_path, delta)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotPublisher, "publish", killed)
        with pytest.raises(Killed):
            work.run_round()
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    version = table.version()
    assert applied_lsn(tmp_path, "t") == 300
    snapshot = all_rounds(Applier(storage(tmp_path), engine_of("merge", delta, tmp_path)))
    assert (snapshot.lsn, snapshot.tables[TABLE].version) == (300, version)
    assert operations(tmp_path, snapshot, "t")["MERGE"] == 1


async def test_merge_whose_answer_was_lost_is_not_merged_again(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine

    work = await one_round_behind(tmp_path, delta)
    assert work.room() == 0.0
    merge = SparkEngine._merge

    def answer_lost(*arguments: Any) -> None:
        merge(*arguments)
        raise TargetUnavailable("the Spark job failed: connection reset")

    with monkeypatch.context() as patched:
        patched.setattr(SparkEngine, "_merge", answer_lost)
        snapshot = all_rounds(work)
    assert (snapshot.lsn, snapshot.stopped) == (300, {})
    assert operations(tmp_path, snapshot, "t")["MERGE"] == 1
    assert applied_lsn(tmp_path, "t") == 300
    assert work.room() == 0.0, "its files are no other program's"


async def test_columns_come_and_go_and_change_their_types_under_merge(tmp_path: Path, delta: SparkSession) -> None:
    columns = (Column("id", 23, -1, True), Column("d", 1082, -1, True), Column("note", 23, -1, False))
    before = Relation(5, "public", "t", "d", columns)
    wider = Relation(5, "public", "t", "d", (*columns, Column("more", 1184, -1, False)))
    widened = Relation(5, "public", "t", "d", (*columns[:2], Column("note", 20, -1, False), wider.columns[3]))
    narrow = Relation(5, "public", "t", "d", (*columns[:2], wider.columns[3]))
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), engine_of("merge", delta, tmp_path), ApplierSettings(target_rows=30))
    infinite, ancient = row("1", "infinity", "1"), row("2", "0044-03-15 BC", "2")
    steps: list[tuple[Relation, list[Any]]] = [
        (before, [Insert(5, infinite), Insert(5, ancient), Insert(5, row("1", "2024-01-01", "3"))]),
        (before, [Update(5, None, None, row("1", "infinity", "10")), Insert(5, row("1", "-infinity", "4"))]),
        (wider, [Update(5, None, None, row("2", "0044-03-15 BC", "20", "1000-01-01 00:00:00+00"))]),
        (widened, [Update(5, None, None, row("1", "2024-01-01", "5000000000", None))]),
        (narrow, [Update(5, None, None, row("1", "-infinity", "2024-05-06 07:08:09.123456+00"))]),
    ]
    end = 200
    for relation, changes in steps:
        await sink.apply(batch(transaction(end, relation, *changes)))
        await sink.advance(Lsn(end))
        snapshot = all_rounds(work)
        assert by_the_jar(delta, tmp_path, snapshot) == by_delta_rs(tmp_path, snapshot)
        end += 10
    await sink.close()
    rows = delta_rows(DeltaTable(str(tmp_path / "tables/public/t")))
    found = sorted((item["id"], item["_special"] or str(item["d"]), item["note"], str(item["more"])) for item in rows)
    assert found == [
        (1, "2024-01-01", None, "None"),
        (1, '{"d": "-infinity"}', None, "2024-05-06 07:08:09.123456+00:00"),
        (1, '{"d": "infinity"}', None, "None"),
        (2, '{"d": "0044-03-15 BC"}', None, "1000-01-01 00:00:00+00:00"),
    ]


async def test_merges_even_if_the_first_key_column_divides_nothing(tmp_path: Path, delta: SparkSession) -> None:
    target = 20
    tenants = Relation(5, "public", "t", "d", (Column("tenant", 23, -1, True), Column("id", 23, -1, True)))
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), engine_of("merge", delta, tmp_path), ApplierSettings(target_rows=target))
    snapshot = None
    for number in range(5):
        new = range(number * 40, number * 40 + 40)
        await sink.apply(batch(transaction(200 + 100 * number, tenants, *(Insert(5, row("1", str(n))) for n in new))))
        await sink.advance(Lsn(200 + 100 * number))
        snapshot = all_rounds(work)
    await sink.close()
    assert snapshot is not None
    assert operations(tmp_path, snapshot, "t")["MERGE"] == 4
    assert sorted(DeltaTable(str(tmp_path / "tables/public/t")).to_pyarrow_table()["id"].to_pylist()) == list(range(200))


async def test_what_others_allow_a_table_to_have_does_not_hide_rows(tmp_path: Path, delta: SparkSession) -> None:
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), engine_of("merge", delta, tmp_path))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), "a", None)) for n in range(50)))))
    await sink.advance(Lsn(200))
    all_rounds(work)
    delta.sql(f"ALTER TABLE delta.`{tmp_path}/tables/public/t` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    snapshot: Snapshot | None = None
    # the second round finds nothing but what the first left
    for end, changes in (
        (300, [Delete(5, row("5", None, None), None)]),
        (400, [Insert(5, row("5", "again", None)), Update(5, None, None, row("6", "b", None))]),
    ):
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        snapshot = all_rounds(work)
    await sink.close()
    assert snapshot is not None
    assert operations(tmp_path, snapshot, "t")["MERGE"] == 2
    table = delta.read.format("delta").load(f"{tmp_path}/tables/public/t").select("id", RELATION.columns[1].name)
    assert sorted(map(tuple, table.collect())) == sorted((dict.fromkeys(range(50), "a") | {5: "again", 6: "b"}).items())


@pytest.mark.parametrize(
    ("type_oid", "keys"),
    [
        (20, ["1", "3", "-9223372036854775808", "9223372036854775807"]),
        (701, ["0", "1.5", "NaN", "Infinity", "-Infinity", "1e-300"]),
        (1700, ["0.10", "NaN", "-99999999.99"]),
        (25, ["", " ", "a", "a ", "A", "\u00e9", "e\u0301"]),
        (1184, ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "2024-01-02 03:04:05.678901+00"]),
        (17, ["\\x", "\\x00", "\\x0001"]),
        (2950, ["00000000-0000-0000-0000-000000000001", "ffffffff-ffff-ffff-ffff-ffffffffffff"]),
    ],
)
async def test_rows_of_odd_keys_are_found_where_nothing_is_inserted(
    tmp_path: Path, delta: SparkSession, type_oid: int, keys: list[str]
) -> None:
    modifier = ((10 << 16) | 2) + 4 if type_oid == 1700 else -1
    columns = (Column("id", type_oid, modifier, True), Column("part", 25, -1, True), Column("v", 25, -1, False))
    relation = Relation(5, "public", "t", "d", columns)
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), engine_of("merge", delta, tmp_path))
    others = [] if type_oid in {1184, 17, 2950} else ["2"]
    values = dict.fromkeys([*keys, *others], "before")
    await sink.apply(batch(transaction(200, relation, *(Insert(5, row(key, "a", value)) for key, value in values.items()))))
    await sink.advance(Lsn(200))
    all_rounds(work)
    await sink.apply(batch(transaction(300, *(Update(5, None, None, row(key, "a", "after")) for key in keys))))
    await sink.advance(Lsn(300))
    snapshot = all_rounds(work)
    await sink.close()
    merged = DeltaTable(str(tmp_path / "tables/public/t")).history()[0]
    assert (merged["operation"], merged["operationParameters"]["notMatchedPredicates"]) == ("MERGE", "[]")
    assert work.missing.updates == 0
    rows = delta_rows(DeltaTable(str(tmp_path / "tables/public/t")))
    assert sorted(item["v"] for item in rows) == ["after"] * len(keys) + ["before"] * len(others)
    assert by_the_jar(delta, tmp_path, snapshot) == by_delta_rs(tmp_path, snapshot)


@pytest.mark.parametrize("type_oid", [700, 701, 1022])
# units are the same code as engine local
@pytest.mark.parametrize("name", ["local", pytest.param("units", marks=pytest.mark.endurance), "merge"])
async def test_a_key_goes_from_a_value_to_one_that_compares_equal(tmp_path: Path, delta: SparkSession, name: str, type_oid: int) -> None:
    # float4, float8, float8[]: the publisher compares the values' bytes to know whether it has to send the old key
    minus, zero, nan = ("{-0}", "{0}", "{NaN}") if type_oid == 1022 else ("-0", "0", "NaN")
    columns = (Column("id", type_oid, -1, True), Column("part", 25, -1, True), Column("v", 25, -1, False), Column("w", 25, -1, False))
    relation = Relation(5, "public", "t", "d", columns)
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path))
    there = dict(zip("abcde", (minus, zero, minus, nan, zero), strict=True))
    await sink.apply(batch(transaction(200, relation, *(Insert(5, row(key, part, "kept", "1")) for part, key in there.items()))))
    await sink.advance(Lsn(200))
    all_rounds(work)
    changes: list[Message] = [
        Update(5, row(minus, "a", None, None), None, row(zero, "a", "unchanged", "2")),
        Update(5, row(zero, "b", None, None), None, row(minus, "b", "unchanged", "2")),
        Update(5, None, None, row(minus, "c", "unchanged", "2")),
        Update(5, row(nan, "d", None, None), None, row(nan, "d", "unchanged", "2")),
        Delete(5, row(zero, "e", None, None), None),
        Insert(5, row(minus, "e", "new", "2")),
    ]
    await sink.apply(batch(transaction(300, *changes)))
    await sink.advance(Lsn(300))
    snapshot = all_rounds(work)
    await sink.close()
    assert operations(tmp_path, snapshot, "t")["MERGE"] == (name == "merge")
    assert work.missing.updates + work.missing.deletes == 0
    rows = delta_rows(DeltaTable(str(tmp_path / "tables/public/t")))
    expected = {"a": "0.0", "b": "-0.0", "c": "-0.0", "d": "nan", "e": "-0.0"}
    found = sorted((item["part"], str(item["id"]).strip("[]"), item["v"], item["w"]) for item in rows)
    assert found == [(part, key, "new" if part == "e" else "kept", "2") for part, key in expected.items()]
    assert by_the_jar(delta, tmp_path, snapshot) == by_delta_rs(tmp_path, snapshot)
