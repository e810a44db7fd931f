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
    A second row, whose gid begins with ``received``, is visible from PREPARE to the end.
``copy_part``
    transaction id of each committed part of a copy that is under way: how to find its rows if they must be undone.
``worker``
    what the workers of a process tell of themselves, each about once a second; unlogged, and of worth only while the worker's lock is held.
``subscription_stats``
    counters, and the last error.
``pg_stat_subscription``, ``pg_stat_subscription_stats``, ``pg_stat_reset_subscription_stats(oid)``
    as PostgreSQL's. ``pid`` is that of the worker's session in the target.
``version``
    which of the steps below were made.

Everybody may read what PostgreSQL lets everybody read: not ``subconninfo``, which may hold a password.

Every table has a replica identity: the target may itself publish all its tables.

No foreign keys: their triggers do not fire under session_replication_role = replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import asyncpg

from subscriber.config import STORED, Option, SubscriptionOptions
from subscriber.errors import ConfigurationError, RelationError, SubscriptionChanged
from subscriber.sinks.postgres.errors import translated
from subscriber.sinks.postgres.integrity import broken_catalog, catalog_version
from subscriber.sinks.postgres.locks import CATALOG_KEY

__all__ = [
    "VERSION",
    "catalog_step",
    "ensure_catalog",
    "ensure_subscription",
    "insert_subscription",
    "option_cast",
    "require_name",
]

