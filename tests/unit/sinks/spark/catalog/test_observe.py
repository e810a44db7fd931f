"""What ``status`` tells of a lake whose applier does not run, or has failed."""

from __future__ import annotations

from pathlib import Path

from subscriber.abc import TableEntry, TableState
from subscriber.cli.status_text import describe
from subscriber.protocol.messages import Insert
from subscriber.subscription.management.status import subscription_status
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land
from tests.unit.sinks.spark.stream import TABLE, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER_NAME


async def _waiting(path: Path) -> tuple[int, int, str]:
    """The waiting batches and copies, and what the text says of both."""
    (status,) = await subscription_status(f"spark://{path}", [])
    found = status.observation.applier
    assert found is not None
    (line,) = [line for line in describe([status]).splitlines() if line.startswith("  applier  ")]
    return found.waiting_batches, found.waiting_copies, line.split(", ")[-1]


async def test_copies_that_are_not_published_wait(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=())
    await sink.add_tables([TABLE, OTHER_NAME], TableEntry(TableState.INIT))
    assert await _waiting(tmp_path) == (0, 0, "nothing waiting")
    await copy(sink, TABLE, b"1\ta\n", 150)
    assert await _waiting(tmp_path) == (0, 1, "1 copy waiting")
    await copy(sink, OTHER_NAME, b"1\ta\n", 160)
    assert await _waiting(tmp_path) == (0, 2, "2 copies waiting")
    await land(sink, 200, KEYED, Insert(5, row("2", "b")))
    batches, copies, text = await _waiting(tmp_path)
    assert (batches, copies, text.endswith(" bytes and 2 copies waiting")) == (1, 2, True)
    # the files of the copies remain until the change logs have them
    all_rounds(applier(tmp_path))
    assert any((tmp_path / "copy").glob("*/*.parquet"))
    assert await _waiting(tmp_path) == (0, 0, "nothing waiting")
    # the snapshot still has the table from before
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 300)
    assert await _waiting(tmp_path) == (0, 1, "1 copy waiting")
    await land(sink, 400, KEYED, Insert(5, row("3", "c")))
    all_rounds(applier(tmp_path))
    assert await _waiting(tmp_path) == (0, 0, "nothing waiting")
    await sink.close()
