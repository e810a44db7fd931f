"""What a worker reports about itself beyond the columns of pg_stat_subscription, as one JSON text in the target's catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from subscriber.interfaces.values import TableName
from subscriber.protocol.lsn import Lsn

__all__ = ["RelayLogDetails", "Retry", "WorkerDetails", "WorkerState"]

_GRACE_SECONDS: Final = 10.0
"""Allowance for the duration of the attempt, and for clocks that differ."""


class WorkerState(StrEnum):
    """The state of a subscription's worker."""

    CONNECTING = "connecting"
    """There is no stream yet."""
    COPYING = "copying"
    """It streams, and tables are being copied."""
    CATCHING_UP = "catching_up"
    """It streams. A table, or the stream itself, has not yet reached the WAL end that the publisher had when the stream began."""
    RUNNING = "running"
    """It streams, all tables are synchronized, and it has caught up at least once."""
    RETRYING = "retrying"
    """An attempt to stream, or to synchronize the remaining tables, failed. It waits for the next attempt."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A failed attempt that will be retried.

    Attributes:
        error: why it failed, one line.
        attempt: number of consecutive failures.
        next_attempt: when the next attempt begins, seconds since 1970.
    """

    error: str
    attempt: int
    next_attempt: float

    def waits(self, now: float) -> bool:
        """Whether the next attempt is still to come, or has just begun."""
        return now <= self.next_attempt + _GRACE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLogDetails:
    """The relay log of a worker.

    Attributes:
        received: everything up to there has arrived from the publisher.
        flushed: everything up to there is durable in the relay log, and is acknowledged.
        size: bytes on disk.
        limit: receiving pauses at this size.
        paused: whether it pauses for that reason.
        retry: the failed attempt to receive; None: the latest one did not fail.
        failure: the error that ended receiving. The run ends with it when everything in the relay log is applied.
        oldest: where it begins. Not in the catalog.
    """

    received: Lsn
    flushed: Lsn
    size: int
    limit: int
    paused: bool = False
    retry: Retry | None = None
    failure: str | None = None
    oldest: Lsn | None = None

    def values(self) -> dict[str, Any]:
        """The values as JSON has them."""
        known = asdict(self)
        del known["oldest"]
        return {**known, "received": str(self.received), "flushed": str(self.flushed)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDetails:
    """The details of one worker.

    Attributes:
        state: the state of the worker; None: not known.
        retry: the failed attempt of the apply worker or of a table's synchronization; None: the latest attempt did not fail.
        publisher_lsn: end of the publisher's WAL, as far as the worker knows.
        lag_seconds: how long ago the publisher's WAL ended where the target is durable now; 0: no later WAL is known.
        left_out: published tables that the subscription does not replicate, each with the reason.
        relay_log: the relay log; None: there is none.
        copies_begin: when ``copy_window`` opens, in seconds since 1970; None: no table waits for that.
        limited: whether changes wait because of ``max_apply_rate``.
    """

    state: WorkerState | None = None
    retry: Retry | None = None
    publisher_lsn: Lsn | None = None
    lag_seconds: float | None = None
    left_out: Mapping[TableName, str] = field(default_factory=dict)
    relay_log: RelayLogDetails | None = None
    copies_begin: float | None = None
    limited: bool = False

    def to_json(self) -> str:
        """Encode as ASCII, which every target can store."""
        return json.dumps(
            {
                "state": self.state,
                "retry": self.retry and asdict(self.retry),
                "publisher_lsn": None if self.publisher_lsn is None else str(self.publisher_lsn),
                "lag_seconds": self.lag_seconds,
                "left_out": [[table.namespace, table.name, reason] for table, reason in sorted(self.left_out.items())],
                "relay_log": self.relay_log and self.relay_log.values(),
                "copies_begin": self.copies_begin,
                "limited": self.limited,
            }
        )

    @classmethod
    def from_json(cls, text: object) -> Self:
        """Decode the details stored in a catalog. Text that this program did not write gives empty details."""
        try:
            values: Any = json.loads(text) if isinstance(text, str) else {}
            state, retry, publisher_lsn, lag = (values.get(name) for name in ("state", "retry", "publisher_lsn", "lag_seconds"))
            begin = values.get("copies_begin")
            return cls(
                state=None if state is None else WorkerState(state),
                retry=_retry(retry),
                publisher_lsn=None if publisher_lsn is None else Lsn.parse(publisher_lsn),
                lag_seconds=None if lag is None else float(lag),
                left_out={TableName(str(namespace), str(name)): str(reason) for namespace, name, reason in values.get("left_out", ())},
                relay_log=_relay_log(values.get("relay_log")),
                copies_begin=None if begin is None else float(begin),
                limited=values.get("limited") is True,
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return cls()


def _retry(values: Any) -> Retry | None:
    return values and Retry(str(values["error"]), int(values["attempt"]), float(values["next_attempt"]))


def _relay_log(values: Any) -> RelayLogDetails | None:
    return values and RelayLogDetails(
        received=Lsn.parse(values["received"]),
        flushed=Lsn.parse(values["flushed"]),
        size=int(values["size"]),
        limit=int(values["limit"]),
        paused=bool(values["paused"]),
        retry=_retry(values["retry"]),
        failure=values.get("failure") and str(values["failure"]),
    )
