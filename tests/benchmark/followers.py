"""A copy, and changes until they are in the target, beside programs that users would take instead, with PostgreSQL 15 on both sides.

``python -m tests.benchmark.followers NAME [ROWS]`` (``make bench SINK=NAME ROWS=…``), NAME is one of

- ``pgcopydb``: ``pgcopydb clone --follow`` 0.10. It needs Debian's packages ``pgcopydb`` and ``postgresql-15-wal2json``;
  WAL2JSON_DIRECTORY names another directory of wal2json.so.
- ``debezium``: Debezium's connector for PostgreSQL, whose events go to its JDBC sink in the same process (``debezium/Pipe.java``), as
  Debezium Server does it. Kafka between them would cost more. It needs Maven and a JDK.

Each contender copies the tables and follows. Of a copy the time counts from the start of the program until all rows are in the target.
Else the processes are stopped by a signal while a workload of :mod:`tests.benchmark.postgres.workloads` is written, and continue: so the
time of the workload itself does not count. Given are medians of the wall time until the last row is visible in the target, and of the
processor time of the program and of the target. pgcopydb is told where the changes end, because it applies them when a segment of WAL ends
or at the end of all.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from subscriber.testing.server import EmbeddedServer
from tests.benchmark.postgres.processes import Cluster, tree, tree_cpu
from tests.benchmark.postgres.servers import SETTINGS
from tests.benchmark.postgres.workloads import STREAMS
from tests.support.database import Database, ServerAddress
from tests.support.program import environment

VERSION: Final = 15
ROUNDS: Final = 3
WAIT: Final = 180.0
COPY: Final = "copy"
WORKLOADS: Final = {COPY: 500_000, "inserts": 300_000, "mixed": 20_000}
"""By name, with their sizes."""
PROGRAMS: Final = Path(f"/usr/lib/postgresql/{VERSION}/bin")
PLUGINS: Final = Path(f"/usr/lib/postgresql/{VERSION}/lib")
JAVA: Final = Path(__file__).with_name("debezium")
JARS: Final = Path(__file__).parents[2] / "build" / "debezium"
INITDB_ARGS: Final = ["--wal-segsize=256"]
"""pgcopydb 0.10 has one file for each segment of WAL, and does not apply a transaction that continues in the next one."""
Sample = tuple[float, float, float]
"""Wall seconds, and processor seconds of the program and of the target."""


class ContenderError(Exception):
    """A contender did not do what is measured."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A program that copies and follows.

    Attributes:
        needs: the programs that it needs, and how they are installed.
        command: its arguments, for the publisher, the target and a directory of its own.
        copied: waits until it follows.
        prepares: whether the publication and the target's tables are made for it.
        ends: SQL for the publisher after all changes.
    """

    needs: Mapping[str, str]
    command: Callable[[Database, Database, Path], list[str]]
    copied: Callable[[Database, Database], None]
    prepares: bool = True
    ends: str = "SELECT"


def _subscriber(publisher: Database, target: Database, _: Path) -> list[str]:
    ends = ["--connection", publisher.conninfo(), "--publication", "pub", "--target", target.dsn]
    return [sys.executable, "-m", "subscriber", "--quiet", "run", "--name", "bench", *ends]


def _subscriber_copied(_: Database, target: Database) -> None:
    target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True, WAIT)
    target.wait("SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.pg_subscription_rel", True, WAIT)


def _pgcopydb(publisher: Database, target: Database, directory: Path) -> list[str]:
    ends = ["--source", publisher.dsn, "--target", target.dsn, "--dir", str(directory / "work")]
    return ["pgcopydb", "clone", "--follow", *ends, "--slot-name", "bench", "--origin", "bench"]


def _pgcopydb_copied(publisher: Database, _: Database) -> None:
    # what it has received is applied when a segment of WAL ends, or at the end of all
    publisher.wait("SELECT to_regclass('pgcopydb.sentinel') IS NOT NULL", True, WAIT)
    publisher.wait("SELECT apply FROM pgcopydb.sentinel", True, WAIT)


def _properties(path: Path, found: Mapping[str, object]) -> str:
    path.write_text("".join(f"{key}={value}\n" for key, value in found.items()))
    return str(path)


def _debezium(publisher: Database, target: Database, directory: Path) -> list[str]:
    if not (JARS / "Pipe.class").exists():
        subprocess.run(["mvn", "-q", "-f", JAVA / "pom.xml", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"], check=True)
        subprocess.run(["javac", "-cp", f"{JARS}/*", "-d", JARS, JAVA / "Pipe.java"], check=True)
    ends = [conninfo_to_dict(database.conninfo()) for database in (publisher, target)]
    source = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": ends[0]["host"],
        "database.port": ends[0]["port"],
        "database.user": ends[0]["user"],
        "database.password": ends[0].get("password", ""),
        "database.dbname": "bench",
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "publication.name": "pub",
        "publication.autocreate.mode": "disabled",
        "slot.name": "bench",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": directory / "offsets",
        **_LARGER,
    }
    sink = {
        "connection.url": f"jdbc:postgresql://{ends[1]['host']}:{ends[1]['port']}/bench",
        "connection.username": ends[1]["user"],
        "connection.password": ends[1].get("password", ""),
        "collection.name.format": "${source.table}",
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "primary.key.mode": "record_key",
        "schema.evolution": "none",
        "batch.size": _LARGER["max.batch.size"],
    }
    files = _properties(directory / "source.properties", source), _properties(directory / "sink.properties", sink)
    return ["java", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{JARS}:{JARS}/*", "Pipe", *files]


def _debezium_copied(publisher: Database, target: Database) -> None:
    publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = 'bench'", 1, WAIT)


_LARGER: Final = {"max.batch.size": "10240", "max.queue.size": "40960", "poll.interval.ms": "10"}
"""What Debezium reads at once: it takes longer with its defaults."""
SUBSCRIBER: Final = Contender({}, _subscriber, _subscriber_copied)
CONTENDERS: Final = {
    "pgcopydb": Contender(
        {"pgcopydb": "apt-get install pgcopydb postgresql-15-wal2json"},
        _pgcopydb,
        _pgcopydb_copied,
        # a publication is not for pgcopydb, which updates a table without a key on the publisher
        prepares=False,
        ends="UPDATE pgcopydb.sentinel SET endpos = pg_current_wal_flush_lsn()",
    ),
    "debezium": Contender(
        {"mvn": "apt-get install maven", "javac": "apt-get install openjdk-17-jdk-headless"}, _debezium, _debezium_copied
    ),
}
"""By name."""


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
            _signal(process.pid, signal.SIGKILL)
            process.wait()


def _signal(root: int, number: int) -> None:
    for pid in [*tree(root)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(process: subprocess.Popen[bytes], target: Database, query: str) -> None:
    deadline = time.monotonic() + WAIT
    running = True
    while not target.value(query):
        if not running:
            raise ContenderError("it ended before the last row")
        if time.monotonic() > deadline:
            raise ContenderError(f"the last row did not arrive in {WAIT:.0f} s")
        time.sleep(0.01)
        running = process.poll() is None


def _measure(contender: Contender, name: str, size: int, servers: list[EmbeddedServer]) -> Sample:
    publisher, target = (Database(ServerAddress(server.dsn(), VERSION), "bench") for server in servers)
    stream = STREAMS["bulk" if name == COPY else name]
    setup = stream.setup.replace("{n}", str(size)) + "CREATE TABLE bench_end (id int PRIMARY KEY)"
    publisher.execute(setup)
    publisher.execute("VACUUM ANALYZE")
    if contender.prepares:
        publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        target.execute(setup)
        for (table,) in target.fetch(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        ):
            target.execute(f"TRUNCATE {table}")
    cluster, own = Cluster(servers[1]), target.value("SELECT pg_backend_pid()")
    with tempfile.TemporaryDirectory() as directory:
        command = contender.command(publisher, target, Path(directory))
        began, before = time.monotonic(), (0.0, cluster.cpu(own))
        with _running(command, directory) as process:
            if name == COPY:
                _wait(process, target, "SELECT to_regclass('t') IS NOT NULL")
                _wait(process, target, f"SELECT EXISTS (SELECT FROM t WHERE id = {size})")
            else:
                contender.copied(publisher, target)
                _signal(process.pid, signal.SIGSTOP)
                publisher.execute((stream.write or "").replace("{n}", str(size)))
                publisher.execute("INSERT INTO bench_end VALUES (1)")
                publisher.execute("SELECT pg_switch_wal()")
                publisher.execute(contender.ends)
                before = tree_cpu(process.pid), cluster.cpu(own)
                began = time.monotonic()
                _signal(process.pid, signal.SIGCONT)
                _wait(process, target, "SELECT EXISTS (SELECT FROM bench_end)")
            wall = time.monotonic() - began
            after = tree_cpu(process.pid), cluster.cpu(own)
            rows = "SELECT count(*), sum(id), sum(a), md5(string_agg(c, '' ORDER BY id)) FROM t"
            if target.fetch(rows) != publisher.fetch(rows):
                raise ContenderError("the rows of the target are not the publisher's")
    publisher.close()
    target.close()
    return wall, after[0] - before[0], after[1] - before[1]


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    other, rows = arguments[0], int(arguments[1]) if arguments[1:] else 0
    scale = rows / WORKLOADS["inserts"] if rows else 1.0
    contenders = {other: CONTENDERS[other], "subscriber": SUBSCRIBER}
    for program, installed in contenders[other].needs.items():
        if not shutil.which(program):
            sys.stderr.write(f"{program} is not installed: {installed}\n")
            return 2
    plugins = os.environ.get("WAL2JSON_DIRECTORY", str(PLUGINS))
    settings = {**SETTINGS, "dynamic_library_path": f"$libdir:{plugins}"}
    for name, size in WORKLOADS.items():
        found: dict[str, list[Sample]] = {who: [] for who in contenders}
        for number in range(ROUNDS):
            for who in sorted(found, reverse=bool(number % 2)):
                servers = [EmbeddedServer.create(VERSION, settings=settings, initdb_args=INITDB_ARGS) for _ in range(2)]
                try:
                    for server in servers:
                        server.createdb("bench")
                    seconds, processor, target = _measure(contenders[who], name, max(int(size * scale), 1), servers)
                except ContenderError as error:
                    print(f"{name}: {who} failed: {error}", flush=True)
                    continue
                finally:
                    for server in servers:
                        server.remove()
                found[who].append((seconds, processor, target))
                print(f"{name}: {who} {seconds:.2f} s, CPU {processor:.2f} s and the target's {target:.2f} s", flush=True)
        if not all(found.values()):
            continue
        medians = {who: [statistics.median(some) for some in zip(*samples, strict=True)] for who, samples in found.items()}
        (wall, *cpu), (whole, *all_cpu) = medians["subscriber"], medians[other]
        print(f"{name}: {wall / whole:.2f} times {other}'s wall time, {sum(cpu) / sum(all_cpu):.2f} times its CPU time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
