"""ALTER SUBSCRIPTION in all its forms. As in PostgreSQL, one call makes one change.

The process that runs the subscription stops first (:meth:`subscriber.catalog.Catalog.claim`), and then starts again with the new
definition.

Source: PostgreSQL manual, ALTER SUBSCRIPTION; subscriptioncmds.c (AlterSubscription).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from subscriber.apply.all_changes import find_own_rows, require_all_changes
from subscriber.apply.row_filters import filter_expressions
from subscriber.catalog import Catalog, Definition, MovableCatalog, OwnedCatalog, ResyncingCatalog
from subscriber.catalog.subscriptions import StoredCatalog, no_such_subscription
from subscriber.config import ALTERABLE, KEYED, LIVE, NO_SLOT, CopyData, Settings, parse_changes
from subscriber.errors import ConfigurationError, RelationError, SubscriberError, TargetError, raise_all
from subscriber.interfaces import TableName, TwoPhaseState
from subscriber.protocol.commands import alter_replication_slot
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.management.create import check_publication_list
from subscriber.subscription.setup.setup import Setup
from subscriber.subscription.setup.synchronous_publisher import find_synchronous
from subscriber.subscription.spec import require_rules
from subscriber.subscription.targets import open_target, opened_catalog
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import Session, check_conninfo

__all__ = ["SubscriptionAlteration", "accept_target", "alter_subscription", "set_limits"]

_log = logging.getLogger(__name__)


async def accept_target(name: str, *, target: str) -> None:
    """Make a target the one of a subscription whose rows in the catalog were restored or copied there. For PostgreSQL targets.

    Raises:
        ConfigurationError: another kind of target.
        TargetError: the subscription does not exist, a table of it is missing, or was being copied.
    """
    async with opened_catalog(target, "subscriber alter") as catalog:
        movable: object = catalog
        if not isinstance(movable, MovableCatalog):
            raise ConfigurationError("this kind of target can be moved without a command", hint="omit --accept-target")
        await movable.accept_target(name)


async def set_limits(name: str, limits: Mapping[str, Any], *, target: str) -> None:
    """Set ``max_copy_rate``, ``max_apply_rate`` or ``copy_window``. The worker keeps running, and follows within seconds.

    Args:
        name: of the subscription.
        limits: the new values.
        target: URL or conninfo of the target.

    Raises:
        ConfigurationError: a rate is out of range.
        TargetError: the subscription does not exist, or the target cannot be reached.
    """
    for each, value in limits.items():
        LIVE[each].check_range(value)
    async with opened_catalog(target, "subscriber alter") as catalog:
        found = next((each for each in await catalog.subscriptions() if each.name == name), None)
        if found is None:
            raise no_such_subscription(name)
        await catalog.update(found.oid, dict(limits))
        _tell_of_next_run(found, limits)


@contextlib.asynccontextmanager
async def alter_subscription(name: str, *, target: str, settings: Settings | None = None) -> AsyncIterator[SubscriptionAlteration]:
    """Claim a subscription to change it.

    Example::

        async with alter_subscription("replica", target="postgresql:///copy") as subscription:
            await subscription.set({"binary": True})

    The worker stops on entry. On exit the launcher starts it again if the subscription is enabled.

    Raises:
        TargetError: the subscription does not exist.
        SubscriptionInUse: the process that runs the subscription does not stop.
    """
    async with opened_catalog(target, "subscriber alter") as catalog, catalog.claim(name) as found:
        if not found.made:
            raise TargetError(f'subscription "{name}" was not created completely', sqlstate="55000", hint="drop it, or create it again")
        yield SubscriptionAlteration(catalog, found, target, settings or Settings())


class SubscriptionAlteration:
    """What :func:`alter_subscription` gives. Each method is one form of ALTER SUBSCRIPTION. It succeeds, or raises and changes nothing.

    Attributes:
        definition: the current definition of the subscription.

    Raises:
        ConfigurationError: the change is not possible, for this subscription or in general.
        PublisherError: the publisher rejected a request, or cannot be reached.
        TargetError: the target rejected a request, or cannot be reached.
    """

    def __init__(self, catalog: Catalog, definition: Definition, target: str, settings: Settings) -> None:
        self.definition = definition
        self._catalog = catalog
        self._target = target
        self._settings = settings
        self._refreshing = False

    @property
    def _name(self) -> str:
        return self.definition.name

    async def _update(self, changes: Mapping[str, Any]) -> None:
        await self._catalog.update(self.definition.oid, changes)
        _tell_of_next_run(self.definition, changes)
        self.definition = next(found for found in await self._catalog.subscriptions() if found.oid == self.definition.oid)

    # --- the forms

    async def enable(self) -> None:
        """ENABLE."""
        if self.definition.slot_name is None:
            raise ConfigurationError("cannot enable subscription that does not have a slot name", hint="set slot_name first")
        self._require_connection()
        await self._update({"enabled": True})

    def _require_connection(self) -> str:
        conninfo = self.definition.conninfo
        if conninfo is None:
            raise ConfigurationError(
                f'subscription "{self._name}" has no connection string: it is defined by its command line',
                hint="set one first (alter --connection)",
            )
        return conninfo

    async def disable(self) -> None:
        """DISABLE. The worker has already stopped."""
        await self._update({"enabled": False})

    async def set_connection(self, conninfo: str) -> None:
        """CONNECTION."""
        conninfo = StoredConninfo(conninfo)
        check_conninfo(conninfo)
        await self._update({"conninfo": conninfo})

    async def set_owner(self, role: str) -> None:
        """OWNER TO."""
        catalog: object = self._catalog
        if not isinstance(catalog, OwnedCatalog):
            raise ConfigurationError("this kind of target has no owners of subscriptions", hint="omit it")
        if self.definition.conninfo is None:
            raise ConfigurationError(
                f'subscription "{self._name}" is defined by its command line: the role that runs it owns it', hint="run it as that role"
            )
        await catalog.set_owner(self.definition.oid, role)

    async def rename(self, name: str) -> None:
        """RENAME TO. The slot keeps its name."""
        await self._update({"name": name})

    async def skip(self, lsn: Lsn | None) -> None:
        """SKIP (lsn = …). None means SKIP (lsn = NONE)."""
        if lsn is None:
            await self._update({"skip_lsn": INVALID_LSN})
            return
        if lsn == INVALID_LSN:
            raise ConfigurationError(f"invalid WAL location (LSN): {lsn}", hint="give the LSN after 'finished at' in the message")
        position = self.definition.position
        if position is not None and lsn < position:
            raise ConfigurationError(
                f"skip WAL location (LSN {lsn}) must be greater than origin LSN {position}",
                hint="this transaction was already applied",
            )
        await self._update({"skip_lsn": lsn})

    async def set_publications(self, publications: Sequence[str], *, refresh: bool = True, copy_data: CopyData = True) -> None:
        """SET PUBLICATION."""
        check_publication_list(publications)
        await self._change_publications(publications, publications, refresh=refresh, copy_data=copy_data)

    async def _change_publications(self, publications: Sequence[str], named: Sequence[str], *, refresh: bool, copy_data: CopyData) -> None:
        if refresh:
            self._require_refreshable("ALTER SUBSCRIPTION with refresh", "with refresh", copy_data=copy_data)
        before = self.definition
        # if this is interrupted after the update, the next run of the subscription completes it
        await self._update({"publications": tuple(publications), "pending_refresh": copy_data if refresh else None})
        if refresh:
            try:
                await self._refresh(named, copy_data=copy_data)
            except BaseException as error:
                if not self._refreshing:
                    await self._update({"publications": before.publications, "pending_refresh": before.pending_refresh})
                elif isinstance(error, SubscriberError):
                    error.add_note("the refresh was interrupted; the subscription completes it when it runs next")
                raise

    async def add_publications(self, publications: Sequence[str], *, refresh: bool = True, copy_data: CopyData = True) -> None:
        """ADD PUBLICATION."""
        check_publication_list(publications)
        for name in publications:
            if name in self.definition.publications:
                raise ConfigurationError(f'publication "{name}" is already in subscription "{self._name}"', hint="omit it")
        found = [*self.definition.publications, *publications]
        await self._change_publications(found, publications, refresh=refresh, copy_data=copy_data)

    async def drop_publications(self, publications: Sequence[str], *, refresh: bool = True, copy_data: CopyData = True) -> None:
        """DROP PUBLICATION."""
        check_publication_list(publications)
        for name in publications:
            if name not in self.definition.publications:
                raise ConfigurationError(f'publication "{name}" is not in subscription "{self._name}"', hint="omit it")
        left = [name for name in self.definition.publications if name not in publications]
        if not left:
            raise ConfigurationError("cannot drop all the publications from a subscription", hint="drop the subscription instead")
        await self._change_publications(left, (), refresh=refresh, copy_data=copy_data)

    async def refresh(self, *, copy_data: CopyData = True) -> None:
        """REFRESH PUBLICATION."""
        self._require_refreshable("ALTER SUBSCRIPTION ... REFRESH", "... REFRESH", copy_data=copy_data)
        await self._refresh((), copy_data=copy_data)

    async def resync(self, tables: Sequence[TableName], *, copy: bool = False) -> None:
        """Synchronize tables again. The next run of the subscription does it, while it follows the others.

        Args:
            tables: of the subscription.
            copy: replace all rows. False: compare the rows with the publisher's, and write only what differs. A lake always copies.
        """
        catalog: object = self._catalog
        if not isinstance(catalog, ResyncingCatalog):
            raise ConfigurationError("tables of this kind of target cannot be synchronized again", hint="create another subscription")
        if self.definition.two_phase is TwoPhaseState.ENABLED:
            raise ConfigurationError(
                "tables cannot be synchronized again when two_phase is enabled",
                hint="disable the subscription, set two_phase = false, and try again",
            )
        if self.definition.conninfo is not None:
            async with await Session.connect(self.definition.conninfo, application_name=session_name(self._name, "alter")) as session:
                found = await published_tables(session, self.definition.publications, *tables, mapping=self.definition.options.mapping)
            if not copy and catalog.reconciles:
                require_all_changes(found)
                for finding in find_own_rows(self.definition.options.origin):
                    _log.warning("%s (hint: %s)", finding.message, finding.hint)
            published = {table.name for table in found}
            for table in tables:
                if table not in published:
                    raise RelationError(
                        f'table "{table}" is not published any more', hint="ALTER PUBLICATION … ADD TABLE on the publisher, or --refresh"
                    )
        await catalog.resync(self.definition.oid, tables, copy=copy)

    def _require_refreshable(self, what: str, form: str, *, copy_data: CopyData) -> None:
        self._require_connection()
        if not self.definition.enabled:
            raise ConfigurationError(
                f"{what} is not allowed for disabled subscriptions",
                hint="enable the subscription first, or use refresh = false with a change of publications",
            )
        if self.definition.two_phase is TwoPhaseState.ENABLED and copy_data:
            words = f"ALTER SUBSCRIPTION {form} and copy_data" if form == "with refresh" else f"ALTER SUBSCRIPTION {form} with copy_data"
            raise ConfigurationError(
                f"{words} is not allowed when two_phase is enabled",
                hint="use copy_data = false, or drop the subscription and create it again",
            )

    async def _refresh(self, named: Sequence[str], *, copy_data: CopyData) -> None:
        found = self.definition
        self._refreshing = False
        self._require_connection()
        options = replace(found.options, copy_data=copy_data, slot_name=found.slot_name)
        async with Setup.of_definition(found, self._target, options, self._settings) as setup:
            try:
                await setup.refresh(named)
            finally:
                self._refreshing = setup.refreshing

    async def set(self, parameters: Mapping[str, Any]) -> None:
        """SET (parameter = value, …). Values are as in :class:`SubscriptionOptions`; the ``slot_name`` ``"none"`` means NONE."""
        # parsed as on the command line, so that a wrong value is rejected here and not when the subscription runs
        keyed = [each for each in KEYED if each.name in parameters and ALTERABLE.get(each.name)]
        names = {each.name for each in keyed}
        given = [(name, NO_SLOT if value is None else value) for name, value in parameters.items() if name not in names]
        changes = parse_changes([f"{name}={value}" for name, value in given])
        found = self.definition
        for each in keyed:
            changes[each.name] = each.changed(str(getattr(found.options, each.name)), parameters[each.name])
        if "where" in changes:
            filter_expressions(replace(found.options, where=changes["where"]))
        if resolving := {name: value for name, value in changes.items() if name.startswith("conflict")}:
            options = replace(found.options, **resolving)
            sink = open_target(self._target, options, self._settings, defined=True)
            require_rules(options, sink)
            # what the rules need of the target: commit timestamps, a table that can be written
            findings = await sink.check([], two_phase=options.two_phase)
            raise_all([ConfigurationError(each.message, hint=each.hint) for each in findings if each.severity == "error"])
        if "slot_name" in changes:
            if "two_phase" in changes:
                raise ConfigurationError('"slot_name" and "two_phase" cannot be altered at the same time', hint="alter one, then the other")
            if changes["slot_name"] == NO_SLOT:
                if found.enabled:
                    raise ConfigurationError("cannot set slot_name = NONE for enabled subscription", hint="disable it first")
                changes["slot_name"] = None
        changed = [name for name in ALTERABLE if name in changes and changes[name] != getattr(found.options, name)]
        for name in changed:
            if ALTERABLE[name].alter == "disabled":
                self._require_disabled(name)
        if "exclude_table" in changed:
            self._require_one_name()
            changes["pending_refresh"] = True
        if "on_error" in changed and changes["on_error"] == "park":
            await self._require_parking()
        if "two_phase" in changes:
            changes["two_phase"] = await self._two_phase(wanted=changes["two_phase"]) if "two_phase" in changed else found.two_phase
        if "failover" in changed:
            await self._alter_slot("failover", wanted=changes["failover"])
        await self._update(changes)

    def _require_one_name(self) -> None:
        """Check that ``exclude_table`` can change: a table that returns must not get rows that another one had under its name."""
        if self.definition.options.map:
            raise ConfigurationError(
                "exclude_table cannot be altered for a subscription whose tables have other names",
                hint="drop the subscription, and create it again with copy_data = reconcile",
            )
        self._require_refreshable("ALTER SUBSCRIPTION ... SET (exclude_table)", "... SET (exclude_table)", copy_data=True)

    async def _require_parking(self) -> None:
        found, catalog = self.definition, self._catalog
        if isinstance(catalog, StoredCatalog):
            await catalog.require_parking(found.oid)
        if found.conninfo is not None:
            async with await Session.connect(found.conninfo, application_name=session_name(found.name, "alter")) as session:
                for finding in await find_synchronous(session, found.name):
                    raise ConfigurationError(finding.message, hint=finding.hint)

    def _require_disabled(self, option: str) -> None:
        if self.definition.slot_name is None:
            raise ConfigurationError(f"cannot set {option} for a subscription that does not have a slot name", hint="set slot_name first")
        if self.definition.enabled:
            raise ConfigurationError(f'cannot set option "{option}" for enabled subscription', hint="disable it first")

    async def _two_phase(self, *, wanted: bool) -> TwoPhaseState:
        if wanted:
            return TwoPhaseState.PENDING
        if await self._catalog.prepared_transactions(self.definition.oid):
            raise ConfigurationError(
                'cannot disable "two_phase" when prepared transactions exist', hint="Resolve these transactions and try again."
            )
        await self._alter_slot("two_phase", wanted=False, relayed=False)
        return TwoPhaseState.DISABLED

    async def _alter_slot(self, option: str, *, wanted: bool, relayed: bool = True) -> None:
        """``relayed``: whether a relay log may have changes that the target does not have."""
        found = self.definition
        assert found.slot_name is not None
        application_name = session_name(found.name, "alter")
        async with await WalReceiverConnection.connect(self._require_connection(), application_name=application_name) as connection:
            slot = await connection.slot(found.slot_name)
            if not relayed and slot is not None and (slot.confirmed_flush_lsn or INVALID_LSN) > (found.position or INVALID_LSN):
                raise ConfigurationError(
                    f'cannot disable "{option}" while the relay log has changes that are not applied',
                    hint="enable the subscription, wait until it has caught up, disable it and try again",
                )
            await connection.execute(alter_replication_slot(connection.capabilities, found.slot_name, **{option: wanted}))


def _tell_of_next_run(found: Definition, changes: Collection[str]) -> None:
    """Warn about changes of a subscription that its command line defines: ``run`` stores what it is given."""
    undone = [f"-o {name}=…" for name in ALTERABLE if name in changes and name != "slot_name"]
    undone += ["--publication …"] if "publications" in changes else []
    if found.conninfo is None and undone:
        _log.warning(
            'subscription "%s" is defined by the command line of its run: the next one undoes this (hint: give it %s, too)',
            found.name,
            " ".join(undone),
        )
