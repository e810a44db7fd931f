"""What may be acknowledged: one tracker a stream, and no other source of acknowledgements.

A standby status update carries three positions, and the publisher acts on each: *flush* frees its WAL and moves the slot's
``confirmed_flush_lsn``, and what lies below that is never sent again; *apply* and *write* serve synchronous commits and whoever waits
for a replica to catch up. So ``flush`` may name only what the target holds durably; each of the three comes from its own source, and none
ever goes back.

States
    ``received >= applied >= flushed``, and ``pending``, the largest end LSN of a transaction, prepare, COMMIT or ROLLBACK PREPARED that
    was handed on. The tracker is *idle* while ``flushed >= pending``::

        call             received    applied    flushed    pending
        receive(lsn)     max         .          .          .
        pend(lsn)        max         .          .          max
        applied_to(lsn)  .           max        .          .
        flush(lsn)       .           max        max        .

Why a keepalive is no progress over unapplied data
    A keepalive says how far the publisher has decoded. While something is pending it says nothing about us: had it moved ``flush``, a
    crash would lose the pending transaction without an error, as the publisher never sends it again. While nothing is pending, everything
    up to it has either been made durable or was not for us; then it *must* move ``flush``, or WAL piles up behind an idle or filtered slot,
    and a publisher that shuts down waits for us.

Why idle progress takes the way through the target
    At start the target's position is compared with the slot's: a slot that is ahead of us has skipped something. That comparison is
    exact only if we never acknowledge more than the target durably knows. Hence :meth:`FlushTracker.idle_lsn` only proposes; the caller
    stores the position in the target, and then calls :meth:`FlushTracker.flush`. ``apply`` need not wait for that: nothing is there to be
    applied.

Which LSNs
    Of a transaction its *end* LSN: acknowledging its commit LSN makes the publisher send it again. A half-received transaction needs no
    care: whatever is received before its end, keepalives in its midst included, lies below its commit record, and below that
    acknowledging is safe; the whole transaction comes again. The same holds for streamed chunks.

    A prepare that is older than the slot's two-phase start is sent late, right before its COMMIT PREPARED, with its old LSN: it may lie
    below ``flushed``. It is then not pending, and need not be: as long as its COMMIT PREPARED, whose LSN is new, is not acknowledged, both
    come again after a crash.

Order
    A walsender decodes WAL in order. A message bears the LSN of a record that it has decoded, and a keepalive the end of the last one
    (``sentPtr``) or of an empty transaction. So in one session a COMMIT, COMMIT PREPARED or ROLLBACK PREPARED always ends behind everything
    received before it: streamed and empty transactions, messages and keepalives. Only a late prepare does not. If another one does not, the
    publisher has claimed a WAL end that it had not reached, and idle progress may have stored that end in the target. Then the tracker is
    *contradicted*: it proposes and reports nothing more, and ``applied`` falls back to the end of the last transaction that was applied.
    The caller moves the target's position back to it. If the slot has moved past it, the check at the next start finds that.

Trace (target at 100)
    ``receive(150)``: idle, write 150, apply 150, flush 100; ``idle_lsn()`` is 150; the target stores it, ``flush(150)``.
    ``pend(200)``, ``receive(250)`` by a keepalive: write 250, apply 150, flush 150; ``idle_lsn()`` is None.
    ``applied_to(200)``: apply 200. ``flush(200)``: idle, apply 250, flush 200; ``idle_lsn()`` is 250.

Source: PostgreSQL manual, Streaming Replication Protocol (Standby status update); worker.c, get_flush_position and send_feedback;
walsender.c, XLogSendLogical, WalSndPrepareWrite, WalSndUpdateProgress and WalSndKeepalive; logical.c, ``write_location`` in the callbacks.
"""

from __future__ import annotations

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["FlushTracker"]


class FlushTracker:
    """Positions of one stream. Made anew, at the target's durable position, with each connection.

    Args:
        position: up to where the target holds everything durably.
    """

    __slots__ = ("_applied", "_contradicted", "_flushed", "_heard", "_pending", "_position", "_received")

    def __init__(self, position: Lsn) -> None:
        self._position = position
        self._heard = INVALID_LSN
        self._contradicted: tuple[Lsn, Lsn, Lsn] | None = None
        self._received = position
        self._applied = position
        self._flushed = position
        self._pending = INVALID_LSN

    @property
    def received(self) -> Lsn:
        """The largest LSN that was received, data or keepalive."""
        return self._received

    @property
    def applied(self) -> Lsn:
        """Up to where everything received is visible in the target: all of it while nothing is pending."""
        if self._contradicted is not None:
            return min(self._applied, max(self._position, self._pending))
        if self.idle:
            # kept, so that what was once reported does not go back when the next transaction is pending
            self._applied = self._received
        return self._applied

    @property
    def flushed(self) -> Lsn:
        """Up to where the target holds everything durably."""
        return self._flushed

    @property
    def idle(self) -> bool:
        """Whether everything handed on is durable."""
        return self._flushed >= self._pending

    def receive(self, lsn: Lsn) -> None:
        """A frame with this LSN came; 0 where it has none. To be called after :meth:`pend` for what the frame completed."""
        self._heard = max(self._heard, lsn)
        self._received = max(self._received, lsn)

    def pend(self, end_lsn: Lsn, *, in_order: bool = False) -> None:
        """A transaction, prepare, COMMIT PREPARED or ROLLBACK PREPARED that ends here was handed on and must become durable.

        Args:
            end_lsn: its end.
            in_order: it must end behind everything received in this session.

        Raises:
            ProtocolError: it does not. It must not be handed on; the tracker is contradicted.
        """
        if in_order:
            if end_lsn <= self._heard:
                raise self._contradict(end_lsn)
            self._heard = end_lsn
        self._received = max(self._received, end_lsn)
        self._pending = max(self._pending, end_lsn)

    def _contradict(self, end_lsn: Lsn) -> ProtocolError:
        self._contradicted = self._contradicted or self.status()
        error = ProtocolError(f"the publisher sent a transaction that ends at {end_lsn}, after it had sent everything up to {self._heard}")
        error.hint = "nothing of it is applied; find out what sent a wrong WAL end: the publisher, or a proxy before it"
        return error

    @property
    def contradicted(self) -> bool:
        """Whether the publisher sent a transaction below a WAL end that it had sent before."""
        return self._contradicted is not None

    def applied_to(self, end_lsn: Lsn) -> None:
        """Everything pending up to here is visible in the target.

        Raises:
            ValueError: nothing was received up to there.
        """
        self._check_received(end_lsn)
        self._applied = max(self._applied, end_lsn)

    def flush(self, end_lsn: Lsn) -> None:
        """Everything pending up to here is durable in the target, and so is the position.

        Raises:
            ValueError: nothing was received up to there.
        """
        self._check_received(end_lsn)
        self._flushed = max(self._flushed, end_lsn)
        self._applied = max(self._applied, end_lsn)

    def _check_received(self, lsn: Lsn) -> None:
        if lsn > self._received:
            raise ValueError(f"{lsn} cannot have been applied: only {self._received} was received")

    def idle_lsn(self) -> Lsn | None:
        """The position to store in the target and then to :meth:`flush`; None while something is pending, or if it is stored already."""
        return self._received if self.idle and self._received > self._flushed and self._contradicted is None else None

    def status(self) -> tuple[Lsn, Lsn, Lsn]:
        """Write, flush and apply position for a standby status update, in the order of its fields."""
        return self._contradicted or (self._received, self._flushed, self.applied)
