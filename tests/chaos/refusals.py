"""What a target, or the publisher, refuses for a while: locks, constraints, lost sessions, limits, a restart."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

import psycopg

from tests.chaos.environments import Environment, OtherEnvironment, PostgresEnvironment

Refusal = Callable[[Environment, random.Random], contextlib.AbstractContextManager[None]]

UNPREPARED = ("branches", "tellers", "history", "tags")
"""Tables that no prepared transaction holds: what has to be altered on both sides could wait for ever for one."""
_LOCK_SECONDS = 60.0


class CannotNow(Exception):
    """It is not begun: what it needs is not there, or is locked."""


def _patiently(execute: Callable[[], None], *errors: type[Exception]) -> None:
    """Until it is done: what was begun has to be ended."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            execute()
        except errors:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _alter(session: psycopg.Connection[tuple[object, ...]], statement: str) -> None:
    session.execute(b"SET lock_timeout = '2s'")
    session.execute(statement.encode())


# --- the publisher


@contextlib.contextmanager
def walsenders_terminated(environment: Environment, _: random.Random) -> Iterator[None]:
    environment.publisher.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = current_database() AND application_name LIKE '{environment.process.name}%'"
    )
    yield


@contextlib.contextmanager
def publisher_restarted(environment: Environment, rng: random.Random) -> Iterator[None]:
    environment.server.restart(rng.choice(("fast", "fast", "immediate")))
    environment.publisher.reconnect()
    yield


@contextlib.contextmanager
def column_added(environment: Environment, rng: random.Random) -> Iterator[None]:
    """On the publisher first, later in the target; a table that is not there yet may be made with it, or without."""
    if not environment.are_tables_ready():
        raise CannotNow
    table, column = rng.choice(UNPREPARED), f"c{rng.randrange(10**8)}"
    change = f"ADD COLUMN {column} integer DEFAULT {rng.randrange(100)}"
    with contextlib.closing(environment.publisher.connect()) as session:
        try:
            _alter(session, f"ALTER TABLE load.{table} {change}")
        except psycopg.errors.LockNotAvailable as error:
            raise CannotNow from error
    try:
        yield
    finally:
        alter_target(environment, table, change)


def alter_target(environment: Environment, table: str, change: str) -> None:
    """ALTER TABLE in the target, until it is done."""
    if isinstance(environment, PostgresEnvironment):
        with contextlib.closing(environment.target.connect(options="-c default_transaction_read_only=off")) as session:
            _patiently(lambda: _alter(session, f"ALTER TABLE load.{table} {change}"), psycopg.errors.LockNotAvailable)
        return
    from tests.chaos import other_refusals

    assert isinstance(environment, OtherEnvironment)
    other_refusals.alter(environment, f"ALTER TABLE load__{table} {change}")


# --- PostgreSQL


@contextlib.contextmanager
def _transaction(environment: Environment, *statements: str) -> Iterator[None]:
    assert isinstance(environment, PostgresEnvironment)
    with contextlib.closing(environment.target.connect()) as session:
        try:
            for statement in ("BEGIN", "SET LOCAL lock_timeout = '2s'", *statements):
                session.execute(statement.encode())
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, psycopg.errors.DeadlockDetected) as error:
            raise CannotNow from error
        yield
        with contextlib.suppress(psycopg.OperationalError):  # its server was restarted
            session.execute("ROLLBACK")


