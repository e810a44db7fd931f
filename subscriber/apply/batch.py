"""Grouping committed transactions into batches.

A batch ends at a commit and is bounded in rows and bytes; it takes what is waiting and, with ``batch_delay``, waits a little for more.
One transaction is never split, whatever its size. What is not a plain committed transaction (a prepare, COMMIT PREPARED, …) is never
part of one: it is applied by itself, in its place in the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from subscriber.abc import Batch, RelationGate
from subscriber.apply.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import SubscriberError
from subscriber.transaction.model import Transaction

__all__ = ["collect"]


async def collect(
    receiver: Receiver, settings: Settings, gate: RelationGate, alone: Callable[[Transaction], bool] = lambda _: False
) -> tuple[Batch, int]:
    """Take the batch that starts with the next event, which is a Transaction.

    Args:
        receiver: gives the events.
        settings: how large a batch may be.
        gate: of the batch.
        alone: whether a transaction is not to follow others in a batch, because it may be applied by itself.

    Returns:
        The batch and the memory it holds, for :meth:`Receiver.release`.
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
                break  # raised again by the next wait, once what came before it is applied
            continue
        if not isinstance(event, Transaction) or (transactions and alone(event)):
            break
        held += receiver.pop()[1]
        transactions.append(event)
        rows += event.count
        size += event.size
    return Batch(tuple(transactions), gate), held
