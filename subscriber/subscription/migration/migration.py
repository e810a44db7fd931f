"""``migrate``: everything from an empty target to the moment before the cutover, in one call.

The steps are those of the other verbs, and each finds out what is done already. So after an error or a crash, the same call continues:

========  ==============================================================  ===========================================
step      does                                                            done already, if
========  ==============================================================  ===========================================
publish   CREATE PUBLICATION … of all tables but those of extensions      the publication exists
schema    ``schema copy``, section pre-data                               the objects exist
create    ``check``, then ``create``: the subscription and its slot       the subscription exists
copy      runs the subscription until all tables are ready                the tables are ready
indexes   ``schema copy``, both sections, while changes are applied       the objects exist
follow    waits until the target has what was committed when it began     the position is there
verify    ``verify``                                                      never: rows may have changed
========  ==============================================================  ===========================================

Before ``ready``, the publisher's list of tables is compared with the subscription's. Tables and partitions that were created meanwhile
are added, and the steps from ``copy`` on are made for them. After ``ready`` this is repeated while the subscription runs.

The target's catalog has a row for each step that was done, with its time. The subscription runs in this process from ``copy`` on. An error
that a user must correct ends the migration when nothing else can be done; after ``ready for the cutover``, it is retried as ``run`` does.
An error that goes away, such as a server that restarts, is retried in each step.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.catalog import Observation
from subscriber.catalog.model import MIGRATION
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ApplyError, ConfigurationError, SubscriberError, TargetError, raise_all
from subscriber.interfaces import TableName, TableState
from subscriber.interfaces.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.interfaces.sequences import SequenceChoice
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.management.alter import alter_subscription, limit_copies
from subscriber.subscription.management.create import create_subscription
from subscriber.subscription.management.schema import SchemaOptions, check_client_programs, copy_schema
from subscriber.subscription.management.sequences import require_named
from subscriber.subscription.management.unmoved import describe_unmoved
from subscriber.subscription.management.verify import verify
from subscriber.subscription.migration.copy_estimate import CopyEstimate
from subscriber.subscription.migration.running_subscription import RunningSubscription, goes_away, observed, retried
from subscriber.subscription.setup.checks import check
from subscriber.subscription.targets import has_sequences, is_postgres, open_store, target_kind
from subscriber.walreceiver.new_publication import ensure_publication, extend_publication, planned_tables
from subscriber.walreceiver.publication import published_names
from subscriber.walreceiver.session import Session
from subscriber.walreceiver.table_choice import TableChoice
from subscriber.walreceiver.table_sizes import table_sizes

__all__ = ["Migration"]

if TYPE_CHECKING:
    from subscriber.subscription.migration.migration_plan import MigrationPlan

_NEW_TABLES_SECONDS: Final = 10.0
"""After ``ready``, the publisher is asked for new tables so often."""
_ALONE_SECONDS: Final = 10.0
_TERMINAL_SECONDS: Final = 2.0
_APPLICATION: Final = "subscriber migrate"
Tell = Callable[[str], None]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    began: float
    ended: float


class Migration:
    """Moves a database up to the cutover.

    Args:
        name: of the subscription.
        connection: connection string of the publisher.
        target: URL or conninfo of the target.
        publication: its name; it is created if it does not exist.
        choice: the tables of a publication that is created.
        options: the parameters of the subscription, if it is created.
        settings: of the process.
        schema: what is copied of the schema.
        verification: whether the rows are compared.
        sequences: which ones the cutover will set, as :class:`subscriber.CutoverOptions`.
        tell: is given a line for each step.
        schema_progress: is told about each object of the schema.
        copy_progress: is told about the copies of tables.
        tell_progress: is given a line about all copies once in some seconds. None: ``tell`` is, once a minute.
        disk_check: whether a target whose disk is known to be too small is an error.
        max_rate: ``max_copy_rate`` in bytes per second, also of a subscription that exists; None: as it is.
    """

    def __init__(
        self,
        name: str,
        *,
        connection: str,
        target: str,
        publication: str,
        choice: TableChoice | None = None,
        options: SubscriptionOptions | None = None,
        settings: Settings | None = None,
        schema: SchemaOptions | None = None,
        verification: bool = True,
        sequences: Sequence[str] = (),
        tell: Tell = lambda line: None,
        schema_progress: SchemaProgress = lambda step: None,
        copy_progress: CopyProgress | None = None,
        tell_progress: Tell | None = None,
        disk_check: bool = True,
        max_rate: float | None = None,
    ) -> None:
        if not has_sequences(target):
            raise ConfigurationError(f"a database cannot be migrated to {target_kind(target).noun}", hint="use subscriber run")
        self._name = name
        # it is stored: passwords of this process' environment are not used, so that the stored string is known to suffice
        self._connection = StoredConninfo(connection)
        self._target = target
        self._publication = publication
        self._choice = choice or TableChoice()
        options = options or SubscriptionOptions()
        self._options = options if max_rate is None else replace(options, max_copy_rate=max_rate)
        self._max_rate = max_rate
        self._disk_check = disk_check
        self._settings = settings or Settings()
        self._schema = schema or SchemaOptions()
        self._verification = verification
        SequenceChoice.parse(sequences)
        self._sequences = sequences
        self._tell = tell
        self._schema_progress = schema_progress
        self._tell_progress = tell_progress
        self._progress = CopyEstimate(name, copy_progress or Quiet())
        self._steps: list[_Step] = []
        self._existing = 0
        self._created = set[TableName]()
        self._unpublished = list[ConfigurationError]()
        self._told = set[str]()
        self._ready = False
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End :meth:`run` cleanly, from the event loop. The same migration continues later."""
        self._stop.set()

    async def plan(self) -> MigrationPlan:
        """Find out what :meth:`run` would do, and what would keep it from working. Changes nothing.

        Raises:
            ConfigurationError, PublisherError, TargetError: a server cannot be reached or queried, or the arguments do not fit.
        """
        from subscriber.subscription.migration.migration_plan import plan_migration  # noqa: PLC0415 -- its drivers come with an extra

        return await plan_migration(
            connection=self._connection,
            target=self._target,
            publication=self._publication,
            choice=self._choice,
            options=self._options,
            settings=self._settings,
            schema=self._schema,
        )

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
        found = await self._require_alone()
        await check_client_programs(connection=self._connection, target=self._target, options=self._schema)
        if found is None and is_postgres(self._target):
            await self._require_place()
        await self._step("publish", self._publish)
        await self._step("schema", lambda: self._copy_schema(Section.PRE_DATA))
        await self._step("create", self._create)
        running = RunningSubscription(self._name, self._target, self._settings, self._progress)
        async with running.start():
            await self._fill(running)
            if wait:
                await self._retried("run", lambda: self._keep_running(running))

    async def _fill(self, running: RunningSubscription, new: Sequence[TableName] = ()) -> None:
        """Make the steps from ``copy`` on, for all tables or for those that were just added, until no further table is new."""
        everything, compared = not new, list(new)
        while True:
            await self._step("copy", lambda: self._copy(running))
            while more := await self._retried("copy", self._add_tables):
                compared += more
                await self._step("copy", lambda: self._copy(running))
            await self._step("indexes", self._complete_schema)
            await self._step("follow", lambda: self._follow(running))
            if self._verification:
                await self._step("verify", partial(self._verify, () if everything else tuple(compared)))
            everything, compared = False, list(await self._retried("copy", self._add_tables))
            if not compared:
                break
        if not new:
            await self._retried("verify", self._tell_what_is_left)
        self._tell_ready()

    def _tell_ready(self) -> None:
        """Say that the cutover can be made.

        Raises:
            ConfigurationError: there are tables that could not be published.
        """
        self._ready = not self._unpublished
        raise_all(self._unpublished)
        chosen = "".join(f" --sequences {shlex.quote(each)}" for each in self._sequences)
        self._tell(f"ready for the cutover: subscriber cutover {self._name} --target URL{chosen}")

    async def _copy(self, running: RunningSubscription) -> None:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            oids = (await published_names(session, [self._publication])).values()
            sizes = await table_sizes(session, ", ".join(map(str, oids))) if oids else {}
        found = await self._observed()
        done = {each.table for each in found.tables if each.entry.state is TableState.READY} if found is not None else set()
        self._progress.plan(sizes, done)
        tell = self._tell_progress
        telling = asyncio.create_task(self._progress.run(self._tell) if tell is None else self._progress.run(tell, _TERMINAL_SECONDS))
        try:
            await running.until(_is_copied, self._create_tables)
        finally:
            telling.cancel()

    async def _keep_running(self, running: RunningSubscription) -> None:
        told = ""
        while not await running.is_dropped(_NEW_TABLES_SECONDS):
            try:
                if new := await self._add_tables():
                    await self._fill(running, new)
                elif self._unpublished or not self._ready:
                    self._tell_ready()
            except SubscriberError as error:
                if goes_away(error):
                    raise
                # the subscription itself continues
                if (line := f"run: {error.one_line()}; it is retried") != told:
                    told = line
                    self._tell(line)

    async def _create_tables(self) -> bool:
        """Create tables that are new on the publisher, because apply stops at a change of a table that does not exist.

        They are added to the subscription later, because that interrupts the copies of other tables.

        Returns:
            Whether there are any.
        """
        found = await self._observed()
        if found is None or not (new := await self._new_tables(found)) or self._created.issuperset(new):
            return False
        await self._copy_schema(Section.PRE_DATA, only_new_tables=True)
        self._created.update(new)
        return True

    async def _new_tables(self, found: Observation) -> Sequence[TableName]:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            lines, self._unpublished = await extend_publication(session, self._publication, self._choice)
            for line in [*lines, *(error.one_line() for error in self._unpublished)]:
                self._tell_once(line)
            published = await published_names(session, [self._publication])
        return sorted(published.keys() - {each.table for each in found.tables})

    async def _add_tables(self) -> Sequence[TableName]:
        """Add published tables that the subscription lacks, with their schema. Return the tables that are not ready."""
        found = await self._observed()
        if found is None:
            return ()
        new = await self._new_tables(found)
        waiting = [each.table for each in found.tables if each.entry.state is not TableState.READY]
        if not new:
            return waiting
        listed = ", ".join(f'"{table}"' for table in new)
        self._tell(f"new tables of the publisher are added: {listed}")
        await self._copy_schema(Section.PRE_DATA)
        async with alter_subscription(self._name, target=self._target, settings=self._settings) as subscription:
            await subscription.refresh(copy_data=subscription.definition.options.copy_data)
        return [*new, *waiting]

    async def _step(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        began, clock = time.time(), time.monotonic()
        await self._retried(name, work)
        self._steps.append(_Step(name, began, began + time.monotonic() - clock))
        self._tell(f"{name}: {time.monotonic() - clock:.1f} s")
        if name not in {"publish", "schema"}:
            await self._retried(name, self._record)

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    async def _retried(self, name: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        return await retried(name, work, self._settings, self._tell)

    async def _publish(self) -> None:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            for line in await ensure_publication(session, self._publication, self._choice):
                self._tell(line)
            if is_postgres(self._target):
                await require_named(session, [self._publication], self._sequences)

    async def _tell_what_is_left(self) -> None:
        if is_postgres(self._target):
            for line in await describe_unmoved(self._connection, self._target, self._publication, self._name, self._schema):
                self._tell(line)

    async def _follow(self, running: RunningSubscription) -> None:
        lsn = await self._publisher_lsn()
        await running.until(lambda found: found.worker is not None and (found.worker.flushed or Lsn(0)) >= lsn, self._create_tables)

    async def _record(self) -> None:
        """Store the steps. Those before ``create`` are stored with it: before, the target has no catalog."""
        async with open_store(self._target, _APPLICATION) as (store, find):
            oid = (await find(self._name)).oid
            async with store.transaction() as rows:
                known = {row["step"] for row in await rows.select(MIGRATION, {"subid": oid})}
                made = [each for each in self._steps if each.name not in known]
                values = [{"subid": oid, "step": each.name, "began_at": each.began, "ended_at": each.ended} for each in made]
                if values:
                    await rows.insert(MIGRATION, values)

    async def _complete_schema(self) -> None:
        """Create indexes and constraints, and before them what was created during the copy: views, functions, types, sequences."""
        await self._copy_schema(Section.PRE_DATA, again=True)
        await self._copy_schema(Section.POST_DATA)

    async def _copy_schema(self, section: Section, *, only_new_tables: bool = False, again: bool = False) -> None:
        self._existing = 0
        for line in await copy_schema(
            connection=self._connection,
            target=self._target,
            publications=[self._publication],
            options=replace(self._schema, sections=[section], only_new_tables=only_new_tables),
            progress=self._count,
        ):
            self._tell_once(line)
        if self._existing and not again:
            self._tell(f"{self._existing:,} objects existed and were left as they are: `subscriber schema diff` compares them")

    def _count(self, step: SchemaStep) -> None:
        self._existing += step.state is StepState.EXISTS
        self._schema_progress(step)

    async def _create(self) -> None:
        found = await self._observed()
        if found is None:
            try:
                await self._check()
            except ConfigurationError:
                # a table may have been created since the schema was copied
                await self._copy_schema(Section.PRE_DATA, only_new_tables=True)
                await self._check()
            await self._defined(create_subscription)
            self._tell(f'subscription "{self._name}" created')
        elif tuple(found.definition.publications) != (self._publication,):
            raise ConfigurationError(
                f'subscription "{self._name}" exists, with other publications', hint="choose another name, or drop it: subscriber drop"
            )
        else:
            self._tell(f'subscription "{self._name}" exists')
            if self._max_rate is not None and self._max_rate != found.definition.options.max_copy_rate:
                await limit_copies(self._name, target=self._target, rate=self._max_rate)

    async def _require_alone(self) -> Observation | None:
        """Find the subscription. Another process that runs it may have been killed just now."""
        end = asyncio.get_running_loop().time() + _ALONE_SECONDS
        while (found := await self._observed()) is not None and found.pid is not None:
            if asyncio.get_running_loop().time() >= end:
                raise TargetError(
                    f'subscription "{self._name}" is run by another process, PID {found.pid} of the target',
                    hint="one migrate serves a target: stop the other one, or `subscriber run`, first",
                )
            await asyncio.sleep(0.5)
        return found

    async def _require_place(self) -> None:
        """Find out whether a new target has what the copy needs, before anything is created."""
        from subscriber.sinks.postgres.scripts import ScriptSession  # noqa: PLC0415 -- its drivers come with an extra
        from subscriber.subscription.migration.preconditions import disk_problem, filled_tables, missing_extensions  # noqa: PLC0415

        async with (
            await Session.connect(self._connection, application_name=_APPLICATION) as session,
            await ScriptSession.open(self._target, _APPLICATION) as target,
        ):
            errors = await missing_extensions(session, target, self._schema.exclude_extensions)
            tables = await table_sizes(session, (await planned_tables(session, self._publication, self._choice))[0])
            small, line = await disk_problem(target, tables)
            self._tell(line)
            errors += [small] if small is not None and self._disk_check else []
            errors += await filled_tables(target, list(tables)) if self._options.copy_data is True else []
        raise_all(errors)

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

    async def _publisher_lsn(self) -> Lsn:
        async with await Session.connect(self._connection, application_name=_APPLICATION) as session:
            return await session.current_wal_lsn()

    async def _observed(self) -> Observation | None:
        return await observed(self._target, self._name)

    async def _verify(self, tables: Sequence[TableName]) -> None:
        report = await verify(self._name, target=self._target, tables=tables)
        left = [f'table "{each.table}" was not compared: {each.left_out}' for each in report.tables if each.left_out is not None]
        for line in left:
            self._tell(line)
        if report.differing:
            differing: Sequence[str] = [f'"{each.table}"' for each in report.differing]
            raise ApplyError(
                f"rows differ in {len(differing):,} of {len(report.tables):,} tables: {', '.join(differing[:3])}",
                hint=f"`subscriber run --target …`, then `subscriber verify {self._name}` names the rows, and --repair corrects them",
            )


def _is_copied(found: Observation) -> bool:
    return all(table.entry.state is TableState.READY for table in found.tables)
