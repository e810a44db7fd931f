"""The verbs on stored subscriptions: a :class:`subscriber.catalog.Catalog` over a :class:`subscriber.catalog.store.Store`.

Verbs and the launcher communicate only through the catalog. A verb takes its own lock, the claim, on a subscription. The launcher sees that
lock and stops the worker. The verb waits until the writer's lock is free. It also stores a new generation, which stops a worker that is
between two connections. If a verb is killed, its claim ends with its session or its process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from subscriber.catalog.definition import Definition, claimed_elsewhere, columns_of, definition_of, require_name
from subscriber.catalog.model import COUNTERS, PG_SUBSCRIPTION, PG_SUBSCRIPTION_REL, POSITION, SUBSCRIPTION_STATS, VERIFICATION, Table
from subscriber.catalog.statistics import note_error, reset_statistics
from subscriber.catalog.store import CATALOG_KEY, LAUNCHER_KEY, Row, Rows, Store, verb_key, writer_key
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.config import STORED, SubscriptionOptions
from subscriber.errors import ConfigurationError, RelationError, SubscriptionChanged, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.interfaces import SubscriptionState, SyncMode, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import Lsn

__all__ = ["StoredCatalog", "ensure_subscription", "find_subscription", "no_such_subscription", "remove_rows", "require_unclaimed"]

_STOP_SECONDS: Final = 20.0
"""How long a verb waits until the process that runs the subscription has stopped: a worker may need some seconds for its batch."""
_STOPPED_SECONDS: Final = 3.0
"""The same for one that its command line or a configuration file defines: that process follows no catalog, but may be ending."""
_LAUNCHER_SECONDS: Final = 10.0
"""How long a new launcher waits for the lock: the session of a killed launcher keeps it for a while."""

_Store = TypeVar("_Store", bound=Store)


class _RolledBackError(Exception):
    """Ends a transaction that only checked whether it could be made."""


class StoredCatalog(Generic[_Store]):
    """See :class:`subscriber.catalog.Catalog`."""

    reconciles = True

    def __init__(self, store: _Store) -> None:
        self.store = store

    async def subscriptions(self) -> Sequence[Definition]:
        async with self.store.reading() as rows:
            found = await rows.select(PG_SUBSCRIPTION, {})
            positions = await read_positions(rows)
        claims = await self.store.held_locks([verb_key(row["oid"]) for row in found])
        defined = [definition_of(row, positions.get(row["oid"]), claimed=verb_key(row["oid"]) in claims) for row in found]
        return sorted(defined, key=lambda definition: definition.name)

    async def find(self, name: str) -> Definition:
        """Return the definition of a subscription.

        Raises:
            TargetError: it does not exist.
        """
        for found in await self.subscriptions():
            if found.name == name:
                return found
        raise no_such_subscription(name)

    @contextlib.asynccontextmanager
    async def create(self, definition: Definition) -> AsyncIterator[Definition]:
        """Store a new subscription and claim it.

        Raises:
            ConfigurationError: its name is empty or too long.
            TargetError: the subscription already exists.
        """
        require_name(definition.name)
        async with contextlib.AsyncExitStack() as claim:
            async with self._alone():
                async with self.store.transaction() as rows:
                    await _require_free(rows, definition.name)
                    oid = await rows.new_oid()
                # take the claim before other processes can see the subscription
                await self.store.take_lock(verb_key(oid), f'subscription "{definition.name}"')
                claim.push_async_callback(self._release, oid)
                async with self.store.transaction() as rows:
                    await _insert(rows, oid, replace(definition, enabled=False, made=False))
            yield await self.find(definition.name)

    @contextlib.asynccontextmanager
    async def claim(self, name: str) -> AsyncIterator[Definition]:
        known = await self.find(name)
        oid, what = known.oid, f'subscription "{name}"'
        await self.store.take_lock(verb_key(oid), what)
        try:
            # under the verb's lock no other process changes it
            before = (await self.find(name)).generation
            try:
                # before the wait for the writer's lock: a process that takes that lock later sees the new generation
                await self._set_generation(oid, before + 1)
                await self.store.notify()
                await self.store.take_lock(writer_key(oid), what, _STOPPED_SECONDS if known.conninfo is None else _STOP_SECONDS)
            except BaseException as error:
                # nothing was changed: the process that runs the subscription may continue
                with contextlib.suppress(TargetUnavailable):
                    await self._set_generation(oid, before)
                if isinstance(error, SubscriptionInUse):
                    error.hint = "stop the process that runs it with `run --connection` or `--config`: it does not follow the catalog"
                raise
            try:
                await self.store.shut_out(oid)
            finally:
                await self.store.release_lock(writer_key(oid))
            found = await self.find(name)
            if found.oid != oid:
                raise TargetError(f'subscription "{name}" was dropped and created again in the meantime', hint="try again")
            yield found
        finally:
            await self._release(oid)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        await self.store.take_lock(CATALOG_KEY, "the catalog of the target")
        try:
            yield
        finally:
            await self.store.release_lock(CATALOG_KEY)

    async def _release(self, oid: int) -> None:
        # a lost session has released the lock already, and the launcher reads the catalog once a second anyway
        with contextlib.suppress(TargetUnavailable):
            await self.store.release_lock(verb_key(oid))
            await self.store.notify()

    async def _set_generation(self, oid: int, generation: int) -> None:
        async with self.store.transaction() as rows:
            await rows.update(PG_SUBSCRIPTION, {"oid": oid}, {"subgeneration": generation})

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns. Durable on return.

        Raises:
            ConfigurationError: the new name is empty or too long.
            TargetError: the new name is taken.
        """
        async with contextlib.AsyncExitStack() as stack:
            if "name" in changes:
                require_name(changes["name"])
                await stack.enter_async_context(self._alone())
            rows = await stack.enter_async_context(self.store.transaction())
            if "name" in changes:
                await _require_free(rows, changes["name"], but=oid)
            await rows.update(PG_SUBSCRIPTION, {"oid": oid}, columns_of(changes))
        await self.store.notify()

    async def remove(self, oid: int) -> Sequence[str]:
        async with self.store.transaction() as rows:
            await remove_rows(rows, self.store.tables, oid)
        return await self.store.prepared_transactions(oid)

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        async with self.store.transaction() as rows:
            await note_error(rows, oid, text, details, self.store.now())

    async def reset_statistics(self, name: str) -> None:
        oid = (await self.find(name)).oid
        async with self.store.transaction() as rows:
            await reset_statistics(rows, oid, self.store.now())

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        return await self.store.prepared_transactions(oid)

    async def resync(self, oid: int, tables: Sequence[TableName], *, copy: bool) -> None:
        """See :meth:`subscriber.catalog.ResyncingCatalog.resync`."""
        async with self.store.transaction() as rows:
            await self._look_again(rows, oid, accept_target=False)
            known = dict(await SubscriptionRows(rows, oid).tables(lock=True))
            for relid in (await rows.relids([table for table in tables if table in known])).values():
                if isinstance(relid, RelationError):
                    raise relid
            for table in tables:
                if table not in known:
                    raise RelationError(
                        f'table "{table}" is not part of the subscription', hint="`subscriber status` lists the tables of a subscription"
                    )
            for table in tables:
                await rows.delete(VERIFICATION, {"subid": oid, "nspname": table.namespace, "relname": table.name})
            await self._begin_again(rows, oid, tables, SyncMode.REPLACE if copy else SyncMode.RECONCILE)
        await self.store.notify()

    async def restart(
        self, oid: int, *, accept_target: bool = False, dry_run: bool = False
    ) -> tuple[SubscriptionState, Mapping[TableName, TableEntry]]:
        """See :meth:`subscriber.catalog.RestartingCatalog.restart`."""
        if not self.store.prepared_tables and await self.store.prepared_transactions(oid):
            raise ConfigurationError(
                "the subscription has prepared transactions in the target", hint="end them with ROLLBACK PREPARED, and try again"
            )
        with contextlib.suppress(_RolledBackError):
            async with self.store.transaction() as rows:
                await self._look_again(rows, oid, accept_target=accept_target)
                own = SubscriptionRows(rows, oid)
                state, tables = await own.subscription(), await own.tables(lock=not dry_run)
                await self._begin_again(rows, oid, [name for name, _ in tables], SyncMode.RECONCILE)
                await own.forget_position(0)
                # it may be an LSN of another server
                await rows.update(PG_SUBSCRIPTION_REL, {"srsubid": oid}, {"srsublsn": None, "srerrortime": None})
                if not state.managed:
                    # as if it was never created: a slot of this name that is there at the next start is another one
                    await own.change(subslotname=None)
                await own.clear_skip()
                # what is still prepared on the publisher is sent again
                for table in (VERIFICATION, *self.store.prepared_tables):
                    assert table.subscription is not None
                    await rows.delete(table, {table.subscription: oid})
                if dry_run:
                    raise _RolledBackError
        if not dry_run:
            await self.store.notify()
        return state, {name: row.entry for name, row in tables}

    async def _look_again(self, rows: Rows, oid: int, *, accept_target: bool) -> None:
        """Make the subscription's rows those of this target, before :meth:`restart` reads them."""
        if accept_target:
            raise ConfigurationError("this kind of target can be moved without a command", hint="omit --accept-target")

    async def _begin_again(self, rows: Rows, oid: int, names: Sequence[TableName], mode: SyncMode) -> None:
        own = SubscriptionRows(rows, oid)
        await own.require_alone(names)
        known = dict(await own.tables())
        relids = [known[name].relid for name in names]
        if not relids:
            return
        # positions, and what finds the rows of an unfinished copy
        for table in self.store.tables:
            if "srrelid" in table.columns and table.name != PG_SUBSCRIPTION_REL.name:
                await rows.delete(table, {"srsubid": oid, "srrelid": relids})
        await own.set_entries(relids, TableEntry(TableState.INIT, mode=mode))

    async def require_parking(self, oid: int) -> None:
        """Check that no trigger fires that may read a parked table of the subscription.

        Raises:
            RelationError: one does.
            TargetError, TargetUnavailable
        """
        async with self.store.reading() as rows:
            tables = [name for name, _ in await SubscriptionRows(rows, oid).tables()]
            trigger = await rows.firing_trigger(tables) if len(tables) > 1 else None
        if trigger is not None:
            raise trigger.reads_parked

    async def become_launcher(self, lost: int | None = None) -> int | None:
        try:
            await self.store.take_lock(LAUNCHER_KEY, "the launcher of this target", _LAUNCHER_SECONDS, lost=lost)
        except SubscriptionInUse as error:
            error.hint = "one `subscriber run --target` serves all subscriptions of a target: stop the other one first"
            raise
        return self.store.session_number

    async def wait(self, timeout: float) -> None:
        await self.store.wait(timeout)

    async def close(self) -> None:
        await self.store.close()


