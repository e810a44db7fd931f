"""A lake of a test: its applier without Spark, and its rows compared with the publisher's."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.schema.arrow_values import parse_array
from tests.support.database import Database
from tests.support.delta_tables import delta_batches

Place = Path | str
"""A lake: a directory, or the URI of a place in an object store."""


def storage(place: Place) -> Storage:
    return Storage.open(Location(path=str(place)) if isinstance(place, Path) else Location.parse(f"spark+{place}"))


def fill(place: Path) -> Path:
    """Leave no room; gives the file that takes it."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"x" * 4096)
        except OSError:
            return ballast


def apply_all(path: Place, settings: ApplierSettings | None = None) -> Snapshot:
    """Apply what was landed, in this thread."""
    work = Applier(storage(path), LocalEngine(storage(path)), settings)
    work.open()
    try:
        while work.run_round() is not None:
            work.tidy()
    finally:
        work.close()
    snapshot = read_snapshot(storage(path))
    assert snapshot is not None
    return snapshot


def published(path: Place) -> Snapshot:
    """The snapshot that is published now."""
    found = read_snapshot(storage(path))
    assert found is not None
    return found


async def applied(path: Place, settings: ApplierSettings | None = None) -> Snapshot:
    return await asyncio.to_thread(apply_all, path, settings)


def lake_rows(path: Place, snapshot: Snapshot, name: TableName, columns: list[str]) -> Counter[tuple[str | None, ...]]:
    """A table's rows at a snapshot, each value as PostgreSQL's text of it."""
    return Counter(_lake_rows(path, snapshot, name, columns))


def _lake_rows(path: Place, snapshot: Snapshot, name: TableName, columns: list[str]) -> Iterator[tuple[str | None, ...]]:
    table = snapshot.tables[name]
    for batch in delta_batches(DeltaTable(f"{path}/{table.path}", version=table.version)):
        for item in batch.to_pylist():
            special = json.loads(item["_special"] or "{}")
            yield tuple(special.get(column, _text(item[column])) for column in columns)


def publisher_rows(database: Database, name: TableName) -> tuple[list[str], Counter[tuple[str | None, ...]]]:
    """The same of the publisher's table: names of its columns, and its rows."""
    columns, rows = _publisher_rows(database, name)
    return columns, Counter(rows)


def _publisher_rows(database: Database, name: TableName) -> tuple[list[str], Iterator[tuple[str | None, ...]]]:
    relation = f'"{name.namespace}"."{name.name}"'
    columns = [
        column
        for (column,) in database.fetch(
            f"SELECT attname FROM pg_attribute WHERE attrelid = '{relation}'::regclass AND attnum > 0"
            " AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"
        )
    ]
    database.execute("SET TimeZone = 'UTC'; SET extra_float_digits = 3; SET DateStyle = ISO; SET IntervalStyle = postgres")
    types = dict(database.fetch(f"SELECT attname, format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = '{relation}'::regclass"))
    # concat gives what a type's output function does; a cast to text trims character(n)
    texts = ", ".join(f'CASE WHEN "{column}" IS NULL THEN NULL ELSE concat("{column}") END' for column in columns)
    rows = database.stream(f"SELECT {texts} FROM {relation}")
    return columns, (tuple(_canonical(value, types[column]) for value, column in zip(row, columns, strict=True)) for row in rows)


def _canonical(value: str | None, type_: str) -> str | None:
    if value is None:
        return None
    if type_ == "real":
        return repr(struct.unpack("f", struct.pack("f", float(value)))[0])
    if type_ == "double precision":
        return repr(float(value))
    if type_.endswith("[]") and (elements := parse_array(value)) is not None and not value.startswith(("{{", "[")):
        return json.dumps(elements)
    return value


def _text(value: Any) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "t" if value else "f"
        case float():
            # of single precision it is the shortest text that matters
            return repr(value)
        case bytes():
            return "\\x" + value.hex()
        case datetime():
            text = value.replace(tzinfo=None).isoformat(sep=" ")
            text = text.rstrip("0") if "." in text else text
            return text + ("+00" if value.tzinfo is not None else "")
        case date():
            return value.isoformat()
        case Decimal():
            return format(value, "f")
        case list():
            return json.dumps([None if element is None else _text(element) for element in value])
        case _:
            return str(value)


def assert_same(path: Place, snapshot: Snapshot, database: Database, names: list[TableName]) -> None:
    """The lake at a snapshot has the publisher's rows of now."""
    for name in names:
        columns, expected = publisher_rows(database, name)
        found = lake_rows(path, snapshot, name, columns)
        assert found == expected, f"{name}: {_difference(columns, found - expected, expected - found)}"


def assert_same_large(path: Place, snapshot: Snapshot, database: Database, name: TableName) -> None:
    """The same of a table whose rows are too many to have in memory twice: nothing is kept of a row but its hash."""
    columns, rows = _publisher_rows(database, name)
    expected = Counter(map(hash, rows))
    found = Counter(map(hash, _lake_rows(path, snapshot, name, columns)))
    assert found == expected, f"{name}: {(found - expected).total()} rows that should not be there, {(expected - found).total()} missing"


def _difference(columns: list[str], wrong: Counter[tuple[str | None, ...]], missing: Counter[tuple[str | None, ...]]) -> str:
    for row in sorted(wrong, key=repr):
        for other in missing:
            if row[0] == other[0]:
                return ", ".join(f"{c}: {a!r} instead of {b!r}" for c, a, b in zip(columns, row, other, strict=True) if a != b)
    return f"{len(wrong)} rows that should not be there, {len(missing)} that are missing"
