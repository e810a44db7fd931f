"""Constraints and triggers of the target (native's topic 003): what fires, and what is checked."""

from __future__ import annotations

from subscriber import ApplyError
from tests.native.native import BothSubscriptions, Nodes
from tests.support.observation import eventually, until

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text, n int); CREATE TABLE child (id int PRIMARY KEY, t int)"
SEEN = """
    CREATE TABLE seen (id serial PRIMARY KEY, what text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.seen (what) VALUES (concat_ws(' ', TG_NAME, TG_WHEN, TG_OP, OLD.id, NEW.id)); RETURN coalesce(NEW, OLD);
    END $$;
"""


def trigger(name: str, when: str, enable: str) -> str:
    return f"CREATE TRIGGER {name} {when} ON t FOR EACH ROW EXECUTE FUNCTION note();" + (
        f"ALTER TABLE t ENABLE {enable} TRIGGER {name};" if enable else ""
    )


async def test_row_triggers(nodes18: Nodes) -> None:
    nodes18.everywhere(TABLES)
    nodes18.in_targets(
        SEEN
        + trigger("ordinary", "AFTER INSERT OR UPDATE OR DELETE", "")
        + trigger("replica", "BEFORE INSERT OR UPDATE OR DELETE", "REPLICA")
        + trigger("always", "AFTER INSERT OR UPDATE OR DELETE", "ALWAYS")
        # native counts every column that was sent as one that is updated
        + trigger("of_column", "BEFORE UPDATE OF n", "REPLICA")
        + trigger("when_moved", "AFTER UPDATE", "ALWAYS").replace("FOR EACH ROW", "FOR EACH ROW WHEN (OLD.id <> NEW.id)")
    )
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'copied', 0)")
    async with nodes18.followed() as both:
        nodes18.publisher.execute(
            "INSERT INTO t VALUES (2, 'new', 0); UPDATE t SET v = 'changed' WHERE id = 1; UPDATE t SET id = 3 WHERE id = 2"
        )
        nodes18.publisher.execute("DELETE FROM t WHERE id = 3; UPDATE t SET id = 9 WHERE id = 3; DELETE FROM t WHERE id = 3")
        await both.equal()
        seen = [what for (what,) in await both.rows("SELECT what FROM seen ORDER BY id")]
        # the copy fires them too
        assert seen[:4] == ["replica BEFORE INSERT 1", "always AFTER INSERT 1", "replica BEFORE INSERT 2", "always AFTER INSERT 2"]
        assert [what for what in seen if what.startswith("of_column")] == ["of_column BEFORE UPDATE 1 1", "of_column BEFORE UPDATE 2 3"]
        assert [what for what in seen if what.startswith("when_moved")] == ["when_moved AFTER UPDATE 2 3"]
        assert seen[-2:] == ["replica BEFORE DELETE 3", "always AFTER DELETE 3"]


async def test_triggers_that_change_the_row(nodes18: Nodes) -> None:
    """One that changes a row, one that leaves a row out, one that does something else instead."""
    nodes18.everywhere(TABLES)
    nodes18.in_targets("""
        CREATE FUNCTION edit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF OLD.n = 13 OR NEW.n = 13 THEN RETURN NULL; END IF;
            IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
            NEW.v := NEW.v || ' edited'; NEW.n := NEW.n + 100; RETURN NEW;
        END $$;
        CREATE TRIGGER edit BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION edit();
        ALTER TABLE t ENABLE REPLICA TRIGGER edit;
        INSERT INTO t VALUES (50, 'own', 13)
    """)
    nodes18.publisher.execute("INSERT INTO t VALUES (1, 'copied', 0), (2, 'copied', 13); CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute(
            "INSERT INTO t VALUES (3, 'new', 1), (4, 'new', 13), (50, 'x', 13); UPDATE t SET v = 'changed' WHERE n = 1"
        )
        nodes18.publisher.execute("UPDATE t SET n = 13 WHERE id = 1; DELETE FROM t WHERE id IN (3, 4)")
        nodes18.publisher.execute("UPDATE t SET v = 'y' WHERE id = 50; DELETE FROM t WHERE id = 50; INSERT INTO t VALUES (5, 'last', 5)")
        await both.equal(publisher=False)
        assert await both.rows("SELECT * FROM t ORDER BY id") == [(1, "copied edited", 100), (5, "last edited", 105), (50, "own", 13)]
        assert both.native_errors() == []
        assert both.replica.subscription.status.last_error is None


