"""The log of conflicts (``conflict_log``), as all kinds of targets have it: what is logged, and when old rows are removed.

Rows are written in the transaction of the changes. So a conflict is logged if and only if its transaction is committed. A conflict that is
an error rolls back, and is not logged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn

__all__ = ["COLUMNS", "MOST", "LoggedConflict", "Retention", "other_columns"]

COLUMNS: Final = (
    "logged_at",
    "subscription",
    "schema_name",
    "table_name",
    "conflict",
    "rule",
    "applied",
    "xid",
    "lsn",
    "commit_time",
    "key",
    "local_row",
    "remote_row",
)
"""The columns of the table, in their order."""

MOST: Final = 10_000
"""The number of conflicts that wait until they are written."""
_SECONDS: Final = 60.0
_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class LoggedConflict:
    """One conflict.

    Attributes:
        table: the table of the target; the partition if the row is in one.
        conflict: its name.
        rule: the rule.
        applied: whether the change was made.
        xid: transaction on the publisher.
        lsn: the final LSN of that transaction; None: it is not known yet.
        commit_time: its commit time, in microseconds since 2000; None: it is not known yet.
        key, local_row, remote_row: as JSON, or None.
    """

    table: TableName | None
    conflict: str
    rule: str
    applied: bool
    xid: int
    lsn: Lsn | None
    commit_time: int | None
    key: bytes | None
    local_row: bytes | None
    remote_row: bytes | None


class Retention:
    """When old rows are removed, and how many at once, so that no transaction removes more than a few rows for each that it writes.

    Args:
        seconds: how long rows are kept; 0: for ever.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._logged = 0
        self._removed_at: float | None = None

    def most(self, conflicts: int) -> int:
        """Return how many old rows to remove now at most; 0: none. ``conflicts``: how many are logged now."""
        self._logged += conflicts
        now = time.monotonic()
        due = self._removed_at is None or now - self._removed_at >= _SECONDS or self._logged >= _ROWS
        if not self.seconds or not due:
            return 0
        most, self._logged, self._removed_at = _ROWS + 2 * self._logged, 0, now
        return most


def other_columns(table: str, wrong: list[str], rename: str) -> ConfigurationError:
    """The error of a table that is no log of conflicts. ``rename``: the statement that gives it another name."""
    quoted = ", ".join(f'"{column}"' for column in wrong)
    return ConfigurationError(
        f'table "{table}" of the target is not a log of conflicts: it has other columns ({quoted})',
        hint=f"{rename}: the log is created then; or name another table",
    )
