"""A session that is cancelled while it is opened is closed."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path

from subscriber.sinks.sqlalchemy.session.database import Database
from tests.support.cancellation import cancelled_at
from tests.support.database import WAIT_SECONDS


def _is_open(path: Path) -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(path)):
                return True
        except FileNotFoundError:
            continue
    return False


async def test_sqlite_file(tmp_path: Path) -> None:
    """The bug was that the file stayed open until the garbage collector came, or as long as the cancelled task was kept."""
    path, errors = tmp_path / "replica.db", list[asyncio.CancelledError]()
    database = Database(f"sqlite:///{path}", replicates=True)

    async def attempt() -> None:
        try:
            await (await database.connect()).close()
        except asyncio.CancelledError as error:
            errors.append(error)
            raise

    for late in (False, True):
        for step in itertools.count():
            cancelled = await cancelled_at(attempt(), step, late=late)
            async with asyncio.timeout(WAIT_SECONDS):
                while _is_open(path):
                    await asyncio.sleep(0.01)
            if not cancelled:
                break
    assert errors
