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
are added, and the steps from ``copy`` on are made for them. Other objects that are new are created. After ``ready`` this is repeated while
the subscription runs.

The target's catalog has a row for each step that was done, with its time. The subscription runs in this process from ``copy`` on. An error
that a user must correct ends the migration when nothing else can be done; after ``ready for the cutover``, it is retried as ``run`` does.
An error that goes away, such as a server that restarts, is retried in each step.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.apply.tables.parking import RESYNC_HINT
from subscriber.catalog import Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ApplyError, ConfigurationError, RelationError, SubscriberError, TargetError, raise_all
from subscriber.interfaces import TableName, TableState
from subscriber.interfaces.schema import SchemaProgress
from subscriber.interfaces.sequences import SequenceChoice
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.comparison.verify import verify
from subscriber.subscription.management.alter import set_limits
from subscriber.subscription.management.create import create_subscription
from subscriber.subscription.management.schema import SchemaOptions, check_client_programs
from subscriber.subscription.management.sequences import require_named
from subscriber.subscription.management.unmoved import describe_unmoved
from subscriber.subscription.migration.copy_estimate import CopyEstimate
from subscriber.subscription.migration.migrated_schema import MigratedSchema
from subscriber.subscription.migration.new_tables import NewTables
from subscriber.subscription.migration.running_subscription import RunningSubscription
from subscriber.subscription.migration.spec import MigrationSpec, Tell
from subscriber.subscription.migration.step_log import StepLog, goes_away
from subscriber.subscription.setup.checks import check
from subscriber.subscription.targets import has_sequences, is_postgres, target_kind
from subscriber.walreceiver.new_publication import TableChoice, ensure_publication
from subscriber.walreceiver.publication import published_names
from subscriber.walreceiver.table_sizes import table_sizes

__all__ = ["Migration"]

if TYPE_CHECKING:
    from subscriber.subscription.migration.migration_plan import MigrationPlan

