"""The row filters of a subscription (``-o where.SCHEMA.TABLE=…``): in its streams, and in the descriptions of the tables to copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import PublishedTable, ReplicationStream
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from subscriber.rowfilter import FilterExpression
    from subscriber.rowfilter.stream import FrameFilter

__all__ = ["copied_rows", "filter_expressions", "filtered"]


def filter_expressions(options: SubscriptionOptions) -> Mapping[tuple[str, str], FilterExpression]:
    """Parse the row filters. Return them by schema and name of the table.

    Raises:
        ConfigurationError: one of them is refused (RowFilterError), or sqlglot is not installed.
    """
    filters = options.row_filters
    if not filters:
        return {}
    try:
        from subscriber.rowfilter import RowFilterError, parse_filter  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise ConfigurationError(
            f"row filters need {error.name}, which is not installed", hint="pip install 'pg-subscriber[rowfilter]'"
        ) from error
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
    own = options.row_filters.get((table.name.namespace, table.name.name))
    if own is None:
        return table
    published = " OR ".join(f"({expression})" for expression in table.row_filters)
    return replace(table, row_filters=(f"({published}) AND ({own})" if published else own,))


def filtered(stream: ReplicationStream, options: SubscriptionOptions) -> ReplicationStream:
    """Return the stream with the row filters applied; the stream itself if there are none.

    Raises:
        ConfigurationError: as :func:`filter_expressions`.
    """
    expressions = filter_expressions(options)
    if not expressions:
        return stream
    from subscriber.rowfilter.stream import FrameFilter  # noqa: PLC0415 -- an extra

    return _FilteredStream(stream, FrameFilter(expressions))


class _FilteredStream:
    """A :class:`subscriber.interfaces.ReplicationStream` without the rows that do not pass. It may return no message at all."""

    def __init__(self, stream: ReplicationStream, filters: FrameFilter) -> None:
        self._stream = stream
        self._filters = filters

    async def receive(self) -> Sequence[bytes]:
        return self._filters.apply(await self._stream.receive())

    async def send(self, message: bytes) -> None:
        await self._stream.send(message)

    async def wal_end(self, least: Lsn) -> Lsn:
        return await self._stream.wal_end(least)

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        return await self._stream.rolled_back(xid, subxids)

    async def close(self) -> None:
        await self._stream.close()
