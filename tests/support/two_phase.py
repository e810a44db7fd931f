"""Prepared transactions of a publisher, under names of its database: one server has the databases of many tests."""

from __future__ import annotations

from tests.support.database import Database


def name(publisher: Database, gid: str) -> str:
    return f"{publisher.name} {gid}"


def prepare(publisher: Database, gid: str, *statements: str) -> int:
    """Prepare a transaction; return its xid."""
    with publisher.connect() as session:
        session.execute("BEGIN")
        for statement in statements:
            session.execute(statement.encode())
        row = session.execute("SELECT pg_current_xact_id()::text::int8 % 4294967296").fetchone()
        assert row is not None
        session.execute(f"PREPARE TRANSACTION '{name(publisher, gid)}'".encode())
    return int(row[0])


def finish(publisher: Database, gid: str, how: str) -> None:
    """``COMMIT`` or ``ROLLBACK`` a prepared transaction."""
    publisher.execute(f"{how} PREPARED '{name(publisher, gid)}'")
