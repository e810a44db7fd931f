"""Find the table because of which the target rejected a TRUNCATE of several tables: each is truncated alone, and rolled back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.statement import Truncated

__all__ = ["find_refused"]

_NOT_SUPPORTED: Final = "0A000"


class _TruncatedError(Exception):
    """Rolls the transaction back."""


async def find_refused(session: ApplySession, tables: Iterable[Truncated]) -> TableName | None:
    """Return the first table that cannot be truncated alone; None: each one can.

    Raises:
        TargetUnavailable
    """
    for table in tables:
        try:
            async with session.transaction():
                await session.fetch(set_role(table.role).sql.decode("utf-8", "surrogateescape"))
                await session.fetch(f"TRUNCATE {table.scanned}")
                raise _TruncatedError
        except _TruncatedError:
            pass
        except TargetUnavailable:
            raise
        except TargetError as error:
            # that another table references it does not matter if both are truncated together
            if error.sqlstate != _NOT_SUPPORTED:
                return table.name
    return None
