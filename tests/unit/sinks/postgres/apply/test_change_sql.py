"""The SQL and the parameters that the PostgreSQL sink sends for each kind of change, exactly: a change of the SQL is seen here first."""

from __future__ import annotations

import pytest

from subscriber.errors import ProtocolError, RelationError
from tests.support.sink_postgres import UNCHANGED, Binary, Remote, truncate
from tests.unit.sinks.postgres.recording import EQUALS, ID, INT4, NUMBER, TEXT, VALUE, column, send, send_one, table

T = Remote("t", "*id", "v", "n")
FULL = Remote("t", "id", "v", "n", identity="f")
BY_CTID = "WHERE found.t = x.tableoid AND found.c = x.ctid"


def found(predicate: str, columns: str = "x.tableoid AS t, x.ctid AS c", scanned: str = 'ONLY "public"."t"') -> str:
    """The first part of a statement that first finds and locks one row."""
    return f"WITH found AS (SELECT {columns} FROM {scanned} AS x WHERE {predicate} LIMIT 1 FOR UPDATE), "


COUNT = (
    " SELECT CASE f.n WHEN s.n THEN f.n ELSE 1 / (f.n - f.n) END FROM (SELECT pg_catalog.count(*) AS n FROM found) AS f,"
    ' (SELECT pg_catalog.count(*) AS n FROM ONLY "public"."t" AS x, found WHERE found.t = x.tableoid AND found.c = x.ctid) AS s'
)

# --- INSERT


async def test_insert() -> None:
    sent = await send_one(table(), T.relation, T.insert(1, "x", None))
    assert sent.sql == 'INSERT INTO "public"."t" ("id", "v", "n") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)'
    assert (sent.values, sent.formats) == ([b"1", b"x", None], None)
    statement = sent.statement
    assert (statement.parameter_types, statement.columns, statement.identity) == ((INT4, TEXT, INT4), ("id", "v", "n"), ("id",))
    assert (statement.message_type, str(statement.table), statement.reused, statement.finds) == ("INSERT", "public.t", True, False)
    assert statement.written is not None
    assert (statement.written.row, statement.written.own) == ('SELECT $1 AS "id", $2 AS "v", $3 AS "n"', "")


async def test_insert_follows_the_order_of_the_remote_columns_and_leaves_others_to_their_defaults() -> None:
    remote = Remote("t", "n", "*id")
    sent = await send_one(table(), remote.relation, remote.insert(7, 1))
    assert sent.sql == 'INSERT INTO "public"."t" ("n", "id") OVERRIDING SYSTEM VALUE VALUES ($1, $2)'
    assert sent.values == [b"7", b"1"]
    assert sent.statement.written is not None
    assert sent.statement.written.row == 'SELECT $2 AS "id", NULL::text AS "v", $1 AS "n"'


async def test_insert_without_columns() -> None:
    remote = Remote("t")
    sent = await send_one(table(), remote.relation, remote.insert())
    assert (sent.sql, sent.values) == ('INSERT INTO "public"."t" DEFAULT VALUES', [])


async def test_binary_values_have_format_one() -> None:
    sent = await send_one(table(), T.relation, T.insert(Binary(b"\0\0\0\1"), "x", None))
    assert (sent.values, sent.formats) == ([b"\0\0\0\1", b"x", None], [1, 0, 1])


async def test_names_are_quoted() -> None:
    odd = column('a"b; --', INT4, "integer")
    remote = Remote('T "t"', '*a"b; --', "Größe", namespace="S.s")
    target = table('T "t"', (odd, column("Größe")), ('a"b; --',), namespace="S.s")
    inserted, deleted = await send(target, remote.relation, remote.insert(1, "x"), remote.delete(1, None))
    assert inserted.sql == 'INSERT INTO "S.s"."T ""t""" ("a""b; --", "Größe") OVERRIDING SYSTEM VALUE VALUES ($1, $2)'
    assert deleted.sql == 'DELETE FROM ONLY "S.s"."T ""t""" AS x WHERE x."a""b; --" OPERATOR(pg_catalog.=) $1'


async def test_changes_of_one_shape_are_one_prepared_statement() -> None:
    inserts, updates = (T.insert(1, "x", 1), T.insert(2, "y", None)), (T.update(1, "z", 1), T.update(2, None, 2))
    sent = await send(table(), T.relation, *inserts, *updates, T.delete(1, None, None), T.delete(2, None, None))
    assert len({id(one.statement) for one in sent}) == 3
    assert all(one.statement.reused for one in sent)


