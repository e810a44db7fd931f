"""The row filters (``-o where.SCHEMA.TABLE=…``) and the mapping of a subscription: in its streams, and in what is copied of its tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from subscriber.config import SubscriptionOptions
from subscriber.interfaces import PublishedTable, ReplicationStream, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.transaction.mapped_frames import MappedFrames
from subscriber.transaction.relation_frames import RelationFrames

if TYPE_CHECKING:
    from subscriber.rowfilter import FilterExpression

__all__ = ["copied_rows", "filter_expressions", "filtered"]


def filter_expressions(options: SubscriptionOptions) -> Mapping[tuple[str, str], FilterExpression]:
    """Parse the row filters. Return them by schema and name of the table.

    Raises:
        RowFilterError: one of them is refused.
    """
    filters = options.row_filters
    if not filters:
        return {}
    from subscriber.rowfilter import RowFilterError, parse_filter  # noqa: PLC0415 -- few need it

    parsed = {}
    for (schema, name), text in filters.items():
        try:
            parsed[schema, name] = parse_filter(text)
        except RowFilterError as error:
            error.add_note(f'row filter of table "{schema}.{name}"')
            raise
    return parsed


def copied_rows(table: PublishedTable, options: SubscriptionOptions) -> PublishedTable:
    """Return the table with its row filter, which the publisher evaluates when the table is copied."""
    own = options.row_filters.get(table.publisher_name.pair)
    if own is None:
        return table
    published = " OR ".join(f"({expression})" for expression in table.row_filters)
    return replace(table, row_filters=(f"({published}) AND ({own})" if published else own,))


def filtered(
    stream: ReplicationStream, options: SubscriptionOptions, names: Mapping[TableName, TableName] | None = None
) -> ReplicationStream:
    """Return the stream with the row filters and the mapping applied; the stream itself if there are none.

    Args:
        stream: of the publisher.
        options: of the subscription.
        names: the publisher's names by those of the target, of the tables that are published now.

    Raises:
        RowFilterError: as :func:`filter_expressions`.
    """
    changes: list[RelationFrames[Any]] = []
    if expressions := filter_expressions(options):
        from subscriber.rowfilter.stream import FrameFilter  # noqa: PLC0415 -- few need it

        changes.append(FrameFilter(expressions))
    if options.mapping:
        changes.append(MappedFrames(options.mapping, {target.pair: name.pair for target, name in (names or {}).items()}))
    return _ChangedStream(stream, changes) if changes else stream


class _ChangedStream:
    """A :class:`subscriber.interfaces.ReplicationStream` whose messages are changed. It may return no message at all."""

    def __init__(self, stream: ReplicationStream, changes: Sequence[RelationFrames[Any]]) -> None:
        self._stream = stream
        self._changes = changes

    async def receive(self) -> Sequence[bytes]:
        frames = await self._stream.receive()
        for change in self._changes:
            frames = change.apply(frames)
        return frames

    async def send(self, message: bytes) -> None:
        await self._stream.send(message)

    async def wal_end(self, least: Lsn) -> Lsn:
        return await self._stream.wal_end(least)

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        return await self._stream.rolled_back(xid, subxids)

    async def close(self) -> None:
        await self._stream.close()
