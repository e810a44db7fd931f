"""The table of answers to errors."""

from __future__ import annotations

from itertools import pairwise

import pytest

from subscriber import errors
from subscriber.apply.retry import _TABLE, Backoff, Policy, is_of_a_table, policy
from subscriber.config import Settings

CLASSES = [getattr(errors, name) for name in errors.__all__]
EXPECTED = {
    Policy.SOON: {"CopyOutdated", "PublisherUnavailable", "SlotInUse", "TargetUnavailable", "UndecidedTransaction"},
    Policy.INTERVAL: {"ApplyError", "PublisherError", "RelationError", "SpoolError", "TargetError"},
    Policy.NEVER: {
        "ConfigurationError",
        "DataLossError",
        "NeverPrepared",
        "ProtocolError",
        "SubscriberError",
        "SubscriptionChanged",
        "SubscriptionInUse",
    },
}


@pytest.mark.parametrize("found", CLASSES)
def test_every_error_has_a_policy(found: type[errors.SubscriberError]) -> None:
    assert found.__name__ in EXPECTED[policy(found("it broke"))]


def test_no_row_hides_another_one() -> None:
    rows = [row[0] for row in _TABLE]
    assert len(set(rows)) == len(rows) == len(CLASSES)
    for index, found in enumerate(rows):
        assert not any(issubclass(found, earlier) for earlier in rows[:index])


def test_pauses_grow_to_a_second() -> None:
    backoff = Backoff(Settings(wal_retrieve_retry_interval=5))
    soon = policy(errors.PublisherUnavailable("away"))
    pauses = [backoff.pause(soon) for _ in range(10)]
    assert pauses[0] == pytest.approx(0.1)
    assert all(later == pytest.approx(min(2 * earlier, 1)) for earlier, later in pairwise(pauses))
    assert pauses[-1] == 1
    backoff.reset()
    assert backoff.pause(soon) == pytest.approx(0.1)


def test_errors_that_need_a_fix_are_retried_at_the_interval() -> None:
    backoff = Backoff(Settings(wal_retrieve_retry_interval=5))
    assert [backoff.pause(policy(errors.ApplyError("refused"))) for _ in range(3)] == [5, 5, 5]
    assert backoff.pause(policy(errors.TargetUnavailable("away"))) == pytest.approx(0.1)


def test_a_short_interval_bounds_the_first_pause_too() -> None:
    backoff = Backoff(Settings(wal_retrieve_retry_interval=0.02))
    assert [backoff.pause(policy(errors.SlotInUse("busy"))) for _ in range(2)] == [0.02, 0.02]


def test_errors_of_one_table() -> None:
    """Those that would not occur without its changes. A server that is away or full, and another process, concern all tables."""
    own = [
        errors.ApplyError("a constraint", sqlstate="23514"),
        errors.ApplyError("of a trigger", sqlstate="P0001"),
        errors.RelationError("no such column", sqlstate="42703"),
        errors.TargetError("permission denied", sqlstate="42501"),
        errors.TargetError("a row is too large", sqlstate="54000"),
    ]
    others = [
        errors.TargetUnavailable("away"),
        errors.TargetUnavailable("deadlock detected", sqlstate="40P01"),
        errors.TargetUnavailable("could not serialize", sqlstate="40001"),
        errors.TargetError("no space left on device", sqlstate="53100"),
        errors.TargetError("read-only", sqlstate="25006"),
        errors.TargetError("internal error", sqlstate="XX000"),
        errors.SubscriptionInUse("another process"),
        errors.SubscriptionChanged("dropped"),
        errors.PublisherError("permission denied", sqlstate="42501"),
        errors.SpoolError("full"),
        errors.DataLossError("slot"),
    ]
    assert [is_of_a_table(error) for error in own] == [True] * len(own)
    assert [is_of_a_table(error) for error in others] == [False] * len(others)