# --- UPDATE


async def test_update() -> None:
    sent = await send_one(table(), T.relation, T.update(1, "y", None))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "id" = $1, "v" = $2, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $1'
    assert (sent.values, sent.formats, sent.statement.parameter_types) == ([b"1", b"y", None], None, (INT4, TEXT, INT4))
    assert (sent.statement.message_type, sent.statement.finds) == ("UPDATE", False)


async def test_update_keeps_unchanged_toast_values() -> None:
    sent = await send_one(table(), T.relation, T.update(1, UNCHANGED, 3))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "id" = $1, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $1'
    assert sent.values == [b"1", None, b"3"]
    assert sent.statement.written is not None
    assert sent.statement.written.row == (
        'SELECT $1 AS "id", x."v" AS "v", $3 AS "n" FROM ONLY "public"."t" AS x WHERE x."id" OPERATOR(pg_catalog.=) $1 LIMIT 1'
    )


async def test_update_of_the_key_finds_the_row_by_the_old_key() -> None:
    sent = await send_one(table(), T.relation, T.update(2, "y", 3, old=(1, None, None)))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "id" = $1, "v" = $2, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $4'
    assert sent.values == [b"2", b"y", b"3", b"1"]
    assert sent.statement.parameter_types == (INT4, TEXT, INT4, INT4)
    assert sent.statement.columns == ("id", "v", "n", "id")


async def test_update_of_the_key_in_binary() -> None:
    sent = await send_one(table(), T.relation, T.update(Binary(b"\0\0\0\2"), "y", UNCHANGED, old=(Binary(b"\0\0\0\1"), None, None)))
    assert (sent.values, sent.formats) == ([b"\0\0\0\2", b"y", None, b"\0\0\0\1"], [1, 0, 0, 1])


async def test_key_of_the_target_in_another_order_than_the_publishers_columns() -> None:
    remote = Remote("t", "*n", "v", "*id")
    sent = await send_one(table(key=("id", "n")), remote.relation, remote.update(7, "y", 1, old=(6, None, 1)))
    assert sent.sql == (
        'UPDATE ONLY "public"."t" AS x SET "n" = $1, "v" = $2, "id" = $3'
        ' WHERE x."id" OPERATOR(pg_catalog.=) $4 AND x."n" OPERATOR(pg_catalog.=) $5'
    )
    assert sent.values == [b"7", b"y", b"1", b"1", b"6"]


async def test_update_of_a_full_row_with_nulls() -> None:
    sent = await send_one(table(key=()), FULL.relation, FULL.update(1, "y", 2, old=(1, None, 3)))
    changed = f'changed AS (UPDATE ONLY "public"."t" AS x SET "id" = $1, "v" = $2, "n" = $3 FROM found {BY_CTID} RETURNING 1)'
    predicate = 'x."id" OPERATOR(pg_catalog.=) $4 AND x."v" IS NULL AND x."n" OPERATOR(pg_catalog.=) $5'
    assert sent.sql == found(predicate) + changed + COUNT
    assert (sent.values, sent.statement.finds) == ([b"1", b"y", b"2", b"1", b"3"], True)
    assert sent.statement.identity == ()


async def test_update_of_a_full_row_without_an_old_row_finds_it_by_the_new_values() -> None:
    sent = await send_one(table(key=()), FULL.relation, FULL.update(1, UNCHANGED, None))
    changed = f'changed AS (UPDATE ONLY "public"."t" AS x SET "id" = $1, "n" = $3 FROM found {BY_CTID} RETURNING 1)'
    assert sent.sql == found('x."id" OPERATOR(pg_catalog.=) $1 AND x."n" IS NULL') + changed + COUNT
    assert sent.values == [b"1", None, None]


async def test_key_of_the_target_finds_a_row_that_the_publisher_sends_in_full() -> None:
    sent = await send_one(table(), FULL.relation, FULL.update(1, "y", 2, old=(1, None, 3)))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "id" = $1, "v" = $2, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $1'
    assert sent.values == [b"1", b"y", b"2"]
    moved = await send_one(table(), FULL.relation, FULL.update(9, "y", 2, old=(1, None, 3)))
    assert moved.sql.endswith('WHERE x."id" OPERATOR(pg_catalog.=) $4')
    assert moved.values == [b"9", b"y", b"2", b"1"]


