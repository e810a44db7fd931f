"""The data sources without a JVM: their classes do what Spark asks of them."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import ConfigurationError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, start
from tests.unit.sinks.spark.stream import row

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")

pytestmark = pytest.mark.spark


def source(path: Path, **options: str) -> Any:
    from subscriber.sinks.spark.reading.data_sources import PostgresSnapshot

    return PostgresSnapshot({"path": str(path), "table": "public.t", **options})


def rows_of(found: Any, schema: Any = None) -> list[tuple[Any, ...]]:
    reader = found.reader(found.schema() if schema is None else schema)
    batches = [batch for part in reader.partitions() for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(part)))]
    return sorted((item["id"], item["note"]) for batch in batches for item in batch.to_pylist())


async def test_dataframe_stays_at_the_snapshot_that_it_was_loaded_with(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    loaded = source(tmp_path)
    schema = loaded.schema()
    before = datetime.now(UTC)
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    snapshot = all_rounds(work)
    assert snapshot.published is not None
    # Spark pickles the object between its calls
    assert rows_of(pickle.loads(pickle.dumps(loaded)), schema) == [(1, "a")]
    assert rows_of(source(tmp_path)) == [(1, "a"), (2, "b")]
    assert rows_of(source(tmp_path, asOfLsn=str(Lsn(299)))) == [(1, "a")]
    assert rows_of(source(tmp_path, asOfTimestamp=before.isoformat())) == [(1, "a")]
    assert rows_of(source(tmp_path, asOfTimestamp=snapshot.published.replace(tzinfo=None).isoformat())) == [(1, "a"), (2, "b")]
    early = {"asOfLsn": "0/1"}, {"asOfTimestamp": (before - timedelta(days=1)).isoformat()}
    for options in early:
        with pytest.raises(TargetError, match="no published snapshot at or before"):
            source(tmp_path, **options).schema()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"asOfLsn": "7"}, "pg_lsn"),
        ({"asOfTimestamp": "yesterday"}, "not in the form of ISO 8601"),
        ({"asOfLsn": "0/1", "asOfTimestamp": "2026-01-01"}, "not both"),
        ({"table": ""}, "needs options path and table"),
        ({"table": "accounts"}, 'option table of postgres_snapshot: "accounts" does not have the form schema.table'),
        ({"table": "public."}, "does not have the form schema.table"),
        ({"versionAsOf": "1"}, "unrecognized option of postgres_snapshot"),
    ],
)
async def test_bad_options_are_named(tmp_path: Path, options: dict[str, str], words: str) -> None:
    sink, _ = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    with pytest.raises(ConfigurationError, match=words):
        source(tmp_path, **options).schema()


async def test_table_that_is_not_in_the_snapshot_is_named(tmp_path: Path) -> None:
    sink, _ = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    with pytest.raises(TargetError, match=r'table "public.u" is not in the snapshot at 0/C8'):
        source(tmp_path, table="public.u").schema()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"startingLsn": "latest"},
            'startingLsn: "latest" is not valid: it is "earliest", or an LSN as in 16/B374D848; "latest" is for streams',
        ),
        ({"startingLsn": "now"}, 'startingLsn: "now" is not valid: it is "earliest", or an LSN as in 16/B374D848'),
        ({"endingLsn": "latest"}, 'endingLsn: "latest" is not valid: it is an LSN as in 16/B374D848'),
    ],
)
async def test_bad_lsns_of_a_batch_of_changes(tmp_path: Path, options: dict[str, str], words: str) -> None:
    from subscriber.sinks.spark.reading.data_sources import PostgresChanges

    sink, _ = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    changes = PostgresChanges({"path": str(tmp_path), "table": "public.t", **options})
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        changes.reader(changes.schema())
