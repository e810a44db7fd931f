"""The setup before a run: check, create what is missing, and find the position to resume from.

The order makes a crash at any point harmless, and a refusal changes nothing:

1. Checks only: options, publisher, target. A subscription that the target does not have yet is refused here, with all problems at once.
2. The subscription's entry in the target, and its writer's lock.
3. At the first start: its slot and its first position (``first_position.py``). Later: the loss check
   (``walreceiver/position_check.py``).
4. The tables (``table_refresh.py``). If the command line defines the subscription, at each start. If the target's catalog defines it, only
   when the user requests it, as in PostgreSQL.
5. Slots that table synchronizations left behind are dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.catalog import Definition
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, DataLossError, PublisherError, SubscriberError, SubscriptionChanged, TargetError
from subscriber.interfaces import (
    DescribedSink,
    Finding,
    Position,
    SubscriptionState,
    SyncMode,
    TableEntry,
    TableName,
    TableState,
    TwoPhaseState,
)
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.commands import alter_replication_slot
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run_status import Until
from subscriber.subscription.setup.first_position import FirstPosition
from subscriber.subscription.setup.relay_position import RelayPosition
from subscriber.subscription.setup.same_database import refuse_same_database
from subscriber.subscription.setup.table_refresh import TableRefresh, drop_leftover_slots
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.target_session import TargetSession
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.position_check import check_position
from subscriber.walreceiver.publication import (
    missing_publications,
    other_identities,
    publications_missing,
    published_names,
    published_sizes,
    published_tables,
)

__all__ = ["Prepared", "Setup", "spool_key"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of the setup, from which a run starts.

    Attributes:
        state: the subscription's state in the target, with a position.
        position: the same position, never None.
        tables: states of the subscription's tables.
        publisher_lsn: the end of the publisher's WAL when the setup was done.
        capabilities: of the publisher.
        first: whether the subscription was just created.
        published: name and oid of each published table.
        left_out: published tables that could not be added to the subscription, each with the reason.
        sizes: bytes of the published tables, if a table waits for its copy.
        lost_partitions: of a published table, the partitions whose updates and deletes are lost.
    """

    state: SubscriptionState
    position: Position
    tables: Mapping[TableName, TableEntry]
    publisher_lsn: Lsn
    capabilities: Capabilities
    first: bool
    published: Mapping[TableName, int] = field(default_factory=dict)
    left_out: Mapping[TableName, str] = field(default_factory=dict)
    sizes: Mapping[TableName, int] = field(default_factory=dict)
    lost_partitions: Mapping[TableName, Sequence[TableName]] = field(default_factory=dict)

    @property
    def spool_key(self) -> str:
        """Names the spool of the subscription's stream. The names of its tables' spools begin with it."""
        return spool_key(self.state)


def spool_key(state: SubscriptionState) -> str:
    """See :attr:`Prepared.spool_key`. It names the relay log, too."""
    return f"target {state.target_identifier} subscription {state.oid}"


