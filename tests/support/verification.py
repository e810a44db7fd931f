"""What tests of ``verify`` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from subscriber import TableName, verify
from subscriber.verification.model import TableReport, VerificationLimits, VerificationReport
from tests.support.replica import Replica

NUMBERS = "CREATE TABLE t (id int PRIMARY KEY, v int)"
TEXTS = "CREATE TABLE t (id int PRIMARY KEY, v text)"
SHOWN = VerificationLimits(show_values=True)

Replicated = Callable[..., AbstractAsyncContextManager[Replica]]
"""See the fixture ``replicated``."""


async def verified(found: Replica, *tables: str, limits: VerificationLimits | None = None, **more: Any) -> VerificationReport:
    return await verify(
        found.subscription.name,
        target=found.target.dsn,
        connection=found.publisher.conninfo(),
        tables=[TableName("public", table) for table in tables],
        limits=limits,
        **more,
    )


def only(report: VerificationReport) -> TableReport:
    (table,) = report.tables
    return table


def named(table: TableReport) -> list[tuple[str, Sequence[str | None], Sequence[str]]]:
    return sorted((each.kind.value, tuple(each.key.values()), each.columns) for each in table.differences)
