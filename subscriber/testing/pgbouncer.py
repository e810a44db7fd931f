"""PgBouncer in front of servers of the tests and of the demonstration."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from subscriber.testing.binaries import server_user
from subscriber.testing.ports import LOOPBACK, free_port

__all__ = ["Pool", "entry", "find_pgbouncer", "pgbouncer"]

_PATH: Final = "/usr/sbin:/usr/bin:/usr/local/bin"
_START_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Pool:
    """A PgBouncer.

    Attributes:
        url: of its first database.
        admin: connection string of its admin console.
        file: its configuration.
    """

    url: str
    admin: str
    file: Path


def find_pgbouncer() -> str | None:
    """The program, if it is installed."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path=_PATH)


def entry(name: str, conninfo: str) -> str:
    """A line of its section [databases]."""
    where = conninfo_to_dict(conninfo)
    return f"{name} = " + " ".join(f"{key}={where[key]}" for key in ("host", "port", "user", "password", "dbname") if where.get(key))


@contextlib.contextmanager
def pgbouncer(program: str, databases: Mapping[str, str], **settings: str) -> Iterator[Pool]:
    """Run it before databases.

    Args:
        program: from :func:`find_pgbouncer`.
        databases: connection strings by name.
        settings: of its section [pgbouncer].
    """
    user, port = server_user(), free_port()
    given = {"listen_addr": LOOPBACK, "listen_port": port, "unix_socket_dir": "", "auth_type": "any", "admin_users": "postgres"} | settings
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory:
        Path(directory).chmod(0o755)
        file = Path(directory) / "pgbouncer.ini"
        entries = (entry(name, conninfo) for name, conninfo in databases.items())
        lines = ["[databases]", *entries, "[pgbouncer]", *(f"{name} = {value}" for name, value in given.items())]
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o644)
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "-q", str(file)],
                user=user.uid,
                group=user.gid,
                extra_groups=None if user.uid is None else [],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            address = f"postgresql://postgres@{LOOPBACK}:{port}"
            _wait_until_it_answers(f"{address}/{next(iter(databases))}", process, Path(directory) / "log")
            yield Pool(f"{address}/{next(iter(databases))}", f"{address}/pgbouncer", file)
        finally:
            process.terminate()
            process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start: {log.read_text()[-1000:]}") from None
            time.sleep(0.02)
        else:
            return
