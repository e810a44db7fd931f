"""``verify --repair`` is killed at random moments, while rows change and the target is damaged again and again."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal

import psycopg
import pytest

from subscriber import repair, verify
from tests.support.database import Database
from tests.support.program import running
from tests.support.replica import replica

ROUNDS = 12
SETUP = "CREATE TABLE t (id int PRIMARY KEY, v int, remark text)"


@pytest.mark.endurance
@pytest.mark.crash
async def test_kills_leave_apply_running_and_rows_that_can_be_repaired(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(SETUP)
    publisher18_db.execute("INSERT INTO t SELECT i, 0, 'right' FROM generate_series(1, 2000) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        name = found.subscription.name
        stop = asyncio.Event()

        async def write() -> None:
            with publisher18_db.connect() as connection:
                while not stop.is_set():
                    await asyncio.to_thread(connection.execute, "UPDATE t SET v = v + 1 WHERE id % 50 = (random() * 50)::int")

        async def attack() -> None:
            seed = secrets.randbelow(10**6)
            print(f"seed {seed}")
            chosen = random.Random(seed)
            for number in range(ROUNDS):
                damage = f"UPDATE t SET remark = 'wrong' WHERE id % {ROUNDS} = {number}; DELETE FROM t WHERE id = {number + 1}"
                while True:
                    try:
                        await asyncio.to_thread(target_db.execute, damage)
                        break
                    except psycopg.errors.DeadlockDetected:
                        pass  # with the changes that are applied meanwhile, in another order
                arguments = ["verify", name, "--connection", publisher18_db.dsn, "--target", target_db.dsn, "--repair"]
                with running(*arguments) as program:
                    await asyncio.sleep(chosen.uniform(0.3, 2.5))
                    program.send(signal.SIGKILL)
                    await asyncio.to_thread(program.ended)

        writer = asyncio.create_task(write())
        try:
            await attack()
            await found.caught_up()
            report = await verify(name, target=target_db.dsn, connection=publisher18_db.conninfo())
            await repair(report, target=target_db.dsn)
            assert (await verify(name, target=target_db.dsn, connection=publisher18_db.conninfo())).equal
        finally:
            stop.set()
            await writer
        await found.same("SELECT * FROM t ORDER BY id")
