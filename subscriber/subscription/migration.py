"""``migrate``: everything from an empty target to the moment before the cutover, in one call.

The steps are those of the other verbs, and each finds out what is done already. So after an error or a crash, the same call continues:

========  ==============================================================  ===========================================
step      does                                                            done already, if
========  ==============================================================  ===========================================
publish   CREATE PUBLICATION … of all tables but those of extensions      the publication exists
schema    ``schema copy``, section pre-data                               the objects exist
create    ``check``, then ``create``: the subscription and its slot       the subscription exists
copy      runs the subscription until all tables are ready                the tables are ready
indexes   ``schema copy``, section post-data, while changes are applied   the objects exist
follow    waits until the target has what was committed when it began     the position is there
verify    ``verify``                                                      never: rows may have changed
========  ==============================================================  ===========================================

The target's catalog has a row for each step that was done, with its time. The subscription runs in this process from ``copy`` on. An error
that a user must correct ends the migration when nothing else can be done; after ``ready for the cutover``, it is retried as ``run`` does.
An error that goes away, such as a server that restarts, is retried in each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from subscriber.abc import TableState
from subscriber.abc.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.apply.progress import CopyProgress
from subscriber.apply.retry import Backoff, Policy, policy
from subscriber.catalog import Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import (
    ApplyError,
    ConfigurationError,
    SubscriberError,
    SubscriptionChanged,
    SubscriptionInUse,
    TargetError,
    raise_all,
)
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.cutover.record import MIGRATION, Record
from subscriber.subscription.launcher import Launcher
from subscriber.subscription.management.create import create_subscription
from subscriber.subscription.management.schema import SchemaOptions, copy_schema
from subscriber.subscription.management.verify import verify
from subscriber.subscription.setup.checks import check
from subscriber.subscription.targets import has_sequences, observe_target, open_store, target_kind
from subscriber.walreceiver.new_publication import ensure_publication
from subscriber.walreceiver.publication import not_replicated
from subscriber.walreceiver.session import Session

__all__ = ["Migration"]

_POLL_SECONDS: Final = 0.5
_APPLICATION: Final = "subscriber migrate"
Tell = Callable[[str], None]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    began: float
    ended: float


class _Running:
    """The launcher that runs the subscription at present."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self.task: asyncio.Task[None] | None = None
        self.ends = asyncio.Event()


