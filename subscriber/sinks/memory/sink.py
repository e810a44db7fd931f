"""The sink in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from subscriber.errors import SubscriptionInUse
from subscriber.interfaces import (
    ApplyStatistics,
    Finding,
    PublishedTable,
    TableName,
)
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.memory.applier import missing_columns
from subscriber.sinks.memory.opened_memory_sink import OpenedMemorySink
from subscriber.sinks.memory.target import MemoryTarget, SubscriptionRecord

__all__ = ["MemorySink"]


class MemorySink:
    """A :class:`subscriber.interfaces.Sink` for a :class:`MemoryTarget`. Each call is complete, and counts as durable, on return.

    Args:
        target: the target, which stays after the sink is closed.
        opens: the class of the opened sinks.
    """

    supports_two_phase = True

    def __init__(self, target: MemoryTarget, opens: type[OpenedMemorySink] = OpenedMemorySink) -> None:
        self._target = target
        self._opens = opens
        self._statistics = ApplyStatistics()
        self._published: dict[TableName, PublishedTable] = {}

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self._statistics

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription."""
        return name in self._target.subscriptions

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedMemorySink:
        """See :meth:`subscriber.interfaces.Sink.open`.

        Raises:
            SubscriptionInUse: another sink is open for the subscription.
        """
        record = self._target.subscriptions.get(name)
        if record is None:
            record = self._target.subscriptions[name] = SubscriptionRecord(self._target.new_oid())
        if record.writer is not None:
            raise SubscriptionInUse(f'subscription "{name}" is in use by another sink', hint="close it")
        opened = record.writer = self._opens(
            self._target, name, record, published=self._published, statistics=self._statistics, on_durable=on_durable
        )
        return opened

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Report missing tables and columns."""
        found = []
        for published in tables:
            table = self._target.find(published.name)
            if table is None:
                if not self._target.create_tables:
                    message = f'logical replication target relation "{published.name}" does not exist'
                    found.append(Finding("error", message, "create it, or let the target create tables", published.name))
            elif self._target.schema_change == "error" and (missing := missing_columns(table, published.columns)):
                names = ", ".join(f'"{name}"' for name in missing)
                message = f'logical replication target relation "{table.name}" is missing replicated columns: {names}'
                hint = "add them to the target's table, or leave them out of the publication"
                found.append(Finding("error", message, hint, table.name, alone=True, stops="without_copy"))
        return found
