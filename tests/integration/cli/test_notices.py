"""What the verbs say on success, on standard error, and what run says while it works."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal

import pytest

from subscriber import SubscriptionOptions
from subscriber.cli.narrator import Narrator
from tests.support.database import Database
from tests.support.managed import create
from tests.support.observation import until
from tests.support.program import running, subscriber
from tests.support.replica import subscription_of
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate
from tests.support.sqlalchemy_targets import IN_BOTH_ALIKE, Replica

LSN = r"[0-9A-F]+/[0-9A-F]+"


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def create_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("INSERT INTO t SELECT generate_series(1, 1000); ANALYZE t; CREATE PUBLICATION pub FOR TABLE t")


def test_messages_of_a_run_until_caught_up(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    done = subscriber(*pair.arguments("--until-caught-up"), loud=True)
    assert (done.status, done.output) == (0, "")
    assert matches(rf"subscriber: copied 1 table, 1,000 rows in \d+\.\d s; caught up to {LSN}\n", done.errors), done.errors
    done = subscriber(*pair.arguments("--until-caught-up"), loud=True)
    assert matches(rf"subscriber: 1 table, nothing to copy; caught up to {LSN}\n", done.errors), done.errors
    done = subscriber(*pair.arguments("--until-caught-up", "--quiet"), loud=True)
    assert (done.status, done.output, done.errors) == (0, "", "")


def test_run_says_when_it_is_ready(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    arguments = ["run", "--connection", publisher18_db.dsn, "--publication=pub", "--target", target_db.dsn, "--name", publisher18_db.name]
    with running(*arguments, loud=True) as program:
        program.says("streaming from")
        # and so it is
        assert target_db.value("SELECT count(*) FROM t") == 1000
        assert target_db.value("SELECT srsubstate IN ('s', 'r') FROM subscriber.pg_subscription_rel")
        assert publisher18_db.value(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{publisher18_db.name}'")
        program.send(signal.SIGTERM)
        done = program.ended()
    said = rf"subscriber: copied 1 table, 1,000 rows in \d+\.\d s; streaming from {LSN}\n"
    assert matches(rf"{said}subscriber: stopped; the target has everything up to {LSN}\n", done.errors), done.errors
    assert (done.status, done.output) == (0, "")


async def test_verbs_of_the_catalog(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    name, to = publisher18_db.name, ("--target", target_db.dsn)
    define = ("create", name, *to, "--connection", publisher18_db.dsn, "--publication=pub")

    def said(*arguments: str) -> str:
        done = subscriber(*arguments, loud=True)
        assert (done.status, done.output) == (0, ""), done.errors
        return done.errors

    assert said(*define) == f'subscriber: created subscription "{name}"; 1 table\n'
    assert said("alter", name, *to, "--refresh") == f'subscriber: altered subscription "{name}"\n'
    assert said("alter", name, *to, "--reset-stats") == f'subscriber: altered subscription "{name}"\n'
    with running("run", *to, loud=True) as program:
        program.says(f'subscriber: subscription "{name}": copied 1 table, 1,000 rows in ')
        program.send(signal.SIGTERM)
        assert program.ended().errors.endswith("subscriber: stopped\n")
    assert said("drop", name, *to) == f'subscriber: dropped subscription "{name}"\n'
    assert said(*define, "-q").count("\n") == 0
    assert said("drop", name, *to, "-q") == ""
    done = subscriber("check", *define[4:], "--target", target_db.dsn, "--quiet", "--name", "other", loud=True)
    assert (done.status, done.output, done.errors) == (0, "", "")


@pytest.mark.endurance
async def test_progress_of_a_long_copy_and_catch_up(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    make_row_gate(target_db, "t", "NEW.id = 700", 7)
    said: list[str] = []
    subscription = subscription_of(publisher18_db, target_db)
    narrator = Narrator(lambda: {"one": subscription}, said.append, named=True, interval=0.0)

    def says(text: str) -> bool:
        narrator.look()
        return any(text in line for line in said)

    with closed_gates(target_db, 7):
        task = asyncio.create_task(subscription.run())
        await asyncio.to_thread(target_db.wait, waiting_at_gate(7), 1)
        await until(lambda: says('subscription "one": copying: 0 of 1 table done'), "copying")
        assert not says("streaming from")
    await until(lambda: says('subscription "one": copied 1 table, 1,000 rows in'), "ready")
    assert sum("streaming from" in line for line in said) == 1
    subscription.stop()
    await task
    publisher18_db.execute("INSERT INTO t SELECT generate_series(2001, 3000)")
    subscription = subscription_of(publisher18_db, target_db)
    with contextlib.closing(target_db.connect()) as holder:
        holder.execute("BEGIN; LOCK TABLE t")
        task = asyncio.create_task(subscription.run())
        await until(lambda: says("catching up: the target has everything up to"), "catching up")
        assert sum("streaming from" in line for line in said) == 1
        holder.execute("COMMIT")
    await until(lambda: says("1 table, nothing to copy; streaming from"), "ready again")
    subscription.stop()
    await task


@IN_BOTH_ALIKE
def test_name_that_its_command_line_defines(other_replica: Replica) -> None:
    pair = other_replica
    pair.catches_up()
    done = subscriber("run", "--target", pair.target.url, pair.name)
    assert done.status == 1
    assert f'subscription "{pair.name}" is defined by its command line, not in the target\'s catalog (hint: run it with' in done.errors
    with running("run", "--target", pair.target.url) as program:
        program.says("nothing to run: the subscriptions of this target are defined by their command lines")


@IN_BOTH_ALIKE
def test_verbs_without_a_connection_string_say_what_to_do(other_replica: Replica) -> None:
    pair = other_replica
    pair.catches_up()
    target = "--target", pair.target.url
    for verb in (["--refresh"], ["--add-publication", "other"]):
        done = subscriber("alter", pair.name, *target, *verb)
        assert done.status == 1
        assert f'subscription "{pair.name}" has no connection string: it is defined by its command line' in done.errors
    # run stores what its command line says
    for option, said in (
        ("on_error=disable", "undoes this (hint: give it -o on_error=…, too)"),
        ("max_copy_rate=1MB", "max_copy_rate=…"),
    ):
        done = subscriber("alter", pair.name, *target, "-o", option)
        assert (done.status, said in done.errors) == (0, True), done.errors
    done = subscriber("drop", pair.name, *target)
    assert done.status == 1
    assert "or disable the subscription, disassociate it from the slot with alter -o slot_name=NONE, and drop it again" in done.errors
    slots = pair.publisher.fetch("SELECT slot_name FROM pg_replication_slots")
    for verb in (["alter", "--disable"], ["alter", "-o", "slot_name=NONE"], ["drop"]):
        assert subscriber(verb[0], pair.name, *target, *verb[1:]).status == 0
    assert pair.publisher.fetch("SELECT slot_name FROM pg_replication_slots") == slots != []


@pytest.mark.parametrize("disabled", [False, True])
async def test_launcher_without_work_says_so_once(publisher18_db: Database, target_db: Database, disabled: bool) -> None:
    create_tables(publisher18_db, target_db)
    reason = "nothing to run: the target's catalog has no subscription"
    if disabled:
        await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
        reason = "nothing to run: no subscription is enabled"
    with running("run", "--target", target_db.dsn, loud=True) as program:
        program.says(reason)
        name = await create(publisher18_db, target_db, "other")
        program.says(f'subscription "{name}": copied 1 table')
        assert subscriber("drop", name, "--target", target_db.dsn).status == 0
        program.send(signal.SIGTERM)
        assert program.ended().errors.count("nothing to run") == 1
