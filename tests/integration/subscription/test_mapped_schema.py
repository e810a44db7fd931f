"""``schema copy``, ``new_tables = copy`` and ``schema diff`` into PostgreSQL, with other names and fewer columns."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from subscriber import ConfigurationError, SchemaOptions, SubscriptionOptions, copy_schema, diff_schema
from subscriber.errors import TargetError
from subscriber.interfaces.schema import SchemaStep, Section, StepState
from subscriber.testing.binaries import find_binaries
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.replica import QUICK, replica
from tests.support.roles import role

BINDIR = str(find_binaries(18))
SOURCE = """
CREATE SCHEMA old; CREATE SCHEMA "Other"; CREATE SCHEMA types; CREATE EXTENSION citext SCHEMA types;
CREATE TABLE old.counter (id serial);
CREATE TYPE types.mood AS ENUM ('sad', 'ok'); CREATE DOMAIN types.positive AS int CHECK (VALUE > 0);
CREATE FUNCTION types.twice(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2 * $1';
CREATE SEQUENCE old.free START 100 INCREMENT 7;
CREATE TABLE old.customer (id int GENERATED ALWAYS AS IDENTITY (START 5 INCREMENT 3) PRIMARY KEY, name text NOT NULL, hidden text,
    mood types.mood DEFAULT 'ok', email text COLLATE "C" UNIQUE, n int DEFAULT nextval('old.free'),
    CHECK (n > 0));
CREATE INDEX by_name ON old.customer (name) WHERE n > 10; CREATE INDEX lower_name ON old.customer (lower(name));
CREATE INDEX by_hidden ON old.customer (hidden); CREATE INDEX by_n ON old.customer USING hash (n);
CREATE TABLE old."Or""der" (id bigserial PRIMARY KEY,
    customer int NOT NULL REFERENCES old.customer (id) ON DELETE CASCADE, n types.positive,
    secret int, total numeric(10, 2) CHECK (total >= 0), twice int GENERATED ALWAYS AS (types.twice(5)) STORED);
CREATE TABLE old.secret (id int PRIMARY KEY); INSERT INTO old.secret VALUES (1);
ALTER TABLE old."Or""der" ADD FOREIGN KEY (secret) REFERENCES old.secret;
CREATE TABLE "Other".identified (a int NOT NULL, b text, c types.citext, d int DEFAULT nextval('old.counter_id_seq'));
CREATE UNIQUE INDEX identified_a ON "Other".identified (a);
ALTER TABLE "Other".identified REPLICA IDENTITY USING INDEX identified_a;
CREATE TABLE old.rooted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE old.rooted1 PARTITION OF old.rooted FOR VALUES FROM (0) TO (100);
CREATE VIEW old.seen AS SELECT name FROM old.customer;
COMMENT ON TABLE old.customer IS 'a comment'; COMMENT ON COLUMN old.customer.n IS 'another';
CREATE PUBLICATION pub FOR TABLE old.customer, old."Or""der", old.rooted, "Other".identified WITH (publish_via_partition_root = true);
INSERT INTO old.customer (name, email) SELECT 'n' || g, g FROM generate_series(1, 20) AS g;
INSERT INTO old."Or""der" (customer, n, secret, total) SELECT 5, g, 1, 1.50 FROM generate_series(1, 9) AS g;
INSERT INTO "Other".identified VALUES (1, 'x'); INSERT INTO old.rooted VALUES (1, 'x')
"""
NAMES: dict[str, Any] = {
    "map": {"old.*": "fresh.*", 'old."Or""der"': 'sales."Purchase"'},
    "columns": {"old.customer": "id, name, mood, email, n"},
    "rename": {"old.customer": "name:title", 'old."Or""der"': "customer:buyer, total:amount"},
}


async def test_everything_that_tables_have(publisher18_db: Database, target_db: Database) -> None:
    source = publisher18_db
    source.execute(SOURCE)
    # tables of others, under the publisher's names, are left alone
    target_db.execute("CREATE SCHEMA old; CREATE TABLE old.customer (x int)")
    names, steps = SubscriptionOptions(**NAMES), list[SchemaStep]()
    where: dict[str, Any] = {"connection": source.conninfo(), "publications": ["pub"], "target": target_db.dsn, "names": names}
    lines = await copy_schema(**where, options=SchemaOptions(bindir=BINDIR, sections=[Section.PRE_DATA]), progress=steps.append)
    assert sorted(lines) == [
        'constraint "Or"der_total_check" of table "sales.Purchase" is left out: it may use a column that columns or rename change',
        'foreign key "Or"der_secret_fkey" of table "old.Or"der" refers to "old.secret", whose rows are not replicated: it is left out',
        'index "by_hidden" of table "fresh.customer" is left out: it may use a column that columns or rename change',
        'index "by_n" of table "fresh.customer" is left out: it may use a column that columns or rename change',
        'index "by_name" of table "fresh.customer" is left out: it may use a column that columns or rename change',
        'index "lower_name" of table "fresh.customer" is left out: it may use a column that columns or rename change',
        'table "old.rooted" is partitioned on the publisher: "fresh.rooted" is a table without partitions',
        "tables have other names: views, functions, triggers and policies, whose texts name tables, are not created; "
        "privileges are not granted",
    ]
    assert {step.what for step in steps} >= {"schema fresh", "table fresh.customer", "type types.mood", "function types.twice(integer)"}
    assert not {step.what for step in steps} & {"view old.seen", "table old.secret", "schema old"}
    async with replica(source, target_db, **NAMES) as running:
        await running.caught_up()
        assert target_db.value("SELECT count(*) FROM fresh.customer") == 20
        # indexes and constraints after the rows, beside the running subscription
        await copy_schema(**where, options=SchemaOptions(bindir=BINDIR, sections=[Section.POST_DATA]))
        source.execute("UPDATE old.customer SET name = 'new' WHERE id = 5; UPDATE \"Other\".identified SET b = 'y'")
        source.execute('DELETE FROM old."Or""der" WHERE id = 2; INSERT INTO old.rooted VALUES (2, NULL)')
        await running.caught_up()
    assert target_db.fetch("SELECT id, title FROM fresh.customer ORDER BY 1") == source.fetch(
        "SELECT id, name FROM old.customer ORDER BY 1"
    )
    assert target_db.fetch("TABLE fresh.rooted ORDER BY 1") == source.fetch("TABLE old.rooted ORDER BY 1")
    assert target_db.fetch('SELECT id, buyer, n, amount FROM sales."Purchase" ORDER BY 1') == source.fetch(
        'SELECT id, customer, n, total FROM old."Or""der" ORDER BY 1'
    )
    assert target_db.fetch('TABLE "Other".identified') == [(1, "y", None, 1)]
    # the same as the publisher's, as far as names allow it: the key to a table that is not replicated
    found = await diff_schema(**where)
    assert [each.message for each in found if each.kind != "database"] == [
        'foreign key "Or"der_secret_fkey" of table "sales.Purchase" does not exist in the target:'
        ' FOREIGN KEY (secret) REFERENCES "fresh"."secret"(id)'
    ]
    # a second call finds everything
    steps.clear()
    await copy_schema(**where, options=SchemaOptions(bindir=BINDIR), progress=steps.append)
    assert not [step for step in steps if step.state is StepState.CREATED and not step.what.startswith(("statistics", "extension"))]
    identity = "SELECT relreplident::text FROM pg_class WHERE oid = '\"Other\".identified'::regclass"
    assert target_db.value(identity) == "i"
    sequences = "SELECT schemaname || '.' || sequencename, start_value, increment_by FROM pg_sequences ORDER BY 1"
    assert target_db.fetch(sequences) == [
        ("fresh.counter_id_seq", 1, 1),
        ("fresh.customer_id_seq", 5, 3),
        ("fresh.free", 100, 7),
        ('sales.Or"der_id_seq', 1, 1),
    ]
    assert target_db.value('SELECT max(twice) FROM sales."Purchase"') == 10


async def _copied(source: Database, target: Database, setup: str, **names: Any) -> list[str]:
    """What is left out. Nothing else differs."""
    source.execute(setup + "; CREATE PUBLICATION pub FOR ALL TABLES")
    options: dict[str, Any] = {"publications": ["pub"], "names": SubscriptionOptions(**names)}
    where = {"connection": source.conninfo(), "target": target.dsn, **options}
    lines = await copy_schema(**where, options=SchemaOptions(bindir=BINDIR))
    assert [each.message for each in await diff_schema(**where) if each.kind != "database"] == []
    return lines[1:]


KEYS = """
SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{}'::regclass AND contype IN ('p', 'u', 'f', 'c') ORDER BY conname
"""


async def test_two_schemas_become_one(publisher18_db: Database, target_db: Database) -> None:
    """Sequences, keys and indexes have one name in both, and one that the target has for something else."""
    table = """
        CREATE SCHEMA {0}; CREATE TABLE {0}.t (id serial PRIMARY KEY, v text UNIQUE, w int CHECK (w > 0),
            i int GENERATED ALWAYS AS IDENTITY);
        CREATE INDEX ON {0}.t (w); CREATE UNIQUE INDEX ON {0}.t (i); ALTER TABLE {0}.t REPLICA IDENTITY USING INDEX t_i_idx;
    """
    target_db.execute("CREATE SCHEMA x; CREATE VIEW x.t_pkey AS SELECT 1; CREATE SEQUENCE x.t_id_seq1")
    setup = table.format("a") + table.format("b")
    assert await _copied(publisher18_db, target_db, setup, map={"a.t": "x.t1", "b.t": "x.t2"}) == []
    for name in ("x.t1", "x.t2"):
        assert target_db.fetch(KEYS.format(name)) == [("PRIMARY KEY (id)",), ("UNIQUE (v)",), ("CHECK ((w > 0))",)]
        indexes = f"SELECT count(*) FILTER (WHERE indisreplident), count(*) FROM pg_index WHERE indrelid = '{name}'::regclass"
        assert target_db.fetch(indexes) == [(1, 4)]
        for column in ("id", "i"):
            target_db.execute(f"SELECT setval(pg_get_serial_sequence('{name}', '{column}'), {100 if name == 'x.t1' else 200})")
        target_db.execute(f"INSERT INTO {name} (v) VALUES ('x')")
    assert target_db.fetch("SELECT id, i FROM x.t1 UNION ALL SELECT id, i FROM x.t2") == [(101, 101), (201, 201)]


async def test_a_name_that_the_target_has_for_something_else(publisher18_db: Database, target_db: Database) -> None:
    target_db.execute("CREATE SCHEMA x; CREATE VIEW x.t AS SELECT 1")
    with pytest.raises(TargetError, match="already exists"):
        await _copied(publisher18_db, target_db, "CREATE TABLE t (id int PRIMARY KEY)", map={"public.*": "x.*"})


async def test_keywords_quotes_and_lists_of_columns(publisher18_db: Database, target_db: Database) -> None:
    setup = """
        CREATE SCHEMA "user"; CREATE TABLE "user"."table" (a int, b int, "time" int, PRIMARY KEY ("time", a),
            UNIQUE (b) INCLUDE ("time", a));
        CREATE TABLE child (id int PRIMARY KEY, "order" int, y int, note text, UNIQUE (id) INCLUDE (note, y),
            FOREIGN KEY ("order", y) REFERENCES "user"."table" ON DELETE SET NULL ("order"));
        CREATE INDEX ON child ("order", id);
        CREATE SCHEMA "it's"; CREATE TABLE "it's"."o'x.%s" (id serial PRIMARY KEY, "v'%s" text DEFAULT 'it''s' UNIQUE)
    """
    left = await _copied(
        publisher18_db,
        target_db,
        setup,
        map={'"user"."table"': '"default"."select"', '"it\'s"."o\'x.%s"': '"sa\'les"."pu""r%d.c"'},
        columns={"public.child": 'id, "order", y'},
        rename={"public.child": '"order":y, y:"order"', '"user"."table"': '"time":"timestamp"', '"it\'s"."o\'x.%s"': 'id:"my\'id"'},
    )
    assert left == []
    assert target_db.fetch(KEYS.format('"default"."select"')) == [
        ('UNIQUE (b) INCLUDE ("timestamp", a)',),
        ('PRIMARY KEY ("timestamp", a)',),
    ]
    assert target_db.fetch(KEYS.format("child")) == [
        ('UNIQUE (id) INCLUDE ("order")',),
        ('FOREIGN KEY (y, "order") REFERENCES "default"."select"("timestamp", a) ON DELETE SET NULL (y)',),
        ("PRIMARY KEY (id)",),
    ]
    target_db.execute('INSERT INTO "sa\'les"."pu""r%d.c" DEFAULT VALUES')
    assert target_db.fetch('TABLE "sa\'les"."pu""r%d.c"') == [(1, "it's")]


async def test_a_generated_column_of_a_keyword_and_a_table_that_inherits(publisher18_db: Database, target_db: Database) -> None:
    setup = """
        CREATE TABLE p (id int PRIMARY KEY, v int CHECK (v > 0)); CREATE TABLE c (w int CHECK (w > 0)) INHERITS (p);
        CREATE TABLE made (id int PRIMARY KEY, "user" int, g int GENERATED ALWAYS AS ("user" + 1) STORED)
    """
    with pytest.raises(ConfigurationError, match=r"column g of table public\.made is generated from columns that columns or rename change"):
        await _copied(publisher18_db, target_db, setup, rename={"public.made": "user:x"})
    publisher18_db.execute("DROP PUBLICATION pub")
    assert await _copied(publisher18_db, target_db, "SELECT", map={"public.*": "x.*"}) == [
        'table "public.c" inherits from another one on the publisher: "x.c" does not, and has no constraints of that one'
    ]
    assert target_db.fetch(KEYS.format("x.c")) == [("CHECK ((w > 0))",)]


async def test_what_cannot_be_created(publisher18_db: Database, target_db: Database) -> None:
    source = publisher18_db
    source.execute("""
        CREATE TABLE made (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a + 1) STORED);
        CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (9);
        CREATE PUBLICATION made FOR TABLE made; CREATE PUBLICATION parts FOR TABLE parts
    """)
    options = SchemaOptions(bindir=BINDIR)
    for publication, names, message in (
        (
            "made",
            {"rename": {"public.made": "a:x"}},
            "column b of table public.made is generated from columns that columns or rename change",
        ),
        ("parts", {"map": {"public.*": "s.*"}}, 'table "public.part" is a partition: it cannot be created under other names'),
        (
            "made",
            {"map": {"public.made": "s.a"}, "columns": {"public.made": "a, x"}},
            "columns.public.made: the table has no published column x",
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            await copy_schema(
                connection=source.conninfo(),
                publications=[publication],
                target=target_db.dsn,
                names=SubscriptionOptions(**names),  # type: ignore[arg-type]
                options=options,
            )
        assert str(caught.value).startswith(message)
        assert caught.value.hint
        assert target_db.fetch("SELECT nspname FROM pg_namespace WHERE nspname = 's'") == []
    # as a user gives it; a role that may not create what is needed
    arguments = ("--connection", source.conninfo(), "--publication", "made", "--bindir", BINDIR, "--map", "public.*=s.*")
    with role(target_db) as weak:
        refused = await asyncio.to_thread(subscriber, "schema", "copy", *arguments, "--target", weak.conninfo)
    assert refused.status == 1
    assert "permission denied for database" in refused.errors
    assert "GRANT CREATE ON DATABASE" in refused.errors
    done = await asyncio.to_thread(subscriber, "schema", "copy", *arguments, "--target", target_db.dsn)
    assert done.status == 0, done.errors
    assert target_db.value("SELECT to_regclass('s.made') IS NOT NULL")
    wrong = await asyncio.to_thread(subscriber, "schema", "diff", *arguments[:4], "-o", "binary=true", "--target", target_db.dsn)
    assert "-o binary is not available here (hint: give columns or rename)" in wrong.errors


async def test_excluded_tables(publisher18_db: Database, target_db: Database) -> None:
    source = publisher18_db
    source.execute("""
        CREATE TABLE kept (id int PRIMARY KEY); CREATE TABLE log (id serial PRIMARY KEY, kept int REFERENCES kept);
        CREATE TABLE child (id int PRIMARY KEY, log int REFERENCES log); CREATE VIEW logged AS SELECT id FROM log;
        CREATE PUBLICATION pub FOR ALL TABLES
    """)
    lines = await copy_schema(
        connection=source.conninfo(),
        target=target_db.dsn,
        names=SubscriptionOptions(exclude_table="log"),
        options=SchemaOptions(bindir=BINDIR),
    )
    assert [line for line in lines if "exclude_table" in line] == [
        "view public.logged is left out: it needs a table that exclude_table leaves out",
        "fk constraint public.child child_log_fkey is left out: it needs a table that exclude_table leaves out",
    ]
    assert target_db.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'S') ORDER BY 1"
    ) == [
        ("child",),
        ("kept",),
    ]


async def test_new_tables_with_other_names(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BINDIR}:{os.environ['PATH']}")
    monkeypatch.setattr("subscriber.subscription.run.tables.new_tables._LOOK_SECONDS", 0.2)
    source = publisher18_db
    source.execute("CREATE SCHEMA old; CREATE TABLE old.t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute("CREATE SCHEMA fresh; CREATE TABLE fresh.t (id int PRIMARY KEY)")
    options: dict[str, Any] = {"map": {"old.*": "fresh.*"}, "rename": {"old.later": "v:text"}, "exclude_table": "not_this"}
    async with replica(source, target_db, settings=replace(QUICK, new_tables="copy"), **options) as running:
        await running.caught_up()
        source.execute("""
            CREATE TYPE old.mood AS ENUM ('ok'); CREATE TABLE old.not_this (id int PRIMARY KEY);
            CREATE TABLE old.later (id serial PRIMARY KEY, v old.mood, t int REFERENCES old.t, n int REFERENCES old.not_this);
            CREATE INDEX ON old.later (v); INSERT INTO old.t VALUES (1); INSERT INTO old.later (v, t) VALUES ('ok', 1)
        """)
        await asyncio.to_thread(target_db.wait, "SELECT to_regclass('fresh.later') IS NOT NULL", True)
        await asyncio.to_thread(target_db.wait, "SELECT text::text, t FROM fresh.later", [("ok", 1)])
        source.execute("UPDATE old.later SET v = NULL")
        await running.caught_up()
        await asyncio.to_thread(target_db.wait, "SELECT text IS NULL FROM fresh.later", [(True,)])
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'fresh' AND tablename = 'later' ORDER BY 1"
    assert [definition for (definition,) in target_db.fetch(indexes)] == [
        "CREATE INDEX later_v_idx ON fresh.later USING btree (text)",
        "CREATE UNIQUE INDEX later_pkey ON fresh.later USING btree (id)",
    ]
    assert target_db.value("SELECT to_regclass('fresh.not_this') IS NULL AND to_regclass('old.not_this') IS NULL")
