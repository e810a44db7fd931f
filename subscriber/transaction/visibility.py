"""Which transactions a snapshot of the publisher sees.

Source: PostgreSQL manual, Transaction ID and Snapshot Information Functions (``pg_current_snapshot``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

__all__ = ["XidSnapshot"]

_XIDS: Final = 2**32
_HALF: Final = 2**31


@dataclass(frozen=True, slots=True)
class XidSnapshot:
    """The transaction ids of a snapshot, with their epoch.

    Attributes:
        xmin: all lower ids have ended before the snapshot.
        xmax: no transaction from this id on has ended before the snapshot.
        running: those between that had not ended.
    """

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of ``pg_snapshot``, such as ``10:20:10,14,15``.

        Raises:
            ValueError: it is something else.
        """
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Whether a transaction, if it was committed, is visible.

        Args:
            xid: its id without the epoch, as pgoutput sends it. It is within two thousand million ids of the snapshot.
        """
        full = self.xmax + ((xid - self.xmax + _HALF) % _XIDS) - _HALF
        return full < self.xmin or (full < self.xmax and full not in self.running)
