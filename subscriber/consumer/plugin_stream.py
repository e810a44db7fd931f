"""Feed an output plugin from the stream of whole transactions, and acknowledge what the plugin has written.

The callbacks run one after another, in a thread of their own, so they may block: the feedback to the publisher goes on meanwhile.

A plugin that is a target has up to four more methods:

* ``send(ctx, record)`` is given each record that the plugin writes. It may return before the record is stored.
* ``flush(ctx)`` returns when everything sent is stored. It is called after each transaction, and only then is that acknowledged.
* ``position(ctx)`` returns the ``end_lsn`` of the last transaction that the plugin stored, or None. It is called once, before the first
  transaction. A plugin that stores ``txn.end_lsn`` together with its data, atomically, gets each transaction exactly once. Without it, the
  slot has the only position, and the transactions that were not acknowledged before a crash come again: at least once.
* ``advance(ctx, lsn)``, required with ``position``, stores a position while there are no changes for the plugin. ``position`` returns it if
  it is the last. Then the slot advances, too, and retains no WAL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from subscriber.config import SubscriptionOptions
from subscriber.consumer.received import ReceivedMessage, ReceivedPart, ReceivedTransaction
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.registry import find_plugin
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Message, Relation, StreamStart, StreamStop
from subscriber.threads import run_in_thread
from subscriber.transaction.changes import Change, MessageChange, TruncateChange
from subscriber.types import TypeRegistry
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.type_reader import type_facts

__all__ = ["PluginStream"]

_CHANGES: Final = 1000
"""Changes that are given to the plugin at once."""
_QUERY: Final = """
    SELECT c.relkind,
           (SELECT string_agg(pg_catalog.quote_ident(a.attname), ', ')
              FROM pg_catalog.pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
               AND NOT a.attname::text = ANY (ARRAY[{names}]::text[])),
           EXISTS (SELECT FROM pg_catalog.pg_publication_rel AS r
                    WHERE r.prrelid = c.oid AND pg_catalog.to_jsonb(r) ->> 'prattrs' IS NOT NULL)
      FROM pg_catalog.pg_class AS c
     WHERE c.oid = {oid}
