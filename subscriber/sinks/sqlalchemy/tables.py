"""The catalog that this sink keeps in the target database, as SQLAlchemy's ``Table`` objects.

Its tables and columns bear the names that the PostgreSQL sink's catalog has, and PostgreSQL's own where they hold the same thing. Where
the database has schemas they lie in schema ``subscriber_sqlalchemy``; elsewhere in the URL's database, each name led by ``subscriber_``.

``version``
    one row: the catalog's version, what tells this target from all others, and the counter that oids are drawn from.
``pg_subscription``
    one row a subscription of ours. Its oid, and those of tables, are drawn from ``version.next_oid`` and never given twice.
``fence``
    one row a subscription: a number that grows with every writer that opens it. Whoever writes anything of the subscription locks that
    row first, shared with others of its own writer, and compares the number
    (:mod:`subscriber.sinks.sqlalchemy.fencing` says why nothing of an earlier writer comes through).
``pg_subscription_rel``
    state of each table. ``srrelid`` is drawn when the table is added; ``srnspname`` and ``srrelname`` are its name at the publisher.
    ``srcopy`` says how an unfinished copy is undone: ``d`` its rows went straight into the table, which was empty; ``s`` into
    the staging table.
``position``
    up to where the target has everything (``srrelid`` 0), or a table's own position while it catches up.
``prepared_transaction``, ``prepared_transaction_chunk``
    the publisher's prepared transactions, which wait here for their COMMIT PREPARED. One counts only if ``complete``.
``worker``
    what the workers of a process tell of themselves, each about once a second; of worth only while the writer's lock is held.
``subscription_stats``
    counters, and the last error.

LSNs are kept as PostgreSQL writes them (``16/B374D848``): the database compares nothing here but for equality. Times are seconds since
1970. No foreign keys: rows of one subscription are removed together, by us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, Integer, LargeBinary, MetaData, String, Table, Text, false, literal, true
from sqlalchemy.dialects import mysql

from subscriber.config import STORED, Option
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog_types import Flag, LsnText, Names, Seconds, Whole

__all__ = ["CATALOG_SCHEMA_NAME", "CATALOG_VERSION", "COUNTERS", "FIRST_OID", "PREFIX", "VERSION", "CatalogTables", "catalog_tables"]

VERSION: Final = max(2, *(each.catalog_version for each in STORED.values()))
"""Of the catalog. 2 added ``worker.details``; a later one the parameters of that :attr:`Option.catalog_version`."""

CATALOG_VERSION: Final = "catalog_version"
"""Key of a column's ``info``: the version that added it."""

CATALOG_SCHEMA_NAME: Final = "subscriber_sqlalchemy"
PREFIX: Final = "subscriber_"
FIRST_OID: Final = 16384
"""As PostgreSQL's FirstNormalObjectId."""

_SCHEMAS: Final = frozenset({"postgresql"})
# names are compared byte by byte, and rows are written in transactions
_OPTIONS: Final[Mapping[str, Any]] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
COUNTERS: Final = (
    "apply_error_count",
    "sync_error_count",
    "confl_insert_exists",
    "confl_update_origin_differs",
    "confl_update_exists",
    "confl_update_missing",
    "confl_delete_origin_differs",
    "confl_delete_missing",
    "confl_multiple_unique_conflicts",
)
"""Names both of pg_stat_subscription_stats and of ApplyStatistics."""


@dataclass(frozen=True, slots=True)
class CatalogTables:
    """The tables, for one way to name them.

    Attributes:
        metadata: all of them.
        schema: where they are, or None.
    """

    metadata: MetaData
    schema: str | None
    version: Table
    pg_subscription: Table
    fence: Table
    pg_subscription_rel: Table
    position: Table
    prepared_transaction: Table
    prepared_transaction_chunk: Table
    worker: Table
    subscription_stats: Table

    @property
    def of_subscription(self) -> tuple[tuple[Table, str], ...]:
        """All tables that hold rows of a subscription, each with the column of its oid; the subscription itself is the last."""
        return (
            (self.pg_subscription_rel, "srsubid"),
            (self.position, "srsubid"),
            (self.prepared_transaction_chunk, "srsubid"),
            (self.prepared_transaction, "srsubid"),
            (self.worker, "subid"),
            (self.subscription_stats, "subid"),
            (self.fence, "srsubid"),
            (self.pg_subscription, "oid"),
        )


