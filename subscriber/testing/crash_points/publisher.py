"""The publisher of a case: by default the fake one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Protocol, Self

from subscriber.testing.crash_points.child import NAME
from subscriber.testing.fake_publisher import FakePublisher

__all__ = ["TIMEOUT", "WAIT", "CrashPublisher", "CrashTransaction", "FakeCrashPublisher"]

TIMEOUT: Final = 60.0
"""For a start of the program, or a step of the publisher."""
WAIT: Final = 600.0
"""For all starts until a state is reached."""


class CrashTransaction(Protocol):
    """A transaction: see :class:`subscriber.testing.fake_publisher.transactions.FakeTransaction`. The block commits it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]] | None = None, /, **values: Any) -> None: ...

    def update(self, table: str, where: Mapping[str, Any], /, **values: Any) -> object: ...

    def delete(self, table: str, where: Mapping[str, Any], /) -> object: ...

    def savepoint(self) -> AbstractContextManager[None]: ...

    def rollback_savepoint(self) -> None: ...

    def commit(self) -> object: ...

    def rollback(self) -> None: ...

    def prepare(self, gid: str) -> object: ...

    def commit_prepared(self) -> object: ...

    def rollback_prepared(self) -> object: ...


class CrashPublisher(Protocol):
    """What the scenario does with a publisher. Waiting ends with an error after :data:`WAIT`."""

    @property
    def copied_rows(self) -> int:
        """So many rows of 7 kB that the table is still being copied when :meth:`until_table_slot` returns."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    def dsn(self) -> str:
        """For the subscription."""
        ...

    def create_table(self, name: str, columns: Mapping[str, str], *, key: Sequence[str] = ()) -> None:
        """Create a table in schema public."""
        ...

    def create_publication(self, name: str, *tables: str) -> None: ...

    def transaction(self) -> CrashTransaction: ...

    def rows(self, table: str) -> Sequence[Mapping[str, str | None]]:
        """All committed rows, as text."""
        ...

    def slot_names(self) -> Collection[str]: ...

    def lose_aborts(self) -> None:
        """From now on, send no abort of a savepoint that is rolled back, if that can be chosen."""
        ...

    async def until_table_slot(self) -> None:
        """Wait until a table that is copied alone has its own slot."""
        ...

    async def until_two_phase(self) -> None:
        """Wait until the slot decodes prepared transactions."""
        ...

    async def until_received(self) -> None:
        """Wait until the subscriber has received everything that was decoded of open transactions."""
        ...

    async def until_all_confirmed(self) -> None:
        """Wait until the subscriber has confirmed everything."""
        ...

    def cut(self) -> None:
        """Cut the connections of the subscriber, for a target that lives in this process."""
        ...


class FakeCrashPublisher(FakePublisher):
    """A :class:`CrashPublisher` that needs no server. It streams and sends keepalives early."""

    copied_rows = 40

    def __init__(self) -> None:
        super().__init__(18, logical_decoding_work_mem=16 * 1024, keepalive_seconds=0.1)

    def slot_names(self) -> Collection[str]:
        return self.slots.keys()

    def lose_aborts(self) -> None:
        self.faults.add("lost_abort", times=1_000_000)

    async def until_table_slot(self) -> None:
        # the slot of a group is temporary
        await self._until(lambda: any(name != NAME and not slot.temporary for name, slot in self.slots.items()))

    async def until_two_phase(self) -> None:
        await self._until(lambda: NAME in self.slots and self.slots[NAME].two_phase)

    async def until_received(self) -> None:
        lsn, known = self.wal.end, len(self.feedback)
        await self._until(lambda: any(record.update.write >= lsn for record in self.feedback.records[known:]))

    async def until_all_confirmed(self) -> None:
        await self.until_confirmed(NAME, timeout=WAIT)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self.until(condition, WAIT)

    def cut(self) -> None:
        for session in self.sessions.values():
            session.writer.transport.abort()
