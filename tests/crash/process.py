"""``python -m subscriber run`` as a process that tests kill."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.database import Database
from tests.support.preloaded import PreloadedProgram
from tests.support.program import environment

Process = PreloadedProgram | subprocess.Popen[bytes]
QUICK = ("wal_retrieve_retry_interval=200ms", "wal_receiver_status_interval=1s")


@dataclass
class RunProcess:
    """One subscription, served by one process after another.

    Attributes:
        publisher: its database; the publication is ``pub``.
        target_url: of its target, of any kind.
        directory: for the spool and the log.
        options: of ``-o``.
        settings: of ``-c``.
        code: run instead of the program.
    """

    publisher: Database
    target_url: str
    directory: Path
    options: Sequence[str] = ("two_phase=true",)
    settings: Sequence[str] = QUICK
    code: str = field(default="", init=False)
    process: Process | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Of the subscription and its slot: no other database of the server has it."""
        return f"crash_{self.publisher.name}"

    @property
    def spool(self) -> Path:
        return self.directory / "spool"

    def has_spilled(self) -> bool:
        """Whether a file of a transaction is in the spool now."""
        try:
            return any(self.spool.glob("*/*.spool"))
        except FileNotFoundError:
            # a process that starts creates the directory again while it is listed
            return False

    def acknowledged(self) -> str:
        """What the publisher knows to be durable; empty without a slot."""
        found = self.publisher.fetch(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{self.name}'")
        return found[0][0] if found else ""

    def streams(self) -> bool:
        """Whether the publisher sends to it."""
        return bool(
            self.publisher.value(
                f"SELECT EXISTS (SELECT FROM pg_stat_replication WHERE application_name = '{self.name}' AND state <> 'startup')"
            )
        )

    def has_catalog(self) -> bool:
        """Whether the target has a catalog."""
        raise NotImplementedError

    def states(self) -> str:
        """Of the tables, one letter each."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """All tables are ready, and prepared transactions come when they are prepared."""
        raise NotImplementedError

    def holds_prepared(self) -> bool:
        """Whether the target has a prepared transaction."""
        raise NotImplementedError

    def arguments(self, *more: str) -> list[str]:
        """Of the program."""
        found = ["--connection", self.publisher.conninfo(), "--publication", "pub", "--target", self.target_url, "--name", self.name]
        for option in self.options:
            found += ["-o", option]
        for setting in (*self.settings, f"spool_directory={self.spool}"):
            found += ["-c", setting]
        return ["-v", "run", *found, *more]

    def start(self, *more: str) -> Process:
        """Start it; what it writes goes to the log."""
        assert self.process is None or self.process.poll() is not None
        with (self.directory / "log").open("ab") as log:
            self.process = PreloadedProgram(self.arguments(*more), environment(), log.fileno(), log.fileno(), code=self.code)
        return self.process

    def assert_runs(self) -> None:
        """The process is still running."""
        assert self.process is not None
        assert self.process.poll() is None, f"ended by itself with status {self.process.returncode}\n{self.log()}"

    def kill(self) -> None:
        """SIGKILL: no handler, no cleaning up. Fails if it had already ended."""
        self.assert_runs()
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Clean up at the end of the test, in any state. Pytest shows the log if the test fails."""
        print(self.log())
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def catch_up(self, timeout: float) -> None:
        """A run to the end of the publisher's WAL, which has to end well."""
        try:
            status = self.start("--until-caught-up").wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not caught up after {timeout:g} s\n{self.log()}") from None
        assert status == 0, f"status {status}\n{self.log()}"

    def conflicts(self) -> list[str]:
        """Lines of the log about conflicts. Without other writers there are none, unless changes came in a wrong order, or twice."""
        return [line for line in self.log(10**9).splitlines() if "conflict detected" in line and " WARNING " in line]

    def log(self, lines: int = 40) -> str:
        text = (self.directory / "log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class SubscriberProcess(RunProcess):
    """One whose target is a PostgreSQL database, which tests look into."""

    def __init__(
        self,
        publisher: Database,
        target: Database,
        directory: Path,
        options: Sequence[str] = ("two_phase=true",),
        settings: Sequence[str] = QUICK,
    ) -> None:
        super().__init__(publisher, target.dsn, directory, options, settings)
        self.target = target

    def has_catalog(self) -> bool:
        return bool(self.target.value("SELECT to_regclass('subscriber.prepared_transaction') IS NOT NULL"))

    def states(self) -> str:
        query = "SELECT string_agg(srsubstate::text, '') FROM subscriber.pg_subscription_rel"
        return (self.target.value(query) or "") if self.has_catalog() else ""

    def are_tables_ready(self) -> bool:
        """All tables are in the apply worker's hands: no slot will be created any more."""
        return set(self.states()) == {"r"}

    def is_ready(self) -> bool:
        return self.are_tables_ready() and bool(self.target.value("SELECT subtwophasestate = 'e' FROM subscriber.pg_subscription"))

    def holds_prepared(self) -> bool:
        return bool(self.target.value("SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE database = current_database())"))
