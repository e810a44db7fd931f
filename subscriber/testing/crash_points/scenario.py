"""What the publisher does in a case, and how both sides are compared.

The scenario has what makes each step happen: a large table, which is copied alone and changes meanwhile, small ones that are copied in a
group, small and streamed transactions, savepoints that are rolled back, also without an abort, and prepared transactions. ``history`` has
no key, so a row that is applied twice is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.crash_points.child import NAME, PUBLICATION
from subscriber.testing.crash_points.publisher import CrashPublisher
from subscriber.testing.crash_points.target import CrashTarget, TidyTarget

__all__ = ["Scenario"]

_ITEMS: Final = Table("items", "*id int4", "note")
_HISTORY: Final = Table("history", "number int4", "note")
_QUIET: Final = [Table(f"quiet_{number}", "*id int4", "note") for number in range(3)]
"""With the others, enough tables for a group."""
_TABLES: Final = (_ITEMS, _HISTORY, *_QUIET)
_NOTE: Final = "x" * 400
_LARGE_NOTE: Final = "y" * 7_000
"""Makes the table too large for a group of tables."""
_LARGE: Final = 250


def _rows(first: int, count: int, column: str, note: str = _NOTE) -> list[dict[str, object]]:
    return [{column: number, "note": note} for number in range(first, first + count)]


class Scenario:
    """One run of the publisher.

    Args:
        publisher: empty.
        two_phase: whether there are prepared transactions.
    """

    def __init__(self, publisher: CrashPublisher, *, two_phase: bool) -> None:
        self._two_phase = two_phase
        self.publisher = publisher

    def fill(self) -> None:
        """Create the tables and their first rows."""
        publisher = self.publisher
        publisher.create_table("items", {"id": "int4", "note": "text"}, key=["id"])
        publisher.create_table("history", {"number": "int4", "note": "text"})
        for table in _QUIET:
            publisher.create_table(table.name.name, {"id": "int4", "note": "text"}, key=["id"])
        publisher.create_table("private", {"id": "int4"}, key=["id"])
        publisher.create_publication(PUBLICATION, *[table.name.name for table in _TABLES])
        with_rows = publisher.transaction()
        with_rows.insert("items", _rows(1, 20, "id"))
        with_rows.insert("history", _rows(1, publisher.copied_rows, "number", _LARGE_NOTE))
        for table in _QUIET:
            with_rows.insert(table.name.name, _rows(1, 20, "id"))
        with_rows.commit()

    async def create_tables(self, target: CrashTarget) -> None:
        """Create the tables of the target."""
        for table in _TABLES:
            await target.create_table(table)

    async def steps(self) -> AsyncIterator[str | None]:
        """Do one thing after another.

        Yields a phase that begins, or None: what is committed must be confirmed before the next step. All tables must be synchronized
        before ``changes`` begins.
        """
        publisher = self.publisher
        # during the copy: the table must catch up
        await publisher.until_table_slot()
        yield "copy"
        async with publisher.transaction() as t:
            t.insert("history", number=1001, note="during the copy")
        yield None
        if self._two_phase:
            await publisher.until_two_phase()
        yield "changes"
        for number in range(3):
            async with publisher.transaction() as t:
                t.insert("items", id=201 + number, note="small")
                t.update("items", {"id": 1 + number}, note=f"changed {number}")
                t.delete("items", {"id": 11 + number})
                t.insert("history", number=2001 + number, note="small")
        yield None
        yield "streams"
        for number in range(2):
            async with publisher.transaction() as t:
                t.insert("history", _rows(3000 + 1000 * number, _LARGE, "number"))
                with t.savepoint():
                    t.insert("history", _rows(1, _LARGE, "number"))
                    await publisher.until_received()
                    t.rollback_savepoint()
                t.insert("history", number=3999 + 1000 * number, note="after a savepoint")
            yield None
            publisher.lose_aborts()
        rolled_back = publisher.transaction()
        rolled_back.insert("history", _rows(5000, _LARGE, "number"))
        await publisher.until_received()
        rolled_back.rollback()
        # changes that are not published move the position too
        async with publisher.transaction() as t:
            t.insert("private", id=1)
        yield None
        if self._two_phase:
            yield "prepared"
            async for step in self._prepared_steps():
                yield step
        async with publisher.transaction() as t:
            t.insert("history", number=9001, note="last")
        yield None

    async def _prepared_steps(self) -> AsyncIterator[str | None]:
        publisher = self.publisher
        for number, large in enumerate((False, True)):
            first, second = publisher.transaction(), publisher.transaction()
            first.insert("history", _rows(6000 + 1000 * number, _LARGE if large else 1, "number"))
            first.update("items", {"id": 4 + number}, note="prepared")
            first.prepare(f"committed {number}")
            second.insert("history", _rows(1, _LARGE if large else 1, "number"))
            second.prepare(f"rolled back {number}")
            yield None
            async with publisher.transaction() as t:
                t.insert("history", number=8001 + number, note="between")
            first.commit_prepared()
            yield None
            second.rollback_prepared()
            yield None

    async def differences(self, target: CrashTarget) -> list[str]:
        """Return a sentence for each thing that is not as it must be at the end."""
        found = []
        for table in _TABLES:
            name = table.name.name
            names = [column.name for column in table.columns]
            published = Counter(tuple(row[column] for column in names) for row in self.publisher.rows(name))
            held = Counter(tuple(None if value is None else str(value) for value in row) for row in await target.rows(table))
            if missing := (published - held).total():
                found.append(f'table "{name}": {missing} rows of the publisher are not in the target')
            if more := (held - published).total():
                found.append(f'table "{name}": {more} rows of the target are not on the publisher, or are there too often')
        if more_slots := sorted({*self.publisher.slot_names()} - {NAME}):
            found.append(f"slots are left on the publisher: {', '.join(more_slots)}")
        if isinstance(target, TidyTarget):
            found += target.left_behind()
        return found
