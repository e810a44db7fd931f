"""A lake as ``verify`` reads it: the tables of one published snapshot, file by file, in bounded memory. Without Spark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import pyarrow as pa

from subscriber.catalog import Definition
from subscriber.catalog.snapshot_requests import Requests
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.catalog.verifications import Verifications
from subscriber.errors import ConfigurationError, RelationError, TargetError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import APPLIER_LOCK, Lake
from subscriber.sinks.spark.catalog.requests import lake_requests
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots
from subscriber.sinks.spark.catalog.status_files import APPLIER, read_quietly
from subscriber.sinks.spark.catalog.subscriptions import defined
from subscriber.sinks.spark.catalog.verifications import LakeVerifications
from subscriber.sinks.spark.files.file_lock import is_held
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.reading.table_files import PinnedTable, with_held_values
from subscriber.sinks.spark.schema.table_schema import META, SPECIAL, TableSchema
from subscriber.sinks.spark.tables.column_mapping import resolve_fields
from subscriber.threads import run_in_thread

__all__ = ["ComparedLake", "LakeTables"]

_ROWS: Final = 2000
_POLL_SECONDS: Final = 0.1
_NOTICE_SECONDS: Final = 10.0
_NOT_RUNNING_SECONDS: Final = 60.0
"""An applier that is started takes its lock when its engine is ready: Spark needs some ten seconds."""
_FAILURES: Final = 3
_FAILING_SECONDS: Final = 30.0
"""Failures of the applier without a publication, over at least this time. A shorter disturbance ends by itself."""


class ComparedLake:
    """A :class:`subscriber.catalog.target_kind.ComparedTarget`: a lake in a directory. The applier publishes a snapshot for it."""

    has_snapshots = True

    def __init__(self, storage: Storage, definition: Definition) -> None:
        self.definition = definition
        self.requests: Requests = lake_requests(storage)
        self.verifications: Verifications = LakeVerifications(storage)
        self._storage = storage
        self._landed: Lsn

    @classmethod
    async def open(cls, target: str, name: str) -> Self:
        """Open the lake of a subscription. Nothing is created.

        Raises:
            ConfigurationError: it is not in a directory.
            TargetError: it is of another subscription, or there is no lake.
        """
        location = Location.parse(target)
        storage = Storage.open(location)
        if storage.root is None:
            raise ConfigurationError(
                f"verify needs a lake in a directory, and {location} is none", hint="compare a snapshot with a query of your own"
            )
        lake = await run_in_thread(lambda: Lake.find(storage))
        if lake is None or not lake.has(name):
            raise no_such_subscription(name)
        return cls(storage, await run_in_thread(lambda: defined(storage, lake)))

    async def begin(self, answer: Mapping[str, Any], application_name: str) -> None:
        self._landed = Lsn.parse(answer["target_snapshot"])

    async def snapshot(self, lsn: Lsn, tables: Collection[TableName], waiting: Callable[[str], None]) -> LakeTables:
        """Wait until a snapshot with exactly the landed batches is published. If it lacks some of the tables, wait for another one there.

        Raises:
            TargetError: the applier does not run, fails again and again, or has published a later snapshot only.
        """
        now, landed = asyncio.get_running_loop().time, self._landed
        seen = noticed = now()
        snapshots, failures = Snapshots(self._storage), _Failures(self._storage)
        while True:
            found, newest = await run_in_thread(lambda: (snapshots.last(lambda one: one.landed <= landed), snapshots.newest()))
            is_past = newest is not None and newest.landed > landed
            if found is not None and found.landed == landed:
                is_whole = found.lsn >= lsn and not {*tables} - {*found.tables, *found.stopped}
                if is_whole or is_past:
                    return LakeTables(self._storage, found)
            if is_past:
                raise TargetError(f"the lake has published no snapshot at {landed}", hint="verify again")
            if has_applier := is_held(self._storage.local(APPLIER_LOCK)):
                seen = now()
            elif now() - seen > _NOT_RUNNING_SECONDS:
                raise TargetError("the lake has no applier: its tables do not follow", hint="start it with `subscriber spark-apply`")
            error = await run_in_thread(partial(failures.look, newest))
            if error is not None and failures.last:
                raise TargetError(f"the lake has published no snapshot at {lsn}, because its applier fails: {error}", hint="verify again")
            if now() - noticed > _NOTICE_SECONDS:
                noticed = now()
                lacking = f"the lake has not published a snapshot at {lsn} yet" if has_applier else "the lake has no applier yet"
                waiting(f"{lacking}: {error}" if error is not None else lacking)
            await asyncio.sleep(_POLL_SECONDS)


class _Failures:
    """The failures that the applier has reported since it last published, or since the first look.

    Attributes:
        last: whether they last for so long that another attempt will hardly succeed.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._times: list[float] = []  # the first is of an earlier failure
        self._newest: Snapshot | None = None
        self._error = ""
        self.last = False

    def look(self, newest: Snapshot | None) -> str | None:
        """The error of the last failure. None: there was none. ``newest``: the published snapshot."""
        found = read_quietly(self._storage, APPLIER)
        time = found.get("last_error_time") or 0.0
        if not self._times or newest != self._newest:
            self._newest, self._times = newest, [time]
        elif time and time != self._times[-1]:  # the document may be gone
            self._times.append(time)
            self._error = str(found["last_error"])
        failed = self._times[1:]
        self.last = len(failed) >= _FAILURES and failed[-1] - failed[0] >= _FAILING_SECONDS
        return self._error if failed else None


