"""What publications publish, as the publisher's catalog tells it."""

from __future__ import annotations

import re

import pytest

from subscriber.errors import PublisherError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.types import Attribute, TypeFact, TypeKind
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import missing_publications, published_tables
from tests.support.database import Database

INT4, TEXT = 23, 25


async def published(database: Database, *publications: str, table: TableName | None = None) -> dict[str, PublishedTable]:
    connection = await WalReceiverConnection.connect(database.dsn, application_name="test")
    try:
        tables = await published_tables(connection, publications, *([table] if table else []))
    finally:
        await connection.close()
    assert len({found.name for found in tables}) == len(tables)
    return {found.name.name: found for found in tables}


@pytest.mark.matrix
async def test_missing_publications(publisher_db: Database) -> None:
    publisher_db.execute("""CREATE PUBLICATION here; CREATE PUBLICATION "Ups 'q" """)
    connection = await WalReceiverConnection.connect(publisher_db.dsn, application_name="test")
    assert await missing_publications(connection, ["z", "here", "Ups 'q", "a"]) == ["z", "a"]
    assert await missing_publications(connection, []) == []
    await connection.close()
    assert await published(publisher_db, "z") == {}
    assert await published(publisher_db) == {}
    assert await published(publisher_db, "here", "z") == {}


@pytest.mark.matrix
async def test_table_as_described(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE SCHEMA "S x";
        CREATE TABLE "S x".t (gone int, b text, a int PRIMARY KEY, g int GENERATED ALWAYS AS (a + 1) STORED);
        ALTER TABLE "S x".t DROP COLUMN gone;
        INSERT INTO "S x".t SELECT 'x', g FROM generate_series(1, 1000) g;
        ANALYZE "S x".t;
        CREATE PUBLICATION p FOR TABLE "S x".t
    """)
    table = (await published(publisher_db, "p"))["t"]
    assert table == PublishedTable(
        name=TableName("S x", "t"),
        relation_id=publisher_db.value("""SELECT '"S x".t'::regclass::oid"""),
        kind="r",
        columns=("b", "a"),
        key_columns=("a",),
        replica_identity="d",
        size=publisher_db.value("""SELECT pg_relation_size('"S x".t')"""),
        estimated_rows=1000,
        column_types=(TEXT, INT4),
        column_modifiers=(-1, -1),
        not_null=frozenset({"a"}),
        primary_key=("a",),
    )
    assert table.size > 0


async def test_never_analyzed(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int) WITH (autovacuum_enabled = off); CREATE PUBLICATION p FOR TABLE t")
    table = (await published(publisher_db, "p"))["t"]
    assert (table.estimated_rows, table.size) == (None, 0)


async def test_one_table_only(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t (a int); CREATE TABLE u (a int); CREATE SCHEMA s; CREATE TABLE s.t (a int); CREATE PUBLICATION p FOR ALL TABLES"
    )
    assert list(await published(publisher_db, "p", table=TableName("s", "t"))) == ["t"]
    assert await published(publisher_db, "p", table=TableName("s", "u")) == {}
    connection = await WalReceiverConnection.connect(publisher_db.dsn, application_name="test")
    names = [str(table.name) for table in await published_tables(connection, ["p"])]
    await connection.close()
    assert names == ["public.t", "public.u", "s.t"]


@pytest.mark.publisher(min=15, lacks="publications of schemas")
@pytest.mark.matrix
async def test_schema_publication_and_unlogged_tables(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE SCHEMA s; CREATE TABLE s.a (a int); CREATE UNLOGGED TABLE s.u (a int); CREATE VIEW s.v AS SELECT 1;"
        " CREATE TABLE other (a int); CREATE PUBLICATION p FOR TABLES IN SCHEMA s"
    )
    assert list(await published(publisher_db, "p")) == ["a"]


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("", ("d", ("a", "b"))),
        ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_c", ("i", ("c",))),
        ("ALTER TABLE t REPLICA IDENTITY FULL", ("f", ("c", "b", "a", "d"))),
        ("ALTER TABLE t REPLICA IDENTITY NOTHING", ("n", ())),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", ("d", ())),
    ],
)
async def test_replica_identity(publisher_db: Database, identity: str, expected: tuple[str, tuple[str, ...]]) -> None:
    publisher_db.execute("CREATE TABLE t (c int NOT NULL, b int, a int, d int, PRIMARY KEY (a, b)); CREATE UNIQUE INDEX t_c ON t (c)")
    publisher_db.execute(f"CREATE PUBLICATION p FOR TABLE t; {identity}")
    table = (await published(publisher_db, "p"))["t"]
    # in the order of the columns: as the publisher's RELATION message marks them
    assert (table.replica_identity, sorted(table.key_columns)) == (expected[0], sorted(expected[1]))
    assert [column for column in table.columns if column in table.key_columns] == list(table.key_columns)


@pytest.mark.publisher(min=15, lacks="column lists")
@pytest.mark.matrix
async def test_column_list(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text, c int); CREATE PUBLICATION p FOR TABLE t (c, a)")
    table = (await published(publisher_db, "p"))["t"]
    assert (table.columns, table.column_types, table.key_columns) == (("a", "c"), (INT4, INT4), ("a",))


@pytest.mark.publisher(min=15, lacks="column lists")
@pytest.mark.matrix
async def test_equal_and_different_column_lists(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TABLE t (a int PRIMARY KEY, b text, c int);
        CREATE PUBLICATION p FOR TABLE t (a, b);
        CREATE PUBLICATION same FOR TABLE t (b, a);
        CREATE PUBLICATION other FOR TABLE t (a, c);
        CREATE PUBLICATION whole FOR TABLE t;
        CREATE PUBLICATION listed FOR TABLE t (a, b, c);
    """)
    assert (await published(publisher_db, "p", "same"))["t"].columns == ("a", "b")
    assert (await published(publisher_db, "whole", "listed"))["t"].columns == ("a", "b", "c")
    for pair in (("p", "other"), ("p", "whole")):
        with pytest.raises(
            PublisherError, match=r'cannot use different column lists for table "public\.t" in different publications'
        ) as caught:
            await published(publisher_db, *pair)
        assert caught.value.hint


