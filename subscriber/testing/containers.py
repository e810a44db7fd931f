"""PostgreSQL in a container for tests, by testcontainers: with Docker or Podman.

The container is a publisher for all features of logical replication: ``wal_level = logical``, slots, WAL senders and prepared
transactions. It is ready when it answers over TCP. While the image runs its init scripts, the server listens on a socket only.

testcontainers finds the engine: ``DOCKER_HOST``, the current context of Docker, or Docker's default socket. If none of them answers,
Podman's sockets are tried. testcontainers and its engine client are imported when they are first used (``pg-subscriber[containers]``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.testing.fixtures.postgres import drop_database

__all__ = ["ContainerError", "ContainerServer", "EngineUnavailable", "PostgresContainers", "postgres_container"]

_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "wal_level": "logical",
        "max_prepared_transactions": "50",
        "max_wal_senders": "40",
        "max_replication_slots": "40",
        "max_connections": "200",
        "fsync": "off",
    }
)
_START_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.1
_LOG_LINES: Final = 20
_PORT: Final = 5432
_DEFAULT: Final = "unix:///var/run/docker.sock"
_DROP_TIMEOUT: Final = "30s"


class EngineUnavailable(ConfigurationError):
    """testcontainers is not installed, or no container engine answers. Tests may be skipped for it."""


class ContainerError(SubscriberError):
    """A container ended, or its server did not answer in time. The end of its log is in the notes."""


@dataclass(frozen=True, slots=True)
class ContainerServer:
    """A PostgreSQL server in a container.

    Attributes:
        version: major version.
        host, port: where this machine reaches it.
        user, password: the superuser.
    """

    version: int
    host: str
    port: int
    password: str
    user: str = "postgres"

    def dsn(self, dbname: str = "postgres", **params: str) -> str:
        """Return the URL of a database, for the superuser.

        Args:
            dbname: the database.
            params: connection parameters of libpq.
        """
        query = f"?{urlencode(params, quote_via=quote)}" if params else ""
        return f"postgresql://{self.user}:{quote(self.password, safe='')}@{self.host}:{self.port}/{quote(dbname, safe='')}{query}"

    def createdb(self, name: str) -> str:
        """Create a database and return its URL."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    @contextlib.contextmanager
    def database(self, prefix: str = "test") -> Iterator[str]:
        """A new database for one test. The value is its URL.

        It is dropped at the end, with its sessions, prepared transactions and replication slots.
        """
        name = f"{prefix}_{secrets.token_hex(6)}"
        dsn = self.createdb(name)
        try:
            yield dsn
        finally:
            with psycopg.connect(self.dsn(), autocommit=True) as connection:
                connection.execute(f"SET statement_timeout = '{_DROP_TIMEOUT}'")
                drop_database(connection, dsn, name)


@contextlib.contextmanager
def postgres_container(
    version: int = 18, settings: Mapping[str, str] | None = None, *, image: str | None = None, timeout: float = _START_SECONDS
) -> Iterator[ContainerServer]:
    """Run a PostgreSQL server in a container, and remove it at the end, with its data.

    Args:
        version: major version, 14 or later.
        settings: server settings (``postgresql.conf``), which replace the ones chosen for a publisher.
        image: other than ``postgres:<version>-bookworm``; it must work as the official image does.
        timeout: seconds for the start, without the download of the image.

    Raises:
        EngineUnavailable: testcontainers is not installed, or no engine answers.
        ContainerError: the server does not start.
    """
    password = secrets.token_urlsafe(18)
    container = _container(image or f"postgres:{version}-bookworm")
    container.with_env("POSTGRES_PASSWORD", password).with_exposed_ports(_PORT)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**_SETTINGS, **(settings or {})}.items()]
    container.with_command(["postgres", *words])
    try:
        server = _start(container, version, password)
        _wait_until_ready(container, server, time.monotonic() + timeout)
        yield server
    finally:
        if _made(container) is not None:
            container.stop()
        container.get_docker_client().client.close()


