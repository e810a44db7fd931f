"""Gates in a target: an inserted row waits until the test opens its gate, so that a test can hold a subscription in a state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tests.support.database import Database


def make_row_gate(target: Database, table: str, condition: str, key: int) -> None:
    """Rows inserted into ``table`` for which ``condition`` (of NEW) is true wait while the gate ``key`` is closed.

    The apply side runs as session_replication_role = replica: only ENABLE ALWAYS triggers fire for it.
    """
    target.execute(f"""
        CREATE FUNCTION gate_{key}() RETURNS trigger LANGUAGE plpgsql
            AS 'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared({key}); RETURN NEW; END';
        CREATE TRIGGER gate_{key} BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION gate_{key}();
        ALTER TABLE {table} ENABLE ALWAYS TRIGGER gate_{key};
    """)


@contextlib.contextmanager
def closed_gates(target: Database, *keys: int) -> Iterator[Callable[[int], None]]:
    """Close gates while the block lasts. The function that it yields opens one of them earlier."""
    with contextlib.closing(target.connect()) as holder:
        for key in keys:
            holder.execute("SELECT pg_advisory_lock(%s)", (key,))

        def release(key: int) -> None:
            holder.execute("SELECT pg_advisory_unlock(%s)", (key,))

        yield release


@contextlib.contextmanager
def open_transaction(database: Database, statement: str) -> Iterator[Callable[[], None]]:
    """Keep a transaction with this statement open while the block lasts, in its own session; the function that it yields commits it."""
    with contextlib.closing(database.connect()) as holder:
        holder.execute(b"BEGIN;" + statement.encode())

        def release() -> None:
            holder.execute("COMMIT")

        yield release


def waiting_at_gate(key: int) -> str:
    """A query: how many sessions of this database wait at the gate."""
    return (
        f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {key} AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


def waiting_for_lock_on(table: str) -> str:
    """A query: how many sessions wait for a lock on the table."""
    return f"SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted"


def wait_for_state(target: Database, table: str, states: str) -> None:
    """Poll until the subscription's catalog is there and has the table in one of the states (as in "sr")."""
    target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
    target.wait(
        f"SELECT strpos('{states}', srsubstate::text) > 0 FROM subscriber.pg_subscription_rel WHERE srrelid = '{table}'::regclass", True
    )
