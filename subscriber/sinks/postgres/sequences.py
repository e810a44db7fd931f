"""Set the sequences of a PostgreSQL target to those of the publisher.

Each sequence is set in one transaction. ALTER SEQUENCE comes first. It takes a lock that conflicts with ``nextval``, so the sequence cannot
move between the comparison and the end; and it gives the sequence a new file, so that ``setval`` is undone by a rollback, and sessions of
the target forget the values in their caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.interfaces.sequences import PublishedSequence, SequenceResult, SequenceState
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.target import Target

__all__ = ["set_sequences"]

_APPLICATION: Final = "subscriber sequences"
_SETTINGS: Final = {"synchronous_commit": "on", "lock_timeout": "10s"}
_LOCK_NOT_AVAILABLE: Final = "55P03"

# all sequences, with the columns that own them
_FIND: Final = """
SELECT n.nspname::text, c.relname::text, pg_catalog.format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmin, s.seqmax,
       s.seqcache, s.seqcycle, pg_catalog.pg_has_role(c.relowner, 'USAGE'), current_user::text, c.oid::int8,
       owner.nspname::text, owner.relname::text, owner.attname::text
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_sequence AS s ON s.seqrelid = c.oid
LEFT JOIN (
    SELECT d.objid, tn.nspname, tc.relname, a.attname FROM pg_catalog.pg_depend AS d
    JOIN pg_catalog.pg_class AS tc ON tc.oid = d.refobjid
    JOIN pg_catalog.pg_namespace AS tn ON tn.oid = tc.relnamespace
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tc.oid AND a.attnum = d.refobjsubid
    WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
      AND d.deptype IN ('a', 'i')) AS owner ON owner.objid = c.oid
"""


@dataclass(frozen=True, slots=True)
class _There:
    """A sequence of the target."""

    name: TableName
    type: str
    options: tuple[int, int, int, int, int, bool]
    may_alter: bool
    role: str
    oid: int

    def result(self, wanted: PublishedSequence, state: SequenceState, reason: str | None = None) -> SequenceResult:
        next_value = wanted.next_value if state is SequenceState.SET else None
        return SequenceResult(sequence=wanted.name, state=state, place=f"sequence {self.name}", next_value=next_value, reason=reason)


async def set_sequences(conninfo: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool) -> list[SequenceResult]:
    """Set the sequences. A sequence that cannot be set does not keep others from being set.

    Raises:
        ConfigurationError: ``conninfo`` is neither a URL nor a conninfo.
        TargetUnavailable, TargetError: no session with the target.
    """
    connection = await Target(conninfo).connect(_APPLICATION, _SETTINGS)
    try:
        known = await _read(connection)
        return [await _set(connection, known, wanted, force=force, dry_run=dry_run) for wanted in sequences]
    finally:
        await connection.close()


async def _set(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], known: _Known, wanted: PublishedSequence, *, force: bool, dry_run: bool
) -> SequenceResult:
    there = known.owned.get(wanted.columns[0]) if wanted.columns else None
    there = there or known.named.get(wanted.name)
    if there is None:
        reason = "it does not exist in the target: create it there"
        return SequenceResult(sequence=wanted.name, state=SequenceState.MISSING, reason=reason)
    if not there.may_alter:
        reason = f'role "{there.role}" does not own it: connect as its owner, or grant the owner\'s role to "{there.role}"'
        return there.result(wanted, SequenceState.LEFT, reason)
    if not wanted.fits(there.type):
        reason = f"its type {there.type} cannot have the values and bounds of the publisher: ALTER SEQUENCE … AS {wanted.type}"
        return there.result(wanted, SequenceState.LEFT, reason)
    try:
        return await _compare_and_set(connection, there, wanted, force=force, dry_run=dry_run)
    except TargetError as error:
        if isinstance(error, TargetUnavailable) and error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        with translated():
            await connection.execute("ROLLBACK")
        return there.result(wanted, SequenceState.LEFT, error.one_line())


@dataclass(frozen=True, slots=True)
class _Known:
    """The target's sequences, by the column that owns them, and by name."""

    owned: Mapping[tuple[TableName, str], _There]
    named: Mapping[TableName, _There]


async def _read(connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> _Known:
    owned, named = dict[tuple[TableName, str], _There](), dict[TableName, _There]()
    with translated():
        cursor = await connection.execute(_FIND)
        rows = await cursor.fetchall()
    for namespace, name, kind, *options, may_alter, role, oid, schema, table, column in rows:
        there = _There(TableName(namespace, name), kind, tuple(options), may_alter, role, oid)
        named[there.name] = there
        if column is not None:
            owned[TableName(schema, table), column] = there
    return _Known(owned, named)


async def _compare_and_set(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], there: _There, wanted: PublishedSequence, *, force: bool, dry_run: bool
) -> SequenceResult:
    minimum, maximum = wanted.bounds(there.type)
    options = (wanted.start, wanted.increment, minimum, maximum, wanted.cache, wanted.cycle)
    value, called = await _value(connection, there)
    if options == there.options and (value, called) == (wanted.last_value, wanted.is_called):
        return there.result(wanted, SequenceState.EQUAL)
    if not dry_run:
        with translated():
            await connection.execute(f"BEGIN; ALTER SEQUENCE {there.name.quoted} CACHE {wanted.cache}".encode())
        value, called = await _value(connection, there)
    if not force and (reason := _ahead(there, wanted, value, called=called)) is not None:
        if not dry_run:
            with translated():
                await connection.execute("ROLLBACK")
        return there.result(wanted, SequenceState.LEFT, reason)
    if not dry_run:
        with translated():
            await connection.execute(
                f"ALTER SEQUENCE {there.name.quoted} INCREMENT {wanted.increment} MINVALUE {minimum} MAXVALUE {maximum}"
                f" START {wanted.start} {'' if wanted.cycle else 'NO '}CYCLE RESTART {wanted.last_value};"
                f"SELECT pg_catalog.setval({there.oid}::pg_catalog.oid::pg_catalog.regclass, {wanted.last_value}, {wanted.is_called});"
                "COMMIT".encode()
            )
    return there.result(wanted, SequenceState.SET)


async def _value(connection: psycopg.AsyncConnection[tuple[Any, ...]], there: _There) -> tuple[int, bool]:
    with translated():
        cursor = await connection.execute(f"SELECT last_value, is_called FROM {there.name.quoted}".encode())  # noqa: S608
        ((value, called),) = await cursor.fetchall()
    return value, called


def _ahead(there: _There, wanted: PublishedSequence, value: int, *, called: bool) -> str | None:
    """Why the target's sequence would go back; None: it would not."""
    direction = 1 if wanted.increment > 0 else -1
    if called and there.options[1] * direction < 0:
        return "it counts in the other direction, and was used: values could repeat (`subscriber sequences --force` sets it)"
    following = value + (wanted.increment if called else 0)
    if following * direction > wanted.next_value * direction:
        values = f"whose next value is {wanted.next_value}, and here it is {following}"
        return f"it is ahead of the publisher, {values} (`subscriber sequences --force` sets it back)"
    return None
