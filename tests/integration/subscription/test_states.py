"""The states that status shows, and ``status --check`` for monitoring. A process that waits between two attempts is retrying."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from subscriber import Launcher, Settings, create_subscription, drop_subscription, subscription_status
from subscriber.cli.main import main
from subscriber.cli.verbs import status as status_verb
from subscriber.sinks.postgres.catalog.schema import VERSION
from subscriber.subscription.management.status import State, SubscriptionStatus
from tests.integration.copy.test_left_out import create_tables
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import running, subscriber
from tests.support.replica import QUICK, at_work
from tests.support.sqlalchemy_targets import IN_BOTH_ALIKE, Replica

SLOW = Settings(wal_retrieve_retry_interval=2.0)


async def shown(target: str, wanted: Callable[[SubscriptionStatus], bool]) -> SubscriptionStatus:
    """The only subscription, once it is so."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = await subscription_status(target)
            if found and wanted(found[0]):
                return found[0]
            # each look costs sessions with both databases
            await asyncio.sleep(0.05)


async def retries(target: str, name: str) -> SubscriptionStatus:
    """It is seen to retry, and as nothing else while some more attempts fail."""
    await shown(target, lambda found: found.state is State.RETRYING)
    found = await shown(target, lambda found: _is_retrying(found) and found.retry is not None and found.retry.attempt >= 3)
    assert found.retry is not None
    assert abs(found.retry.next_attempt - time.time()) < 15
    assert found.observation.definition.name == name
    return found


def _is_retrying(found: SubscriptionStatus) -> bool:
    # an attempt is under way now and then
    assert found.state in {State.RETRYING, State.CONNECTING, State.CATCHING_UP, State.RUNNING}, found
    return found.state is State.RETRYING


@contextlib.contextmanager
def unreachable(publisher: Database) -> Any:
    """No session with the publisher's database can be made; those that are there end."""
    ours = publisher.value("SELECT pg_backend_pid()")
    with contextlib.closing(psycopg.connect(publisher.server.dsn("postgres"), autocommit=True)) as other:
        other.execute(f"ALTER DATABASE {publisher.name} ALLOW_CONNECTIONS false")
        other.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{publisher.name}' AND pid <> {ours}")
        try:
            yield
        finally:
            other.execute(f"ALTER DATABASE {publisher.name} ALLOW_CONNECTIONS true")


@pytest.fixture(params=["postgres", pytest.param("sqlite", marks=pytest.mark.endurance), "lake"])
def target(request: pytest.FixtureRequest, target_db: Database, tmp_path: Path) -> str:
    """Its URL. The table is there or is made."""
    if request.param == "postgres":
        target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
        return target_db.dsn
    return f"sqlite:///{tmp_path}/t.db" if request.param == "sqlite" else f"spark://{tmp_path}/lake?batch_delay=50ms"


async def test_retrying_launcher_of_each_kind_of_target(publisher18_db: Database, target: str) -> None:
    publisher = publisher18_db
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t")
    name = f"sub_{publisher.name}"
    await create_subscription(name, connection=publisher.conninfo(), publications=["pub"], target=target, settings=QUICK)
    assert (await shown(target, lambda _: True)).state is State.NOT_RUNNING
    with unreachable(publisher):
        # the setup fails: no session with the target is left between two attempts
        async with at_work(Launcher(target, settings=SLOW)):
            found = await retries(target, name)
            assert found.retry is not None
            assert "not currently accepting connections" in found.retry.error
    async with at_work(Launcher(target, settings=SLOW)):
        await shown(target, lambda found: found.state is State.RUNNING)
        with unreachable(publisher):
            await retries(target, name)
        await shown(target, lambda found: found.state is State.RUNNING)
    assert (await shown(target, lambda _: True)).state is State.NOT_RUNNING
    await drop_subscription(name, target=target, settings=QUICK)


async def test_retrying_change_that_the_target_refuses(publisher18_db: Database, target_db: Database) -> None:
    publisher, name = publisher18_db, publisher18_db.name
    create_tables(publisher, target_db)
    with running(
        *("run", "--connection", publisher.dsn, "--publication=pub", "--target", target_db.dsn, "--name", name),
        *("-c", "wal_retrieve_retry_interval=2s"),
    ) as program:
        await shown(target_db.dsn, lambda found: found.state is State.RUNNING)
        target_db.execute("INSERT INTO t VALUES (5)")
        publisher.execute("INSERT INTO t VALUES (5)")
        await retries(target_db.dsn, name)
        text = subscriber("status", "--target", target_db.dsn).output
        assert re.match(rf"{name}: retrying.*\n  retrying      attempt \d+ failed, next at .*: duplicate key value violates unique", text)
        done = subscriber("status", "--target", target_db.dsn, "--check")
        assert done.status == 2
        assert re.match(rf"SUBSCRIBER CRITICAL - {name} retrying, attempt \d+ failed: duplicate key value", done.output)
        target_db.execute("DELETE FROM t")
        await shown(target_db.dsn, lambda found: found.state is State.RUNNING)
        program.send(signal.SIGTERM)
        program.ended()
    assert (await shown(target_db.dsn, lambda _: True)).state is State.DEFINED_BY_COMMAND_LINE


