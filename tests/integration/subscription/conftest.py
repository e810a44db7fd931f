"""Fixtures of the tests of subscriptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database
from tests.support.replication_setup import ReplicationSetup


@pytest.fixture
def replication(publisher18_db: Database, target_db: Database, make_server: Callable[..., EmbeddedServer]) -> Iterator[ReplicationSetup]:
    with contextlib.ExitStack() as resources:
        yield ReplicationSetup(publisher18_db, target_db, make_server, resources)
