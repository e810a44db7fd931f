"""``status.json`` is written when something has changed, and in an object store not often."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyarrow import fs

from subscriber.interfaces import ApplyStatistics, WorkerActivity
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.status_files import ERROR, STATUS, StatusFile, read_quietly
from subscriber.sinks.spark.files.storage import Storage


@pytest.mark.parametrize(("root", "expected"), [(True, 4), (False, 3)], ids=["directory", "object store"])
def test_idle_process_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool, expected: int) -> None:
    """The bug was one write in each second."""
    storage, real = Storage(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), tmp_path if root else None, "lake"), Storage.write
    writes, now = list[str](), 1000.0

    def counted(self: Storage, name: str, content: bytes, **named: bool) -> None:
        writes.append(name)
        real(self, name, content, **named)

    monkeypatch.setattr(Storage, "write", counted)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    status = StatusFile(storage, {})

    def report(lsn: int, error: str | None = None) -> None:
        nonlocal now
        now += 1.0
        status.report([WorkerActivity(received=Lsn(lsn))], error, ApplyStatistics())

    for second in range(68):
        report(200 + second // 60)
    assert writes == [STATUS, STATUS]
    report(300)
    report(400, "failed")
    assert writes.count(ERROR) == 1
    status.flush()
    status.flush()
    assert writes.count(STATUS) == expected
    assert read_quietly(storage, STATUS)["workers"][0]["received"] == str(Lsn(400))
