"""Tell systemd how the service is: ready, its state in words, that its event loop turns, and that it stops.

Source: sd_notify(3), sd_watchdog_enabled(3). Without ``NOTIFY_SOCKET`` nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from subscriber.interfaces import WorkerState
from subscriber.printable import counted
from subscriber.subscription.subscription import Subscription

__all__ = ["Notifier", "describe_states", "notifying"]

_LOOK_SECONDS: Final = 1.0


class Notifier:
    """Sends datagrams to the service manager.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # a name that begins with @ is in Linux's abstract namespace
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._watched = False
        self.interval = _LOOK_SECONDS
        microseconds = environment.get("WATCHDOG_USEC", "")
        if microseconds.isdecimal() and environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            self._watched = True
            self.interval = min(self.interval, max(int(microseconds) / 2e6, 0.01))

    @property
    def wanted(self) -> bool:
        """Whether the service manager listens."""
        return bool(self._address)

    def tell(self, *assignments: str) -> None:
        """Send assignments such as ``READY=1``. If that fails, the service goes on."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(assignments).encode("utf-8", "backslashreplace"), self._address)

    async def run(self, state: Callable[[], tuple[bool, str]]) -> None:
        """Tell the state once a second, until cancelled. It returns whether the service is ready, and its state in words."""
        told, ready = "", False
        while True:
            is_ready, text = state()
            assignments = ["WATCHDOG=1"] if self._watched else []
            if is_ready and not ready:
                ready = True
                assignments.append("READY=1")
            if text != told:
                told = text
                assignments.append(f"STATUS={text}")
            if assignments:
                self.tell(*assignments)
            await asyncio.sleep(self.interval)


@contextlib.asynccontextmanager
async def notifying(state: Callable[[], tuple[bool, str]]) -> AsyncIterator[None]:
    """Tell the state to systemd inside the block, and at its end that the service stops."""
    notifier = Notifier(os.environ)
    if not notifier.wanted:
        yield
        return
    telling = asyncio.create_task(notifier.run(state))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        notifier.tell("STOPPING=1", "STATUS=stopping")


def describe_states(subscriptions: Mapping[str, Subscription], *, patient: bool) -> tuple[bool, str]:
    """The state of the subscriptions of a process.

    Args:
        subscriptions: by name.
        patient: their errors are retried from the beginning, so that the service is ready at once. Else it is once the first attempt has
            come to a stream.
    """
    found = [each.status for each in subscriptions.values()]
    counts = Counter(status.state.value.replace("_", " ") for status in found)
    text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    ready = patient or all(status.state is not WorkerState.CONNECTING for status in found)
    return ready, f"{counted(len(found), 'subscription')}: {text}" if found else "no subscriptions"