_STEPS: Final[Mapping[int, str]] = {
    1: """
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
    2: """
    ALTER TABLE subscriber.pg_subscription
        ADD subdbid oid,
        ADD subowner oid,
        ADD subconninfo text,
        ADD submade boolean NOT NULL DEFAULT true,
        ADD subgeneration bigint NOT NULL DEFAULT 0,
        ADD subrefresh boolean;
    UPDATE subscriber.pg_subscription SET
        subdbid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()),
        subowner = (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user);
    ALTER TABLE subscriber.pg_subscription ALTER subdbid SET NOT NULL, ALTER subowner SET NOT NULL;

    CREATE UNLOGGED TABLE subscriber.worker (
        subid oid NOT NULL,
        relid oid NOT NULL,
        lock_key bigint NOT NULL,
        worker_type text NOT NULL,
        received_lsn pg_lsn,
        applied_lsn pg_lsn,
        flushed_lsn pg_lsn,
        last_msg_send_time timestamptz,
        last_msg_receipt_time timestamptz,
        latest_end_lsn pg_lsn,
        latest_end_time timestamptz,
        transactions bigint,
        changes bigint,
        transactions_per_second float8,
        changes_per_second float8,
        copied_rows bigint,
        estimated_rows bigint,
        PRIMARY KEY (subid, relid)
    );
    CREATE TABLE subscriber.subscription_stats (
        subid oid PRIMARY KEY,
        apply_error_count bigint NOT NULL DEFAULT 0,
        sync_error_count bigint NOT NULL DEFAULT 0,
        confl_insert_exists bigint NOT NULL DEFAULT 0,
        confl_update_origin_differs bigint NOT NULL DEFAULT 0,
        confl_update_exists bigint NOT NULL DEFAULT 0,
        confl_update_missing bigint NOT NULL DEFAULT 0,
        confl_delete_origin_differs bigint NOT NULL DEFAULT 0,
        confl_delete_missing bigint NOT NULL DEFAULT 0,
        confl_multiple_unique_conflicts bigint NOT NULL DEFAULT 0,
        stats_reset timestamptz,
        last_error text,
        last_error_time timestamptz
    );
    INSERT INTO subscriber.subscription_stats (subid) SELECT oid FROM subscriber.pg_subscription;

    CREATE VIEW subscriber.pg_stat_subscription AS
    SELECT s.oid AS subid, s.subname, w.worker_type, w.pid, NULL::integer AS leader_pid, nullif(w.relid, 0::oid) AS relid,
           w.received_lsn, w.last_msg_send_time, w.last_msg_receipt_time, w.latest_end_lsn, w.latest_end_time
    FROM subscriber.pg_subscription s
    LEFT JOIN (
        SELECT l.pid, worker.*
        FROM subscriber.worker
        JOIN pg_catalog.pg_locks l
            ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
           AND l.classid = ((worker.lock_key >> 32) & 4294967295)::oid AND l.objid = (worker.lock_key & 4294967295)::oid
        JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = pg_catalog.current_database()
    ) w ON w.subid = s.oid;
    CREATE VIEW subscriber.pg_stat_subscription_stats AS
    SELECT s.oid AS subid, s.subname, t.apply_error_count, t.sync_error_count, t.confl_insert_exists, t.confl_update_origin_differs,
           t.confl_update_exists, t.confl_update_missing, t.confl_delete_origin_differs, t.confl_delete_missing,
           t.confl_multiple_unique_conflicts, t.stats_reset
    FROM subscriber.pg_subscription s JOIN subscriber.subscription_stats t ON t.subid = s.oid;
    CREATE FUNCTION subscriber.pg_stat_reset_subscription_stats(oid) RETURNS void LANGUAGE sql AS $$
        UPDATE subscriber.subscription_stats SET
            apply_error_count = 0, sync_error_count = 0, confl_insert_exists = 0, confl_update_origin_differs = 0,
            confl_update_exists = 0, confl_update_missing = 0, confl_delete_origin_differs = 0, confl_delete_missing = 0,
            confl_multiple_unique_conflicts = 0, stats_reset = pg_catalog.now()
        WHERE $1 IS NULL OR subid = $1
    $$;
    REVOKE EXECUTE ON FUNCTION subscriber.pg_stat_reset_subscription_stats(oid) FROM PUBLIC;

    GRANT USAGE ON SCHEMA subscriber TO PUBLIC;
    GRANT SELECT (oid, subdbid, subskiplsn, subname, subowner, subenabled, subtwophasestate, subslotname, subpublications, submade,
                  subgeneration, subrefresh)
        ON subscriber.pg_subscription TO PUBLIC;
    GRANT SELECT ON subscriber.pg_subscription_rel, subscriber."position", subscriber.worker, subscriber.subscription_stats,
                    subscriber.pg_stat_subscription, subscriber.pg_stat_subscription_stats, subscriber.version TO PUBLIC;
    """,
    3: """
    ALTER TABLE subscriber.worker ADD details text;
    """,
}
"""What takes the catalog to a version, besides the columns of parameters (:attr:`Option.catalog_version`). Never changed, only added to."""

VERSION: Final = max(*_STEPS, *(each.catalog_version for each in STORED.values()))

_SQL_TYPES: Final[Mapping[type, str]] = {bool: "boolean", int: "integer", float: "float8", str: "text"}

_INSERT: Final = """
INSERT INTO subscriber.pg_subscription (oid, subname, subdbid, subowner)
SELECT $1, $2, d.oid, r.oid FROM pg_catalog.pg_database d, pg_catalog.pg_roles r
WHERE d.datname = pg_catalog.current_database() AND r.rolname = current_user
"""


def option_cast(option: Option) -> str:
    """What casts a parameter of a statement to the type of an option's column."""
    return 'text::"char"' if option.codes else _SQL_TYPES[type(option.default)]


_SHOWN: Final = ", ".join([*(each.column for each in STORED.values()), "subowner"])
_VALUES: Final = ", ".join(
    [
        *(f"${number}::{option_cast(each)}" for number, each in enumerate(STORED.values(), 2)),
        "(SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user)",
    ]
)
_SHOW_OPTIONS: Final = f"""
UPDATE subscriber.pg_subscription SET ({_SHOWN}) = ROW ({_VALUES})
WHERE oid = $1 AND subconninfo IS NULL AND ({_SHOWN}) IS DISTINCT FROM ({_VALUES})
"""  # noqa: S608 (constants)

_NAME_BYTES: Final = 63


