"""The readers of a stream: ``pg_recvlogical``, a native subscription and ``subscriber run``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from typing import IO, ClassVar, Final

from subscriber.sinks.postgres.catalog.target_identity import TARGET
from subscriber.testing.binaries import find_binaries
from tests.benchmark.postgres.processes import peak_memory, tree_cpu
from tests.benchmark.postgres.servers import CLIENTS_VERSION, END, Bed
from tests.support.program import environment

__all__ = ["COMMAND", "Contender", "FourWorkers", "GroupsOnly", "Limit", "Native", "Ours", "Relayed", "TwoWorkers", "streaming"]

_PROTOCOLS: Final = {13: 1, 14: 2, 15: 3}
_NEWEST_PROTOCOL: Final = 4
_PARALLEL_SINCE: Final = 16
_STOP_SECONDS: Final = 60.0
_COPIED: Final = "SELECT count(*) FROM {relations} WHERE srsubstate IN ('s', 'r')"
_GROUPS_ONLY: Final = """
import sys
from subscriber.cli import main
from subscriber.sinks.postgres.parallel.pace import Pace
Pace.next_part = lambda *_: (True, 1.0)
sys.exit(main())
"""
COMMAND: Final = (sys.executable, "-m", "subscriber", "--quiet")


def streaming(version: int, *, wanted: bool) -> str:
    """The value of the parameter ``streaming``, the same for all readers."""
    if version >= _PARALLEL_SINCE:
        return "parallel"
    return "on" if wanted and version in _PROTOCOLS and _PROTOCOLS[version] > 1 else "off"


class Contender(ABC):
    """One reader, for one run.

    Args:
        bed: its publisher and its target.
        streaming: the parameter of CREATE SUBSCRIPTION.
        tables: how many tables it copies with a slot that it creates; 0: it copies nothing, and follows from its existing slot.
    """

    name: ClassVar[str]
    slot: ClassVar[str]

    def __init__(self, bed: Bed, streaming: str = "off", *, tables: int = 0) -> None:
        self.bed = bed
        self.streaming = streaming
        self.tables = tables

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what does not belong to the start."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and return at once."""

    def ended(self) -> bool:
        """Whether the target holds the last row, or all copies."""
        if self.tables:
            return self._copied() == self.tables
        return bool(self.bed.target.value(f"SELECT EXISTS (SELECT FROM {END})"))

    def _copied(self) -> int:
        """How many tables are synchronized."""
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - an error of a worker is in the server's log, and it starts again
        """Fail if it has ended."""

    @abstractmethod
    def cpu(self) -> tuple[float, float]:
        """Seconds of the subscriber, and of the target if that is not the same."""

    def memory(self) -> int:
        """Peak of the subscriber's resident memory, in bytes."""
        return 0

    @abstractmethod
    def stop(self) -> None:
        """End it."""

    def _cluster_cpu(self) -> float:
        return self.bed.target_cpu()


class _Process(Contender):
    """A program. Its output goes to a file, which is shown if it fails."""

    process: subprocess.Popen[bytes]
    _output: IO[bytes]

    @abstractmethod
    def command(self) -> list[str]:
        """Program and arguments."""

    def start(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - until stop()
        output = self._output
        self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment())

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(_STOP_SECONDS)
        finally:
            self.process.kill()
            said = self._said()
            self._output.close()
        assert status == 0, said

    def memory(self) -> int:
        return peak_memory(self.process.pid)


class Limit(_Process):
    """``pg_recvlogical`` into ``/dev/null``."""

    name = "pg_recvlogical"
    slot = "bench_limit"

    def command(self) -> list[str]:
        bed = self.bed
        program = find_binaries(CLIENTS_VERSION) / "pg_recvlogical"
        options = [f"proto_version={_PROTOCOLS.get(bed.version, _NEWEST_PROTOCOL)}", "publication_names=pub"]
        if self.streaming != "off":
            options.append(f"streaming={self.streaming}")
        target = ["--file=/dev/null", f"--endpos={bed.end}", "--no-loop"]
        given = [f"--option={option}" for option in options]
        return [str(program), "--start", f"--dbname={bed.publisher.conninfo()}", f"--slot={self.slot}", *target, *given]

    def ended(self) -> bool:
        # left unreaped, so that its times can still be read
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def cpu(self) -> tuple[float, float]:
        return tree_cpu(self.process.pid), 0.0


