"""The verbs on stored subscriptions: a :class:`subscriber.catalog.Catalog` over a :class:`subscriber.catalog.store.Store`.

Verbs and the launcher meet through it alone. A verb claims a subscription by a lock of its own; the launcher sees that lock and ends the
worker; the verb waits until the writer's lock is free. A new generation tells a worker that is between two connections that it must stop.
A verb that is killed loses its claim with its session or its process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from subscriber.abc import TwoPhaseState
from subscriber.catalog.definition import Definition, claimed_elsewhere, columns_of, definition_of, require_name
from subscriber.catalog.model import COUNTERS, PG_SUBSCRIPTION, POSITION, SUBSCRIPTION_STATS, Table
from subscriber.catalog.statistics import note_error, reset_statistics
from subscriber.catalog.store import CATALOG_KEY, LAUNCHER_KEY, Plus, Row, Rows, Store, verb_key, writer_key
from subscriber.config import STORED, SubscriptionOptions
from subscriber.errors import SubscriptionChanged, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn

__all__ = ["StoredCatalog", "ensure_subscription", "find_subscription", "no_such_subscription", "remove_rows", "require_unclaimed"]

_STOP_SECONDS: Final = 20.0
"""How long a verb waits for the process that runs the subscription: a worker may need some seconds for its batch."""
_LAUNCHER_SECONDS: Final = 10.0
"""How long the session of a launcher that was killed may keep its lock."""

_Store = TypeVar("_Store", bound=Store)


class StoredCatalog(Generic[_Store]):
    """See :class:`subscriber.catalog.Catalog`."""

    def __init__(self, store: _Store) -> None:
        self.store = store

    async def subscriptions(self) -> Sequence[Definition]:
        """All of them, by name.

        Raises:
            TargetUnavailable, TargetError
        """
        async with self.store.reading() as rows:
            found = await rows.select(PG_SUBSCRIPTION, {})
            positions = await read_positions(rows)
        claims = await self.store.held_locks([verb_key(row["oid"]) for row in found])
        defined = [definition_of(row, positions.get(row["oid"]), claimed=verb_key(row["oid"]) in claims) for row in found]
        return sorted(defined, key=lambda definition: definition.name)

    async def _find(self, name: str) -> Definition:
        for found in await self.subscriptions():
            if found.name == name:
                return found
        raise no_such_subscription(name)

    @contextlib.asynccontextmanager
    async def create(self, definition: Definition) -> AsyncIterator[Definition]:
        """Store a new one, claimed.

        Raises:
            ConfigurationError: its name is too long.
            TargetError: subscription already exists.
        """
        require_name(definition.name)
        async with contextlib.AsyncExitStack() as claim:
            async with self._alone():
                async with self.store.transaction() as rows:
                    await _require_free(rows, definition.name)
                    oid = await rows.new_oid()
                # before others can see the subscription
                await self.store.take_lock(verb_key(oid), f'subscription "{definition.name}"')
                claim.push_async_callback(self._release, oid)
                async with self.store.transaction() as rows:
                    await _insert(rows, oid, replace(definition, enabled=False, made=False))
            yield await self._find(definition.name)

    @contextlib.asynccontextmanager
    async def claim(self, name: str) -> AsyncIterator[Definition]:
        """Claim one that is there.

        Raises:
            TargetError: it does not exist.
            SubscriptionInUse: another verb is at work on it, or the process that runs it does not stop.
        """
        oid = (await self._find(name)).oid
        what = f'subscription "{name}"'
        await self.store.take_lock(verb_key(oid), what)
        try:
            # before the wait for the writer's lock: a process that takes it later sees the new generation
            await self._next_generation(oid, 1)
            await self.store.notify()
            try:
                await self.store.take_lock(writer_key(oid), what, _STOP_SECONDS)
            except SubscriptionInUse as error:
                # nothing was done: the process that runs it may continue
                await self._next_generation(oid, -1)
                error.hint = "it is run by a process that does not follow the catalog (subscriber run --connection): stop that first"
                raise
            try:
                await self.store.shut_out(oid)
            finally:
                await self.store.release_lock(writer_key(oid))
            found = await self._find(name)
            if found.oid != oid:
                raise TargetError(f'subscription "{name}" was dropped and created again just now', hint="try again")
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
        # a session that is lost has released it, and the launcher looks once a second anyway
        with contextlib.suppress(TargetUnavailable):
            await self.store.release_lock(verb_key(oid))
            await self.store.notify()

    async def _next_generation(self, oid: int, step: int) -> None:
        async with self.store.transaction() as rows:
            await rows.update(PG_SUBSCRIPTION, {"oid": oid}, {"subgeneration": Plus(step)})

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns, durable when it returns.

        Raises:
            ConfigurationError: the new name is too long.
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
        """Remove one with all its rows.

        Raises:
            TargetUnavailable, TargetError
        """
        async with self.store.transaction() as rows:
            await remove_rows(rows, self.store.tables, oid)
        return await self.store.prepared_transactions(oid)

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Keep an error where status shows it.

        Raises:
            TargetUnavailable
        """
        async with self.store.transaction() as rows:
            await note_error(rows, oid, text, details, self.store.now())

    async def reset_statistics(self, name: str) -> None:
        """Set the counters to zero.

        Raises:
            TargetError: it does not exist.
            TargetUnavailable
        """
        oid = (await self._find(name)).oid
        async with self.store.transaction() as rows:
            await reset_statistics(rows, oid, self.store.now())

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Names of those that the target holds.

        Raises:
            TargetUnavailable
        """
        return await self.store.prepared_transactions(oid)

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """Take the launcher's lock. See :meth:`subscriber.catalog.Catalog.become_launcher`.

        Raises:
            SubscriptionInUse: another session has it.
        """
        try:
            await self.store.take_lock(LAUNCHER_KEY, "the launcher of this target", _LAUNCHER_SECONDS, lost=lost)
        except SubscriptionInUse as error:
            error.hint = "one `subscriber run --target` serves all subscriptions of a target: stop the other one first"
            raise
        return self.store.session_number

    async def wait(self, timeout: float) -> None:
        """Return when something was changed, or after ``timeout`` seconds at the latest.

        Raises:
            TargetUnavailable: the session is lost.
        """
        await self.store.wait(timeout)

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self.store.close()


async def find_subscription(rows: Rows, name: str) -> Row | None:
    """The row of a subscription, or None."""
    return next(iter(await rows.select(PG_SUBSCRIPTION, {"subname": name})), None)


async def read_positions(rows: Rows) -> Mapping[int, Lsn]:
    """Up to where the target has everything of each subscription, by oid."""
    return {row["srsubid"]: row["remote_lsn"] for row in await rows.select(POSITION, {"srrelid": 0})}


async def _require_free(rows: Rows, name: str, *, but: int | None = None) -> None:
    found = await find_subscription(rows, name)
    if found is not None and found["oid"] != but:
        raise TargetError(f'subscription "{name}" already exists', sqlstate="42710", hint="choose another name, or drop that one first")


async def _insert(rows: Rows, oid: int, definition: Definition) -> None:
    await rows.insert(PG_SUBSCRIPTION, [{"oid": oid, **definition.columns}])
    await rows.insert(SUBSCRIPTION_STATS, [{"subid": oid, **dict.fromkeys(COUNTERS, 0)}])


async def ensure_subscription(store: Store, name: str, options: SubscriptionOptions, *, known: bool) -> int:
    """Find the subscription's row, or make it; return its oid.

    A subscription that its command line defines shows the parameters of the latest one.

    Args:
        store: of the target.
        name: of the subscription.
        options: of the run.
        known: it was there, and is not made again: no process would run the new one, and its name would be taken.

    Raises:
        SubscriptionChanged: it was known, and is gone.
        TargetUnavailable, TargetError
    """
    async with store.reading() as rows:
        found = await find_subscription(rows, name)
    if found is None:
        if known:
            raise SubscriptionChanged(
                f'subscription "{name}" was dropped or renamed just now', hint="subscriber status lists the subscriptions that exist"
            )
        return await _insert_by_command_line(store, name, options)
    oid = int(found["oid"])
    shown = columns_of({option: getattr(options, option) for option in STORED})
    if found["subconninfo"] is None and any(found[column] != value for column, value in shown.items()):
        async with store.transaction() as rows:
            await rows.update(PG_SUBSCRIPTION, {"oid": oid, "subconninfo": None}, shown)
    return oid


async def require_unclaimed(store: Store, oid: int, name: str) -> None:
    """See, under the writer's lock, that no verb has claimed a subscription; the launcher looks at the claim itself.

    Raises:
        SubscriptionInUse: one has.
    """
    # a verb takes its own lock before it asks for the writer's
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
    """Remove everything of a subscription."""
    for table in tables:
        assert table.subscription is not None
        await rows.delete(table, {table.subscription: oid})


def no_such_subscription(name: str) -> TargetError:
    """The error of a verb."""
    return TargetError(f'subscription "{name}" does not exist', sqlstate="42704", hint="subscriber status lists those that do")
