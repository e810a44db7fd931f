"""The catalog that this sink keeps in the target database: schema ``subscriber``.

Its tables and columns bear the names of PostgreSQL's own where they hold the same thing:

``pg_subscription``
    one row a subscription of ours. Its oid is drawn from the cluster's own counter, so that the gids
    ``pg_gid_<oid>_<xid>``, which are names in the whole cluster, never meet those of a native subscription.
``pg_subscription_rel``
    state of each table; ``srrelid`` is the target table's oid. ``srcopyattempt`` counts the copies begun.
``position``
    up to where the target has everything (``srrelid`` 0), or a table's own position while it catches up.
``prepared_transaction``
    written inside each prepared transaction: it becomes visible with COMMIT PREPARED and is then the proof of it.
    Inserted and never updated: a row that was updated under PREPARE TRANSACTION would stay locked until COMMIT PREPARED.
``copy_part``
    transaction id of each committed part of a copy that is under way: how to find its rows if they must be undone.
``version``
    which of the steps below were made.

Every table has a replica identity: the target may itself publish all its tables.

No foreign keys: their triggers do not fire under session_replication_role = replica.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from subscriber.errors import ConfigurationError, TargetError
from subscriber.sinks.postgres.errors import translated
from subscriber.sinks.postgres.locks import CATALOG_KEY

__all__ = ["VERSION", "ensure_catalog", "ensure_subscription", "require_name"]

_STEPS: Final = (
    """
    CREATE TABLE subscriber.pg_subscription (
        oid oid PRIMARY KEY,
        subname name NOT NULL UNIQUE,
        subenabled boolean NOT NULL DEFAULT true,
        subslotname name,
        subpublications text[] NOT NULL DEFAULT '{}',
        subtwophasestate "char" NOT NULL DEFAULT 'd' CHECK (subtwophasestate IN ('d', 'p', 'e')),
        subskiplsn pg_lsn NOT NULL DEFAULT '0/0'
    );
    CREATE TABLE subscriber.pg_subscription_rel (
        srsubid oid NOT NULL,
        srrelid oid NOT NULL,
        srsubstate "char" NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r')),
        srsublsn pg_lsn,
        srcopyattempt bigint NOT NULL DEFAULT 0,
        PRIMARY KEY (srsubid, srrelid)
    );
    CREATE TABLE subscriber."position" (
        srsubid oid NOT NULL,
        srrelid oid NOT NULL,
        slot_name text NOT NULL,
        system_identifier text NOT NULL,
        timeline integer NOT NULL,
        remote_lsn pg_lsn NOT NULL,
        PRIMARY KEY (srsubid, srrelid)
    ) WITH (fillfactor = 50);
    CREATE TABLE subscriber.prepared_transaction (
        srsubid oid NOT NULL,
        xid bigint NOT NULL,
        gid text NOT NULL,
        prepare_end_lsn pg_lsn NOT NULL,
        PRIMARY KEY (srsubid, gid)
    );
    CREATE TABLE subscriber.copy_part (
        srsubid oid NOT NULL,
        srrelid oid NOT NULL,
        xid xid NOT NULL
    );
    ALTER TABLE subscriber.copy_part REPLICA IDENTITY FULL;
    CREATE INDEX copy_part_index ON subscriber.copy_part (srsubid, srrelid);
    """,
)
"""Each takes the catalog one version further. Never changed, only added to."""

VERSION: Final = len(_STEPS)

# Not to_regclass: while one waits for the advisory lock, its cache does not learn what another session made.
_EXISTS: Final = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = 'subscriber' AND c.relname = 'version')
"""

_NAME_BYTES: Final = 63


async def ensure_catalog(connection: asyncpg.Connection[Any]) -> None:
    """Make the catalog or bring it to this version, in one transaction; two processes may do so at once.

    Raises:
        TargetError: no privilege, a read-only server, or a catalog of a later version of this program.
    """
    if await _version(connection) == VERSION:
        return
    with translated():
        async with connection.transaction():
            await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", CATALOG_KEY)
            version = await _version(connection)
            if version is None:
                if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'subscriber')"):
                    await connection.execute("CREATE SCHEMA subscriber")
                await connection.execute("CREATE TABLE subscriber.version (version integer PRIMARY KEY)")
                await connection.execute("INSERT INTO subscriber.version VALUES (0)")
                version = 0
            for step in _STEPS[version:]:
                await connection.execute(step)
            await connection.execute("UPDATE subscriber.version SET version = $1", VERSION)


async def _version(connection: asyncpg.Connection[Any]) -> int | None:
    with translated():
        if not await connection.fetchval(_EXISTS):
            return None
        version = await connection.fetchval("SELECT version FROM subscriber.version")
    if not isinstance(version, int):
        raise TargetError('table "subscriber.version" of the target is empty', hint="restore the schema subscriber from a backup")
    if version > VERSION:
        raise TargetError(
            f'schema "subscriber" of the target has version {version}, this program knows versions up to {VERSION}',
            hint="use the version of pg-subscriber that made it, or a later one",
        )
    return version


def require_name(name: str) -> None:
    """Refuse a subscription name that PostgreSQL would cut off.

    Raises:
        ConfigurationError: it is empty, too long, or holds a null character.
    """
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > _NAME_BYTES:
        shown = name.replace("\0", "?")
        raise ConfigurationError(f'subscription name "{shown}" is empty or longer than {_NAME_BYTES} bytes', hint="choose another name")


async def ensure_subscription(connection: asyncpg.Connection[Any], name: str) -> int:
    """Find the subscription's entry, or make it; return its oid.

    Raises:
        TargetError: no privilege.
    """
    find = "SELECT oid FROM subscriber.pg_subscription WHERE subname = $1"
    with translated():
        oid = await connection.fetchval(find, name)
        if oid is None:
            async with connection.transaction():
                await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", CATALOG_KEY)
                oid = await connection.fetchval(find, name)
                if oid is None:
                    # a large object is what SQL lets one draw an oid of the cluster's counter with
                    oid = await connection.fetchval("SELECT pg_catalog.lo_create(0)")
                    await connection.execute("SELECT pg_catalog.lo_unlink($1)", oid)
                    await connection.execute("INSERT INTO subscriber.pg_subscription (oid, subname) VALUES ($1, $2)", oid, name)
    return int(oid)