async def find_subscription(rows: Rows, name: str) -> Row | None:
    return next(iter(await rows.select(PG_SUBSCRIPTION, {"subname": name})), None)


async def read_positions(rows: Rows) -> Mapping[int, Lsn]:
    """Return the LSN of each subscription's position, by oid."""
    return {row["srsubid"]: row["remote_lsn"] for row in await rows.select(POSITION, {"srrelid": 0})}


async def _require_free(rows: Rows, name: str, *, but: int | None = None) -> None:
    found = await find_subscription(rows, name)
    if found is not None and found["oid"] != but:
        raise TargetError(
            f'subscription "{name}" already exists', sqlstate="42710", hint="choose another name, or drop the existing subscription first"
        )


async def _insert(rows: Rows, oid: int, definition: Definition) -> None:
    await rows.insert(PG_SUBSCRIPTION, [{"oid": oid, **definition.columns}])
    await rows.insert(SUBSCRIPTION_STATS, [{"subid": oid, **dict.fromkeys(COUNTERS, 0)}])


async def ensure_subscription(store: Store, name: str, options: SubscriptionOptions, *, known: bool) -> int:
    """Find the subscription's row or insert it. Return its oid.

    If the command line of a run defines the subscription, the row shows the parameters of the latest run.

    Args:
        store: the target's.
        name: the subscription's.
        options: the run's.
        known: the subscription existed before. It is not created again: no process would run the new one, and its name would be taken.

    Raises:
        SubscriptionChanged: it existed before and does not exist any more.
        TargetUnavailable, TargetError
    """
    async with store.reading() as rows:
        found = await find_subscription(rows, name)
    if found is None:
        if known:
            raise SubscriptionChanged(
                f'subscription "{name}" was dropped or renamed in the meantime', hint="`subscriber status` lists the existing subscriptions"
            )
        return await _insert_by_command_line(store, name, options)
    oid = int(found["oid"])
    shown = columns_of({option: getattr(options, option) for option in STORED})
    if found["subconninfo"] is None and any(found[column] != value for column, value in shown.items()):
        async with store.transaction() as rows:
            if await rows.select(PG_SUBSCRIPTION_REL, {"srsubid": oid}):
                _require_mapping(name, found, shown)
            await rows.update(PG_SUBSCRIPTION, {"oid": oid, "subconninfo": None}, shown)
    return oid


