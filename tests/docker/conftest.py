"""One engine, the images, and one Compose project with all publishers for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docker.engine import engine
from tests.docker.images import VERSIONS, base_images, our_image
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
    """Every publisher and its subscription, with the tables of the mixed load, all healthy."""
    with Stack(image) as found:
        found.up("target", *(f"publisher{version}" for version in VERSIONS))
        for version in VERSIONS:
            found.add_load_tables(version)
        found.up()
        yield found
