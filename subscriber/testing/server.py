"""Embedded PostgreSQL servers: for tests, for ``subscriber demo``, for whoever wants one for a minute.

A server lives in a private directory (data, socket, log) that goes away with it. It listens on 127.0.0.1 with a random
superuser password (SCRAM) and on a private Unix socket. It is set up as a publisher with everything logical replication
can use, and without fsync: its data is not meant to survive the machine.

No server outlives the process that started it: a watchdog (a shell that waits for the end of a pipe whose other end only
we hold) stops it and removes its directory when we are gone, by whatever death. A death signal of the kernel
(PR_SET_PDEATHSIG) was rejected: it comes already when the *thread* that started the server ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from subscriber.testing.binaries import ServerUser, environment, reachable_binaries, server_user
from subscriber.testing.ports import LOOPBACK, EmbeddedServerError, free_port

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
}
# $1 the postmaster, $2 the private directory. A postmaster that ends removes its pid file; half a minute is for one that cannot.
_WATCHDOG: Final = """
read _
kill -QUIT "$1" 2>/dev/null
n=0
while [ -e "$2/data/postmaster.pid" ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
rm -rf -- "$2"
"""
_START_SECONDS: Final = 60.0
_BIND_ATTEMPTS: Final = 5


class EmbeddedServer:
    """One PostgreSQL server of our own. Made by :meth:`create`; as a context manager it is removed at the end.

    Its methods block; call them through :func:`asyncio.to_thread` from a coroutine where that matters.

    Attributes:
        version: major version.
        bindir: its programs.
        host, port: where it listens. They stay the same over a restart.
        data_directory: the database cluster.
        socket_directory: its Unix socket's directory.
        log_file: what it and ``initdb`` wrote.
        user, password: the superuser.
    """

    user: Final = "postgres"
    host: Final = LOOPBACK

    def __init__(self, version: int, bindir: Path, base: Path, run_as: ServerUser) -> None:
        self.version = version
        self.bindir = bindir
        self.base = base
        self.data_directory = base / "data"
        self.socket_directory = base / "s"
        self.log_file = base / "server.log"
        self.password = secrets.token_urlsafe(18)
        self.port = 0
        self._run_as = run_as
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(
        cls,
        version: int = 18,
        *,
        settings: Mapping[str, str] | None = None,
        initdb_args: Sequence[str] = (),
        directory: Path | str | None = None,
    ) -> Self:
        """Make a new cluster and start it.

        Args:
            version: major version; see :func:`subscriber.testing.binaries.find_binaries` for where it is looked for.
            settings: for postgresql.conf, over those that make it a publisher.
            initdb_args: for ``initdb``.
            directory: below which the private directory is made; the system's temporary directory if None.

        Raises:
            ConfigurationError: no such version here.
            EmbeddedServerError: initdb or the start failed.
        """
        run_as = server_user()
        bindir = reachable_binaries(version, run_as)
        base = Path(tempfile.mkdtemp(prefix=f"pg{version}-", dir=directory))
        server = cls(version, bindir, base, run_as)
        try:
            of_version = {"max_active_replication_origins": "40"} if version >= 18 else {}
            server._initdb({**_SETTINGS, **of_version, **(settings or {})}, initdb_args)
            server.start()
        except BaseException:
            server.remove()
            raise
        return server

    def _initdb(self, settings: Mapping[str, str], initdb_args: Sequence[str]) -> None:
        self.socket_directory.mkdir(mode=0o700)
        password_file = self.base / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        self.log_file.touch(mode=0o600)
        for path in (self.base, self.socket_directory, password_file):
            self._run_as.own(path)
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
            *initdb_args,
            cwd=self.base,
        )
        password_file.unlink()
        if done.returncode != 0:
            self.log_file.write_text(done.stdout + done.stderr)
            raise self._failure(f"initdb of PostgreSQL {self.version} failed with status {done.returncode}")
        with (self.data_directory / "postgresql.conf").open("a", encoding="utf-8") as configuration:
            for name, value in settings.items():
                escaped = value.replace("\\", "\\\\").replace("'", "''")
                configuration.write(f"{name} = '{escaped}'\n")

    @property
    def running(self) -> bool:
        """Does the postmaster live?"""
        return self._process is not None and self._process.poll() is None

    def dsn(self, dbname: str = "postgres", **params: str) -> str:
        """Return the URL of a database, as the superuser over TCP.

        Args:
            dbname: the database.
            params: connection parameters of libpq; ``user``, ``password``, ``host`` and ``port`` replace the server's own.
        """
        user = quote(params.pop("user", self.user), safe="")
        password = quote(params.pop("password", self.password), safe="")
        address = f"{params.pop('host', self.host)}:{params.pop('port', str(self.port))}"
        query = f"?{urlencode(params, quote_via=quote)}" if params else ""
        return f"postgresql://{user}:{password}@{address}/{quote(dbname, safe='')}{query}"

    def start(self) -> None:
        """Start it and wait until it takes connections (crash recovery included). Nothing if it runs already.

        Raises:
            EmbeddedServerError: it did not come up within a minute.
        """
        if self.running:
            return
        first = self.port == 0
        for attempt in range(_BIND_ATTEMPTS):
            if first:
                self.port = free_port()
            log_start = self.log_file.stat().st_size
            try:
                self._launch()
            except EmbeddedServerError:
                # a port that was free a moment ago may be taken now; another one only while nobody knows ours
                new_text = self.log_file.read_bytes()[log_start:]
                if not (first and b"could not bind" in new_text and attempt + 1 < _BIND_ATTEMPTS):
                    raise
            else:
                return

    def _launch(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [self.bindir / "postgres", "-D", self.data_directory, "-h", self.host, "-p", str(self.port), "-k", self.socket_directory],
                user=self._run_as.uid,
                group=self._run_as.gid,
                extra_groups=None if self._run_as.uid is None else [],
                cwd=self.base,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at our terminal is for us
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "sh", str(self._process.pid), self.base],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                self._reap()
                raise self._failure(f"PostgreSQL {self.version} did not start")
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"PostgreSQL {self.version} did not start within {_START_SECONDS:.0f} s")
            time.sleep(0.02)

    def _ready(self) -> bool:
        """As ``pg_ctl --wait``: the postmaster writes its state into the eighth line of its pid file."""
        assert self._process is not None
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(self._process.pid) and lines[7].strip() in {"ready", "standby"}

    def stop(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop it as ``pg_ctl stop -m mode`` and wait for its end. Nothing if it does not run.

        Raises:
            EmbeddedServerError: it still runs after ``timeout`` seconds.
        """
        if self._process is None:
            return
        self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"PostgreSQL {self.version} did not stop ({mode}) within {timeout:g} s") from error
        self._reap()

    def kill(self) -> None:
        """Kill the postmaster and all its children with SIGKILL, as a power failure would. Nothing if it does not run."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)  # so that it makes no more children
        children = _children(self._process.pid)
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        # the next postmaster refuses to start while one of them still holds the shared memory
        deadline = time.monotonic() + _START_SECONDS
        while any(map(_lives, children)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._reap()

    def restart(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop and start it."""
        self.stop(mode, timeout=timeout)
        self.start()

    def _reap(self) -> None:
        self._process = None
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None

    def createdb(self, name: str, **options: str) -> str:
        """Create a database and return its URL.

        Args:
            name: the database, as it is.
            options: those of CREATE DATABASE, for example ``encoding="LATIN1", template="template0"``.
        """
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        for option, value in options.items():
            statement += sql.SQL(" {} {}").format(sql.SQL(option), sql.Literal(value))
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(statement)
        return self.dsn(name)

    def log(self) -> str:
        """Everything the server has written to its log."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def remove(self) -> None:
        """Stop it at once and remove its directory. Idempotent."""
        self.kill()
        shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _failure(self, message: str) -> EmbeddedServerError:
        error = EmbeddedServerError(message, hint=f"its log was {self.log_file}")
        if self.log_file.exists():
            error.add_note("\n".join(self.log().splitlines()[-15:]))
        return error


def _lives(pid: int) -> bool:
    """Whether there is such a process that has not ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _children(pid: int) -> list[int]:
    """The child processes. Without a /proc none are found: they then notice the postmaster's death themselves, within a second or so."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat_file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(stat_file.parent.name))
    return found
