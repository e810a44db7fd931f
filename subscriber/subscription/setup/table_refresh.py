"""REFRESH PUBLICATION: add tables that are newly published, and remove tables that are no longer published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from subscriber.apply.all_changes import require_all_changes
from subscriber.apply.tables.table_synchronization import sync_slot_prefix
from subscriber.config import CopyData
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import ConfigurationError, SlotInUse, TargetError
from subscriber.interfaces import (
    DescribedSink,
    OpenedSink,
    PublishedTable,
    ReconcilingTableSink,
    Sink,
    SubscriptionState,
    SyncMode,
    TableEntry,
    TableName,
    TableState,
    TwoPhaseState,
)
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import published_tables

__all__ = ["NOT_WITH_TWO_PHASE", "TableRefresh", "drop_leftover_slots", "first_entry", "require_reconciling", "undo_copy"]

_log = logging.getLogger(__name__)

NOT_WITH_TWO_PHASE: Final = (
    "cannot be copied while two_phase is enabled (hint: copy it with another subscription, or start once with copy_data = false)"
)
"""PostgreSQL rejects this in REFRESH PUBLICATION: a transaction prepared before the copy could commit after it, and would be in neither."""


def first_entry(copy_data: CopyData) -> TableEntry:
    """The state of a table that is added."""
    mode = SyncMode.RECONCILE if copy_data == "reconcile" else SyncMode.COPY
    return TableEntry(TableState.INIT if copy_data else TableState.READY, mode=mode)


class TableRefresh:
    """Updates the target's list of the subscription's tables to match the publisher's.

    Args:
        publications: the subscribed publications.
        copy_data: whether new tables are copied, or reconciled.
        mapping: which tables the subscription has, and under which names.
        sink: the target, opened.
        log_level: for tables that are left out.
        logged: tables for which the log already says that they cannot be replicated.

    Attributes:
        published: name and oid of each published table, set by :meth:`refresh`.
        left_out: the tables that :meth:`refresh` did not add, each with the reason.
    """

    def __init__(
        self,
        publications: Sequence[str],
        sink: OpenedSink,
        *,
        copy_data: CopyData,
        mapping: TableMapping = NO_MAPPING,
        log_level: int = logging.WARNING,
        logged: Collection[TableName] = (),
    ) -> None:
        self._publications = publications
        self._sink = sink
        self._copy_data = copy_data
        self._mapping = mapping
        self._log_level = log_level
        self._logged = set(logged)
        self.published: dict[TableName, int] = {}
        self.left_out: dict[TableName, str] = {}

    async def refresh(
        self,
        connection: WalReceiverConnection,
        state: SubscriptionState,
        *,
        first: bool = False,
        demanded: Sink | None = None,
        changing: Callable[[], None] = lambda: None,
    ) -> Mapping[TableName, TableEntry]:
        """Add and remove tables. Return all tables of the subscription.

        Args:
            connection: to the publisher.
            state: the subscription's state.
            first: whether the subscription was just created.
            demanded: set if the user requested the refresh: checks the new tables. If the target refuses a table, that is an error, and no
                table is added.
            changing: called before anything is changed.

        Raises:
            ConfigurationError: tables of this kind of target cannot be reconciled.
            RelationError: none of the new tables can be added, and ``demanded`` or ``first`` is set.
            PublisherError, TargetError: the publisher or the target rejected a request.
        """
        published = {table.name: table for table in await published_tables(connection, self._publications, mapping=self._mapping)}
        self.published = {name: table.relation_id for name, table in published.items()}
        entries = await self._sink.tables()
        new = sorted(published.keys() - entries.keys())
        if demanded is not None:
            await self._require(demanded, [published[name] for name in new])
        if self._copy_data == "reconcile" and new:
            require_reconciling(self._sink, new[0])
            require_all_changes([published[name] for name in new])
        if isinstance(self._sink, DescribedSink):
            await self._sink.describe_tables(list(published.values()))
        changing()
        await self._add(new, state, first=first, demanded=demanded is not None)
        removed = sorted(entries.keys() - published.keys())
        for name in removed:
            if entries[name].state is TableState.DATASYNC:
                await undo_copy(self._sink, name)
            _log.warning('table "%s" is no longer published; its rows are kept', name)
            await self._sink.remove_table(name)
        return await self._sink.tables() if new or removed else entries

    async def _require(self, sink: Sink, tables: Sequence[PublishedTable]) -> None:
        from subscriber.subscription.setup.checks import tell  # noqa: PLC0415 -- a start does not need it

        findings = await sink.check(tables, two_phase=False)
        for finding in findings:
            if finding.refuses:
                raise TargetError(finding.message, hint=finding.hint)
        self._logged |= tell(findings, copy_data=self._copy_data)

    async def _add(self, tables: Sequence[TableName], state: SubscriptionState, *, first: bool, demanded: bool) -> None:
        if state.two_phase is TwoPhaseState.ENABLED and self._copy_data:
            for table in tables:
                self.left_out[table] = NOT_WITH_TWO_PHASE
                _log.log(self._log_level, 'table "%s" is published but not replicated: %s', table, self.left_out[table])
            return
        entry = first_entry(self._copy_data)
        failed = await self._sink.add_tables(tables, entry) if tables else {}
        for table in tables:
            if table in failed:
                if (first or demanded) and len(failed) == len(tables):
                    raise failed[table]
                self.left_out[table] = failed[table].one_line()
                if table not in self._logged:
                    _log.log(self._log_level, "a table is published but not replicated: %s", failed[table].one_line())
            elif not first:
                _log.info('table "%s" is published and was added', table)


def require_reconciling(sink: OpenedSink, table: TableName) -> None:
    """Check that the tables of a target can be reconciled.

    Raises:
        ConfigurationError: they cannot.
    """
    if not isinstance(sink.open_table(table), ReconcilingTableSink):
        raise ConfigurationError("the rows of this kind of target cannot be reconciled", hint="empty the tables, and copy them")


async def undo_copy(sink: OpenedSink, table: TableName) -> None:
    """Remove the rows of an interrupted copy. If the table is published again, it is copied from the start."""
    work = sink.open_table(table)
    try:
        await work.begin()
    finally:
        await work.close()


async def drop_leftover_slots(
    connection: WalReceiverConnection,
    sink: OpenedSink | None,
    state: SubscriptionState,
    tables: Mapping[TableName, TableEntry] | None = None,
) -> None:
    """Drop the slots of table synchronizations that ended without dropping them.

    Args:
        connection: to the publisher.
        sink: the target, opened. It knows which slots are still needed. None: no slot is needed.
        state: the subscription's state.
        tables: tables whose slots may still be in creation.
    """
    # the slot of an interrupted copy may still be in creation, waiting for a long transaction of the publisher. Only that table's
    # synchronization waits for it
    copying = any(entry.state in {TableState.INIT, TableState.DATASYNC} for entry in (tables or {}).values())
    needed = frozenset[str]() if sink is None else await sink.slot_names()
    for slot in await connection.slots(sync_slot_prefix(state.oid)):
        if slot.slot_name.endswith(f"_{state.target_identifier}") and slot.slot_name not in needed:
            _log.info('dropping replication slot "%s", left behind by a table synchronization', slot.slot_name)
            try:
                await connection.drop_slot(slot.slot_name, wait=not copying, missing_ok=True)
            except SlotInUse:
                _log.info('replication slot "%s" is still in use', slot.slot_name)
