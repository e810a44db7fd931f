from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.transaction.feedback import FlushTracker
from tests.support.examples import few_and_many, property_test


def tracker_at(position: int) -> FlushTracker:
    return FlushTracker(Lsn(position))


def test_starts_at_the_durable_position() -> None:
    tracker = tracker_at(100)
    assert tracker.status() == (100, 100, 100)
    assert tracker.idle
    assert tracker.idle_lsn() is None


def test_idle_position_is_stored_in_the_target_first() -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(150))
    assert tracker.status() == (150, 100, 150)
    assert tracker.idle_lsn() == 150
    tracker.flush(Lsn(150))
    assert tracker.status() == (150, 150, 150)
    assert tracker.idle_lsn() is None


def test_keepalive_does_not_acknowledge_pending_data() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200))
    tracker.receive(Lsn(900))
    assert not tracker.idle
    assert tracker.idle_lsn() is None
    assert tracker.status() == (900, 100, 100)


def test_applied_is_not_flushed() -> None:
    """A sink that becomes durable later: visible now, acknowledged when it says so."""
    tracker = tracker_at(100)
    tracker.pend(Lsn(200))
    tracker.applied_to(Lsn(200))
    assert tracker.status() == (200, 100, 200)
    assert tracker.idle_lsn() is None
    tracker.flush(Lsn(200))
    assert tracker.status() == (200, 200, 200)
    assert tracker.idle


def test_durable_is_visible() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200))
    tracker.pend(Lsn(300))
    tracker.flush(Lsn(200))
    assert tracker.status() == (300, 200, 200)
    assert not tracker.idle


def test_idle_once_all_pending_data_is_durable() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200))
    tracker.receive(Lsn(250))
    tracker.flush(Lsn(200))
    assert tracker.status() == (250, 200, 250)
    assert tracker.idle_lsn() == 250


def test_transaction_that_comes_while_the_idle_position_is_stored() -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(150))
    idle = tracker.idle_lsn()
    assert idle == 150
    tracker.pend(Lsn(200))
    tracker.flush(idle)
    assert tracker.status() == (200, 150, 150)
    assert not tracker.idle


def test_reported_apply_position_does_not_go_back_when_something_is_pending() -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(150))
    assert tracker.status() == (150, 100, 150)
    tracker.pend(Lsn(200))
    assert tracker.status() == (200, 100, 150)


def test_order_of_pend_and_receive_of_one_frame_does_not_matter_to_flush() -> None:
    one, other = tracker_at(100), tracker_at(100)
    one.pend(Lsn(200))
    one.receive(Lsn(200))
    other.receive(Lsn(200))
    other.pend(Lsn(200))
    assert one.status() == other.status() == (200, 100, 100)
    assert one.idle_lsn() is other.idle_lsn() is None


def test_frames_without_lsn() -> None:
    tracker = tracker_at(100)
    tracker.receive(INVALID_LSN)
    assert tracker.status() == (100, 100, 100)


def test_nothing_goes_back() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200))
    tracker.flush(Lsn(200))
    tracker.receive(Lsn(150))
    tracker.applied_to(Lsn(150))
    tracker.flush(Lsn(150))
    assert tracker.status() == (200, 200, 200)


def test_late_prepare_below_the_flushed_position_is_not_pending() -> None:
    """b … P from before the slot's two-phase start, right before its K: the K holds the acknowledgement back."""
    tracker = tracker_at(500)
    tracker.pend(Lsn(200))
    assert tracker.status() == (500, 500, 500)
    tracker.pend(Lsn(600))
    tracker.applied_to(Lsn(200))
    tracker.flush(Lsn(200))
    assert tracker.status() == (600, 500, 500)
    tracker.flush(Lsn(600))
    assert tracker.status() == (600, 600, 600)


def test_late_prepare_above_the_flushed_position_is_pending() -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(500))
    assert tracker.status() == (500, 100, 500)
    tracker.pend(Lsn(200))
    assert tracker.idle_lsn() is None
    assert tracker.status() == (500, 100, 500)


@pytest.mark.parametrize("call", ["applied_to", "flush"])
def test_position_beyond_received_is_a_programming_error(call: str) -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(0x1_0000_0000))
    with pytest.raises(ValueError, match=r"1/1 cannot have been applied: only 1/0 was received"):
        getattr(tracker, call)(Lsn(0x1_0000_0001))
    assert tracker.status() == (0x1_0000_0000, 100, 0x1_0000_0000)


def test_commit_below_the_received_position_contradicts_it() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200), in_order=True)
    tracker.receive(Lsn(200))
    tracker.flush(Lsn(200))
    tracker.receive(Lsn(900))
    assert tracker.status() == (900, 200, 900)
    with pytest.raises(ProtocolError, match="ends at 0/12C, after it had sent everything up to 0/384"):
        tracker.pend(Lsn(300), in_order=True)
    assert tracker.contradicted
    assert tracker.idle_lsn() is None, "the wrong end is not stored"
    assert tracker.applied == 200
    assert tracker.status() == (900, 200, 900), "what is reported never goes back"


