"""``subscriber run`` as a user sees it: how it starts, follows and ends, and its messages."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.testing.server import EmbeddedServer
from tests.support.database import WAIT_SECONDS, Database, ServerAddress, fresh_database
from tests.support.program import PROGRAM, confirmed, environment, has_catalog, position, running, slots, subscriber
from tests.support.terminal import terminal

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ALL = "SELECT id, v FROM t ORDER BY id"
# twelve seconds for a target that takes nothing, which is said then, and a second or more for a process to end on a busy machine
SOON = 15.0


@dataclass
class ReplicaPair:
    """A publisher with a table, a target with the same one empty, and the arguments that make them a replica."""

    publisher: Database
    target: Database

    @property
    def name(self) -> str:
        return f"run_{self.publisher.name}"

    def arguments(self, *more: str, connection: str | None = None, target: str | None = None) -> list[str]:
        return [
            "run",
            f"--connection={connection or self.publisher.dsn}",
            "--publication=pub",
            f"--target={target or self.target.dsn}",
            f"--name={self.name}",
            *more,
        ]

    def finish(self) -> None:
        """A stopped subscription resumes: a run until caught up makes both sides equal."""
        done = subscriber(*self.arguments("--until-caught-up"))
        assert (done.status, done.output, done.errors) == (0, "", "")
        self.same()
        assert slots(self.publisher) == [self.name]

    def same(self) -> None:
        assert self.target.fetch(ALL) == self.publisher.fetch(ALL)

    def acknowledged(self) -> None:
        """What is durable in the target was acknowledged to the publisher, and the slot is free."""
        self.publisher.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'", False)
        assert confirmed(self.publisher, self.name) == position(self.target, self.name)

    def follows(self) -> None:
        """Wait until the table is in the apply worker's hands."""
        self.target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
        self.target.wait("SELECT srsubstate::text FROM subscriber.pg_subscription_rel", "r")

    def blocked(self) -> None:
        """Wait until one of its sessions in the target waits for a lock."""
        query = "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        self.target.wait(query, True)


def made(publisher: Database, target: Database) -> ReplicaPair:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 1000) AS i; CREATE PUBLICATION pub FOR TABLE t")
    return ReplicaPair(publisher, target)


@pytest.fixture
def any_version_pair(publisher18_db: Database, target_db: Database) -> ReplicaPair:
    """With the publisher that the run is for."""
    return made(publisher18_db, target_db)


@pytest.fixture
def pair(publisher18_db: Database, target_db: Database) -> ReplicaPair:
    """On 18 alone: what does not depend on the publisher's version."""
    return made(publisher18_db, target_db)


@contextmanager
def locked(target: Database, statement: str) -> Iterator[None]:
    with target.connect() as session, session.transaction():
        session.execute(statement.encode())
        yield


# --- the job


def test_copies_follows_and_ends_cleanly(any_version_pair: ReplicaPair) -> None:
    _ends_cleanly(any_version_pair, signal.SIGTERM, 0)


def test_interrupted_it_ends_cleanly_too(pair: ReplicaPair) -> None:
    _ends_cleanly(pair, signal.SIGINT, 130)


def _ends_cleanly(pair: ReplicaPair, number: signal.Signals, status: int) -> None:
    with running(*pair.arguments()) as program:
        pair.follows()
        pair.publisher.execute("UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id > 990")
        pair.publisher.execute("INSERT INTO t VALUES (2000, 'new')")
        pair.target.wait(ALL, pair.publisher.fetch(ALL))
        program.send(number)
        done = program.ended()
    assert (done.status, done.output, done.errors) == (status, "", "")
    assert done.seconds < SOON
    pair.acknowledged()
    assert slots(pair.publisher) == [pair.name]
    pair.publisher.execute("INSERT INTO t VALUES (3000, 'while away')")
    pair.finish()


def inserts(publisher: Database) -> None:
    for number in range(2000, 2300):
        publisher.execute(f"INSERT INTO t VALUES ({number}, 'load')")


def test_acknowledges_what_it_applied_under_load(pair: ReplicaPair) -> None:
    with running(*pair.arguments()) as program:
        pair.follows()
        load = threading.Thread(target=inserts, args=(pair.publisher,))
        load.start()
        pair.target.wait("SELECT count(*) > 1020 FROM t", True)
        program.send(signal.SIGTERM)
        done = program.ended()
        load.join()
    assert (done.status, done.errors) == (0, "")
    pair.acknowledged()
    pair.finish()