class PostgresContainers:
    """The containers of a test session: one for each version and settings, started when it is first asked for.

    As a context manager it removes them at the end.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[int, frozenset[tuple[str, str]]], ContainerServer] = {}
        self._stack = contextlib.ExitStack()

    def get(self, version: int = 18, settings: Mapping[str, str] | None = None) -> ContainerServer:
        """Return the container's server. See :func:`postgres_container`."""
        key = (version, frozenset((settings or {}).items()))
        if key not in self._running:
            self._running[key] = self._stack.enter_context(postgres_container(version, settings))
        return self._running[key]

    def close(self) -> None:
        """Remove them."""
        self._running.clear()
        self._stack.close()

    def __enter__(self) -> PostgresContainers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _container(image: str) -> Any:
    """A container of testcontainers, on an engine that answers."""
    try:
        docker = importlib.import_module("docker")
        from testcontainers.core.config import testcontainers_config  # noqa: PLC0415 (an extra)
        from testcontainers.core.container import DockerContainer  # noqa: PLC0415
        from testcontainers.core.docker_client import get_docker_host  # noqa: PLC0415
    except ImportError as error:
        raise EngineUnavailable("testcontainers is not installed", hint="pip install 'pg-subscriber[containers]'") from error
    refused = (docker.errors.DockerException, OSError)
    reason: Exception | None = None
    named = get_docker_host() or _DEFAULT
    # the engine's client leaves its socket open if there is nothing to connect to
    if not named.startswith("unix://") or os.path.exists(named.removeprefix("unix://")):
        try:
            return DockerContainer(image)
        except refused as error:
            reason = error
    for socket in _podman_sockets():
        try:
            found = DockerContainer(image, docker_client_kw={"environment": {"DOCKER_HOST": f"unix://{socket}"}})
        except refused as error:
            reason = error
        else:
            # the container that removes others is not made for Podman
            testcontainers_config.ryuk_disabled = True
            return found
    if "Permission denied" in str(reason):
        text, hint = "this user may not use it", "add the user to the group docker, or start `podman system service` as this user"
    else:
        text, hint = "no container engine answers", "start Docker, or `podman system service`, or set DOCKER_HOST to an engine's socket"
    raise EngineUnavailable(f"{named}: {text}", hint=hint) from reason


def _podman_sockets() -> list[Path]:
    """Where Podman's service listens for this user, and for root."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    # only root may look into /run/podman, so not Path.exists(), which raises PermissionError
    return [path for path in (Path(runtime, "podman", "podman.sock"), Path("/run/podman/podman.sock")) if os.path.exists(path)]


def _made(container: Any) -> Any:
    """The engine's container, or None if there is none yet."""
    try:
        return container.get_wrapped_container()
    except RuntimeError:  # of newer versions; older ones return None
        return None


def _start(container: Any, version: int, password: str) -> ContainerServer:
    refused = importlib.import_module("docker").errors.DockerException
    try:
        container.start()
        return ContainerServer(version, container.get_container_host_ip(), int(container.get_exposed_port(_PORT)), password)
    except (refused, OSError, RuntimeError) as error:
        reason = getattr(error, "explanation", None) or error
        pull = "check that the engine can pull this image, and testcontainers/ryuk, which TESTCONTAINERS_RYUK_DISABLED=true leaves out"
        hint = pull if _made(container) is None else "see the end of its log"
        raise _failure(container, f"could not start a container of {container.image}: {reason}", hint) from error


def _failure(container: Any, text: str, hint: str) -> ContainerError:
    failure = ContainerError(text, hint=hint)
    if (made := _made(container)) is not None:
        for line in made.logs(tail=_LOG_LINES).decode(errors="replace").splitlines():
            failure.add_note(line)
    return failure


def _wait_until_ready(container: Any, server: ContainerServer, deadline: float) -> None:
    made = _made(container)
    while True:
        try:
            with psycopg.connect(server.dsn(connect_timeout="5")):
                return
        except psycopg.OperationalError as error:
            made.reload()
            ended = made.status in {"exited", "dead"}
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else "does not answer"
                raise _failure(container, f"PostgreSQL {server.version} in a container {what}", "see the end of its log") from error
        time.sleep(_POLL_SECONDS)
