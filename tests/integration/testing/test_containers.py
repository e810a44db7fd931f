"""``subscriber.testing.containers``, as far as it needs no container: its databases, on an embedded server."""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from subscriber.testing.containers import ContainerServer
from subscriber.testing.server import EmbeddedServer


def test_database_is_dropped_with_its_prepared_transactions_and_slots(make_server: Callable[..., EmbeddedServer]) -> None:
    embedded = make_server(18)
    server = ContainerServer(18, embedded.host, embedded.port, embedded.password, embedded.user)
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot('left', 'pgoutput')")
        session.execute("CREATE TABLE accounts (id int)")
        session.execute("BEGIN")
        session.execute("INSERT INTO accounts VALUES (1)")
        session.execute("PREPARE TRANSACTION 'left'")
    with psycopg.connect(server.dsn()) as session:
        for found in ("pg_prepared_xacts", "pg_replication_slots", "pg_database WHERE datname LIKE 'test%'"):
            assert session.execute(f"SELECT count(*) FROM {found}".encode()).fetchone() == (0,)
