"""The catalog that this sink keeps in the target database: schema ``subscriber``.

Tables and columns have PostgreSQL's names if they hold the same data as in PostgreSQL. :mod:`subscriber.catalog.model` describes the part
that all kinds of targets share.

``pg_subscription``
    One row per subscription of this program. Its oid comes from the cluster's own counter. So the gids ``pg_gid_<oid>_<xid>``, which are
    unique in the whole cluster, never collide with the gids of a native subscription. ``subtarget`` names the target that the row is for.
    It differs after the catalog was restored from a dump, or the server was upgraded (:mod:`.target_identity`).
``pg_subscription_rel``
    State of each table. ``srrelid`` is the oid of the target table, which follows a table that is renamed, and tells it from another one
    with its name. It is valid in the target that ``subtarget`` names. Elsewhere ``srnspname`` and ``srrelname`` find the table again.
    ``srmode``: whether its synchronization copies, reconciles or replaces rows (:class:`subscriber.interfaces.SyncMode`).
    ``srsyncxid`` is the transaction that ended its synchronization: the rows of the table from before count as the subscription's own.
    ``srcopyattempt`` counts the copies that were started. Of a table that is parked (state ``p``), ``srsublsn`` is the final LSN of the
    first transaction whose changes are left out, ``srerror`` and ``srerrortime`` say why and when.
``position``
    The position of the subscription (``srrelid`` 0), or of a table while it catches up.
``prepared_transaction``
    A row is inserted inside each prepared transaction. It becomes visible with COMMIT PREPARED, and then proves it. The row is never
    updated: a row that was updated before PREPARE TRANSACTION would stay locked until COMMIT PREPARED.
    A second row, whose gid begins with ``received``, is visible from PREPARE to the end.
``copy_part``
    Transaction id of each committed part of an unfinished copy. It finds the part's rows if the copy must be undone.
``worker``
    What each worker of a process reports, about once a second; unlogged. A row is valid only while the worker's lock is held.
``subscription_stats``
    Counters, and the last error.
``snapshot_request``, ``verification``, ``cutover``
    See :mod:`subscriber.catalog.model`.
``pg_stat_subscription``, ``pg_stat_subscription_stats``, ``pg_stat_reset_subscription_stats(oid)``
    As in PostgreSQL. ``pid`` is the process of the worker's session in the target.
``version``
    The version of the catalog.

All roles may read what PostgreSQL lets all roles read. Not included is ``subconninfo``, which may hold a password.

Every table has a replica identity, because the target may itself publish all its tables.

No foreign keys: their triggers do not fire under session_replication_role = replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from subscriber.catalog.schema_trust import DISTRUSTED, READABLE, trust_hint
from subscriber.catalog.store import CATALOG_KEY
from subscriber.config import STORED, Option
from subscriber.errors import TargetError
from subscriber.sinks.postgres.session.catalog_reader import CatalogSession
from subscriber.sinks.postgres.session.locks import lock_number
from subscriber.sinks.postgres.session.origins import Run, catalog_run
from subscriber.sinks.postgres.session.postgres_errors import CATALOG_HINT, translated

__all__ = [
    "IN_RECOVERY",
    "IN_RECOVERY_HINT",
    "VERSION",
    "add_column",
    "catalog_version",
    "ensure_catalog",
]

VERSION: Final = 1
IN_RECOVERY: Final = "the target is in recovery: it accepts no changes"
IN_RECOVERY_HINT: Final = (
    "connect to the primary (of several hosts in the connection string, target_session_attrs=read-write chooses it), or promote this server"
)

_CATALOG: Final = """
    CREATE TABLE subscriber.version (version integer PRIMARY KEY);
    CREATE TABLE subscriber.pg_subscription (
        oid oid PRIMARY KEY,
        subtarget text NOT NULL,
        subname name NOT NULL UNIQUE,
        subowner name NOT NULL,
        subenabled boolean NOT NULL DEFAULT true,
        subslotname name,
        subpublications text[] NOT NULL DEFAULT '{}',
        subtwophasestate "char" NOT NULL DEFAULT 'd' CHECK (subtwophasestate IN ('d', 'p', 'e')),
        subskiplsn pg_lsn NOT NULL DEFAULT '0/0',
        subconninfo text,
        submade boolean NOT NULL DEFAULT true,
        subgeneration bigint NOT NULL DEFAULT 0,
        subrefresh text
    );
    CREATE TABLE subscriber.pg_subscription_rel (
        srsubid oid NOT NULL,
        srrelid oid NOT NULL,
        srnspname name NOT NULL,
        srrelname name NOT NULL,
        srsubstate "char" NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r', 'p')),
        srsublsn pg_lsn,
        srmode "char" NOT NULL DEFAULT 'c' CHECK (srmode IN ('c', 'r', 'w')),
        srerror text,
        srerrortime timestamptz,
        srcolumns text,
        srcopyattempt bigint NOT NULL DEFAULT 0,
        srsyncxid bigint,
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
        details text,
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
    CREATE TABLE subscriber.snapshot_request (
        subid oid PRIMARY KEY,
        request text NOT NULL,
        state "char" NOT NULL,
        payload text,
        answer text
    );
    CREATE TABLE subscriber.verification (
        subid oid NOT NULL,
        nspname name NOT NULL,
        relname name NOT NULL,
        lsn pg_lsn NOT NULL,
        whole_lsn pg_lsn NOT NULL,
        verified_at timestamptz NOT NULL,
        row_count bigint NOT NULL,
        differences bigint NOT NULL,
        more boolean NOT NULL,
        seconds double precision NOT NULL,
        compared text NOT NULL,
        publisher_xmin bigint NOT NULL,
        target_xmin bigint NOT NULL,
        publisher_system text NOT NULL,
        target_system text NOT NULL,
        PRIMARY KEY (subid, nspname, relname)
    );
    CREATE TABLE subscriber.migration (
        subid oid NOT NULL,
        step text NOT NULL,
        began_at timestamptz NOT NULL,
        ended_at timestamptz NOT NULL,
        PRIMARY KEY (subid, step)
    );

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
    GRANT SELECT (oid, subtarget, subskiplsn, subname, subowner, subenabled, subtwophasestate, subslotname, subpublications, submade,
                  subgeneration, subrefresh)
        ON subscriber.pg_subscription TO PUBLIC;
    GRANT SELECT ON subscriber.pg_subscription_rel, subscriber."position", subscriber.worker, subscriber.subscription_stats,
                    subscriber.verification,
                    subscriber.pg_stat_subscription, subscriber.pg_stat_subscription_stats, subscriber.version TO PUBLIC;
"""

_SQL_TYPES: Final[Mapping[type, str]] = {bool: "boolean", int: "integer", float: "float8", str: "text"}

# reads the catalogs, not to_regclass: while a session waits for an advisory lock, its cache does not see tables that others create
_FOUND: Final = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'subscriber' AND c.relname = 'version'
)
"""


async def ensure_catalog(connection: CatalogSession) -> None:
    """Create the catalog in one transaction if it does not exist. Two processes may do so at the same time.

    Raises:
        TargetError: a missing privilege, a read-only server, or a catalog of another version.
    """
    run = catalog_run(connection)
    ((in_recovery,),) = await run("SELECT pg_catalog.pg_is_in_recovery()")
    if in_recovery:
        raise TargetError(IN_RECOVERY, hint=IN_RECOVERY_HINT, sqlstate="25006")
    await _require_trust(run)
    if await catalog_version(run) is not None:
        return
    with translated():
        async with connection.transaction():
            await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", lock_number(CATALOG_KEY))
            if await catalog_version(run) is None:
                if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'subscriber')"):
                    await connection.execute("CREATE SCHEMA subscriber")
                # another role may have made the schema just now
                await _require_trust(run)
                await connection.execute(_CATALOG + "".join(map(add_column, STORED.values())))
                await connection.execute("INSERT INTO subscriber.version VALUES ($1)", VERSION)


