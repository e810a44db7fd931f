"""Embedded MariaDB servers for tests.

As in :mod:`subscriber.testing.server` for PostgreSQL, a server has a private directory that is removed with it, 127.0.0.1 and a private
Unix socket, a random password, a user that is not root, and a watchdog.

Commits are passed to the operating system before they return, but not flushed to disk (``debug-no-sync``). They survive SIGKILL of the
server, which tests send, but not a crash of the machine.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from subscriber.testing.binaries import ServerUser, environment, server_user
from subscriber.testing.embedded import Embedded
from subscriber.testing.mariadb_binaries import MariaDBPrograms, find_mariadb
from subscriber.testing.ports import EmbeddedServerError

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


class EmbeddedMariaDB(Embedded):
    """One embedded MariaDB server. Create it with :meth:`create`. As a context manager it is removed at the end. Its methods block.

    Attributes:
        version: (major, minor).
        host, port: where it listens. They stay the same after a restart.
        data_directory: its databases.
        socket_file: its Unix socket.
        log_file: log of the server and of ``mariadb-install-db``.
        user, password: a user with all privileges, from this machine only.
    """

    user: Final = "subscriber"
    cannot_bind = b"Bind on TCP/IP port"
    watchdog_signal = "KILL"

    def __init__(self, programs: MariaDBPrograms, base: Path, run_as: ServerUser, settings: Mapping[str, str]) -> None:
        super().__init__("MariaDB", base, run_as)
        self.version = programs.version
        self.data_directory = base / "data"
        self.socket_file = base / "s"
        self.password = secrets.token_urlsafe(18)
        self._init_file = base / "init.sql"
        self._programs = programs
        self._settings = {**_SETTINGS, **settings}

    @classmethod
    def create(cls, *, settings: Mapping[str, str] | None = None, directory: Path | str | None = None) -> Self:
        """Create a new server and start it.

        Args:
            settings: options of ``mariadbd`` without the dashes; an empty value for an option without value.
            directory: where the private directory is created; the system's temporary directory if None.

        Raises:
            ConfigurationError: MariaDB is not installed.
            EmbeddedServerError: it could not be created or started.
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
        # no root over the network: root logs in at the socket as the system's root, and the server runs as another user
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

    def url(self, dbname: str = "mysql") -> str:
        """Return the URL of a database, for the user with all privileges."""
        return f"mariadb://{self.user}:{quote(self.password, safe='')}@{self.host}:{self.port}/{quote(dbname, safe='')}"

    def _command(self) -> Sequence[str]:
        # the server may be killed right after its initialization, so the user is created at every start
        self._init_file.touch(mode=0o600)
        self._run_as.own(self._init_file)
        account = f"'{self.user}'@'{self.host}'"
        self._init_file.write_text(
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{self.password}';\nGRANT ALL ON *.* TO {account} WITH GRANT OPTION;\n"
        )
        options = {
            "datadir": self.data_directory,
            "bind-address": self.host,
            "port": self.port,
            "socket": self.socket_file,
            "pid-file": self.base / "pid",
            "tmpdir": self.base,
            "init-file": self._init_file,
            **self._settings,
        }
        return [
            str(self._programs.server),
            "--no-defaults",
            *(f"--{name}={value}" if value != "" else f"--{name}" for name, value in options.items()),
        ]

    def _launch(self) -> None:
        super()._launch()
        # the file holds the password
        self._init_file.unlink()

    def _ready(self) -> bool:
        """Whether it sends its handshake, which means that it is ready and its user exists."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_file))
                return len(probe.recv(5)) == 5
            except OSError:
                return False

    def stop(self, *, timeout: float = 60.0) -> None:
        """Shut it down (SIGTERM) and wait for its end. Does nothing if it does not run.

        Raises:
            EmbeddedServerError: it still runs after ``timeout`` seconds.
        """
        self._stop(signal.SIGTERM, timeout)

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()

    def _reap(self) -> None:
        super()._reap()
        with contextlib.suppress(FileNotFoundError):
            self.socket_file.unlink()

    def create_database(self, name: str) -> str:
        """Create a database and return its URL.

        Raises:
            EmbeddedServerError: the server rejected it.
        """
        quoted = name.replace("`", "``")
        statement = f"CREATE DATABASE `{quoted}` CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        # by the client program, because a driver may not be installed
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
            raise EmbeddedServerError(f"MariaDB refused to create a database: {said[-1] if said else 'without a message'}")
        return self.url(name)