async def test_table_whose_synchronization_fails(publisher18_db: Database, target_db: Database) -> None:
    publisher, name = publisher18_db, publisher18_db.name
    create_tables(publisher, target_db)
    target_db.execute("CREATE TABLE later (id int PRIMARY KEY CHECK (id > 1))")
    publisher.execute("ALTER PUBLICATION pub ADD TABLE later")
    await create_subscription(name, connection=publisher.conninfo(), publications=["pub"], target=target_db.dsn, settings=QUICK)
    async with at_work(Launcher(target_db.dsn, settings=SLOW)):
        found = await shown(target_db.dsn, lambda found: found.state is State.RETRYING)
        failing = [table for table in found.observation.tables if table.retry is not None]
        assert [str(table.table) for table in failing] == ["public.later"]
        assert failing[0].retry is not None
        assert 'violates check constraint "later_id_check"' in failing[0].retry.error
        text = await asyncio.to_thread(subscriber, "status", "--target", target_db.dsn)
        assert "    public.later: attempt " in text.output
        target_db.execute("ALTER TABLE later DROP CONSTRAINT later_id_check")
        await shown(target_db.dsn, lambda found: found.state is State.RUNNING)
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


def check(target: str, *arguments: str) -> tuple[int, str]:
    done = subscriber("status", "--target", target, "--check", *arguments)
    assert (done.errors, done.output.count("\n")) == ("", 1)
    return done.status, done.output


@IN_BOTH_ALIKE
def test_check_for_monitoring(other_replica: Replica) -> None:
    pair, url = other_replica, other_replica.target.url
    pair.catches_up()
    status, said = check(url)
    assert status == 2
    assert said.startswith(f"SUBSCRIBER CRITICAL - {pair.name} not running (defined by its command line or configuration file)")
    with running(*pair.arguments()):
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := check(url, "--max-lag", "60s"))[0] != 0:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        assert re.fullmatch(
            rf"SUBSCRIBER OK - {pair.name} running, \d+ (bytes|kB|MB) behind, lag \d\.\d s"
            rf" \| '{pair.name} lag'=\d\.\d+s;;60;0 '{pair.name} behind'=\d+B;;;0\n",
            found[1],
        ), found
        # its command line defines it, and the worker tells the lag
        assert check(url, "--max-lag", "1GB")[0] == 0


def test_check_of_lag_and_of_tables_left_out(publisher18_db: Database, target_db: Database) -> None:
    publisher, name = publisher18_db, publisher18_db.name
    create_tables(publisher, target_db)
    arguments = ["--connection", publisher.dsn, "--publication=pub", "--target", target_db.dsn]
    assert subscriber("create", name, *arguments).status == 0

    def becomes(expected: int, part: str, *more: str) -> str:
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := check(target_db.dsn, *more))[0] != expected or part not in found[1]:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found[1]

    with running("run", "--target", target_db.dsn):
        assert f"'{name} retained'=" in becomes(0, "running", "--max-lag=10MB")
        with contextlib.closing(target_db.connect()) as holder:
            holder.execute("BEGIN; LOCK TABLE t")
            publisher.execute("INSERT INTO t SELECT generate_series(1, 1000)")
            becomes(2, "the lag is too large", "--max-lag=1kB")
            becomes(2, "the lag is too large", "--max-lag=1s")
            assert check(target_db.dsn, "--max-lag=1h")[0] == 0
            holder.execute("COMMIT")
        becomes(0, "running", "--max-lag=10MB")
    publisher.execute("ALTER PUBLICATION pub ADD TABLE later")
    with running("run", "--target", target_db.dsn):
        becomes(1, "not replicated: public.later")
    assert subscriber("alter", name, "--target", target_db.dsn, "--disable").status == 0
    assert check(target_db.dsn)[1].startswith(f"SUBSCRIBER CRITICAL - {name} disabled")
    assert check(target_db.dsn, "--max-lag", "5")[0] == 3
    assert subscriber("drop", name, "--target", target_db.dsn).status == 0
    assert check(target_db.dsn) == (3, "SUBSCRIBER UNKNOWN - the target has no subscription\n")


def test_check_that_fails_is_unknown(target_db: Database, tmp_path: Path) -> None:
    assert check("postgresql://127.0.0.1:1/none")[0] == 3
    assert check(f"sqlite:///{tmp_path}/none.db")[0] == 3
    assert check(target_db.dsn, "absent") == (
        3,
        'SUBSCRIBER UNKNOWN - subscription "absent" does not exist (hint: `subscriber status` lists the existing subscriptions)\n',
    )


def test_check_after_an_upgrade_or_downgrade_is_unknown(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    created = subscriber("create", publisher18_db.name, "--connection", publisher18_db.dsn, "--publication=pub", "--target", target_db.dsn)
    assert created.status == 0, created.errors
    for version in (0, 99):
        target_db.execute(f"UPDATE subscriber.version SET version = {version}")
        status, said = check(target_db.dsn)
        assert status == 3
        assert said.startswith(f'SUBSCRIBER UNKNOWN - schema "subscriber" of the target has version {version}, but this program')
    target_db.execute(f"UPDATE subscriber.version SET version = {VERSION}")
    assert subscriber("drop", publisher18_db.name, "--target", target_db.dsn).status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check"], "one of --target and --config is required"),
        (["--che", "--target=x", "--json"], "argument --json: not allowed with argument --check"),
        (["--interval=no", "--target=x", "--check"], 'argument --interval: "no" is not a number of seconds from 0.1 to 86400'),
        (["--check", "--target=x", "--unknown=\x1b[2J"], r"unrecognized arguments: --unknown=\u001b[2J"),
        (["--check", "--target=x", "--max-lag"], "argument --max-lag: expected one argument"),
    ],
)
def test_check_with_wrong_usage_is_unknown(arguments: list[str], said: str) -> None:
    done = subscriber("status", *arguments)
    assert (done.status, done.output) == (3, f"SUBSCRIBER UNKNOWN - {said}\n")
    assert "usage: subscriber" in done.errors


def test_check_that_does_not_foresee_an_error_is_unknown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(status_verb, "subscription_status", fails)
    assert main(["status", "--check", "--target=x"]) == 3
    assert capsys.readouterr().out == "SUBSCRIBER UNKNOWN - the check failed; standard error has the traceback\n"
