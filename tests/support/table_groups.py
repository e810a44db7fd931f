"""What tests of table groups observe: the slots made for snapshots, and the moment before a table's rows are stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from subscriber.interfaces import CopyFormat, PublishedTable
from subscriber.subscription.run.tables.copy_source import PublisherSource

BeforeCopy = Callable[[Callable[[str], Awaitable[None]]], None]


def record_snapshot_slots(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets an entry for each slot with a snapshot that is created: whether it is a temporary one."""
    created: list[bool] = []
    exported = PublisherSource.exported

    def recorded(self: PublisherSource, slot_name: str, *, temporary: bool) -> Any:
        created.append(temporary)
        return exported(self, slot_name, temporary=temporary)

    monkeypatch.setattr(PublisherSource, "exported", recorded)
    return created


def hook_before_copy(monkeypatch: pytest.MonkeyPatch, group: type[Any]) -> BeforeCopy:
    """A function that sets what a group of this class awaits before it stores the rows of a table, which it gets by name."""
    copy = group.copy

    def use(hook: Callable[[str], Awaitable[None]]) -> None:
        async def hooked(self: Any, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
            await hook(table.name.name)
            await copy(self, table, copy_format, data)

        monkeypatch.setattr(group, "copy", hooked)

    return use
