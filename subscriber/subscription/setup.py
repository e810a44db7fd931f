"""What happens once before a run: look, make what is missing, and find out where to go on.

The order makes every crash in between harmless, and every refusal one that changed nothing:

1. Only looking: options, publisher, target. A subscription that the target does not know yet is refused here, with everything that is
   wrong at once.
2. The subscription's entry in the target, and its writer's lock.
3. First time: the note that the slot is about to be created; the slot; the first position. A crash between the note and the position
   leaves a slot of which nothing was used: it is made anew. Later: the loss check of :mod:`subscriber.subscription.loss`.
4. The tables: those newly published are added, those no longer published are forgotten (native: REFRESH PUBLICATION).
5. Slots of table synchronizations that ended without dropping theirs are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from subscriber.abc import Finding, Position, PublishedTable, Sink, SubscriptionState, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.apply.tablesync import sync_slot_prefix
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, PublisherError, RelationError, SlotInUse, SubscriberError, TargetError
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.loss import check_position
from subscriber.subscription.problems import check_options, find_problems
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import missing_publications, published_tables

__all__ = ["Prepared", "Setup"]

_log = logging.getLogger(__name__)

_DUPLICATE_OBJECT = "42710"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run starts from.

    Attributes:
        state: as the target holds it; with a position.
        position: the same, never None.
        tables: states of the subscription's tables.
        publisher_lsn: where the publisher's WAL ended when the setup was done.
        capabilities: the publisher's.
        first: whether the subscription was made just now.
    """

    state: SubscriptionState
    position: Position
    tables: Mapping[TableName, TableEntry]
    publisher_lsn: Lsn
    capabilities: Capabilities
    first: bool