def test_until_caught_up_and_until_lsn(pair: ReplicaPair) -> None:
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.output, done.errors) == (0, "", "")
    pair.same()
    pair.acknowledged()
    pair.publisher.execute("INSERT INTO t VALUES (2001, 'first')")
    lsn = pair.publisher.current_lsn()
    done = subscriber(*pair.arguments(f"--until-lsn={lsn}"))
    assert (done.status, done.output, done.errors) == (0, "", "")
    pair.same()
    pair.acknowledged()
    assert pair.target.value(f"SELECT '{confirmed(pair.publisher, pair.name)}'::pg_lsn >= '{lsn}'")
    # there already: nothing to wait for
    assert subscriber(*pair.arguments(f"--until-lsn={lsn}")).status == 0
    assert slots(pair.publisher) == [pair.name]


def test_until_an_lsn_of_the_future_waits_for_it(pair: ReplicaPair) -> None:
    pair.finish()
    ahead = pair.publisher.value(f"SELECT '{pair.publisher.current_lsn()}'::pg_lsn + 4000000")
    with running(*pair.arguments(f"--until-lsn={ahead}")) as program:
        pair.publisher.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pair.name}'", True)
        while pair.publisher.value(f"SELECT pg_current_wal_flush_lsn() < '{ahead}'"):
            assert program.process.poll() is None
            pair.publisher.execute("INSERT INTO t SELECT max(id) + 1, repeat('x', 100000) FROM t")
            pair.publisher.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 500000))")
        done = program.ended()
    assert (done.status, done.errors) == (0, "")
    pair.same()


# --- ended at every phase


def test_terminated_while_the_slot_is_made(pair: ReplicaPair) -> None:
    with pair.publisher.connect() as session, running(*pair.arguments()) as program, session.transaction():
        session.execute("INSERT INTO t VALUES (5000, 'not committed yet')")  # a new slot waits for its end
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%' AND wait_event_type = 'Lock'"
        pair.publisher.wait(f"{waiting} AND datname = current_database()", 1)
        program.send(signal.SIGTERM)
        done = program.ended()
    assert (done.status, done.errors) == (0, "")
    assert done.seconds < SOON
    pair.publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)
    pair.finish()


def test_terminated_while_the_catalog_is_made(pair: ReplicaPair) -> None:
    with locked(pair.target, "CREATE SCHEMA subscriber"), running(*pair.arguments()) as program:
        pair.blocked()
        program.send(signal.SIGTERM)
        done = program.ended()
        assert (done.status, done.errors) == (0, "")
        assert done.seconds < SOON
    assert slots(pair.publisher) == []
    pair.finish()


