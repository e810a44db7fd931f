"""What a publisher of a given version can do, and what is asked of it. Nothing else in the project compares server versions.

Sources: PostgreSQL manual, Logical Streaming Replication Parameters, CREATE SUBSCRIPTION, and the release notes of 13 to 18.
The options of START_REPLICATION, their order and what is left out for an old publisher follow the native subscription; only
``messages`` is never sent by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from subscriber.config import PARAMETERS, SubscriptionOptions
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.quoting import quote_identifier

__all__ = ["Capabilities", "StreamOptions", "capabilities", "negotiate"]

_13: Final = 130000
_14: Final = 140000
_15: Final = 150000
_16: Final = 160000
_17: Final = 170000
_18: Final = 180000


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a publisher can do; each flag with the first version that has it."""

    server_version: int
    """As the server reports it in ``server_version_num``, for example 180004."""
    protocol_version: int
    """The highest of pgoutput: 1 (13), 2 (14), 3 (15), 4 (16 and later)."""
    wal_status: bool
    """13: ``pg_replication_slots.wal_status``."""
    streaming: bool
    """14: transactions in progress are streamed."""
    binary: bool
    """14: columns in binary format."""
    messages: bool
    """14: pgoutput sends logical decoding messages."""
    tid_range_scan: bool
    """14: a ctid range is read without reading the rest of the table."""
    two_phase: bool
    """15: prepared transactions, asked for over the replication protocol."""
    slot_options_syntax: bool
    """15: CREATE_REPLICATION_SLOT takes its options in parentheses."""
    row_filters: bool
    """15: ``pg_publication_rel.prqual``."""
    column_lists: bool
    """15: ``pg_publication_rel.prattrs``."""
    schema_publications: bool
    """15: FOR TABLES IN SCHEMA, ``pg_publication_namespace``."""
    parallel_streaming: bool
    """16: streamed transactions may be applied before they end; STREAM ABORT tells its LSN and time."""
    origin: bool
    """16: changes that came from elsewhere can be left out."""
    binary_copy: bool
    """16: native copies tables in binary format from here on."""
    conflicting: bool
    """16: ``pg_replication_slots.conflicting``."""
    failover_slots: bool
    """17: slots that are synchronized to standbys."""
    alter_slot: bool
    """17: ALTER_REPLICATION_SLOT, for failover."""
    invalidation_reason: bool
    """17: ``pg_replication_slots.invalidation_reason``."""
    empty_prepares: bool
    """18: PREPARE is sent of a prepared transaction that changed nothing too; before, only its COMMIT PREPARED or ROLLBACK PREPARED."""
    generated_columns: bool
    """18: a publication may publish stored generated columns."""

    def at_least(self, major: int) -> bool:
        """Whether the publisher has this major version or a later one."""
        return self.server_version >= major * 10000


def capabilities(server_version: int) -> Capabilities:
    """Tell what a publisher can do. One newer than 18 is taken for an 18.

    Args:
        server_version: ``server_version_num``.

    Raises:
        PublisherError: it is older than 13.
    """
    if server_version < _13:
        raise PublisherError(
            f"the publisher's server version {_version_text(server_version)} is not supported",
            hint="upgrade the publisher to PostgreSQL 13 or later",
        )
    known = {name for name, parameter in PARAMETERS.items() if server_version >= parameter.since * 10000}
    return Capabilities(
        server_version=server_version,
        protocol_version=4 if server_version >= _16 else 3 if server_version >= _15 else 2 if server_version >= _14 else 1,
        wal_status=True,
        streaming="streaming" in known,
        binary="binary" in known,
        messages=server_version >= _14,
        tid_range_scan=server_version >= _14,
        two_phase="two_phase" in known,
        slot_options_syntax=server_version >= _15,
        row_filters=server_version >= _15,
        column_lists=server_version >= _15,
        schema_publications=server_version >= _15,
        parallel_streaming=server_version >= _16,
        origin="origin" in known,
        binary_copy=server_version >= _16,
        conflicting=server_version >= _16,
        failover_slots="failover" in known,
        alter_slot=server_version >= _17,
        invalidation_reason=server_version >= _17,
        empty_prepares=server_version >= _18,
        generated_columns=server_version >= _18,
    )


def _version_text(server_version: int) -> str:
    if server_version < 100000:
        return f"{server_version // 10000}.{server_version // 100 % 100}"
    return f"{server_version // 10000}.{server_version % 10000}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of one START_REPLICATION, as far as the publisher can serve them.

    Attributes:
        protocol_version: ``proto_version``.
        streaming: how transactions in progress are sent; ``off`` is expressed by sending nothing.
        two_phase: prepared transactions are sent when they are prepared. Sent once, it holds for the slot.
        origin: which changes are wanted, or None where the publisher does not know the option.
        publications: names, unquoted.
        binary: columns in binary format where the type has one.
        messages: logical decoding messages are sent.
    """

    protocol_version: int
    streaming: Literal["off", "on", "parallel"]
    two_phase: bool
    origin: Literal["none", "any"] | None
    publications: tuple[str, ...]
    binary: bool
    messages: bool

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names and values for pgoutput, in the native order; values not yet quoted as literals."""
        pairs = [("proto_version", str(self.protocol_version))]
        if self.streaming != "off":
            pairs.append(("streaming", self.streaming))
        if self.two_phase:
            pairs.append(("two_phase", "on"))
        if self.origin is not None:
            pairs.append(("origin", self.origin))
        pairs.append(("publication_names", ",".join(quote_identifier(name) for name in self.publications)))
        if self.binary:
            pairs.append(("binary", "true"))
        if self.messages:
            pairs.append(("messages", "true"))
        return tuple(pairs)


def negotiate(
    caps: Capabilities, options: SubscriptionOptions, *, publications: Sequence[str], two_phase: bool, messages: bool = False
) -> StreamOptions:
    """Choose the options of START_REPLICATION. What the publisher is too old for is left out, as the native subscription does.

    Args:
        caps: the publisher's.
        options: of the subscription; its ``two_phase`` is not looked at, because whether it is time for it is known elsewhere.
        publications: names, at least one.
        two_phase: whether this stream shall have two-phase on: never that of a table synchronization.
        messages: whether logical decoding messages are wanted.

    Raises:
        ConfigurationError: no publication, or a name that cannot be one.
    """
    if not publications:
        raise ConfigurationError("no publication to subscribe to", hint="name at least one publication")
    for name in publications:
        quote_identifier(name)
    streaming = options.streaming if caps.streaming else "off"
    if streaming == "parallel" and not caps.parallel_streaming:
        streaming = "on"
    return StreamOptions(
        protocol_version=caps.protocol_version,
        streaming=streaming,
        two_phase=two_phase and caps.two_phase,
        origin=options.origin if caps.origin else None,
        publications=tuple(publications),
        binary=options.binary and caps.binary,
        messages=messages and caps.messages,
    )
