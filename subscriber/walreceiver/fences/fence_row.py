"""The only row of the table ``subscriber.fence``: how a database was closed, and for a database that writers leave, how far the move is.

============  ============================================================  =======================================  =============
state         meaning                                                       becomes                                  closed
============  ============================================================  =======================================  =============
``begun``     a move away from this database has begun                      ``closed``, ``undone``                   no
``closed``    writers are kept out, and nothing is lost yet                 ``left``, ``undone``                     yes
``left``      writers are let into the other database: no way back          ``moved``, ``kept``                      yes
``undone``    this database is open again; the rest is not undone yet       no row                                   no
``moved``     the move is finished, and has a way back                      ``opened``                               yes
``barred``    the destination of a move that can be undone                  ``kept``, ``opened``                     yes
``kept``      no move uses it, or its command may have led writers here     ``opened``                               yes
``opened``    open; sessions that began before may be left                  no row                                   no
============  ============================================================  =======================================  =============

The first five are states of the source of a move, so this row is the record of the move; the others are states of its destination.
Each change of the state is made in the transaction that closes or opens the database, under a lock on the table, and only if the row has
the state, and is of the attempt, that the process expects. So a process that has lost its lock, and whose move another one has undone or
finished, changes nothing any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from subscriber.catalog.store import Store
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.session import Session

__all__ = [
    "LOCK",
    "FenceRow",
    "State",
    "begin_change",
    "drop_row",
    "fence_owner",
    "is_under_way",
    "read_row",
    "write_row",
]

_FORBIDDEN: Final = "42501"
LOCK: Final = "LOCK TABLE subscriber.fence IN SHARE ROW EXCLUSIVE MODE"
"""Others can read the row. A mode that keeps them out would also assign a transaction id, whose end the comparison of rows may wait for."""
_BEGIN: Final = "BEGIN READ WRITE; SET LOCAL synchronous_commit = local"
_COLUMNS: Final = ("owner", "attempt", "state", "kind", "before", "details")
_CREATE: Final = f"""
CREATE SCHEMA IF NOT EXISTS subscriber;
CREATE TABLE IF NOT EXISTS subscriber.fence
({", ".join(f"{name} text NOT NULL" for name in _COLUMNS)}, closed_at timestamptz, one bool PRIMARY KEY DEFAULT true CHECK (one))
"""
_SCHEMA_IS_EMPTY: Final = """
SELECT NOT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'subscriber'
)
"""


class State:
    """Names of the states."""

    BEGUN: Final = "begun"
    CLOSED: Final = "closed"
    LEFT: Final = "left"
    UNDONE: Final = "undone"
    MOVED: Final = "moved"
    BARRED: Final = "barred"
    KEPT: Final = "kept"
    OPENED: Final = "opened"
    UNDER_WAY: Final = frozenset({BEGUN, CLOSED, LEFT, UNDONE})


@dataclass(frozen=True, slots=True)
class FenceRow:
    """The row.

    Attributes:
        owner: the subscription whose cutover has made it: target and number.
        attempt: a number for each move that is begun.
        state: see the module's docstring.
        kind: how the database is closed.
        before: JSON: the database's own default_transaction_read_only, or its grants of CONNECT: oid of the role, its name, grant option.
        details: what has to be known later.
        seconds: since the database was closed; None: it was not.
    """

    owner: str
    attempt: str
    state: str
    kind: str
    before: str
    details: Mapping[str, Any]
    seconds: float | None


async def fence_owner(store: Store, oid: int) -> str:
    """What identifies a subscription in the row of a database that several targets may use."""
    async with store.reading() as rows:
        return f"{await rows.target_identifier()}/{oid}"


async def _exists(session: Session) -> bool:
    """Whether the database has the table."""
    return await session.execute("SELECT pg_catalog.to_regclass('subscriber.fence')") != [(None,)]


async def read_row(session: Session) -> FenceRow | None:
    """Read the row.

    Raises:
        ConfigurationError: another program has written it.
    """
    if not await _exists(session):
        return None
    rows = await session.execute(
        "SELECT owner, attempt, state, kind, before, details, extract(epoch FROM clock_timestamp() - closed_at) FROM subscriber.fence"
    )
    for owner, attempt, state, kind, before, text, seconds in rows:
        try:
            details = dict(json.loads(text or ""))
        except ValueError as error:
            raise ConfigurationError(f"the table subscriber.fence has a row of another program: {error}", hint="find out whose") from None
        elapsed = None if seconds is None else float(seconds)
        return FenceRow(owner or "", attempt or "", state or "", kind or "", before or "", details, elapsed)
    return None


async def begin_change(session: Session, *, readers: Sequence[str] = ()) -> FenceRow | None:
    """Begin a transaction that changes the row, and return it. No other process changes it until the end of the transaction.

    Args:
        session: in which the transaction is begun.
        readers: make schema and table, which these roles may use. None: a table that does not exist has no row to change.
    """
    await session.execute(_BEGIN)
    if readers:
        roles = ", ".join(map(quote_identifier, readers))
        await session.execute(
            f"{_CREATE}; GRANT USAGE, CREATE ON SCHEMA subscriber TO {roles}; GRANT SELECT ON subscriber.fence TO {roles}"
        )
    if await _exists(session):
        await session.execute(LOCK)
    return await read_row(session)


async def write_row(session: Session, row: FenceRow, commands: Sequence[str] = ()) -> None:
    """Make, update and commit the row, with the commands that close or open the database.

    Args:
        session: is in the transaction of :func:`begin_change`.
        row: its new values.
        commands: for the database. The time is noted if they close it.
    """
    values = ", ".join(map(quote_literal, (row.owner, row.attempt, row.state, row.kind, row.before, json.dumps(dict(row.details)))))
    closed_at = "pg_catalog.clock_timestamp()" if row.state in {State.CLOSED, State.BARRED} and commands else "NULL"
    changes = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
    await session.execute(
        f"INSERT INTO subscriber.fence VALUES ({values}, {closed_at}) ON CONFLICT (one) DO UPDATE SET {changes},"  # noqa: S608
        f" closed_at = coalesce(excluded.closed_at, fence.closed_at); {'; '.join([*commands, 'COMMIT'])}"
    )


async def drop_row(session: Session) -> None:
    """Drop the table, and the schema if it is empty."""
    await session.execute(f"{_BEGIN}; DROP TABLE IF EXISTS subscriber.fence; COMMIT")
    if await session.execute(_SCHEMA_IS_EMPTY) == [("t",)]:
        await session.execute("DROP SCHEMA subscriber")


async def is_under_way(session: Session, owner: str) -> bool:
    """Whether a move of this subscription away from this database was begun and is not finished."""
    try:
        found = await read_row(session)
    except PublisherError as error:
        if error.sqlstate != _FORBIDDEN:
            raise
        # the row of another subscription: its own roles may read it
        return False
    return found is not None and found.owner == owner and found.state in State.UNDER_WAY
