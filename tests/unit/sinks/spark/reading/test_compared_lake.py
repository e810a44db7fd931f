"""What a verification takes for failures of the applier while it waits for a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.catalog.status_files import APPLIER
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.reading.compared_lake import _Failures
from tests.unit.sinks.spark.pipeline.test_applier import storage


def test_failures_are_those_since_the_last_publication_though_the_document_goes(tmp_path: Path) -> None:
    """The bug was that verify broke off with a KeyError when ``applier.json`` was removed."""
    place = storage(tmp_path)
    newest: Snapshot | None = None
    found = _Failures(place)

    def told(**document: Any) -> tuple[str | None, bool]:
        if document:
            write_document(place, APPLIER, document)
        else:
            place.delete([APPLIER])
        return found.look(newest), found.last

    assert told(last_error="old", last_error_time=100.0) == (None, False)
    assert told() == (None, False)
    assert told(last_error="old", last_error_time=100.0) == (None, False)
    assert told(last_error="first", last_error_time=200.0) == ("first", False)
    assert told() == ("first", False)
    assert told(last_error=None, last_error_time=None) == ("first", False)
    assert told(last_error="second", last_error_time=215.0) == ("second", False)
    assert told(last_error="third", last_error_time=229.0) == ("third", False)
    assert told(last_error="fourth", last_error_time=230.0) == ("fourth", True)
    newest = Snapshot(Lsn(200), Lsn(200), {})
    assert told(last_error="fourth", last_error_time=230.0) == (None, False)