async def test_constraints(nodes18: Nodes) -> None:
    """Foreign keys and deferred constraints are not checked, all others are."""
    nodes18.everywhere(TABLES)
    nodes18.in_targets("""
        ALTER TABLE child ADD FOREIGN KEY (t) REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE;
        ALTER TABLE t ADD CONSTRAINT positive CHECK (n >= 0), ADD CONSTRAINT late UNIQUE (v) DEFERRABLE INITIALLY DEFERRED;
        ALTER TABLE t ALTER COLUMN n SET NOT NULL; ALTER TABLE t ADD CONSTRAINT apart EXCLUDE USING btree (n WITH =) WHERE (n > 1000)
    """)
    nodes18.publisher.execute(
        "INSERT INTO t VALUES (1, 'a', 0); INSERT INTO child VALUES (1, 1), (2, 77); CREATE PUBLICATION pub FOR ALL TABLES"
    )
    async with nodes18.followed() as both:
        # a child without its parent, in any order; cascades happen on the publisher
        nodes18.publisher.execute("INSERT INTO child VALUES (3, 2), (4, 99); INSERT INTO t VALUES (2, 'b', 0); DELETE FROM t WHERE id = 1")
        nodes18.publisher.execute("INSERT INTO t VALUES (3, 'b', 0), (4, 'b', 2000); UPDATE t SET id = 5 WHERE id = 2")
        await both.equal()
        assert await both.value("SELECT count(*) FROM child") == 4
        for execute_in_targets, native, ours in (
            ("(10, 'x', -1)", 'violates check constraint "positive"', None),
            ("(11, 'y', NULL)", 'null value in column "n"', None),
            ("(12, 'z', 2000)", "conflicting key value violates exclusion", 'exclusion constraint "apart"'),
        ):
            nodes18.publisher.execute(
                f"INSERT INTO t VALUES {execute_in_targets}; UPDATE t SET n = 1 WHERE v = {execute_in_targets.split(',')[1]}"
            )
            await both.both_report(native, ApplyError, ours)
            nodes18.in_targets(
                "ALTER TABLE t DROP CONSTRAINT IF EXISTS positive" if "-1" in execute_in_targets else "ALTER TABLE t ALTER n DROP NOT NULL"
            )
            if "2000" in execute_in_targets:
                nodes18.in_targets("ALTER TABLE t DROP CONSTRAINT apart")
            await both.equal()


async def test_rules(nodes18: Nodes) -> None:
    """Ordinary ones are not applied. Native passes over all; ours, which writes SQL, refuses what would be applied: no row goes astray."""
    nodes18.everywhere(TABLES)
    nodes18.in_targets(
        "CREATE RULE ordinary AS ON INSERT TO t DO INSTEAD NOTHING; CREATE RULE twice AS ON UPDATE TO t DO ALSO DELETE FROM child"
    )
    nodes18.publisher.execute("INSERT INTO child VALUES (1, 1); CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        nodes18.publisher.execute("INSERT INTO t VALUES (1, 'a', 0), (2, 'b', 0); UPDATE t SET v = 'c'")
        await both.equal()
        for enable in ("ALWAYS", "REPLICA"):
            nodes18.in_targets(f"ALTER TABLE t ENABLE {enable} RULE ordinary")
            rows = f"SELECT count(*) FROM t WHERE v = '{enable}'"
            nodes18.publisher.execute(f"INSERT INTO t SELECT max(id) + 1, '{enable}', 0 FROM t")
            await eventually(both.native, rows, 1)
            await refused(both, 'rule "ordinary" of logical replication target relation "public.t" applies to replicated changes')
            assert both.ours.value(rows) == 0
            nodes18.in_targets("ALTER TABLE t ENABLE RULE ordinary")
            await both.equal()


async def refused(both: BothSubscriptions, words: str) -> None:
    """Wait until our last error has these words."""
    status = both.replica.subscription
    await until(lambda: words in str(status.status.last_error), words)
