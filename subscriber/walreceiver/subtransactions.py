"""Ask the publisher which subtransactions of a transaction were rolled back.

Source: PostgreSQL manual, pg_xact_status.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from subscriber.errors import UndecidedTransaction
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.session import Session

__all__ = ["rolled_back_subtransactions"]

# An id on the wire has 32 bits. The one that is meant is the nearest to the next id, because a server lets no older one be in use.
# An id that was not assigned yet is an error. A standby may not have replayed what a session of the primary's address asks for.
_SUBTRANSACTIONS: Final = """
WITH here AS MATERIALIZED (
    SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8 AS next
     WHERE NOT pg_catalog.pg_is_in_recovery()
       AND EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {slot} AND active)
), answers AS MATERIALIZED (
    SELECT xid, pg_catalog.pg_xact_status((next + ((xid - next + 2147483648) & 4294967295) - 2147483648)::text::xid8) AS status
      FROM here, pg_catalog.unnest('{{{xids}}}'::int8[]) AS asked (xid)
)
SELECT pg_catalog.count(*)::text, pg_catalog.count(status)::text,
       pg_catalog.string_agg(xid::text, ',') FILTER (WHERE status = 'aborted')
  FROM answers
"""


async def rolled_back_subtransactions(session: Session, slot_name: str, xid: int, subxids: Collection[int]) -> Collection[int]:
    """Return those of a transaction's subtransactions that were rolled back.

    Args:
        session: with the server that sent the transaction.
        slot_name: the slot through which it was sent. It shows that another server answers.
        xid: of the transaction, without an epoch, as in messages. Its COMMIT or PREPARE was received.
        subxids: of its subtransactions.

    Raises:
        UndecidedTransaction: the answer is not certain.
        PublisherUnavailable, PublisherError: the query failed.
    """
    # the top transaction last: if it was not rolled back by then, its subtransactions were rolled back before its COMMIT or PREPARE
    xids = ",".join(map(str, (*subxids, xid)))
    ((answers, known, found),) = await session.execute(_SUBTRANSACTIONS.format(slot=quote_literal(slot_name), xids=xids))
    if answers == "0":
        raise UndecidedTransaction("another server answers, or it is a standby")
    if answers != known:
        raise UndecidedTransaction("the transaction is too old")
    aborted = {int(each) for each in (found or "").split(",") if each}
    # of a prepared transaction that was rolled back since, nothing is left anyway
    return () if xid in aborted else aborted
