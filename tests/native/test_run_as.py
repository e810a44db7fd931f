"""As whom changes are made (native's topics 027 and 033): as the table's owner, or with run_as_owner as the subscription's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from subscriber import RelationError, SubscriberError
from tests.native.native import Site
from tests.support.database import Database

SEEN = """
    CREATE TABLE seen (id serial PRIMARY KEY, who name, what text);
    GRANT ALL ON seen, seen_id_seq TO public;
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.seen (who, what) VALUES (current_user, TG_OP); RETURN NEW; END $$;
    CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note(); ALTER TABLE t ENABLE ALWAYS TRIGGER note
"""


@contextlib.contextmanager
def role(site: Site) -> Iterator[str]:
    """A role without privileges; both targets are of one server."""
    name = f"r_{secrets.token_hex(4)}"
    site.ours.execute(f"CREATE ROLE {name}")
    try:
        yield name
    finally:
        site.in_targets(f"DROP OWNED BY {name}")
        site.ours.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("run_as_owner", [False, True])
async def test_who_changes_the_rows(site18: Site, run_as_owner: bool) -> None:
    site18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE ours (id int PRIMARY KEY)")
    site18.publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR ALL TABLES")
    with role(site18) as owner:
        site18.in_targets(f"{SEEN}; ALTER TABLE t OWNER TO {owner}")
        async with site18.followed(run_as_owner=run_as_owner) as twins:
            site18.publisher.execute(
                "INSERT INTO t VALUES (2, 'new'); UPDATE t SET v = 'x'; DELETE FROM t WHERE id = 1; INSERT INTO ours VALUES (1)"
            )
            await twins.equal()
            who = "postgres" if run_as_owner else owner
            assert await twins.rows("SELECT DISTINCT who::text FROM seen") == [(who,)]
            assert len(await twins.rows("SELECT id, what FROM seen ORDER BY id")) == 5
            site18.publisher.execute("TRUNCATE t, ours")
            await twins.equal()
            assert await twins.value("SELECT count(*) FROM t") == 0
            await twins.untroubled()


def spoil(site: Site, statement: str, owner: str) -> None:
    site.in_targets(statement.format(owner=owner))


@pytest.mark.parametrize(
    ("statement", "native", "kind", "mend"),
    [
        # an owner may take privileges from himself
        ("REVOKE ALL ON t FROM {owner}", "permission denied for table t", SubscriberError, "GRANT ALL ON t TO {owner}"),
        ("REVOKE UPDATE ON t FROM {owner}", "permission denied for table t", SubscriberError, "GRANT UPDATE ON t TO {owner}"),
        (
            "ALTER TABLE t ENABLE ROW LEVEL SECURITY; ALTER TABLE t FORCE ROW LEVEL SECURITY",
            'cannot replicate into relation with row-level security enabled: "t"',
            RelationError,
            "ALTER TABLE t NO FORCE ROW LEVEL SECURITY",
        ),
    ],
    ids=["nothing", "no update", "row security"],
)
async def test_owner_who_may_not(site18: Site, statement: str, native: str, kind: type[SubscriberError], mend: str) -> None:
    site18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    site18.publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR ALL TABLES")
    with role(site18) as owner:
        site18.in_targets(f"ALTER TABLE t OWNER TO {owner}")
        async with site18.followed() as twins:
            spoil(site18, statement, owner)
            site18.publisher.execute("INSERT INTO t VALUES (2, 'new'); UPDATE t SET v = 'x'")
            await twins.both_refuse(native, kind)
            assert [_count(target) for target in (twins.native, twins.ours)] == [1, 1]
            spoil(site18, mend, owner)
            await twins.equal()


def _count(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM t"))
