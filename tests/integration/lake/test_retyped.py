"""ALTER COLUMN … TYPE at a real publisher: where the lake takes values for unchanged, rows are found by them afterwards."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psycopg
import pytest

from subscriber import TableName, Until
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.schema.type_changes import keeps_texts
from tests.integration.lake.test_replica import subscription
from tests.support.database import Database
from tests.support.lakes import lake_rows, published, storage

_DAYS = ("2024-01-02", "infinity", "-infinity", "0044-03-15 BC", "20000-01-01")
_MOMENTS = ("2024-01-02 03:04:05", "2024-01-02 03:04:05.6", "2024-01-02 03:04:05.123456", *_DAYS[1:])
_NUMBERS = ("1", "-7", "120")
_WORDS = ("ab", "", "a b", "ä", "x'y")
VALUES = {
    **dict.fromkeys(["smallint", "integer", "bigint", "numeric(10,0)"], _NUMBERS),
    **dict.fromkeys(["real", "double precision"], ("0.1", "1.5", "7", "NaN", "-Infinity", "1e20", "-0", "1e-7", "123456789")),
    **dict.fromkeys(["numeric(10,2)", "numeric(12,3)", "numeric(50,2)"], ("1.5", "2", "-0.01", "NaN")),
    "numeric": ("1.5", "1.50", "2", "NaN", "Infinity", "1e30"),
    "numeric(5,-2)": ("1200", "-100"),
    "oid": ("1", "4000000000"),
    "boolean": ("true", "false"),
    "date": _DAYS,
    **dict.fromkeys(["timestamp", "timestamp(0)", "timestamp(3)", "timestamptz", "timestamptz(3)"], _MOMENTS),
    **dict.fromkeys(["time", "time(3)", "timetz"], ("03:04:05", "03:04:05.123456")),
    "interval": ("1 day 02:03:04", "1 year"),
    **dict.fromkeys(["text", "varchar", "varchar(30)", "varchar(40)", "char(30)", "name"], _WORDS),
    **dict.fromkeys(["varbit", "varbit(20)", "bit(3)"], ("101",)),
    "bytea": ("\\x6100", "\\x"),
    "uuid": ("00000000-0000-0000-0000-00000000000a",),
    **dict.fromkeys(["json", "jsonb"], ('{"b":1, "a": [1.0]}', "null")),
    **dict.fromkeys(["integer[]", "bigint[]"], ("{1,NULL}", "{}", "{{1,2},{3,4}}", "[2:3]={1,2}")),
    **dict.fromkeys(["numeric(10,2)[]", "numeric[]"], ("{1.5,NULL}", "{NaN}", "{{1.5}}")),
    **dict.fromkeys(["text[]", "varchar(30)[]"], ('{a,"b c",NULL}', '{"NULL",""}')),
    "real[]": ("{0.1}", "{{0.1}}"),
    "double precision[]": ("{0.1}",),
    "boolean[]": ("{t,f}",),
    "date[]": ("{2024-01-02}", "{infinity}"),
    "timestamp[]": ("{2024-01-02 03:04:05.6}", "{infinity}"),
    "bytea[]": ('{"\\\\x6100"}',),
    "inet": ("10.0.0.1", "10.0.0.0/8"),
}
TYPES = tuple(VALUES)
_PARTS = 4
"""Each has its share of the pairs. One runs on each change."""


def _declarations(publisher: Database) -> dict[str, tuple[int, int]]:
    publisher.execute("CREATE TABLE declared (" + ", ".join(f"c{number} {name}" for number, name in enumerate(TYPES)) + ")")
    found = publisher.fetch(
        "SELECT atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 'declared'::regclass AND attnum > 0 ORDER BY attnum"
    )
    return dict(zip(TYPES, [(oid, modifier) for oid, modifier in found], strict=True))


def _kept(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return before != after and keeps_texts(*before, *after)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.endurance) for part in range(1, _PARTS))])
async def test_rows_are_found_by_values_that_are_taken_for_unchanged(publisher18_db: Database, tmp_path: Path, part: int) -> None:
    publisher, lake = publisher18_db, tmp_path / "lake"
    declared = _declarations(publisher)
    pairs = [(one, other) for one in TYPES for other in TYPES if _kept(declared[one], declared[other])]
    assert len(pairs) > 100
    pairs = pairs[part::_PARTS]
    with psycopg.connect(publisher.dsn, autocommit=True) as session:
        session.execute("SET TimeZone = 'Europe/Berlin'")
        altered: dict[str, tuple[str, str]] = {}
        for number, (one, other) in enumerate(pairs):
            name = f"t{number}"
            session.execute(f"CREATE TABLE {name} (id int, v {one}); ALTER TABLE {name} REPLICA IDENTITY FULL")
            for row, value in enumerate(VALUES[one]):
                session.execute(f"INSERT INTO {name} VALUES ({row}, %s)", (value,))
            altered[name] = one, other
        session.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(altered)}")
        await subscription(publisher, lake).run(Until())
        work = Applier(storage(lake), LocalEngine(storage(lake)))
        while work.run_round() is not None:
            pass
        for name, (one, _) in altered.items():
            assert sum(lake_rows(lake, published(lake), TableName("public", name), ["id"]).values()) == len(VALUES[one])
        for name, (_, other) in list(altered.items()):
            # where there is no such cast, or not of these values, nothing happens
            with contextlib.suppress(psycopg.errors.DatatypeMismatch, psycopg.errors.DataError):
                session.execute(f"ALTER TABLE {name} ALTER v TYPE {other}")
                continue
            del altered[name]
        for name in altered:
            session.execute(f"DELETE FROM {name}")
    await subscription(publisher, lake).run(Until())
    while work.run_round() is not None:
        pass
    snapshot = published(lake)
    wrong = {pair: left for name, pair in altered.items() if (left := lake_rows(lake, snapshot, TableName("public", name), ["id", "v"]))}
    assert not wrong
    assert len(altered) > len(pairs) * 0.9
    assert work.missing == MissingRows()
