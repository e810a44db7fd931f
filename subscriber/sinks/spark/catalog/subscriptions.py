"""The catalog of a lake: a :class:`subscriber.catalog.Catalog` of at most one subscription.

Verbs and the launcher communicate by files in the lake's directory. A verb claims the subscription with the lock ``.verb.lock``. The
launcher sees the lock and stops the worker, and the verb waits until the writer's lock is free. ``generation.json`` tells a worker that is
between two connections that it must stop. If a verb is killed, its claim ends with the process. There are no notifications of a change:
:meth:`LakeCatalog.wait` is a short pause.

DROP keeps the tables, and the landed changes that are not applied yet. The lake is marked as dropped, so that the applier can still finish
it, and no new subscription can begin in it. A subscription for which nothing was landed is removed completely.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from subscriber.catalog import Definition
from subscriber.catalog.definition import require_name
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.config import STORED
from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.interfaces import Position, SubscriptionState, TableEntry, TableName, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN
from subscriber.sinks.spark.catalog.checks import require_options
from subscriber.sinks.spark.catalog.definition import (
    DEFINITION,
    GENERATION,
    OPTIONS,
    LakeDefinition,
    read_definition,
    read_generation,
    write_definition,
    write_generation,
)
from subscriber.sinks.spark.catalog.lake import (
    CATALOG,
    IDENTITY,
    LANDING,
    POSITION,
    VERB_LOCK,
    WRITER_LOCK,
    Lake,
    LakeState,
    copied_again,
    lake_of_another,
)
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.catalog.status_files import ERROR, RESET, STATUS, read_counters, write_error, write_reset
from subscriber.sinks.spark.files.file_lock import FileLock, is_held
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.threads import run_in_thread

__all__ = ["LakeCatalog", "defined", "stored_state"]

_log = logging.getLogger(__name__)

_OID: Final = 1
"""A lake has only one subscription."""
_LAUNCHER: Final = ".launcher.lock"

_VERB_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 20.0
"""How long a verb waits for the process that runs the subscription. A worker may need some seconds for its current batch."""
_LOOK_SECONDS: Final = 0.25


def defined(storage: Storage, lake: Lake, *, claimed: bool = False) -> Definition:
    """The definition of a lake's subscription."""
    found = read_definition(storage) or LakeDefinition()
    state = lake.state
    return Definition(
        oid=_OID,
        name=lake.name,
        enabled=found.enabled,
        conninfo=found.conninfo,
        slot_name=state.slot_name,
        publications=state.publications,
        options=replace(found.options, two_phase=state.two_phase is not TwoPhaseState.DISABLED),
        two_phase=state.two_phase,
        skip_lsn=found.skip_lsn,
        position=lake.landed(),
        made=found.made,
        generation=read_generation(storage),
        pending_refresh=found.pending_refresh,
        claimed=claimed,
    )


def stored_state(storage: Storage, lake: Lake, position: Position | None) -> SubscriptionState:
    """The state of a lake's subscription, at a position."""
    found = defined(storage, lake)
    return SubscriptionState(
        oid=_OID,
        name=lake.name,
        target_identifier=lake.target_identifier,
        slot_name=found.slot_name,
        publications=found.publications,
        two_phase=found.two_phase,
        position=position,
        managed=found.conninfo is not None,
        generation=found.generation,
        pending_refresh=found.pending_refresh,
        skip_lsn=found.skip_lsn,
    )


