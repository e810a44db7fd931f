"""Publishes cuts, and notices another applier of the same lake where there are no locks."""

from __future__ import annotations

from typing import Final

from subscriber.errors import SubscriptionInUse
from subscriber.sinks.spark.catalog.snapshots import Cut, forget_cuts, read_cut, restore_cut, write_cut
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["CutPublisher"]

_FORGET_EVERY: Final = 100
_UNANSWERED: Final = 16


class CutPublisher:
    """Publishes the cuts of one applier.

    Args:
        storage: of the lake.
        keep: how many published cuts are stored for readers of earlier states.
    """

    def __init__(self, storage: Storage, keep: int) -> None:
        self._storage = storage
        self._keep = keep
        self._is_locked = storage.root is not None  # then the applier's lock keeps others away
        self._published = 0
        # the cut that was published at the last look, and the cuts that this applier tried to publish since. Empty: unknown
        self._mine: tuple[Cut | None, ...] = ()

    def open(self) -> None:
        """Begin. The caller holds the lock, if there is one."""
        self._mine = ()
        if not self._is_locked:
            restore_cut(self._storage)

    def require_alone(self) -> Cut | None:
        """Read the published cut. Without a lock, check that this applier has published or read it before.

        Raises:
            SubscriptionInUse: another applier has published.
        """
        cut = read_cut(self._storage)
        known = cut in self._mine
        if not self._is_locked and self._mine and cut is not None and not known:
            text = f"the lake in {self._storage.place} has another applier, which published in the meantime"
            raise SubscriptionInUse(
                text, hint="stop one of them; if there is only one, the object store stored a cut late: start the applier again"
            )
        # the cuts that it tried to publish after this one may still appear
        self._mine = (cut, *self._mine[self._mine.index(cut) + 1 :]) if known else (cut,)
        return cut

    def publish(self, cut: Cut) -> None:
        """Publish a cut.

        Raises:
            SubscriptionInUse: another applier has published.
            TargetError: it cannot be written. The previous cut stays published.
        """
        self.require_alone()
        if cut not in self._mine:
            # the store may publish it without giving an answer, and even later
            self._mine = (self._mine[0], *(*self._mine[1:], cut)[-_UNANSWERED:])
        write_cut(self._storage, cut)
        self._mine = (cut,)
        self._published += 1
        if self._published % _FORGET_EVERY == 0:
            forget_cuts(self._storage, self._keep)
