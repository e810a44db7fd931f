"""Sessions in the target that are lost while there is nothing to apply: the worker notices, says so, and connects again."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import Iterator

import pytest

from subscriber.subscription.targets import open_catalog
from subscriber.testing.ports import LOOPBACK
from tests.support.database import Database
from tests.support.managed import create
from tests.support.program import Program, running
from tests.support.proxy import ThreadedProxy, proxy_of
from tests.support.sqlalchemy_targets import ALL, OtherTarget, Replica

KINDS = ["native", "mariadb"]
LOST = "WARNING subscriber.subscription.run.slot_follower"


@contextlib.contextmanager
def behind_proxy(target: OtherTarget, pause: float = 0.0, *, pools: bool = False) -> Iterator[tuple[str, ThreadedProxy]]:
    """The target's URL through a proxy."""
    match = re.search(r"@([^:/]+):(\d+)/", target.url)
    assert match is not None
    with proxy_of(match[1], int(match[2]), large_pause=pause, pools=pools) as proxy:
        yield target.url.replace(f":{match[2]}/", f":{proxy.port}/"), proxy


def end_sessions(pair: Replica) -> None:
    """Of all but the test's own."""
    if pair.target.kind == "mariadb":
        for (number,) in pair.target.fetch(
            "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
        ):
            pair.target.execute(f"KILL {number}")
    else:
        pair.target.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def comes_back(pair: Replica, program: Program) -> None:
    """It has said so, while nothing was to be applied; and it works."""
    program.says(LOST)
    pair.publisher.execute("INSERT INTO t VALUES (2000, 'after')")
    pair.target.wait(ALL, pair.publisher.fetch(ALL))
    assert "Traceback" not in program.errors


@pytest.mark.parametrize("other_target", KINDS, indirect=True)
def test_sessions_that_were_terminated(other_replica: Replica) -> None:
    pair = other_replica
    with running(*pair.arguments()) as program:
        pair.target.follows()
        end_sessions(pair)
        comes_back(pair, program)


@pytest.mark.endurance
@pytest.mark.parametrize("other_target", KINDS, indirect=True)
def test_sessions_that_a_firewall_has_forgotten(other_replica: Replica) -> None:
    pair = other_replica
    with behind_proxy(pair.target) as (url, proxy), running(*pair.arguments(target=url)) as program:
        pair.target.follows()
        proxy.freeze()
        comes_back(pair, program)
        assert "did not answer within" in program.errors


@pytest.mark.parametrize("other_target", ["native", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
async def test_launcher_whose_session_a_firewall_has_forgotten(other_target: OtherTarget) -> None:
    """It ended with "the launcher of this target is active for PID ...", and meant its own lost session."""
    with behind_proxy(other_target) as (url, proxy):
        catalog = await open_catalog(url, "subscriber launcher")
        lost = await catalog.become_launcher()
        proxy.freeze()
        await catalog.close()
        catalog = await open_catalog(url, "subscriber launcher")
        try:
            assert await catalog.become_launcher(lost) not in {lost, None}
        finally:
            await catalog.close()


@pytest.mark.slow
def test_stop_while_the_target_does_not_answer(publisher18_db: Database, target_db: Database) -> None:
    """Time limits of 5 s followed one another, and the launcher did not look whether it was to stop."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    with behind_proxy(OtherTarget("native", target_db.dsn, target_db.fetch, target_db.execute)) as (url, proxy):
        asyncio.run(create(publisher18_db, target_db))
        with running("run", "--target", url, "-c", "apply_workers=4") as program:
            publisher18_db.execute("INSERT INTO t VALUES (1)")
            target_db.wait("SELECT count(*) FROM t", 1)
            proxy.freeze(all_later=True)
            publisher18_db.execute("INSERT INTO t VALUES (2)")
            program.send(signal.SIGTERM)
            # 7, and 20 before
            assert program.ended().seconds < 15


def test_stop_of_a_launcher_whose_target_never_answers() -> None:
    """The bug was that the first connection was awaited without end."""
    with socket.create_server((LOOPBACK, 0)) as server:
        with running("run", "--target", f"postgresql://u:p@{LOOPBACK}:{server.getsockname()[1]}/d") as program:
            connection, _ = server.accept()
            program.send(signal.SIGTERM)
            assert program.ended().status == 0
        connection.close()