async def _require_trust(run: Run) -> None:
    for what, owner in await run(DISTRUSTED):
        raise TargetError(f'{what} of the target belongs to role "{owner}", which is not trusted', hint=trust_hint(owner), sqlstate="42501")


def add_column(option: Option) -> str:
    """SQL that adds the column of a parameter."""
    default = option.stored(option.default)
    words = ", ".join(f"'{word}'" for word in option.stored_words)
    sql_type = '"char"' if option.codes else _SQL_TYPES[type(option.default)]
    return f"""
    ALTER TABLE subscriber.pg_subscription ADD {option.column} {sql_type} NOT NULL DEFAULT '{default}'
        {f"CHECK ({option.column} IN ({words}))" if option.codes else ""};
    GRANT SELECT ({option.column}) ON subscriber.pg_subscription TO PUBLIC;
    """


async def catalog_version(run: Run) -> int | None:
    """The version of the catalog, which is :data:`VERSION`; None: there is no catalog. ``run`` queries the target.

    Raises:
        TargetError: the catalog has another version or is broken, or the role may not read it.
    """
    ((found,),) = await run(_FOUND)
    if not found:
        return None
    for (what,) in await run(READABLE):
        raise TargetError(f"{what} of the target is not the table that this program makes", hint=CATALOG_HINT, sqlstate="42501")
    version: int | None
    ((version,),) = await run("SELECT max(version) FROM subscriber.version")
    if version is None:
        raise TargetError('table "subscriber.version" of the target is empty', hint=CATALOG_HINT)
    if version != VERSION:
        raise TargetError(
            f'schema "subscriber" of the target has version {version}, but this program needs version {VERSION}',
            hint="use the version of pg-subscriber that created it",
        )
    return version
