"""The applier as a thread of the subscriber: the subscriber notices its end in every case."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.program import start
from subscriber.sinks.spark.pipeline.program.applier_thread import ApplierThread
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction


def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(location: Location, stop: threading.Event, rest_seconds: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(start, "apply_in_process", broken)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unexpected_error_is_reported_and_the_next_start_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch)
    applier = ApplierThread(Location(path=str(tmp_path), apply="local"))
    for _ in range(2):
        applier.start()
        assert applier._thread is not None
        applier._thread.join(20)
        with pytest.raises(TargetError, match="the applier ended with an unexpected error"):
            applier.start()
    applier.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(60)
async def test_waiting_ends_with_an_error_when_the_applier_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch)
    sink = await begun(make(tmp_path, "?batch_delay=1ms&confirm=applied&apply=local"))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    with pytest.raises(TargetError, match="the applier ended with an unexpected error"):
        await sink.advance(Lsn(200))
    await sink.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_error_of_the_end_is_of_a_run_that_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost: ``--until-caught-up`` had exit status 0 although nothing was applied."""

    def refused(location: Location, stop: threading.Event, rest_seconds: float) -> None:
        stop.wait(20)
        raise TargetError("refused")

    monkeypatch.setattr(start, "apply_in_process", refused)
    applier = ApplierThread(Location(path=str(tmp_path), apply="local"))
    applier.start()
    with pytest.raises(TargetError, match="refused"):
        applier.finish()
    applier.finish()
    # a sink that is closed and opened again begins again
    applier.start()
    applier.stop()
    applier.start()
    applier.stop()
    # also if it ended before
    _broken(monkeypatch)
    applier.start()
    assert applier._thread is not None
    applier._thread.join(20)
    with pytest.raises(TargetError, match="unexpected"):
        applier.finish()
