"""The state of a run."""

from __future__ import annotations

import weakref

from subscriber.errors import SubscriberError
from subscriber.subscription.run.run_state import RunState


class _Batch: ...


async def test_kept_error_keeps_nothing_else() -> None:
    """The bug was that an error kept the transactions that were being applied, and the sessions of tasks that it had ended."""
    batches: list[weakref.ref[_Batch]] = []

    def apply() -> None:
        batch = _Batch()
        batches.append(weakref.ref(batch))
        raise SubscriberError("refused")

    state = RunState()
    try:
        apply()
    except SubscriberError as error:
        state.last_error = error
    assert state.latest_error is not None
    assert batches[0]() is None