def table_locked(environment: Environment, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    table = rng.choice(("accounts", "documents", *UNPREPARED))
    return _transaction(environment, f"LOCK TABLE load.{table} IN {rng.choice(('ACCESS EXCLUSIVE', 'SHARE'))} MODE")


def rows_locked(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(environment, "SELECT FROM load.branches FOR UPDATE")


def position_locked(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _transaction(environment, 'SELECT FROM subscriber."position" FOR UPDATE')


def _signal(environment: PostgresEnvironment, function: str) -> None:
    environment.target.execute(
        f"SELECT {function}(pid) FROM pg_stat_activity WHERE datname = current_database()"
        f" AND pid <> pg_backend_pid() AND (application_name LIKE '{environment.process.name}%' OR backend_type <> 'client backend')"
    )


@contextlib.contextmanager
def sessions_terminated(environment: Environment, rng: random.Random) -> Iterator[None]:
    assert isinstance(environment, PostgresEnvironment)
    for _ in range(rng.randint(1, 3)):
        _signal(environment, "pg_terminate_backend")
        time.sleep(rng.uniform(0, 0.5))
    yield


@contextlib.contextmanager
def statements_canceled(environment: Environment, rng: random.Random) -> Iterator[None]:
    assert isinstance(environment, PostgresEnvironment)
    for _ in range(rng.randint(1, 20)):
        _signal(environment, "pg_cancel_backend")
        time.sleep(rng.uniform(0, 0.1))
    yield


@contextlib.contextmanager
def constraint_added(environment: Environment, rng: random.Random) -> Iterator[None]:
    """No row that comes now fits."""
    assert isinstance(environment, PostgresEnvironment)
    table = rng.choice(UNPREPARED)
    column = {"branches": "bbalance", "tellers": "tbalance", "history": "delta", "tags": "owner"}[table]
    with contextlib.closing(environment.target.connect()) as session:
        try:
            _alter(session, f"ALTER TABLE load.{table} ADD CONSTRAINT chaos CHECK ({column} IS NULL) NOT VALID")
        except psycopg.errors.LockNotAvailable as error:
            raise CannotNow from error
    try:
        yield
    finally:
        alter_target(environment, table, "DROP CONSTRAINT chaos")


@contextlib.contextmanager
def trigger_refuses(environment: Environment, rng: random.Random) -> Iterator[None]:
    """With an error of the trigger's choice."""
    assert isinstance(environment, PostgresEnvironment)
    table, code = rng.choice(UNPREPARED), rng.choice(("P0001", "53100", "40001", "23505", "57014", "55P03", "XX000"))
    make = (
        f"CREATE OR REPLACE FUNCTION chaos() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'chaos' USING ERRCODE = '{code}';"
        f" END$$; CREATE TRIGGER chaos BEFORE INSERT OR UPDATE OR DELETE ON load.{table} FOR EACH ROW EXECUTE FUNCTION chaos();"
        f" ALTER TABLE load.{table} ENABLE ALWAYS TRIGGER chaos"
    )
    with contextlib.closing(environment.target.connect()) as session:
        try:
            _alter(session, make)
        except psycopg.errors.LockNotAvailable as error:
            raise CannotNow from error
        try:
            yield
        finally:
            with contextlib.closing(environment.target.connect()) as last:
                _patiently(lambda: _alter(last, f"DROP TRIGGER chaos ON load.{table}"), psycopg.errors.LockNotAvailable)


def _maintenance(environment: PostgresEnvironment) -> psycopg.Connection[tuple[object, ...]]:
    """A session in another database of the target's server."""
    return psycopg.connect(environment.target.server.dsn(), autocommit=True)


@contextlib.contextmanager
def _setting(environment: Environment, name: str, value: str) -> Iterator[None]:
    assert isinstance(environment, PostgresEnvironment)
    name_of_database = environment.target.name
    with contextlib.closing(_maintenance(environment)) as session:
        session.execute(f"ALTER DATABASE {name_of_database} SET {name} = '{value}'".encode())
    _signal(environment, "pg_terminate_backend")
    try:
        yield
    finally:
        with contextlib.closing(_maintenance(environment)) as session:
            session.execute(f"ALTER DATABASE {name_of_database} RESET {name}".encode())
        # the present session would keep it for its whole life
        _signal(environment, "pg_terminate_backend")


def statements_time_out(environment: Environment, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    return _setting(environment, "statement_timeout", f"{rng.choice((1, 5, 50))}ms")


def locks_time_out(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _setting(environment, "lock_timeout", "1ms")


def idle_sessions_end(environment: Environment, rng: random.Random) -> contextlib.AbstractContextManager[None]:
    name = rng.choice(("idle_session_timeout", "idle_in_transaction_session_timeout"))
    return _setting(environment, name, f"{rng.choice((10, 200))}ms")


def read_only(environment: Environment, _: random.Random) -> contextlib.AbstractContextManager[None]:
    return _setting(environment, "default_transaction_read_only", "on")


@contextlib.contextmanager
def target_restarted(environment: Environment, rng: random.Random) -> Iterator[None]:
    assert isinstance(environment, PostgresEnvironment)
    environment.target_server.restart(rng.choice(("fast", "fast", "immediate")))
    environment.target.reconnect()
    yield


@contextlib.contextmanager
def no_connections(environment: Environment, _: random.Random) -> Iterator[None]:
    """53300, or 55000: the database takes none."""
    assert isinstance(environment, PostgresEnvironment)
    with contextlib.closing(_maintenance(environment)) as session:
        session.execute(f"ALTER DATABASE {environment.target.name} ALLOW_CONNECTIONS false".encode())
    _signal(environment, "pg_terminate_backend")
    try:
        yield
    finally:
        with contextlib.closing(_maintenance(environment)) as session:
            session.execute(f"ALTER DATABASE {environment.target.name} ALLOW_CONNECTIONS true".encode())


PUBLISHER: dict[str, tuple[float, float, Refusal]] = {
    "walsenders terminated": (3, 0, walsenders_terminated),
    "publisher restarted": (0.5, 0, publisher_restarted),
    "column added on the publisher first": (1, 3, column_added),
}
"""Weight, seconds at most, and what is done, by name."""
POSTGRES: dict[str, tuple[float, float, Refusal]] = {
    **PUBLISHER,
    "table locked": (2, 8, table_locked),
    "rows locked": (2, 8, rows_locked),
    "position locked": (1, 8, position_locked),
    "sessions terminated": (3, 0, sessions_terminated),
    "statements canceled": (2, 0, statements_canceled),
    "constraint added": (2, 6, constraint_added),
    "trigger refuses": (2, 6, trigger_refuses),
    "statements time out": (1, 6, statements_time_out),
    "locks time out": (1, 6, locks_time_out),
    "idle sessions end": (1, 6, idle_sessions_end),
    "target read-only": (1, 6, read_only),
    "target takes no connections": (1, 6, no_connections),
    "target restarted": (0.5, 0, target_restarted),
}
