"""The engine: move the writers from one database to the other, or undo that. See :mod:`subscriber.subscription.cutover`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from subscriber import crash_points
from subscriber.errors import ConfigurationError, SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces.sequences import SequenceState
from subscriber.printable import counted
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.comparison.verify import verify
from subscriber.subscription.cutover.clients import PooledClients
from subscriber.subscription.cutover.command import run_command
from subscriber.subscription.cutover.link import Link
from subscriber.subscription.cutover.moved_sequences import cutover_sequences, sequence_left
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.cutover.refreshed_views import refresh_views
from subscriber.subscription.cutover.unreplicated import move_unreplicated, require_replicated
from subscriber.walreceiver.fences.fence import Fence
from subscriber.walreceiver.fences.fence_row import FenceRow, State

__all__ = ["BACKWARD", "FORWARD", "Move", "Place", "Tell", "compare_rows"]

_log = logging.getLogger(__name__)

FORWARD: Final = "forward"
BACKWARD: Final = "back"
_HELD: Final = frozenset({"close_destination", "prepare", "stop", "way_back", "sequences", "unreplicated"})
"""The steps that would do harm if they were made after another process has let writers into the destination."""
_POLL: Final = 0.05
_REST_SECONDS: Final = 30.0
"""How long it may take to undo what is not in the source. Writers use the source meanwhile."""

Tell = Callable[[str], None]
"""Is told about each step."""


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
        slot: name of the slot of the first subscription.
        options: how.
        tell: is told about each step.
        row: the record of a move that another process has begun.
    """

    def __init__(
        self,
        direction: str,
        *,
        source: Place,
        destination: Place,
        link: Link,
        back: Link | None,
        slot: str,
        options: CutoverOptions,
        tell: Tell,
        row: FenceRow | None = None,
    ) -> None:
        self._direction = direction
        self._source = source
        self._destination = destination
        self._link = link
        self._back = back
        addresses = row.details.get("pool") if row is not None else None
        self._clients = PooledClients(options.pool, source.conninfo, source.title, destination.conninfo, tell, addresses=addresses)
        self._details = {"slot": slot, "switch": bool(options.switch), "way_back": back is not None, "kept": options.kept()}
        self._options = options
        self._tell = tell
        self._attempt = "" if row is None else row.attempt
        self._end = Lsn(0)
        self._steps: dict[str, Callable[[], Awaitable[None]]] = {
            "close_destination": self._close_destination,
            **({"pause": self._clients.pause} if options.pool else {}),
            "close_source": self._close_source,
            "drain": self._drain,
            "catch_up": self._catch_up,
            "verify": self._verify,
            "stop": self._stop,
            "way_back": self._way_back,
            "sequences": self._sequences,
            "unreplicated": self._unreplicated,
            "refresh": lambda: self._refresh("before"),
            "switch": self._switch,
        }

    @property
    def _fence(self) -> Fence:
        assert self._source.fence is not None, "writers can only be moved from PostgreSQL"
        return self._source.fence

    async def run(self) -> float | None:
        """Make all steps. After an error, or if cancelled, everything is undone, unless writers were let in.

        Returns:
            For how many seconds no writer could write.

        Raises:
            SubscriberError: what is wrong. It says whether everything was undone.
        """
        await self._clients.find(self._options.max_downtime)
        details = {**self._details, "pool": self._clients.addresses}
        self._attempt = (await self._fence.begin(self._options.fence, details)).attempt
        crash_points.reached("cutover.step")
        limit = asyncio.timeout(None)
        name = ""
        try:
            if self._back is not None:
                await self._make("prepare", self._back.prepare)
            async with limit:
                if self._options.max_downtime is not None:
                    limit.reschedule(asyncio.get_running_loop().time() + self._options.max_downtime)
                for name, make in self._steps.items():
                    await self._make(name, make)
                await self._fence.advance(self._attempt, State.LEFT)
        except BaseException as error:
            late = self._late(name) if limit.expired() else None
            await self._undo_after(late or error)
            if late is not None:
                raise late from None
            raise
        return await self.finish()

    async def _make(self, name: str, make: Callable[[], Awaitable[None]]) -> None:
        began = time.monotonic()
        crash_points.reached("cutover.step")
        async with self._fence.held(self._attempt) if name in _HELD else contextlib.nullcontext():
            await make()
        crash_points.reached("cutover.step")
        _log.info("step %s took %.3f s", name, time.monotonic() - began)

    async def finish(self) -> float | None:
        """Let writers into the destination, and end what belongs to the source. May be repeated.

        Returns:
            For how many seconds no writer could write, if they could not until now.

        Raises:
            SubscriberError: something could not be done yet.
        """
        crash_points.reached("cutover.left")
        try:
            async with self._fence.held(self._attempt):
                seconds = await self._open()
                for make in (self._clients.resume, self._enable_back, self._link.remove):
                    crash_points.reached("cutover.step")
                    await make()
            # before it is recorded that nothing is left to do: a process that is killed meanwhile repeats it
            await self._refresh("after")
            crash_points.reached("cutover.step")
            await self._fence.advance(self._attempt, State.KEPT if self._direction == BACKWARD else State.MOVED)
        except SubscriberError as error:
            error.add_note(f"writers are let into {self._destination.title}: run the command again to finish that")
            raise
        crash_points.reached("cutover.step")
        return seconds

    async def _open(self) -> float | None:
        """Let writers into the destination. Return for how many seconds they were stopped."""
        fence = self._destination.fence
        if fence is not None:
            closed = await fence.row(own=False)
            if not await fence.open(State.BARRED, State.KEPT, State.MOVED):
                raise ConfigurationError(f"{self._destination.title} was closed by another cutover", hint="end that one first")
            if closed is None or closed.state == State.OPENED:
                return None
        row = await self._fence.row()
        self._tell(f"writers can use {self._destination.title}")
        return row.seconds if row is not None else None

    async def _enable_back(self) -> None:
        if self._back is not None:
            await self._back.enable()

    async def followed(self, seconds: float) -> None:
        """Wait until a process runs the subscription, which was stopped, but not longer."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            if await self._link.is_running():
                return
            await asyncio.sleep(_POLL)

    # --- undo

    async def _undo_after(self, error: BaseException) -> None:
        try:
            opened = await self.undo()
        except SubscriberError as failure:
            if isinstance(error, SubscriberError) and not isinstance(failure, _LeftError):
                failed = TargetError(str(error), hint="not everything could be undone: run the command with --abort when the cause is gone")
                failed.also = [failure]
                raise failed from failure
            raise
        if isinstance(error, SubscriberError):
            error.add_note("everything was undone" + opened)

    def _late(self, step: str) -> ConfigurationError:
        return ConfigurationError(
            f"time was up during step {step}: --max-downtime is {self._options.max_downtime:g} s",
            hint="correct the cause, or allow more with --max-downtime",
        )

    async def undo(self) -> str:
        """Undo everything. Writers are let into the source first. May be repeated.

        Returns:
            That writers use the source, and for how long they were stopped, for a message; empty: another cutover keeps it closed.

        Raises:
            ConfigurationError: writers were let into the destination.
            SubscriberError: something could not be undone yet.
        """
        crash_points.reached("cutover.step")
        await self._fence.lock()
        row = await self._fence.row()
        opened = f": writers use {self._source.title}"
        if row is not None and row.state in {State.LEFT, State.MOVED}:
            hint = (
                "repeat --rollback to finish it"
                if self._direction == BACKWARD
                else "repeat the cutover to finish it; then --rollback returns"
            )
            raise _LeftError(f"writers were let into {self._destination.title}: there is nothing to undo", hint=hint)
        if row is not None:
            seconds = await self._fence.undo(self._attempt)
            stopped = "" if seconds is None else f", and were stopped for {seconds:.1f} s"
            self._tell(f"writers can use {self._source.title} again{stopped}")
            opened += stopped
        elif await self._fence.row(own=False) is not None:
            opened = ""
        crash_points.reached("cutover.step")
        resumed = await asyncio.gather(self._clients.resume_back(), return_exceptions=True)
        crash_points.reached("cutover.step")
        try:
            async with asyncio.timeout(_REST_SECONDS):
                await self._undo_rest()
        except TimeoutError:
            raise TargetUnavailable(
                f"{self._destination.title} did not answer within {_REST_SECONDS:g} s", hint="check the network connection to it"
            ) from None
        for error in resumed:
            if error is not None:
                raise error
        if row is not None:
            await self._fence.forget(self._attempt)
        if self._back is not None:
            await self._back.clean()
        return opened

    async def _undo_rest(self) -> None:
        await self._link.enable()
        crash_points.reached("cutover.step")
        if self._back is not None:
            await self._back.remove()
        crash_points.reached("cutover.step")
        fence = self._destination.fence
        if fence is not None and not await fence.open(State.BARRED) and self._direction == FORWARD:
            self._tell(f"{self._destination.title} stays closed to writers; --open-target opens it")
        crash_points.reached("cutover.step")

    # --- the steps

    async def _close_destination(self) -> None:
        if self._destination.fence is not None:
            await self._destination.fence.bar(self._options.fence, self._attempt)

    async def _close_source(self) -> None:
        self._tell(f"closing {self._source.title} to writers ({self._options.fence})")
        await self._fence.close(self._attempt)

    async def _drain(self) -> None:
        self._end = await self._fence.drain()
        if self._direction == BACKWARD:
            await require_replicated(self._source.conninfo, self._link.name, self._options)
        self._tell(f"nothing can commit in {self._source.title} any more; its WAL ends at {self._end}")

    async def _catch_up(self) -> None:
        await self._link.wait(self._end)
        self._tell(f"everything up to {self._end} is durable in {self._destination.title}")

    async def _verify(self) -> None:
        if self._options.verify != "none":
            self._tell(await compare_rows(self._link, self._options))

    async def _way_back(self) -> None:
        if self._back is not None:
            await self._back.establish()
            self._tell(f'the way back is subscription "{self._back.name}"')

    async def _sequences(self) -> None:
        results = await cutover_sequences(
            self._source.conninfo, self._destination.conninfo, self._link.publications, self._options, mapping=self._link.mapping
        )
        for result in results:
            if result.state is SequenceState.LEFT or (result.state is SequenceState.MISSING and self._direction == FORWARD):
                raise sequence_left(result)
            if result.state is SequenceState.MISSING:
                # it was created after the cutover
                self._tell(f"sequence {result.sequence} is not set: {self._destination.title} does not have it")
        number = sum(result.state in {SequenceState.SET, SequenceState.EQUAL} for result in results)
        self._tell(f"{counted(number, 'sequence')} {'is' if number == 1 else 'are'} set")

    async def _unreplicated(self) -> None:
        if self._options.unlogged or self._options.large_objects:
            await move_unreplicated(self._source.conninfo, self._destination.conninfo, self._options, self._tell)

    async def _refresh(self, when: str) -> None:
        if self._options.refresh == when and self._destination.fence is not None:
            await refresh_views(self._source.conninfo, self._destination.conninfo, self._tell, writers=when == "after")

    async def _stop(self) -> None:
        # a session that has overridden the fence may have committed meanwhile: that is not lost either
        found = await self._link.find()
        if found is not None and found.enabled:
            await self._link.wait(await self._fence.end(), found)
        await self._link.stop()

    async def _switch(self) -> None:
        if not self._options.switch and not self._options.pool:
            return
        if self._destination.fence is not None:
            # from now on writers may be led there
            await self._destination.fence.keep(self._attempt)
        variables = {"SUBSCRIBER_NAME": self._link.name, "SUBSCRIBER_DIRECTION": self._direction}
        if self._options.switch:
            await run_command("switch", self._options.switch, variables, self._options.switch_timeout)
        await self._clients.lead()


class _LeftError(ConfigurationError):
    """Nothing can be undone: writers were let into the destination."""


async def compare_rows(link: Link, options: CutoverOptions) -> str:
    """Compare the rows of both sides. Return what was compared, for a message.

    Raises:
        ConfigurationError: rows differ, or could not be compared.
        SubscriberError: one of the two databases cannot be queried.
    """
    report = await verify(link.name, target=link.target, connection=link.publisher, changed=options.verify == "changed")
    for table in report.tables:
        if table.left_out is not None:
            raise ConfigurationError(f"table {table.table} could not be compared: {table.left_out}", hint="or use --verify none")
    if report.differing:
        names = ", ".join(str(table.table) for table in report.differing)
        raise ConfigurationError(
            f"the rows of {names} differ", hint=f"`subscriber verify {link.name} --repair` repairs them; then try again"
        )
    rows = sum(table.publisher_rows for table in report.tables)
    return f"{counted(len(report.tables), 'table')} with {counted(rows, 'row')}: all equal, compared in {report.seconds:.1f} s"
