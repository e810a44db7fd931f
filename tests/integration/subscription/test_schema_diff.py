"""``schema diff`` between servers of PostgreSQL, and its part of ``check``."""

from __future__ import annotations

import json

import psycopg
import pytest

from subscriber import SchemaDifference, SchemaOptions, check, copy_schema, diff_schema
from subscriber.testing.binaries import find_binaries
from tests.support.database import Database
from tests.support.program import subscriber

PUBLISHER = """
CREATE SCHEMA app; CREATE TYPE app.mood AS ENUM ('sad', 'so so', 'ok');
CREATE TABLE app.a (id int PRIMARY KEY, "Na""me" varchar(20) NOT NULL, mood app.mood, note text COLLATE "C", n int DEFAULT 7,
    i int GENERATED ALWAYS AS IDENTITY, g int GENERATED ALWAYS AS (1) STORED, s serial, plain int CHECK (plain > 0));
CREATE UNIQUE INDEX a_name ON app.a ("Na""me"); CREATE INDEX a_expression ON app.a (lower("Na""me")) WHERE n > 3;
CREATE INDEX renamed ON app.a (n);
CREATE TABLE app.b (id int UNIQUE, a int REFERENCES app.a ON DELETE CASCADE); COMMENT ON TABLE app.b IS 'a comment';
CREATE TABLE app.missing (id int PRIMARY KEY); CREATE SEQUENCE app.free CYCLE MAXVALUE 100;
CREATE TABLE same (id bigserial PRIMARY KEY, t text); CREATE PUBLICATION pub FOR ALL TABLES
"""
TARGET = """
CREATE SCHEMA app; CREATE TYPE app.mood AS ENUM ('sad');
CREATE TABLE app.a (id int, "Na""me" text, mood app.mood, note text, n int, i int, g int, s int NOT NULL DEFAULT 1, extra int UNIQUE);
CREATE INDEX a_expression ON app.a (lower("Na""me")); CREATE INDEX other_name ON app.a (n); CREATE INDEX extra_i ON app.a (extra, n);
CREATE TABLE app.b (id int UNIQUE, a int); CREATE TABLE only_here ();
CREATE TABLE same (id bigserial PRIMARY KEY, t text); ALTER SEQUENCE same_id_seq RENAME TO other;
ALTER SEQUENCE other CYCLE
"""
OPTIONS = "AS bigint INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 START 1 CACHE 1"


def of(publisher: Database, target: Database, *more: str) -> tuple[str, ...]:
    return ("schema", "diff", "--connection", publisher.dsn, "--target", target.dsn, *more)


