"""Rows of the catalog: what the target knows of one subscription. Every change is on disk when its call returns."""

# names are quoted or ours, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from subscriber.abc import Position, SubscriptionState, TableEntry, TableName, TableState
from subscriber.errors import RelationError, SubscriptionChanged, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.integrity import known_table_state, known_two_phase
from subscriber.sinks.postgres.session import ApplySession

__all__ = ["SubscriptionRows"]

_SUBSCRIPTION: Final = """
SELECT s.oid::int8, s.subname::text, c.system_identifier::text, s.subslotname::text, s.subpublications, s.subtwophasestate::text,
       s.subconninfo IS NOT NULL, s.subskiplsn::text, s.subgeneration, s.subrefresh,
       p.slot_name, p.system_identifier, p.timeline, p.remote_lsn::text
FROM subscriber.pg_subscription s
CROSS JOIN pg_catalog.pg_control_system() c
LEFT JOIN subscriber."position" p ON p.srsubid = s.oid AND p.srrelid = 0
WHERE s.oid = %s::int8::oid
"""

_TABLES: Final = """
SELECT r.srrelid::int8, n.nspname::text, c.relname::text, r.srsubstate::text, r.srsublsn::text
FROM subscriber.pg_subscription_rel r
LEFT JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE r.srsubid = %s::int8::oid
"""

_FIND: Final = """
SELECT n.nspname::text, c.relname::text, c.oid::int8, c.relkind::text
FROM ROWS FROM (pg_catalog.unnest(%s::text[]::name[]), pg_catalog.unnest(%s::text[]::name[])) AS wanted(nspname, relname)
JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.nspname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
"""

_ADD: Final = """
INSERT INTO subscriber.pg_subscription_rel (srsubid, srrelid, srsubstate, srsublsn)
SELECT %s::int8::oid, relid::oid, %s::text::"char", %s::pg_lsn FROM pg_catalog.unnest(%s::int8[]) AS relid
ON CONFLICT (srsubid, srrelid) DO UPDATE SET srsubstate = excluded.srsubstate, srsublsn = excluded.srsublsn
"""

_READY: Final = """
UPDATE subscriber.pg_subscription_rel AS r SET srsubstate = 'r', srsublsn = passed.lsn::pg_lsn
FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::text[])) AS passed(relid, lsn)
WHERE r.srsubid = %s::int8::oid AND r.srrelid = passed.relid::oid AND r.srsubstate::text = 's'
"""

_SAVE_POSITION: Final = """
INSERT INTO subscriber."position" (srsubid, srrelid, slot_name, system_identifier, timeline, remote_lsn)
VALUES (%s::int8::oid, %s::int8::oid, %s, %s, %s, %s::pg_lsn)
ON CONFLICT (srsubid, srrelid) DO UPDATE SET slot_name = excluded.slot_name, system_identifier = excluded.system_identifier,
    timeline = excluded.timeline, remote_lsn = excluded.remote_lsn
"""

_WITH_LSN: Final = frozenset({TableState.SYNCDONE, TableState.READY})


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


