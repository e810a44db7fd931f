"""PgBouncer in front of a server of the tests. It is installed as MariaDB is, by apt as root."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber.testing.apt import apt_install, may_install
from subscriber.testing.binaries import server_user
from subscriber.testing.ports import LOOPBACK, free_port
from tests.support.database import WAIT_SECONDS, Database

_PATH = "/usr/sbin:/usr/bin:/usr/local/bin"


def _program() -> str:
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path=_PATH)
    if found is None and may_install():
        apt_install(["pgbouncer"], "apt-get install pgbouncer")
        found = shutil.which("pgbouncer", path=_PATH)
    if found is None:
        pytest.skip("PgBouncer is not installed, and only root can install it")
    return found


@contextlib.contextmanager
def pgbouncer(database: Database, pool_mode: str, **settings: str) -> Iterator[str]:
    """The URL of a database behind a PgBouncer of its own."""
    program, user, port = _program(), server_user(), free_port()
    where = conninfo_to_dict(database.server.conninfo)
    server = " ".join(f"{name}={where[name]}" for name in ("host", "port", "user", "password") if where.get(name))
    given = {"pool_mode": pool_mode, "listen_addr": LOOPBACK, "listen_port": port, "unix_socket_dir": "", "auth_type": "any", **settings}
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory:
        Path(directory).chmod(0o755)
        file = Path(directory) / "pgbouncer.ini"
        lines = ["[databases]", f"{database.name} = {server}", "[pgbouncer]", *(f"{name} = {value}" for name, value in given.items())]
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
            url = f"postgresql://postgres@{LOOPBACK}:{port}/{database.name}"
            _wait_until_it_answers(url, process, Path(directory) / "log")
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PgBouncer did not start: {log.read_text()[-1000:]}")
            time.sleep(0.02)
        else:
            return
