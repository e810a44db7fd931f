"""Embedded PostgreSQL servers for tests, for ``subscriber demo`` and for other short uses.

A server lives in a private directory (data, socket, log) that is removed with it. It listens on 127.0.0.1 with a random
superuser password (SCRAM) and on a private Unix socket. It is configured as a publisher for all features of logical replication, and
without fsync: its data need not survive a crash of the machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from subscriber.testing.binaries import ServerUser, reachable_binaries, server_user
from subscriber.testing.embedded import Embedded
from subscriber.testing.ports import EmbeddedServerError
from subscriber.testing.shared_memory import release

__all__ = ["EmbeddedServer", "EmbeddedServerError"]

StopMode = Literal["fast", "immediate", "smart"]

_STOP_SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_prepared_transactions": "50",
    "max_wal_senders": "40",
    "max_replication_slots": "40",
    "max_connections": "200",
    "logical_decoding_work_mem": "64kB",
    "fsync": "off",
    # other kinds of shared memory stay after a server was killed, until the system restarts; this one is in the data directory
    "dynamic_shared_memory_type": "mmap",
}
_SETS_AT_INITDB: Final = 16
# the next postmaster refuses to start while a child of the previous one still uses the shared memory
_CHILDREN_SECONDS: Final = 60.0


class EmbeddedServer(Embedded):
    """One embedded PostgreSQL server. Create it with :meth:`create`. As a context manager it is removed at the end.

    Its methods block. In coroutines, call them through :func:`asyncio.to_thread` where that matters.

    Attributes:
        version: major version.
        bindir: directory of its programs.
        host, port: where it listens. They stay the same after a restart.
        data_directory: the database cluster.
        socket_directory: directory of its Unix socket.
        log_file: log of the server and of ``initdb``.
        user, password: the superuser.
    """

    user: Final = "postgres"
    cannot_bind = b"could not bind"
    watchdog_signal = "QUIT"

    def __init__(self, version: int, bindir: Path, base: Path, run_as: ServerUser) -> None:
        super().__init__(f"PostgreSQL {version}", base, run_as)
        self.version = version
        self.bindir = bindir
        self.data_directory = base / "data"
        self.socket_directory = base / "s"
        self.password = secrets.token_urlsafe(18)

    @classmethod
    def create(
        cls,
        version: int = 18,
        *,
        settings: Mapping[str, str] | None = None,
        initdb_args: Sequence[str] = (),
        directory: Path | str | None = None,
    ) -> Self:
        """Create a new cluster and start it.

        Args:
            version: major version. :func:`subscriber.testing.binaries.find_binaries` says where it is searched.
            settings: for postgresql.conf, in addition to those that make it a publisher.
            initdb_args: for ``initdb``.
            directory: where the private directory is created; the system's temporary directory if None.

        Raises:
            ConfigurationError: the version is not installed.
            EmbeddedServerError: initdb or the start failed.
        """
        run_as = server_user()
        bindir = reachable_binaries(version, run_as)
        base = Path(tempfile.mkdtemp(prefix=f"pg{version}-", dir=directory))
        server = cls(version, bindir, base, run_as)
        try:
            server.socket_directory.mkdir(mode=0o700)
            server.log_file.touch(mode=0o600)
            for path in (base, server.socket_directory):
                run_as.own(path)
            of_version = {"max_active_replication_origins": "40"} if version >= 18 else {}
            server._initdb(initdb_args)
            server._configure({**_SETTINGS, **of_version, **(settings or {})})
            server.start()
        except BaseException:
            server.remove()
            raise
        return server

    def _initdb(self, initdb_args: Sequence[str]) -> None:
        password_file = self.base / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        # iterations protect passwords that can be guessed; this one is 18 random bytes, so they would only slow down every session
        iterations = ["--set=scram_iterations=1"] if self.version >= _SETS_AT_INITDB else []
        self._run_as.own(password_file)
        done = self._run_as.run(
            self.bindir / "initdb",
            f"--pgdata={self.data_directory}",
            f"--username={self.user}",
            f"--pwfile={password_file}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            *iterations,
            *initdb_args,
            cwd=self.base,
        )
        password_file.unlink()
        if done.returncode != 0:
            self.log_file.write_text(done.stdout + done.stderr)
            raise self._failure(f"initdb of PostgreSQL {self.version} failed with status {done.returncode}")

    def _configure(self, settings: Mapping[str, str]) -> None:
        with (self.data_directory / "postgresql.conf").open("a", encoding="utf-8") as configuration:
            for name, value in settings.items():
                escaped = value.replace("\\", "\\\\").replace("'", "''")
                configuration.write(f"{name} = '{escaped}'\n")

    def dsn(self, dbname: str = "postgres", **params: str) -> str:
        """Return the URL of a database, for the superuser over TCP.

        Args:
            dbname: the database.
            params: connection parameters of libpq; ``user``, ``password``, ``host`` and ``port`` replace the server's own.
        """
        user = quote(params.pop("user", self.user), safe="")
        password = quote(params.pop("password", self.password), safe="")
        address = f"{params.pop('host', self.host)}:{params.pop('port', str(self.port))}"
        query = f"?{urlencode(params, quote_via=quote)}" if params else ""
        return f"postgresql://{user}:{password}@{address}/{quote(dbname, safe='')}{query}"

    def _command(self) -> Sequence[Path | str]:
        return [self.bindir / "postgres", "-D", self.data_directory, "-h", self.host, "-p", str(self.port), "-k", self.socket_directory]

    @property
    def _pid_file(self) -> Path:
        return self.data_directory / "postmaster.pid"

    @property
    def _sign_of_life(self) -> Path:
        return self._pid_file

    def _ready(self) -> bool:
        """As in ``pg_ctl --wait``: the postmaster writes its state into the eighth line of its pid file."""
        assert self._process is not None
        try:
            lines = self._pid_file.read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(self._process.pid) and lines[7].strip() in {"ready", "standby"}

    def stop(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop it as ``pg_ctl stop -m mode`` and wait for its end. Does nothing if it does not run.

        Raises:
            EmbeddedServerError: it still runs after ``timeout`` seconds.
        """
        self._stop(_STOP_SIGNALS[mode], timeout, f" ({mode})")

    def kill(self) -> None:
        """Kill the postmaster and all its children with SIGKILL, like a power failure. Does nothing if it does not run."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)  # so that it starts no more children
        children = _children(self._process.pid)
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _CHILDREN_SECONDS
        while any(map(_lives, children)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._reap()

    def remove(self) -> None:
        """Stop it immediately, and remove its directory and its shared memory. Idempotent."""
        self.kill()
        release(self._pid_file, self._run_as)
        super().remove()

    def restart(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop and start it."""
        self.stop(mode, timeout=timeout)
        self.start()

    def createdb(self, name: str, **options: str) -> str:
        """Create a database and return its URL.

        Args:
            name: the database, not quoted.
            options: those of CREATE DATABASE, for example ``encoding="LATIN1", template="template0"``.
        """
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        for option, value in options.items():
            statement += sql.SQL(" {} {}").format(sql.SQL(option), sql.Literal(value))
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(statement)
        return self.dsn(name)


def _lives(pid: int) -> bool:
    """Whether the process exists and has not ended. A zombie has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _children(pid: int) -> list[int]:
    """The child processes. Without /proc none are found; they then notice the postmaster's death themselves, within about a second."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat_file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(stat_file.parent.name))
    return found
