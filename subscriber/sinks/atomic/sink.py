"""The base class of a sink for a target that stores changes of rows and a text in one atomic step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from subscriber.catalog import Definition
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.config import SubscriptionOptions
from subscriber.interfaces import ApplyStatistics, Finding, PublishedTable, TableEntry, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.atomic.opened_atomic_sink import OpenedAtomicSink
from subscriber.sinks.atomic.row_changes import TEXT_ONLY, RowChange
from subscriber.sinks.atomic.stored import Stored, SubscriptionRecord
from subscriber.sinks.request_files import RequestFiles

__all__ = ["AtomicSink"]


class AtomicSink(ABC):
    """A :class:`subscriber.interfaces.Sink`. A subclass implements three methods, each for the subscription with the name that it gets.

    A batch of transactions, or of copied rows, is one call of :meth:`store`, and is in memory as a whole. The sink does not support
    two-phase commit and values in the binary format.

    Args:
        options: of the subscription. Its row filters are stored for ``verify``.
        requests: a directory of this machine, for files by which ``verify`` and the process that runs the subscription communicate. None:
            the target cannot be verified.
    """

    supports_two_phase = False

    def __init__(self, options: SubscriptionOptions | None = None, *, requests: Path | None = None) -> None:
        self.options = options
        self._requests = requests
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
        """See :meth:`subscriber.interfaces.Sink.open`."""
        stored = self._stored.setdefault(name, Stored(self, name))
        opened = OpenedAtomicSink(stored, self.statistics, on_durable, self.requests(name))
        await opened.open(name, str((self.options or SubscriptionOptions()).where))
        return opened

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Report values in the binary format, of which the target has no types. It stores any table."""
        return [Finding("error", *TEXT_ONLY)] if self.options is not None and self.options.binary else []

    async def definition(self, name: str) -> Definition:
        """Return what is known of a subscription that a command line defines.

        Raises:
            TargetError: there is none of this name.
        """
        record = await self._read(name)
        return Definition(
            oid=record.oid,
            name=name,
            enabled=True,
            conninfo=None,
            slot_name=record.slot_name,
            publications=record.publications,
            options=SubscriptionOptions(where=record.where),
            two_phase=record.two_phase,
            position=record.position.lsn if record.position is not None else None,
        )

    def requests(self, name: str) -> RequestFiles | None:
        """Requests of other processes to the one that runs the subscription."""

        async def entries() -> Mapping[TableName, TableEntry]:
            return {table: found.entry for table, found in (await self._read(name)).tables.items()}

        return RequestFiles(self._requests, entries=entries, prefix=f"{name}.") if self._requests is not None else None

    async def _read(self, name: str) -> SubscriptionRecord:
        state = await self.load(name)
        if state is None:
            raise no_such_subscription(name)
        return SubscriptionRecord.from_json(state)