async def test_types_without_equality_are_compared_as_texts() -> None:
    point = column("p", 600, "point", equals=None)
    remote = Remote("t", "p", identity="f")
    sent = await send_one(table(columns=(point,), key=()), remote.relation, remote.delete("(1,2)"))
    assert sent.sql.startswith(found('x."p"::pg_catalog.text OPERATOR(pg_catalog.=) $1::pg_catalog.text'))


async def test_update_of_a_table_with_before_triggers_counts_the_rows_found() -> None:
    sent = await send_one(table(triggered=True), T.relation, T.update(1, "y", 2))
    changed = f'changed AS (UPDATE ONLY "public"."t" AS x SET "id" = $1, "v" = $2, "n" = $3 FROM found {BY_CTID} RETURNING 1)'
    assert sent.sql == found('x."id" OPERATOR(pg_catalog.=) $1') + changed + COUNT
    assert sent.statement.finds


async def test_update_without_a_changed_value_is_executed() -> None:
    remote = Remote("t", "*id")
    always = table(columns=(column("id", INT4, "integer", identity_always=True), column("g", generated=True), VALUE))
    sent = await send_one(always, remote.relation, remote.update(1))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "v" = x."v" WHERE x."id" OPERATOR(pg_catalog.=) $1'
    nothing = table(columns=always.columns[:2])
    sent = await send_one(nothing, remote.relation, remote.update(1))
    assert sent.sql == 'SELECT FROM ONLY "public"."t" AS x WHERE x."id" OPERATOR(pg_catalog.=) $1 FOR UPDATE'
    sent = await send_one(table(columns=always.columns[:2], triggered=True), remote.relation, remote.update(1))
    assert sent.sql == found('x."id" OPERATOR(pg_catalog.=) $1') + "changed AS (SELECT FROM found)" + COUNT


# --- identity and generated columns


IDENTITY = table(columns=(column("id", INT4, "integer", identity_always=True), VALUE, NUMBER, column("g", generated=True)))


async def test_insert_sets_identity_columns_and_leaves_out_generated_ones() -> None:
    sent = await send_one(IDENTITY, T.relation, T.insert(1, "x", 2))
    assert sent.sql == 'INSERT INTO "public"."t" ("id", "v", "n") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)'


async def test_update_does_not_set_an_identity_column() -> None:
    sent = await send_one(IDENTITY, T.relation, T.update(1, "y", 2))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "v" = $2, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $1'


async def test_update_of_an_identity_column_replaces_the_row() -> None:
    sent = await send_one(IDENTITY, T.relation, T.update(2, "y", UNCHANGED, old=(1, None, None)))
    gone = 'gone AS (DELETE FROM ONLY "public"."t" AS x WHERE x."id" OPERATOR(pg_catalog.=) $4 RETURNING x.*)'
    added = 'INSERT INTO "public"."t" ("id", "v", "n") OVERRIDING SYSTEM VALUE SELECT $1, $2, gone."n" FROM gone'
    assert sent.sql == f"WITH {gone} {added}"
    assert sent.values == [b"2", b"y", None, b"1"]


async def test_update_of_an_identity_column_without_a_unique_key_replaces_one_row() -> None:
    target = table(columns=IDENTITY.columns, key=())
    sent = await send_one(target, FULL.relation, FULL.update(2, "y", 3, old=(1, "x", 3)))
    predicate = " AND ".join(f'x."{name}" {EQUALS} ${number}' for number, name in enumerate(("id", "v", "n"), 4))
    gone = f'gone AS (DELETE FROM ONLY "public"."t" AS x USING found {BY_CTID} RETURNING x.*)'
    added = 'INSERT INTO "public"."t" ("id", "v", "n") OVERRIDING SYSTEM VALUE SELECT $1, $2, $3 FROM gone'
    assert sent.sql == f"{found(predicate)}{gone}, changed AS ({added} RETURNING 1){COUNT}"


async def test_update_of_a_full_row_with_the_same_identity_does_not_replace_it() -> None:
    sent = await send_one(IDENTITY, FULL.relation, FULL.update(1, "y", 3, old=(1, "x", 3)))
    assert sent.sql == 'UPDATE ONLY "public"."t" AS x SET "v" = $2, "n" = $3 WHERE x."id" OPERATOR(pg_catalog.=) $4'


# --- DELETE