async def ensure_catalog(connection: asyncpg.Connection[Any]) -> None:
    """Make the catalog or bring it to this version, in one transaction; two processes may do so at once.

    Raises:
        TargetError: no privilege, a read-only server, a catalog that is broken or of a later version of this program.
    """
    if await catalog_version(connection, VERSION) == VERSION:
        return
    with translated():
        async with connection.transaction():
            await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", CATALOG_KEY)
            version = await catalog_version(connection, VERSION)
            if version is None:
                if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'subscriber')"):
                    await connection.execute("CREATE SCHEMA subscriber")
                await connection.execute("CREATE TABLE subscriber.version (version integer PRIMARY KEY)")
                await connection.execute("INSERT INTO subscriber.version VALUES (0)")
                version = 0
            for step in range(version + 1, VERSION + 1):
                await _take_step(connection, catalog_step(step))
            await connection.execute("UPDATE subscriber.version SET version = $1", VERSION)


def catalog_step(version: int, options: Iterable[Option] = tuple(STORED.values())) -> str:
    """SQL that takes the catalog to a version from the one before."""
    return _STEPS.get(version, "") + "".join(_add_column(each) for each in options if each.catalog_version == version)


def _add_column(option: Option) -> str:
    default = option.stored(option.default)
    words = ", ".join(f"'{word}'" for word in option.stored_words)
    return f"""
    ALTER TABLE subscriber.pg_subscription ADD {option.column} {option_cast(option).removeprefix("text::")} NOT NULL DEFAULT '{default}'
        {f"CHECK ({option.column} IN ({words}))" if option.codes else ""};
    GRANT SELECT ({option.column}) ON subscriber.pg_subscription TO PUBLIC;
    """


async def _take_step(connection: asyncpg.Connection[Any], step: str) -> None:
    try:
        with translated():
            await connection.execute(step)
    except RelationError as error:
        raise broken_catalog(f'schema "subscriber" of the target cannot be taken to version {VERSION}: {error}') from None


def require_name(name: str) -> None:
    """Refuse a subscription name that PostgreSQL would cut off.

    Raises:
        ConfigurationError: it is empty, too long, or holds a null character.
    """
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > _NAME_BYTES:
        shown = name.replace("\0", "?")
        raise ConfigurationError(f'subscription name "{shown}" is empty or longer than {_NAME_BYTES} bytes', hint="choose another name")


async def ensure_subscription(connection: asyncpg.Connection[Any], name: str, options: SubscriptionOptions, *, known: bool) -> int:
    """Find the subscription's entry, or make it; return its oid.

    An entry that its command line defines shows the parameters of the latest one.

    Args:
        connection: with the target.
        name: of the subscription.
        options: of whoever runs it.
        known: it was there, and is not made again: nobody would run the new one, and its name would be taken.

    Raises:
        SubscriptionChanged: it was known, and is gone.
        TargetError: no privilege.
    """
    find = "SELECT oid FROM subscriber.pg_subscription WHERE subname = $1"
    with translated():
        oid = await connection.fetchval(find, name)
        if oid is None:
            if known:
                raise SubscriptionChanged(
                    f'subscription "{name}" was dropped or renamed just now', hint="subscriber status lists the subscriptions that exist"
                )
            async with connection.transaction():
                await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", CATALOG_KEY)
                oid = await connection.fetchval(find, name)
                if oid is None:
                    oid = await insert_subscription(connection, name)
        await connection.execute(_SHOW_OPTIONS, oid, *(each.stored(getattr(options, name)) for name, each in STORED.items()))
    return int(oid)


async def insert_subscription(connection: asyncpg.Connection[Any], name: str) -> int:
    """Make a subscription's entry, in the transaction that is open and holds the catalog's lock; return its oid."""
    # a large object is what SQL lets one draw an oid of the cluster's counter with
    oid = int(await connection.fetchval("SELECT pg_catalog.lo_create(0)"))
    await connection.execute("SELECT pg_catalog.lo_unlink($1)", oid)
    await connection.execute(_INSERT, oid, name)
    await connection.execute("INSERT INTO subscriber.subscription_stats (subid) VALUES ($1)", oid)
    return oid
