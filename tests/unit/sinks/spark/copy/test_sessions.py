"""Cancelling what sessions of a copy wait for, from another thread."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from subscriber.sinks.spark.copy.task import Sessions

pytest.importorskip("adbc_driver_manager", reason="pip install 'pg-subscriber[spark-snapshot]'")


class Peer:
    """In place of a connection: its cancel does not end before the test allows it."""

    def __init__(self) -> None:
        self.calls = 0
        self.called = threading.Event()
        self.may_end = threading.Event()

    def adbc_cancel(self) -> None:
        self.calls += 1
        self.called.set()
        assert self.may_end.wait(30)


def cancels_under_way() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cancel"]


@pytest.mark.timeout(60)
def test_a_dead_peer_keeps_neither_who_cancels_nor_the_process_and_is_asked_once() -> None:
    sessions, peer = Sessions(), Peer()
    with sessions.known(cast("Any", peer)):
        sessions.cancel()
        assert peer.called.wait(30)
        (first,) = cancels_under_way()
        assert first.daemon
        for _ in range(3):
            sessions.cancel()
        for thread in cancels_under_way():
            if thread is not first:
                thread.join(30)
        assert peer.calls == 1
        peer.may_end.set()
    # it has ended: a closed session is not cancelled
    first.join(30)
    sessions.cancel()
    assert cancels_under_way() == []
    assert peer.calls == 1
