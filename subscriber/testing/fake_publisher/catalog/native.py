"""The queries of PostgreSQL's own subscriber (subscriptioncmds.c, tablesync.c of 15 to 18).

What it asks depends on its own version and on the publisher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import (
    BOOL,
    INT2,
    INT2_VECTOR,
    NAME,
    NAME_ARRAY,
    OID,
    TEXT,
    Result,
    known,
    literals,
    result,
)
from subscriber.testing.fake_publisher.catalog.published import attribute_numbers, published_by
from subscriber.testing.fake_publisher.publications import listed_columns

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_CHAR: Final = 18


def _publications(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pubname": NAME}, [(name,) for name in literals(values["names"]) if name in session.publisher.publications])


def _table_list(session: Session, values: Mapping[str, str]) -> Result:
    """fetch_table_list. Natively the column list serves only to compare lists."""
    numbered, named = "numbers" in values, "names_too" in values
    rows: dict[tuple[object, ...], None] = {}
    for publication, covered, table in published_by(session, values["names"]):
        columns = listed_columns(table.shape, publication, covered)
        row: tuple[object, ...] = (table.shape.name.namespace, table.shape.name.name)
        if numbered:
            row = (*row, " ".join(str(column.number) for column in columns))
        elif named:
            row = (*row, "{" + ",".join(f'"{column.name}"' for column in columns) + "}")
        rows[row] = None
    attributes = {"attrs": INT2_VECTOR if numbered else NAME_ARRAY} if numbered or named else {}
    return result({"nspname": NAME, "relname": NAME} | attributes, rows)


def _relation(session: Session, values: Mapping[str, str]) -> Result:
    fields = {"oid": OID, "relreplident": _CHAR, "relkind": _CHAR}
    for name, table in session.publisher.tables.items():
        if (name.namespace, name.name) == (values["namespace"], values["name"]):
            return result(fields, [(table.shape.oid, table.shape.replica_identity, "r")])
    return result(fields, [])


def _column_list(session: Session, values: Mapping[str, str]) -> Result:
    rows: dict[tuple[object, ...], None] = {}
    for publication, covered, table in published_by(session, values["names"]):
        if table.shape.oid == int(values["oid"]):
            numbers = attribute_numbers(session, publication, covered, table)
            whole = numbers is None or len(numbers) == len(table.shape.columns)
            rows[None if whole or numbers is None else " ".join(map(str, numbers)),] = None
    return result({"attrs": INT2_VECTOR}, rows)


def _columns(session: Session, values: Mapping[str, str]) -> Result:
    table = session.publisher.table_by_oid(int(values["oid"]))
    with_generated = "generated" in values
    rows: list[tuple[object, ...]] = []
    for column in () if table is None else table.shape.columns:
        if column.generated and not with_generated:
            continue
        key = table is not None and column.name in table.shape.identity_columns
        rows.append((column.number, column.name, column.type_oid, key, *((bool(column.generated),) if with_generated else ())))
    fields = {"attnum": INT2, "attname": NAME, "atttypid": OID, "key": BOOL}
    return result(fields | ({"generated": BOOL} if with_generated else {}), rows)


def _row_filters(session: Session, values: Mapping[str, str]) -> Result:
    found = [covered.where for _, covered, table in published_by(session, values["names"]) if table.shape.oid == int(values["oid"])]
    return result({"pg_get_expr": TEXT}, [(where,) for where in dict.fromkeys(found)])


def _subscribed(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pubname": NAME}, [])


def _slot_exists(session: Session, values: Mapping[str, str]) -> Result:
    return result({"?column?": BOOL}, [(True,)] if values["name"] in session.publisher.slots else [])


_TABLES: Final = "FROM pg_publication p, LATERAL pg_get_publication_tables(p.pubname) gpt"
_ATTRIBUTES: Final = """FROM pg_catalog.pg_attribute a
    LEFT JOIN pg_catalog.pg_index i ON (i.indexrelid = pg_get_replica_identity_index({index}))
    WHERE a.attnum > 0::pg_catalog.int2 AND NOT a.attisdropped"""

QUERIES: Final = (
    known("SELECT t.pubname FROM pg_catalog.pg_publication t WHERE t.pubname IN ({names})", _publications),
    known("SELECT DISTINCT P.pubname AS pubname FROM pg_publication P, LATERAL pg_get_publication_tables(P.pubname) GPT ...", _subscribed),
    # before 15, 15, and from 16 on
    known("SELECT DISTINCT t.schemaname, t.tablename FROM pg_catalog.pg_publication_tables t WHERE t.pubname IN ({names})", _table_list),
    known(
        """SELECT DISTINCT t.schemaname, t.tablename , t.attnames{names_too} FROM pg_catalog.pg_publication_tables t
           WHERE t.pubname IN ({names})""",
        _table_list,
    ),
    known(
        """SELECT DISTINCT n.nspname, c.relname, gpt.attrs{numbers} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           JOIN (SELECT (pg_get_publication_tables(VARIADIC array_agg(pubname::text))).* FROM pg_publication
           WHERE pubname IN ({names})) AS gpt ON gpt.relid = c.oid""",
        _table_list,
    ),
    known(
        """SELECT c.oid, c.relreplident, c.relkind FROM pg_catalog.pg_class c
           INNER JOIN pg_catalog.pg_namespace n ON (c.relnamespace = n.oid) WHERE n.nspname = '{namespace}' AND c.relname = '{name}'""",
        _relation,
    ),
    known(
        f"""SELECT DISTINCT (CASE WHEN (array_length(gpt.attrs, 1) = c.relnatts) THEN NULL ELSE gpt.attrs END) {_TABLES}, pg_class c
            WHERE gpt.relid = {{oid}} AND c.oid = gpt.relid AND p.pubname IN ({{names}})""",
        _column_list,
    ),
    known(
        f"""SELECT a.attnum, a.attname, a.atttypid, a.attnum = ANY(i.indkey) {_ATTRIBUTES}
            AND a.attgenerated = '' AND a.attrelid = {{oid}} ORDER BY a.attnum""",
        _columns,
    ),
    known(
        f"""SELECT a.attnum, a.attname, a.atttypid, a.attnum = ANY(i.indkey), a.attgenerated != ''{{generated}} {_ATTRIBUTES}
            AND a.attrelid = {{oid}} ORDER BY a.attnum""",
        _columns,
    ),
    known(
        f"SELECT DISTINCT pg_get_expr(gpt.qual, gpt.relid) {_TABLES} WHERE gpt.relid = {{oid}} AND p.pubname IN ({{names}})", _row_filters
    ),
    known("SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = '{name}'", _slot_exists),
)