def test_terminated_while_a_table_is_copied(pair: ReplicaPair) -> None:
    with locked(pair.target, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"), running(*pair.arguments()) as program:
        pair.blocked()
        pair.target.wait("SELECT srsubstate::text FROM subscriber.pg_subscription_rel", "d")
        program.send(signal.SIGTERM)
        done = program.ended()
    assert done.status == 0
    assert done.seconds < SOON
    assert pair.target.value("SELECT count(*) FROM t") == 0
    pair.finish()


def test_terminated_while_a_lock_in_the_target_holds_up_the_apply(pair: ReplicaPair) -> None:
    with running(*pair.arguments()) as program:
        pair.follows()
        pair.publisher.execute("INSERT INTO t VALUES (2000, 'applied')")
        pair.target.wait("SELECT v FROM t WHERE id = 2000", "applied")
        with locked(pair.target, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"):
            pair.publisher.execute(
                "UPDATE t SET v = 'held up' WHERE id = 1"
            )  # small, so that its COMMIT has arrived once it is being applied
            pair.blocked()
            program.send(signal.SIGTERM)
            done = program.ended()
            assert done.status == 0
            assert done.seconds < SOON
            assert done.errors.count("the target did not finish the current changes") == 1
            assert all("did not finish" in line or "could not write the status" in line for line in done.errors.splitlines())
            # its session in the target has gone as well
            pair.target.wait("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'", 0)
    assert pair.target.value("SELECT count(*) FROM t WHERE v = 'held up'") == 0
    assert pair.target.value(f"SELECT '{confirmed(pair.publisher, pair.name)}'::pg_lsn <= '{position(pair.target, pair.name)}'")
    pair.finish()


def test_a_second_signal_ends_it_at_once(pair: ReplicaPair) -> None:
    with running(*pair.arguments()) as program:
        pair.follows()
        with locked(pair.target, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"):
            pair.publisher.execute(
                "UPDATE t SET v = 'held up' WHERE id = 1"
            )  # small, so that its COMMIT has arrived once it is being applied
            pair.blocked()
            program.send(signal.SIGTERM)
            # the first one was handled: its handler is removed
            status = Path(f"/proc/{program.process.pid}/status")
            while _caught(status.read_text()) & 1 << signal.SIGTERM - 1:
                assert program.process.poll() is None
            program.send(signal.SIGTERM)
            done = program.ended()
    assert done.status == -signal.SIGTERM
    assert done.seconds < 2
    pair.finish()


def _caught(status: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)


def test_publisher_away(make_server: Callable[..., EmbeddedServer], target_db: Database) -> None:
    server = make_server(18)
    with fresh_database(ServerAddress(server.dsn(), 18), "pub") as publisher:
        pair = made(publisher, target_db)
        quick = ("-c", "wal_retrieve_retry_interval=100ms")
        with running(*pair.arguments(*quick)) as goes_on, running(*pair.arguments("--name=other", "-o", "copy_data=false")) as ends:
            pair.target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
            pair.target.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 2)
            # both have had a stream: until then an attempt that fails is the first
            publisher.wait("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND flush_lsn IS NOT NULL", 2)
            publisher.close()
            server.stop()
            for program in (goes_on, ends):
                program.says("next attempt in", 4)
                assert "Traceback" not in program.errors
            # in one of its pauses, or while it tries
            ends.send(signal.SIGTERM)
            done = ends.ended()
            assert done.status == 0
            assert done.seconds < SOON
            server.start()
            with psycopg.connect(server.dsn(publisher.name), autocommit=True) as session:
                session.execute("INSERT INTO t VALUES (4000, 'after the restart')")
                target_db.wait("SELECT v FROM t WHERE id = 4000", "after the restart")
            goes_on.send(signal.SIGTERM)
            assert goes_on.ended().status == 0
        server.stop()
        # the first attempt does not wait for it
        done = subscriber(*pair.arguments())
        assert done.status == 1
        assert done.errors.startswith("subscriber: could not connect to the publisher: ")
        assert done.errors.count("\n") == 1
        server.start()
        publisher._connection = publisher.connect()


# --- arguments


def test_two_publications_options_and_settings(pair: ReplicaPair) -> None:
    for database in (pair.publisher, pair.target):
        database.execute("CREATE TABLE u (id int PRIMARY KEY, v int)")
    pair.publisher.execute("INSERT INTO u VALUES (1, 1); CREATE PUBLICATION second FOR TABLE u WITH (publish = 'insert')")
    slot = f"another_{pair.publisher.name}"
    done = subscriber(
        *pair.arguments("--publication", "second", "--until-caught-up"),
        *("-o", f"slot_name={slot}", "-o", "binary=on", "-o", "streaming = off", "-o", "two_phase=true"),
        *("-c", "wal_receiver_status_interval=1s", "-c", "max_sync_workers_per_subscription=1", "-c", "logical_decoding_work_mem=1MB"),
    )
    assert (done.status, done.errors) == (0, "")
    pair.same()
    assert pair.target.fetch("TABLE u") == [(1, 1)]
    assert slots(pair.publisher) == [slot]
    assert pair.target.fetch("SELECT subname::text, subslotname::text, subpublications FROM subscriber.pg_subscription") == [
        (pair.name, slot, ["pub", "second"])
    ]
    pair.publisher.execute("UPDATE u SET v = 2; INSERT INTO u VALUES (2, 2)")
    assert subscriber(*pair.arguments("--publication", "second", "--until-caught-up")).status == 0
    assert pair.target.fetch("SELECT * FROM u ORDER BY id") == [(1, 1), (2, 2)]


def _keywords(database: Database) -> dict[str, str]:
    return {name: str(value) for name, value in conninfo_to_dict(database.dsn).items()}


@pytest.mark.parametrize("how", ["keywords", "URL", "service file", "password file", "environment", "dead first host"])
def test_every_way_to_say_where(pair: ReplicaPair, tmp_path: Path, how: str) -> None:
    publisher, target = _keywords(pair.publisher), _keywords(pair.target)
    sides = {"connection": publisher, "target": target}
    given: dict[str, str] = {}
    env: dict[str, str] = {}
    match how:
        case "keywords":
            given = {side: make_conninfo(**parameters) for side, parameters in sides.items()}
        case "URL":
            given = {"connection": pair.publisher.dsn, "target": pair.target.dsn.replace("postgresql://", "postgres://")}
        case "service file":
            file = tmp_path / "services"
            sections = [f"[{side}]\n" + "".join(f"{key}={value}\n" for key, value in found.items()) for side, found in sides.items()]
            file.write_text("\n".join(sections))
            given = {"connection": "service=connection", "target": "postgresql://?service=target"}
            env = {"PGSERVICEFILE": str(file)}
        case "password file":
            file = tmp_path / "pgpass"
            lines = [f"{found['host']}:{found['port']}:*:{found['user']}:{found.pop('password')}\n" for found in sides.values()]
            file.write_text("".join(lines))
            file.chmod(0o600)
            given = {side: make_conninfo(**parameters) for side, parameters in sides.items()}
            env = {"PGPASSFILE": str(file)}
        case "environment":
            given = {"connection": make_conninfo(**publisher), "target": f"dbname={target['dbname']}"}
            env = {f"PG{key.upper()}": target[key] for key in ("host", "port", "user", "password")}
        case "dead first host":
            for found in sides.values():
                found |= {"host": f"127.0.0.1,{found['host']}", "port": f"1,{found['port']}"}
            given = {side: make_conninfo(**parameters) for side, parameters in sides.items()}
    done = subscriber(*pair.arguments("--until-caught-up", **given), env=env)
    assert (done.status, done.output, done.errors) == (0, "", "")
    pair.same()


def test_a_second_process_of_the_same_subscription(pair: ReplicaPair) -> None:
    with running(*pair.arguments()) as program:
        pair.follows()
        done = subscriber(*pair.arguments())
        assert done.status == 1
        *_, waited, refused = done.errors.splitlines()
        assert f'subscription "{pair.name}": waiting for PID ' in waited
        assert refused.startswith(f'subscriber: subscription "{pair.name}" is active for PID ')
        assert "stop the other process" in refused
        assert done.seconds < 25
        pair.publisher.execute("INSERT INTO t VALUES (2000, 'undisturbed')")
        pair.target.wait("SELECT v FROM t WHERE id = 2000", "undisturbed")
        program.send(signal.SIGTERM)
        assert (program.ended().status, program.errors) == (0, "")


# --- what is said


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Run it with stderr on a terminal; its status and what the terminal shows."""
    with terminal() as screen:
        done = subprocess.run(
            [*PROGRAM, *arguments],
            env=environment({"TERM": "xterm"}),
            stdout=subprocess.DEVNULL,
            stderr=screen.descriptor,
            timeout=WAIT_SECONDS,
            check=False,
        )
        return done.returncode, screen.shown()


def test_progress_on_a_terminal(pair: ReplicaPair) -> None:
    status, shown = on_a_terminal(*pair.arguments("--until-caught-up"))
    assert status == 0
    assert "public.t: 100%" in shown
    assert "1.00k/1.00k" in shown
    assert "Traceback" not in shown
    pair.same()
    # nothing to copy, nothing to show
    status, shown = on_a_terminal(*pair.arguments("--until-caught-up"))
    assert (status, shown) == (0, "")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_verbose_tells_what_happens(pair: ReplicaPair, where: str) -> None:
    arguments = pair.arguments("--until-caught-up")
    done = subscriber("-v", *arguments) if where == "before" else subscriber(*arguments, "-v")
    assert (done.status, done.output) == (0, "")
    assert f'INFO subscriber.subscription.setup.first_position: subscription "{pair.name}" starts at ' in done.errors
    assert 'table "public.t" is complete as of ' in done.errors
    assert 'table "public.t" is synchronized up to ' in done.errors
    assert has_catalog(pair.target)
    for secret in (_keywords(pair.publisher)["password"], _keywords(pair.target)["password"]):
        assert secret not in done.errors
