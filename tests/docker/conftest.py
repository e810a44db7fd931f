"""One engine, the images, and one Compose project for the whole run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest

from tests.docker.engine import engine
from tests.docker.images import base_images, our_image
from tests.docker.replicas import PUBLICATION, Replica
from tests.docker.stack import Stack


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """Describes it."""
    with engine() as found:
        yield found


@pytest.fixture(scope="session")
def standins(docker_engine: str) -> Iterator[list[str]]:
    """The base images are there. The value names those that are not the official ones."""
    with base_images() as found:
        yield found


@pytest.fixture(scope="session")
def image(standins: list[str]) -> str:
    """Our image."""
    return our_image()


@pytest.fixture(scope="session")
def stack(image: str) -> Iterator[Stack]:
    """The target, publisher18 and its subscription, with the tables of the mixed load, all healthy."""
    with Stack(image) as found:
        found.start(18)
        yield found


@pytest.fixture
def replica(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Replica]:
    """A subscription that is not started yet, with an empty database. Its slot is dropped at the end."""
    name = f"extra_{secrets.token_hex(4)}"
    made = Replica(stack, name)
    made.create_database()
    with psycopg.connect(stack.publisher_dsn(18), autocommit=True) as publisher:
        if publisher.execute("SELECT FROM pg_publication WHERE pubname = %s", (PUBLICATION,)).fetchone() is None:
            publisher.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE accounts, transfers")
        yield made
        stack.remove_extra()
        slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE %s"
        publisher.execute("SET statement_timeout = '30s'")
        publisher.execute(slots, (f"{name}%",))
