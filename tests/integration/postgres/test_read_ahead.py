"""The tables of a batch's first changes are read together: one table takes as long as many."""

from __future__ import annotations

from typing import Any

import pytest

from subscriber.errors import RelationError
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from tests.support.database import Database
from tests.support.sink_postgres import Feed, Remote, opened


def _remotes(count: int) -> list[Remote]:
    return [Remote(f"t{number}", "*id", relation_id=5000 + number) for number in range(count)]


async def _apply(feed: Feed, remotes: list[Remote], value: int, *, described: bool) -> None:
    """One batch, in which each table has a transaction of its own."""
    transactions = [feed.transaction(*[remote.relation] if described else (), remote.insert(value)) for remote in remotes]
    await feed.opened.apply(feed.batch(*transactions))


@pytest.mark.parametrize("run_as_owner", [True, False])
async def test_tables_are_read_together(target_db: Database, monkeypatch: pytest.MonkeyPatch, run_as_owner: bool) -> None:
    queries: list[str] = []
    fetch = CatalogReader.fetch

    async def counted(reader: CatalogReader, query: str, *parameters: object) -> Any:
        queries.append(query)
        return await fetch(reader, query, *parameters)

    monkeypatch.setattr(CatalogReader, "fetch", counted)
    remotes = _remotes(20)
    target_db.execute(";".join(f"CREATE TABLE {remote.relation.name} (id text PRIMARY KEY)" for remote in remotes))
    async with opened(target_db, run_as_owner=run_as_owner) as feed:
        for remote in remotes:
            feed.subscribe("public", remote.relation.name)
            feed.subscribed.add(f"public.{remote.relation.name}")
        queries.clear()
        await _apply(feed, remotes, 1, described=True)
        first = len(queries)
        await _apply(feed, remotes, 2, described=False)
        assert len(queries) == first, "what is known is read again"
        # all are read again after an ALTER TABLE, though the publisher does not describe them again
        target_db.execute("ALTER TABLE t7 ADD v int")
        queries.clear()
        await _apply(feed, remotes, 3, described=False)
        again = len(queries)
        # one that was replaced by a table that is not part of the subscription
        target_db.execute("ALTER TABLE t8 RENAME TO old; CREATE TABLE t8 (id text PRIMARY KEY)")
        with pytest.raises(RelationError, match=r'"public\.t8" of the target was replaced'):
            await _apply(feed, remotes, 4, described=False)
    assert first <= 5
    assert again <= 30
    assert target_db.fetch("SELECT id FROM t7") == [(str(number),) for number in (1, 2, 3, 4)]
    assert target_db.fetch("SELECT id FROM old") == [("1",), ("2",), ("3",)]
    assert target_db.fetch("SELECT id FROM t8") == []
