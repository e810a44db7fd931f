"""The commands of the replication protocol as text, in the syntax that the publisher's version knows.

Source: PostgreSQL manual, Streaming Replication Protocol. Slot names are always quoted, because a valid name may be a key word.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from subscriber.config import PARAMETERS, check_slot_name
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.capabilities import Capabilities, StreamOptions
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_string

__all__ = [
    "alter_replication_slot",
    "create_replication_slot",
    "drop_replication_slot",
    "identify_system",
    "show",
    "start_replication",
    "timeline_history",
]

SnapshotAction = Literal["nothing", "export", "use"]

_PARAMETER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?", re.ASCII)
_LEGACY_SNAPSHOT: Final[dict[SnapshotAction, str]] = {"nothing": "NOEXPORT_SNAPSHOT", "export": "EXPORT_SNAPSHOT", "use": "USE_SNAPSHOT"}


def identify_system() -> str:
    """Returns one row: systemid, timeline, xlogpos, dbname."""
    return "IDENTIFY_SYSTEM"


def show(name: str) -> str:
    """Show a run-time parameter. Returns one row with its value.

    Raises:
        ConfigurationError: the name is not a valid parameter name.
    """
    if not _PARAMETER_NAME.fullmatch(name):
        raise ConfigurationError(f'"{name}" is not the name of a run-time parameter')
    return f"SHOW {name}"


def timeline_history(timeline: int) -> str:
    """Returns one row: filename, content. The server rejects it for timeline 1, which has no history.

    Raises:
        ConfigurationError: the number is out of range.
    """
    if not 1 <= timeline <= 0xFFFF_FFFF:
        raise ConfigurationError(f"{timeline} is not a timeline")
    return f"TIMELINE_HISTORY {timeline}"


def create_replication_slot(
    caps: Capabilities,
    name: str,
    *,
    snapshot: SnapshotAction = "nothing",
    two_phase: bool = False,
    failover: bool = False,
    temporary: bool = False,
) -> str:
    """Create a logical slot with pgoutput. Returns one row: slot_name, consistent_point, snapshot_name, output_plugin.

    Args:
        caps: the publisher's abilities.
        name: the slot's name.
        snapshot: ``use`` makes the current transaction use the snapshot (it must be REPEATABLE READ and have run no query yet),
            ``export`` exports it for other sessions.
        two_phase: decode prepared transactions from the start.
        failover: synchronize the slot to standbys.
        temporary: dropped at the end of the session, or after an error in it.

    Raises:
        ConfigurationError: the slot name is not valid.
        PublisherError: the publisher is too old for ``two_phase`` or ``failover``.
    """
    if two_phase and not caps.two_phase:
        raise PublisherError(
            "the publisher cannot create a two-phase slot",
            hint=f"two_phase needs PostgreSQL {PARAMETERS['two_phase'].since} or later there",
        )
    if failover and not caps.failover_slots:
        raise PublisherError(
            "the publisher has no failover slots", hint=f"failover needs PostgreSQL {PARAMETERS['failover'].since} or later there"
        )
    head = f"CREATE_REPLICATION_SLOT {_slot(name)}{' TEMPORARY' if temporary else ''} LOGICAL pgoutput"
    if not caps.slot_options_syntax:
        return f"{head} {_LEGACY_SNAPSHOT[snapshot]}"
    options = [*(["TWO_PHASE"] if two_phase else []), *(["FAILOVER"] if failover else []), f"SNAPSHOT {quote_string(snapshot)}"]
    return f"{head} ({', '.join(options)})"


def drop_replication_slot(name: str, *, wait: bool = False) -> str:
    """Drop a slot. With ``wait``, wait until it is not in use.

    Raises:
        ConfigurationError: the slot name is not valid.
    """
    return f"DROP_REPLICATION_SLOT {_slot(name)}{' WAIT' if wait else ''}"


def alter_replication_slot(caps: Capabilities, name: str, *, failover: bool | None = None, two_phase: bool | None = None) -> str:
    """Change a slot that is not in use. None leaves a property as it is.

    Raises:
        ConfigurationError: the slot name is not valid, or there is nothing to change.
        PublisherError: the publisher is too old for the change.
    """
    wanted = {option: value for option, value in (("failover", failover), ("two_phase", two_phase)) if value is not None}
    if not wanted:
        raise ConfigurationError(f'nothing to change in replication slot "{name}"')
    for option in wanted:
        needed = PARAMETERS[option].alter_since
        if not caps.at_least(needed):
            raise PublisherError(
                f'the publisher is too old to change "{option}" of a replication slot',
                hint=f"it needs PostgreSQL {needed}; or drop the subscription and create it again",
            )
    options = ", ".join(f"{option.upper()} {'true' if value else 'false'}" for option, value in wanted.items())
    return f"ALTER_REPLICATION_SLOT {_slot(name)} ({options})"


def start_replication(slot: str, lsn: Lsn, options: StreamOptions) -> str:
    """Start streaming from ``lsn``, or from the slot's confirmed_flush_lsn if that is later. The server does not report which.

    Raises:
        ConfigurationError: the slot name is not valid.
    """
    pairs = ", ".join(f"{name} {quote_string(value)}" for name, value in options.pairs())
    return f"START_REPLICATION SLOT {_slot(slot)} LOGICAL {lsn} ({pairs})"


def _slot(name: str) -> str:
    check_slot_name(name)
    return quote_identifier(name)
