"""A target that is itself a publisher (native's topic 022): prepared transactions and streamed ones pass through it."""

from __future__ import annotations

import pytest

from tests.native.native import Site
from tests.native.streams import TABLE, fill
from tests.native.twophase import PREPARED, enabled, prepare, prepared
from tests.support.database import ServerAddress, fresh_database
from tests.support.observation import eventually
from tests.support.replica import replica

pytestmark = pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")


async def test_through_ours_as_through_native(site_native16: Site) -> None:
    """The publisher's changes go to native's target and to ours; from ours they go on to a third, by another subscription of ours."""
    site = site_native16
    with fresh_database(ServerAddress(site.ours.server.conninfo, 18), "end") as end:
        for database in (site.publisher, site.native, site.ours, end):
            database.execute(TABLE)
        site.publisher.execute(f"{fill(1, 50)}; CREATE PUBLICATION pub FOR ALL TABLES")
        site.ours.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        async with (
            site.followed(two_phase=True, streaming="on") as twins,
            replica(site.ours, end, two_phase=True, streaming="on") as second,
        ):
            await enabled(twins)
            await second.caught_up()
            await eventually(end, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
            prepare(site, "small", "INSERT INTO t VALUES (100, 'x')", "UPDATE t SET n = 1", "SAVEPOINT a", "DELETE FROM t", "ROLLBACK TO a")
            prepare(site, "large", fill(1001, 1400), "SAVEPOINT a", fill(2001, 2400), "ROLLBACK TO a", fill(3001, 3400))
            assert len(await prepared(twins)) == 2
            await second.caught_up()
            assert len(end.fetch(PREPARED)) == 2
            assert end.value("SELECT count(*) FROM t") == 50
            site.publisher.execute("COMMIT PREPARED 'large'")
            site.publisher.execute("ROLLBACK PREPARED 'small'")
            site.publisher.execute("UPDATE t SET n = 2 WHERE id > 3000")
            await twins.equal()
            assert len(await second.same("SELECT * FROM t ORDER BY id")) == 850
            assert end.fetch(PREPARED) == []
            await twins.untroubled()
            assert second.subscription.status.last_error is None
