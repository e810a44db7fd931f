"""Migrations of a whole database: what is not a row of a published table is right afterwards, too."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator

import psycopg

from subscriber.testing.binaries import find_binaries
from tests.integration.subscription.test_cutover import again
from tests.integration.subscription.test_schema_copy import EVERY_KIND, dumped
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import Program, running, subscriber
from tests.support.roles import role

BINDIR = str(find_binaries(18))
SEQUENCES = """
CREATE SEQUENCE hibernate_sequence; CREATE SEQUENCE invoice INCREMENT 10 CACHE 20;
CREATE SCHEMA "App s"; CREATE SEQUENCE "App s"."Down" INCREMENT -3 MAXVALUE 50 MINVALUE -100000; CREATE SEQUENCE unused START 7;
CREATE SEQUENCE odd START 1 INCREMENT 2; CREATE SEQUENCE even START 2 INCREMENT 2;
CREATE TABLE taken (id int PRIMARY KEY, of text); CREATE TABLE other (id serial PRIMARY KEY)
"""
TAKEN = ("hibernate_sequence", "invoice", '"App s"."Down"', "odd", "even")


class Application:
    """Takes numbers, each in a session of its own, in the database where writers are."""

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._end = threading.Event()
        self._numbers: list[tuple[str, int]] = []
        self._threads = [threading.Thread(target=self._take, args=(name,)) for name in TAKEN for _ in range(2)]

    def _take(self, name: str) -> None:
        # to connect costs more than all numbers
        while not self._end.wait(0.1):
            for database in self._databases:
                with contextlib.suppress(psycopg.Error), database.connect() as session:
                    # a session that may not write does not take a number either
                    while not self._end.wait(0.05):
                        self._numbers.append((name, session.execute("SELECT nextval(%s)", (name,)).fetchall()[0][0]))

    def goes_on(self) -> None:
        """Wait until it has taken more numbers of each sequence."""
        before = Counter(name for name, _ in list(self._numbers))
        for _ in range(int(WAIT_SECONDS / 0.02)):
            now = Counter(name for name, _ in list(self._numbers))
            if all(now[name] > before[name] + 10 for name in TAKEN):
                return
            self._end.wait(0.02)
        raise AssertionError("it takes no more numbers")

    def __enter__(self) -> Application:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    @property
    def repeated(self) -> list[tuple[str, int]]:
        return [number for number, times in Counter(self._numbers).items() if times > 1]


@contextlib.contextmanager
def migrated(publisher: Database, target: Database, *more: str) -> Iterator[tuple[str, Program]]:
    """A migration that is ready for the cutover."""
    name = f"whole_{publisher.name}"
    command = ("migrate", name, "--from", publisher.conninfo(), "--to", target.dsn, "--bindir", BINDIR, *more)
    with running(*command, loud=True) as program:
        program.says("ready for the cutover")
        yield name, program


def test_no_number_of_any_sequence_is_handed_out_twice(publisher_db: Database, target_db: Database) -> None:
    # the bug was that sequences that are no column's default were not set: 1,751 numbers came twice
    publisher_db.execute(SEQUENCES)
    with Application([publisher_db, target_db]) as application, migrated(publisher_db, target_db) as (name, _):
        verb = ("cutover", name, "--target", target_db.dsn)
        assert "set all sequences of the database" in subscriber(*verb, "--dry-run").output
        application.goes_on()
        done = subscriber(*verb, loud=True)
        assert "7 sequences are set" in done.errors, done.errors
        application.goes_on()
        again(publisher_db, target_db)
        # a sequence that the old database does not have does not keep writers from returning
        target_db.execute("CREATE SEQUENCE newer; CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)")
        with running("run", "--target", publisher_db.dsn):
            # the bug was that its rows were lost without a word
            done = subscriber(*verb, "--rollback", loud=True)
            assert "does not have these tables of the new database, and their rows would be lost: public.late" in done.errors
            assert "closing the new database" not in done.errors
            done = subscriber(*verb, "--rollback", "--exclude-table", "late", loud=True)
        assert done.status == 0, done.errors
        assert "sequence public.newer is not set: the old database does not have it" in done.errors
        application.goes_on()
    assert application.repeated == []
    again(publisher_db, target_db)


def test_sequences_of_a_narrower_publication_are_named(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(f"{SEQUENCES}; CREATE PUBLICATION taken FOR TABLE taken; CREATE UNLOGGED TABLE quick (id serial)")
    name = f"whole_{publisher18_db.name}"
    command = ("migrate", name, "--from", publisher18_db.conninfo(), "--to", target_db.dsn, "--bindir", BINDIR, "--publication", "taken")
    done = subscriber(*command)
    assert done.status == 1
    unnamed = "App s.Down, public.even, public.hibernate_sequence, public.invoice, public.odd, public.unused"
    assert f"no column of a published table uses these sequences: {unnamed} (hint: name those" in done.errors
    assert subscriber(*command, "--sequences", "foo(").errors.startswith('subscriber: invalid pattern of a name: "foo("')
    assert subscriber(*command, "--sequences", "nosuch").errors.startswith("subscriber: the publisher has no sequence nosuch")
    done = subscriber(*command, "--sequences", "all", "--sequences", "unused")
    assert done.errors.startswith("subscriber: --sequences all unused: these exclude each other")
    with migrated(publisher18_db, target_db, "--publication", "taken", "--sequences", "*e") as (_, program):
        program.says("--target URL --sequences '*e'")
        verb = ("cutover", name, "--target", target_db.dsn)
        lines = subscriber(*verb, "--dry-run").output.splitlines()
        assert len([line for line in lines if line.startswith("error: sequence ")]) == 6, lines
        lines = subscriber(*verb, "--dry-run", "--sequences", "*e", "--sequences", '"App s".*').output.splitlines()
        assert '8. set the sequences of the published tables, and *e, and "App s".*' in lines, lines
        left = "public.even, public.odd, public.other_id_seq, public.quick_id_seq, public.unused"
        assert f"5 sequences are not set, because published columns do not use them: {left}" in lines, lines
        publisher18_db.execute("SELECT nextval('invoice'), nextval('odd'); INSERT INTO quick DEFAULT VALUES")
        # a table whose rows are moved has its sequence, too
        done = subscriber(*verb, "--sequences", "invoice", "--unlogged", loud=True)
        assert done.status == 0, done.errors
    again(publisher18_db, target_db)
    assert target_db.fetch("SELECT nextval('invoice'), nextval('odd'), nextval('quick_id_seq')") == [(201, 1, 2)]


PROPERTIES = """
ALTER DATABASE {name} SET search_path TO "$user", 'App s', public; ALTER DATABASE {name} SET timezone = 'Asia/Tokyo';
ALTER DATABASE {name} SET app.secret = 'hidden'; ALTER DATABASE {name} SET statement_timeout = '1h';
ALTER ROLE {app} IN DATABASE {name} SET work_mem = '7MB'; ALTER ROLE {missing} IN DATABASE {name} SET work_mem = '8MB';
ALTER DATABASE {name} CONNECTION LIMIT 77; COMMENT ON DATABASE {name} IS 'the "shop"''s';
REVOKE ALL ON DATABASE {name} FROM PUBLIC; GRANT CONNECT ON DATABASE {name} TO {app} WITH GRANT OPTION;
GRANT TEMPORARY, CONNECT ON DATABASE {name} TO {missing}; ALTER ROLE {app} SET lock_timeout = '3s'
"""
VIEWS = """
CREATE TABLE sale (id int PRIMARY KEY, at timestamptz NOT NULL); INSERT INTO sale VALUES (1, '2024-01-01 20:00+00');
CREATE MATERIALIZED VIEW z_sales AS SELECT id, at::date AS day, at::text AS shown FROM sale; CREATE UNIQUE INDEX ON z_sales (id);
CREATE VIEW m_days AS SELECT day, count(*) AS sales FROM z_sales GROUP BY day;
CREATE MATERIALIZED VIEW a_days AS SELECT * FROM m_days; CREATE MATERIALIZED VIEW empty AS SELECT * FROM a_days WITH NO DATA;
CREATE MATERIALIZED VIEW b_best AS SELECT max(sales) AS sales FROM a_days
"""
SHOWN = "SELECT id, day::text, shown FROM z_sales ORDER BY id", "SELECT day::text, sales FROM a_days ORDER BY 1", "SELECT sales FROM b_best"


def properties(database: Database) -> list[tuple[object, ...]]:
    """Settings, privileges without those of the owner, limit and comment."""
    return database.fetch("""
        SELECT 'setting', COALESCE(setrole::regrole::text, '-'), unnest(setconfig) FROM pg_db_role_setting s
         WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL SELECT privilege_type, grantee::regrole::text, is_grantable::text
          FROM pg_database d, aclexplode(COALESCE(datacl, acldefault('d', datdba))) a
         WHERE datname = current_database() AND grantee <> datdba
        UNION ALL SELECT 'limit', datconnlimit::text, shobj_description(oid, 'pg_database') FROM pg_database
         WHERE datname = current_database()
        ORDER BY 1, 2, 3
    """)


def test_properties_of_the_database_and_materialized_views(publisher_db: Database, target_db: Database) -> None:
    # the bugs were: MusicBrainz lost its search_path, times were nine hours off, materialized views kept the content of the copy
    publisher_db.execute(f'CREATE SCHEMA "App s"; {VIEWS}')
    publisher_db.execute(EVERY_KIND + "; ALTER TABLE k.plain REPLICA IDENTITY FULL; ALTER TABLE k.inherits REPLICA IDENTITY FULL")
    publisher_db.execute("CREATE FUNCTION k.e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; CREATE PUBLICATION mine")
    publisher_db.execute("CREATE EVENT TRIGGER e ON sql_drop EXECUTE FUNCTION k.e()")
    with role(publisher_db) as app, role(publisher_db) as missing:
        target_db.execute(f"CREATE ROLE {app.name}")
        publisher_db.execute(PROPERTIES.format(name=publisher_db.name, app=app.name, missing=missing.name))
        publisher_db.reconnect()
        publisher_db.execute("REFRESH MATERIALIZED VIEW z_sales; REFRESH MATERIALIZED VIEW a_days; REFRESH MATERIALIZED VIEW b_best")
        verb = ("schema", "diff", "--connection", publisher_db.dsn, "--target", target_db.dsn, "--all")
        before = subscriber(*verb).output
        for line in (
            "TimeZone is not set for the target's database, and \"Asia/Tokyo\" for the publisher's",
            "app.secret is not set for the target's database, and another value for the publisher's",
            f'role "{missing.name}" does not exist in the target: its privileges on the database are not moved',
            "PUBLIC has the privilege CONNECT only on the target's database",
            f'lock_timeout of role "{app.name}" in all databases is not set in the target, and "3s" on the publisher',
            "the target's database takes any number of connections, and the publisher's at most 77",
        ):
            assert line in before, before
        with migrated(publisher_db, target_db, "--owners") as (name, program):
            assert f'role "{missing.name}" does not exist in the target: its settings in the database are not moved' in program.errors
            for line in (
                "not moved: event triggers (--event-triggers creates them): e",
                "not moved: publications (--publications creates them): mine",
                "not moved: rows behind foreign servers, which the new server must reach: every_server",
                "not moved: rows of unlogged tables (cutover --unlogged): k.unlogged",
            ):
                assert line in program.errors, program.errors
            if publisher_db.version == target_db.version:
                assert dumped(target_db) == dumped(publisher_db).replace(
                    "CREATE EVENT TRIGGER e ON sql_drop\n   EXECUTE FUNCTION k.e();\n", ""
                )
            assert properties(target_db) == [row for row in properties(publisher_db) if row[1] != missing.name]
            target_db.reconnect()
            assert target_db.value("SHOW search_path") == publisher_db.value("SHOW search_path")
            for query in SHOWN:
                assert target_db.fetch(query) == publisher_db.fetch(query)
            assert target_db.fetch(SHOWN[0]) == [(1, "2024-01-02", "2024-01-02 05:00:00+09")]
            # servers before 15 report statistics late
            target_db.wait("SELECT last_analyze IS NOT NULL FROM pg_stat_user_tables WHERE relname = 'z_sales'", True)
            assert f'role "{missing.name}"' in subscriber(*verb, "--ddl").output
            assert subscriber(*verb).output.count("\n") == 3
            target_db.execute(f"REVOKE CONNECT ON DATABASE {target_db.name} FROM {app.name}")
            publisher_db.execute("INSERT INTO sale VALUES (2, '2024-06-01 12:00+00')")
            cutover = ("cutover", name, "--target", target_db.dsn)
            plan = subscriber(*cutover, "--dry-run").output
            assert re.search(r"^11[.] refresh 4 materialized views, which takes about \d[.]\d s", plan, re.MULTILINE), plan
            assert re.search(r"^9[.] refresh 4 materialized", subscriber(*cutover, "--dry-run", "--refresh", "before").output, re.MULTILINE)
            none = subscriber(*cutover, "--dry-run", "--refresh", "none").output
            assert (
                "materialized views are not refreshed (--refresh none): k.materialized, public.z_sales, public.a_days, public.b_best"
                in none
            )
            assert "9. refresh no" not in none
            assert f'role "{app.name}" lacks the privilege CONNECT WITH GRANT OPTION on the target\'s database' in plan
            done = subscriber(*cutover, loud=True)
            assert done.status == 0, done.errors
            said = [line.split()[3] for line in done.errors.splitlines() if "subscriber: materialized view" in line]
            assert said == ["k.materialized", "public.z_sales", "public.a_days", "public.b_best"]
            again(publisher_db, target_db)
            assert target_db.fetch(SHOWN[0]) == [(1, "2024-01-02", "2024-01-02 05:00:00+09"), (2, "2024-06-01", "2024-06-01 21:00:00+09")]
            assert target_db.fetch(SHOWN[2]) == [(1,)]
            assert target_db.value("SELECT relispopulated FROM pg_class WHERE relname = 'empty'") is False
            target_db.execute("INSERT INTO sale VALUES (3, '2024-06-01 12:30+00')")
            with running("run", "--target", publisher_db.dsn):
                done = subscriber(*cutover, "--rollback", "--refresh", "before", loud=True)
            assert done.status == 0, done.errors
            again(publisher_db, target_db)
            assert publisher_db.fetch(SHOWN[2]) == [(2,)]
        target_db.execute("SET default_transaction_read_only = off")
        target_db.execute(f"DROP OWNED BY {app.name}; ALTER ROLE {app.name} IN DATABASE {target_db.name} RESET ALL; DROP ROLE {app.name}")


UNREPLICATED = """
CREATE TABLE doc (id int PRIMARY KEY, data oid);
CREATE UNLOGGED TABLE cache (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "v V" text, twice int GENERATED ALWAYS AS (2) STORED);
CREATE UNLOGGED TABLE child (id int PRIMARY KEY, cache int REFERENCES cache); CREATE UNLOGGED TABLE "Empty" ();
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'secret'; END$$;
INSERT INTO cache ("v V") VALUES (E'a\\t\\n\\\\'), (NULL), ('ü'); INSERT INTO child VALUES (1, 2);
CREATE TRIGGER refuse BEFORE INSERT ON child FOR EACH ROW EXECUTE FUNCTION refuse();
INSERT INTO doc SELECT n, lo_from_bytea(70000 + n, convert_to(repeat(chr(96 + n), (n - 1) * 131072), 'UTF8'))
  FROM generate_series(1, 6) AS n;