class Native(Contender):
    """CREATE SUBSCRIPTION. Its worker is both subscriber and target."""

    name = "native"
    slot = "bench_native"

    def _create(self, options: str) -> None:
        conninfo = self.bed.publisher.conninfo()
        self.bed.target.execute(
            f"CREATE SUBSCRIPTION bench CONNECTION '{conninfo}' PUBLICATION pub WITH (slot_name = {self.slot}, {options})"
        )

    def prepare(self) -> None:
        if not self.tables:
            # PostgreSQL 13 has no parameter of that name
            streamed = "" if self.streaming == "off" else f", streaming = {self.streaming}"
            commit = self.bed.synchronous_commit
            self._create(f"create_slot = false, copy_data = false, enabled = false, synchronous_commit = {commit}{streamed}")

    def start(self) -> None:
        if self.tables:
            self._create("create_slot = true")
        else:
            self.bed.target.execute("ALTER SUBSCRIPTION bench ENABLE")

    def _copied(self) -> int:
        return int(self.bed.target.value(_COPIED.format(relations="pg_subscription_rel")))

    def cpu(self) -> tuple[float, float]:
        return self._cluster_cpu(), 0.0

    def memory(self) -> int:
        workers = self.bed.target.fetch("SELECT pid FROM pg_stat_subscription WHERE pid IS NOT NULL")
        return sum(peak_memory(pid) for (pid,) in workers)

    def stop(self) -> None:
        self.bed.target.execute("ALTER SUBSCRIPTION bench DISABLE")
        self.bed.target.execute("ALTER SUBSCRIPTION bench SET (slot_name = NONE)")
        self.bed.target.execute("DROP SUBSCRIPTION bench")


class Ours(_Process):
    """``subscriber run``."""

    name = "subscriber"
    slot = "bench_ours"

    def prepare(self) -> None:
        if not self.tables:
            # the target is a copy of the database in which the subscription was defined
            self.bed.target.execute(f"UPDATE subscriber.pg_subscription SET subtarget = ({TARGET})")

    def command(self) -> list[str]:
        return self.arguments(self.bed.target.dsn)

    def arguments(self, target: str, *further: str) -> list[str]:
        """The command for a target."""
        options = [] if self.tables else ["-o", "copy_data=false", "-o", f"streaming={self.streaming}"]
        options += ["-o", f"synchronous_commit={self.bed.synchronous_commit}"]
        given = ["run", "--name", self.slot, "--connection", self.bed.publisher.conninfo(), "--publication", "pub", "--target", target]
        return [*COMMAND, *given, *options, *further]

    def _copied(self) -> int:
        if self.bed.target.value("SELECT to_regclass('subscriber.pg_subscription_rel') IS NULL"):
            return 0
        return int(self.bed.target.value(_COPIED.format(relations="subscriber.pg_subscription_rel")))

    def check(self) -> None:
        assert self.process.poll() is None, self._said()

    def cpu(self) -> tuple[float, float]:
        return tree_cpu(self.process.pid), self._cluster_cpu()


class TwoWorkers(Ours):
    """The same with two sessions that apply at once."""

    name = "2 workers"

    def command(self) -> list[str]:
        return self.arguments(self.bed.target.dsn, "-c", f"apply_workers={self.name[0]}")


class FourWorkers(TwoWorkers):
    """The same with four."""

    name = "4 workers"


class GroupsOnly(FourWorkers):
    """The same if every batch is applied in groups, also where one session is faster on this machine."""

    name = "4 workers, groups only"

    def command(self) -> list[str]:
        _, _, _, *arguments = super().command()
        return [sys.executable, "-c", _GROUPS_ONLY, *arguments]


class Relayed(Ours):
    """The same with a relay log."""

    name = "with a relay log"
    _directory: tempfile.TemporaryDirectory[str]

    def start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(dir="/var/tmp")
        super().start()

    def command(self) -> list[str]:
        return self.arguments(self.bed.target.dsn, "-c", f"relay_log={self._directory.name}")

    def stop(self) -> None:
        super().stop()
        self._directory.cleanup()
