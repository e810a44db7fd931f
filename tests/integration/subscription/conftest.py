"""Fixtures of the tests of subscriptions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database
from tests.support.replica import Replica, replica
from tests.support.replication_setup import ReplicationSetup
from tests.support.verification import Replicated


@pytest.fixture
def replication(publisher18_db: Database, target_db: Database, make_server: Callable[..., EmbeddedServer]) -> Iterator[ReplicationSetup]:
    with contextlib.ExitStack() as resources:
        yield ReplicationSetup(publisher18_db, target_db, make_server, resources)


@pytest.fixture
def replicated(publisher18_db: Database, target_db: Database) -> Replicated:
    """Subscribe to all tables: ``replicated(TABLES, ROWS)``. ``there``: the target's tables, if they are others."""

    @asynccontextmanager
    async def start(tables: str, rows: str = "SELECT", *, there: str | None = None, **options: Any) -> AsyncIterator[Replica]:
        publisher18_db.execute(f"{tables}; {rows}; CREATE PUBLICATION pub FOR ALL TABLES")
        target_db.execute(there or tables)
        async with replica(publisher18_db, target_db, **options) as found:
            await found.caught_up(60)
            yield found

    return start
