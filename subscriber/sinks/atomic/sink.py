"""The base class of a sink for a target that stores changes of rows and a text in one atomic step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from subscriber.abc import ApplyStatistics, Finding, PublishedTable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.atomic.opened import OpenedAtomicSink
from subscriber.sinks.atomic.row_changes import RowChange
from subscriber.sinks.atomic.stored import Stored

__all__ = ["AtomicSink"]


class AtomicSink(ABC):
    """A :class:`subscriber.abc.Sink`. A subclass implements three methods, each for the subscription with the name that it gets.

    A batch of transactions, or of copied rows, is one call of :meth:`store`, and is in memory as a whole. The sink does not support
    two-phase commit and values in the binary format.
    """

    supports_two_phase = False

    def __init__(self) -> None:
        self.statistics = ApplyStatistics()
        self._stored: dict[str, Stored] = {}

    @abstractmethod
    def lock(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the lock of the subscription's only writer. It must end with the process.

        Raises:
            SubscriptionInUse: another sink holds it.
        """

    @abstractmethod
    async def load(self, name: str) -> str | None:
        """Return the text that was stored last; None: there is none. May be called without the lock."""

    @abstractmethod
    async def store(self, name: str, state: str, changes: Sequence[RowChange]) -> None:
        """Make the changes in their order and store the text: both or nothing, also after a crash. Durable on return.

        Rows that a change does not find are skipped. Add them to ``confl_update_missing`` and ``confl_delete_missing`` of
        ``statistics``.
        """

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription."""
        return await self.load(name) is not None

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedAtomicSink:
        """See :meth:`subscriber.abc.Sink.open`."""
        opened = OpenedAtomicSink(self._stored.setdefault(name, Stored(self, name)), self.statistics, on_durable)
        await opened.open(name)
        return opened

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Find nothing: the target stores any table."""
        return []
