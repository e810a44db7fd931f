"""As whom changes are made (native's topics 027 and 033): as the table's owner, or with run_as_owner as the subscription's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from subscriber import RelationError, SubscriberError
from tests.native.native import Nodes
from tests.support.database import Database

SEEN = """
    CREATE TABLE seen (id serial PRIMARY KEY, who name, what text);
    GRANT ALL ON seen, seen_id_seq TO public;
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.seen (who, what) VALUES (current_user, TG_OP); RETURN NEW; END $$;
    CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note(); ALTER TABLE t ENABLE ALWAYS TRIGGER note
"""


@contextlib.contextmanager
def role(nodes: Nodes) -> Iterator[str]:
    """A role without privileges; both targets are of one server."""
    name = f"r_{secrets.token_hex(4)}"
    nodes.ours.execute(f"CREATE ROLE {name}")
    try:
        yield name
    finally:
        nodes.in_targets(f"DROP OWNED BY {name}")
        nodes.ours.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize("run_as_owner", [False, True])
async def test_role_that_changes_the_rows(nodes18: Nodes, run_as_owner: bool) -> None:
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE ours (id int PRIMARY KEY)")
    nodes18.publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR ALL TABLES")
    with role(nodes18) as owner:
        nodes18.in_targets(f"{SEEN}; ALTER TABLE t OWNER TO {owner}")
        async with nodes18.followed(run_as_owner=run_as_owner) as both:
            nodes18.publisher.execute(
                "INSERT INTO t VALUES (2, 'new'); UPDATE t SET v = 'x'; DELETE FROM t WHERE id = 1; INSERT INTO ours VALUES (1)"
            )
            await both.equal()
            who = "postgres" if run_as_owner else owner
            assert await both.rows("SELECT DISTINCT who::text FROM seen") == [(who,)]
            assert len(await both.rows("SELECT id, what FROM seen ORDER BY id")) == 5
            nodes18.publisher.execute("TRUNCATE t, ours")
            await both.equal()
            assert await both.value("SELECT count(*) FROM t") == 0
            await both.assert_no_errors()


def execute_in_targets(nodes: Nodes, statement: str, owner: str) -> None:
    nodes.in_targets(statement.format(owner=owner))


@pytest.mark.parametrize(
    ("statement", "native", "kind", "repair"),
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
async def test_owner_who_may_not(nodes18: Nodes, statement: str, native: str, kind: type[SubscriberError], repair: str) -> None:
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    nodes18.publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR ALL TABLES")
    with role(nodes18) as owner:
        nodes18.in_targets(f"ALTER TABLE t OWNER TO {owner}")
        async with nodes18.followed() as both:
            execute_in_targets(nodes18, statement, owner)
            nodes18.publisher.execute("INSERT INTO t VALUES (2, 'new'); UPDATE t SET v = 'x'")
            await both.both_report(native, kind)
            assert [_count(target) for target in (both.native, both.ours)] == [1, 1]
            execute_in_targets(nodes18, repair, owner)
            await both.equal()


def _count(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM t"))
