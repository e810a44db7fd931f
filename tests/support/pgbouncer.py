"""PgBouncer in front of a server of the tests. It is installed as MariaDB is, by apt as root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from subscriber.testing.apt import apt_install, may_install
from subscriber.testing.pgbouncer import Pool, find_pgbouncer
from subscriber.testing.pgbouncer import pgbouncer as run_pgbouncer
from tests.support.database import Database


def _program() -> str:
    found = find_pgbouncer()
    if found is None and may_install():
        apt_install(["pgbouncer"], "apt-get install pgbouncer")
        found = find_pgbouncer()
    if found is None:
        pytest.skip("PgBouncer is not installed, and only root can install it")
    return found


@contextlib.contextmanager
def pgbouncer(database: Database, pool_mode: str, **settings: str) -> Iterator[str]:
    """The URL of a database behind a PgBouncer of its own."""
    with pool(database, pool_mode, **settings) as found:
        yield found.url


@contextlib.contextmanager
def pool(database: Database, pool_mode: str, **settings: str) -> Iterator[Pool]:
    """A database behind a PgBouncer of its own."""
    with run_pgbouncer(_program(), {database.name: database.conninfo()}, pool_mode=pool_mode, **settings) as found:
        yield found
