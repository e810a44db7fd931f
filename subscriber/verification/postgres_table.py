"""A table on a side that is PostgreSQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from subscriber.verification.parts import Key, Part, Sums
from subscriber.verification.row_sql import TableSql
from subscriber.verification.sides import Rows, Side, together

__all__ = ["PostgresTable"]


class PostgresTable:
    """See :class:`subscriber.verification.parts.TableSide`.

    Args:
        sql: of the table.
        side: the sessions.
        condition: SQL that the rows satisfy; empty: all rows.
    """

    def __init__(self, sql: TableSql, side: Side, condition: str = "") -> None:
        self._sql = sql
        self._side = side
        self._chosen = condition

    def on(self, side: Side) -> PostgresTable:
        """The same table in another snapshot."""
        return PostgresTable(self._sql, side)

    async def _read(self, query: Callable[[str], str], part: Part) -> Rows:
        condition = part.condition
        return await self._side.run(query(" AND ".join(each for each in (condition.sql(), self._chosen) if each)), *condition.values)

    async def checksum(self, part: Part) -> tuple[int, int]:
        """Count the rows of a part, and add their hashes."""
        ((count, total),) = await self._read(self._sql.checksum, part)
        return int(count or 0), int(total or 0)

    async def checksums(self, parts: Sequence[Part], mask: int, read: Callable[[int], Awaitable[None]]) -> Sums:
        """The same by some bits of the hash."""
        sums: dict[int, tuple[int, int]] = {}

        async def take(own: Iterator[Part]) -> None:
            for part in own:
                rows = 0
                for bucket, count, total in await self._read(lambda condition: self._sql.checksums(condition, mask), part):
                    before = sums.get(int(bucket or 0), (0, 0))
                    sums[int(bucket or 0)] = before[0] + int(count or 0), before[1] + int(total or 0)
                    rows += int(count or 0)
                await read(rows)

        waiting = iter(parts)
        await together([take(waiting) for _ in range(self._side.sessions)])
        return sums

    async def hashes(self, parts: Sequence[Part], mask: int, buckets: Sequence[int]) -> Counter[tuple[int, Key]]:
        """Read hash and key of the rows in some buckets."""
        found: Counter[tuple[int, Key]] = Counter()
        for part in parts:
            for row in await self._read(lambda condition: self._sql.hashes(condition, mask, buckets), part):
                found[int(row[0] or 0), tuple(row[1:])] += 1
        return found

    async def cells(self, keys: Sequence[Sequence[str]], *, values: bool) -> Mapping[Key, Sequence[Sequence[str | None]]]:
        """Read the rows with these keys."""
        count = len(self._sql.key)
        found: dict[Key, list[Sequence[str | None]]] = {}
        wanted = self._sql.has_key(keys)
        for row in await self._side.run(self._sql.cells(wanted.sql(), values=values), *wanted.values):
            found.setdefault(tuple(row[:count]), []).append(row[count:])
        return found

    async def values(self, hashes: Sequence[int]) -> Mapping[int, Sequence[str | None]]:
        """Read rows with these hashes."""
        return {int(row[0] or 0): row[1:] for row in await self._side.run(self._sql.sample_values("", hashes))}
