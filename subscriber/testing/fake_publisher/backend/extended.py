"""The extended query protocol, for the known queries: Parse, Bind, Describe, Execute, Close, Sync.

A parameter is put into the text as a literal before the query is recognized. Its value must come as text, or be an integer or text in the
binary format. Results are given in the text format, or in the binary one if the client wants that and the type is a number or text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from subscriber.protocol.quoting import quote_string
from subscriber.testing.fake_publisher.backend import wire
from subscriber.testing.fake_publisher.backend.results import CopyResult, Result
from subscriber.testing.fake_publisher.backend.statements import split_statements
from subscriber.testing.fake_publisher.catalog import find_query
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["ExtendedProtocol"]

_PARAMETER: Final = re.compile(r"\$(\d+)")
_TEXT: Final = 25
_INTEGERS: Final = {20: 8, 21: 2, 23: 4, 26: 4}
_SINGLE: Final = frozenset({16})


@dataclass(slots=True)
class _Statement:
    text: str
    types: list[int]


@dataclass(slots=True)
class _Portal:
    statement: str
    result_formats: list[int]
    found: Result | None = None
    given: int = 0


class ExtendedProtocol:
    """The statements and portals of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._statements: dict[str, _Statement] = {}
        self._portals: dict[str, _Portal] = {}
        self._skipping = False

    async def message(self, tag: bytes, body: bytes) -> None:
        """Handle a message. After an error all are skipped up to Sync."""
        session = self._session
        if tag == b"S":
            self._skipping = False
            session.write(wire.READY[session.status])
            await session.drain()
            return
        if tag == b"H":
            await session.drain()
            return
        if self._skipping:
            return
        try:
            await self._handle(tag, wire.Reader(body))
        except ServerError as error:
            if error.fatal:
                raise
            session.failed()
            self._skipping = True
            session.write(wire.error_response(error))

    async def _handle(self, tag: bytes, reader: wire.Reader) -> None:
        match tag:
            case b"P":
                name, text = reader.string(), reader.string()
                types = [reader.int32() for _ in range(reader.int16())]
                count = max((int(found) for found in _PARAMETER.findall(text)), default=0)
                types = [oid or _TEXT for oid in types] + [_TEXT] * (count - len(types))
                self._statements[name] = _Statement(text, types)
                self._session.write(wire.message(b"1"))
            case b"B":
                self._bind(reader)
            case b"D":
                await self._describe(reader.taken(1), reader.string())
            case b"E":
                await self._execute(reader.string(), reader.int32())
            case b"C":
                kind, name = reader.taken(1), reader.string()
                if kind == b"S":
                    self._statements.pop(name, None)
                else:
                    self._portals.pop(name, None)
                self._session.write(wire.message(b"3"))

    def _bind(self, reader: wire.Reader) -> None:
        portal, name = reader.string(), reader.string()
        statement = self._statement(name)
        formats = [reader.int16() for _ in range(reader.int16())]
        values: list[str] = []
        for place in range(reader.int16()):
            size = reader.int32()
            if size < 0:
                values.append("NULL")
                continue
            binary = formats[place if len(formats) > 1 else 0] == 1 if formats else False
            values.append(_literal(reader.taken(size), statement.types[place], binary=binary))
        results = [reader.int16() for _ in range(reader.int16())]

        def value(found: re.Match[str]) -> str:
            place = int(found[1]) - 1
            if place >= len(values):
                raise ServerError("08P01", f"bind message supplies {len(values)} parameters, but the statement needs more")
            return values[place]

        self._portals[portal] = _Portal(_PARAMETER.sub(value, statement.text), results)
        self._session.write(wire.message(b"2"))

    def _statement(self, name: str) -> _Statement:
        if name not in self._statements:
            raise ServerError("26000", f'prepared statement "{name}" does not exist')
        return self._statements[name]

    async def _describe(self, kind: bytes, name: str) -> None:
        session = self._session
        if kind == b"S":
            statement = self._statement(name)
            session.write(wire.parameter_description(statement.types))
            if not statement.text.lstrip().lower().startswith(("select", "show", "with")):
                session.write(wire.NO_DATA)
                return
            # with other values than the real ones: only the columns matter
            portal = _Portal(_PARAMETER.sub("'0'", statement.text), [])
            known = find_query(portal.statement)
            found = await self._run(portal) if known is None or known.query.described is None else known.query.described
        else:
            portal = self._portal(name)
            found = await self._run(portal)
        session.write(wire.NO_DATA if found.fields is None else wire.row_description(found.fields, _formats(portal, found)))

    def _portal(self, name: str) -> _Portal:
        if name not in self._portals:
            raise ServerError("34000", f'portal "{name}" does not exist')
        return self._portals[name]

    async def _run(self, portal: _Portal) -> Result:
        if portal.found is None:
            statements = split_statements(portal.statement)
            if not statements:
                portal.found = Result("")
                return portal.found
            found = await self._session.execute(statements[0])
            if isinstance(found, CopyResult):
                raise ServerError("0A000", "the fake publisher copies only with the simple query protocol")
            portal.found = found
        return portal.found

    async def _execute(self, name: str, limit: int) -> None:
        session, portal = self._session, self._portal(name)
        found = await self._run(portal)
        if not found.tag:
            session.write(wire.message(b"I"))
            return
        formats = _formats(portal, found)
        end = len(found.rows) if limit == 0 else portal.given + limit
        for row in found.rows[portal.given : end]:
            session.write(wire.data_row([_formatted(value, found, place, formats) for place, value in enumerate(row)]))
        portal.given = min(end, len(found.rows))
        session.write(wire.command_complete(found.tag) if limit == 0 or end > len(found.rows) else wire.message(b"s"))


def _formats(portal: _Portal, found: Result) -> Sequence[int]:
    """The format of each column: binary where the client wants it and we can write it."""
    fields = found.fields or ()
    wanted = portal.result_formats
    return [0] * len(fields) if not wanted else wanted * len(fields) if len(wanted) == 1 else wanted


def _formatted(value: bytes | None, found: Result, place: int, formats: Sequence[int]) -> bytes | None:
    if value is None or formats[place] == 0:
        return value
    oid = (found.fields or ())[place].type_oid
    if oid in _INTEGERS:
        return int(value).to_bytes(_INTEGERS[oid], "big", signed=oid != 26)
    if oid in _SINGLE:
        return b"\1" if value == b"t" else b"\0"
    return value


def _literal(data: bytes, oid: int, *, binary: bool) -> str:
    if binary and oid in _INTEGERS:
        return str(int.from_bytes(data, "big", signed=True))
    if binary and oid in _SINGLE:
        return "true" if data == b"\1" else "false"
    return quote_string(data.decode())
