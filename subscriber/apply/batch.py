"""Group committed transactions into batches.

A batch ends at a commit, and is limited in rows and bytes. It takes the waiting transactions and, with ``batch_delay``, waits a little for
more. A transaction is never split, whatever its size. Only plain committed transactions are batched. Others (a prepare, COMMIT PREPARED,
…) are applied one at a time, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import SubscriberError
from subscriber.interfaces import Batch, RelationGate
from subscriber.transaction.model import Transaction

__all__ = ["collect"]


async def collect(
    receiver: Receiver, settings: Settings, gate: RelationGate, alone: Callable[[Transaction], bool] = lambda _: False
) -> tuple[Batch, int]:
    """Collect the batch that starts with the next event, which must be a Transaction.

    Args:
        receiver: source of the events.
        settings: limits of a batch.
        gate: of the batch.
        alone: whether a transaction must not follow others in a batch, because it may be applied in another way.

    Returns:
        The batch, and the memory it holds, for :meth:`Receiver.release`.
    """
    transactions: list[Transaction] = []
    rows = size = held = 0
    deadline = asyncio.get_running_loop().time() + settings.batch_delay
    while rows < settings.batch_rows and size < settings.batch_size:
        event = receiver.peek()
        if event is None:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            try:
                await receiver.wait(remaining)
            except SubscriberError:
                break  # the next wait raises it again, after the earlier transactions are applied
            continue
        if not isinstance(event, Transaction) or (transactions and alone(event)):
            break
        held += receiver.pop()[1]
        transactions.append(event)
        rows += event.count
        size += event.size
    return Batch(tuple(transactions), gate), held
