"""The second session with a PostgreSQL target."""

from __future__ import annotations

import asyncio

import asyncpg

from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from tests.support.database import Database


async def test_cancelled_begin_does_not_swallow_later_transactions(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int)")
    reader = CatalogReader(await asyncpg.connect(target_db.dsn))

    async def insert(number: int) -> None:
        async with reader.transaction() as execute:
            await execute("INSERT INTO t VALUES ($1)", number)

    try:
        # the cancellation meets the task in front of, during and behind BEGIN
        for steps in range(12):
            cut = asyncio.create_task(insert(-1))
            for _ in range(steps):
                await asyncio.sleep(0)
            cut.cancel()
            await asyncio.gather(cut, return_exceptions=True)
            await insert(steps)
            assert target_db.value(f"SELECT count(*) FROM t WHERE id = {steps}") == 1
    finally:
        reader.connection.terminate()
