"""The queries of Debezium's PostgreSQL connector (3.6) and of the JDBC driver (42.7) below it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import BOOL, INT2, INT4, INT8, NAME, OID, TEXT, Result, known, result
from subscriber.testing.fake_publisher.replication.slots import slot_row
from subscriber.testing.fake_publisher.tables import FakeTable
from subscriber.types import TypeFact, TypeKind

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_CHAR: Final = 18
_TEXT_ARRAY: Final = 1009
_TIMESTAMPTZ: Final = 1184
_LSN: Final = 3220
_XID8: Final = 5069
_LIKE: Final = re.compile(r"(nspname|relname) LIKE '((?:[^']|'')*)'")
_SLOT_TYPES: Final = {"slot_name": NAME, "plugin": NAME, "temporary": BOOL, "active": BOOL, "active_pid": INT4, "two_phase": BOOL}


def _whoami(session: Session, values: Mapping[str, str]) -> Result:
    version = f"PostgreSQL {session.publisher.version_text} (fake publisher)"
    return result({"version": TEXT, "current_user": NAME, "current_database": NAME}, [(version, session.user, session.database)])


def _roles(session: Session, values: Mapping[str, str]) -> Result:
    flags = ("rolsuper", "rolinherit", "rolcreaterole", "rolcreatedb", "rolcanlogin", "rolreplication")
    return result({"oid": OID, "rolname": NAME} | dict.fromkeys(flags, BOOL), [(10, session.user, *([True] * len(flags)))])


def _cloud_roles(session: Session, values: Mapping[str, str]) -> Result:
    names = ("rolcanlogin", "rolreplication", "aws_superuser", "aws_admin", "aws_repladmin", "aws_replication")
    return result(dict.fromkeys(names, BOOL), [(True, True, False, False, False, False)])


def _types(session: Session, values: Mapping[str, str]) -> Result:
    fields = {"oid": OID, "name": NAME, "schema_name": NAME, "element": OID, "parentoid": OID, "modifiers": INT4, "category": _CHAR}
    rows = []
    for fact in session.publisher.types.all():
        element = fact.element if fact.kind is TypeKind.ARRAY else 0
        base = fact.element if fact.kind is TypeKind.DOMAIN else 0
        category = {TypeKind.ARRAY: "A", TypeKind.ENUM: "E", TypeKind.RANGE: "R", TypeKind.COMPOSITE: "C"}.get(fact.kind, "U")
        labels = "{" + ",".join(f'"{label}"' for label in fact.labels) + "}" if fact.labels else None
        rows.append((fact.oid, fact.name, fact.namespace, element, base, fact.modifier, category, labels))
    return result(fields | {"enum_values": _TEXT_ARRAY}, rows)


def _typtype(fact: TypeFact) -> str:
    return "b" if fact.kind is TypeKind.ARRAY else fact.kind.value


def _known_types(session: Session, values: Mapping[str, str]) -> Result:
    rows = [(fact.name, fact.kind is TypeKind.ARRAY, _typtype(fact), 1, fact.oid) for fact in session.publisher.types.all()]
    return result({"typname": NAME, "?column?": BOOL, "typtype": _CHAR, "r": INT4, "oid": OID}, sorted(rows))


def _slot(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    rows = [
        slot_row(slot, publisher.caps)
        for slot in publisher.slots.values()
        if (slot.name, slot.database, slot.plugin) == (values["name"], values["database"], values["plugin"])
    ]
    columns = {name: _SLOT_TYPES.get(name, _LSN if name.endswith("_lsn") else TEXT) for name in (rows[0] if rows else {"slot_name": None})}
    return result(columns, [list(row.values()) for row in rows])


def _all_tables(session: Session, values: Mapping[str, str]) -> Result:
    publication = session.publisher.publications.get(values["name"])
    return result({"puballtables": BOOL}, [] if publication is None else [(publication.all_tables,)])


def _matching(session: Session, conditions: str) -> Iterator[FakeTable]:
    """The tables whose names are LIKE the patterns."""
    patterns = {what: _pattern(text.replace("''", "'")) for what, text in _LIKE.findall(conditions)}
    for name, table in sorted(session.publisher.tables.items(), key=lambda item: (item[0].namespace, item[0].name)):
        if all(pattern.fullmatch(name.namespace if what == "nspname" else name.name) for what, pattern in patterns.items()):
            yield table


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.findall(r"\\.|[%_]|[^\\%_]+", text, re.DOTALL)
    return re.compile("".join({"%": ".*", "_": "."}.get(part) or re.escape(part.removeprefix("\\")) for part in parts), re.DOTALL)


def _tables(session: Session, values: Mapping[str, str]) -> Result:
    names = ["TABLE_CAT", "TABLE_SCHEM", "TABLE_NAME", "TABLE_TYPE", "REMARKS", "TYPE_CAT", "TYPE_SCHEM", "TYPE_NAME"]
    names += ["SELF_REFERENCING_COL_NAME", "REF_GENERATION"]
    rows = [
        (session.database, table.shape.name.namespace, table.shape.name.name, "TABLE", None, "", "", "", "", "")
        for table in _matching(session, values["conditions"])
    ]
    return result(dict.fromkeys(names, TEXT), rows)


def _columns(session: Session, values: Mapping[str, str]) -> Result:
    fields = {"current_database": NAME, "nspname": NAME, "relname": NAME, "attname": NAME, "atttypid": OID, "attnotnull": BOOL}
    fields |= {"atttypmod": INT4, "attlen": INT2, "typtypmod": INT4, "attnum": INT8, "attidentity": _CHAR, "attgenerated": _CHAR}
    fields |= {"adsrc": TEXT, "description": TEXT, "typbasetype": OID, "typtype": _CHAR}
    rows: list[tuple[object, ...]] = []
    for table in _matching(session, values["conditions"]):
        name = (session.database, table.shape.name.namespace, table.shape.name.name)
        for place, column in enumerate(table.shape.columns, 1):
            fact = session.publisher.types.fact(column.type_oid)
            base = fact.element if fact.kind is TypeKind.DOMAIN else 0
            declared = (column.name, column.type_oid, column.not_null, column.modifier, -1, fact.modifier, place)
            rows.append((*name, *declared, None, column.generated or None, None, None, base, _typtype(fact)))
    return result(fields, rows)


def _primary_key(session: Session, values: Mapping[str, str]) -> Result:
    fields = {"TABLE_CAT": NAME, "TABLE_SCHEM": NAME, "TABLE_NAME": NAME, "COLUMN_NAME": NAME, "KEY_SEQ": INT4, "PK_NAME": NAME}
    rows: list[tuple[object, ...]] = []
    for name, table in session.publisher.tables.items():
        if (name.namespace, name.name) == (values["namespace"], values["name"]):
            for place, column in enumerate(table.shape.primary_key, 1):
                rows.append((session.database, name.namespace, name.name, column, place, f"{name.name}_pkey"))
    return result(fields, rows)


def _unique_indexes(session: Session, values: Mapping[str, str]) -> Result:
    """Debezium asks for the unique indexes of a table without a primary key. Here that can be the index of the replica identity."""
    names = ["TABLE_CAT", "TABLE_SCHEM", "TABLE_NAME", "NON_UNIQUE", "INDEX_QUALIFIER", "INDEX_NAME", "TYPE", "ORDINAL_POSITION"]
    names += ["COLUMN_NAME", "ASC_OR_DESC", "CARDINALITY", "PAGES", "FILTER_CONDITION", "REMARKS"]
    types = {"NON_UNIQUE": BOOL, "TYPE": INT4, "ORDINAL_POSITION": INT4, "CARDINALITY": INT8, "PAGES": INT4}
    rows = [
        (session.database, name.namespace, name.name, False, None, f"{name.name}_key", 3, place, column, "A", 0, 1, None, None)
        for name, table in session.publisher.tables.items()
        if (name.namespace, name.name) == (values["namespace"], values["name"])
        for place, column in enumerate(table.shape.identity_index, 1)
    ]
    return result({name: types.get(name, TEXT) for name in names}, rows)


def _identity(session: Session, values: Mapping[str, str]) -> Result:
    found = [
        (table.shape.replica_identity,)
        for name, table in session.publisher.tables.items()
        if (name.namespace, name.name) == (values["namespace"], values["name"])
    ]
    return result({"relreplident": _CHAR}, found)


def _wal_end(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pg_current_wal_lsn": _LSN}, [(session.publisher.wal.end,)])


def _xid(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pg_current_txid": _XID8}, [(session.publisher.next_xid(),)])


def _catalog(session: Session, values: Mapping[str, str]) -> Result:
    return result({"current_catalog": NAME}, [(session.database,)])


def _time(session: Session, values: Mapping[str, str]) -> Result:
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None).isoformat(" ")
    return result({"current_timestamp": _TIMESTAMPTZ}, [(f"{now}+00",)])


QUERIES: Final = (
    known("SELECT version(), current_user, current_database()", _whoami),
    known("SELECT oid, rolname, rolsuper, ..., rolreplication FROM pg_roles WHERE pg_has_role('...', oid, 'member')", _roles),
    known("SELECT r.rolcanlogin AS rolcanlogin, r.rolreplication AS rolreplication, ... FROM pg_roles r WHERE ...", _cloud_roles),
    known("SELECT DISTINCT ON (typname) typname, typinput='array_in'::regproc, typtype, sp.r, pg_type.oid FROM ...", _known_types),
    known("SELECT t.oid AS oid, t.typname AS name, n.nspname AS schema_name, ..., e.values as enum_values FROM ...", _types),
    known(
        "select * from pg_replication_slots where slot_name = '{name}' and database = '{database}' and plugin = '{plugin}'",
        _slot,
    ),
    known("SELECT puballtables FROM pg_publication WHERE pubname = '{name}'", _all_tables),
    known(
        """SELECT current_database() AS "TABLE_CAT", n.nspname AS "TABLE_SCHEM", ... WHERE c.relnamespace = n.oid {conditions}
           ORDER BY "TABLE_TYPE","TABLE_SCHEM","TABLE_NAME\"""",
        _tables,
    ),
    known(
        """SELECT * FROM (SELECT current_database() AS current_database, n.nspname,c.relname,a.attname,a.atttypid,...
           AND NOT a.attisdropped{conditions}) c WHERE true ORDER BY nspname,c.relname,attnum""",
        _columns,
    ),
    known(
        """SELECT result.TABLE_CAT AS "TABLE_CAT", ... WHERE con.contype = 'p' AND n.nspname = '{namespace}'
           AND ct.relname = '{name}') ...""",
        _primary_key,
    ),
    known(
        """SELECT tmp.TABLE_CAT AS "TABLE_CAT", ... WHERE true AND n.nspname = '{namespace}' AND ct.relname = '{name}' AND i.indisunique)
           AS tmp ...""",
        _unique_indexes,
    ),
    known(
        """SELECT relreplident FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_namespace n ON c.relnamespace=n.oid
           WHERE n.nspname='{namespace}' and c.relname='{name}'""",
        _identity,
    ),
    known(
        """select (case pg_is_in_recovery() when 't' then pg_last_wal_receive_lsn() else pg_current_wal_lsn() end)
           AS pg_current_wal_lsn""",
        _wal_end,
    ),
    known("select (case pg_is_in_recovery() when 't' then ... end) AS pg_current_txid", _xid),
    known("select current_catalog", _catalog),
    known("SELECT CURRENT_TIMESTAMP", _time),
)
