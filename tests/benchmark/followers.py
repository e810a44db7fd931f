"""How long changes take until they are in the target, beside ``pgcopydb clone --follow``, with PostgreSQL 15 on both sides.

``python -m tests.benchmark.followers [ROWS]`` (``make bench SINK=pgcopydb ROWS=…``) needs pgcopydb 0.10 and wal2json for PostgreSQL 15:
Debian's packages ``pgcopydb`` and ``postgresql-15-wal2json``. WAL2JSON_DIRECTORY names another directory of wal2json.so.

Each contender copies the tables and follows. Then its processes are stopped by a signal while a workload of
:mod:`tests.benchmark.postgres.workloads` is written, and continue: so the time of the workload itself does not count. Given are medians of
the wall time until the last row is visible in the target, and of the processor time of the program and of the target. pgcopydb is told
where the changes end, because it applies them when a segment of WAL ends or at the end of all.
``make bench SINK=migration`` compares the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from subscriber.testing.server import EmbeddedServer
from tests.benchmark.postgres.processes import Cluster, tree, tree_cpu
from tests.benchmark.postgres.servers import SETTINGS
from tests.benchmark.postgres.workloads import STREAMS
from tests.support.database import Database, ServerAddress
from tests.support.program import environment

VERSION: Final = 15
ROUNDS: Final = 3
WAIT: Final = 600.0
WORKLOADS: Final = {"inserts": 300_000, "mixed": 20_000}
"""By name, with their sizes."""
PROGRAMS: Final = Path(f"/usr/lib/postgresql/{VERSION}/bin")
PLUGINS: Final = Path(f"/usr/lib/postgresql/{VERSION}/lib")
Sample = tuple[float, float, float]
"""Wall seconds, and processor seconds of the program and of the target."""


def _command(who: str, publisher: Database, target: Database, directory: str) -> list[str]:
    if who == "pgcopydb":
        ends = ["--source", publisher.dsn, "--target", target.dsn, "--dir", f"{directory}/work"]
        return ["pgcopydb", "clone", "--follow", *ends, "--slot-name", "bench", "--origin", "bench"]
    ends = ["--connection", publisher.conninfo(), "--publication", "pub", "--target", target.dsn]
    return [sys.executable, "-m", "subscriber", "--quiet", "run", "--name", "bench", *ends]


@contextlib.contextmanager
def _running(command: list[str], directory: str) -> Iterator[subprocess.Popen[bytes]]:
    # pg_dump of a later version writes settings that 15 does not know
    found = {**environment(), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    with Path(directory, "output").open("wb") as output:
        # pgcopydb ends all processes of its group when it fails
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=found, start_new_session=True)
        try:
            yield process
        except BaseException:
            sys.stderr.write(Path(directory, "output").read_text(errors="replace")[-4000:])
            raise
        finally:
            for pid in [*tree(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _signal(root: int, number: int) -> None:
    for pid in tree(root):
        os.kill(pid, number)


def _arrived(process: subprocess.Popen[bytes], target: Database) -> None:
    deadline = time.monotonic() + WAIT
    while not target.value("SELECT EXISTS (SELECT FROM bench_end)"):
        assert process.poll() in {None, 0}, "it has failed"
        assert time.monotonic() < deadline, "the last row did not arrive"
        time.sleep(0.01)


def _measure(who: str, name: str, size: int, servers: list[EmbeddedServer]) -> Sample:
    publisher, target = (Database(ServerAddress(server.dsn(), VERSION), "bench") for server in servers)
    stream = STREAMS[name]
    assert stream.write is not None
    publisher.execute(stream.setup.replace("{n}", str(size)) + "CREATE TABLE bench_end (id int PRIMARY KEY)")
    publisher.execute("VACUUM ANALYZE")
    if who != "pgcopydb":
        # not for pgcopydb, which updates a table without a key on the publisher
        publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        target.execute(stream.setup.replace("{n}", str(size)) + "CREATE TABLE bench_end (id int PRIMARY KEY)")
        for (table,) in target.fetch(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        ):
            target.execute(f"TRUNCATE {table}")
    cluster = Cluster(servers[1])
    with tempfile.TemporaryDirectory() as directory, _running(_command(who, publisher, target, directory), directory) as process:
        publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name LIKE '%bench%' AND NOT temporary", 1)
        if who == "pgcopydb":
            # what it has received is applied when a segment of WAL ends, or at the end of all
            publisher.wait("SELECT to_regclass('pgcopydb.sentinel') IS NOT NULL", True, WAIT)
            publisher.wait("SELECT apply FROM pgcopydb.sentinel", True, WAIT)
        else:
            target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True, WAIT)
            target.wait("SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.pg_subscription_rel", True, WAIT)
        _signal(process.pid, signal.SIGSTOP)
        publisher.execute(stream.write.replace("{n}", str(size)))
        publisher.execute("INSERT INTO bench_end VALUES (1)")
        publisher.execute("SELECT pg_switch_wal()")
        if who == "pgcopydb":
            publisher.execute("UPDATE pgcopydb.sentinel SET endpos = pg_current_wal_flush_lsn()")
        before = tree_cpu(process.pid), cluster.cpu(target.value("SELECT pg_backend_pid()"))
        began = time.monotonic()
        _signal(process.pid, signal.SIGCONT)
        _arrived(process, target)
        wall = time.monotonic() - began
        after = tree_cpu(process.pid), cluster.cpu(target.value("SELECT pg_backend_pid()"))
        rows = "SELECT count(*), sum(id) FROM t"
        assert target.fetch(rows) == publisher.fetch(rows), f"{who}: {target.fetch(rows)}, not {publisher.fetch(rows)}"
    publisher.close()
    target.close()
    return wall, after[0] - before[0], after[1] - before[1]


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    scale = int(arguments[0]) / WORKLOADS["inserts"] if arguments and int(arguments[0]) else 1.0
    if not shutil.which("pgcopydb"):
        sys.stderr.write("pgcopydb is not installed: apt-get install pgcopydb postgresql-15-wal2json\n")
        return 2
    plugins = os.environ.get("WAL2JSON_DIRECTORY", str(PLUGINS))
    for name, size in WORKLOADS.items():
        found: dict[str, list[Sample]] = {"pgcopydb": [], "subscriber": []}
        for number in range(ROUNDS):
            for who in sorted(found, reverse=bool(number % 2)):
                settings = {**SETTINGS, "dynamic_library_path": f"$libdir:{plugins}"}
                servers = [EmbeddedServer.create(VERSION, settings=settings) for _ in range(2)]
                try:
                    for server in servers:
                        server.createdb("bench")
                    found[who].append(_measure(who, name, max(int(size * scale), 1), servers))
                finally:
                    for server in servers:
                        server.remove()
                wall, program, target = found[who][-1]
                print(f"{name}: {who} {wall:.2f} s, CPU {program:.2f} s and the target's {target:.2f} s", flush=True)
        medians = {who: [statistics.median(some) for some in zip(*samples, strict=True)] for who, samples in found.items()}
        (wall, *cpu), (other, *others) = medians["subscriber"], medians["pgcopydb"]
        print(f"{name}: {wall / other:.2f} times pgcopydb's wall time, {sum(cpu) / sum(others):.2f} times its CPU time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
