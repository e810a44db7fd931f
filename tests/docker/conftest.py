"""One engine, the images, and one Compose project for the whole run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest

from tests.docker.engine import docker, engine, inspect
from tests.docker.images import base_images, our_image, python_image
from tests.docker.replicas import PUBLICATION, Replica
from tests.docker.stack import Stack

_REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[_REPORT]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def docker_engine(pytestconfig: pytest.Config) -> Iterator[str]:
    """Describes it."""
    with engine() as found:
        pytestconfig.stash[_REPORT].append(f"engine: {found}")
        yield found


@pytest.fixture(scope="session")
def standins(docker_engine: str, pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """The base images are there. The value names those that are not the official ones."""
    with base_images() as found:
        pytestconfig.stash[_REPORT].append(f"stand-ins: {', '.join(found) or 'none'}")
        yield found


@pytest.fixture(scope="session")
def image(standins: list[str], pytestconfig: pytest.Config) -> str:
    """Our image."""
    name = our_image()
    size, base = (inspect("image", found)["Size"] for found in (name, python_image()))
    lines = [f"image: {size / 1e6:.0f} MB, of which {(size - base) / 1e6:.0f} MB are not of the base image; its layers:"]
    layers = docker("history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", name).splitlines()
    lines += [f"  {line[:110]}" for line in layers if not line.startswith("0B\t")]
    pytestconfig.stash[_REPORT].extend(lines)
    return name


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
