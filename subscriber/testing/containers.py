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
        """A new database for one test. It is dropped at the end, with its replication slots and sessions. The value is its URL."""
        name = f"{prefix}_{secrets.token_hex(6)}"
        try:
            yield self.createdb(name)
        finally:
            with psycopg.connect(self.dsn(), autocommit=True) as connection:
                connection.execute(f"SET statement_timeout = '{_DROP_TIMEOUT}'")
                _drop_slots(connection, name)
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _drop_slots(connection: psycopg.Connection[Any], database: str) -> None:
    slots = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s"
    for slot, pid in connection.execute(slots, (database,)).fetchall():
        if pid is not None:
            connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


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
        container.start()
        server = ContainerServer(version, container.get_container_host_ip(), int(container.get_exposed_port(_PORT)), password)
        _wait_until_ready(container, server, time.monotonic() + timeout)
        yield server
    finally:
        if container.get_wrapped_container() is not None:
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
    if not named.startswith("unix://") or Path(named.removeprefix("unix://")).exists():
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
    raise EngineUnavailable(
        "no container engine answers", hint="start Docker, or `podman system service`, or set DOCKER_HOST to an engine's socket"
    ) from reason


def _podman_sockets() -> list[Path]:
    """Where Podman's service listens for this user, and for root."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return [path for path in (Path(runtime, "podman", "podman.sock"), Path("/run/podman/podman.sock")) if path.exists()]


def _wait_until_ready(container: Any, server: ContainerServer, deadline: float) -> None:
    wrapped = container.get_wrapped_container()
    while True:
        try:
            with psycopg.connect(server.dsn(connect_timeout="5")):
                return
        except psycopg.OperationalError as error:
            wrapped.reload()
            ended = wrapped.status in {"exited", "dead"}
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else "does not answer"
                failure = ContainerError(f"PostgreSQL {server.version} in a container {what}", hint="see the end of its log")
                for line in wrapped.logs(tail=_LOG_LINES).decode(errors="replace").splitlines():
                    failure.add_note(line)
                raise failure from error
        time.sleep(_POLL_SECONDS)