class LakeCatalog:
    """A :class:`subscriber.catalog.Catalog`. Created by :meth:`open`."""

    reconciles = False

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._verb = FileLock(
            storage.local(VERB_LOCK), "the lake's subscription is being altered or dropped by another process", "try again"
        )
        self._launcher = FileLock(
            storage.local(_LAUNCHER),
            "the launcher of this target is run by another process",
            "one `subscriber run --target` serves a lake: stop the other one first",
        )

    @classmethod
    async def open(cls, target: str) -> Self:
        """Open the lake's directory, and create it if it does not exist.

        Raises:
            ConfigurationError: the URL is invalid, or is not a directory: other storage has no locks.
            TargetUnavailable, TargetError: the directory cannot be created, or contains something else.
        """
        location = Location.parse(target)
        storage = Storage.open(location)
        if storage.root is None:
            raise ConfigurationError(
                f"verbs and the launcher need a lake in a directory, and {location} is none",
                hint="use subscriber run --connection … --publication … --target",
            )
        await run_in_thread(lambda: Lake.find(storage))
        await run_in_thread(lambda: storage.make_directory(""))
        return cls(storage)

    async def _find(self) -> Lake | None:
        lake = await run_in_thread(lambda: Lake.find(self._storage))
        return None if lake is None or lake.dropped else lake

    async def _found(self, name: str) -> Lake:
        lake = await self._find()
        if lake is None or not lake.has(name):
            raise no_such_subscription(name)
        return lake

    async def subscriptions(self) -> Sequence[Definition]:
        lake = await self._find()
        if lake is None:
            return []
        claimed = self._verb.is_mine or is_held(self._storage.local(VERB_LOCK))
        return [await run_in_thread(lambda: defined(self._storage, lake, claimed=claimed))]

    @contextlib.asynccontextmanager
    async def create(self, definition: Definition) -> AsyncIterator[Definition]:
        """Store a new subscription and claim it.

        Raises:
            ConfigurationError: the name is too long, or a lake does not support an option.
            TargetError: the subscription already exists, or the lake belongs or belonged to another one.
        """
        require_name(definition.name)
        require_options({name: getattr(definition.options, name) for name in STORED})
        await self._verb.wait(_VERB_SECONDS)
        try:
            async with self._writing(definition.name):
                lake = await run_in_thread(lambda: self._make(definition))
            yield await run_in_thread(lambda: defined(self._storage, lake, claimed=True))
        finally:
            self._verb.give_back()

    def _make(self, definition: Definition) -> Lake:
        found = Lake.find(self._storage)
        if found is not None:
            raise _is_there(found, definition.name)
        # write the definition first: once the identity exists, there is a lake
        write_definition(self._storage, LakeDefinition(enabled=False, conninfo=definition.conninfo, made=False, options=definition.options))
        lake = Lake.make(self._storage, definition.name)
        state = LakeState(slot_name=definition.slot_name, publications=definition.publications, two_phase=definition.two_phase)
        lake.change(lambda _: state)
        return lake

    @contextlib.asynccontextmanager
    async def claim(self, name: str) -> AsyncIterator[Definition]:
        await self._found(name)
        await self._verb.wait(_VERB_SECONDS)
        try:
            # under the verbs' lock no other process changes it
            before = await run_in_thread(lambda: read_generation(self._storage))
            try:
                # before looking at the writer's lock: a process that takes that lock later sees the new generation
                await run_in_thread(lambda: write_generation(self._storage, before + 1))
                async with self._writing(name, _STOP_SECONDS):
                    pass
            except BaseException:
                # nothing was changed: the process that runs the subscription may continue
                with contextlib.suppress(TargetUnavailable):
                    await run_in_thread(lambda: write_generation(self._storage, before))
                raise
            lake = await self._found(name)
            yield await run_in_thread(lambda: defined(self._storage, lake, claimed=True))
        finally:
            self._verb.give_back()

    @contextlib.asynccontextmanager
    async def _writing(self, name: str, wait: float = _VERB_SECONDS) -> AsyncIterator[None]:
        """Hold the writer's lock inside the block."""
        lock = FileLock(
            self._storage.local(WRITER_LOCK),
            f'subscription "{name}" is in use by another process',
            "stop the process that runs it with `run --connection` or `--config`: it does not follow the catalog",
        )
        await lock.wait(wait)
        try:
            yield
        finally:
            lock.give_back()

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change the subscription. The change is durable on return. It may affect several documents; a new name is stored last.

        Raises:
            ConfigurationError: the new name is too long, or a lake does not support a value.
            TargetError: the subscription does not exist any more.
        """
        require_options(changes)
        if "name" in changes:
            require_name(changes["name"])
        async with self._writing((await self._present()).name):
            lake = await self._present()
            await run_in_thread(lambda: self._store(lake, changes))

    async def _present(self) -> Lake:
        lake = await self._find()
        if lake is None:
            raise TargetError(
                "the subscription has been dropped", sqlstate="42704", hint="`subscriber status` lists the existing subscriptions"
            )
        return lake

    def _store(self, lake: Lake, changes: Mapping[str, Any]) -> None:
        options = {name: value for name, value in changes.items() if name in OPTIONS}
        own = {name: value for name, value in changes.items() if name in {"enabled", "conninfo", "made", "pending_refresh", "skip_lsn"}}
        if options or own:
            found = read_definition(self._storage) or LakeDefinition()
            write_definition(self._storage, replace(found, **own, options=replace(found.options, **options)))
        state = {name: value for name, value in changes.items() if name in {"slot_name", "publications", "two_phase"}}
        if "publications" in state:
            state["publications"] = tuple(state["publications"])
        if state:
            lake.change(lambda stored: replace(stored, **state))
        if "name" in changes:
            lake.identify(changes["name"])

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove the subscription, see the module. Waiting prepared transactions are removed with a warning: they were not applied."""
        waiting = await self.prepared_transactions(oid)
        lake = await self._find()
        if lake is None:
            return ()
        async with self._writing(lake.name):
            await run_in_thread(lambda: self._remove(lake))
        if waiting:
            _log.warning(
                "prepared transactions were waiting for their COMMIT PREPARED and were removed with the subscription: %s"
                " (hint: if they are committed on the publisher, copy their changes by hand)",
                ", ".join(waiting),
            )
        return ()

    def _remove(self, lake: Lake) -> None:
        storage = self._storage
        storage.remove_directory("prepared")
        documents = [DEFINITION, STATUS, ERROR, RESET]
        if not any(storage.files(LANDING)) and not storage.entries("copy") and read_snapshot(storage) is None:
            storage.delete([IDENTITY])
            storage.remove_directory(LANDING)
            storage.remove_directory("copy")
            documents += [POSITION, CATALOG, GENERATION]
        else:
            lake.identify(lake.name, dropped=True)
            lake.change(lambda state: replace(state, slot_name=None))
        storage.delete(documents)
        storage.sync([""])

    async def resync(self, oid: int, tables: Sequence[TableName], *, copy: bool) -> None:
        """See :meth:`subscriber.catalog.ResyncingCatalog.resync`."""
        lake = await self._find()
        if lake is None:
            return
        async with self._writing(lake.name):
            await run_in_thread(lambda: self._resync(tables))

    def _resync(self, tables: Sequence[TableName]) -> None:
        lake = Lake.find(self._storage)
        position = lake.landed() if lake is not None else None
        if lake is None or position is None:
            raise TargetError("the subscription has no position yet", hint="run it first")
        # a copy that has begun is not begun again
        finished = [name for name in tables if lake.table(name).is_synchronized]
        lake.change(lambda state: copied_again(state, finished, position))

    async def restart(
        self, oid: int, *, accept_target: bool = False, dry_run: bool = False
    ) -> tuple[SubscriptionState, Mapping[TableName, TableEntry]]:
        """See :meth:`subscriber.catalog.RestartingCatalog.restart`. Each table is copied into new versions."""
        if accept_target:
            raise ConfigurationError("this kind of target can be moved without a command", hint="omit --accept-target")
        lake = await self._present()
        landed = await run_in_thread(lake.landed)
        position = lake.position and replace(lake.position, lsn=landed or lake.position.lsn)
        state = await run_in_thread(lambda: stored_state(self._storage, lake, position))
        tables = {name: table.entry for name, table in lake.state.tables.items()}
        if not dry_run:
            async with self._writing(lake.name):
                await run_in_thread(lambda: self._restart(lake, managed=state.managed))
        return state, tables

    def _restart(self, lake: Lake, *, managed: bool) -> None:
        # without a position, an earlier attempt was interrupted after this
        if (position := lake.landed()) is not None:
            lake.change(lambda state: replace(copied_again(state, state.tables, position), slot_name=state.slot_name if managed else None))
        # what is still prepared on the publisher is sent again
        self._storage.remove_directory("prepared")
        self._storage.delete([POSITION])
        self._storage.sync([""])
        if (found := read_definition(self._storage)) is not None:
            write_definition(self._storage, replace(found, skip_lsn=INVALID_LSN))

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        if await self._find() is not None:
            await run_in_thread(lambda: write_error(self._storage, text, details))

    async def reset_statistics(self, name: str) -> None:
        await self._found(name)
        await run_in_thread(lambda: write_reset(self._storage, read_counters(self._storage)))

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        return await run_in_thread(lambda: PreparedTransactions(self._storage).gids())

    async def become_launcher(self, lost: int | None = None) -> None:
        """Take the launcher's lock, or raise SubscriptionInUse if another process has it. It ends with the process."""
        self._launcher.take()

    async def wait(self, timeout: float) -> None:
        """Return after a short pause: there are no notifications of a change."""
        await asyncio.sleep(min(timeout, _LOOK_SECONDS))

    async def close(self) -> None:
        """Release the launcher's lock. Idempotent."""
        if self._launcher.is_mine:
            self._launcher.give_back()


def _is_there(lake: Lake, name: str) -> TargetError:
    if lake.has(name):
        return TargetError(
            f'subscription "{name}" already exists', sqlstate="42710", hint="use another directory, or drop the existing subscription first"
        )
    return lake_of_another(lake, name)
