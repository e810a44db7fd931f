"""The verb's side of a request for snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from subscriber.catalog.snapshot_requests import RequestState, error_answer
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableEntry, TableName
from subscriber.sinks.request_files import RequestFiles
from subscriber.subscription.comparison import snapshot_request
from subscriber.subscription.comparison.snapshot_request import Asker
from subscriber.verification.model import Quiet


async def _no_entries() -> Mapping[TableName, TableEntry]:
    return {}


async def test_process_that_ends_while_it_holds_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that the verb waited for ever."""
    monkeypatch.setattr(snapshot_request, "_HELD_SECONDS", 0.0)
    requests = RequestFiles(tmp_path, entries=_no_entries)
    asker = Asker(requests, "s", Quiet())
    await requests.put("one", {"kind": "snapshot"})
    # what the process says last
    await requests.change("one", only_from=RequestState.REQUESTED, to=RequestState.HELD, answer={"lsn": "0/1"})
    async with asyncio.timeout(10):
        with pytest.raises(TargetUnavailable, match="ended while apply was held"):
            await asker.held_seconds("one")


@pytest.mark.parametrize("waits", [True, False])
async def test_error_of_the_process_after_the_snapshots_are_open(tmp_path: Path, waits: bool) -> None:
    """The bug was that the verb reported what followed from it: the publisher has no such snapshot."""
    requests = RequestFiles(tmp_path, entries=_no_entries)
    asker = Asker(requests, "s", Quiet())
    error = TargetUnavailable("the target did not answer within 3 s")

    async def verb() -> None:
        async with asker.ask({"kind": "snapshot"}) as request:
            assert await requests.change(request.number, only_from=RequestState.OPENED, to=RequestState.FAILED, answer=error_answer(error))
            if waits:
                await asker.held_seconds(request.number)
            raise TargetError("invalid snapshot identifier")

    async def process() -> None:
        while (request := await requests.read()) is None:
            await asyncio.sleep(0)
        await requests.change(request.number, only_from=RequestState.REQUESTED, to=RequestState.OPENED, answer={"lsn": "0/1"})

    async with asyncio.timeout(10):
        answering = asyncio.create_task(process())
        with pytest.raises(TargetUnavailable, match="the target did not answer"):
            await verb()
        await answering
    assert await requests.read() is None