class Setup:
    """The setup of a run. See the module's text.

    Args:
        target: each method opens it, and leaves it open.
        relay: for the relay log of a run; :meth:`prepare` opens it. None: there is none.

    Attributes:
        refreshing: whether :meth:`refresh` began to change the tables.
    """

    def __init__(self, target: TargetSession, relay: RelayPosition | None = None) -> None:
        self._spec = target.spec
        self._sink = target.spec.sink
        self._target = target
        self._relay = relay or RelayPosition(None)
        self.refreshing = False
        self._misfit_level = self._left_out_level = logging.WARNING
        self._logged = set[TableName]()

    @classmethod
    @contextlib.asynccontextmanager
    async def of_definition(
        cls, definition: Definition, target: str, options: SubscriptionOptions, settings: Settings
    ) -> AsyncIterator[Self]:
        """For a verb, on a subscription of the target's catalog. The target is closed when the block ends."""
        session = TargetSession(RunSpec.of_definition(definition, target, options, settings))
        try:
            yield cls(session)
        finally:
            await session.close()

    async def prepare(self, on_durable: Callable[[Lsn], None], until: Until | None = None) -> Prepared:
        """Run the setup. It may be cancelled at any point and repeated.

        Args:
            on_durable: is told what is durable in the target.
            until: where the run ends. The error at its end names tables that cannot be replicated, so there is no warning about them here.

        Raises:
            SubscriberError: what is wrong, and what to do about it.
        """
        if until is not None:
            self._misfit_level = logging.INFO
            self._left_out_level = logging.WARNING if until.allow_missing_tables else logging.INFO
        if self._spec.settings.new_tables == "copy":
            # they are created when the run begins
            self._left_out_level = logging.INFO
        mapping = self._spec.options.mapping
        async with self._connected() as connection:
            known = await self._sink.exists(self._spec.name)
            if self._spec.managed and not known:
                raise SubscriptionChanged(
                    f'subscription "{self._spec.name}" was dropped or renamed in the meantime',
                    hint="`subscriber status` lists the existing subscriptions",
                )
            if known:
                await SpoolDirectory.probe(self._spec.settings.spool_directory)
                await self._check_publications(connection, self._spec.publications)
            else:
                await self._check_everything(connection, own_slot=False)
            opened = await self._target.open(on_durable)
            state = opened.state
            self._check_managed(state)
            first = state.position is None
            if state.position is None:
                await self._require_nothing_begun()
                if known and not self._spec.managed:
                    # an earlier start was interrupted before it stored a position
                    await self._check_everything(connection, own_slot=state.slot_name is not None)
                await self._relay.open(spool_key(state), fresh=True)
                state = await FirstPosition(self._spec, opened).create(connection)
                assert state.position is not None
                await self._relay.begin(connection, state.position)
            else:
                await self._relay.open(spool_key(state))
                state = await self._resume(connection, state, state.position)
            assert state.position is not None
            refresh = self._tables
            if self._spec.managed and state.pending_refresh is not None:
                # the verb that changed the publications was interrupted before the refresh
                refresh = TableRefresh(self._spec.publications, opened, copy_data=state.pending_refresh, mapping=self._spec.options.mapping)
                tables = await refresh.refresh(connection, state)
                await self._target.opened.refreshed()
            elif self._spec.managed:
                tables = await self._target.opened.tables()
                if isinstance(opened, DescribedSink):
                    published = await published_tables(connection, self._spec.publications, mapping=mapping)
                    await opened.describe_tables([table for table in published if table.name in tables])
            else:
                tables = await refresh.refresh(connection, state, first=first)
            await drop_leftover_slots(connection, opened, state, tables)
            waiting = any(entry.state is TableState.INIT for entry in tables.values())
            return Prepared(
                state=state,
                position=state.position,
                tables=tables,
                publisher_lsn=await connection.current_wal_lsn(),
                capabilities=connection.capabilities,
                first=first and not self._spec.managed,
                published=refresh.published or await published_names(connection, self._spec.publications, mapping),
                left_out=refresh.left_out,
                sizes=await published_sizes(connection, self._spec.publications, mapping) if waiting else {},
                lost_partitions=await other_identities(connection, self._spec.publications, mapping),
            )

    async def create(self) -> Collection[TableName]:
        """Run the first part only, for an entry that was just made: check everything, then create the slot, the position and the tables.

        Returns:
            The tables.

        Raises:
            SubscriberError: what is wrong, and what to do about it. Objects created before the error remain.
        """
        async with self._connected() as connection:
            await self._check_everything(connection, own_slot=False)
            opened = await self._target.open(_nothing)
            state = opened.state
            self._check_managed(state)
            if self._spec.options.create_slot:
                state = await FirstPosition(self._spec, opened).create(connection)
            elif (
                self._spec.options.failover
                and connection.capabilities.alter_slot
                and await connection.slot(self._spec.slot_name) is not None
            ):
                await connection.execute(alter_replication_slot(connection.capabilities, self._spec.slot_name, failover=True))
            return (await self._tables.refresh(connection, state, first=True)).keys()

    async def begin_again(self) -> None:
        """Create the slot and the first position, for a subscription whose tables are already listed.

        Raises:
            SubscriberError: what is wrong, and what to do about it.
        """
        async with self._connected() as connection:
            await FirstPosition(self._spec, await self._target.open(_nothing)).create(connection)

    async def refresh(self, named: Sequence[str] = ()) -> None:
        """Run REFRESH PUBLICATION only. If the target refuses a table, no table is added.

        Args:
            named: the publications that the verb names. If one does not exist, a warning is logged.

        Raises:
            SubscriberError: what is wrong, and what to do about it. Nothing was changed unless ``refreshing`` is set.
        """
        async with self._connected() as connection:
            await self._check_publications(connection, named)
            opened = await self._target.open(_nothing)
            state = opened.state
            self._check_managed(state)
            tables = await self._tables.refresh(connection, state, demanded=self._sink, changing=self._note_refreshing)
            await self._target.opened.refreshed()
            try:
                await drop_leftover_slots(connection, opened, state, tables)
            except PublisherError as error:
                # the refresh itself is done
                _log.warning("could not drop the slots of removed tables; the next start drops them: %s", error.one_line())

    def _note_refreshing(self) -> None:
        self.refreshing = True

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[WalReceiverConnection]:
        async with await self._spec.connect("setup") as connection:
            self._check_password(connection)
            await refuse_same_database(connection, self._sink)
            yield connection

    @property
    def _tables(self) -> TableRefresh:
        return TableRefresh(
            self._spec.publications,
            self._target.opened,
            copy_data=self._spec.options.copy_data,
            mapping=self._spec.options.mapping,
            log_level=self._left_out_level,
            logged=self._logged,
        )

    # --- checks

    def _check_password(self, connection: WalReceiverConnection) -> None:
        if self._spec.options.password_required and not connection.pgconn.used_password:
            raise PublisherError(
                "password is required: the publisher did not ask for one",
                hint="the publisher's pg_hba.conf must require a password (scram-sha-256), or set password_required = false",
            )

    async def _require_nothing_begun(self) -> None:
        """Check that no table was replicated if there is no position.

        The position is stored before any table is copied. So if it is missing, a table that was replicated may have missed changes. Tables
        that are not copied may be listed before the position is stored, if the slot is not ours to create (``create_slot = false``).

        Raises:
            DataLossError: a table was replicated before.
        """
        # those that are reconciled or replaced lose nothing
        waiting = {TableEntry(TableState.INIT, mode=mode) for mode in SyncMode}
        waiting |= {TableEntry(TableState.READY)} if self._spec.managed else set()
        begun = sorted(name for name, entry in (await self._target.opened.tables()).items() if entry not in waiting)
        if begun:
            raise DataLossError(
                f'subscription "{self._spec.name}" has lost its position in the target, and table "{begun[0]}" was replicated before',
                hint=f"restore the target's catalog from a backup, or `subscriber recover {self._spec.name}` compares all tables",
            )

    def _check_managed(self, state: SubscriptionState) -> None:
        name, managed = self._spec.name, self._spec.managed
        if state.managed and not managed:
            raise ConfigurationError(
                f'subscription "{name}" is defined in the target\'s catalog (by subscriber create)',
                hint=f'run it with "subscriber run --target URL {name}" and change it with "subscriber alter", or use another --name',
            )
        if managed and (not state.managed or state.generation != self._spec.generation):
            raise SubscriptionChanged(f'subscription "{name}" was altered in the meantime', hint="start it again")

    async def _check_publications(self, connection: WalReceiverConnection, publications: Sequence[str]) -> None:
        missing = await missing_publications(connection, publications)
        if not missing:
            return
        if not self._spec.managed:
            raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, or correct the name")
        # a warning in PostgreSQL too: they may be created later
        _log.warning("%s", publications_missing(missing))

    async def _check_everything(self, connection: WalReceiverConnection, *, own_slot: bool) -> None:
        from subscriber.subscription.setup.checks import find_problems, tell  # noqa: PLC0415 -- only the first start needs it

        publisher, target = await find_problems(connection, self._spec, known=own_slot)
        logged = tell([*publisher, *target], copy_data=self._spec.options.copy_data, misfits=self._misfit_level)
        self._logged = logged if self._misfit_level == self._left_out_level else set()
        _raise_first([(PublisherError, finding) for finding in publisher] + [(TargetError, finding) for finding in target])

    async def _resume(self, connection: WalReceiverConnection, state: SubscriptionState, position: Position) -> SubscriptionState:
        if self._spec.managed and self._spec.slot_name != position.slot_name:
            # ALTER SUBSCRIPTION … SET (slot_name = …): the new slot must be able to send everything after the position
            position = replace(position, slot_name=self._spec.slot_name)
            await check_position(connection, position)
            await self._target.opened.set_position(position)
            state = replace(state, position=position)
        if self._spec.options.slot_name is not None and self._spec.options.slot_name != position.slot_name:
            raise ConfigurationError(
                f'subscription "{self._spec.name}" uses replication slot "{position.slot_name}", not "{self._spec.options.slot_name}"',
                hint="omit slot_name, or give the new subscription another name",
            )
        resumed = await self._relay.check(connection, position)
        known = await self._target.opened.tables()
        synchronized = [entry.lsn for entry in known.values() if entry.state is TableState.SYNCDONE and entry.lsn]
        if max(synchronized, default=resumed) > resumed:
            # a table is synchronized beyond the main position: after a failover, that may be after the switch of timelines
            await check_position(connection, replace(position, lsn=max(synchronized)))
        if state.publications != self._spec.publications:
            await self._target.opened.set_publications(self._spec.publications)
        two_phase = state.two_phase
        if two_phase is TwoPhaseState.DISABLED and self._spec.options.two_phase:
            two_phase = TwoPhaseState.PENDING
        slot = await connection.slot(position.slot_name)
        if slot is not None and slot.two_phase and two_phase is not TwoPhaseState.ENABLED:
            # an earlier process ended just after enabling it at the slot, or another client enabled it: prepares are sent from now on
            self._spec.require_two_phase(position.slot_name)
            if any(entry.state not in {TableState.READY, TableState.PARKED} for entry in (await self._target.opened.tables()).values()):
                raise PublisherError(
                    f'two_phase of replication slot "{position.slot_name}" was enabled while tables are being synchronized',
                    hint="set it to false on the publisher again",
                )
            two_phase = TwoPhaseState.ENABLED
        if two_phase is not state.two_phase:
            await self._target.opened.set_two_phase(two_phase)
        return replace(state, publications=self._spec.publications, two_phase=two_phase)


def _raise_first(found: Sequence[tuple[type[SubscriberError], Finding]]) -> None:
    errors = [(kind, finding) for kind, finding in found if finding.refuses]
    if not errors:
        return
    kind, first = errors[0]
    error = kind(first.message, hint=first.hint)
    error.also = [each(finding.message, hint=finding.hint) for each, finding in errors[1:]]
    raise error


def _nothing(_: Lsn) -> None:
    """Ignore what is durable."""
