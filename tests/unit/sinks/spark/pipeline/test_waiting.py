"""What waits for the next round, and the end of the thread that registers snapshots."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.landing.manifest import Manifest
from subscriber.sinks.spark.pipeline.pace import Waiting
from subscriber.sinks.spark.pipeline.registration import CatalogRegistration
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land
from tests.unit.sinks.spark.stream import begun, make, row


async def test_look_for_other_writers_does_not_bring_forward_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    assert work.waiting() is None
    work._next_look = 0.0
    assert work.waiting() == Waiting(0.0)
    moment = time.time() - 5
    monkeypatch.setattr(Manifest, "since", property(lambda _: moment))
    await land(sink, 300, Insert(5, row("2", "a")))
    found = work.waiting()
    assert found is not None
    assert (found.since, found.size > 0) == (moment, True)
    # the publisher's clock is ahead
    monkeypatch.setattr(Manifest, "since", property(lambda _: moment + 3600))
    found = work.waiting()
    assert found is not None
    assert found.since <= time.time()
    await sink.close()


def test_registration_ends_if_it_is_stopped_at_any_moment(tmp_path: Path) -> None:
    registration = CatalogRegistration(cast("Any", Mock()), storage(tmp_path), "catalog.lake", lambda _: None)

    class StoppedAfterLook(threading.Event):
        def is_set(self) -> bool:
            found = super().is_set()
            self.set()
            registration._wake.set()
            return found

    registration._stop = StoppedAfterLook()
    thread = threading.Thread(target=registration._run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