async def test_delete() -> None:
    sent = await send_one(table(), T.relation, T.delete(1, None, None))
    assert sent.sql == 'DELETE FROM ONLY "public"."t" AS x WHERE x."id" OPERATOR(pg_catalog.=) $1'
    assert (sent.values, sent.statement.parameter_types, sent.statement.columns) == ([b"1"], (INT4,), ("id",))
    assert (sent.statement.message_type, sent.statement.finds) == ("DELETE", False)


async def test_delete_of_a_full_row_with_a_null_and_a_value_that_was_not_sent() -> None:
    sent = await send_one(table(key=()), FULL.relation, FULL.delete(Binary(b"\0\0\0\1"), UNCHANGED, None))
    changed = f'changed AS (DELETE FROM ONLY "public"."t" AS x USING found {BY_CTID} RETURNING 1)'
    assert sent.sql == found('x."id" OPERATOR(pg_catalog.=) $1 AND x."n" IS NULL') + changed + COUNT
    assert (sent.values, sent.formats) == ([b"\0\0\0\1"], [1])


async def test_delete_of_a_full_row_of_nulls() -> None:
    sent = await send_one(table(key=()), FULL.relation, FULL.delete(None, None, None))
    assert sent.sql.startswith(found('x."id" IS NULL AND x."v" IS NULL AND x."n" IS NULL'))
    assert sent.values == []


async def test_delete_from_a_table_without_replicated_columns_takes_any_row() -> None:
    remote = Remote("t", identity="f")
    sent = await send_one(table(key=()), remote.relation, remote.delete())
    assert sent.sql.startswith(found("true"))


async def test_partitioned_table_is_searched_with_its_partitions() -> None:
    sent = await send_one(table(kind="p", key_unique=False), T.relation, T.delete(1, None, None))
    changed = f'changed AS (DELETE FROM "public"."t" AS x USING found {BY_CTID} RETURNING 1)'
    assert sent.sql == found('x."id" OPERATOR(pg_catalog.=) $1', scanned='"public"."t"') + changed + COUNT.replace("ONLY ", "")


# --- rows that another origin changed last


@pytest.mark.parametrize(("kind", "partition"), [("r", False), ("p", True)])
async def test_origin_of_the_last_change_is_reported(kind: str, partition: bool) -> None:
    updated, deleted = await send(table(kind=kind), T.relation, T.update(1, "y", 2), T.delete(1, None, None), differs=5)
    scanned = '"public"."t"' if partition else 'ONLY "public"."t"'
    with_xmin = found('x."id" OPERATOR(pg_catalog.=) $1', "x.tableoid AS t, x.ctid AS c, x.xmin AS m", scanned)
    names = (
        "(SELECT n.nspname::pg_catalog.text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE c.oid = found.t), (SELECT c.relname::pg_catalog.text FROM pg_catalog.pg_class AS c WHERE c.oid = found.t)"
    )
    other = (
        " LEFT JOIN (SELECT found.m::pg_catalog.text AS xid, o.timestamp::pg_catalog.text AS at,"
        f" CASE WHEN o.roident <> 0 THEN coalesce(r.roname, '') END AS origin, {names if partition else 'NULL, NULL'}"
        " FROM found CROSS JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(found.m) AS o"
        " LEFT JOIN pg_catalog.pg_replication_origin AS r ON r.roident = o.roident"
        " WHERE o.timestamp IS NOT NULL AND o.roident <> 5 AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_origin AS own"
        " WHERE own.roident = 5 AND pg_catalog.starts_with(r.roname, own.roname || '_parallel_'))) AS d ON true"
    )
    count = COUNT.replace('ONLY "public"."t"', scanned).replace(" END FROM", " END, d.* FROM") + other
    assert updated.sql == (
        f'{with_xmin}changed AS (UPDATE {scanned} AS x SET "id" = $1, "v" = $2, "n" = $3 FROM found {BY_CTID} RETURNING 1){count}'
    )
    assert deleted.sql == f"{with_xmin}changed AS (DELETE FROM {scanned} AS x USING found {BY_CTID} RETURNING 1){count}"


# --- TRUNCATE


U, V = Remote("u", "*id", relation_id=2), Remote("v", "*id", relation_id=3)


@pytest.mark.parametrize(("restart", "identity"), [(False, "CONTINUE"), (True, "RESTART")])
async def test_truncate(restart: bool, identity: str) -> None:
    tables = [table(), table("u", kind="p")]
    (sent,) = await send(tables, T.relation, U.relation, truncate(T, U, restart=restart))
    assert (sent.sql, sent.values) == (f'TRUNCATE ONLY "public"."t", "public"."u" {identity} IDENTITY RESTRICT', [])
    assert (sent.statement.message_type, sent.statement.table, sent.statement.reused) == ("TRUNCATE", None, False)