def catalog_tables(dialect_name: str, options: Iterable[Option] = tuple(STORED.values())) -> CatalogTables:
    """Build the tables for a dialect.

    Args:
        dialect_name: SQLAlchemy's: ``sqlite``, ``mysql``, ``mariadb``, ``postgresql``, …
        options: the parameters that it keeps.
    """
    schema = CATALOG_SCHEMA_NAME if dialect_name in _SCHEMAS else None
    prefix = "" if schema else PREFIX
    metadata = MetaData(schema=schema)
    blob = LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")

    def table(name: str, *columns: Column[Any]) -> Table:
        made: Table = Table(prefix + name, metadata, *columns, **_OPTIONS)
        return made

    return CatalogTables(
        metadata=metadata,
        schema=schema,
        version=table(
            "version",
            Column("version", Integer, primary_key=True, autoincrement=False),
            Column("target_identifier", String(20), nullable=False),
            Column("next_oid", Whole, nullable=False),
        ),
        pg_subscription=table("pg_subscription", *_subscription_columns(options)),
        fence=table("fence", *_key("srsubid"), Column("token", Whole, nullable=False)),
        pg_subscription_rel=table(
            "pg_subscription_rel",
            *_key("srsubid", "srrelid"),
            Column("srnspname", String(63), nullable=False),
            Column("srrelname", String(63), nullable=False),
            Column("srsubstate", String(1), nullable=False),
            Column("srsublsn", LsnText),
            Column("srcopy", String(1)),
        ),
        position=table(
            "position",
            *_key("srsubid", "srrelid"),
            Column("slot_name", String(63), nullable=False),
            Column("system_identifier", String(20), nullable=False),
            Column("timeline", Whole, nullable=False),
            Column("remote_lsn", LsnText, nullable=False),
        ),
        prepared_transaction=table(
            "prepared_transaction",
            *_key("srsubid", "xid"),
            Column("gid", Text, nullable=False),
            Column("prepare_lsn", LsnText, nullable=False),
            Column("prepare_end_lsn", LsnText, nullable=False),
            Column("prepare_time", Whole, nullable=False),
            Column("origin_name", Text),
            Column("origin_lsn", LsnText),
            Column("prefixed", Flag, nullable=False),
            Column("changes", Whole, nullable=False),
            Column("size", Whole, nullable=False),
            Column("complete", Flag, nullable=False),
        ),
        prepared_transaction_chunk=table(
            "prepared_transaction_chunk",
            *_key("srsubid", "xid", "number"),
            Column("data", blob, nullable=False),
        ),
        worker=table("worker", *_worker_columns()),
        subscription_stats=table(
            "subscription_stats",
            *_key("subid"),
            *(Column(name, Whole, nullable=False, default=0) for name in COUNTERS),
            Column("stats_reset", Seconds),
            Column("last_error", Text),
            Column("last_error_time", Seconds),
        ),
    )


def _key(*names: str) -> tuple[Column[Any], ...]:
    return tuple(Column(name, Whole, primary_key=True, autoincrement=False) for name in names)


def _subscription_columns(options: Iterable[Option]) -> tuple[Column[Any], ...]:
    return (
        *_key("oid"),
        Column("subname", String(63), nullable=False, unique=True),
        Column("subenabled", Flag, nullable=False, default=True),
        Column("subslotname", String(63)),
        Column("subpublications", Names, nullable=False, default=()),
        Column("subtwophasestate", String(1), nullable=False, default="d"),
        Column("subskiplsn", LsnText, nullable=False, default=Lsn(0)),
        *(_option_column(each) for each in options),
        Column("subconninfo", Text),
        Column("submade", Flag, nullable=False, default=True),
        Column("subgeneration", Whole, nullable=False, default=0),
        Column("subrefresh", Flag),
    )


def _option_column(option: Option) -> Column[Any]:
    """The column that keeps a parameter of CREATE SUBSCRIPTION."""
    types: Mapping[type, Any] = {bool: Flag, int: Whole, float: Seconds, str: String(1 if option.codes else 20)}
    default = option.stored(option.default)
    # for rows that are there when the column is added
    given = (true() if default else false()) if isinstance(default, bool) else literal(default)
    info = {CATALOG_VERSION: option.catalog_version}
    return Column(option.column, types[type(option.default)], nullable=False, default=default, server_default=given, info=info)


def _worker_columns() -> tuple[Column[Any], ...]:
    return (
        *_key("subid", "relid"),
        Column("worker_type", String(40), nullable=False),
        Column("pid", Whole),
        Column("host", Text),
        Column("reported", Seconds),
        Column("received_lsn", LsnText),
        Column("applied_lsn", LsnText),
        Column("flushed_lsn", LsnText),
        Column("last_msg_send_time", Seconds),
        Column("last_msg_receipt_time", Seconds),
        Column("latest_end_lsn", LsnText),
        Column("latest_end_time", Seconds),
        Column("transactions", Whole),
        Column("changes", Whole),
        Column("transactions_per_second", Seconds),
        Column("changes_per_second", Seconds),
        Column("copied_rows", Whole),
        Column("estimated_rows", Whole),
        # MariaDB's TEXT holds 64 kB: too little for the names of some hundred tables that are left out
        Column("details", Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")),
    )
