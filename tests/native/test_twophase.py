"""Prepared transactions (native's topic 021): prepared in both targets, committed or rolled back with the publisher's."""

from __future__ import annotations

import psycopg
import pytest

from tests.native.native import Site
from tests.native.streams import TABLE, fill
from tests.native.twophase import prepare, prepared, prepared_and_ended
from tests.support.observation import eventually
from tests.support.replica import replica


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


async def test_state_that_is_reached(site: Site) -> None:
    """A publisher before 15 does not send what is prepared. Native says enabled nevertheless, and refuses to copy tables; ours waits."""
    site.everywhere(f"{TABLE}; CREATE TABLE u (id int PRIMARY KEY)")
    site.publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    old = site.publisher.version < 15
    state = "SELECT subtwophasestate::text FROM {}.pg_subscription WHERE subname = '{}'"
    async with site.followed(two_phase=True) as twins:
        native, ours = state.format("pg_catalog", twins.name), state.format("subscriber", twins.replica.subscription.name)
        await eventually(site.native, native, "e")
        await eventually(site.ours, ours, "p" if old else "e")
        await twins.caught_up()
        prepare(site, "one", "INSERT INTO t VALUES (1, 'x')")
        assert len(await prepared(twins)) == (0 if old else 1)
        with pytest.raises(psycopg.Error, match=r"REFRESH with copy_data is not allowed when two_phase is enabled"):
            site.native.execute(f"ALTER SUBSCRIPTION {twins.name} REFRESH PUBLICATION")
        site.publisher.execute("COMMIT PREPARED 'one'")
        await twins.equal()
        assert await prepared(twins) == []
        assert site.ours.value(ours) == ("p" if old else "e")
    # where nothing is enabled, a table can be added
    site.publisher.execute("INSERT INTO u VALUES (1); ALTER PUBLICATION pub ADD TABLE u")
    if old:
        async with replica(site.publisher, site.ours, two_phase=True) as found:
            assert await found.same("SELECT id FROM u") == [(1,)]
