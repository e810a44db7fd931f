"""What the topics about prepared transactions share."""

from __future__ import annotations

import re

from tests.native.native import Site, Twins
from tests.native.streams import TABLE, fill, was_streamed
from tests.support.observation import eventually

PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"


def prepare(site: Site, gid: str, *statements: str) -> None:
    with site.publisher.connect() as session:
        session.execute("BEGIN")
        for statement in statements:
            session.execute(statement.encode())
        session.execute(f"PREPARE TRANSACTION '{gid}'".encode())


async def enabled(twins: Twins) -> None:
    """Both have two_phase enabled, and their slots too."""
    await twins.caught_up()
    of_database = "subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
    await eventually(twins.native, f"SELECT subtwophasestate FROM pg_subscription WHERE {of_database}", "e")
    await eventually(twins.ours, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
    await twins.caught_up()


async def prepared(twins: Twins) -> list[int]:
    """Which of the publisher's transactions are prepared, by xid: the same in both targets, under names of the same form."""
    await twins.caught_up()
    found = []
    for target in (twins.native, twins.ours):
        names = [re.fullmatch(r"pg_gid_\d+_(\d+)", gid) for (gid,) in target.fetch(PREPARED)]
        assert all(names)
        found.append(sorted(int(name[1]) for name in names if name))
    assert found[0] == found[1]
    return found[1]


async def prepared_and_ended(site: Site, streaming: str) -> None:
    """Prepare transactions, small, large and empty ones, and commit them or roll them back; both targets do the same."""
    site.everywhere(f"{TABLE}; CREATE TABLE u (id int PRIMARY KEY, v text, n int)")
    site.publisher.execute(f"{fill(1, 50)}; CREATE PUBLICATION pub FOR ALL TABLES")
    async with site.followed(two_phase=True, streaming=streaming) as twins:
        await enabled(twins)
        prepare(
            site, "small", "INSERT INTO t VALUES (100, 'x'); UPDATE t SET n = 1 WHERE id < 10; SAVEPOINT a; DELETE FROM t; ROLLBACK TO a"
        )
        prepare(site, "large", fill(1001, 1300, "u"), "SAVEPOINT a", fill(2001, 2300, "u"), "ROLLBACK TO a", fill(3001, 3300, "u"))
        prepare(site, "empty", "SELECT pg_current_xact_id()")
        assert len(await prepared(twins)) >= 2
        # others are not held up, and nothing is visible
        site.publisher.execute("INSERT INTO t VALUES (101, 'meanwhile'); UPDATE t SET n = 2 WHERE id = 20")
        await twins.equal()
        assert await twins.value("SELECT count(*) FROM t WHERE id = 100 OR n = 1") == 0
        for gid in ("large", "empty", "small"):
            site.publisher.execute(f"COMMIT PREPARED '{gid}'")
        await twins.equal()
        assert await prepared(twins) == []
        assert await twins.value("SELECT count(*) FROM u") == 600
        # rolled back, the same names again
        prepare(site, "small", "INSERT INTO t VALUES (200, 'gone'); UPDATE t SET id = -id")
        prepare(site, "large", "DELETE FROM u WHERE id < 2000", fill(5001, 5400, "u"), "TRUNCATE u")
        assert len(await prepared(twins)) == 2
        for gid in ("small", "large"):
            site.publisher.execute(f"ROLLBACK PREPARED '{gid}'")
        site.publisher.execute("INSERT INTO t VALUES (102, 'after')")
        await twins.equal()
        assert await prepared(twins) == []
        # prepared and ended at once; a row that the next transaction needs
        for number in range(5):
            prepare(site, "quick", f"INSERT INTO t VALUES ({300 + number}, 'quick')")
            site.publisher.execute("COMMIT PREPARED 'quick'")
            site.publisher.execute(f"UPDATE t SET v = 'changed' WHERE id = {300 + number}")
        await twins.equal()
        assert was_streamed(twins) == (streaming != "off")
        await twins.untroubled()
