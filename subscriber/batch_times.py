"""The phases of a batch, from the commit on the publisher to the commit in the target.

Clocks are read for each batch and each read, never for each row.

- *receive*: the receiver waits for the publisher.
- *decode*: the receiver finds the transactions in what it has read. Rows are decoded by the sink, column by column, while it applies them.
- *apply*: the sink decodes and sends the changes.
- *commit*: it has sent everything, and waits until the target has executed and committed it.

A sink tells the beginning of *commit* by :func:`committing`; without that, *apply* includes it. To receive each batch, set :data:`watcher`
before the tasks that apply batches are started.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from subscriber.context_values import holding
from subscriber.protocol.lsn import Lsn

__all__ = ["AppliedBatch", "Applying", "Arrival", "BatchWatcher", "committing", "watcher"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A read of the receiver that completed at least one transaction. Times are those of the event loop's clock.

    Attributes:
        last: number of the last event that it completed, counted from one.
        read: when it had arrived.
        decoded: when its events could be applied.
    """

    last: int
    read: float
    decoded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedBatch:
    """A batch that the sink has applied. Times are those of the event loop's clock, except ``commit_time``.

    Attributes:
        end_lsn: where its last transaction ends.
        xid: of its first transaction.
        commit_time: of its first transaction, on the publisher, in seconds since 1970.
        transactions: how many it has.
        messages: how many messages of pgoutput they have: a change has one, and a table that is described has one.
        size: bytes as the publisher sent them.
        arrival: of its first transaction; None: not known.
        taken: when the apply worker took it.
        committing: when the sink began to commit; None: not known.
        done: when the sink had applied it.
    """

    end_lsn: Lsn
    xid: int
    commit_time: float
    transactions: int
    messages: int
    size: int
    arrival: Arrival | None
    taken: float
    committing: float | None
    done: float


class BatchWatcher(Protocol):
    """Hears of batches, in the thread of the event loop. It must not wait."""

    def applied(self, batch: AppliedBatch) -> None:
        """A batch was applied."""
        ...

    def durable(self, seconds: float) -> None:
        """A batch became durable in the target, so long after the commit of its first transaction on the publisher."""
        ...


watcher: ContextVar[BatchWatcher | None] = ContextVar("batch_watcher", default=None)


class Applying:
    """A call of the sink.

    Attributes:
        committing: when it began to commit last; None: not yet.
    """

    def __init__(self) -> None:
        self.committing: float | None = None

    def current(self) -> AbstractContextManager[None]:
        """The call is made inside the block."""
        return holding(_current, self)


_current: ContextVar[Applying | None] = ContextVar("applying", default=None)


def committing() -> None:
    """Called by a sink when it has sent everything of a batch."""
    applying = _current.get()
    if applying is not None:
        applying.committing = asyncio.get_running_loop().time()
