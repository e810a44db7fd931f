"""Repair the rows that a verification has named.

The process that runs the subscription does it, while apply is held at an LSN: it reads the rows from a snapshot of the publisher, and
writes them in one transaction of the target. At that moment the target has exactly the transactions that the snapshot sees. So the rows
that it writes are those that apply would have written, and each later change comes after them. What the verification found is used only to
know which rows to look at.

Some hundred rows are repaired at a time, so that apply is held for a short time only.
"""

from __future__ import annotations

from typing import Final

from subscriber.catalog.target_kind import ComparedKind
from subscriber.errors import ApplyError, ConfigurationError, RelationError, SubscriberError
from subscriber.interfaces import TableName
from subscriber.subscription.comparison.snapshot_request import Asker
from subscriber.subscription.targets import required_ability, target_kind
from subscriber.verification.model import Progress, Quiet, TableReport, VerificationReport

__all__ = ["repair", "require_repairable", "why_not_repairable"]

_ROWS: Final = 200
_RESYNC: Final = "`subscriber alter NAME --resync SCHEMA.TABLE`"


def require_repairable(target: str) -> ComparedKind:
    """Return the kind of a target whose rows can be repaired.

    Raises:
        ConfigurationError
    """
    lacks, hint = "has no rows that can be repaired one by one", f"copy the tables that differ again: {_RESYNC}"
    kind = required_ability(target, ComparedKind, lacks, hint)
    if not kind.repairs:
        raise ConfigurationError(f"{target_kind(target).noun} {lacks}", hint=hint)
    return kind


async def repair(report: VerificationReport, *, target: str, progress: Progress | None = None) -> dict[TableName, int]:
    """Make the differing rows of the target equal to those of the publisher.

    Rows beyond ``VerificationLimits.max_differences`` are not known, and not repaired: verify again. Tables that cannot be repaired are
    left out; see :func:`why_not_repairable`.

    Args:
        report: what :func:`subscriber.verify` found.
        target: URL or conninfo of the target.
        progress: is told about long waits.

    Returns:
        How many rows were repaired, by table. A table that is left out is not in it.

    Raises:
        ConfigurationError: rows of this kind of target cannot be repaired.
        ApplyError, RelationError: the target rejects a row, or a table cannot be repaired. The other tables are repaired.
        TargetError, PublisherError, SubscriptionInUse: as :func:`subscriber.verify`.
    """
    repaired: dict[TableName, int] = {}
    async with (
        require_repairable(target).compared(target, report.subscription, 1) as found,
        Asker(found.requests, report.subscription, progress or Quiet()) as asker,
    ):
        failed: SubscriberError | None = None
        for table in report.differing:
            if why_not_repairable(table) is None:
                try:
                    repaired[table.table] = await _repair(asker, table)
                except (ApplyError, RelationError) as error:
                    # of this table
                    failed = failed or error
        if failed is not None:
            raise failed
    return repaired


def why_not_repairable(table: TableReport) -> ConfigurationError | None:
    """Why the rows of this table cannot be repaired one by one; None: they can."""
    if not table.key:
        return ConfigurationError(
            f'table "{table.table}" has no key: its rows cannot be repaired one by one', hint=f"reconcile it as a whole: {_RESYNC}"
        )
    if any(None in key for key in _keys(table)):
        return ConfigurationError(
            f'table "{table.table}" of the target has NULL in its key: such rows cannot be repaired', hint=f"reconcile the table: {_RESYNC}"
        )
    return None


def _keys(table: TableReport) -> list[tuple[str | None, ...]]:
    return list(dict.fromkeys(tuple(row.key[name] for name in table.key) for row in table.differences))


async def _repair(asker: Asker, table: TableReport) -> int:
    keys = _keys(table)
    for begin in range(0, len(keys), _ROWS):
        payload = {
            "kind": "repair",
            "table": [table.table.namespace, table.table.name],
            "key": list(table.key),
            "by_text": table.same_keys,
            "keys": [list(key) for key in keys[begin : begin + _ROWS]],
        }
        async with asker.ask(payload):
            pass
    return len(keys)
