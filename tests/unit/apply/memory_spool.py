"""A spool in memory, that tells what became of its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from subscriber.apply.receiving.spool import SpoolDirectory, SpooledPart
from subscriber.apply.receiving.spool_file import SpoolFile

__all__ = ["MemoryPart", "MemorySpool"]


class MemoryPart(SpooledPart):
    """What a transaction reads."""

    def __init__(self, spool: MemorySpool, records: list[bytes]) -> None:
        super().__init__(SpoolFile(spool.directory))
        self._spool = spool
        self._records = records

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        yield self._records[start:]

    async def discard(self) -> None:
        if self in self._spool.readers:
            self._spool.readers.remove(self)


class MemorySpool(SpoolDirectory):
    """In place of :class:`SpoolDirectory`, without threads and files.

    Attributes:
        parts: not read yet.
        readers: given out and not discarded.
        appended: ids and numbers of records, in order.
    """

    def __init__(self) -> None:
        super().__init__("/nowhere", "memory")
        self.parts: dict[int, list[bytes]] = {}
        self.readers: list[MemoryPart] = []
        self.appended: list[tuple[int, int]] = []

    async def open(self) -> None:
        return

    async def close(self) -> None:
        self.parts.clear()
        self.readers.clear()

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        self.appended.append((spool_id, len(records)))
        self.parts.setdefault(spool_id, []).extend(records)

    async def truncate(self, spool_id: int, count: int) -> None:
        del self.parts[spool_id][count:]

    async def discard(self, spool_id: int) -> None:
        self.parts.pop(spool_id, None)

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        return self.parts[spool_id][start:]

    def reader(self, spool_id: int) -> MemoryPart:
        part = MemoryPart(self, self.parts.pop(spool_id))
        self.readers.append(part)
        return part
