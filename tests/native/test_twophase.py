"""Prepared transactions (native's topic 021): prepared in both targets, committed or rolled back with the publisher's."""

from __future__ import annotations

import psycopg
import pytest

from tests.native.native import Nodes
from tests.native.streams import TABLE, fill
from tests.native.twophase import prepare, prepared, prepared_and_ended
from tests.support.observation import eventually
from tests.support.replica import replica


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_prepared_and_ended(nodes_native16: Nodes) -> None:
    await prepared_and_ended(nodes_native16, "off")


async def test_without_two_phase(nodes_native16: Nodes) -> None:
    """What is prepared comes when it is committed, as any other transaction."""
    nodes = nodes_native16
    nodes.everywhere(TABLE)
    nodes.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes.followed(streaming="on") as both:
        prepare(nodes, "one", "INSERT INTO t VALUES (1, 'x')", fill(1001, 1300))
        prepare(nodes, "two", "INSERT INTO t VALUES (2, 'gone')")
        assert await prepared(both) == []
        nodes.publisher.execute("COMMIT PREPARED 'one'")
        nodes.publisher.execute("ROLLBACK PREPARED 'two'")
        await both.equal()
        assert await both.value("SELECT count(*) FROM t") == 301
        await both.assert_no_errors()


@pytest.mark.matrix
async def test_two_phase_state_by_version_of_the_publisher(nodes: Nodes) -> None:
    """A publisher before 15 does not send what is prepared. Native says enabled nevertheless, and refuses to copy tables; ours waits."""
    nodes.everywhere(f"{TABLE}; CREATE TABLE u (id int PRIMARY KEY)")
    nodes.publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    old = nodes.publisher.version < 15
    state = "SELECT subtwophasestate::text FROM {}.pg_subscription WHERE subname = '{}'"
    async with nodes.followed(two_phase=True) as both:
        native, ours = state.format("pg_catalog", both.name), state.format("subscriber", both.replica.subscription.name)
        await eventually(nodes.native, native, "e")
        await eventually(nodes.ours, ours, "p" if old else "e")
        await both.caught_up()
        prepare(nodes, "one", "INSERT INTO t VALUES (1, 'x')")
        assert len(await prepared(both)) == (0 if old else 1)
        with pytest.raises(psycopg.Error, match=r"REFRESH with copy_data is not allowed when two_phase is enabled"):
            nodes.native.execute(f"ALTER SUBSCRIPTION {both.name} REFRESH PUBLICATION")
        nodes.publisher.execute("COMMIT PREPARED 'one'")
        await both.equal()
        assert await prepared(both) == []
        assert nodes.ours.value(ours) == ("p" if old else "e")
    # where nothing is enabled, a table can be added
    nodes.publisher.execute("INSERT INTO u VALUES (1); ALTER PUBLICATION pub ADD TABLE u")
    if old:
        async with replica(nodes.publisher, nodes.ours, two_phase=True) as found:
            assert await found.same("SELECT id FROM u") == [(1,)]
