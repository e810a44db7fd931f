"""The applier as a thread of the process that lands, on Spark."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from tests.unit.sinks.spark.pipeline.test_applier import current, storage
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
async def test_landed_batches_are_applied_while_landing_continues(tmp_path: Path, delta: SparkSession) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=1ms&apply=spark"))
    for end in (200, 300):
        described = [RELATION] if end == 200 else []
        await sink.apply(batch(transaction(end, *described, Insert(5, row(str(end), "a", None)))))
        async with asyncio.timeout(200):
            while (snapshot := read_snapshot(storage(tmp_path))) is None or snapshot.lsn < end:
                await asyncio.sleep(0.05)
    assert "applier" in {thread.name for thread in threading.enumerate()}
    assert current(tmp_path) == [(200, "a"), (300, "a")]
    await sink.apply(batch(transaction(400, Update(5, None, None, row("200", "b", None)))))
    await sink.close()
    assert "applier" not in {thread.name for thread in threading.enumerate()}
    assert current(tmp_path) == [(200, "b"), (300, "a")]
    # the session is not the applier's: it stays open
    assert delta.range(3).count() == 3
