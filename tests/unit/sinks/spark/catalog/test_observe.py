"""What ``status`` tells of a lake whose applier does not run, or has failed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from subscriber.cli.status_text import describe
from subscriber.errors import TargetError
from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.program import apply_loop
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
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


async def test_last_error_of_the_applier_ends_with_a_round_that_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))

    async def last_error() -> tuple[str | None, bool]:
        (status,) = await subscription_status(f"spark://{tmp_path}", [])
        found = status.observation.applier
        assert found is not None
        return found.last_error, found.last_error_time is not None

    def fail() -> None:
        raise TargetError("no", hint="wait")

    with pytest.raises(TargetError):
        apply_forever(applier(tmp_path), threading.Event(), once=True, check=fail)
    assert await last_error() == ("no (hint: wait)", True)
    # of an earlier process
    apply_forever(applier(tmp_path), threading.Event(), once=True)
    assert await last_error() == (None, False)
    # of the same process; what fails beside the rounds is told until it succeeds
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    monkeypatch.setattr(apply_loop, "_FIRST_RETRY_SECONDS", 0.0)
    stop, work, failures = threading.Event(), applier(tmp_path), [fail]

    def check() -> None:
        if failures:
            failures.pop()()

    def published(_: Snapshot) -> None:
        stop.set()

    apply_forever(work, stop, published, check=check, rest_seconds=60)
    assert not failures
    assert await last_error() == (None, False)
    work = applier(tmp_path)
    work.open()
    work.failed(TargetError("old files remain", hint="see"), "sweep")
    work.failed(None)
    assert await last_error() == ("old files remain (hint: see)", True)
    work.failed(None, "sweep")
    assert await last_error() == (None, False)
    work.close()
