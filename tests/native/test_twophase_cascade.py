"""A target that is itself a publisher (native's topic 022): prepared transactions and streamed ones pass through it."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import TABLE, fill
from tests.native.twophase import PREPARED, enabled, prepare, prepared
from tests.support.database import ServerAddress, fresh_database
from tests.support.observation import eventually
from tests.support.replica import replica

pytestmark = pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")


async def test_through_ours_as_through_native(nodes_native16: Nodes) -> None:
    """The publisher's changes go to native's target and to ours; from ours they are passed on to a third."""
    nodes = nodes_native16
    with fresh_database(ServerAddress(nodes.ours.server.conninfo, 18), "end") as end:
        for database in (nodes.publisher, nodes.native, nodes.ours, end):
            database.execute(TABLE)
        nodes.publisher.execute(f"{fill(1, 50)}; CREATE PUBLICATION pub FOR ALL TABLES")
        nodes.ours.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        async with (
            nodes.followed(two_phase=True, streaming="on") as both,
            replica(nodes.ours, end, two_phase=True, streaming="on") as second,
        ):
            await enabled(both)
            await second.caught_up()
            await eventually(end, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
            prepare(
                nodes, "small", "INSERT INTO t VALUES (100, 'x')", "UPDATE t SET n = 1", "SAVEPOINT a", "DELETE FROM t", "ROLLBACK TO a"
            )
            prepare(nodes, "large", fill(1001, 1400), "SAVEPOINT a", fill(2001, 2400), "ROLLBACK TO a", fill(3001, 3400))
            assert len(await prepared(both)) == 2
            await second.caught_up()
            assert len(end.fetch(PREPARED)) == 2
            assert end.value("SELECT count(*) FROM t") == 50
            nodes.publisher.execute("COMMIT PREPARED 'large'")
            nodes.publisher.execute("ROLLBACK PREPARED 'small'")
            nodes.publisher.execute("UPDATE t SET n = 2 WHERE id > 3000")
            await both.equal()
            assert len(await second.same("SELECT * FROM t ORDER BY id")) == 850
            assert end.fetch(PREPARED) == []
            await both.assert_no_errors()
            assert second.subscription.status.last_error is None
