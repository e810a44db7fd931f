"""Documents of a verification that a crash of the machine has damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.catalog.snapshot_requests import RequestState
from subscriber.protocol.messages import Insert
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land
from tests.unit.sinks.spark.stream import begun, make, row


@pytest.mark.parametrize("content", [b"", b"\0" * 80], ids=["empty", "zeros"])
async def test_documents_that_are_not_durable_stop_nothing_when_they_are_damaged(tmp_path: Path, content: bytes) -> None:
    sink = await begun(make(tmp_path))
    for name in ("boundary.json", "snapshot_request.json", "snapshot_answer.json"):
        (tmp_path / name).write_bytes(content)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    assert all_rounds(applier(tmp_path)).lsn == 200
    requests = sink.requests
    assert requests is not None
    assert await requests.read() is None
    await requests.put("one", {})
    assert await requests.change("one", only_from=RequestState.REQUESTED, to=RequestState.DONE)
    await sink.close()
