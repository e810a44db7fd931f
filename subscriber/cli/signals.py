"""SIGTERM and SIGINT end a verb cleanly. A second signal ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Ending", "clean_end", "on_hangup"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Ending:
    """The signal that was received, if any.

    Attributes:
        received: whether there was a signal.
        status: the resulting exit status: 0, or 130 after SIGINT.
    """

    def __init__(self) -> None:
        self.received = False
        self.status = 0


@contextlib.contextmanager
def on_hangup(reload: Callable[[], None]) -> Iterator[None]:
    """Call ``reload`` at each SIGHUP, in place of what was called before. Nothing in a thread that is not the main one."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGHUP)
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def clean_end(stop: Callable[[], None]) -> Iterator[Ending]:
    """Call ``stop`` at the first SIGTERM or SIGINT. Works only in the main thread, with a running loop."""
    loop = asyncio.get_running_loop()
    ending = Ending()

    def received(number: signal.Signals) -> None:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        ending.received = True
        if number == signal.SIGINT:
            ending.status = 130
        stop()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield ending
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
