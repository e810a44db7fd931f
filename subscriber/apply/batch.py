"""Group committed transactions into batches.

A batch ends at a commit, and is limited in rows and bytes. It takes the waiting transactions and, with ``batch_delay``, waits a little for
more. A transaction is never split, whatever its size. Only plain committed transactions are batched. Others (a prepare, COMMIT PREPARED,
…) are applied one at a time, in their order.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import SubscriberError
from subscriber.interfaces import Batch, RelationGate
from subscriber.transaction.model import Transaction

__all__ = ["collect"]


async def collect(
    receiver: Receiver,
    settings: Settings,
    gate: RelationGate,
    alone: Callable[[], Callable[[Transaction], bool] | None] = lambda: None,
    most: int = sys.maxsize,
) -> tuple[Batch, int]:
    """Collect the batch that starts with the next event, which must be a Transaction.

    Args:
        receiver: source of the events.
        settings: limits of a batch.
        gate: of the batch.
        alone: gives a function that tells whether a transaction must not follow others in a batch, because it may be applied in another
            way; None: there is none.
        most: bytes, for ``max_apply_rate``: a whole batch is applied at once, and the pause follows.

    Returns:
        The batch, and the memory it holds, for :meth:`Receiver.release`.
    """
    event, held = receiver.pop()
    assert isinstance(event, Transaction)
    transactions = [event]
    rows, size = settings.batch_rows - event.count, min(settings.batch_size, most) - event.size
    deadline = asyncio.get_running_loop().time() + settings.batch_delay
    while rows > 0 and size > 0:
        more, memory = receiver.pop_batch(rows, size, alone())
        if more:
            transactions += more
            held += memory
            rows -= sum([transaction.count for transaction in more])
            size -= sum([transaction.size for transaction in more])
            continue
        remaining = deadline - asyncio.get_running_loop().time()
        if receiver.peek() is not None or remaining <= 0:
            break
        try:
            await receiver.wait(remaining)
        except SubscriberError:
            break  # the next wait raises it again, after the earlier transactions are applied
    return Batch(tuple(transactions), gate), held
