"""The messages of ``run``: when a subscription is ready, the progress of a long copy or catch-up, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Final

from subscriber.cli.service.systemd import describe_states, notifying
from subscriber.cli.status_text import size
from subscriber.interfaces import WorkerState
from subscriber.log_fields import log_fields
from subscriber.printable import counted
from subscriber.subscription.run_status import Status
from subscriber.subscription.subscription import Subscription

__all__ = ["Narrator", "caught_up", "stopped"]

_POLL: Final = 0.25
_INTERVAL: Final = 60.0


class Narrator:
    """Watches the subscriptions of this process, and prints what changed.

    Args:
        subscriptions: the running subscriptions, by name.
        say: prints a line.
        named: whether each line begins with the subscription's name.
        ends: the subscriptions end when they have caught up, so that no line says that they are ready.
        copies: whether to print the progress of copies once in ``interval``. False if progress bars show it.
        interval: seconds between two lines about the same copy or catch-up.
    """

    def __init__(
        self,
        subscriptions: Callable[[], Mapping[str, Subscription]],
        say: Callable[[str], None],
        *,
        named: bool,
        ends: bool = False,
        copies: bool = True,
        interval: float = _INTERVAL,
    ) -> None:
        self._subscriptions = subscriptions
        self._say = say
        self._named = named
        self._ends = ends
        self._copies = copies
        self._interval = interval
        self._known: dict[Subscription, _Known] = {}

    async def during(self, work: Coroutine[None, None, None]) -> None:
        """Look repeatedly while something works."""
        looking = asyncio.create_task(self._run())
        try:
            async with notifying(lambda: describe_states(self._subscriptions(), patient=self._named)):
                await work
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_POLL)

    def look(self) -> None:
        """Print what changed since the last call."""
        now = asyncio.get_running_loop().time()
        found = self._subscriptions()
        self._known = {each: self._known.get(each) or _Known(now) for each in found.values()}
        for name, subscription in found.items():
            self._look(name, subscription.status, self._known[subscription], now)

    def _look(self, name: str, status: Status, known: _Known, now: float) -> None:
        if status.state is WorkerState.RUNNING:
            if not known.ready and not self._ends:
                known.ready = True
                self._tell(name, _ready(status, now - known.began))
        elif now - known.reported >= self._interval:
            known.reported = now
            if status.state is WorkerState.COPYING and self._copies:
                self._tell(name, _copying(status))
            elif status.state is WorkerState.CATCHING_UP:
                self._tell(name, _catching_up(status))

    def _tell(self, name: str, text: str) -> None:
        with log_fields(subscription=name):
            self._say(f'subscription "{name}": {text}' if self._named else text)


class _Known:
    """What was printed about one subscription, and when."""

    def __init__(self, now: float) -> None:
        self.began = self.reported = now
        self.ready = False


def _ready(status: Status, seconds: float) -> str:
    """The line when the subscription begins to follow the publisher."""
    return f"{_copied(status, seconds)}; streaming from {status.flushed}"


def caught_up(status: Status, seconds: float) -> str:
    """The line at the end of a run with ``--until-…``."""
    return f"{_copied(status, seconds)}; caught up to {status.flushed}"


def stopped(status: Status) -> str:
    """The line at the end of a run that was stopped."""
    return f"stopped; the target has everything up to {status.flushed}"


def _copied(status: Status, seconds: float) -> str:
    copies = [copy for copy in status.copies.values() if copy.done]
    if not copies:
        return f"{counted(len(status.tables), 'table')}, nothing to copy"
    compared = [copy.reconciled for copy in copies if copy.reconciled is not None]
    copied = [copy.rows for copy in copies if copy.reconciled is None]
    parts = [f"copied {counted(len(copied), 'table')}, {counted(sum(copied), 'row')}"] if copied else []
    if compared:
        rows, written, deleted = (sum(getattr(each, what) for each in compared) for what in ("compared", "written", "deleted"))
        parts.append(f"compared {counted(len(compared), 'table')}, {counted(rows, 'row')}: {written:,} written, {deleted:,} deleted")
    return f"{'; '.join(parts)} in {seconds:.1f} s"


def _copying(status: Status) -> str:
    """The progress of the copies."""
    done = sum(copy.done for copy in status.copies.values())
    rows = sum(copy.rows for copy in status.copies.values())
    estimated = [copy.estimated_rows for copy in status.copies.values() if not copy.done]
    whole = sum(copy.rows for copy in status.copies.values() if copy.done) + sum(each or 0 for each in estimated)
    of = f" of about {whole:,}" if all(estimated) and whole > rows else ""
    begin = (
        ""
        if status.copies_begin is None
        else f"; others wait until {datetime.fromtimestamp(status.copies_begin, UTC).astimezone():%H:%M%z}"
    )
    return f"copying: {done:,} of {counted(len(status.tables), 'table')} done, {rows:,}{of} rows{begin}"


def _catching_up(status: Status) -> str:
    """How far the target is behind."""
    behind = max(int(status.publisher_lsn) - int(status.flushed), 0)
    return f"catching up: the target has everything up to {status.flushed}, {size(behind)} of WAL are left"
