"""What can be wrong around a container: its log says it in one line, the health check shows it, and nothing is lost."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.docker.engine import apt_install, docker, wait_until
from tests.docker.replicas import VOLUME, Replica, wait_for_server
from tests.docker.stack import PASSWORD, Container, Stack

_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def assert_ends_with(container: Container, *messages: str) -> None:
    """It ends with status 1 and says just this, a line for each."""
    assert container.wait_for_end() == 1
    lines = [line for line in container.logs.splitlines() if line and " WARNING " not in line]
    assert len(lines) == len(messages), container.logs
    for line, message in zip(lines, messages, strict=True):
        assert message in line
        assert "(hint: " in line
        assert PASSWORD not in line
    assert container.health()[0] == "unhealthy"


@pytest.mark.parametrize(
    ("password", "message", "health"),
    [
        (None, "no password supplied", "the target asks for a password, and none is set"),
        ("wrong", 'password authentication failed for user "subscriber"', "the target rejects the login"),
    ],
    ids=["missing", "wrong"],
)
def test_password(replica: Replica, password: str | None, message: str, health: str) -> None:
    replica.password = password
    assert_ends_with(replica.start(), message)
    assert replica.check() == health


def test_publisher_without_logical_wal(stack: Stack, replica: Replica) -> None:
    server = stack.run("--env", f"POSTGRES_PASSWORD={PASSWORD}", "--network-alias", "physical", "postgres:18-bookworm")
    wait_for_server(server)
    server.exec("psql", "-U", "postgres", "-c", "CREATE PUBLICATION small")
    replica.connection = "host=physical user=postgres dbname=postgres"
    assert_ends_with(replica.start(), 'wal_level is "replica" on the publisher')
    assert replica.check() == "the target has no catalog yet"


def test_target_that_is_not_reachable_yet(stack: Stack, replica: Replica) -> None:
    """The supervisor starts the container again until the target is there."""
    replica.target = f"postgresql://subscriber@later/{replica.name}"
    container = replica.start("--restart", "on-failure")
    container.wait_for_log("could not connect to the target")
    assert "(hint: check that the target runs, and host and port)" in container.logs.splitlines()[0]
    assert replica.check() == "the target cannot be reached"
    target = stack.service("target").identity
    docker("network", "disconnect", stack.network, target)
    docker("network", "connect", "--alias", "target", "--alias", "later", stack.network, target)
    container.wait_for_health("healthy")
    replica.assert_equal()


@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "writable"])
def test_volume_of_another_user(stack: Stack, replica: Replica, read_only: bool) -> None:
    """It is an error also where Python would take /tmp instead."""
    volume = stack.volume("--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=size=1m,uid=0,mode=0700")
    options = ("--volume", f"{volume}:{VOLUME}", f"--read-only={str(read_only).lower()}")
    container = replica.start(*options)
    message = f'could not create spool directory "{VOLUME}/subscriber-10001": Permission denied'
    assert_ends_with(container, message)
    assert replica.check() == "the target has no catalog yet"

    # the same for a subscription that exists
    container = replica.start()
    container.wait_for_health("healthy")
    container.stop()
    assert_ends_with(replica.start(*options), message)
    assert replica.check() == f'replication slot "{replica.name}" is not active'


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_lock_of_a_killed_container_is_not_in_the_way(stack: Stack, replica: Replica, kind: str) -> None:
    """While it runs, a second container is rejected; after ``kill -9`` the next one continues."""
    options = ("--volume", f"{stack.volume()}:{VOLUME}")
    if kind == "sqlite":
        replica.target = f"sqlite:///{VOLUME}/replica.db"
    first = replica.start(*options)
    first.wait_for_health("healthy")
    second = replica.start(*options)
    assert second.wait_for_end() == 1
    assert f'subscription "{replica.name}" is active for PID' in second.logs.splitlines()[-1]
    first.kill()
    replica.change()
    third = replica.start(*options)
    third.wait_for_health("healthy")
    stack.wait_for_all(18, slot=replica.name)
    assert "Traceback" not in third.logs
    if kind == "postgresql":
        replica.assert_equal()


@pytest.mark.parametrize("offset", ["-2h", "+2h"])
def test_clock_skew(stack: Stack, replica: Replica, offset: str) -> None:
    """A container whose clock is wrong by two hours replicates, and reports a lag that has nothing to do with the difference."""
    if not _FAKETIME.exists():
        apt_install("libfaketime")
    faked = ("LD_PRELOAD=/opt/libfaketime.so.1", f"FAKETIME={offset}", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    mount = ("--volume", f"{_FAKETIME}:/opt/libfaketime.so.1:ro")
    container = replica.start(*mount, *(word for variable in faked for word in ("--env", variable)))
    container.wait_for_health("healthy")
    assert abs(float(container.python("import time; print(time.time())")) - time.time()) > 7_000
    replica.change()
    replica.assert_equal()

    # the server also writes WAL by itself, so that there is a lag of some bytes at times
    lags: list[float] = []

    def caught_up() -> bool:
        found = re.search(r"lag +0 bytes, ([\d.]+) s", container.exec("subscriber", "status", "--target", replica.target))
        lags.extend([float(found[1])] if found else [])
        return found is not None

    wait_until(caught_up, lambda: container.exec("subscriber", "status", "--target", replica.target))
    assert lags[0] < 60
