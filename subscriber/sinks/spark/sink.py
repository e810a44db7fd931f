"""The lake as a sink. What is acknowledged is durable in the landing zone, even if the applier is slow or not running.

With ``confirm=applied``, the applier's position is acknowledged, and a restart begins there. Transactions that were landed after it are
then sent again, and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from subscriber.catalog.definition import claimed_elsewhere, require_name
from subscriber.config import STORED, Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, SubscriptionChanged
from subscriber.interfaces import Finding, PublishedTable, SubscriptionState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.checks import check_histories, check_place, check_tables, require_options
from subscriber.sinks.spark.catalog.definition import DEFINITION
from subscriber.sinks.spark.catalog.lake import LANDING, VERB_LOCK, Lake, lake_of_another
from subscriber.sinks.spark.catalog.status_files import read_landed_counters
from subscriber.sinks.spark.catalog.subscriptions import stored_state
from subscriber.sinks.spark.files.file_lock import is_held
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.landing.writer import LandingWriter
from subscriber.sinks.spark.landing.zone import LandingZone
from subscriber.sinks.spark.landing_stream import LandingStream
from subscriber.sinks.spark.opened_spark_sink import LakeSessions, OpenedSparkSink
from subscriber.sinks.spark.schema_gaps import SchemaGaps
from subscriber.threads import run_in_thread

__all__ = ["SparkSink"]


class SparkSink:
    """A :class:`subscriber.interfaces.Sink`. If ``subscriber create`` made the subscription (``defined``), :meth:`open` does not create it.

    Raises:
        ConfigurationError: a lake does not support the URL or an option.
    """

    supports_two_phase = True
    logs_conflicts = False
    # a lake has no constraints: an INSERT of an existing key replaces the row
    conflict_rules: Mapping[str, Collection[str]] = MappingProxyType({"insert_exists": ("apply_remote",)})

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        require_options({name: getattr(options, name) for name in STORED})
        if settings.dropped_columns == "drop":
            raise ConfigurationError("dropped_columns = drop is not available for a lake, which keeps dropped columns", hint="omit it")
        self._location = Location.parse(target)
        self._defined = defined
        self._sessions = LakeSessions(self._location)
        self.statistics = self._sessions.statistics

    async def exists(self, name: str) -> bool:
        """Whether the lake exists and belongs to this subscription.

        Raises:
            TargetError: the lake belongs to another subscription, or the directory contains something else.
        """
        require_name(name)
        lake = await run_in_thread(lambda: Lake.find(self._sessions.storage))
        if lake is None or (self._defined and not lake.has(name)):
            return False
        self._require_ours(lake, name)
        return True

    def _require_ours(self, lake: Lake | None, name: str) -> Lake:
        if lake is not None and lake.has(name):
            return lake
        if lake is None or self._defined:
            raise SubscriptionChanged(
                f'subscription "{name}" was dropped or renamed in the meantime', hint="`subscriber status` lists the existing subscriptions"
            )
        raise lake_of_another(lake, name)

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedSparkSink:
        """Lock the lake, create it if it does not exist, and recover the landing zone.

        Raises:
            TargetUnavailable, TargetError: the lake cannot be reached, or belongs to another subscription.
            SubscriptionInUse: another process uses the lake.
            DataLossError: a landed batch is missing.
        """
        sessions = self._sessions
        storage, lock = sessions.storage, sessions.lock
        found = await run_in_thread(lambda: Lake.find(storage))
        if found is not None or self._defined:
            self._require_ours(found, name)
        await run_in_thread(lambda: storage.make_directory(""))
        lock.take()
        try:
            # a verb takes the verbs' lock before it asks for the writer's lock
            if not self._defined and is_held(storage.local(VERB_LOCK)):
                raise claimed_elsewhere(name)
            # what was read before taking the lock may have changed since, and running table copies continue to store their states
            async with sessions.catalog:
                lake = self._require_ours(await run_in_thread(lambda: self._found_or_made(storage, name)), name)
                sessions.lake = lake
            counted = await run_in_thread(lambda: read_landed_counters(storage))
            # the chain begins at INVALID_LSN, so the applier notices if the first batch is missing
            zone = LandingZone(storage, LANDING)
            await run_in_thread(zone.recover)
        except BaseException:
            lock.give_back()
            raise
        landed = max(zone.last, lake.position_lsn)
        gaps = SchemaGaps(lake, self._location.on_schema_gap)
        lander = LandingWriter(zone, gaps.table_id, sessions.statistics, landed)
        stream = LandingStream(lake, lander, self._location, gaps=gaps, statistics=sessions.statistics, on_durable=on_durable)
        try:
            state = await self._state(lake, stream, landed)
            begin = state.position.lsn if state.position is not None else INVALID_LSN
            await run_in_thread(lambda: PreparedTransactions(storage).recover(landed, begin, lake.forget_received))
        except BaseException:
            try:
                await stream.close()
            finally:
                lock.give_back()
            raise
        return OpenedSparkSink(sessions, lake, stream, state, counted)

    def _found_or_made(self, storage: Storage, name: str) -> Lake | None:
        lake = Lake.find(storage)
        if lake is None and not self._defined:
            # left behind by a create that was killed
            storage.delete([DEFINITION])
            return Lake.make(storage, name)
        return lake

    async def _state(self, lake: Lake, stream: LandingStream, landed: Lsn) -> SubscriptionState:
        position = lake.position
        if position is not None:
            known = landed
            if self._location.confirm == "applied":
                known = min(landed, await stream.applied())
            position = replace(position, lsn=known)
        state = await run_in_thread(lambda: stored_state(lake.storage, lake, position))
        # with confirm=applied the position is behind what is landed. What is landed is never landed again
        return replace(state, taken=landed)

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Find problems of the lake."""
        found = await run_in_thread(lambda: check_place(self._sessions.storage))
        return [*found, *check_tables(tables), *check_histories(tables, self._location.history)]
