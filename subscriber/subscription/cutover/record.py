"""The steps of a migration that were made: rows of the target's catalog, for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from subscriber.catalog.model import CUTOVER
from subscriber.catalog.store import Store

__all__ = ["MIGRATION", "Record"]

MIGRATION: Final = "migrate "
"""What the names of the steps begin with."""


class Record:
    """The rows of one subscription.

    Args:
        store: the target's catalog.
        oid: the subscription's.
        kind: :data:`MIGRATION`.
    """

    def __init__(self, store: Store, oid: int, kind: str = MIGRATION) -> None:
        self._store = store
        self._oid = oid
        self._kind = kind
        self._made: set[str] = set()

    async def load(self) -> None:
        """Read the rows."""
        async with self._store.reading() as rows:
            found = await rows.select(CUTOVER, {"subid": self._oid})
        self._made = {row["step"] for row in found if row["ended_at"] is not None and row["step"].startswith(self._kind)}

    def made(self, step: str) -> bool:
        """Whether a step was made completely."""
        return step in self._made

    async def begin(self, step: str) -> None:
        """Record that a step begins."""
        row = {"subid": self._oid, "step": step, "began_at": self._store.now(), "ended_at": None, "details": "{}"}
        async with self._store.transaction() as rows:
            # of a process that was killed
            await rows.delete(CUTOVER, {"subid": self._oid, "step": step})
            await rows.insert(CUTOVER, [row])

    async def end(self, step: str, details: Mapping[str, Any]) -> None:
        """Record that a step was made. Durable on return."""
        values = {"ended_at": self._store.now(), "details": json.dumps(dict(details))}
        async with self._store.transaction() as rows:
            await rows.update(CUTOVER, {"subid": self._oid, "step": step}, values)
        self._made.add(step)
