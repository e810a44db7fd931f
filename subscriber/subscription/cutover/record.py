"""The record of a cutover: one row of the target's catalog for each step that was begun."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from subscriber import crash_points
from subscriber.catalog.model import CUTOVER, known_values
from subscriber.catalog.store import Rows, Store
from subscriber.errors import TargetUnavailable

__all__ = ["MIGRATION", "Entry", "Record"]

MIGRATION: Final = "migrate "
"""What the names of the steps of a migration begin with."""

_SECONDS: Final = 10.0
"""How long a write may take. Undoing waits for one, while writers wait for it."""


@dataclass(slots=True)
class Entry:
    """A step that was begun.

    Attributes:
        began_at, ended_at: seconds since 1970; not ended: None.
        details: what has to be known later.
    """

    began_at: float
    ended_at: float | None
    details: dict[str, Any]


class Record:
    """The rows of one subscription.

    Args:
        store: the target's catalog.
        oid: the subscription's.
        kind: :data:`MIGRATION` for the steps of a migration, which are kept beside those of a cutover.

    Attributes:
        entries: by step.
    """

    def __init__(self, store: Store, oid: int, kind: str = "") -> None:
        self._store = store
        self._oid = oid
        self._kind = kind
        self.entries: dict[str, Entry] = {}

    async def load(self) -> None:
        """Read the rows.

        Raises:
            TargetError: or a subclass.
        """
        async with self._store.reading() as rows:
            found = await rows.select(CUTOVER, {"subid": self._oid})
        with known_values(CUTOVER):
            self.entries = {row["step"]: Entry(row["began_at"], row["ended_at"], json.loads(row["details"])) for row in found}
        self.entries = {step: entry for step, entry in self.entries.items() if step.startswith(MIGRATION) is (self._kind == MIGRATION)}

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncIterator[Rows]:
        try:
            async with asyncio.timeout(_SECONDS), self._store.transaction() as rows:
                yield rows
        except TimeoutError:
            raise TargetUnavailable(
                f"the target's catalog did not answer within {_SECONDS:g} s", hint="check the network connection to the target"
            ) from None

    def made(self, step: str) -> bool:
        """Whether a step was made completely."""
        return step in self.entries and self.entries[step].ended_at is not None

    async def begin(self, step: str, details: Mapping[str, Any] | None = None) -> Entry:
        """Record that a step begins. Durable on return. A step that was begun before keeps its row."""
        if step not in self.entries:
            entry = Entry(self._store.now(), None, dict(details or {}))
            row = {"subid": self._oid, "step": step, "began_at": entry.began_at, "ended_at": None, "details": json.dumps(entry.details)}
            async with self._writing() as rows:
                await rows.insert(CUTOVER, [row])
            self.entries[step] = entry
        crash_points.reached("cutover.step")
        return self.entries[step]

    async def end(self, step: str, details: Mapping[str, Any] | None = None) -> None:
        """Record that a step was made. Durable on return."""
        crash_points.reached("cutover.step")
        entry = self.entries[step]
        entry.ended_at = self._store.now()
        entry.details |= details or {}
        async with self._writing() as rows:
            values = {"ended_at": entry.ended_at, "details": json.dumps(entry.details)}
            await rows.update(CUTOVER, {"subid": self._oid, "step": step}, values)
        crash_points.reached("cutover.step")

    async def forget(self, *steps: str) -> None:
        """Remove the rows of steps. Durable on return."""
        crash_points.reached("cutover.step")
        async with self._writing() as rows:
            await rows.delete(CUTOVER, {"subid": self._oid, "step": list(steps)})
        for step in steps:
            self.entries.pop(step, None)
        crash_points.reached("cutover.step")

    def now(self) -> float:
        """The time, as the rows have it."""
        return self._store.now()