_NEW_TABLES_SECONDS: Final = 10.0
"""After ``ready``, the publisher is asked for new tables and other objects so often."""
_ALONE_SECONDS: Final = 10.0
_TERMINAL_SECONDS: Final = 2.0


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
        # it is stored: passwords of this process' environment are not used, so that the stored string is known to suffice
        connection = StoredConninfo(connection)
        options = options or SubscriptionOptions()
        if options.exclude_table:
            raise ConfigurationError(
                "exclude_table is not available for a migration, whose publication has the tables",
                hint="choose tables with --table and --exclude-table",
            )
        SequenceChoice.parse(sequences)
        self._spec = MigrationSpec(
            name=name,
            connection=connection,
            target=target,
            publication=publication,
            choice=choice or TableChoice(),
            options=options if max_rate is None else replace(options, max_copy_rate=max_rate),
            settings=settings or Settings(),
            schema=schema or SchemaOptions(),
            sequences=sequences,
        )
        self._max_rate = max_rate
        self._disk_check = disk_check
        self._verification = verification
        self._tell = tell
        self._tell_progress = tell_progress
        self._progress = CopyEstimate(name, copy_progress or Quiet())
        self._log = StepLog(self._spec, tell)
        self._schema = MigratedSchema(self._spec, self._tell_once, schema_progress)
        self._new_tables = NewTables(self._spec, self._schema, self._tell_once)
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

        return await plan_migration(self._spec)

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
            return self._log.last == ("verify" if self._verification else "follow")
        finally:
            stopping.cancel()
            work.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)

    async def _run(self, *, wait: bool) -> None:
        # both are reached once before anything is retried: an address may be wrong
        found = await self._require_alone()
        await check_client_programs(connection=self._spec.connection, target=self._spec.target, options=self._spec.schema)
        if found is None and is_postgres(self._spec.target):
            from subscriber.subscription.migration.preconditions import require_place  # noqa: PLC0415 -- its drivers come with an extra

            self._tell(await require_place(self._spec, disk_check=self._disk_check))
        await self._log.step("publish", lambda: self._publish(resumed=found is not None))
        await self._log.step("schema", self._schema.begin)
        await self._log.step("create", self._create)
        running = RunningSubscription(self._spec, self._progress)
        async with running.start():
            await self._fill(running)
            await self._log.retried("verify", self._tell_what_is_left)
            if wait:
                await self._log.retried("run", lambda: self._keep_running(running))
            else:
                self._tell_ready()

    async def _fill(self, running: RunningSubscription, new: Sequence[TableName] = ()) -> None:
        """Make the steps from ``copy`` on, for all tables or for those that were just added, until no further table is new."""
        self._ready = False
        everything, compared = not new, list(new)
        while everything or compared:
            await self._log.step("copy", lambda: self._copy(running))
            while more := await self._log.retried("copy", self._new_tables.add):
                compared += more
                await self._log.step("copy", lambda: self._copy(running))
            await self._log.step("indexes", self._schema.complete)
            await self._log.step("follow", lambda: self._follow(running))
            if self._verification:
                await self._log.step("verify", partial(self._verify, () if everything else tuple(compared)))
            everything, compared = False, list(await self._log.retried("copy", self._new_tables.add))
        await self._log.retried("indexes", self._complete_again)

    async def _complete_again(self) -> None:
        """Create views, functions, sequences and indexes that the publisher has got since."""
        if not await self._schema.is_complete():
            await self._schema.complete()

    def _tell_ready(self) -> None:
        """Say that the cutover can be made.

        Raises:
            ConfigurationError: there are tables that are not moved, or whose changes the publisher rejects.
        """
        raise_all(self._new_tables.unfit)
        self._ready = True
        chosen = "".join(f" --sequences {shlex.quote(each)}" for each in self._spec.sequences)
        self._tell(f"ready for the cutover: subscriber cutover {self._spec.name} --target URL{chosen}")

    async def _copy(self, running: RunningSubscription) -> None:
        async with await self._spec.publisher() as session:
            oids = (await published_names(session, [self._spec.publication])).values()
            found_sizes = await table_sizes(session, ", ".join(map(str, oids))) if oids else {}
        target = self._spec.options.mapping.target
        sizes = {TableName(*target(table.pair)): size for table, size in found_sizes.items()}
        found = await self._spec.observed()
        done = {each.table for each in found.tables if each.entry.state is TableState.READY} if found is not None else set()
        self._progress.plan(sizes, done)
        tell = self._tell_progress
        telling = asyncio.create_task(self._progress.run(self._tell) if tell is None else self._progress.run(tell, _TERMINAL_SECONDS))
        try:
            await running.until(self._is_copied, self._new_tables.create)
        finally:
            telling.cancel()

    def _is_copied(self, found: Observation) -> bool:
        self._tell_limits(found)
        for table in found.tables:
            if table.parked:
                raise RelationError(f'table "{table.table}" is parked {table.parked}', hint=RESYNC_HINT)
        return all(table.entry.state is TableState.READY for table in found.tables)

    def _tell_limits(self, found: Observation) -> None:
        """Say what a user has limited: a step that takes long would look stuck."""
        self._progress.waits = found.copies_wait
        alter = f"subscriber alter {self._spec.name} --target URL -o"
        if found.copies_wait is not None:
            self._tell_once(f"{found.copies_wait} (hint: to begin now: {alter} copy_window=none)")
        if found.details.limited:
            self._tell_once(f"changes wait because of max_apply_rate (hint: to end the limit: {alter} max_apply_rate=0)")

    async def _keep_running(self, running: RunningSubscription) -> None:
        """Follow the changes, and look for what is new, until the subscription is dropped."""
        told = ""
        while True:
            try:
                if new := await self._new_tables.add():
                    await self._fill(running, new)
                else:
                    await self._complete_again()
                if self._new_tables.unfit or not self._ready:
                    self._ready = False
                    self._tell_ready()
            except SubscriberError as error:
                if goes_away(error):
                    raise
                # the subscription itself continues
                if (line := f"run: {error.one_line()}; it is retried") != told:
                    told = line
                    self._tell(line)
            if await running.is_dropped(_NEW_TABLES_SECONDS):
                return

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    async def _publish(self, *, resumed: bool) -> None:
        async with await self._spec.publisher() as session:
            for line in await ensure_publication(session, self._spec.publication, self._spec.choice, resumed=resumed):
                self._tell(line)
            if is_postgres(self._spec.target):
                await require_named(session, [self._spec.publication], self._spec.sequences)

    async def _tell_what_is_left(self) -> None:
        if is_postgres(self._spec.target):
            spec = self._spec
            for line in await describe_unmoved(spec.connection, spec.target, spec.publication, spec.name, spec.schema):
                self._tell(line)

    async def _follow(self, running: RunningSubscription) -> None:
        async with await self._spec.publisher() as session:
            lsn = await session.current_wal_lsn()

        def follows(found: Observation) -> bool:
            self._tell_limits(found)
            return found.worker is not None and (found.worker.flushed or Lsn(0)) >= lsn

        await running.until(follows, self._new_tables.create)

    async def _create(self) -> None:
        found, spec = await self._spec.observed(), self._spec
        if found is None:
            try:
                await self._check()
            except ConfigurationError:
                # a table may have been created since the schema was copied
                await self._schema.add_tables(only_tables=True)
                await self._check()
            await spec.defined(create_subscription)
            self._tell(f'subscription "{spec.name}" created')
        elif tuple(found.definition.publications) != (spec.publication,):
            raise ConfigurationError(
                f'subscription "{spec.name}" exists, with other publications', hint="choose another name, or drop it: subscriber drop"
            )
        else:
            self._tell(f'subscription "{spec.name}" exists')
            if self._max_rate is not None and self._max_rate != found.definition.options.max_copy_rate:
                await set_limits(spec.name, {"max_copy_rate": self._max_rate}, target=spec.target)

    async def _check(self) -> None:
        """Find tables that cannot be replicated before hours of copying."""
        findings = await self._spec.defined(check)
        raise_all([ConfigurationError(each.message, hint=each.hint) for each in findings if each.severity == "error"])

    async def _require_alone(self) -> Observation | None:
        """Find the subscription. Another process that runs it may have been killed just now."""
        end = asyncio.get_running_loop().time() + _ALONE_SECONDS
        while (found := await self._spec.observed()) is not None and found.pid is not None:
            if asyncio.get_running_loop().time() >= end:
                raise TargetError(
                    f'subscription "{self._spec.name}" is run by another process, PID {found.pid} of the target',
                    hint="one migrate serves a target: stop the other one, or `subscriber run`, first",
                )
            await asyncio.sleep(0.5)
        return found

    async def _verify(self, tables: Sequence[TableName]) -> None:
        report = await verify(self._spec.name, target=self._spec.target, tables=tables)
        left = [f'table "{each.table}" was not compared: {each.left_out}' for each in report.tables if each.left_out is not None]
        for line in left:
            self._tell(line)
        if report.differing:
            differing: Sequence[str] = [f'"{each.table}"' for each in report.differing]
            raise ApplyError(
                f"rows differ in {len(differing):,} of {len(report.tables):,} tables: {', '.join(differing[:3])}",
                hint=f"`subscriber run --target …`, then `subscriber verify {self._spec.name}` names the rows, and --repair corrects them",
            )