SELECT lo_put(70001, 3000000, 'end'); GRANT SELECT ON LARGE OBJECT 70002 TO PUBLIC;
CREATE MATERIALIZED VIEW cached AS SELECT count(*) FROM cache
"""
HELD = (
    "SELECT * FROM cache ORDER BY id",
    "SELECT * FROM child",
    "SELECT oid::int, lomacl::text[], md5(lo_get(oid)) FROM pg_largeobject_metadata ORDER BY 1",
)


def test_unlogged_rows_and_large_objects_on_request(publisher_db: Database, target_db: Database) -> None:
    publisher_db.execute(UNREPLICATED)
    target_db.execute("SELECT lo_from_bytea(70003, 'old'), lo_from_bytea(80000, 'other')")
    with migrated(publisher_db, target_db) as (name, program):
        assert target_db.fetch("SELECT FROM cache") == []
        assert "not moved: large objects (cutover --large-objects): 6" in program.errors
        verb = ("cutover", name, "--target", target_db.dsn)
        done = subscriber(*verb, "--dry-run")
        assert 'their rows not moved (--unlogged moves them): "public.Empty", "public.cache", "public.child"' in done.output
        target_db.execute('DROP TABLE "Empty"')
        assert 'error: the new database has no unlogged tables "public.Empty"' in subscriber(*verb, "--dry-run", "--unlogged").output
        target_db.execute('CREATE UNLOGGED TABLE "Empty" ()')
        both = ("--unlogged", "--large-objects", "--refresh", "before")
        assert "6 large objects are moved while writers are stopped" in subscriber(*verb, "--dry-run", *both).output
        done = subscriber(*verb, *both, loud=True)
        assert done.status == 0, done.errors
        assert "the rows of 3 unlogged tables are moved" in done.errors
        again(publisher_db, target_db)
        before = [publisher_db.fetch(query) for query in HELD]
        assert before[0][0] == (1, "a\t\n\\", 2)
        assert [target_db.fetch(query) for query in HELD] == before
        assert target_db.value("SELECT count FROM cached") == 3
        target_db.execute("INSERT INTO cache (\"v V\") VALUES ('new'); SELECT lo_unlink(70004), lo_put(70005, 0, 'changed')")
        with running("run", "--target", publisher_db.dsn):
            # what cannot be moved is known before writers are stopped, and can be switched off
            publisher_db.execute("SET default_transaction_read_only = off")
            publisher_db.execute('DROP TABLE "Empty"')
            target_db.execute("CREATE TABLE late ()")
            done = subscriber(*verb, "--rollback", loud=True)
            assert 'the old database has no unlogged tables "public.Empty"' in done.errors
            assert "their rows would be lost: public.late" in done.errors
            assert "closing the new database" not in done.errors
            done = subscriber(*verb, "--rollback", "--no-unlogged", loud=True)
            assert "their rows would be lost: public.late" in done.errors
            assert "has no unlogged tables" not in done.errors
            publisher_db.execute('CREATE UNLOGGED TABLE "Empty" ()')
            target_db.execute("DROP TABLE late")
            done = subscriber(*verb, "--rollback", loud=True)
        assert done.status == 0, done.errors
        again(publisher_db, target_db)
        after = [target_db.fetch(query) for query in HELD]
        assert [publisher_db.fetch(query) for query in HELD] == after
        assert (len(after[0]), len(after[2]), publisher_db.value("SELECT count FROM cached")) == (4, 5, 4)