@pytest.mark.publisher(min=15, lacks="row filters")
@pytest.mark.matrix
async def test_row_filters(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TABLE t (a int PRIMARY KEY, b text);
        CREATE PUBLICATION p FOR TABLE t WHERE (a > 5);
        CREATE PUBLICATION q FOR TABLE t WHERE (a < 2);
        CREATE PUBLICATION same FOR TABLE t WHERE (a > 5);
        CREATE PUBLICATION inserts FOR TABLE t WHERE (a = 3) WITH (publish = 'insert');
        CREATE PUBLICATION whole FOR TABLE t;
        CREATE PUBLICATION everything FOR ALL TABLES;
        CREATE PUBLICATION in_schema FOR TABLES IN SCHEMA public;
    """)
    assert (await published(publisher_db, "p"))["t"].row_filters == ("(a > 5)",)
    assert (await published(publisher_db, "p", "same"))["t"].row_filters == ("(a > 5)",)
    assert set((await published(publisher_db, "p", "q", "inserts"))["t"].row_filters) == {"(a > 5)", "(a < 2)", "(a = 3)"}
    for without in ("whole", "everything", "in_schema"):
        assert (await published(publisher_db, "p", without, "q"))["t"].row_filters == ()


PARTITIONED = """
    CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
    CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);
    CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (a);
    CREATE TABLE r21 PARTITION OF r2 DEFAULT;
    INSERT INTO r SELECT g, 'x' FROM generate_series(0, 19) g;
    ANALYZE r;
    CREATE PUBLICATION leaves FOR TABLE r;
    CREATE PUBLICATION root FOR TABLE r WHERE (a > 3) WITH (publish_via_partition_root);
    CREATE PUBLICATION middle FOR TABLE r2 WITH (publish_via_partition_root);
    CREATE PUBLICATION leaf FOR TABLE r21 WHERE (a > 15);
    CREATE PUBLICATION every_leaf FOR ALL TABLES;
    CREATE PUBLICATION every_root FOR ALL TABLES WITH (publish_via_partition_root);
