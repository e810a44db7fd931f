"""Track which positions may be acknowledged: one tracker per stream, and no other source of acknowledgements.

A standby status update carries three positions. *flush* moves the slot's ``confirmed_flush_lsn`` and frees WAL; the publisher never sends
again what is below it. *apply* and *write* serve synchronous commits and programs that wait for a replica to catch up. So ``flush`` may
only cover what is durable in the target. Each of the three has its own source, and none ever goes back.

States
    ``received >= applied >= flushed``, and ``pending``: the largest end LSN of a transaction, prepare, COMMIT or ROLLBACK PREPARED that
    was passed on to be applied. The tracker is *idle* while ``flushed >= pending``::

        call             received    applied    flushed    pending
        receive(lsn)     max         .          .          .
        pend(lsn)        max         .          .          max
        applied_to(lsn)  .           max        .          .
        flush(lsn)       .           max        max        .

Why a keepalive does not move ``flush`` while data is pending
    A keepalive reports how far the publisher has decoded. If it moved ``flush`` over a pending transaction, a crash would lose that
    transaction without an error, because the publisher never sends it again. While nothing is pending, everything up to the keepalive
    is durable or was not for this subscription. Then the keepalive *must* move ``flush``. Otherwise WAL accumulates behind an idle or
    filtered slot, and a publisher that shuts down waits for this subscriber.

Why idle progress is stored in the target first
    At start the target's position is compared with the slot's: a slot that is ahead of the target has skipped changes. The comparison is
    exact only if the subscriber never acknowledges more than is durable in the target. Hence :meth:`FlushTracker.idle_lsn` only proposes
    a position. The caller stores it in the target, and then calls :meth:`FlushTracker.flush`. ``apply`` need not wait for that, because
    there is nothing to apply.

Which LSNs
    Acknowledge a transaction's *end* LSN: after its commit LSN the publisher would send it again. A half-received transaction needs no
    special care. All LSNs received before its end, those of keepalives included, are below its commit record. Acknowledging them is
    safe: after a restart the whole transaction is sent again. The same applies to streamed chunks.

    A transaction that was prepared before two-phase was enabled for the slot is sent late, right before its COMMIT PREPARED, with its old
    LSN. That LSN may be below ``flushed``. Then the prepare is not pending, and need not be: as long as its COMMIT PREPARED, which has a
    new LSN, is not acknowledged, both are sent again after a crash.

Order
    A walsender decodes WAL in order. A message carries the LSN of a record that was decoded. A keepalive carries the end of the last one
    (``sentPtr``) or of an empty transaction. So in one session a COMMIT, COMMIT PREPARED or ROLLBACK PREPARED always ends after
    everything received before it: streamed and empty transactions, messages and keepalives. The only exception is a late prepare.
    If another one ends earlier, the publisher has reported a WAL end that it had not reached, and idle progress may have stored that end
    in the target. Then the tracker is *contradicted*. It proposes and reports nothing more, and ``applied`` falls back to the end of the
    last applied transaction. The caller moves the target's position back to it. If the slot has moved past that, the check at the next
    start finds it.

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
    """Positions of one stream. Each connection gets a new tracker, which starts at the target's durable position.

    Args:
        position: everything up to here is durable in the target.
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
        """The largest LSN received, in data or a keepalive."""
        return self._received

    @property
    def heard(self) -> Lsn:
        """What ends next in this session must end after it."""
        return self._heard

    @property
    def applied(self) -> Lsn:
        """Everything received up to here is visible in the target. While nothing is pending, this is everything received."""
        if self._contradicted is not None:
            return min(self._applied, max(self._position, self._pending))
        if self.idle:
            # stored, so that the reported position does not go back when the next transaction is pending
            self._applied = self._received
        return self._applied

    @property
    def flushed(self) -> Lsn:
        """Everything up to here is durable in the target."""
        return self._flushed

    @property
    def idle(self) -> bool:
        """Whether everything passed on is durable."""
        return self._flushed >= self._pending

    def receive(self, lsn: Lsn) -> None:
        """Note a received frame with this LSN, or 0. Call :meth:`pend` first if the frame completed something."""
        # max() costs more, and there are two calls for each transaction
        if lsn > self._heard:  # noqa: PLR1730
            self._heard = lsn
        if lsn > self._received:  # noqa: PLR1730
            self._received = lsn

    def pend(self, end_lsn: Lsn, *, in_order: bool = False) -> None:
        """Note a transaction, prepare, COMMIT PREPARED or ROLLBACK PREPARED that ends here. It was passed on and must become durable.

        Args:
            end_lsn: its end.
            in_order: it must end after everything received in this session.

        Raises:
            ProtocolError: it does not. It must not be applied; the tracker is contradicted.
        """
        if in_order:
            if end_lsn <= self._heard:
                raise self._contradict(end_lsn)
            self._heard = end_lsn
        if end_lsn > self._received:  # noqa: PLR1730
            self._received = end_lsn
        if end_lsn > self._pending:  # noqa: PLR1730
            self._pending = end_lsn

    def _contradict(self, end_lsn: Lsn) -> ProtocolError:
        self._contradicted = self._contradicted or self.status()
        error = ProtocolError(f"the publisher sent a transaction that ends at {end_lsn}, after it had sent everything up to {self._heard}")
        error.hint = "the transaction is not applied; find out what sent the wrong WAL end: the publisher, or a proxy in front of it"
        return error

    @property
    def contradicted(self) -> bool:
        """Whether the publisher sent a transaction that ends below a WAL end that it had sent before."""
        return self._contradicted is not None

    def applied_to(self, end_lsn: Lsn) -> None:
        """Note that everything pending up to here is visible in the target.

        Raises:
            ValueError: the position was not received yet.
        """
        self._check_received(end_lsn)
        self._applied = max(self._applied, end_lsn)

    def flush(self, end_lsn: Lsn) -> None:
        """Note that everything pending up to here, and the position, is durable in the target.

        Raises:
            ValueError: the position was not received yet.
        """
        self._check_received(end_lsn)
        self._flushed = max(self._flushed, end_lsn)
        self._applied = max(self._applied, end_lsn)

    def _check_received(self, lsn: Lsn) -> None:
        if lsn > self._received:
            raise ValueError(f"{lsn} cannot have been applied: only {self._received} was received")

    def idle_lsn(self) -> Lsn | None:
        """The position to store in the target and then to :meth:`flush`; None while something is pending, or if it is already stored."""
        return self._received if self.idle and self._received > self._flushed and self._contradicted is None else None

    def status(self) -> tuple[Lsn, Lsn, Lsn]:
        """Write, flush and apply position of a standby status update, in the order of its fields."""
        return self._contradicted or (self._received, self._flushed, self.applied)
