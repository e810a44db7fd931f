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
from tests.chaos.refusals import PUBLISHER, UNPREPARED, CannotNow, Refusal
from tests.chaos.worlds import OtherWorld, World

_PATIENCE = 60.0
_BUSY = 0.2


def alter(world: OtherWorld, statement: str) -> None:
    """Run DDL in the target, until it is done."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            world.execute(statement)
        except (sqlite3.OperationalError, pymysql.err.OperationalError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_BUSY)
        else:
            return


@contextlib.contextmanager
def trigger_refuses(world: World, rng: random.Random) -> Iterator[None]:
    """Changes of one table."""
    assert isinstance(world, OtherWorld)
    if not world.are_tables_ready():
        raise CannotNow
    table = rng.choice(UNPREPARED)
    refuse = "BEGIN SELECT RAISE(ABORT, 'chaos'); END" if world.path else "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'chaos'"
    row = "FOR EACH ROW "
    try:
        for what in ("INSERT", "UPDATE"):
            world.execute(f"CREATE TRIGGER chaos_{what} BEFORE {what} ON load__{table} {row}{refuse}")
    except (sqlite3.OperationalError, pymysql.err.OperationalError, pymysql.err.ProgrammingError) as error:
        alter(world, "DROP TRIGGER IF EXISTS chaos_INSERT")
        raise CannotNow from error
    try:
        yield
    finally:
        for what in ("INSERT", "UPDATE"):
            alter(world, f"DROP TRIGGER IF EXISTS chaos_{what}")


# --- SQLite


@contextlib.contextmanager
def file_locked(world: World, rng: random.Random) -> Iterator[None]:
    """By another process: we are one."""
    assert isinstance(world, OtherWorld)
    if not world.is_there():
        raise CannotNow
    with contextlib.closing(world.open_file()) as file:
        try:
            file.execute(rng.choice(("BEGIN IMMEDIATE", "BEGIN EXCLUSIVE")))
        except sqlite3.OperationalError as error:
            raise CannotNow from error
        yield
        file.execute("ROLLBACK")


@contextlib.contextmanager
def snapshot_held(world: World, _: random.Random) -> Iterator[None]:
    """A reader that keeps the write-ahead log from its start."""
    assert isinstance(world, OtherWorld)
    if not world.is_there():
        raise CannotNow
    with contextlib.closing(world.open_file()) as file:
        file.execute("BEGIN")
        file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield
        file.execute("ROLLBACK")


@contextlib.contextmanager
def files_limited(world: World, rng: random.Random) -> Iterator[None]:
    """No file grows beyond a size: a full disk for the database, its log, and the spool. The program ignores SIGXFSZ, as Python does."""
    process = world.process.process
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
def _transaction(world: World, *statements: str) -> Iterator[None]:
    assert isinstance(world, OtherWorld)
    assert world.database is not None
    with contextlib.closing(world.database.connect()) as session, session.cursor() as cursor:
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


def rows_locked(world: World, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(world, "BEGIN", f"SELECT * FROM load__{rng.choice(('branches', 'accounts'))} FOR UPDATE")


def position_locked(world: World, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(world, "BEGIN", "SELECT * FROM subscriber_position FOR UPDATE")


def table_locked(world: World, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(world, f"LOCK TABLES load__{rng.choice(UNPREPARED)} {rng.choice(('WRITE', 'READ'))}")


def all_read_locked(world: World, _: random.Random) -> contextlib.AbstractContextManager[None]:
    """As for a backup."""
    return _transaction(world, "FLUSH TABLES WITH READ LOCK")


def _kill(world: World, what: str) -> None:
    assert isinstance(world, OtherWorld)
    assert world.database is not None
    database = world.database
    for (session,) in database.fetch(
        "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> connection_id()", [database.name]
    ):
        with contextlib.suppress(pymysql.err.OperationalError):  # it ended meanwhile
            database.execute(f"{what} {session}")


@contextlib.contextmanager
def sessions_killed(world: World, rng: random.Random) -> Iterator[None]:
    for _ in range(rng.randint(1, 3)):
        _kill(world, "KILL")
        time.sleep(rng.uniform(0, 0.5))
    yield


@contextlib.contextmanager
def statements_killed(world: World, rng: random.Random) -> Iterator[None]:
    for _ in range(rng.randint(1, 20)):
        _kill(world, "KILL QUERY")
        time.sleep(rng.uniform(0, 0.1))
    yield


def _global(name: str, values: Callable[[random.Random], Any]) -> Refusal:
    @contextlib.contextmanager
    def refusal(world: World, rng: random.Random) -> Iterator[None]:
        assert isinstance(world, OtherWorld)
        assert world.database is not None
        before = world.database.value(f"SELECT @@GLOBAL.{name}")
        world.database.execute(f"SET GLOBAL {name} = {values(rng)}")
        _kill(world, "KILL")
        try:
            yield
        finally:
            with contextlib.closing(world.database.connect()) as session, session.cursor() as cursor:
                cursor.execute("SET max_statement_time = 0")
                cursor.execute(f"SET GLOBAL {name} = {before}")
            _kill(world, "KILL")

    return refusal


@contextlib.contextmanager
def target_restarted(world: World, rng: random.Random) -> Iterator[None]:
    assert isinstance(world, OtherWorld)
    assert world.database is not None
    server = world.database.server
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
