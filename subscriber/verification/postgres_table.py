"""A table on a side that is PostgreSQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from subscriber.verification.parts import Buckets, Key, Part, Sums
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
        self.sql = self._sql = sql
        self._side = side
        self._chosen = condition

    @property
    def integer_keys(self) -> Sequence[bool]:
        """For each column of the key, whether it is an integer on both sides."""
        return self._sql.integer_keys

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

    async def span(self, part: Part) -> tuple[int, int] | None:
        """Return the least and the greatest value of the integer column of a part; None: it has none."""
        condition = part.condition
        ((low, high),) = await self._side.run(self._sql.span(part.column or "", condition.sql()), *condition.values)
        return None if low is None or high is None else (int(low), int(high))

    async def checksums(self, parts: Sequence[Part], by: Buckets, read: Callable[[int], Awaitable[None]]) -> Sums:
        """The same by bucket."""
        sums: dict[int, tuple[int, int]] = {}

        async def take(own: Iterator[Part]) -> None:
            for part in own:
                (lists,) = await self._read(lambda condition: self._sql.checksums(condition, by), part)
                buckets, counts, totals = (list(map(int, (each or "").split())) for each in lists)
                found = dict(zip(buckets, zip(counts, totals, strict=True), strict=True))
                for bucket in sums.keys() & found.keys():
                    found[bucket] = found[bucket][0] + sums[bucket][0], found[bucket][1] + sums[bucket][1]
                sums.update(found)
                await read(sum(counts))

        waiting = iter(parts)
        await together([take(waiting) for _ in range(self._side.sessions)])
        return sums

    async def hashes(self, parts: Sequence[Part], by: Buckets, buckets: Sequence[int]) -> Counter[str]:
        """Read hash and key of the rows in some buckets."""
        found: Counter[str] = Counter()
        for part in parts:
            for (names,) in await self._read(lambda condition: self._sql.hashes(condition, by, buckets), part):
                found.update((names or "").split())
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
