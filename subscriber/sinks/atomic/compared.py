"""The base class of what ``verify`` reads of an :class:`subscriber.sinks.atomic.AtomicSink`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from subscriber.catalog import Definition
from subscriber.catalog.snapshot_requests import Requests
from subscriber.catalog.verifications import Verifications
from subscriber.errors import ConfigurationError
from subscriber.interfaces import PublishedTable, RowSource, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.atomic.sink import AtomicSink

__all__ = ["ComparedAtomicTarget"]


class ComparedAtomicTarget(ABC):
    """A :class:`subscriber.catalog.target_kind.ComparedTarget`. A subclass implements two methods.

    Args:
        sink: of the target.
        definition: of the subscription, as :meth:`subscriber.sinks.atomic.AtomicSink.definition` returns it.

    Raises:
        ConfigurationError: the sink has no directory for requests.
    """

    has_snapshots = True
    verifications: Verifications | None = None

    def __init__(self, sink: AtomicSink, definition: Definition) -> None:
        requests = sink.requests(definition.name)
        if requests is None:
            raise ConfigurationError("the sink takes no requests of other processes", hint="give AtomicSink a directory for them")
        self.sink = sink
        self.definition = definition
        self.requests: Requests = requests

    @abstractmethod
    async def begin(self, answer: Mapping[str, Any], application_name: str) -> None:
        """Take a snapshot of all tables. Apply waits meanwhile, for five seconds at most."""

    async def snapshot(self, lsn: Lsn, tables: Collection[TableName], waiting: Callable[[str], None]) -> Self:
        """Return this object."""
        return self

    @abstractmethod
    async def table(self, published: PublishedTable, key: Sequence[str]) -> RowSource:
        """Return the table in the snapshot: see :meth:`subscriber.interfaces.ComparedTables.table`."""