"""
WITHOUT_FILTERS = re.sub(r" WHERE \(.*?\)", "", PARTITIONED)  # for 13 and 14


PUBLISHED = [
    (["leaves"], {"r1", "r21"}),
    (["every_leaf"], {"r1", "r21"}),
    (["root"], {"r"}),
    (["every_root"], {"r"}),
    (["middle"], {"r2"}),
    (["leaf"], {"r21"}),
    (["root", "leaves"], {"r"}),
    (["root", "leaf"], {"r"}),
    (["root", "middle", "leaf"], {"r"}),
    (["middle", "leaf"], {"r2"}),
    (["middle", "leaves"], {"r1", "r2"}),
    (["leaves", "every_root"], {"r"}),
]


@pytest.mark.matrix
async def test_partitions(publisher_db: Database, subtests: pytest.Subtests) -> None:
    publisher_db.execute(PARTITIONED if publisher_db.version >= 15 else WITHOUT_FILTERS)
    for publications, expected in PUBLISHED:
        with subtests.test(publications=publications):
            tables = await published(publisher_db, *publications)
            assert set(tables) == expected
            if publisher_db.version >= 16:
                # the server's own answer for all of them together
                names = ", ".join(f"'{name}'" for name in publications)
                native = publisher_db.fetch(f"SELECT DISTINCT relid::regclass::text FROM pg_get_publication_tables({names})")
                assert {name for (name,) in native} == expected
            for table in tables.values():
                assert table.kind == ("p" if table.name.name in {"r", "r2"} else "r")
                assert table.key_columns == ("a",)


@pytest.mark.matrix
async def test_partitioned_root_sums_its_partitions(publisher_db: Database) -> None:
    publisher_db.execute(PARTITIONED if publisher_db.version >= 15 else WITHOUT_FILTERS)
    table = (await published(publisher_db, "root"))["r"]
    assert table.size == publisher_db.value("SELECT pg_relation_size('r1') + pg_relation_size('r21')")
    assert table.estimated_rows == 20
    assert table.row_filters == (("(a > 3)",) if publisher_db.version >= 15 else ())


async def test_published_generated_columns(publisher18_db: Database) -> None:
    publisher18_db.execute("""
        CREATE TABLE t (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a + 1) STORED, v int GENERATED ALWAYS AS (a + 2) VIRTUAL);
        CREATE PUBLICATION without FOR TABLE t;
        CREATE PUBLICATION stored FOR TABLE t WITH (publish_generated_columns = stored);
        CREATE PUBLICATION listed FOR TABLE t (a, g);
    """)
    assert (await published(publisher18_db, "without"))["t"].columns == ("a",)
    for publication in ("stored", "listed"):
        table = (await published(publisher18_db, publication))["t"]
        assert (table.columns, table.generated) == (("a", "g"), ("g",))
    assert (await published(publisher18_db, "stored", "listed"))["t"].columns == ("a", "g")
    with pytest.raises(PublisherError, match="cannot use different column lists"):
        await published(publisher18_db, "without", "stored")


async def test_table_without_columns(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (); CREATE PUBLICATION p FOR TABLE t")
    table = (await published(publisher_db, "p"))["t"]
    assert (table.columns, table.key_columns) == ((), ())


@pytest.mark.matrix
async def test_hostile_search_path_objects_are_not_used(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE FUNCTION public.pg_get_publication_tables(name) RETURNS TABLE (relid oid) LANGUAGE sql AS 'SELECT 1/0; SELECT 1::oid';
        CREATE TABLE public.pg_class (a int);
        CREATE TABLE t (a int); CREATE PUBLICATION p FOR TABLE t
    """)
    publisher_db.execute(f"ALTER DATABASE {publisher_db.name} SET search_path = public, pg_catalog")
    assert list(await published(publisher_db, "p")) == ["t"]


async def test_keys_modifiers_and_types(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE SCHEMA app;
        CREATE TYPE app.mood AS ENUM ('sad', 'it''s "ok"');
        CREATE DOMAIN app.price AS numeric(12, 2);
        CREATE TYPE app.pair AS (price app.price, moods app.mood[], gone int);
        ALTER TYPE app.pair DROP ATTRIBUTE gone;
        CREATE TYPE app.pairs AS RANGE (subtype = app.mood);
        CREATE TABLE app.t (b varchar(10), a int, p app.pair NOT NULL, s app.pairs, n int[], PRIMARY KEY (b, a));
        CREATE TABLE app.u (a int PRIMARY KEY, b int);
        CREATE PUBLICATION p FOR TABLE app.t, app.u
    """)
    oids = dict(publisher_db.fetch("SELECT typname, oid::int8 FROM pg_type WHERE typnamespace = 'app'::regnamespace"))
    tables = await published(publisher_db, "p")
    table = tables["t"]
    assert table.column_modifiers == (14, -1, -1, -1, -1)
    assert table.primary_key == ("b", "a")
    assert table.not_null == {"a", "b", "p"}
    facts = {fact.name: fact for fact in table.types}
    assert facts.keys() == {"mood", "_mood", "price", "pair", "pairs"}
    assert facts["mood"].labels == ("sad", 'it\'s "ok"')
    assert facts["_mood"] == TypeFact(oids["_mood"], "app", "_mood", TypeKind.ARRAY, oids["mood"])
    assert facts["price"] == TypeFact(oids["price"], "app", "price", TypeKind.DOMAIN, 1700, modifier=(12 << 16 | 2) + 4)
    assert facts["pair"].attributes == (Attribute("price", oids["price"]), Attribute("moods", oids["_mood"]))
    assert facts["pairs"] == TypeFact(oids["pairs"], "app", "pairs", TypeKind.RANGE, oids["mood"])
    assert (tables["u"].types, tables["u"].primary_key) == ((), ("a",))


@pytest.mark.publisher(min=15, lacks="column lists")
async def test_partially_published_key_is_left_out(publisher_db: Database) -> None:
    publisher_db.execute(
        "CREATE TABLE t (a int, b int, PRIMARY KEY (a, b)); CREATE PUBLICATION p FOR TABLE t (a) WITH (publish = 'insert')"
    )
    assert (await published(publisher_db, "p"))["t"].primary_key == ()
