"""The publisher, the target, and their databases."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from typing import Final

from subscriber.protocol.lsn import Lsn
from subscriber.testing.binaries import find_binaries
from subscriber.testing.comparison import compare, published_tables
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.postgres.processes import Cluster
from tests.benchmark.postgres.workloads import Copy, Stream
from tests.benchmark.tables import make
from tests.support.database import Database, ServerAddress, drop_database

__all__ = ["CLIENTS_VERSION", "END", "SETTINGS", "Bed", "bed"]

CLIENTS_VERSION: Final = 18
"""Of ``pgbench`` and ``pg_recvlogical``: the servers of some versions come without them, and these read from older servers."""

END: Final = "bench_end"
"""The table that gets a row after all others."""
SETTINGS: Final = {
    "logical_decoding_work_mem": "64MB",
    "shared_buffers": "256MB",
    "max_wal_size": "32GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}
_PUBLISHED: Final = "bench_published"
_TEMPLATE: Final = "bench_template"
_RUN: Final = "bench_run"
_FILE_COPY_SINCE: Final = 15
_DIRECT: Final = "debug_io_direct"
_DIRECT_SINCE: Final = 16


class Bed:
    """Two servers, and the databases of one workload.

    Attributes:
        publisher: the database with the changes.
        target: a copy of the template, for one run.
        end: where the WAL of the workload ends.
        synchronous_commit: of the subscriptions.
    """

    synchronous_commit = "off"

    def __init__(self, publisher: EmbeddedServer, target: EmbeddedServer) -> None:
        self.version = publisher.version
        self.publisher_server = ServerAddress(publisher.dsn(), publisher.version)
        self.target_server = ServerAddress(target.dsn(), target.version)
        self._servers = publisher, target
        self._administration = Database(self.target_server, "postgres")
        self.end = Lsn(0)

    publisher: Database
    target: Database

    def close(self) -> None:
        """Close the session that all workloads share."""
        self._administration.close()

    def create(self, setup: str) -> None:
        """Make the publisher's database and the template."""
        setup = f"{setup} CREATE TABLE {END} (id int PRIMARY KEY)"
        for server, name in zip(self._servers, (_PUBLISHED, _TEMPLATE), strict=True):
            server.createdb(name)
            database = Database(ServerAddress(server.dsn(), server.version), name)
            database.execute(setup)
            database.execute("VACUUM ANALYZE")
            database.close()
        self.publisher = Database(self.publisher_server, _PUBLISHED)
        self.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")

    def create_tables(self, copy: Copy, rows: int) -> None:
        """Make tables to copy, with rows on the publisher."""
        make(self._servers[0], _PUBLISHED, copy.tables, rows)
        make(self._servers[1], _TEMPLATE, copy.tables)
        self.publisher = Database(self.publisher_server, _PUBLISHED)
        self.publisher.execute("VACUUM ANALYZE")

    @contextlib.contextmanager
    def target_settings(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Let the target's server have these settings. With fsync, commits wait until they are on disk."""
        if not settings:
            yield
            return
        for name, value in settings.items():
            if name == _DIRECT and self.version < _DIRECT_SINCE:
                continue
            self._administration.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self._restart_target()
        self.synchronous_commit = "on" if settings.get("fsync") == "on" else "off"
        try:
            yield
        finally:
            self.synchronous_commit = "off"
            self._administration.execute("ALTER SYSTEM RESET ALL")
            self._restart_target()

    def _restart_target(self) -> None:
        self._servers[1].restart()
        self._administration.reconnect()

    def stream_beyond(self, kilobytes: int) -> None:
        """Let the publisher stream transactions that need more memory."""
        self.publisher.execute(f"ALTER DATABASE {_PUBLISHED} SET logical_decoding_work_mem = '{kilobytes}kB'")

    @property
    def template_dsn(self) -> str:
        return self._servers[1].dsn(_TEMPLATE)

    def write(self, stream: Stream, size: int) -> None:
        """Write the changes of a workload and the last row."""
        if stream.write is None:
            self._pgbench(stream.clients, max(size // stream.clients, 1))
        else:
            self.publisher.execute(stream.write.replace("{n}", str(size)))
        self.publisher.execute(f"INSERT INTO {END} VALUES (1)")
        # the last row is not the end of what a walsender reads
        self.publisher.execute("SELECT pg_switch_wal()")
        self.end = self.publisher.current_lsn()

    def _pgbench(self, clients: int, transactions: int) -> None:
        program = find_binaries(CLIENTS_VERSION) / "pgbench"
        options = ["--no-vacuum", "--random-seed=1", "--protocol=prepared", f"--client={clients}", f"--transactions={transactions}"]
        subprocess.run([str(program), *options, self.publisher.dsn], check=True, capture_output=True)

    @contextlib.contextmanager
    def fresh_target(self) -> Iterator[None]:
        """A copy of the template as the target."""
        strategy = " STRATEGY file_copy" if self.version >= _FILE_COPY_SINCE else ""
        self._administration.execute(f"CREATE DATABASE {_RUN} TEMPLATE {_TEMPLATE}{strategy}")
        self._administration.execute("CHECKPOINT")
        self.target = Database(self.target_server, _RUN)
        try:
            yield
        finally:
            self.target.close()
            drop_database(self.target_server, _RUN)

    def copy_slot(self, base: str, name: str) -> None:
        """Make a slot at the position of another one, instead of what has that name."""
        self.drop_slot(name)
        self.publisher.execute(f"SELECT pg_copy_logical_replication_slot('{base}', '{name}')")

    def drop_slot(self, name: str) -> None:
        """Drop a slot as soon as it is inactive, if it exists."""
        slot = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
        self.publisher.wait(f"SELECT count(*) {slot} AND active", 0)
        self.publisher.execute(f"SELECT pg_drop_replication_slot(slot_name) {slot}")

    def publisher_cpu(self) -> float:
        """Seconds of the publisher's processes, except our session."""
        return Cluster(self._servers[0]).cpu(self.publisher.value("SELECT pg_backend_pid()"))

    def target_cpu(self) -> float:
        """Seconds of the target's processes, except our session."""
        return Cluster(self._servers[1]).cpu(self.target.value("SELECT pg_backend_pid()"))

    def check_rows(self) -> None:
        """Compare the rows of publisher and target.

        Raises:
            AssertionError: they differ.
        """
        asyncio.run(self._compare())

    async def _compare(self) -> None:
        tables = await published_tables(self.publisher.dsn, ["pub"])
        differing = [str(found.table) for found in await compare(self.publisher.dsn, self.target.dsn, tables) if not found.equal]
        assert not differing, f"the rows of these tables differ: {', '.join(differing)}"

    @contextlib.contextmanager
    def workload(self) -> Iterator[None]:
        """Drop the databases of a workload at its end."""
        try:
            yield
        finally:
            self.publisher.close()
            drop_database(self.publisher_server, _PUBLISHED)
            drop_database(self.target_server, _TEMPLATE)


@contextlib.contextmanager
def bed(version: int) -> Iterator[Bed]:
    """Two servers of a major version."""
    with EmbeddedServer.create(version, settings=SETTINGS) as publisher, EmbeddedServer.create(version, settings=SETTINGS) as target:
        place = Bed(publisher, target)
        yield place
        place.close()
