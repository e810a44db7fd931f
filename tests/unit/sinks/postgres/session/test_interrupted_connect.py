"""An attempt to connect that is cancelled leaves nothing behind, wherever it is cut."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import asyncpg
import asyncpg.connect_utils
import pytest

from subscriber.sinks.postgres.session import authentication

pytestmark = pytest.mark.slow

STEPS = 40


async def test_a_cancelled_attempt_to_connect_is_silent() -> None:
    """The bug was that asyncio printed "Future finished exception=ConnectionError('unexpected connection_lost() call')"."""
    assert issubclass(asyncpg.connect_utils.TLSUpgradeProto, authentication._TlsRequest)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(8)
        writer.close()

    printed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for steps in range(STEPS):
            attempt = asyncio.create_task(asyncpg.connect(host="127.0.0.1", port=port, user="u", database="d", timeout=10))
            for _ in range(steps):
                await asyncio.sleep(0)
            attempt.cancel()
            await asyncio.wait([attempt])
            with contextlib.suppress(asyncio.CancelledError):
                attempt.exception()
            del attempt
            gc.collect()
    assert printed == []
