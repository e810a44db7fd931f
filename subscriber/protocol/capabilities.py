"""The abilities of a publisher, by server version, and the options to request. Nothing else in the project compares server versions.

Sources: PostgreSQL manual, Logical Streaming Replication Parameters, CREATE SUBSCRIPTION, and the release notes of 13 to 19.
The options of START_REPLICATION, their order, and which of them an old publisher does not get follow the native subscription. The
native subscription never sends ``messages``.
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
_19: Final = 190000


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a publisher. Each flag names the first version that has it."""

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
    """15: prepared transactions, requested over the replication protocol."""
    slot_options_syntax: bool
    """15: CREATE_REPLICATION_SLOT takes its options in parentheses."""
    row_filters: bool
    """15: ``pg_publication_rel.prqual``."""
    column_lists: bool
    """15: ``pg_publication_rel.prattrs``."""
    parallel_streaming: bool
    """16: streamed transactions may be applied before they end; STREAM ABORT carries its LSN and time."""
    origin: bool
    """16: changes that have an origin can be left out."""
    binary_copy: bool
    """16: the native subscription can copy tables in binary format."""
    conflicting: bool
    """16: ``pg_replication_slots.conflicting``."""
    failover_slots: bool
    """17: slots that are synchronized to standbys."""
    alter_slot: bool
    """17: ALTER_REPLICATION_SLOT, for failover."""
    invalidation_reason: bool
    """17: ``pg_replication_slots.invalidation_reason``."""
    empty_prepares: bool
    """18: PREPARE is also sent for a prepared transaction without changes; earlier versions send only COMMIT or ROLLBACK PREPARED."""

    published_sequences: bool
    """19: FOR ALL SEQUENCES, and ``pg_get_publication_sequences``."""

    def at_least(self, major: int) -> bool:
        """Tell whether the publisher has this major version or a later one."""
        return self.server_version >= major * 10000


def capabilities(server_version: int) -> Capabilities:
    """Return the abilities of a publisher. A version newer than 19 is treated as 19.

    Args:
        server_version: ``server_version_num``.

    Raises:
        PublisherError: the publisher is older than 13.
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
        parallel_streaming=server_version >= _16,
        origin="origin" in known,
        binary_copy=server_version >= _16,
        conflicting=server_version >= _16,
        failover_slots="failover" in known,
        alter_slot=server_version >= _17,
        invalidation_reason=server_version >= _17,
        empty_prepares=server_version >= _18,
        published_sequences=server_version >= _19,
    )


def _version_text(server_version: int) -> str:
    if server_version < 100000:
        return f"{server_version // 10000}.{server_version // 100 % 100}"
    return f"{server_version // 10000}.{server_version % 10000}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of one START_REPLICATION, limited to those that the publisher knows.

    Attributes:
        protocol_version: ``proto_version``.
        streaming: how transactions in progress are sent. For ``off`` the option is not sent.
        two_phase: prepared transactions are sent when they are prepared. Once set, it stays set for the slot.
        origin: which changes are sent, or None where the publisher does not know the option.
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
        """Names and values for pgoutput, in the native order. The values are not yet quoted as literals."""
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
    """Choose the options of START_REPLICATION. Options that the publisher does not know are left out, as natively.

    Args:
        caps: the publisher's abilities.
        options: those of the subscription. Its ``two_phase`` is ignored: the caller knows whether two-phase can be enabled yet.
        publications: names, at least one.
        two_phase: whether this stream enables two-phase. A table synchronization never does.
        messages: whether to request logical decoding messages.

    Raises:
        ConfigurationError: there is no publication, or a name is not valid.
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