class Migration:
    """Moves a database up to the cutover.

    Args:
        name: of the subscription.
        connection: connection string of the publisher.
        target: URL or conninfo of the target.
        publication: its name; it is created if it does not exist.
        options: the parameters of the subscription, if it is created.
        settings: of the process.
        schema: what is copied of the schema.
        verification: whether the rows are compared.
        tell: is given a line for each step.
        schema_progress: is told about each object of the schema.
        copy_progress: is told about the copies of tables.
    """

    def __init__(
        self,
        name: str,
        *,
        connection: str,
        target: str,
        publication: str,
        options: SubscriptionOptions | None = None,
        settings: Settings | None = None,
        schema: SchemaOptions | None = None,
        verification: bool = True,
        tell: Tell = lambda line: None,
        schema_progress: SchemaProgress = lambda step: None,
        copy_progress: CopyProgress | None = None,
    ) -> None:
        if not has_sequences(target):
            raise ConfigurationError(f"a database cannot be migrated to {target_kind(target).noun}", hint="use subscriber run")
        self._name = name
        # it is stored: passwords of this process' environment are not used, so that the stored string is known to suffice
        self._connection = StoredConninfo(connection)
        self._target = target
        self._publication = publication
        self._options = options or SubscriptionOptions()
        self._settings = settings or Settings()
        self._schema = schema or SchemaOptions()
        self._verification = verification
        self._tell = tell
        self._schema_progress = schema_progress
        self._copy_progress = copy_progress
        self._steps: list[_Step] = []
        self._existing = 0
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End :meth:`run` cleanly, from the event loop. The same migration continues later."""
        self._stop.set()

    async def run(self, *, wait: bool = True) -> bool:
        """Make the steps, then run the subscription until it is dropped (``cutover --complete``) or :meth:`stop` is called.

        Args:
            wait: False: return after the last step.

        Returns:
            Whether all steps were made; False: :meth:`stop` was called before.

        Raises:
            ConfigurationError: the publication cannot be created, or pg_dump is missing or too old.
            PublisherError, TargetError: a step failed. What was made stays; the same call continues.
            ApplyError: rows differ.
        """
        work = asyncio.create_task(self._run(wait=wait))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
                return True
            return bool(self._steps) and self._steps[-1].name == self._last
        finally:
            stopping.cancel()
            work.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)

    @property
    def _last(self) -> str:
        return "verify" if self._verification else "follow"

    async def _run(self, *, wait: bool) -> None:
        # both are reached once before anything is retried: an address may be wrong
        await self._observed()
        await self._publisher_lsn()
        await self._step("publish", self._publish)
        await self._step("schema", lambda: self._copy_schema(Section.PRE_DATA))
        await self._step("create", self._create)
        async with self._running() as running:
            await self._step("copy", lambda: self._until(running, _is_copied))
            await self._step("indexes", lambda: self._copy_schema(Section.POST_DATA))
            await self._step("follow", lambda: self._follow(running))
            if self._verification:
                await self._step("verify", self._verify)
            self._tell(f"ready for the cutover: subscriber cutover {self._name} --target URL")
            if wait:
                await self._retried("run", lambda: self._until(running, lambda found: False, dropped=True))

    async def _step(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        began, clock = time.time(), time.monotonic()
        await self._retried(name, work)
        self._steps.append(_Step(name, began, began + time.monotonic() - clock))
        self._tell(f"{name}: {time.monotonic() - clock:.1f} s")
        if name not in {"publish", "schema"}:
            await self._retried(name, self._record)

    async def _retried(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work of a step, which finds out what is done already, while it fails for a reason that goes away."""
        backoff, told = Backoff(self._settings), ""
        while True:
            try:
                await work()
            except SubscriberError as error:
                if not _goes_away(error):
                    raise
                if (line := f"{name}: {error.one_line()}; it is retried") != told:
                    told = line
                    self._tell(line)
                await asyncio.sleep(backoff.pause(policy(error)))
            else:
                return

    async def _publish(self) -> None:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            self._tell(await ensure_publication(session, self._publication))
            for line in await not_replicated(session):
                self._tell(line)

    async def _follow(self, running: _Running) -> None:
        lsn = await self._publisher_lsn()
        await self._until(running, lambda found: found.worker is not None and (found.worker.flushed or Lsn(0)) >= lsn)

    async def _record(self) -> None:
        """Store the steps. Those before ``create`` are stored with it: before, the target has no catalog."""
        async with open_store(self._target, _APPLICATION) as (store, find):
            record = Record(store, (await find(self._name)).oid, MIGRATION)
            await record.load()
            for step in self._steps:
                key = f"{MIGRATION}{step.name}"
                if not record.made(key):
                    await record.begin(key)
                    await record.end(key, {"seconds": round(step.ended - step.began, 3)})

    async def _copy_schema(self, section: Section) -> None:
        self._existing = 0
        for line in await copy_schema(
            connection=self._connection,
            target=self._target,
            publications=[self._publication],
            options=replace(self._schema, sections=[section]),
            progress=self._count,
        ):
            self._tell(line)
        if self._existing:
            self._tell(f"{self._existing:,} objects existed and were left as they are: `subscriber schema diff` compares them")

    def _count(self, step: SchemaStep) -> None:
        self._existing += step.state is StepState.EXISTS
        self._schema_progress(step)

    async def _create(self) -> None:
        found = await self._observed()
        if found is None:
            await self._check()
            await self._defined(create_subscription)
            self._tell(f'subscription "{self._name}" created')
        elif tuple(found.definition.publications) != (self._publication,):
            raise ConfigurationError(
                f'subscription "{self._name}" exists, with other publications', hint="choose another name, or drop it: subscriber drop"
            )
        else:
            self._tell(f'subscription "{self._name}" exists')

    async def _check(self) -> None:
        """Find tables that cannot be replicated before hours of copying."""
        findings = await self._defined(check)
        raise_all([ConfigurationError(each.message, hint=each.hint) for each in findings if each.severity == "error"])

    async def _defined(self, verb: Callable[..., Awaitable[_Result]]) -> _Result:
        """Call a verb with what defines the subscription."""
        return await verb(
            self._name,
            connection=self._connection,
            publications=[self._publication],
            target=self._target,
            options=self._options,
            settings=self._settings,
        )

    async def _observed(self) -> Observation | None:
        found = (each for each in await observe_target(self._target) if each.definition.name == self._name and each.definition.made)
        return next(found, None)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[_Running]:
        running = _Running()
        task = asyncio.create_task(self._launch(running))
        running.task = task
        try:
            yield running
        finally:
            running.ends.set()
            if running.launcher is not None:
                running.launcher.stop()
            await task

    async def _launch(self, running: _Running) -> None:
        """Run the subscription. Where the target cannot be reached at first, the launcher ends: it is started again."""
        backoff = Backoff(self._settings)
        while not running.ends.is_set():
            running.launcher = Launcher(self._target, [self._name], settings=self._settings, progress=self._copy_progress)
            try:
                await running.launcher.run()
            except SubscriberError as error:
                if not _goes_away(error):
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running.ends.wait(), backoff.pause(policy(error)))
            else:
                return

    async def _until(self, running: _Running, reached: Callable[[Observation], bool], *, dropped: bool = False) -> None:
        while True:
            assert running.task is not None  # the launcher was started
            if running.task.done():
                await running.task
                raise TargetError(f'subscription "{self._name}" does not run any more', hint="repeat the command")
            found = await self._observed()
            if found is None:
                if dropped:
                    return
                raise TargetError(f'subscription "{self._name}" was dropped', hint="repeat the command to begin again")
            if reached(found):
                return
            if not dropped and (error := self._stuck(running, found)) is not None:
                error.add_note("nothing else can be done until this is corrected: then start the same command again")
                raise error
            await asyncio.wait({running.task}, timeout=_POLL_SECONDS)

    def _stuck(self, running: _Running, found: Observation) -> SubscriberError | None:
        """The error that a user must correct, if no other table is left to be copied."""
        if not found.definition.enabled:
            why = f": {found.last_error}" if found.last_error else ""
            return TargetError(
                f'subscription "{self._name}" is disabled{why}',
                hint=f"`subscriber alter {self._name} --target … --enable` enables it",
            )
        subscription = running.launcher.subscriptions.get(self._name) if running.launcher is not None else None
        status = subscription.status if subscription is not None else None
        error = status.last_error if status is not None else None
        # a process that was killed may still have the subscription for a moment
        if status is None or error is None or isinstance(error, SubscriptionChanged | SubscriptionInUse):
            return None
        if _goes_away(error) or status.copying:
            return None
        return error if found.worker is None or status.retry is not None else None

    async def _publisher_lsn(self) -> Lsn:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            return await session.current_wal_lsn()

    async def _verify(self) -> None:
        report = await verify(self._name, target=self._target)
        left = [f'table "{each.table}" was not compared: {each.left_out}' for each in report.tables if each.left_out is not None]
        for line in left:
            self._tell(line)
        if report.differing:
            tables: Sequence[str] = [f'"{each.table}"' for each in report.differing]
            raise ApplyError(
                f"rows differ in {len(tables):,} of {len(report.tables):,} tables: {', '.join(tables[:3])}",
                hint=f"`subscriber run --target …`, then `subscriber verify {self._name}` names the rows, and --repair corrects them",
            )


def _goes_away(error: SubscriberError) -> bool:
    """Whether the cause ends without a new call: a server that restarts or fails over, or has no space, memory or sessions.

    53400 is not such a cause: a user must raise a limit, or drop a slot.
    """
    sqlstate = error.sqlstate or ""
    return policy(error).policy is Policy.SOON or (sqlstate.startswith("53") and sqlstate != "53400")


def _is_copied(found: Observation) -> bool:
    return all(table.entry.state is TableState.READY for table in found.tables)
