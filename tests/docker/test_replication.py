"""docker/compose.yaml on an engine: copies, changes, and containers that stop, are killed, and start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from tests.docker.images import VERSIONS
from tests.docker.stack import Stack

SERVICES = ("publisher18", "subscription18", "target")


@pytest.mark.parametrize("version", VERSIONS)
def test_all_tables_are_equal_after_a_mixed_load(stack: Stack, version: int) -> None:
    if version != 18:
        stack.start(version)
    load = stack.load(version)
    report = asyncio.run(load.run(transactions=150))
    assert report.rows > 0
    # prepared transactions are prepared in the target, too
    tables = stack.assert_equal(version)
    asyncio.run(load.finish())
    assert stack.assert_equal(version) == tables
    assert len(tables) > 10
    if version != 18:
        stack.remove(version)


def under_load(stack: Stack, name: str, fault: Callable[[], None]) -> None:
    """Do something to a service while changes flow, and compare afterwards. The subscription waits for other services by itself."""
    started = stack.service("subscription18").state["StartedAt"]

    async def scenario() -> None:
        load = stack.load(18, seed=2)
        end = asyncio.Event()
        running = asyncio.create_task(load.run(until=end))
        while load.report.transactions < 20:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(fault)
        before = load.report.transactions
        while load.report.transactions < before + 20:
            await asyncio.sleep(0.05)
        end.set()
        await running
        await load.finish()

    asyncio.run(scenario())
    stack.assert_equal(18)
    stack.up("subscription18")
    assert (stack.service("subscription18").state["StartedAt"] == started) == (name != "subscription18")


@pytest.mark.parametrize("name", SERVICES)
def test_restart_loses_nothing(stack: Stack, name: str) -> None:
    container = stack.service(name)
    if name == "subscription18":

        def restart() -> None:
            assert container.stop() == 0  # within the grace period, by itself
            container.start()
    else:

        def restart() -> None:
            container.stop()
            container.start()

    under_load(stack, name, restart)


@pytest.mark.parametrize("name", SERVICES)
def test_kill_loses_nothing(stack: Stack, name: str) -> None:
    container = stack.service(name)

    def kill() -> None:
        container.kill()
        container.start()

    under_load(stack, name, kill)


def test_removed_containers_continue_on_their_volumes(stack: Stack) -> None:
    """As after ``docker compose down`` and the next ``up``."""
    with psycopg.connect(stack.publisher_dsn(18), autocommit=True) as publisher:
        publisher.execute("UPDATE accounts SET balance = balance + 1 WHERE id <= 100")
    stack.remove(18)
    stack.up("subscription18")
    stack.assert_equal(18)
