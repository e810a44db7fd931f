"""Status of a target's subscriptions: from the target's catalog, and from the publishers' slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from subscriber.catalog import Observation
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.errors import SubscriberError
from subscriber.interfaces import Retry, WorkerState
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.targets import observe_target, opened_catalog

if TYPE_CHECKING:
    from subscriber.walreceiver.slot_status import SlotObservation

__all__ = ["State", "SubscriptionStatus", "reset_subscription_stats", "subscription_status"]

_PUBLISHER_SECONDS: Final = 5.0
_NO_CONNECTIONS: Final[Mapping[str, str]] = {}


class State(StrEnum):
    """The state of a subscription, in one word."""

    CREATING = "creating"
    """It is being created, or its creation was interrupted."""
    DISABLED = "disabled"
    """The launcher does not run it."""
    NOT_RUNNING = "not_running"
    """It is enabled, but no process runs it."""
    DEFINED_BY_COMMAND_LINE = "defined_by_command_line"
    """No process runs it. A launcher cannot run it, because its command line defines it."""
    CONNECTING = WorkerState.CONNECTING.value
    COPYING = WorkerState.COPYING.value
    CATCHING_UP = WorkerState.CATCHING_UP.value
    RUNNING = WorkerState.RUNNING.value
    RETRYING = WorkerState.RETRYING.value

    @property
    def words(self) -> str:
        """The state as text for people."""
        if self is State.DEFINED_BY_COMMAND_LINE:
            return "not running (defined by its command line or configuration file)"
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStatus:
    """The status of one subscription.

    Attributes:
        state: in one word.
        observation: what the target knows.
        slot: what the publisher knows of the slot. None if the publisher was not queried, or the query failed.
        publisher_error: why the publisher could not be queried, in one line.
        lag_bytes: from the position that is durable in the target to the end of the publisher's WAL. The publisher reports that end; if it
            was not queried, the worker does.
        lag_seconds: the larger of the values of pg_stat_replication and of the worker. 0 if nothing is pending, None if unknown.
    """

    state: State
    observation: Observation
    slot: SlotObservation | None = None
    publisher_error: str | None = None

    @property
    def lag_bytes(self) -> int | None:
        """See the class."""
        worker = self.observation.worker
        position = (worker.flushed if worker is not None else None) or self.observation.definition.position
        if self.slot is not None:
            end: Lsn | None = self.slot.publisher_lsn
        else:
            end = self.observation.details.publisher_lsn if worker is not None else None
        return None if position is None or end is None else max(int(end) - int(position), 0)

    @property
    def lag_seconds(self) -> float | None:
        """See the class."""
        known = [] if self.slot is None else [self.slot.lag_seconds]
        if self.observation.worker is not None:
            known.append(self.observation.details.lag_seconds)
        return max((seconds for seconds in known if seconds is not None), default=None)

    @property
    def retry(self) -> Retry | None:
        """With state RETRYING, the failed attempt."""
        return self.observation.details.retry if self.state is State.RETRYING else None


async def subscription_status(
    target: str, names: Sequence[str] = (), connections: Mapping[str, str] = _NO_CONNECTIONS
) -> list[SubscriptionStatus]:
    """Read the status of a target's subscriptions.

    Args:
        target: URL or conninfo of the target.
        names: only these subscriptions. Empty: all.
        connections: connection strings of the publishers that the catalog does not have, by the names of the subscriptions.

    Raises:
        TargetError: the target cannot be read, or one of ``names`` does not exist. A publisher that fails is reported in the result.
    """
    found = {observation.definition.name: observation for observation in await observe_target(target)}
    for name in names:
        if name not in found:
            raise no_such_subscription(name)
    return list(await asyncio.gather(*(_status(found[name], connections.get(name)) for name in names or found)))


async def _status(observation: Observation, conninfo: str | None) -> SubscriptionStatus:
    slot, problem = None, None
    definition = observation.definition
    conninfo = definition.conninfo or conninfo
    if conninfo is not None and definition.slot_name is not None:
        from subscriber.walreceiver.slot_status import observe_slot  # noqa: PLC0415 -- otherwise status need not load libpq

        try:
            async with asyncio.timeout(_PUBLISHER_SECONDS):
                slot = await observe_slot(conninfo, definition.slot_name, application_name="subscriber status")
        except SubscriberError as error:
            problem = error.one_line()
        except TimeoutError:
            problem = f"the publisher did not answer within {_PUBLISHER_SECONDS:g} s"
    return SubscriptionStatus(state=_state(observation), observation=observation, slot=slot, publisher_error=problem)


def _state(observation: Observation) -> State:
    definition, worker = observation.definition, observation.worker
    if not definition.made:
        return State.CREATING
    details = observation.details
    if worker is not None:
        return State(details.state or WorkerState.CONNECTING)
    if not definition.enabled:
        return State.DISABLED
    # between two attempts, there may be no session with the target
    if details.retry is not None and details.retry.waits(time.time()):
        return State.RETRYING
    return State.DEFINED_BY_COMMAND_LINE if observation.by_command_line else State.NOT_RUNNING


async def reset_subscription_stats(name: str, *, target: str) -> None:
    """Set the counters of a subscription to zero. Its worker continues, and counts from zero.

    Args:
        name: name of the subscription.
        target: URL or conninfo of the target.

    Raises:
        TargetError: the subscription does not exist.
        TargetUnavailable: the target cannot be reached.
    """
    async with opened_catalog(target, "subscriber alter") as catalog:
        await catalog.reset_statistics(name)
