"""``schema copy`` between servers of PostgreSQL."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber import ConfigurationError, SchemaOptions, TargetError, copy_schema
from subscriber.interfaces.schema import SchemaStep, Section, StepState
from subscriber.testing.binaries import find_binaries
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.program import environment, subscriber
from tests.support.roles import role

BINDIR = str(find_binaries(18))
SCHEMA = """
CREATE SCHEMA app; CREATE SCHEMA "S s";
CREATE TYPE app.mood AS ENUM ('sad', 'ok'); CREATE DOMAIN app.positive AS int CHECK (VALUE > 0);
CREATE TABLE app.customer (id int GENERATED ALWAYS AS IDENTITY (START 5) PRIMARY KEY, name text NOT NULL, mood app.mood DEFAULT 'ok',
    email text UNIQUE, doubled int GENERATED ALWAYS AS (2) STORED);
CREATE TABLE "S s"."Or""der" (id bigserial PRIMARY KEY, customer int NOT NULL, n app.positive, total numeric(10, 2) CHECK (total >= 0));
ALTER TABLE "S s"."Or""der" ADD FOREIGN KEY (customer) REFERENCES app.customer;
CREATE INDEX by_customer ON "S s"."Or""der" (customer) WHERE total > 10;
CREATE TABLE app.part (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE app.part1 PARTITION OF app.part FOR VALUES FROM ('2024-01-01') TO ('2025-01-01'); CREATE INDEX part_at ON app.part (at);
CREATE TABLE app.identified (a int NOT NULL, b text); CREATE UNIQUE INDEX identified_a ON app.identified (a);
ALTER TABLE app.identified REPLICA IDENTITY USING INDEX identified_a; CREATE STATISTICS app.st ON a, b FROM app.identified;
CREATE VIEW app.grouped AS SELECT id, name, count(*) FROM app.customer GROUP BY id;
CREATE MATERIALIZED VIEW app.counted AS SELECT count(*) FROM app.customer; CREATE UNIQUE INDEX counted_i ON app.counted (count);
CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS $$/*
--
-- TOC entry 1 (class 1 OID 1)
-- Name: x; Type: TABLE; Schema: app; Owner: x
--
SET default_tablespace = '';
*/
BEGIN
ALTER TABLE app.customer OWNER TO nobody;
RETURN NEW; END $$;
CREATE TRIGGER t BEFORE INSERT ON app.customer FOR EACH ROW EXECUTE FUNCTION app.f(); ALTER TABLE app.customer DISABLE TRIGGER t;
CREATE RULE r AS ON DELETE TO app.identified DO ALSO NOTHING;
CREATE POLICY pol ON app.part USING (id > 0); ALTER TABLE app.part ENABLE ROW LEVEL SECURITY;
COMMENT ON TABLE app.customer IS 'a comment'; COMMENT ON INDEX app.part_at IS 'another'
"""
NOT_COPIED = """
CREATE FUNCTION app.e() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no DDL here'; END $$;
CREATE EVENT TRIGGER et ON ddl_command_end EXECUTE FUNCTION app.e(); COMMENT ON EVENT TRIGGER et IS 'x';
ALTER EVENT TRIGGER et DISABLE; CREATE PUBLICATION p FOR ALL TABLES; COMMENT ON PUBLICATION p IS 'y';
"""
_NOISE = re.compile(r"^(?:--.*|\\(?:un)?restrict .*|)\n", re.MULTILINE)


def dumped(database: Database) -> str:
    """The schema as pg_dump shows it."""
    options = ["--schema-only", "--no-owner", "--no-privileges", "--no-publications", "--exclude-schema=subscriber"]
    done = subprocess.run(
        [f"{BINDIR}/pg_dump", *options, "-d", database.dsn], env=environment(), capture_output=True, text=True, check=True
    )
    return re.sub(
        r"CREATE EVENT TRIGGER[^;]*;|ALTER EVENT TRIGGER[^;]*;|COMMENT ON EVENT TRIGGER[^;]*;", "", _NOISE.sub("", done.stdout)
    ).strip()


def ignored(step: SchemaStep) -> None:
    pass


async def copied(
    both: tuple[Database, Database], *sections: Section, progress: Callable[[SchemaStep], None] = ignored, bindir: str = BINDIR
) -> None:
    options = SchemaOptions(bindir=bindir, sections=sections or tuple(Section))
    await copy_schema(connection=both[0].conninfo(), target=both[1].dsn, options=options, progress=progress)


@pytest.mark.matrix
def test_the_target_has_the_same_schema(publisher_db: Database, any_target_db: Database) -> None:
    target = any_target_db
    publisher_db.execute(SCHEMA)
    publisher_db.execute("INSERT INTO app.customer (name) VALUES ('a'); REFRESH MATERIALIZED VIEW app.counted")
    publisher_db.execute(NOT_COPIED)
    command = ("schema", "copy", "--connection", publisher_db.dsn, "--target", target.dsn, "--bindir", BINDIR)
    assert (done := subscriber(*command, "--section=pre-data")).status == 0, done.errors
    # by these, changes are applied
    keys = (
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid >= 16384 AND NOT indrelid::regclass::text ~ 'pg_toast' ORDER BY 1"
    )
    assert [name for (name,) in target.fetch(keys)] == [
        '"S s"."Or""der_pkey"',
        "app.customer_pkey",
        "app.identified_a",
        "app.part1_pkey",
        "app.part_pkey",
    ]
    assert target.value("SELECT bool_and(indisvalid) FROM pg_index")
    target.execute("INSERT INTO app.customer (name) VALUES ('a')")
    done = subscriber(*command, loud=True)
    assert (done.status, done.output) == (0, "")
    assert re.fullmatch(
        r"subscriber: \d+ objects created, \d+ existed \(`subscriber schema diff` compares them\), in \d+\.\d s\n", done.errors
    ), done.errors
    if publisher_db.version == target.version:
        assert dumped(target) == dumped(publisher_db)
    # what is not replicated
    assert target.value("SELECT count FROM app.counted") == 1
    # servers before 15 report statistics late
    target.wait("SELECT last_analyze IS NOT NULL FROM pg_stat_user_tables WHERE relname = 'customer'", True)
    assert target.fetch("SELECT FROM pg_publication") == target.fetch("SELECT FROM pg_event_trigger") == []


EVERY_KIND = """
CREATE SCHEMA k;
CREATE TEXT SEARCH PARSER k.parser (START = prsd_start, GETTOKEN = prsd_nexttoken, END = prsd_end, LEXTYPES = prsd_lextype);
CREATE TEXT SEARCH TEMPLATE k.template (INIT = dsimple_init, LEXIZE = dsimple_lexize);
CREATE TEXT SEARCH DICTIONARY k.dictionary (TEMPLATE = k.template);
CREATE TEXT SEARCH CONFIGURATION k.configuration (PARSER = k.parser);
ALTER TEXT SEARCH CONFIGURATION k.configuration ADD MAPPING FOR asciiword WITH k.dictionary;
CREATE TYPE k.base; CREATE FUNCTION k.base_in(cstring) RETURNS k.base LANGUAGE internal IMMUTABLE STRICT AS 'int4in';
CREATE FUNCTION k.base_out(k.base) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'int4out';
CREATE TYPE k.base (INPUT = k.base_in, OUTPUT = k.base_out, LIKE = int4);
CREATE TYPE k.composite AS (a int, b text); CREATE TYPE k.enum AS ENUM ('a'); CREATE TYPE k.shell; CREATE DOMAIN k.domain AS int NOT NULL;
CREATE TYPE k.range AS RANGE (SUBTYPE = float8, SUBTYPE_DIFF = float8mi);
CREATE FUNCTION k.same(k.composite, k.composite) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT ($1).a = ($2).a';
CREATE FUNCTION k.order(k.composite, k.composite) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT ($1).a - ($2).a';
CREATE OPERATOR k.=== (FUNCTION = k.same, LEFTARG = k.composite, RIGHTARG = k.composite);
CREATE OPERATOR FAMILY k.family USING btree;
CREATE OPERATOR CLASS k.class FOR TYPE k.composite USING btree FAMILY k.family AS OPERATOR 3 k.===,
    FUNCTION 1 k.order(k.composite, k.composite);
CREATE AGGREGATE k.total (int) (SFUNC = int4pl, STYPE = int, INITCOND = '0');
CREATE PROCEDURE k.procedure() LANGUAGE sql AS 'SELECT';
CREATE FUNCTION k.cast(k.composite) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT ($1).a';
CREATE CAST (k.composite AS int) WITH FUNCTION k.cast(k.composite);
CREATE COLLATION k.collation (LOCALE = 'C'); CREATE CONVERSION k.conversion FOR 'LATIN1' TO 'UTF8' FROM iso8859_1_to_utf8;
CREATE ACCESS METHOD every_heap TYPE TABLE HANDLER heap_tableam_handler;
CREATE TRANSFORM FOR int LANGUAGE sql (FROM SQL WITH FUNCTION prsd_lextype(internal), TO SQL WITH FUNCTION int4recv(internal));
CREATE FOREIGN DATA WRAPPER every_wrapper; CREATE SERVER every_server FOREIGN DATA WRAPPER every_wrapper;
CREATE USER MAPPING FOR PUBLIC SERVER every_server; CREATE FOREIGN TABLE k.foreign_table (a int) SERVER every_server;
CREATE TABLE k.plain (a int);
CREATE TABLE k.parent (a int PRIMARY KEY, b text DEFAULT 'x', c tsvector) PARTITION BY RANGE (a);
CREATE TABLE k.child PARTITION OF k.parent FOR VALUES FROM (0) TO (10); CREATE TABLE k.inherits () INHERITS (k.plain);
CREATE STATISTICS k.statistics ON a, b FROM k.parent; CREATE SEQUENCE k.sequence; CREATE UNLOGGED TABLE k.unlogged (a serial);
CREATE VIEW k.view AS SELECT a FROM k.parent; CREATE RULE rule AS ON INSERT TO k.view DO INSTEAD NOTHING;
CREATE MATERIALIZED VIEW k.materialized AS SELECT a FROM k.parent; CREATE INDEX ON k.materialized (a);
CREATE FUNCTION k.trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER trigger AFTER INSERT ON k.parent FOR EACH ROW EXECUTE FUNCTION k.trigger();
CREATE CONSTRAINT TRIGGER constraint_trigger AFTER INSERT ON k.child DEFERRABLE FOR EACH ROW EXECUTE FUNCTION k.trigger();
CREATE POLICY policy ON k.parent USING (true); ALTER TABLE k.parent ADD CHECK (a >= 0), ADD FOREIGN KEY (a) REFERENCES k.parent;
ALTER TABLE k.child ADD EXCLUDE USING btree (b WITH =);
ALTER DEFAULT PRIVILEGES IN SCHEMA k GRANT SELECT ON TABLES TO PUBLIC; GRANT SELECT ON k.parent TO PUBLIC;
COMMENT ON TEXT SEARCH CONFIGURATION k.configuration IS 'a comment'
"""


async def test_every_kind_of_object_is_left_as_it_is_when_it_exists(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(EVERY_KIND)
    both, states = (publisher18_db, target_db), list[tuple[StepState, str]]()
    options = SchemaOptions(bindir=BINDIR, owners=True)
    await copy_schema(connection=both[0].conninfo(), target=both[1].dsn, options=options, progress=ignored)
    before = dumped(target_db)
    assert before == dumped(publisher18_db)
    await copy_schema(
        connection=both[0].conninfo(), target=both[1].dsn, options=options, progress=lambda step: states.append((step.state, step.what))
    )
    assert dumped(target_db) == before
    assert sum(state is StepState.EXISTS for state, _ in states) > 50


async def test_an_interrupted_copy_continues(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(SCHEMA)
    both = (publisher18_db, target_db)

    for kind in ("type", "table", "table attach", "constraint", "index", "fk", "statistics of"):

        def interrupt(step: SchemaStep, kind: str = kind) -> None:
            if step.state is not StepState.BEGUN and step.what.startswith(kind):
                raise InterruptedError

        with pytest.raises(InterruptedError):
            await copied(both, progress=interrupt)
    await copied(both)
    assert dumped(target_db) == dumped(publisher18_db)


async def test_an_object_that_cannot_be_created_is_named_without_values(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (a int UNIQUE, b int, c int REFERENCES t (a)); CREATE INDEX b ON t (b)")
    both = (publisher18_db, target_db)
    await copied(both, Section.PRE_DATA)
    target_db.execute("INSERT INTO t VALUES (4711, 1), (4711, 2)")
    with pytest.raises(TargetError, match=r"while creating constraint public[.]t t_a_key in the target") as failed:
        await copied(both)
    assert "4711" not in failed.value.one_line()
    target_db.execute("UPDATE t SET a = b, c = 4711 WHERE b = 2")
    target_db.execute("UPDATE t SET a = b")
    with pytest.raises(TargetError, match=r"fk constraint public[.]t t_c_fkey") as failed:
        await copied(both)
    assert "subscriber status" in (failed.value.hint or "")
    assert "4711" not in failed.value.one_line()
    target_db.execute("UPDATE t SET c = NULL")
    await copied(both)
    assert dumped(target_db) == dumped(publisher18_db)


async def test_owners_and_privileges(publisher18_db: Database, target_db: Database) -> None:
    both = (publisher18_db, target_db)
    with role(publisher18_db) as kept, role(publisher18_db) as renamed, role(publisher18_db) as missing, role(target_db) as other:
        publisher18_db.execute(f"""
            CREATE TABLE a (); CREATE TABLE b (); CREATE TABLE c ();
            ALTER TABLE a OWNER TO {kept.name}; ALTER TABLE b OWNER TO {renamed.name}; ALTER TABLE c OWNER TO {missing.name};
            GRANT SELECT ON a TO {renamed.name} WITH GRANT OPTION; GRANT SELECT ON a TO {missing.name}; GRANT SELECT ON c TO PUBLIC;
            ALTER DEFAULT PRIVILEGES FOR ROLE {kept.name} GRANT SELECT ON TABLES TO {renamed.name};
            CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w; CREATE USER MAPPING FOR PUBLIC SERVER s;
            CREATE USER MAPPING FOR {renamed.name} SERVER s OPTIONS (password 'x'); CREATE USER MAPPING FOR {missing.name} SERVER s
        """)
        target_db.execute(f"CREATE ROLE {kept.name}")
        wanted = SchemaOptions(bindir=BINDIR, map_roles={renamed.name: other.name})
        assert await copy_schema(connection=both[0].dsn, target=both[1].dsn, options=wanted) == [
            f'role "{missing.name}" does not exist in the target: its ownership and privileges were left out'
        ]
        found = dict(target_db.fetch("SELECT relname, relowner::regrole::text FROM pg_class WHERE relkind = 'r' AND oid >= 16384"))
        assert found == {"a": kept.name, "b": other.name, "c": target_db.value("SELECT current_user::text")}
        assert target_db.value(f"SELECT has_table_privilege('{other.name}', 'a', 'SELECT WITH GRANT OPTION')")
        assert target_db.value(f"SELECT '{other.name}=r/{kept.name}' = ANY (defaclacl::text[]) FROM pg_default_acl")
        assert target_db.value(f"SELECT has_table_privilege('{kept.name}', 'c', 'SELECT')")
        # the bug was that the copy failed
        assert target_db.fetch("SELECT usename::text FROM pg_user_mappings ORDER BY 1") == sorted([(other.name,), ("public",)])
        target_db.execute(f"DROP OWNED BY {kept.name}; DROP ROLE {kept.name}")


async def test_objects_on_request(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(SCHEMA)
    publisher18_db.execute(NOT_COPIED)
    publisher18_db.execute("""
        CREATE TABLE log (id int PRIMARY KEY); CREATE TABLE refers (id int PRIMARY KEY, log int CONSTRAINT to_log REFERENCES log);
        CREATE PUBLICATION narrow FOR TABLE refers
    """)
    wanted = SchemaOptions(bindir=BINDIR, exclude_schemas=["S s"], publications=True, event_triggers=True, left_out_keys="skip")
    lines = await copy_schema(connection=publisher18_db.dsn, target=target_db.dsn, publications=["narrow"], options=wanted)
    assert 'foreign key "to_log" of table "public.refers" refers to "public.log", whose rows are not moved: it is left out' in lines
    assert target_db.fetch("SELECT FROM pg_constraint WHERE conname = 'to_log'") == []
    assert target_db.fetch("SELECT pubname::text FROM pg_publication ORDER BY 1") == [("narrow",), ("p",)]
    assert target_db.fetch("SELECT evtname::text FROM pg_event_trigger") == [("et",)]
    assert target_db.value("SELECT to_regnamespace('\"S s\"') IS NULL")


async def test_programs_that_do_not_fit(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    both = (publisher18_db, target_db)
    # servers come without client programs of their version: what counts is the version that a program prints
    old = tmp_path / "old"
    old.mkdir()
    for name in ("pg_dump", "pg_restore"):
        (old / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 16.14'\n")
        (old / name).chmod(0o755)
    with pytest.raises(ConfigurationError, match="is older than the publisher, which is PostgreSQL 18") as failed:
        await copied(both, bindir=str(old))
    assert "version 18 or later" in (failed.value.hint or "")
    with pytest.raises(ConfigurationError, match="were not found in"):
        await copied(both, bindir=str(tmp_path))
    for name in ("pg_dump", "pg_restore"):
        (tmp_path / name).touch(mode=0o600)
    with pytest.raises(ConfigurationError, match="were not found in"):
        await copied(both, bindir=str(tmp_path))
    done = subscriber("schema", "copy", "--connection", both[0].dsn, "--target", both[1].dsn, "--bindir", BINDIR, "--schema", "nosuch")
    assert done.errors == 'subscriber: pg_dump failed: no matching schemas were found for pattern ""nosuch""\n'
    publisher18_db.execute("CREATE TABLE secret ()")
    with role(publisher18_db) as reader:
        done = subscriber("schema", "copy", "--connection", reader.conninfo, "--target", target_db.dsn, "--bindir", BINDIR)
        assert done.status == 1
        assert "permission denied for table secret" in done.errors


async def test_a_publisher_with_another_encoding(publisher18: ServerAddress, target_db: Database) -> None:
    with fresh_database(publisher18, "pub", "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0") as publisher:
        publisher.execute("CREATE TABLE \"é\" (t text DEFAULT 'ü')")
        await copied((publisher, target_db))
        assert target_db.fetch(
            "SELECT attrelid::regclass::text, pg_get_expr(adbin, adrelid) FROM pg_attrdef JOIN pg_attribute"
            " ON attrelid = adrelid AND attnum = adnum"
        ) == [('"é"', "'ü'::text")]


async def test_a_publisher_whose_name_only_the_conninfo_resolves(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t ()")
    connection = publisher18_db.conninfo(host="publisher.invalid", hostaddr="127.0.0.1")
    await copy_schema(connection=connection, target=target_db.dsn, options=SchemaOptions(bindir=BINDIR))
    assert target_db.value("SELECT to_regclass('t') IS NOT NULL")


def test_a_materialized_view_that_cannot_be_filled(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("""
        CREATE TABLE t (); CREATE FUNCTION n() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t); END';
        ALTER FUNCTION n() SET search_path = public; CREATE MATERIALIZED VIEW m AS SELECT public.n(); ALTER FUNCTION n() RESET search_path
    """)
    done = subscriber("schema", "copy", "--connection", publisher18_db.dsn, "--target", target_db.dsn, "--bindir", BINDIR)
    assert done.status == 1
    assert 'while executing REFRESH MATERIALIZED VIEW "public"."m" in the target' in done.errors
