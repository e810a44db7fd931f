"""What MariaDB and SQLite refuse for a while."""

from __future__ import annotations

import contextlib
import random
import resource
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymysql

from subscriber.testing.mariadb import EmbeddedMariaDB
from tests.chaos.environments import Environment, OtherEnvironment
from tests.chaos.refusals import PUBLISHER, UNPREPARED, CannotNow, Refusal

_PATIENCE = 60.0
_BUSY = 0.2


def alter(environment: OtherEnvironment, statement: str) -> None:
    """Run DDL in the target, until it is done."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            environment.execute(statement)
        except (sqlite3.OperationalError, pymysql.err.OperationalError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_BUSY)
        else:
            return


@contextlib.contextmanager
def trigger_refuses(environment: Environment, rng: random.Random) -> Iterator[None]:
    """Changes of one table."""
    assert isinstance(environment, OtherEnvironment)
    if not environment.are_tables_ready():
        raise CannotNow
    table = rng.choice(UNPREPARED)
    refuse = "BEGIN SELECT RAISE(ABORT, 'chaos'); END" if environment.path else "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'chaos'"
    row = "FOR EACH ROW "
    try:
        for what in ("INSERT", "UPDATE"):
            environment.execute(f"CREATE TRIGGER chaos_{what} BEFORE {what} ON load__{table} {row}{refuse}")
    except (sqlite3.OperationalError, pymysql.err.OperationalError, pymysql.err.ProgrammingError) as error:
        alter(environment, "DROP TRIGGER IF EXISTS chaos_INSERT")
        raise CannotNow from error
    try:
        yield
    finally:
        for what in ("INSERT", "UPDATE"):
            alter(environment, f"DROP TRIGGER IF EXISTS chaos_{what}")


# --- SQLite


@contextlib.contextmanager
def file_locked(environment: Environment, rng: random.Random) -> Iterator[None]:
    """By another process: we are one."""
    assert isinstance(environment, OtherEnvironment)
    if not environment.is_there():
        raise CannotNow
    with contextlib.closing(environment.open_file()) as file:
        try:
            file.execute(rng.choice(("BEGIN IMMEDIATE", "BEGIN EXCLUSIVE")))
        except sqlite3.OperationalError as error:
            raise CannotNow from error
        yield
        file.execute("ROLLBACK")


@contextlib.contextmanager
def snapshot_held(environment: Environment, _: random.Random) -> Iterator[None]:
    """A reader that keeps the write-ahead log from its start."""
    assert isinstance(environment, OtherEnvironment)
    if not environment.is_there():
        raise CannotNow
    with contextlib.closing(environment.open_file()) as file:
        file.execute("BEGIN")
        file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield
        file.execute("ROLLBACK")


@contextlib.contextmanager
def files_limited(environment: Environment, rng: random.Random) -> Iterator[None]:
    """No file grows beyond a size: a full disk for the database, its log, and the spool. The program ignores SIGXFSZ, as Python does."""
    process = environment.process.process
    if process is None or process.poll() is not None:
        raise CannotNow
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (rng.choice((0, 4096, 100_000, 1_000_000)), hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))


# --- MariaDB


@contextlib.contextmanager
def _transaction(environment: Environment, *statements: str) -> Iterator[None]:
    assert isinstance(environment, OtherEnvironment)
    assert environment.database is not None
    with contextlib.closing(environment.database.connect()) as session, session.cursor() as cursor:
        cursor.execute("SET lock_wait_timeout = 2, innodb_lock_wait_timeout = 2")
        try:
            for statement in statements:
                cursor.execute(statement)
        except (pymysql.err.OperationalError, pymysql.err.ProgrammingError) as error:
            raise CannotNow from error
        yield
        with contextlib.suppress(pymysql.err.Error):  # its server was killed
            cursor.execute("ROLLBACK")
            cursor.execute("UNLOCK TABLES")


def rows_locked(environment: Environment, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(environment, "BEGIN", f"SELECT * FROM load__{rng.choice(('branches', 'accounts'))} FOR UPDATE")


def position_locked(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(environment, "BEGIN", "SELECT * FROM subscriber_position FOR UPDATE")


def table_locked(environment: Environment, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(environment, f"LOCK TABLES load__{rng.choice(UNPREPARED)} {rng.choice(('WRITE', 'READ'))}")


def all_read_locked(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    """As for a backup."""
    return _transaction(environment, "FLUSH TABLES WITH READ LOCK")


def _kill(environment: Environment, what: str) -> None:
    assert isinstance(environment, OtherEnvironment)
    assert environment.database is not None
    database = environment.database
    for (session,) in database.fetch(
        "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> connection_id()", [database.name]
    ):
        with contextlib.suppress(pymysql.err.OperationalError):  # it has ended
            database.execute(f"{what} {session}")


@contextlib.contextmanager
def sessions_killed(environment: Environment, rng: random.Random) -> Iterator[None]:
    for _ in range(rng.randint(1, 3)):
        _kill(environment, "KILL")
        time.sleep(rng.uniform(0, 0.5))
    yield


@contextlib.contextmanager
def statements_killed(environment: Environment, rng: random.Random) -> Iterator[None]:
    for _ in range(rng.randint(1, 20)):
        _kill(environment, "KILL QUERY")
        time.sleep(rng.uniform(0, 0.1))
    yield


def _global(name: str, values: Callable[[random.Random], Any]) -> Refusal:
    @contextlib.contextmanager
    def refusal(environment: Environment, rng: random.Random) -> Iterator[None]:
        assert isinstance(environment, OtherEnvironment)
        assert environment.database is not None
        before = environment.database.value(f"SELECT @@GLOBAL.{name}")
        environment.database.execute(f"SET GLOBAL {name} = {values(rng)}")
        _kill(environment, "KILL")
        try:
            yield
        finally:
            with contextlib.closing(environment.database.connect()) as session, session.cursor() as cursor:
                cursor.execute("SET max_statement_time = 0")
                cursor.execute(f"SET GLOBAL {name} = {before}")
            _kill(environment, "KILL")

    return refusal


@contextlib.contextmanager
def target_restarted(environment: Environment, rng: random.Random) -> Iterator[None]:
    assert isinstance(environment, OtherEnvironment)
    assert environment.database is not None
    server = environment.database.server
    assert isinstance(server, EmbeddedMariaDB)
    rng.choice((server.stop, server.kill))()
    server.start()
    yield


SQLITE: dict[str, tuple[float, float, Refusal]] = {
    **PUBLISHER,
    "file locked": (4, 8, file_locked),
    "file locked for long": (0.7, 35, file_locked),
    "snapshot held": (1, 8, snapshot_held),
    "trigger refuses": (2, 6, trigger_refuses),
    "files limited": (3, 6, files_limited),
}
MARIADB: dict[str, tuple[float, float, Refusal]] = {
    **PUBLISHER,
    "rows locked": (2, 8, rows_locked),
    "rows locked for long": (0.5, 30, rows_locked),
    "position locked": (1, 8, position_locked),
    "table locked": (2, 8, table_locked),
    "all tables read-locked": (1, 6, all_read_locked),
    "sessions killed": (3, 0, sessions_killed),
    "statements killed": (2, 0, statements_killed),
    "trigger refuses": (2, 6, trigger_refuses),
    "statements time out": (1, 6, _global("max_statement_time", lambda rng: rng.choice((0.001, 0.05)))),
    "idle sessions end": (1, 6, _global("wait_timeout", lambda _: 1)),
    "lock waits time out": (1, 6, _global("innodb_lock_wait_timeout", lambda _: 1)),
    "target restarted": (0.5, 0, target_restarted),
}
