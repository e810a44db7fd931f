"""COPY … TO STDOUT, and the checks of this program's subscriber around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from struct import pack
from typing import TYPE_CHECKING, Final

from subscriber.interfaces import TableName
from subscriber.testing.fake_publisher.backend.results import BOOL, CopyResult, Result, known, result
from subscriber.testing.fake_publisher.backend.wire import Field
from subscriber.testing.fake_publisher.replication.snapshots import TableContent
from subscriber.testing.fake_publisher.server_errors import ServerError
from subscriber.testing.fake_publisher.tables import FakeColumn, RowValues
from subscriber.testing.fake_publisher.values import binary_value

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_NAME: Final = re.compile(r'"(?:[^"]|"")*"|[^\s.,"()]+')
_FILTERED: Final = re.compile(
    r'(?P<columns>.*?) FROM (?P<only>ONLY )?(?P<table>(?:"(?:[^"]|"")*"|\w+)\.(?:"(?:[^"]|"")*"|\w+))(?: WHERE (?P<where>.*))?'
)
_ESCAPES: Final = {0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t", 0x0B: b"\\v"}
_SPECIAL: Final = re.compile(rb"[\\\x08\x0c\n\r\t\x0b]")
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + pack(">II", 0, 0)


def _names(text: str) -> list[str]:
    return [found[1:-1].replace('""', '"') if found.startswith('"') else found.lower() for found in _NAME.findall(text)]


def _copy_table(session: Session, values: Mapping[str, str]) -> CopyResult:
    return _copy(session, values["table"], _names(values.get("columns", "")), None, values.get("options", ""))


def _copy_query(session: Session, values: Mapping[str, str]) -> CopyResult:
    found = _FILTERED.fullmatch(values["query"])
    if found is None:
        raise ServerError("0A000", f"the fake publisher cannot copy this query: {values['query']}")
    return _copy(session, found["table"], _names(found["columns"]), found["where"], values.get("options", ""))


def _select(session: Session, values: Mapping[str, str]) -> Result:
    """The rows of a table, by a SELECT of its columns."""
    found = _FILTERED.fullmatch(values["query"])
    if found is None or found["where"] is not None:
        raise ServerError("0A000", f"the fake publisher does not know this query: SELECT {values['query']}")
    content = _content(session, found["table"])
    columns = [content.shape.columns[content.shape.places[name]] for name in _names(found["columns"]) if name in content.shape.places]
    places = [content.shape.places[column.name] for column in columns]
    rows = [[row[place] for place in places] for row in content.rows]
    return Result(f"SELECT {len(rows)}", tuple(Field(column.name, column.type_oid) for column in columns), rows)


def _copy(session: Session, table: str, columns: Sequence[str], where: str | None, options: str) -> CopyResult:
    content = _content(session, table)
    shape = content.shape
    for name in columns:
        if name not in shape.places:
            raise ServerError("42703", f'column "{name}" of relation "{shape.name.name}" does not exist')
    binary = "binary" in options.lower()
    chosen = [shape.places[name] for name in columns] if columns else [shape.places[c.name] for c in shape.columns if not c.generated]
    rows: Sequence[RowValues] = content.rows
    if where is not None:
        rows = [row for row in rows if session.publisher.passes(shape, where, row)]
    session.read_tables.add(shape.oid)
    described = [shape.columns[place] for place in chosen]
    cut = [[row[place] for place in chosen] for row in rows]
    lines = _binary(session, described, cut) if binary else map(_text_line, cut)
    return CopyResult(len(chosen), binary, lines, len(cut))


def _content(session: Session, table: str) -> TableContent:
    names = _names(table)
    name = TableName(names[0] if len(names) > 1 else "public", names[-1])
    found = session.publisher.tables.get(name)
    if found is None:
        raise ServerError("42P01", f'relation "{name}" does not exist')
    snapshot = session.snapshot or session.publisher.snapshot("")
    if session.status == "T":
        # all clients copy in REPEATABLE READ
        session.snapshot = snapshot
    return snapshot.tables.get(found.shape.oid) or TableContent(found.shape, ())


def _text_line(row: Sequence[bytes | None]) -> bytes:
    return b"\t".join(b"\\N" if value is None else _SPECIAL.sub(lambda found: _ESCAPES[found[0][0]], value) for value in row) + b"\n"


def _binary(session: Session, columns: Sequence[FakeColumn], rows: Sequence[Sequence[bytes | None]]) -> Iterator[bytes]:
    types = session.publisher.types
    # the header comes with the first row, as from a server
    head = _SIGNATURE
    for row in rows:
        parts = [head, pack(">h", len(row))]
        for column, value in zip(columns, row, strict=True):
            if value is None:
                parts.append(b"\xff\xff\xff\xff")
                continue
            data = binary_value(types, column.type_oid, column.modifier, value)
            if data is None:
                raise ServerError("42883", f"no binary output function available for type {types.registry.resolve(column.type_oid)}")
            parts += [pack(">I", len(data)), data]
        yield b"".join(parts)
        head = b""
    if head:
        yield head
    yield b"\xff\xff"


def _has_name(session: Session, name: str, oid: str) -> bool:
    names = _names(name)
    found = session.publisher.tables.get(TableName(names[0], names[1]))
    return found is not None and found.shape.oid == int(oid)


def _checked(session: Session, values: Mapping[str, str]) -> Result:
    held = int(values["held"]) in session.read_tables
    return result({"same": BOOL, "held": BOOL}, [(_has_name(session, values["name"], values["oid"]), held)])


def _whole(session: Session, values: Mapping[str, str]) -> Result:
    held = int(values["oid"]) in session.read_tables
    return result({"whole": BOOL}, [(held and _has_name(session, values["name"], values["oid"]),)])


def _renamed(session: Session, values: Mapping[str, str]) -> Result:
    return result({"renamed": BOOL}, [(not _has_name(session, values["name"], values["oid"]),)])


def _nothing(session: Session, values: Mapping[str, str]) -> Result:
    return result({"found": BOOL}, [])


_HAS_NAME: Final = "COALESCE(pg_catalog.to_regclass('{name}')::pg_catalog.oid = {oid}, false)"

QUERIES: Final = (
    known("COPY (SELECT {query}) TO STDOUT WITH ({options})", _copy_query),
    known("COPY (SELECT {query}) TO STDOUT", _copy_query),
    known("COPY {table} ({columns}) TO STDOUT WITH ({options})", _copy_table),
    known("COPY {table} ({columns}) TO STDOUT", _copy_table),
    known("COPY {table} TO STDOUT WITH ({options})", _copy_table),
    known("COPY {table} TO STDOUT", _copy_table),
    known(
        f"""SELECT {_HAS_NAME} AND NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE ...),
            EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND relation = {{held}} AND pid = ...)""",
        _checked,
    ),
    known(f"SELECT {_HAS_NAME} AND NOT EXISTS (...) AND EXISTS (...) AND NOT (...) AND NOT EXISTS (...)", _whole),
    known(f"SELECT (NOT {_HAS_NAME} OR NOT EXISTS (...))", _renamed),
    known(
        "SELECT FROM pg_catalog.pg_class AS c WHERE (c.oid = ... OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(...", _nothing
    ),
    known("SELECT c.oid, pg_catalog.sum(pg_catalog.pg_relation_size(leaf.oid)) / ... HAVING ...", _nothing),
    # its tables have no blocks, so each is copied as one part
    known("SELECT c.oid, n.nspname, c.relname, pg_catalog.pg_relation_size(c.oid), ... ORDER BY n.nspname, c.relname", _nothing),
    known("SELECT {query}", _select),
)