async def test_truncate_without_a_table_that_is_left_out() -> None:
    (sent,) = await send([table(), table("u")], T.relation, U.relation, truncate(T, U), left_out={"u"})
    assert sent.sql == 'TRUNCATE ONLY "public"."t" CONTINUE IDENTITY RESTRICT'
    assert await send([table(), table("u")], T.relation, U.relation, truncate(T, U), left_out={"t", "u"}) == []


async def test_truncate_without_the_table_that_references_another_deletes_the_rows() -> None:
    tables = [table(referenced_by={"u"}), table("u"), table("v", oid=77)]
    messages = (T.relation, U.relation, V.relation, truncate(T, U, V, restart=True))
    emptied, restarted, other, other_restarted = await send(tables, *messages, left_out={"u"})
    assert (emptied.sql, other.sql) == ('DELETE FROM ONLY "public"."t"', 'DELETE FROM ONLY "public"."v"')
    assert restarted.sql == (
        "SELECT pg_catalog.setval(s.seqrelid::pg_catalog.regclass, s.seqstart, false) FROM pg_catalog.pg_sequence AS s"
        " JOIN pg_catalog.pg_depend AS d ON d.objid = s.seqrelid AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass"
        " WHERE d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = 16400 AND d.deptype IN ('a', 'i')"
    )
    assert "d.refobjid = 77 " in other_restarted.sql
    assert [one.sql for one in await send(tables, *messages[:3], truncate(T, U), left_out={"u"})] == ['DELETE FROM ONLY "public"."t"']


# --- roles


async def test_changes_are_made_as_the_tables_owners() -> None:
    tables = [table(role="o"), table("u", role='p"q'), table("v")]
    relations = [T.relation, U.relation, V.relation]
    sent = await send(tables, *relations, T.insert(1, "x", 2), T.delete(1, None, None), U.delete(1), V.delete(1), U.delete(2))
    roles = [one.sql for one in sent if one.sql.startswith("SET")]
    assert roles == ['SET LOCAL ROLE "o"', 'SET LOCAL ROLE "p""q"', "SET LOCAL ROLE NONE", 'SET LOCAL ROLE "p""q"', "SET LOCAL ROLE NONE"]
    assert [one.sql[:6] for one in sent] == [
        "SET LO",
        "INSERT",
        "DELETE",
        "SET LO",
        "DELETE",
        "SET LO",
        "DELETE",
        "SET LO",
        "DELETE",
        "SET LO",
    ]


async def test_truncate_of_tables_of_one_owner_and_of_several() -> None:
    one, other = [table(role="o"), table("u", role="o")], [table(role="o"), table("u", role="p")]
    relations = (T.relation, U.relation)
    first, *_ = await send(one, *relations, truncate(T, U))
    assert first.sql == 'SET LOCAL ROLE "o"'
    first, *rest = await send(other, *relations, truncate(T, U))
    assert (first.sql[:9], rest) == ("TRUNCATE ", [])


# --- what cannot be sent


async def test_rows_of_another_width_than_their_relation_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r'a row of relation "public\.t" has 1 columns where its Relation message has 3'):
        await send(table(), T.relation, Remote("t", "id").insert(1))


async def test_update_and_delete_need_a_key_and_insert_does_not() -> None:
    target, remote = table(key=()), Remote("t", "*id", "v")
    assert (await send_one(target, remote.relation, remote.insert(1, "x"))).sql.startswith("INSERT")
    for message in (remote.update(1, "x"), remote.delete(1, None)):
        with pytest.raises(RelationError, match="has neither REPLICA IDENTITY index nor PRIMARY KEY column") as caught:
            await send(target, remote.relation, message)
        assert "in transaction 700" in "".join(caught.value.__notes__)


async def test_relation_that_is_described_again_gets_new_statements() -> None:
    narrow = Remote("t", "*id", "v")
    sent = await send(table(columns=(ID, VALUE, NUMBER)), T.relation, T.insert(1, "x", 2), narrow.relation, narrow.insert(2, "y"))
    assert [one.sql for one in sent] == [
        'INSERT INTO "public"."t" ("id", "v", "n") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)',
        'INSERT INTO "public"."t" ("id", "v") OVERRIDING SYSTEM VALUE VALUES ($1, $2)',
    ]
