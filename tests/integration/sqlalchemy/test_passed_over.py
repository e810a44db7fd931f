"""A row that the target passes over exists: no conflict. One that is missing is one, also in a table that has such triggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.interfaces import ApplyStatistics, TableEntry, TableState
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from tests.sinks.targets import MariaDBTarget, SqliteTarget
from tests.support.mariadb_database import MariaDatabase


def missing(statistics: ApplyStatistics) -> tuple[int, int]:
    return statistics.confl_update_missing, statistics.confl_delete_missing


async def opened(feed: Feed, table: Table) -> None:
    await feed.open()
    await feed.describe(table)
    await feed.opened.add_tables([table.name], TableEntry(TableState.READY))


async def changed(feed: Feed, table: Table) -> None:
    """Rows 1 to 30 are passed over; 50 and 51 are not, 90 and 91 are missing."""
    full = table.full
    kept, other = ("kept", "other") if full else (None, None)
    await feed.apply(
        *(table.update(number, "new", old=(number, "kept") if full else None) for number in range(1, 21)),
        *(table.delete(number, kept) for number in range(11, 31)),
        table.update(50, "new", old=(50, "other") if full else None),
        table.delete(51, other),
    )
    assert missing(feed.sink.statistics) == (0, 0)
    await feed.apply(
        table.update(90, "new", old=(90, "old") if full else None), table.delete(91, other), table.update(1, "new", old=(1, kept))
    )
    assert missing(feed.sink.statistics) == (1, 1)
    await feed.expect(table, *((number, "kept") for number in range(1, 31)), (50, "new"))
    await feed.close()


@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("full", [False, True], ids=["key", "full"])
async def test_row_of_sqlite_that_is_passed_over(tmp_path: Path, full: bool, late: bool) -> None:
    """The bug was that UPDATE and DELETE were counted as if the row were missing."""
    target = SqliteTarget(tmp_path / "replica.db")
    table = Table("t", "id int4" if full else "*id int4", "v", full=full)
    target._execute(f"CREATE TABLE t (id integer{'' if full else ' PRIMARY KEY'}, v text)")
    feed = Feed(target)
    await opened(feed, table)
    await feed.apply(
        table.relation, *(table.insert(number, "kept") for number in range(1, 31)), *(table.insert(n, "other") for n in (50, 51))
    )
    if late:
        await feed.apply(table.update(50, "other", old=(50, "other") if full else None))
    for action in ("UPDATE", "DELETE"):
        target._execute(f"CREATE TRIGGER on_{action} BEFORE {action} ON t WHEN OLD.id <= 30 BEGIN SELECT RAISE(IGNORE); END")
    if not late:
        await feed.close()
        feed.sink = target.new_sink()
        await feed.open()
        await feed.apply(table.relation)
    await changed(feed, table)


async def test_row_of_sqlite_that_a_constraint_keeps(tmp_path: Path) -> None:
    target = SqliteTarget(tmp_path / "replica.db")
    target._execute("CREATE TABLE t (id integer PRIMARY KEY, v text UNIQUE ON CONFLICT IGNORE)")
    table = Table("t", "*id int4", "v")
    feed = Feed(target)
    await opened(feed, table)
    await feed.apply(table.relation, table.insert(1, "a"), table.insert(2, "b"), table.update(2, "a"))
    assert missing(feed.sink.statistics) == (0, 0)
    await feed.expect(table, (1, "a"), (2, "b"))
    await feed.close()


@pytest.mark.parametrize("rows", [1, 40])
async def test_row_of_mariadb_that_stays_as_it_is(mariadb_db: MariaDatabase, rows: int) -> None:
    """Rows that are found count, not those that change: one by one, and many at once."""
    mariadb_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    table = Table("t", "*id int4", "v")
    feed = Feed(MariaDBTarget(mariadb_db))
    await opened(feed, table)
    await feed.apply(table.relation, *(table.insert(number, "same") for number in range(rows)))
    await feed.apply(*(table.update(number, "same") for number in range(rows)))
    assert missing(feed.sink.statistics) == (0, 0)
    await feed.close()
