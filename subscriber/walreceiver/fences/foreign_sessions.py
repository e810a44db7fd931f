"""The sessions of a database that are not this program's: those that a fence ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.protocol.quoting import quote_literal
from subscriber.protocol.session_name import session_marks
from subscriber.walreceiver.session import Session

__all__ = ["ForeignSession", "ForeignSessions"]

_OTHER_PROGRAM: Final = "subscriber "
"""How the names of sessions begin that belong to no subscription."""


@dataclass(frozen=True, slots=True)
class ForeignSession:
    """A session of a client.

    Attributes:
        pid: its process id.
        role: its role.
        may_end: whether this role may end it, and knows enough about it to do so.
    """

    pid: str
    role: str
    may_end: bool

    @property
    def text(self) -> str:
        """What it is, for messages."""
        return f'session {self.pid} of role "{self.role}"'


class ForeignSessions:
    """Finds the sessions of the current database that are not this program's.

    Args:
        subscriptions: names of subscriptions and slots; the sessions of this program bear them.
        roles: the roles of this program.
        names: values of application_name that its connection strings set.
    """

    def __init__(self, subscriptions: Sequence[str], *, roles: Sequence[str], names: Sequence[str]) -> None:
        marks = [session_marks(name) for name in subscriptions]
        starts = [_OTHER_PROGRAM, *(start for start, _ in marks)]
        own = [
            f"a.application_name IN ({', '.join(map(quote_literal, [*subscriptions, *names]))})",
            *(f"pg_catalog.starts_with(a.application_name, {quote_literal(start)})" for start in starts),
            *(f"pg_catalog.strpos(a.application_name, {quote_literal(mark)}) > 0" for _, mark in marks),
        ]
        self._condition = f"""
            a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
            AND NOT (a.usename IN ({", ".join(map(quote_literal, roles))}) AND ({" OR ".join(own)}))
        """

    async def find(self, session: Session, condition: str = "true") -> list[ForeignSession]:
        """Sessions of clients.

        The type and the start of another role's session are NULL, unless this role has pg_read_all_stats: nothing can be proved then.
        """
        rows = await session.execute(f"""
            SELECT a.pid, a.usename, a.backend_type IS NOT NULL AND (
                       me.rolsuper OR (NOT r.rolsuper AND (pg_catalog.pg_has_role('pg_signal_backend', 'USAGE')
                                                           OR pg_catalog.pg_has_role(a.usesysid, 'USAGE'))))
            FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
            JOIN pg_catalog.pg_roles me ON me.rolname = current_user
            WHERE {self._condition} AND (a.backend_type = 'client backend' OR a.backend_type IS NULL) AND {condition}
            ORDER BY a.pid
        """)  # noqa: S608
        return [ForeignSession(pid or "", role or "", may == "t") for pid, role, may in rows]

    async def writing(self, session: Session) -> list[str]:
        """Sessions and background workers whose transaction has changed something, as texts."""
        rows = await session.execute(
            f"SELECT a.pid, a.backend_type FROM pg_catalog.pg_stat_activity a WHERE {self._condition} AND a.backend_xid IS NOT NULL"  # noqa: S608
            " AND (a.backend_type NOT IN ('autovacuum worker', 'parallel worker')"
            " OR (a.backend_type IS NULL AND a.usesysid IS NOT NULL))"
        )
        return [f"session {pid} ({kind or 'of another role'})" for pid, kind in rows]
