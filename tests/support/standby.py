"""A physical standby of an embedded server."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

from subscriber.testing.server import EmbeddedServer


@contextlib.contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A physical standby that can take over logical slots."""
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('standby', true)")
    base = Path(tempfile.mkdtemp(prefix="standby-"))
    standby = EmbeddedServer(primary.version, primary.bindir, base, primary._run_as)
    standby.password = primary.password
    try:
        standby._run_as.own(base)
        standby.socket_directory.mkdir(mode=0o700)
        standby._run_as.own(standby.socket_directory)
        standby.log_file.touch(mode=0o600)
        done = primary._run_as.run(
            primary.bindir / "pg_basebackup",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
            "--slot=standby",
            f"--dbname={primary.dsn('pub')}",
            f"--pgdata={standby.data_directory}",
            cwd=base,
        )
        assert done.returncode == 0, done.stderr
        with (standby.data_directory / "postgresql.conf").open("a") as configuration:
            configuration.write("hot_standby_feedback = on\n")
        standby.start()
        yield standby
    finally:
        standby.remove()