def test_wrong_wal_end_that_was_already_stored() -> None:
    tracker = tracker_at(100)
    tracker.receive(Lsn(900))
    tracker.flush(Lsn(900))
    with pytest.raises(ProtocolError):
        tracker.pend(Lsn(300), in_order=True)
    assert (tracker.applied, tracker.flushed) == (100, 900)
    # a call to the sink that was under way
    tracker.flush(Lsn(900))
    assert tracker.applied == 100


def test_contradicted_while_transactions_are_pending() -> None:
    tracker = tracker_at(100)
    tracker.pend(Lsn(200), in_order=True)
    tracker.pend(Lsn(300), in_order=True)
    tracker.receive(Lsn(900))
    with pytest.raises(ProtocolError):
        tracker.pend(Lsn(400), in_order=True)
    assert tracker.applied == 100
    tracker.applied_to(Lsn(200))
    assert tracker.applied == 200
    tracker.flush(Lsn(300))
    assert tracker.applied == 300
    assert tracker.idle_lsn() is None


def test_order_is_checked_within_a_session_except_for_late_prepares() -> None:
    tracker = tracker_at(1000)
    tracker.pend(Lsn(500), in_order=True)
    tracker.receive(Lsn(600))
    tracker.pend(Lsn(550))
    with pytest.raises(ProtocolError):
        tracker.pend(Lsn(600), in_order=True)


class Following(RuleBasedStateMachine):
    """A stream with a target that applies, becomes durable later, and stores idle positions; and a model that keeps every pending end."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = FlushTracker(Lsn(1000))
        self.durable = 1000
        self.sent = 1000
        self.pending: list[int] = []
        self.applied: list[int] = []
        self.reported = self.tracker.status()

    @rule(step=st.integers(1, 50))
    def keepalive(self, step: int) -> None:
        self.sent += step
        self.tracker.receive(Lsn(self.sent))

    @rule(step=st.integers(1, 50))
    def old_frame(self, step: int) -> None:
        self.tracker.receive(Lsn(max(self.sent - step, 0)))

    @rule(step=st.integers(1, 50), frame_first=st.booleans())
    def transaction(self, step: int, frame_first: bool) -> None:
        self.sent += step
        if frame_first:
            self.tracker.receive(Lsn(self.sent))
        self.tracker.pend(Lsn(self.sent))
        self.tracker.receive(Lsn(self.sent))
        self.pending.append(self.sent)

    @precondition(lambda self: self.pending)
    @rule(share=st.integers(0, 3))
    def apply(self, share: int) -> None:
        end = self.pending[: share + 1][-1]
        self.applied += self.pending[: share + 1]
        del self.pending[: share + 1]
        self.tracker.applied_to(Lsn(end))

    @precondition(lambda self: self.applied)
    @rule(share=st.integers(0, 3))
    def become_durable(self, share: int) -> None:
        self.durable = self.applied[: share + 1][-1]
        del self.applied[: share + 1]
        self.tracker.flush(Lsn(self.durable))

    @rule()
    def store_idle_position(self) -> None:
        lsn = self.tracker.idle_lsn()
        expected = self.sent if not self.pending and not self.applied and self.sent > self.durable else None
        assert lsn == expected
        if lsn is not None:
            self.durable = int(lsn)
            self.tracker.flush(lsn)

    @rule()
    def report(self) -> None:
        status = self.tracker.status()
        assert all(now >= before for now, before in zip(status, self.reported, strict=True))
        self.reported = status
        write, flush, apply = status
        assert write == self.sent
        assert flush == self.durable
        # nothing that is not applied is reported so; nothing acknowledged that is not durable
        assert all(end > apply for end in self.pending)
        assert all(end > flush for end in self.pending + self.applied)
        if not self.pending and not self.applied:
            assert apply == write

    @invariant()
    def ordered(self) -> None:
        assert self.tracker.received >= self.tracker.flushed
        assert self.tracker.flushed == self.durable
        assert self.tracker.idle == (not self.pending and not self.applied)


@few_and_many(40, 300)
def test_following(examples: int) -> None:
    run_state_machine_as_test(Following, settings=settings(max_examples=examples, stateful_step_count=40))


CALLS = st.sampled_from(["receive", "pend", "applied_to", "flush", "status"])


@property_test(100, 500, st.lists(st.tuples(CALLS, st.integers(0, 40)), max_size=40))
def test_invariants_for_any_sequence_of_calls(calls: list[tuple[str, int]]) -> None:
    tracker = tracker_at(10)
    before = tracker.status()
    flushes = 10
    for call, lsn in calls:
        if call == "status":
            status = tracker.status()
            assert all(now >= earlier for now, earlier in zip(status, before, strict=True))
            before = status
        else:
            try:
                getattr(tracker, call)(Lsn(lsn))
            except ValueError:
                assert lsn > tracker.received
            else:
                if call == "flush":
                    flushes = max(flushes, lsn)
        assert tracker.flushed == flushes, "only flush moves flush"
        assert tracker.received >= tracker.applied >= tracker.flushed
