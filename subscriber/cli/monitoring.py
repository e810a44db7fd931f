"""``subscriber status --check``: one line and an exit status in the form of monitoring plugins (Nagios Plugin Development Guidelines).

CRITICAL: nothing is replicated, or the lag is too large. WARNING: replication works with a restriction. UNKNOWN: the check failed.
A target that cannot be reached is UNKNOWN too, as in check_postgres, which has a separate check of the connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from subscriber.cli.output import complain, say
from subscriber.cli.status_text import size
from subscriber.config import parse_bytes, parse_seconds
from subscriber.errors import ConfigurationError, TargetError
from subscriber.printable import printable
from subscriber.subscription.management.status import State, SubscriptionStatus

__all__ = ["MaxLag", "Severity", "conclude", "is_check", "judge", "line"]


class Severity(IntEnum):
    """Exit statuses."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_WORST = (Severity.CRITICAL, Severity.WARNING, Severity.UNKNOWN, Severity.OK)
_RESTRICTED = frozenset({State.CREATING, State.CONNECTING, State.COPYING, State.CATCHING_UP})


def is_check(arguments: Sequence[str]) -> bool:
    """Whether a command line that cannot be parsed asks for a check. argparse accepts abbreviations of an option."""
    return "status" in arguments and any(len(each) > 2 and "--check".startswith(each) for each in arguments)


@dataclass(frozen=True, slots=True)
class MaxLag:
    """``--max-lag``: seconds or bytes."""

    seconds: float | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str) -> MaxLag:
        """Read ``30s`` or ``16MB``.

        Raises:
            ConfigurationError: it is neither, or has no unit.
        """
        if text.strip()[-1:].isdecimal():
            raise ConfigurationError(f'--max-lag "{text}" has no unit', hint="use for example 30s, 5min or 16MB")
        try:
            return cls(seconds=parse_seconds("max_lag", text))
        except ConfigurationError:
            pass
        try:
            return cls(size=parse_bytes("max_lag", text))
        except ConfigurationError:
            raise ConfigurationError(f'--max-lag "{text}" is neither a time nor a size', hint="use for example 30s, 5min or 16MB") from None


def judge(statuses: Sequence[SubscriptionStatus], limit: MaxLag) -> tuple[Severity, str]:
    """Return the worst severity of all subscriptions, and the line with performance data."""
    if not statuses:
        return Severity.UNKNOWN, line(Severity.UNKNOWN, "the target has no subscription")
    verdicts = [list(_verdicts(status, limit)) for status in statuses]
    severities = [severity for found in verdicts for severity, _ in found]
    worst = next((severity for severity in _WORST if severity in severities), Severity.OK)
    texts = [
        f"{status.observation.definition.name} {', '.join([status.state.words, *(text for _, text in found if text)])}"
        for status, found in zip(statuses, verdicts, strict=True)
    ]
    return worst, line(worst, "; ".join(texts), " ".join(each for status in statuses for each in _performance(status, limit)))


def line(severity: Severity, text: str, performance: str = "") -> str:
    """``SUBSCRIBER OK - text | performance``. The text has no bar, because a bar separates the two."""
    line = printable(f"SUBSCRIBER {severity.name} - {text}").replace("|", "/")
    return f"{line} | {printable(performance)}" if performance else line


def conclude(severity: Severity, text: str) -> int:
    """Print the line and return the exit status: UNKNOWN if the line cannot be printed."""
    try:
        say(text)
    except BrokenPipeError:
        return Severity.UNKNOWN
    except TargetError as error:
        complain(error.one_line())
        return Severity.UNKNOWN
    return severity


def _verdicts(status: SubscriptionStatus, limit: MaxLag) -> Iterator[tuple[Severity, str]]:
    """Yield the severities with their reasons. A reason is empty if the state, which is shown in any case, says everything."""
    observation, retry = status.observation, status.retry
    if retry is not None:
        yield Severity.CRITICAL, f"attempt {retry.attempt} failed: {retry.error}"
    elif status.state in _RESTRICTED:
        yield Severity.WARNING, ""
    elif status.state is not State.RUNNING:
        yield Severity.CRITICAL, observation.last_error or ""
    elif failing := [str(table.table) for table in observation.tables if table.retry is not None]:
        yield Severity.WARNING, f"synchronization fails: {', '.join(failing)}"
    if parked := [f"{table.table} {table.parked}" for table in observation.tables if table.parked]:
        yield Severity.WARNING, f"parked: {', '.join(parked)}"
    if observation.applier is not None and observation.applier.stopped:
        yield Severity.WARNING, f"stopped: {', '.join(observation.applier.stopped)}"
    if unequal := [table.verification for table in observation.tables if table.verification is not None and not table.verification.equal]:
        yield Severity.WARNING, f"not equal to the publisher: {', '.join(str(each.table) for each in unequal)}"
    if observation.left_out:
        yield Severity.WARNING, f"not replicated: {', '.join(map(str, observation.left_out))}"
    if status.slot is not None and (danger := status.slot.danger):
        yield Severity.CRITICAL, danger
    lag = [] if status.lag_bytes is None else [f"{size(status.lag_bytes)} behind"]
    seconds = _seconds(status)
    if seconds is not None:
        lag.append(f"lag {seconds:.1f} s")
    yield Severity.OK, ", ".join(lag)
    if (limit.seconds is not None and seconds is None) or (limit.size is not None and status.lag_bytes is None):
        yield Severity.UNKNOWN, "the lag is not known"
    if (limit.seconds is not None and (seconds or 0) > limit.seconds) or (limit.size is not None and (status.lag_bytes or 0) > limit.size):
        yield Severity.CRITICAL, "the lag is too large"


def _seconds(status: SubscriptionStatus) -> float | None:
    """The lag. In a target with a separate applier, it includes changes that wait to be applied."""
    applier = status.observation.applier
    waits = None if applier is None or applier.waiting_since is None else max(time.time() - applier.waiting_since, 0.0)
    return max((each for each in (status.lag_seconds, waits) if each is not None), default=None)


def _performance(status: SubscriptionStatus, limit: MaxLag) -> Iterator[str]:
    """``'label'=value[unit];[warn];[crit];[min]``."""
    name = status.observation.definition.name.replace("=", "_").replace("'", "''")
    seconds = _seconds(status)
    if seconds is not None:
        yield f"'{name} lag'={seconds:.3f}s;;{'' if limit.seconds is None else f'{limit.seconds:g}'};0"
    if status.lag_bytes is not None:
        yield f"'{name} behind'={status.lag_bytes}B;;{'' if limit.size is None else limit.size};0"
    if status.slot is not None:
        yield f"'{name} retained'={status.slot.retained_bytes}B;;;0"