class SubscriptionRows:
    """One subscription's rows, through the session that holds the lock on what is changed."""

    def __init__(self, session: ApplySession, oid: int) -> None:
        self._session = session
        self.oid = oid

    async def subscription(self) -> SubscriptionState:
        """Read the subscription.

        Raises:
            SubscriptionChanged: it is gone.
        """
        rows = await self._session.fetch(_SUBSCRIPTION, self.oid)
        if not rows:
            raise SubscriptionChanged(f"subscription with oid {self.oid} does not exist in the target", hint="it was dropped just now")
        oid, name, target, slot, publications, two_phase, managed, skip_lsn, generation, refresh, *position = rows[0]
        return SubscriptionState(
            oid=oid,
            name=name,
            target_identifier=target,
            slot_name=slot,
            publications=tuple(publications or ()),
            two_phase=known_two_phase(two_phase),
            position=_position(position),
            managed=managed,
            skip_lsn=Lsn.parse(skip_lsn or "0/0"),
            generation=generation,
            pending_refresh=refresh,
        )

    async def update_subscription(self, assignments: str, *values: object) -> None:
        """Set columns of the subscription."""
        async with self._session.transaction():
            await self._session.fetch(f"UPDATE subscriber.pg_subscription SET {assignments} WHERE oid = %s::int8::oid", *values, self.oid)

    async def position(self, relid: int) -> Position | None:
        """Read the position of the subscription (0) or of a table."""
        rows = await self._session.fetch(
            'SELECT slot_name, system_identifier, timeline, remote_lsn::text FROM subscriber."position" '
            "WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid",
            self.oid,
            relid,
        )
        return _position(rows[0]) if rows else None

    async def slot_names(self) -> frozenset[str]:
        """The slots of all its positions."""
        rows = await self._session.fetch('SELECT slot_name FROM subscriber."position" WHERE srsubid = %s::int8::oid', self.oid)
        return frozenset(name for (name,) in rows)

    async def save_position(self, relid: int, position: Position) -> None:
        """Store a position, in the transaction that is open if one is."""
        await self._session.fetch(
            _SAVE_POSITION, self.oid, relid, position.slot_name, position.system_identifier, position.timeline, str(position.lsn)
        )

    async def forget_position(self, relid: int) -> None:
        """Remove a table's position, in the transaction that is open if one is."""
        await self._session.fetch(
            'DELETE FROM subscriber."position" WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid', self.oid, relid
        )

    async def move_position(self, lsn: Lsn) -> None:
        """Move the subscription's position forward, in the transaction that is open if one is.

        Raises:
            TargetError: there is none.
        """
        moved = await self._session.fetch(
            'UPDATE subscriber."position" SET remote_lsn = greatest(remote_lsn, %s::pg_lsn) '
            "WHERE srsubid = %s::int8::oid AND srrelid = 0 RETURNING 1",
            str(lsn),
            self.oid,
        )
        if not moved:
            raise TargetError(
                f"the target has no position of subscription {self.oid}", hint="was the subscription dropped? start it with a new name"
            )

    async def clear_skip(self) -> None:
        """Forget the transaction to be skipped, in the transaction that is open if one is."""
        await self._session.fetch("UPDATE subscriber.pg_subscription SET subskiplsn = '0/0' WHERE oid = %s::int8::oid", self.oid)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables; those dropped in the target are removed."""
        found: dict[TableName, TableEntry] = {}
        dropped: list[int] = []
        for relid, namespace, name, state, lsn in await self._session.fetch(_TABLES, self.oid):
            if name is None:
                dropped.append(relid)
            else:
                found[TableName(namespace, name)] = _entry(state, lsn)
        for relid in dropped:
            await self.remove(relid)
        return found

    async def in_state(self, state: TableState) -> list[int]:
        """Oids of the tables in a state."""
        rows = await self._session.fetch(
            "SELECT srrelid::int8 FROM subscriber.pg_subscription_rel WHERE srsubid = %s::int8::oid AND srsubstate::text = %s",
            self.oid,
            state.value,
        )
        return [relid for (relid,) in rows]

    async def find_table(self, table: TableName) -> int:
        """The oid of a table of the target that may be subscribed to.

        Raises:
            RelationError: native's words.
        """
        found = (await self.find_tables([table]))[table]
        if isinstance(found, RelationError):
            raise found
        return found

    async def find_tables(self, tables: Sequence[TableName]) -> Mapping[TableName, int | RelationError]:
        """The oid of each, or why it may not be subscribed to."""
        rows = await self._session.fetch(_FIND, [table.namespace for table in tables], [table.name for table in tables])
        known = {TableName(namespace, name): (relid, kind) for namespace, name, relid, kind in rows}
        return {table: _usable(table, *known.get(table, (0, ""))) for table in tables}

    async def add_tables(self, relids: Sequence[int], entry: TableEntry) -> None:
        """Add tables, or set their state if they are there."""
        lsn = None if entry.lsn is None else str(entry.lsn)
        async with self._session.transaction():
            await self._session.fetch(_ADD, self.oid, entry.state.value, lsn, relids)

    async def set_ready(self, tables: Mapping[int, Lsn]) -> None:
        """SYNCDONE to READY."""
        async with self._session.transaction():
            await self._session.fetch(_READY, list(tables), [str(lsn) for lsn in tables.values()], self.oid)

    async def remove(self, relid: int) -> None:
        """Forget a table, with its position and what a copy noted."""
        async with self._session.transaction():
            for name in ("pg_subscription_rel", '"position"', "copy_part"):
                await self._session.fetch(
                    f"DELETE FROM subscriber.{name} WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid",
                    self.oid,
                    relid,
                )

    async def entry(self, relid: int) -> TableEntry | None:
        """State of one table."""
        rows = await self._session.fetch(
            "SELECT srsubstate::text, srsublsn::text FROM subscriber.pg_subscription_rel "
            "WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid",
            self.oid,
            relid,
        )
        return _entry(*rows[0]) if rows else None

    async def set_entry(self, relid: int, entry: TableEntry, *, only_from: TableState) -> bool:
        """Change a table's state if it is ``only_from``, in the transaction that is open if one is; tell whether it was."""
        rows = await self._session.fetch(
            'UPDATE subscriber.pg_subscription_rel SET srsubstate = %s::text::"char", srsublsn = %s::pg_lsn '
            "WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid AND srsubstate::text = %s RETURNING 1",
            entry.state.value,
            None if entry.lsn is None else str(entry.lsn),
            self.oid,
            relid,
            only_from.value,
        )
        return bool(rows)


def _usable(table: TableName, relid: int, kind: str) -> int | RelationError:
    if not relid:
        hint = "create the table in the target with the publisher's columns"
        return RelationError(f'relation "{table}" does not exist', sqlstate="42P01", hint=hint)
    if kind not in {"r", "p"}:
        hint = "only tables and partitioned tables can be targets"
        return RelationError(f'cannot use relation "{table}" as logical replication target', sqlstate="42809", hint=hint)
    return relid


def _entry(state: str, lsn: str | None) -> TableEntry:
    found = known_table_state(state)
    return TableEntry(found, _lsn(lsn) if found in _WITH_LSN else None)


def _position(row: Sequence[Any]) -> Position | None:
    slot_name, system_identifier, timeline, lsn = row
    return None if lsn is None else Position(slot_name, system_identifier, timeline, Lsn.parse(lsn))
