"""Detect that target and publisher are the same database. Then every change would come back to the table that it came from.

The test uses an advisory lock with a random key. The target's session takes the lock. The publisher's session sees it only if it is
connected to the same database, through any address, socket or pooler. A physical copy of the publisher (a promoted standby, a base backup)
has the same system identifier and database oids, but not its locks.

Locks do not reach standbys. A publisher that is in recovery is compared by system identifier, timeline and database oid instead. If they
are equal, it replays the target's WAL, and would publish the changes that are applied in the target.
"""

from __future__ import annotations

import secrets
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.interfaces import Finding, PostgresDatabase, Query, Sink
from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["find_same_database", "refuse_same_database"]

_LOCK: Final = "SELECT pg_catalog.pg_advisory_xact_lock({key})::pg_catalog.text"

_LOCKED: Final = """
SELECT FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON d.oid = l.database AND d.datname = pg_catalog.current_database()
WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND ((l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8) = {key}
"""

_DATABASE: Final = """
SELECT oid::pg_catalog.text, pg_catalog.pg_is_in_recovery()::pg_catalog.text
FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()
"""

# the control file has the timeline of the last checkpoint: for a while after a promotion, that is still the old one
_SYSTEM: Final = """
SELECT system_identifier::pg_catalog.text, pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8)
FROM pg_catalog.pg_control_system()
"""

_HINT: Final = "compare the two connection strings: one of them names the wrong server or database"


async def find_same_database(connection: WalReceiverConnection, sink: Sink) -> list[Finding]:
    """Return one error if the target is the publisher, else nothing.

    Raises:
        PublisherError, TargetError: one of the two cannot be queried.
    """
    if not isinstance(sink, PostgresDatabase):
        return []
    async with sink.querying() as target:
        if target is None:
            return []
        key = secrets.randbits(63)
        await target(_LOCK.format(key=key))
        if await connection.execute(_LOCKED.format(key=key)):
            return [Finding("error", "target and publisher are the same database", _HINT)]
        if await _replays(connection, target):
            return [Finding("error", "the publisher is a standby of the target", _HINT)]
    return []


async def _replays(connection: WalReceiverConnection, target: Query) -> bool:
    ((oid, recovering),) = await connection.execute(_DATABASE)
    ((target_oid, target_recovering),) = await target(_DATABASE)
    if recovering != "true" or target_recovering == "true" or oid != target_oid:
        return False
    identity = await connection.identify_system()
    ((identifier, timeline),) = await target(_SYSTEM)
    return identity.system_identifier == identifier and f"{identity.timeline:08X}" == timeline


async def refuse_same_database(connection: WalReceiverConnection, sink: Sink) -> None:
    """Check that the target is not the publisher's database.

    Raises:
        ConfigurationError: it is the same database.
        PublisherError, TargetError: one of the two cannot be queried.
    """
    for finding in await find_same_database(connection, sink):
        raise ConfigurationError(finding.message, hint=finding.hint)