class LakeTables:
    """The tables of a snapshot."""

    def __init__(self, storage: Storage, snapshot: Snapshot) -> None:
        self._storage = storage
        self._snapshot = snapshot

    async def table(self, published: PublishedTable, key: Sequence[str]) -> LakeTable:
        """Find a published table.

        Raises:
            RelationError: the snapshot does not have it, or it lacks a column.
            TargetError: its version is no longer stored.
        """
        name = published.name
        stop, where = self._snapshot.stopped.get(name), self._snapshot.tables.get(name)
        if stop is not None:
            raise RelationError(f"the lake has stopped it: {stop.error}")
        if where is None:
            raise RelationError(f"it is not in the snapshot at {self._snapshot.lsn}", hint="verify again when it is synchronized")
        pinned = PinnedTable(self._storage, where)
        present = await run_in_thread(lambda: pinned.schema)
        (described,) = resolve_fields(present.names, [TableSchema.of_published(published)])
        fields = [column.field for column in described.columns]
        if lacking := [name for name, field in zip(published.columns, fields, strict=True) if field not in present.names]:
            raise RelationError(f"the lake has no column {', '.join(lacking)}", hint="it gets a new column with the table's next change")
        return LakeTable(pinned, pa.schema([*(present.field(field) for field in fields), META.field(SPECIAL)]))


class LakeTable:
    """See :class:`subscriber.interfaces.RowSource`. It has no index: rows are found by reading all of them."""

    def __init__(self, pinned: PinnedTable, schema: pa.Schema) -> None:
        self._pinned = pinned
        self._schema = schema

    def is_integer(self, number: int) -> bool:
        """No: ranges of a column would be read one after another, and each is the whole table."""
        return False

    async def rows(self, column: str | None, low: int | None, high: int | None) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Read all rows, some thousand at a time."""
        chunks = self._chunks()
        while (chunk := await run_in_thread(lambda: next(chunks, None))) is not None:
            yield chunk

    def _chunks(self) -> Iterator[list[Sequence[object]]]:
        for file in self._pinned.files():
            for batch in self._pinned.read(file.path, file.vector, self._schema):
                for begin in range(0, batch.num_rows, _ROWS):
                    columns = [column.to_pylist() for column in batch.slice(begin, _ROWS).columns]
                    yield [with_held_values(row, self._schema.names) for row in zip(*columns, strict=True)]
