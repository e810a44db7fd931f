"""The target of a case: a part of the interface of :class:`subscriber.testing.compliance.ComplianceTarget`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from subscriber.interfaces import Sink
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.target import Row

__all__ = ["CrashTarget", "CuttableTarget", "FullDiskTarget", "TidyTarget"]


class CrashTarget(Protocol):
    """A target that is empty at the start of a case."""

    def new_sink(self) -> Sink:
        """Return a new sink that is not open. A child process calls it, on a copy that was pickled."""
        ...

    async def create_table(self, table: Table) -> None:
        """Create the table, unless the sink does."""
        ...

    async def rows(self, table: Table) -> Sequence[Row]:
        """Return all committed rows, in any order: texts, or values whose ``str()`` is PostgreSQL's text."""
        ...


@runtime_checkable
class TidyTarget(Protocol):
    """A target that can tell what a crash has left behind."""

    def left_behind(self) -> Sequence[str]:
        """Return a sentence for each prepared transaction, temporary table or file that should not be there any more."""
        ...


@runtime_checkable
class FullDiskTarget(Protocol):
    """A target whose files another process writes, as a server's. Otherwise the files that the case's process writes are limited."""

    def fill_disk(self) -> None:
        """Let the target reject writes as on a full disk. A child process calls it, on a copy that was pickled."""
        ...

    def free_disk(self) -> None:
        """Let it accept them again."""
        ...


@runtime_checkable
class CuttableTarget(Protocol):
    """A target that lives in the process of the test, as the memory sink's. Its cases need no child process."""

    def cut(self) -> None:
        """Disconnect every open sink, as a lost connection does."""
        ...
