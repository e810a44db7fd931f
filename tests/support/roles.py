"""Roles of the publisher for one test, with a password and nothing else."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.database import Database


@dataclass(frozen=True)
class Role:
    """A login role; ``conninfo`` connects as it."""

    name: str
    password: str
    conninfo: str


@contextlib.contextmanager
def role(database: Database, attributes: str = "LOGIN") -> Iterator[Role]:
    name, password = f"r_{secrets.token_hex(4)}", secrets.token_hex(8)
    database.execute(f"CREATE ROLE {name} PASSWORD '{password}' {attributes}")
    try:
        yield Role(name, password, database.conninfo(user=name, password=password))
    finally:
        database.wait(
            f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{name}'",
            0,
        )
        database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
