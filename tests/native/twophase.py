"""What the topics about prepared transactions share."""

from __future__ import annotations

import re

from tests.native.native import BothSubscriptions, Nodes
from tests.native.streams import TABLE, fill, was_streamed
from tests.support.observation import eventually

PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"


def prepare(nodes: Nodes, gid: str, *statements: str) -> None:
    with nodes.publisher.connect() as session:
        session.execute("BEGIN")
        for statement in statements:
            session.execute(statement.encode())
        session.execute(f"PREPARE TRANSACTION '{gid}'".encode())


async def enabled(both: BothSubscriptions) -> None:
    """Both have two_phase enabled, and their slots too."""
    await both.caught_up()
    of_database = "subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
    await eventually(both.native, f"SELECT subtwophasestate FROM pg_subscription WHERE {of_database}", "e")
    await eventually(both.ours, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
    await both.caught_up()


async def prepared(both: BothSubscriptions) -> list[int]:
    """Which of the publisher's transactions are prepared, by xid: the same in both targets, under names of the same form."""
    await both.caught_up()
    found = []
    for target in (both.native, both.ours):
        names = [re.fullmatch(r"pg_gid_\d+_(\d+)", gid) for (gid,) in target.fetch(PREPARED)]
        assert all(names)
        found.append(sorted(int(name[1]) for name in names if name))
    assert found[0] == found[1]
    return found[1]


async def prepared_and_ended(nodes: Nodes, streaming: str) -> None:
    """Prepare transactions, small, large and empty ones, and commit them or roll them back; both targets do the same."""
    nodes.everywhere(f"{TABLE}; CREATE TABLE u (id int PRIMARY KEY, v text, n int)")
    nodes.publisher.execute(f"{fill(1, 50)}; CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes.followed(two_phase=True, streaming=streaming) as both:
        await enabled(both)
        prepare(
            nodes, "small", "INSERT INTO t VALUES (100, 'x'); UPDATE t SET n = 1 WHERE id < 10; SAVEPOINT a; DELETE FROM t; ROLLBACK TO a"
        )
        prepare(nodes, "large", fill(1001, 1300, "u"), "SAVEPOINT a", fill(2001, 2300, "u"), "ROLLBACK TO a", fill(3001, 3300, "u"))
        prepare(nodes, "empty", "SELECT pg_current_xact_id()")
        assert len(await prepared(both)) >= 2
        # others are not held up, and nothing is visible
        nodes.publisher.execute("INSERT INTO t VALUES (101, 'meanwhile'); UPDATE t SET n = 2 WHERE id = 20")
        await both.equal()
        assert await both.value("SELECT count(*) FROM t WHERE id = 100 OR n = 1") == 0
        for gid in ("large", "empty", "small"):
            nodes.publisher.execute(f"COMMIT PREPARED '{gid}'")
        await both.equal()
        assert await prepared(both) == []
        assert await both.value("SELECT count(*) FROM u") == 600
        # rolled back, the same names again
        prepare(nodes, "small", "INSERT INTO t VALUES (200, 'gone'); UPDATE t SET id = -id")
        prepare(nodes, "large", "DELETE FROM u WHERE id < 2000", fill(5001, 5400, "u"), "TRUNCATE u")
        assert len(await prepared(both)) == 2
        for gid in ("small", "large"):
            nodes.publisher.execute(f"ROLLBACK PREPARED '{gid}'")
        nodes.publisher.execute("INSERT INTO t VALUES (102, 'after')")
        await both.equal()
        assert await prepared(both) == []
        # prepared and ended at once; a row that the next transaction needs
        for number in range(5):
            prepare(nodes, "quick", f"INSERT INTO t VALUES ({300 + number}, 'quick')")
            nodes.publisher.execute("COMMIT PREPARED 'quick'")
            nodes.publisher.execute(f"UPDATE t SET v = 'changed' WHERE id = {300 + number}")
        await both.equal()
        assert was_streamed(both) == (streaming != "off")
        await both.assert_no_errors()