class Setup:
    """See the module's text.

    Raises:
        ConfigurationError: options that make no sense for a run.
    """

    def __init__(
        self,
        name: str,
        *,
        conninfo: str,
        publications: tuple[str, ...],
        options: SubscriptionOptions,
        settings: Settings,
        sink: Sink,
    ) -> None:
        self._name = name
        self._conninfo = conninfo
        self._publications = publications
        self._options = options
        self._settings = settings
        self._sink = sink
        self._slot_name = options.slot_name or name
        check_options(publications, self._slot_name, options, sink)

    async def prepare(self, on_durable: Callable[[Lsn], None]) -> Prepared:
        """Do all of it; the sink is open afterwards. May be cancelled anywhere, and done again.

        Raises:
            SubscriberError: what is wrong and what to do about it.
        """
        connection = await WalReceiverConnection.connect(self._conninfo, application_name=self._name)
        try:
            self._check_password(connection)
            known = await self._sink.exists(self._name)
            await (self._check_publications(connection) if known else self._check_everything(connection, own_slot=False))
            state = await self._sink.open(self._name, on_durable)
            first = state.position is None
            if state.position is None:
                if known:
                    # an earlier start did not come far
                    await self._check_everything(connection, own_slot=state.slot_name is not None)
                state = await self._begin(connection, state)
            else:
                state = await self._resume(connection, state, state.position)
            assert state.position is not None
            tables = await self._refresh_tables(connection, state, first=first)
            await self._drop_leftover_slots(connection, state, tables)
            return Prepared(
                state=state,
                position=state.position,
                tables=tables,
                publisher_lsn=await connection.current_wal_lsn(),
                capabilities=connection.capabilities,
                first=first,
            )
        finally:
            await connection.close()

    # --- looking

    def _check_password(self, connection: WalReceiverConnection) -> None:
        if self._options.password_required and not connection.pgconn.used_password:
            raise PublisherError(
                "password is required: the publisher did not ask for one",
                hint="the publisher's pg_hba.conf must require a password (scram-sha-256), or set password_required = false",
            )

    async def _check_publications(self, connection: WalReceiverConnection) -> None:
        missing = await missing_publications(connection, self._publications)
        if missing:
            names = ", ".join(f'"{name}"' for name in missing)
            raise PublisherError(f"publication {names} does not exist on the publisher", hint="CREATE PUBLICATION there, or mend the name")

    async def _check_everything(self, connection: WalReceiverConnection, *, own_slot: bool) -> None:
        publisher, target = await find_problems(
            connection,
            self._sink,
            known=own_slot,
            publications=self._publications,
            slot_name=self._slot_name,
            options=self._options,
            settings=self._settings,
        )
        for finding in [*publisher, *target]:
            if finding.severity == "warning":
                _log.warning("%s (hint: %s)", finding.message, finding.hint)
        _raise_first([(PublisherError, finding) for finding in publisher] + [(TargetError, finding) for finding in target])

    # --- slot and position

    async def _begin(self, connection: WalReceiverConnection, state: SubscriptionState) -> SubscriptionState:
        two_phase = self._first_two_phase(connection.capabilities)
        identity = await connection.identify_system()
        if self._options.create_slot:
            lsn = await self._create_slot(connection, state, two_phase)
        else:
            found = await connection.slot(self._slot_name)
            if found is None or found.confirmed_flush_lsn is None:
                raise PublisherError(
                    f'there is no logical replication slot "{self._slot_name}" on the publisher', hint="leave out create_slot = false"
                )
            lsn = found.confirmed_flush_lsn
            if found.two_phase:
                two_phase = TwoPhaseState.ENABLED
            await self._sink.begin_slot(self._slot_name, self._publications, two_phase)
        position = Position(self._slot_name, identity.system_identifier, identity.timeline, lsn)
        await self._sink.set_position(position)
        _log.info('subscription "%s" starts at %s of replication slot "%s"', self._name, lsn, self._slot_name)
        return replace(state, slot_name=self._slot_name, publications=self._publications, two_phase=two_phase, position=position)

    def _first_two_phase(self, capabilities: Capabilities) -> TwoPhaseState:
        if not self._options.two_phase:
            return TwoPhaseState.DISABLED
        if not capabilities.two_phase:
            _log.warning("the publisher is too old for two_phase (it needs PostgreSQL 15): transactions come with COMMIT PREPARED")
        elif not self._options.copy_data and self._options.create_slot:
            return TwoPhaseState.ENABLED
        return TwoPhaseState.PENDING

    async def _create_slot(self, connection: WalReceiverConnection, state: SubscriptionState, two_phase: TwoPhaseState) -> Lsn:
        if state.slot_name is not None:
            # an earlier process ended between its note and its first position: nothing was read from that slot. Its walsender may
            # still be creating it: that it lost its client it notices only at the end
            await connection.drop_slot(state.slot_name, wait=True, missing_ok=True)
        await self._sink.begin_slot(self._slot_name, self._publications, two_phase)
        try:
            slot = await connection.create_slot(
                self._slot_name,
                two_phase=two_phase is TwoPhaseState.ENABLED,
                failover=self._options.failover and connection.capabilities.failover_slots,
            )
        except (PublisherError, asyncio.CancelledError) as error:
            # a slot that somebody else makes under this name must not be taken for ours next time
            if (isinstance(error, PublisherError) and error.sqlstate == _DUPLICATE_OBJECT) or not await self._slot_exists():
                await self._sink.begin_slot(None, self._publications, two_phase)
            raise
        return slot.consistent_point

    async def _slot_exists(self) -> bool:
        """Asked on a new connection: the other was left in the middle of a command. Unknown counts as yes."""
        try:
            connection = await WalReceiverConnection.connect(self._conninfo, application_name=self._name)
        except PublisherError:
            return True
        try:
            return await connection.slot(self._slot_name) is not None
        except PublisherError:
            return True
        finally:
            await connection.close()

    async def _resume(self, connection: WalReceiverConnection, state: SubscriptionState, position: Position) -> SubscriptionState:
        if self._options.slot_name is not None and self._options.slot_name != position.slot_name:
            raise ConfigurationError(
                f'subscription "{self._name}" uses replication slot "{position.slot_name}", not "{self._options.slot_name}"',
                hint="leave slot_name out, or give the new subscription another name",
            )
        await check_position(connection, position)
        for entry in (await self._sink.tables()).values():
            if entry.state is TableState.SYNCDONE and entry.lsn is not None and entry.lsn > position.lsn:
                # synchronized beyond the main position: after a failover that may be beyond where the timelines part
                await check_position(connection, replace(position, lsn=entry.lsn))
        if state.publications != self._publications:
            await self._sink.set_publications(self._publications)
        two_phase = state.two_phase
        if two_phase is TwoPhaseState.DISABLED and self._options.two_phase:
            two_phase = TwoPhaseState.PENDING
        slot = await connection.slot(position.slot_name)
        if slot is not None and slot.two_phase and two_phase is not TwoPhaseState.ENABLED:
            # enabled at the slot just before an earlier process ended, or by somebody: prepares are sent from now on in any case
            if any(entry.state is not TableState.READY for entry in (await self._sink.tables()).values()):
                raise PublisherError(
                    f'two_phase of replication slot "{position.slot_name}" was enabled while tables are being synchronized',
                    hint="set it to false on the publisher again",
                )
            two_phase = TwoPhaseState.ENABLED
        if two_phase is not state.two_phase:
            await self._sink.set_two_phase(two_phase)
        return replace(state, publications=self._publications, two_phase=two_phase)

    # --- tables

    async def _refresh_tables(
        self, connection: WalReceiverConnection, state: SubscriptionState, *, first: bool
    ) -> Mapping[TableName, TableEntry]:
        published = {table.name: table for table in await published_tables(connection, self._publications)}
        entries = await self._sink.tables()
        for table in published.keys() - entries.keys():
            await self._add_table(published[table], state, first=first)
        for table in entries.keys() - published.keys():
            if entries[table].state is TableState.DATASYNC:
                await self._undo_copy(table)
            _log.warning('table "%s" is no longer published: its rows stay as they are', table)
            await self._sink.remove_table(table)
        return await self._sink.tables()

    async def _add_table(self, table: PublishedTable, state: SubscriptionState, *, first: bool) -> None:
        if state.two_phase is TwoPhaseState.ENABLED and self._options.copy_data:
            # as native refuses REFRESH PUBLICATION: a transaction prepared before the copy could commit after it, unseen by both
            _log.warning(
                'table "%s" is published now, but cannot be copied while two_phase is enabled: it is left out'
                " (hint: copy it by another subscription, or start once with copy_data = false)",
                table.name,
            )
            return
        try:
            await self._sink.add_table(table.name, TableEntry(TableState.INIT if self._options.copy_data else TableState.READY))
        except RelationError as error:
            if first:
                raise
            _log.warning("a table is published now, but left out: %s", error.one_line())
            return
        if not first:
            _log.info('table "%s" is published now: added', table.name)

    async def _undo_copy(self, table: TableName) -> None:
        """Remove the rows of a copy that was cut off: published again, the table is copied from zero."""
        sink = self._sink.open_table(table)
        try:
            await sink.begin()
        finally:
            await sink.close()

    async def _drop_leftover_slots(
        self, connection: WalReceiverConnection, state: SubscriptionState, tables: Mapping[TableName, TableEntry]
    ) -> None:
        # the slot of a copy that was cut off may still be in the making, behind a long transaction of the publisher: that table's own
        # synchronization waits for it, and nothing else does
        copying = any(entry.state in {TableState.INIT, TableState.DATASYNC} for entry in tables.values())
        needed = await self._sink.slot_names()
        for slot in await connection.slots(sync_slot_prefix(state.oid)):
            if slot.slot_name.endswith(f"_{state.target_identifier}") and slot.slot_name not in needed:
                _log.info('dropping replication slot "%s", left behind by a table synchronization', slot.slot_name)
                try:
                    await connection.drop_slot(slot.slot_name, wait=not copying, missing_ok=True)
                except SlotInUse:
                    _log.info('replication slot "%s" is still in use', slot.slot_name)


def _raise_first(found: Sequence[tuple[type[SubscriberError], Finding]]) -> None:
    errors = [(kind, finding) for kind, finding in found if finding.severity == "error"]
    if not errors:
        return
    kind, first = errors[0]
    error = kind(first.message, hint=first.hint)
    for _, finding in errors[1:]:
        error.add_note(f"also: {finding.message} (hint: {finding.hint})")
    raise error
