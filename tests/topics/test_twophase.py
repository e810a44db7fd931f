"""Prepared transactions (native's topic 021): prepared in both targets, committed or rolled back with the publisher's."""

from __future__ import annotations

import pytest

from tests.topics.native import Site
from tests.topics.streams import TABLE, fill
from tests.topics.twophase import prepare, prepared, prepared_and_ended


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_prepared_and_ended(site_native16: Site) -> None:
    await prepared_and_ended(site_native16, "off")


async def test_without_two_phase(site_native16: Site) -> None:
    """What is prepared comes when it is committed, as any other transaction."""
    site = site_native16
    site.everywhere(TABLE)
    site.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with site.followed(streaming="on") as twins:
        prepare(site, "one", "INSERT INTO t VALUES (1, 'x')", fill(1001, 1300))
        prepare(site, "two", "INSERT INTO t VALUES (2, 'gone')")
        assert await prepared(twins) == []
        site.publisher.execute("COMMIT PREPARED 'one'")
        site.publisher.execute("ROLLBACK PREPARED 'two'")
        await twins.equal()
        assert await twins.value("SELECT count(*) FROM t") == 301
        await twins.untroubled()
