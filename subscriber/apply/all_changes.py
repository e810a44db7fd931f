"""What a reconciliation would delete although it is there on purpose.

A table can be made equal to the publisher's only if all its changes are published. If deletes are not, the target keeps rows that the
publisher does not have any more: an archive. With ``origin = none``, the target may have rows that are still on their way to the publisher.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from subscriber.errors import RelationError
from subscriber.interfaces import Finding, PublishedTable

__all__ = ["OWN_ROWS", "find_archives", "find_own_rows", "require_all_changes"]

OWN_ROWS: Final = Finding(
    "warning",
    "with origin = none, rows that were written in the target and are not on the publisher yet are deleted when a table is reconciled",
    "wait until the publisher has them",
)


def find_archives(tables: Iterable[PublishedTable]) -> list[Finding]:
    """An error for each table whose updates or deletes are not published."""
    return [
        Finding(
            "error",
            f'table "{table.name}" cannot be reconciled: its publications do not publish updates and deletes,'
            " so rows that only the target has may be there on purpose",
            "publish them (ALTER PUBLICATION … SET (publish = …)), remove the table from the publication,"
            " or replace all its rows: `subscriber alter NAME --resync SCHEMA.TABLE --by copy`",
        )
        for table in tables
        if not table.all_changes
    ]


def find_own_rows(origin: str) -> list[Finding]:
    """A warning if rows of the target may be on their way to the publisher."""
    return [OWN_ROWS] if origin == "none" else []


def require_all_changes(tables: Iterable[PublishedTable]) -> None:
    """Check that the updates and deletes of these tables are published.

    Raises:
        RelationError: they are not.
    """
    for finding in find_archives(tables):
        raise RelationError(finding.message, hint=finding.hint)
