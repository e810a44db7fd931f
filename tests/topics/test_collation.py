"""Collations under which different texts are equal (native's topic 012): the row is found by the target's, its text is the publisher's."""

from __future__ import annotations

import pytest

from tests.topics.native import Site, Twins

BLIND = "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
ROWS = "INSERT INTO {} VALUES ('small', 1), ('Mixed', 2), ('LARGE', 3), ('other', 4)"


@pytest.fixture
def icu_site(site18: Site) -> Site:
    if not site18.ours.value("SELECT count(*) FROM pg_collation WHERE collprovider = 'i'"):
        pytest.skip("this PostgreSQL was built without ICU")
    return site18


async def changed(site: Site, twins: Twins, table: str) -> None:
    # the target's rows are spelt otherwise, and are the same rows by its collation
    site.in_targets(f"UPDATE {table} SET v = upper(v)")
    site.publisher.execute(f"UPDATE {table} SET n = n + 10 WHERE v = 'small'; UPDATE {table} SET v = 'mIxEd' WHERE v = 'Mixed'")
    site.publisher.execute(f"DELETE FROM {table} WHERE v = 'LARGE'; INSERT INTO {table} VALUES ('new', 5)")
    await twins.equal(publisher=False)
    assert await twins.rows(f"SELECT v, n FROM {table} ORDER BY n") == [("mIxEd", 2), ("OTHER", 4), ("new", 5), ("small", 11)]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("v text PRIMARY KEY, n int", "v text COLLATE blind PRIMARY KEY, n int"),
        ("v text, n int", "v text COLLATE blind, n int"),
        ("v text, n int, UNIQUE (v)", "v text COLLATE blind, n int, EXCLUDE USING btree (v WITH =)"),
    ],
    ids=["key", "by row", "by row with an index"],
)
async def test_found_by_the_target_s_collation(icu_site: Site, here: str, there: str) -> None:
    icu_site.publisher.execute(f"CREATE TABLE t ({here})")
    if "PRIMARY" not in here:
        icu_site.publisher.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    icu_site.in_targets(f"{BLIND}; CREATE TABLE t ({there})")
    icu_site.publisher.execute(f"{ROWS.format('t')}; CREATE PUBLICATION pub FOR TABLE t")
    async with icu_site.followed() as twins:
        await changed(icu_site, twins, "t")
        await twins.untroubled()
