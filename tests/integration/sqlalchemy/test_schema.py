"""``schema copy`` and ``schema diff`` with targets of SQLAlchemy."""

from __future__ import annotations

from subscriber import SchemaOptions, Section, check, copy_schema, diff_schema
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import OtherTarget

SCHEMA = """
CREATE SCHEMA app;
CREATE TABLE customer (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text UNIQUE, name varchar(30) NOT NULL, note text);
CREATE INDEX by_name ON customer (name, note); CREATE INDEX lowered ON customer (lower(name));
CREATE TABLE app."order" (id bigserial PRIMARY KEY, customer int NOT NULL REFERENCES customer ON DELETE CASCADE, email text, parent bigint,
    total numeric(10, 2) CHECK (total > 0), FOREIGN KEY (email) REFERENCES customer (email));
ALTER TABLE app."order" ADD FOREIGN KEY (parent) REFERENCES app."order";
CREATE INDEX by_total ON app."order" (total); COMMENT ON TABLE customer IS 'a comment'; COMMENT ON COLUMN customer.note IS 'another';
CREATE PUBLICATION pub FOR ALL TABLES
"""


async def test_tables_keys_and_indexes(publisher18_db: Database, other_target: OtherTarget) -> None:
    target = other_target
    publisher18_db.execute(SCHEMA)
    publisher18_db.execute(
        "INSERT INTO customer (email, name) VALUES ('a', 'b'); INSERT INTO app.\"order\" (customer, email) VALUES (1, 'a')"
    )
    both = {"connection": publisher18_db.dsn, "target": target.url}
    command = ("--connection", publisher18_db.dsn, "--target", target.url, "--publication", "pub")
    done = subscriber("schema", "copy", *command, "--section", "pre-data")
    assert done.status == 0, done.errors
    assert 'lowered of table "public.customer" was left out' in done.errors
    assert 'order_total_check of table "app.order" was left out' in done.errors
    missing = [each.message for each in await diff_schema(**both, publications=["pub"])]  # type: ignore[arg-type]
    assert missing[:3] == [
        'index (total) of table "app.order" does not exist in the target',
        'unique key (email) of table "public.customer" does not exist in the target',
        'index (name, note) of table "public.customer" does not exist in the target',
    ]
    assert len(missing) == (3 if target.kind == "sqlite" else 6)
    assert subscriber("run", *command, "--until-caught-up").status == 0
    ddl = subscriber("schema", "diff", *command, "--ddl")
    assert (ddl.status, len(ddl.output.splitlines())) == (1, len(missing)), ddl
    # the first one by hand, and the others by the program
    target.execute(ddl.output.splitlines()[0])
    options = SchemaOptions(sections=[Section.POST_DATA])
    await copy_schema(**both, publications=["pub"], options=options)  # type: ignore[arg-type]
    assert await diff_schema(**both, publications=["pub"]) == []  # type: ignore[arg-type]
    assert await check("subscriber", publications=["pub"], **both) == []  # type: ignore[arg-type]
    done = subscriber("schema", "copy", *command, loud=True)
    assert "0 objects created, 2 existed (`subscriber schema diff` compares them)" in done.errors
    # replication goes on, and the counters are set
    publisher18_db.execute(
        "INSERT INTO customer (email, name) VALUES ('c', 'd'); UPDATE app.\"order\" SET parent = 1; DELETE FROM customer WHERE id = 2"
    )
    assert subscriber("run", *command, "--until-caught-up").status == 0
    done = subscriber("sequences", "sync", *command)
    assert done.status == 0, done
    target.execute("INSERT INTO customer (email, name) VALUES ('e', 'f')")
    assert target.fetch("SELECT id FROM customer ORDER BY id") == [(1,), (3,)]
    assert target.fetch("SELECT parent FROM app__order") == [(1,)]


async def test_differences(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE a (id int PRIMARY KEY, b int NOT NULL, c int); CREATE TABLE missing (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    other_target.execute("CREATE TABLE a (id integer PRIMARY KEY, b integer)")
    found = await diff_schema(connection=publisher18_db.dsn, target=other_target.url, publications=["pub"])
    assert [(each.kind, each.name.name) for each in found] == [("column", "a"), ("column", "missing"), ("nullability", "a")]
    assert found[-1].message == 'column "b" of table "public.a" is NULL in the target, and NOT NULL on the publisher'
