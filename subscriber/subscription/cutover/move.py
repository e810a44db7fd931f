"""The engine: move the writers from one database to the other, or undo that. See :mod:`subscriber.subscription.cutover`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from subscriber import crash_points
from subscriber.abc.sequences import SequenceState
from subscriber.errors import ConfigurationError, SubscriberError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.cutover.command import run_command
from subscriber.subscription.cutover.link import Link
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.cutover.record import Record
from subscriber.subscription.management.sequences import sync_sequences
from subscriber.subscription.management.verify import verify
from subscriber.walreceiver.fences.fence import Fence

__all__ = ["BACKWARD", "FORWARD", "Move", "Place", "Tell", "sequence_left"]

_log = logging.getLogger(__name__)

FORWARD: Final = ""
BACKWARD: Final = "back "
"""Begins the names of a rollback's steps in the record."""

Tell = Callable[[str], None]
"""Is told about each step."""

_Details = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the two databases.

    Attributes:
        title: ``the old database`` or ``the new database``.
        conninfo: its connection string, or URL.
        fence: None: this kind of database cannot be closed.
    """

    title: str
    conninfo: str
    fence: Fence | None


class Move:
    """One move of the writers.

    Args:
        direction: :data:`FORWARD` or :data:`BACKWARD`.
        source, destination: where the writers are, and where they will be.
        link: the subscription from source to destination.
        back: the subscription of the opposite direction; None: it is not made.
        publications: of ``link``.
        record: is in the new database in both directions.
        options: how.
        tell: is told about each step.
    """

    def __init__(
        self,
        direction: str,
        *,
        source: Place,
        destination: Place,
        link: Link,
        back: Link | None,
        record: Record,
        options: CutoverOptions,
        tell: Tell,
    ) -> None:
        self._direction = direction
        self._source = source
        self._destination = destination
        self._link = link
        self._back = back
        self._record = record
        self._options = options
        self._tell = tell
        self._passed = record.made(self.key("open")) or self.key("open") in record.entries
        # not, if another cutover has closed it
        self._is_open = True
        self._steps: dict[str, Callable[[], Awaitable[_Details]]] = {
            "close_destination": self._close_destination,
            "close_source": self._close_source,
            "drain": self._drain,
            "catch_up": self._catch_up,
            "verify": self._verify,
            "stop": self._stop,
            "way_back": self._way_back,
            "sequences": self._sequences,
            "switch": self._switch,
        }

    def key(self, step: str) -> str:
        """The name of a step in the record."""
        return self._direction + step

    @property
    def keys(self) -> list[str]:
        """The names of all steps in the record."""
        return [self.key(step) for step in ("plan", *self._steps, "open", "abort")]

    @property
    def begun(self) -> bool:
        """Whether it may have changed anything."""
        return any(self.key(step) in self._record.entries for step in (*self._steps, "open", "abort"))

    @property
    def passed(self) -> bool:
        """Whether the point of no return is passed."""
        return self._passed

    @property
    def _fence(self) -> Fence:
        assert self._source.fence is not None, "writers can only be moved from PostgreSQL"
        return self._source.fence

    async def run(self) -> float | None:
        """Make all steps that were not made yet. After an error, or if cancelled, everything is undone, unless writers were let in.

        Returns:
            For how many seconds no writer could write.

        Raises:
            SubscriberError: what is wrong. It says whether everything was undone.
        """
        if not await self._has_left() and (self.key("abort") in self._record.entries or await self._is_stale()):
            await self.undo()
            raise ConfigurationError(
                "an earlier attempt was interrupted, and is undone now: writers use " + self._source.title, hint="run the command again"
            )
        if not self._passed:
            limit = asyncio.timeout(self._seconds_left())
            try:
                async with limit:
                    for name, make in self._steps.items():
                        await self._make(name, make)
                    if not await self._fence.leave():
                        raise ConfigurationError(f"{self._source.title} was opened meanwhile", hint="find out by whom, and try again")
            except BaseException as error:
                late = self._late() if limit.expired() else None
                await self._undo_after(late or error)
                if late is not None:
                    raise late from None
                raise
        self._passed = True
        crash_points.reached("cutover.left")
        try:
            await self._make("open", self._open)
        except SubscriberError as error:
            error.add_note(f"writers are let into {self._destination.title}: run the command again to finish that")
            raise
        closed = self._record.entries.get(self.key("close_source"))
        opened = self._record.entries[self.key("open")].details.get("opened_at")
        return opened - closed.began_at if closed is not None and opened is not None else None

    async def _make(self, name: str, make: Callable[[], Awaitable[_Details]]) -> None:
        key = self.key(name)
        if self._record.made(key):
            return
        began = time.monotonic()
        known: _Details = None
        if name == "close_destination" and key not in self._record.entries and self._destination.fence is not None:
            known = {"was_closed": await self._destination.fence.is_closed()}
        await self._record.begin(key, known)
        details = await make()
        await self._record.end(key, details)
        _log.info("step %s took %.3f s", key, time.monotonic() - began)

    def _seconds_left(self) -> float | None:
        limit, closed = self._options.max_downtime, self._record.entries.get(self.key("close_source"))
        if limit is None or closed is None:
            return limit
        return max(closed.began_at + limit - self._record.now(), 0)

    async def _has_left(self) -> bool:
        """Whether the point of no return is passed. The source's fence knows it before the record."""
        if not self._passed and self.key("close_source") in self._record.entries:
            self._passed = await self._fence.has_left()
        return self._passed

    async def _is_stale(self) -> bool:
        """Whether the source was opened, by this program while the record could not be written, or by someone else."""
        closed = self._record.entries.get(self.key("close_source"))
        if closed is None or closed.ended_at is None:
            return False
        return not await self._fence.is_owned()

    # --- undo

    async def _undo_after(self, error: BaseException) -> None:
        try:
            await self.undo()
        except SubscriberError as failure:
            if isinstance(error, SubscriberError) and not self._passed:
                raise self._not_undone(error, failure) from failure
            raise
        if isinstance(error, SubscriberError):
            error.add_note("everything was undone" + (f": writers use {self._source.title}" if self._is_open else ""))

    def _late(self) -> ConfigurationError:
        begun = [step for step in self._steps if self.key(step) in self._record.entries]
        during = f"during step {begun[-1]}" if begun else "before the first step"
        return ConfigurationError(
            f"writers were stopped for {self._options.max_downtime:g} s, the maximum, {during}",
            hint="correct the cause, or allow more with --max-downtime",
        )

    @staticmethod
    def _not_undone(error: SubscriberError, failure: SubscriberError) -> SubscriberError:
        failed = TargetError(str(error), hint="not everything could be undone: run the command with --abort when the cause is gone")
        failed.also = [failure]
        return failed

    async def undo(self) -> None:
        """Undo all steps that were begun. Writers are let into the source first. May be repeated.

        Raises:
            ConfigurationError: writers were let into the destination.
            SubscriberError: something could not be undone yet.
        """
        try:
            left = await self._has_left()
        except SubscriberError:
            # the next call undoes it, unless the source's fence tells that writers have left
            await self._record.begin(self.key("abort"))
            raise
        if left:
            hint = "repeat --rollback to finish it" if self._direction else "repeat the cutover to finish it; then --rollback returns"
            raise ConfigurationError(f"writers were let into {self._destination.title}: there is nothing to undo", hint=hint)
        entries = self._record.entries
        begun = {step for step in self._steps if self.key(step) in entries}
        lost: TargetError | None = None
        try:
            await self._record.begin(self.key("abort"))
        except TargetError as error:
            # writers matter more than the record: without the fence, the next attempt undoes the rest. The lock of this cutover may be
            # lost, too: another process may continue it. So nothing else is undone here
            lost = error
        if "close_source" in begun:
            self._is_open = await self._fence.open(undo=True)
            if self._is_open:
                self._tell(f"writers can use {self._source.title} again")
        if lost is not None:
            raise lost
        # fails if the lock is lost: another process may have begun again
        await self._record.load()
        if "stop" in begun:
            await self._link.enable()
        if "way_back" in begun and self._back is not None:
            await self._back.remove()
        kept = False
        destination = self._destination.fence
        if "close_destination" in begun and destination is not None:
            kept = "switch" in begun or entries[self.key("close_destination")].details.get("was_closed", False)
            if not kept:
                await destination.open(undo=True)
        await self._record.forget(*self.keys)
        if kept and not self._direction:
            self._tell(f"{self._destination.title} stays closed to writers; --open-target opens it")

    # --- the steps

    async def _close_destination(self) -> _Details:
        fence = self._destination.fence
        if fence is None:
            return None
        await fence.close(self._options.fence, shared=True)
        if await self._fence.has_left():
            # the lock of this cutover is lost
            await fence.open(undo=True)
            raise ConfigurationError(f"writers use {self._destination.title} already", hint="another process has finished this")
        return None

    async def _close_source(self) -> _Details:
        self._tell(f"closing {self._source.title} to writers ({self._options.fence})")
        await self._fence.close(self._options.fence)
        return None

    async def _drain(self) -> _Details:
        lsn = await self._fence.drain()
        self._tell(f"nothing can commit in {self._source.title} any more; its WAL ends at {lsn}")
        return {"lsn": str(lsn)}

    async def _catch_up(self) -> _Details:
        lsn = Lsn.parse(self._record.entries[self.key("drain")].details["lsn"])
        await self._link.wait(lsn)
        self._tell(f"everything up to {lsn} is durable in {self._destination.title}")
        return None

    async def _verify(self) -> _Details:
        if self._options.verify == "none":
            return None
        report = await verify(
            self._link.name, target=self._link.target, connection=self._link.publisher, changed=self._options.verify == "changed"
        )
        for table in report.tables:
            if table.left_out is not None:
                raise ConfigurationError(f"table {table.table} could not be compared: {table.left_out}", hint="or use --verify none")
        if report.differing:
            names = ", ".join(str(table.table) for table in report.differing)
            raise ConfigurationError(
                f"the rows of {names} differ", hint=f"`subscriber verify {self._link.name} --repair` repairs them; then try again"
            )
        rows = sum(table.publisher_rows for table in report.tables)
        self._tell(f"{len(report.tables)} tables with {rows:,} rows are equal, compared in {report.seconds:.1f} s")
        return {"rows": rows}

    async def _way_back(self) -> _Details:
        if self._back is None:
            return None
        # the lock of this cutover may be lost: what is made after another process has let writers in would begin too late
        async with self._fence.held():
            await self._back.establish()
        self._tell(f'the way back is subscription "{self._back.name}"')
        return None

    async def _sequences(self) -> _Details:
        if self._options.sequences == "none":
            return None
        found = await self._link.find()
        results = await sync_sequences(
            target=self._destination.conninfo,
            connection=self._source.conninfo,
            publications=found.publications if found is not None else (),
            everything=self._options.sequences == "all",
        )
        for result in results:
            if result.state is SequenceState.LEFT:
                raise sequence_left(result.place or f"sequence {result.sequence}", result.reason)
        self._tell(f"{len(results)} sequences are set")
        return {"sequences": len(results)}

    async def _stop(self) -> _Details:
        # a session that has overridden the fence may have committed meanwhile: that is not lost either
        found = await self._link.find()
        if found is not None and found.enabled:
            await self._link.wait(await self._fence.end())
        await self._link.stop()
        return None

    async def _switch(self) -> _Details:
        if not self._options.switch:
            return None
        variables = {"SUBSCRIBER_NAME": self._link.name, "SUBSCRIBER_DIRECTION": "back" if self._direction else "forward"}
        await run_command("switch", self._options.switch, variables, self._options.switch_timeout)
        return None

    async def _open(self) -> _Details:
        entry = self._record.entries[self.key("open")]
        if self._destination.fence is not None:
            await self._destination.fence.open()
        entry.details.setdefault("opened_at", self._record.now())
        self._tell(f"writers can use {self._destination.title}")
        if self._back is not None:
            await self._back.enable()
        await self._link.remove()
        return entry.details


def sequence_left(place: str, reason: str | None) -> ConfigurationError:
    """The error about a sequence that cannot be set."""
    return ConfigurationError(f"{place} cannot be set: {reason}", hint="correct it, or set the sequences yourself and use --sequences none")