"""


class PluginStream:
    """A plugin and the publisher's catalog, opened by :meth:`open`. Use it as an asynchronous context manager.

    Attributes:
        feed: of the plugin.
        options: to request the stream with.
    """

    def __init__(
        self,
        feed: PluginFeed,
        options: SubscriptionOptions,
        connection: WalReceiverConnection,
        written: list[Record],
        types: TypeRegistry,
        *,
        target: bool,
    ) -> None:
        self.feed = feed
        self.options = options
        self._connection = connection
        self._written = written
        self._types = types
        self._target = target
        self._known: set[Relation] = set()

    @classmethod
    async def open(
        cls,
        conninfo: str,
        name: str,
        plugin_options: Mapping[str, str | None],
        options: SubscriptionOptions,
        *,
        target: bool = False,
    ) -> PluginStream:
        """Create the plugin and call its ``startup``. Nothing is created on the publisher.

        Args:
            conninfo: connection string of the publisher.
            name: of a built-in plugin, or ``package.module:Class``.
            plugin_options: for the plugin.
            options: of the stream.
            target: whether the plugin is a target: then its records go to its ``send``.

        Raises:
            ConfigurationError: the plugin does not exist, lacks a callback, or refuses an option.
            PublisherError: the publisher cannot be reached.
        """
        plugin = find_plugin(name)
        connection = await WalReceiverConnection.connect(conninfo, application_name="subscriber plugin", replication=False)
        try:
            written: list[Record] = []
            types = TypeRegistry()
            feed = PluginFeed(
                plugin,
                LogicalDecodingContext(
                    name,
                    plugin_options,
                    capabilities=connection.capabilities,
                    writer=written.append,
                    types=types,
                    streaming=options.streaming != "off" and connection.capabilities.streaming,
                    two_phase=options.two_phase,
                ),
            )
            feed.start()
            if feed.options.only_local and connection.capabilities.origin:
                options = replace(options, origin="none")
            if options.two_phase and not feed.context.twophase:
                missing = "has no callbacks for" if not feed.callbacks.two_phase else "was told by its options to do without"
                raise ConfigurationError(f'output plugin "{name}" {missing} two-phase commit', hint="omit two_phase=true")
        except BaseException:
            await connection.close()
            raise
        return cls(feed, options, connection, written, types, target=target)

    async def __aenter__(self) -> PluginStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.feed.shutdown()
        finally:
            await self._connection.close()

    @property
    def streaming(self) -> bool:
        """Whether the plugin wants transactions in progress, in blocks."""
        return self.feed.context.streaming

    @property
    def messages(self) -> bool:
        """Whether the plugin wants logical messages."""
        return self.feed.callbacks.get("message") is not None

    async def records(self, received: ReceivedTransaction | ReceivedMessage) -> AsyncIterator[Sequence[Record]]:
        """Give one transaction or message to the plugin, and yield what it writes, in pieces.

        Raises:
            SubscriberError: the plugin failed, or needs something that pgoutput does not tell.
        """
        feed = self.feed
        if isinstance(received, ReceivedMessage):
            yield await self._run(lambda: feed.loose_message(received.lsn, received.prefix, received.content))
            return
        if isinstance(received, ReceivedPart):
            async for records in self._part(received):
                yield records
            return
        feed.begin(received.header)
        waiting: list[Change] = []
        async for change in received:
            if feed.options.complete_relations:
                await self._describe(change)
            waiting.append(change)
            if len(waiting) >= _CHANGES:
                feed.context.type_messages.update(received.types)
                yield await self._run(lambda: self._give(waiting))

        def finish() -> None:
            self._give(waiting)
            feed.end(received.header, received.rollback)

        feed.context.type_messages.update(received.types)
        yield await self._run(finish)

    async def _part(self, received: ReceivedPart) -> AsyncIterator[Sequence[Record]]:
        """Give a block, an abort or the end of a transaction in progress to the plugin, message by message."""
        waiting: list[Message] = [received.message]
        if received.origin_message is not None:
            waiting.append(received.origin_message)
        async for message in received.messages():
            if isinstance(message, Relation) and self.feed.options.complete_relations:
                await self._describe_relation(message)
            waiting.append(message)
            if len(waiting) >= _CHANGES:
                yield await self._run(lambda: self._give_messages(waiting))
        if isinstance(received.message, StreamStart):
            waiting.append(StreamStop())
        yield await self._run(lambda: self._give_messages(waiting))

    def _give_messages(self, messages: list[Message]) -> None:
        for message in messages:
            self.feed.message(message)
        messages.clear()

    async def deliver(self, received: ReceivedTransaction | ReceivedMessage) -> None:
        """Give one transaction or message to a plugin that is a target, and acknowledge it when the plugin has stored it.

        Raises:
            SubscriberError: as :meth:`records`.
        """
        async for _ in self.records(received):
            pass
        if received.end_lsn:
            await run_in_thread(self.feed.flush)
            await self.acknowledge(received)

    async def advance(self, lsn: Lsn) -> None:
        """Let a plugin with a position store this one, before it is acknowledged. Nothing before it is missing.

        Raises:
            SubscriberError: the plugin failed.
        """
        await run_in_thread(lambda: self.feed.advance(lsn))

    async def position(self) -> Lsn | None:
        """The position that a plugin stores with its data, or None.

        Raises:
            SubscriberError: the plugin failed.
            ConfigurationError: its answer is not an LSN.
        """
        return await run_in_thread(self.feed.position)

    def _give(self, changes: list[Change]) -> None:
        for change in changes:
            self.feed.change(change)
        changes.clear()

    async def _run(self, work: Callable[[], None]) -> Sequence[Record]:
        await run_in_thread(lambda: self._work(work))
        taken = self._written.copy()
        self._written.clear()
        return taken

    def _work(self, work: Callable[[], None]) -> None:
        work()
        if self._target:
            for record in self._written:
                self.feed.send(record)

    async def acknowledge(self, received: ReceivedTransaction | ReceivedMessage) -> None:
        """Acknowledge everything up to here, unless the plugin holds a prepared transaction back."""
        if not self.feed.holding:
            await received.acknowledge()

    async def _describe(self, change: Change) -> None:
        if not isinstance(change, MessageChange | TruncateChange):
            await self._describe_relation(change.relation)

    async def _describe_relation(self, relation: Relation) -> None:
        if relation in self._known:
            return
        await self._require_complete(relation)
        self._types.add(await type_facts(self._connection, {column.type_oid for column in relation.columns}))
        self._known.add(relation)

    async def _require_complete(self, relation: Relation) -> None:
        names = ", ".join("'" + column.name.replace("'", "''") + "'" for column in relation.columns)
        found = await self._connection.execute(_QUERY.format(oid=relation.relation_id, names=names))
        if not found:
            return
        ((kind, generated, listed),) = found
        table = f"{relation.namespace}.{relation.name}"
        hint = "use a publication without this, or another plugin"
        if kind == "p":
            raise PublisherError(f"the partition of a change of {table} is not known: the publication publishes via the root", hint=hint)
        if generated is not None:
            raise PublisherError(f"pgoutput does not send the generated columns {generated} of {table}", hint=hint)
        if listed == "t":
            raise PublisherError(f"a publication has a column list for {table}, so pgoutput may not send all columns", hint=hint)