@pytest.mark.matrix
async def test_differences_in_words_and_their_removal(publisher_db: Database, any_target_db: Database) -> None:
    target = any_target_db
    publisher_db.execute(PUBLISHER)
    target.execute(TARGET)
    done = subscriber(*of(publisher_db, target, "--publication", "pub", "--schema", "app"))
    assert done.status == 1
    assert done.output.splitlines() == [
        'table "app.missing" does not exist in the target',
        'sequence "app.a_s_seq" does not exist in the target',
        'sequence "app.free" does not exist in the target',
        f'sequence "public.same_id_seq" is public.other {OPTIONS} CYCLE in the target, and {OPTIONS} NO CYCLE on the publisher',
        'column "plain" (integer) of table "app.a" does not exist in the target',
        'column "extra" of table "app.a" exists only in the target',
        'column "Na"me" of table "app.a" has type text in the target, and character varying(20) on the publisher',
        "column \"mood\" of table \"app.a\": type app.mood lacks the label 'so so', 'ok' in the target",
        'column "note" of table "app.a" has type text in the target, and text COLLATE pg_catalog."C" on the publisher',
        'column "id" of table "app.a" is NULL in the target, and NOT NULL on the publisher',
        'column "Na"me" of table "app.a" is NULL in the target, and NOT NULL on the publisher',
        'column "i" of table "app.a" is NULL in the target, and NOT NULL on the publisher',
        'column "n" of table "app.a" has no default in the target, and DEFAULT 7 on the publisher',
        'column "i" of table "app.a" has no default in the target, and GENERATED ALWAYS AS IDENTITY on the publisher',
        'column "g" of table "app.a" has no default in the target, and GENERATED ALWAYS AS (1) STORED on the publisher',
        'column "s" of table "app.a" has DEFAULT 1 in the target, and DEFAULT nextval(\'app.a_s_seq\'::regclass) on the publisher',
        'column "id" of table "public.same" has DEFAULT nextval(\'public.other\'::regclass) in the target, and DEFAULT'
        " nextval('public.same_id_seq'::regclass) on the publisher",
        'primary key "a_pkey" of table "app.a" does not exist in the target: PRIMARY KEY (id)',
        'unique constraint "a_extra_key" of table "app.a" exists only in the target: UNIQUE (extra)',
        'index "a_expression" of table "app.a" is CREATE INDEX ON app.a USING btree (lower("Na""me")) in the target, and CREATE INDEX ON'
        ' app.a USING btree (lower(("Na""me")::text)) WHERE (n > 3) on the publisher',
        'index "a_name" of table "app.a" does not exist in the target: CREATE UNIQUE INDEX ON app.a USING btree ("Na""me")',
        'index "extra_i" of table "app.a" exists only in the target: CREATE INDEX ON app.a USING btree (extra, n)',
        'check constraint "a_plain_check" of table "app.a" does not exist in the target: CHECK ((plain > 0))',
        'foreign key "b_a_fkey" of table "app.b" does not exist in the target: FOREIGN KEY (a) REFERENCES app.a(id) ON DELETE CASCADE',
        'the comment on table "app.b" differs',
        'column "s" of table "app.a" does not own sequence "app.a_s_seq" in the target',
    ]
    shown = json.loads(subscriber(*of(publisher_db, target, "--all", "--json")).output)["differences"]
    assert [each["message"] for each in shown] == done.output.splitlines()
    assert shown[0] == {
        "kind": "table",
        "schema": "app",
        "name": "missing",
        "message": 'table "app.missing" does not exist in the target',
        "extra": False,
        "ddl": [],
    }
    target.execute("CREATE TABLE app.missing (id int PRIMARY KEY)")
    ddl = subscriber(*of(publisher_db, target, "--all", "--ddl"))
    assert ddl.status == 1
    target.execute(ddl.output)
    # what would delete data is left to the user
    left = [each.message for each in await diff_schema(connection=publisher_db.dsn, target=target.dsn, everything=True)]
    assert left == [
        'column "extra" of table "app.a" exists only in the target',
        'column "g" of table "app.a" has no default in the target, and GENERATED ALWAYS AS (1) STORED on the publisher',
    ]
    target.execute("ALTER TABLE app.a DROP extra, DROP g; ALTER TABLE app.a ADD g int GENERATED ALWAYS AS (1) STORED")
    done = subscriber(*of(publisher_db, target, "--all"), loud=True)
    assert (done.status, done.output, done.errors) == (0, "", "subscriber: no differences\n")


async def test_a_copied_list_of_values_is_equal(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, s varchar(10) CHECK (s IN ('a', 'b')), t text CHECK (t IN ('a', 'b')));
        CREATE INDEX i ON t (id) WHERE s IN ('a', 'b'); CREATE INDEX j ON t (id) WHERE s NOT IN ('it''s, ok', 'b')
    """)
    options = SchemaOptions(bindir=str(find_binaries(18)))
    await copy_schema(connection=publisher18_db.dsn, target=target_db.dsn, options=options)
    of_both = {"connection": publisher18_db.dsn, "target": target_db.dsn, "everything": True}
    assert await diff_schema(**of_both) == []  # type: ignore[arg-type]
    target_db.execute("DROP INDEX i; CREATE INDEX i ON t (id) WHERE s IN ('a', 'c')")
    assert len(await diff_schema(**of_both)) == 1  # type: ignore[arg-type]


async def test_check_tells_of_differences(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b int); CREATE INDEX one ON t (a)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    arguments = {"connection": publisher18_db.dsn, "publications": ["pub"], "target": target_db.dsn}
    assert await check("sub", **arguments) == []  # type: ignore[arg-type]
    target_db.execute("CREATE INDEX extra ON t (a, b); ALTER TABLE t ADD only_here int")
    assert await check("sub", **arguments) == []  # type: ignore[arg-type]
    target_db.execute("DROP INDEX one; CREATE INDEX one ON t (b); ALTER TABLE t ALTER b SET DEFAULT 1")
    (found,) = await check("sub", **arguments)  # type: ignore[arg-type]
    assert (found.severity, found.refuses) == ("warning", False)
    assert found.message.startswith('the schema of the target differs from the publisher\'s: column "b" of table')
    assert "subscriber schema diff" in found.hint


async def test_an_index_that_is_not_valid(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1), (1)")
    publisher18_db.execute("DELETE FROM t; CREATE UNIQUE INDEX i ON t (a)")
    with target_db.connect() as session, pytest.raises(psycopg.errors.UniqueViolation):
        session.execute("CREATE UNIQUE INDEX CONCURRENTLY i ON t (a)")
    (found,) = await diff_schema(connection=publisher18_db.dsn, target=target_db.dsn, everything=True)
    assert isinstance(found, SchemaDifference)
    assert 'index "i" of table "public.t" is not valid in the target' in found.message
    assert found.ddl == ('DROP INDEX "public"."i";', 'CREATE UNIQUE INDEX "i" ON public.t USING btree (a);')
