"""Compare only what changed since both sides were found equal.

PostgreSQL keeps the id of the transaction that wrote a row (``xmin``). A row version that was written by a transaction below the ``xmin``
of the earlier snapshot is the one that was compared then. So only these can differ:

- row versions that are newer, on either side: their hashes are compared by key;
- rows that only one side still has: the sums of the hashes of all keys are compared. If these differ, the whole table has to be compared;
- columns that were added meanwhile: ADD COLUMN with a default writes no row. Then the whole table has to be compared, too.
- rows of a table that got this name meanwhile, or of a partition that was attached. Then the whole table has to be compared, too.

Each side is read once, but only the key and the newer rows are hashed. After a wrap of transaction ids an old row may seem new, which costs
time but hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.verification.parts import Key
from subscriber.verification.row_sql import TableSql
from subscriber.verification.sides import Side, together

__all__ = ["ChangedRows"]

_MOST = 200_000
"""If more rows have changed on a side, the whole table is compared."""
_KEYS = 500


class ChangedRows:
    """The newer rows of a table with a key.

    Args:
        sql: the table on both sides.
        sides: the sessions of both sides.
    """

    def __init__(self, sql: tuple[TableSql, TableSql], sides: tuple[Side, Side]) -> None:
        self._sql = sql
        self._sides = sides

    async def differing(self, since: tuple[int, int]) -> tuple[Sequence[Key], tuple[int, int]] | None:
        """Return the keys of the rows that differ, and the number of rows of each side. None: the whole table has to be compared.

        Args:
            since: for each side, the ``xmin`` of the snapshot in which the table was equal.

        Raises:
            SubscriberError: a server rejected the query, or a session was lost.
        """
        summaries = await together([side.run(sql.key_summary(xmin)) for sql, side, xmin in zip(self._sql, self._sides, since, strict=True)])
        counts, totals, changes, *altered = zip(*[[int(value or 0) for value in row] for (row,) in summaries], strict=True)
        if max(changes) > _MOST or totals[0] != totals[1] or any(map(any, altered)):
            return None
        here, there = await together([self._newer(number, xmin, changes[number]) for number, xmin in enumerate(since)])
        missing = await together([self._hashes(0, there.keys() - here.keys()), self._hashes(1, here.keys() - there.keys())])
        here |= missing[0]
        there |= missing[1]
        return [key for key in here.keys() | there.keys() if here.get(key) != there.get(key)], (counts[0], counts[1])

    async def _newer(self, number: int, xmin: int, changes: int) -> dict[Key, str | None]:
        if not changes:
            # saves reading the table again
            return {}
        sql = self._sql[number]
        return {tuple(row[1:]): row[0] for row in await self._sides[number].run(sql.newer_hashes(xmin))}

    async def _hashes(self, number: int, keys: set[Key]) -> dict[Key, str | None]:
        found: dict[Key, str | None] = {}
        whole = [tuple(value for value in key if value is not None) for key in keys if None not in key]
        for begin in range(0, len(whole), _KEYS):
            wanted = self._sql[number].has_key(whole[begin : begin + _KEYS])
            rows = await self._sides[number].run(self._sql[number].hashes_of(wanted.sql()), *wanted.values)
            found.update({tuple(row[1:]): row[0] for row in rows})
        return found
