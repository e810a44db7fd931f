"""Embedded MariaDB servers, for tests of what writes into one.

As :mod:`subscriber.testing.server` does it for PostgreSQL: a private directory that goes away with the server, 127.0.0.1 and a private
Unix socket, a random password, a user that is not root, and a watchdog that ends it when we are gone by whatever death.

Commits are handed to the operating system before they return, and no further (``debug-no-sync``): they survive SIGKILL of the server, which
is what tests do to it, and not the loss of the machine.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from subscriber.testing.binaries import ServerUser, environment, server_user
from subscriber.testing.mariadb_binaries import MariaDBPrograms, find_mariadb
from subscriber.testing.ports import LOOPBACK, EmbeddedServerError, free_port

__all__ = ["EmbeddedMariaDB"]

_SETTINGS: Final[Mapping[str, str]] = {
    "character-set-server": "utf8mb4",
    "debug-no-sync": "1",
    "innodb-buffer-pool-size": "64M",
    "innodb-flush-log-at-trx-commit": "1",
    "innodb-log-file-size": "48M",
    "max-connections": "200",
    "performance-schema": "OFF",
    "skip-log-bin": "",
    "skip-name-resolve": "",
}
_WATCHDOG: Final = """
read _
kill -KILL "$1" 2>/dev/null
n=0
while kill -0 "$1" 2>/dev/null && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
rm -rf -- "$2"
"""
_START_SECONDS: Final = 60.0
_BIND_ATTEMPTS: Final = 5


class EmbeddedMariaDB:
    """One MariaDB server of our own. Made by :meth:`create`; as a context manager it is removed at the end. Its methods block.

    Attributes:
        version: (major, minor).
        host, port: where it listens. They stay the same over a restart.
        data_directory: its databases.
        socket_file: its Unix socket.
        log_file: what it and ``mariadb-install-db`` wrote.
        user, password: who may do everything, from this machine.
    """

    user: Final = "subscriber"
    host: Final = LOOPBACK

    def __init__(self, programs: MariaDBPrograms, base: Path, run_as: ServerUser, settings: Mapping[str, str]) -> None:
        self.version = programs.version
        self.base = base
        self.data_directory = base / "data"
        self.socket_file = base / "s"
        self.log_file = base / "server.log"
        self.password = secrets.token_urlsafe(18)
        self.port = 0
        self._programs = programs
        self._run_as = run_as
        self._settings = {**_SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(cls, *, settings: Mapping[str, str] | None = None, directory: Path | str | None = None) -> Self:
        """Make a new server and start it.

        Args:
            settings: options of ``mariadbd`` without the dashes; an empty value stands for none.
            directory: below which the private directory is made; the system's temporary directory if None.

        Raises:
            ConfigurationError: no MariaDB here.
            EmbeddedServerError: it could not be made or started.
        """
        run_as, programs = server_user(), find_mariadb()
        base = Path(tempfile.mkdtemp(prefix="mariadb-", dir=directory))
        server = cls(programs, base, run_as, settings or {})
        try:
            server._install()
            server.start()
        except BaseException:
            server.remove()
            raise
        return server

    def _install(self) -> None:
        self.log_file.touch(mode=0o600)
        self._run_as.own(self.base)
        self.data_directory.mkdir(mode=0o700)
        self._run_as.own(self.data_directory)
        # nobody is root by the network: root is who has the system's root at the socket, and the server runs as another
        done = self._run_as.run(
            self._programs.install_db,
            "--no-defaults",
            f"--datadir={self.data_directory}",
            "--auth-root-authentication-method=socket",
            "--auth-root-socket-user=root",
            "--skip-name-resolve",
            "--skip-test-db",
            cwd=self.base,
        )
        if done.returncode != 0:
            self.log_file.write_text(done.stdout + done.stderr)
            raise self._failure(f"mariadb-install-db failed with status {done.returncode}")

    @property
    def running(self) -> bool:
        """Does the server live?"""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server.

        Raises:
            EmbeddedServerError: it does not run.
        """
        if self._process is None:
            raise self._failure("MariaDB does not run")
        return self._process.pid

    def url(self, dbname: str = "mysql") -> str:
        """Return the URL of a database, as the user who may do everything."""
        return f"mariadb://{self.user}:{quote(self.password, safe='')}@{self.host}:{self.port}/{quote(dbname, safe='')}"

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
                if not (first and b"Bind on TCP/IP port" in new_text and attempt + 1 < _BIND_ATTEMPTS):
                    raise
            else:
                return

    def _launch(self) -> None:
        # it may have been initialized and killed at once: the user is made at every start
        init_file = self.base / "init.sql"
        init_file.touch(mode=0o600)
        self._run_as.own(init_file)
        account = f"'{self.user}'@'{self.host}'"
        init_file.write_text(
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{self.password}';\nGRANT ALL ON *.* TO {account} WITH GRANT OPTION;\n"
        )
        options = {
            "datadir": self.data_directory,
            "bind-address": self.host,
            "port": self.port,
            "socket": self.socket_file,
            "pid-file": self.base / "pid",
            "tmpdir": self.base,
            "init-file": init_file,
            **self._settings,
        }
        command = [
            str(self._programs.server),
            "--no-defaults",
            *(f"--{name}={value}" if value != "" else f"--{name}" for name, value in options.items()),
        ]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
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
        while not self._greets():
            if self._process.poll() is not None:
                self._reap()
                raise self._failure("MariaDB did not start")
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"MariaDB did not start within {_START_SECONDS:.0f} s")
            time.sleep(0.02)
        init_file.unlink()

    def _greets(self) -> bool:
        """Whether it sends its handshake: it does so once it is ready, and its user is made."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_file))
                return len(probe.recv(5)) == 5
            except OSError:
                return False

    def stop(self, *, timeout: float = 60.0) -> None:
        """Shut it down (SIGTERM) and wait for its end. Nothing if it does not run.

        Raises:
            EmbeddedServerError: it still runs after ``timeout`` seconds.
        """
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"MariaDB did not stop within {timeout:g} s") from error
        self._reap()

    def kill(self) -> None:
        """SIGKILL: no handler, no cleaning up. Nothing if it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._reap()

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()

    def _reap(self) -> None:
        self._process = None
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
        with contextlib.suppress(FileNotFoundError):
            self.socket_file.unlink()

    def create_database(self, name: str) -> str:
        """Create a database and return its URL.

        Raises:
            EmbeddedServerError: the server refused.
        """
        quoted = name.replace("`", "``")
        statement = f"CREATE DATABASE `{quoted}` CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        # the client program, because a driver is not everywhere where the server is
        done = subprocess.run(
            [
                self._programs.client,
                "--no-defaults",
                "--default-character-set=utf8mb4",
                "--protocol=tcp",
                f"--host={self.host}",
                f"--port={self.port}",
                f"--user={self.user}",
                f"--execute={statement}",
            ],
            env={**environment(), "MYSQL_PWD": self.password},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            raise EmbeddedServerError(f"MariaDB refused to create a database: {said[-1] if said else 'it says nothing'}")
        return self.url(name)

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