def _require_mapping(name: str, stored: Row, shown: Row) -> None:
    """Check that the names of tables and columns are those of the earlier runs, whose rows the target has."""
    fixed = ["map", "columns", "rename"]
    # without other names, a table that is left out keeps its rows, and is copied again later
    fixed += ["exclude_table"] if stored[STORED["map"].column] else []
    if changed := [option for option in fixed if stored[STORED[option].column] != shown[STORED[option].column]]:
        raise ConfigurationError(
            f'subscription "{name}" was started with other values of {", ".join(changed)}, and the target has its rows under those names',
            hint=f"use the same ones, or start over: subscriber drop {name}, and run it with copy_data = reconcile",
        )


async def require_unclaimed(store: Store, oid: int, name: str) -> None:
    """Check that no verb has claimed a subscription. Call it under the writer's lock.

    Only a run with ``--connection`` needs this: the launcher checks the claim itself.

    Raises:
        SubscriptionInUse: a verb has claimed it.
    """
    # a verb takes the claim before it waits for the writer's lock
    if await store.held_locks([verb_key(oid)]):
        raise claimed_elsewhere(name)


async def _insert_by_command_line(store: Store, name: str, options: SubscriptionOptions) -> int:
    definition = Definition(
        name=name, enabled=True, conninfo=None, slot_name=None, publications=(), options=options, two_phase=TwoPhaseState.DISABLED
    )
    await store.take_lock(CATALOG_KEY, "the catalog of the target")
    try:
        async with store.transaction() as rows:
            oid = await rows.new_oid()
            found = await find_subscription(rows, name)
            if found is not None:
                return int(found["oid"])
            await _insert(rows, oid, definition)
            return oid
    finally:
        await store.release_lock(CATALOG_KEY)


async def remove_rows(rows: Rows, tables: Sequence[Table], oid: int) -> None:
    for table in tables:
        assert table.subscription is not None
        await rows.delete(table, {table.subscription: oid})


def no_such_subscription(name: str) -> TargetError:
    """The error of a verb on a subscription that does not exist."""
    return TargetError(
        f'subscription "{name}" does not exist', sqlstate="42704", hint="`subscriber status` lists the existing subscriptions"
    )
