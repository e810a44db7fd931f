"""The applier on Spark is stopped while a part of a copy waits on the publisher: its tasks have ended, and no session waits there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.integration.lake.test_bad_input import ON_LOOPBACK
from tests.integration.lake.test_executors import LOCK, WAITS, given_up, ordered
from tests.support import program
from tests.support.database import Database
from tests.support.row_gates import open_transaction


@pytest.mark.timeout(300)
async def test_the_applier_ends_and_so_do_the_sessions_of_its_tasks(publisher18_db: Database, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    syncing = await ordered(publisher18_db, tmp_path)
    arguments = ["spark-apply", str(tmp_path / "lake"), "--engine=spark", "--master=local[2]", *ON_LOOPBACK]
    with open_transaction(publisher18_db, LOCK), program.running(*arguments) as applier:
        await asyncio.to_thread(publisher18_db.wait, WAITS, True, 120)
        applier.send(signal.SIGTERM)
        done = await asyncio.to_thread(applier.ended, 60)
        assert (done.status, [word for word in ("Traceback", "left behind") if word in done.errors]) == (0, []), done.errors
        # the publisher looks every second whether its client is there; without that it waits for the lock, however long
        await asyncio.to_thread(publisher18_db.wait, WAITS, False)
    await given_up(syncing)
